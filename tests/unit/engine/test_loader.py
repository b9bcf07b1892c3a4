"""Loading: every defect of a checkpoint is refused by name, and nothing big is copied."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoint import INDEX, Checkpoint, CheckpointError
from headrace.engine.config import ConfigError
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import PRESETS, make_checkpoint, write_checkpoint
from headrace.kv.hashing import BlockHasher


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_checkpoint("w16", 1, tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good, tmp_path):
    return shutil.copytree(good, tmp_path / "checkpoint")


def shard_of(path, name):
    return path / json.loads((path / INDEX).read_text())["weight_map"][name]


def rewrite(path, name, change):
    """Replace tensor `name` by `change(tensor)`, or drop it when that is None, keeping index and shard consistent."""
    index = json.loads((path / INDEX).read_text())
    file = path / index["weight_map"].get(name, next(iter(index["weight_map"].values())))
    tensors = load_file(file)
    value = change(tensors.pop(name, None))
    index["weight_map"].pop(name, None)
    if value is not None:
        tensors[name] = value
        index["weight_map"][name] = file.name
    save_file(tensors, file)
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("layers.3.attn.wkv.weight", lambda t: None, r"layers.3.attn.wkv.weight \[32, 64\] is missing \(1 of"),
        ("layers.2.ffn.experts.5.w1.scale", lambda t: None, "layers.2.ffn.experts.5.w1.scale .* is missing"),
        ("layers.9.attn.wkv.weight", lambda t: torch.zeros(2), "layers.9.attn.wkv.weight is not part of this model"),
        ("mtp.0.main_norm.weight", lambda t: torch.zeros(2), "declares no draft"),
        ("vision.norm.weight", lambda t: torch.zeros(2), "no vision_config"),
        ("norm.weight", lambda t: t[:-1], r"norm.weight has shape \[63\]; config.json says \[64\]"),
        ("norm.weight", lambda t: t.float(), "norm.weight is F32; expected BF16"),
        (
            "layers.0.attn.wq_a.weight",
            lambda t: t.float().bfloat16(),
            "layers.0.attn.wq_a.weight is BF16; expected F8_E4M3",
        ),
        ("layers.1.ffn.experts.0.w2.weight", lambda t: t.view(torch.uint8), "is U8; expected I8"),
        (
            "layers.0.attn.attn_sink",
            lambda t: t.fill_(float("nan")),
            "layers.0.attn.attn_sink holds values that are not finite",
        ),
    ],
)
def test_wrong_tensors_are_refused_by_name(path, name, change, message):
    rewrite(path, name, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(path)


def test_ignored_copies_and_prefixed_names(path):
    want = load_model(path).logits(torch.ones(1, 64))
    rewrite(path, "mtp.0.embed.weight", lambda t: torch.zeros(2))
    index = json.loads((path / INDEX).read_text())
    for file in {path / f for f in index["weight_map"].values()}:
        save_file({f"model.{name}": t for name, t in load_file(file).items()}, file)
    index["weight_map"] = {f"model.{name}": file for name, file in index["weight_map"].items()}
    (path / INDEX).write_text(json.dumps(index))
    assert torch.equal(load_model(path).logits(torch.ones(1, 64)), want)


def test_a_truncated_shard(path):
    file = shard_of(path, "layers.7.attn.wo_b.weight")
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(CheckpointError, match=rf"{file.name} is truncated: .* ends at byte"):
        load_model(path)
    file.write_bytes(content[:200])
    with pytest.raises(CheckpointError, match="is truncated: 200 bytes, but its header alone says"):
        load_model(path)
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="is truncated: 0 bytes"):
        load_model(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="does not exist; copy the whole checkpoint"):
        load_model(path)


def test_a_header_or_index_that_lies(path):
    file = shard_of(path, "norm.weight")
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"dtype":"BF16","shape":[64]', b'"dtype":"BF16","shape":[65]', 1))
    with pytest.raises(CheckpointError, match=r"BF16 \[65\] needs 130 bytes, the header gives 128"):
        load_model(path)
    file.write_bytes(content[:8] + b"?" + content[9:])
    with pytest.raises(CheckpointError, match="has a header that is not a safetensors one"):
        load_model(path)
    file.write_bytes(content[:8] + b"\xff" + content[9:])
    with pytest.raises(CheckpointError, match=r"\(byte 0 is not UTF-8\)") as caught:
        load_model(path)
    assert len(str(caught.value)) < 400, "the damaged header is not part of the message"
    file.write_bytes(content)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = file.name
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="places ghost.weight in .*, which does not hold it"):
        load_model(path)
    (path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load_model(path)
    (path / INDEX).unlink()
    with pytest.raises(CheckpointError, match="has neither"):
        load_model(path)


def test_config_and_tokenizer_of_another_checkpoint(path):
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["q_lora_rank"] = 48
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"wq_a.weight has shape \[32, 64\]; config.json says \[48, 64\]"):
        load_model(path)
    config["text_config"]["q_lora_rank"] = 32
    config["text_config"]["engram_compressed_vocab_size"] = 99092
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="this tokenizer does not belong to this checkpoint"):
        load_model(path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="tokenizer.json is not a tokenizer"):
        load_model(path)
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer.json does not exist"):
        load_model(path)


def test_not_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not one that the engine runs on"):
        load_model(tmp_path, device="xpu")


def test_the_digest_covers_weights_config_and_tokenizer(good, path, tmp_path):
    digest = Checkpoint(good).digest()
    assert Checkpoint(path).digest() == digest == load_model(good).checkpoint_digest
    assert Checkpoint(make_checkpoint("w16", 2, tmp_path / "other")).digest() != digest
    for name in ("config.json", "tokenizer.json"):
        text = (path / name).read_text()
        (path / name).write_text(text + " ")
        assert Checkpoint(path).digest() != digest
        (path / name).write_text(text)
    file = shard_of(path, "head.weight")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert Checkpoint(path).digest() != digest


def test_decoded_weights_equal_the_formats_definition(good):
    """FP8: one power of two per 32x32 block; FP4: low nibble is the even column, one power of two per row and 32
    columns."""
    checkpoint, model = Checkpoint(good), load_model(good)
    weight = checkpoint.tensor("layers.0.attn.wq_b.weight").float().numpy()
    scale = 2.0 ** (checkpoint.tensor("layers.0.attn.wq_b.scale").view(torch.uint8).numpy().astype(np.float64) - 127)
    got = model.layers[0].attn.wq_b.weight.numpy()
    for row, column in ((0, 0), (31, 31), (32, 0), (127, 17)):
        assert got[row, column] == weight[row, column] * scale[row // 32, column // 32]
    packed = checkpoint.tensor("layers.2.ffn.experts.3.w1.weight").view(torch.uint8).numpy()
    scale = 2.0 ** (checkpoint.tensor("layers.2.ffn.experts.3.w1.scale").view(torch.uint8).numpy().astype(np.float64) - 127)
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    got = model.layers[2].ffn.w_in[0, 3].numpy()
    for row, column in ((0, 0), (0, 1), (5, 33), (31, 63)):
        nibble = packed[row, column // 2] >> (4 * (column % 2)) & 15
        value = levels[nibble & 7] * (-1 if nibble & 8 else 1)
        assert got[row, column] == value * scale[row, column // 32]


def test_engram_tables_and_embeddings_stay_in_the_file(good):
    model = load_model(good)
    names = [name for name, _ in model.named_parameters()]
    assert not any("engram.embed" in name for name in names)
    assert model.embed.weight.dtype == torch.bfloat16
    checkpoint = Checkpoint(good)
    rows = np.array([0, 7, 3, 7])
    table = checkpoint.tensor("layers.1.engram.embed.weight").float()
    scale = 2.0 ** (checkpoint.tensor("layers.1.engram.embed.scale").view(torch.uint8).double() - 127)
    want = (table.unflatten(1, (-1, 32)) * scale.unsqueeze(-1)).flatten(1).float()
    assert torch.equal(model.layers[1].engram.read_rows(rows), want[torch.from_numpy(rows)])


def test_draft_and_vision_tensors_are_checked_when_declared(tmp_path):
    draft = {
        "num_nextn_predict_layers": 2, "dspark_target_layer_ids": [6, 7], "dspark_markov_rank": 16,
        "dspark_n_routed_experts": 4, "dspark_noise_token_id": 259,
        "compress_ratios": [*PRESETS["w16"]["compress_ratios"], 0, 0],
    }  # fmt: skip
    vision = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    path = write_checkpoint(PRESETS["w16"] | draft, 0, tmp_path, vision=vision)
    load_model(path)
    rewrite(path, "aligner.w1.bias", lambda t: t[:-1])
    with pytest.raises(CheckpointError, match="aligner.w1.bias has shape"):
        load_model(path)
    rewrite(path, "mtp.1.markov_head.embed.weight", lambda t: None)
    with pytest.raises(CheckpointError, match="mtp.1.markov_head.embed.weight .* is missing"):
        load_model(path)


def test_bf16_weights(good):
    """The compute dtype is a choice at load; it costs accuracy, not correctness."""
    from headrace.engine.batch import Segment
    from headrace.engine.cache import KVPool

    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(good, kv_store="fp32", numerics="exact", dtype=dtype)
        states = model.new_states(1)
        hidden = model.forward([Segment(0, 0, list(range(10, 60)), [], [0], outputs=range(50))], KVPool(model.spec, 1), states)
        assert hidden.dtype == dtype
        logits.append(model.logits(hidden))
    assert logits[1].dtype == torch.float32
    correlation = torch.corrcoef(torch.stack([x.flatten() for x in logits]))[0, 1]
    assert correlation > 0.98


def test_two_checkpoints_of_one_shape_share_no_block_hash(tmp_path):
    """Same layout, other weights: cached KV of one would be wrong KV for the other."""
    ids, hashes = list(range(3, 131)), []
    for seed in (0, 1):
        make_checkpoint("w16", seed, tmp_path / str(seed))
        model = load_model(tmp_path / str(seed))
        hashes.append(BlockHasher(model.spec.layout_id, b"tenant").hashes(ids))
    assert hashes[0] != hashes[1]
