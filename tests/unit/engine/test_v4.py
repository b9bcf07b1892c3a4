"""The V4 family: what config.json may say, what a checkpoint must hold, records and states, and that no way of cutting,
batching, caching or handing over a sequence changes a bit. Parity with another implementation is tests/parity/test_v4.py."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine import api
from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.checkpoint import INDEX, CheckpointError
from headrace.engine.config import ConfigError, parse_config
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import PRESETS, make_checkpoint, write_checkpoint
from headrace.engine.models.v4.cache import LatentCodec, RotatedCodec, cache_spec, codecs, hadamard
from headrace.engine.models.v41.cache import paged_entries
from headrace.kernels.kv_layouts import PagedKV

FLASH = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", vocab_size=129280, hidden_size=4096,
    moe_intermediate_size=2048, num_hidden_layers=43, num_attention_heads=64, num_key_value_heads=1, head_dim=512,
    qk_rope_head_dim=64, q_lora_rank=1024, o_lora_rank=1024, o_groups=8, n_routed_experts=256, n_shared_experts=1,
    num_experts_per_tok=6, sliding_window=128, compress_ratios=[0, 0, *[4, 128] * 20, 4, 0], num_hash_layers=3,
    index_n_heads=64, index_head_dim=128, index_topk=512, num_nextn_predict_layers=1, rms_norm_eps=1e-6, rope_theta=10000,
    compress_rope_theta=160000, routed_scaling_factor=1.5, swiglu_limit=10.0, scoring_func="sqrtsoftplus",
    rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
    quantization_config=dict(quant_method="fp8", fmt="e4m3", scale_fmt="ue8m0", weight_block_size=[128, 128]),
    expert_dtype="fp4",
)  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint("v4-w16", 3, tmp_path_factory.mktemp("v4-w16"))


@pytest.fixture(scope="module")
def invariant(checkpoint):
    return load_model(checkpoint, numerics="exact", batch_invariant=True)


# ------------------------------------------------------------------ config


def test_the_release_and_transformers_spell_the_same_model():
    released = parse_config(FLASH)
    assert released.compress_ratios == (0, 0, *(4, 128) * 20, 4) and released.quantized
    assert [released.selects(layer) for layer in range(4)] == [False, False, True, False]
    assert released.mlp_layer_types[:4] == ("hash_moe",) * 3 + ("moe",)
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    left_out = ("compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "compress_rope_theta")
    other = {k: v for k, v in FLASH.items() if k not in left_out} | dict(
        layer_types=[kinds[r] for r in FLASH["compress_ratios"][:43]], mlp_layer_types=["hash_moe"] * 3 + ["moe"] * 40,
        partial_rotary_factor=0.125, compress_rates={kinds[4]: 4, kinds[128]: 128},
        rope_parameters=dict(main=dict(rope_type="default", rope_theta=10000.0),
                             compress=FLASH["rope_scaling"] | dict(rope_theta=160000.0, attention_factor=1.0)),
    )  # fmt: skip
    assert parse_config(other) == released


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(compress_ratios=[0, 3] * 22), r"compress_ratios\[1\] is 3; V4 has 0, 4, 128"),
        (dict(compress_ratios=[0, 4]), "needs an entry for each of 43 layers"),
        (dict(compress_ratios=None), "neither layer_types nor compress_ratios"),
        (dict(compress_rate_csa=128), "both kinds have ratio 128"),
        (dict(compress_rate_hca=48, compress_ratios=[0] * 43), "hca_ratio is 48; a block of 128 tokens"),
        (dict(mlp_layer_types=["dense"] * 43), r"mlp_layer_types\[0\] is 'dense'; V4 has hash_moe, moe"),
        (dict(rope_scaling=dict(rope_type="linear")), "rope_scaling.rope_type is 'linear'"),
        (dict(scoring_func="sigmoid"), "scoring_func is 'sigmoid'; V4 has 'sqrtsoftplus'"),
        (dict(o_groups=7), "num_attention_heads 64 is not a multiple of o_groups 7"),
        (dict(qk_rope_head_dim=130), "must be even and at most 128"),
        (dict(num_experts_per_tok=300), "num_experts_per_tok 300 exceeds n_routed_experts 256"),
        (dict(eos_token_id=129280), "eos_token_id 129280"),
        (dict(quantization_config=dict(quant_method="fp8", weight_block_size=[32, 32])), r"weight_block_size is \[32, 32\]"),
        (dict(hidden_size="big"), "hidden_size is 'big', not an integer"),
    ],
)
def test_refusals_name_the_key_and_the_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(FLASH | changes)


# ------------------------------------------------------------------ cache


def test_the_cache_of_the_release():
    """584-byte latents and 68-byte index keys: 21 CSA layers every 4 tokens, 20 HCA layers every 128."""
    spec = cache_spec(parse_config(FLASH), "quantized", "exact", False)
    assert spec.block_bytes == 21 * 32 * 584 + 20 * (584 + 56) + 21 * 32 * 68  # single entries are padded to 64 bytes
    assert (spec.keep_rows, spec.replay_rows) == (0, 43 * 127)
    assert cache_spec(parse_config(FLASH), "quantized", "bounded", False).replay_rows == 256
    pending = 2 * 4 * (21 * 7 * 2 * (512 + 128) + 20 * 127 * 512)
    assert spec.state_bytes == pytest.approx(43 * 127 * 584 + pending, abs=100)
    ways = [(store, numerics, same) for store in ("quantized", "fp32") for numerics in ("exact", "bounded") for same in (0, 1)]
    assert len({cache_spec(parse_config(FLASH), *way).layout_id for way in ways}) == 8


def test_records_keep_what_rounding_says():
    values = torch.randn(300, 512) * torch.logspace(-4, 3, 300)[:, None]
    latent, index = LatentCodec(512, 64), RotatedCodec(128)
    record = latent.encode(values)
    assert record.shape == (300, 584) and index.encode(values[:, :128]).shape == (300, 68)
    assert torch.equal(latent.decode(record), latent.round(values))
    assert torch.equal(latent.decode(latent.encode(latent.round(values))), latent.round(values))
    assert torch.equal(latent.round(values)[:, 448:], values[:, 448:].bfloat16().float())
    assert (latent.round(values)[:, :448] - values[:, :448]).abs().amax(1).lt(values[:, :448].abs().amax(1) / 16).all()
    assert torch.equal(index.decode(index.encode(values[:, :128])), index.round(values[:, :128]))
    matrix = hadamard(torch.eye(128))  # symmetric and its own inverse: rotated queries and keys keep their product
    assert torch.equal(matrix, matrix.T) and torch.allclose(matrix @ matrix, torch.eye(128), atol=1e-5)
    assert torch.equal(matrix.abs(), torch.full((128, 128), 128**-0.5))


def test_blocks_are_the_kernels_layouts():
    """What the model writes is what `headrace.kernels` reads as `v4_fp8` and `index_fp4`, and the model reads it back."""
    config = parse_config(FLASH | dict(num_hidden_layers=5))
    spec, kinds = cache_spec(config, "quantized", "exact", False), codecs(config, "quantized")
    kv = KVPool(spec, 3)
    entries, groups = paged_entries(kv, kinds), {group.name: group for group in spec.groups}
    for name, layout, dim in (("main.2", "v4_fp8", 512), ("main.3", "v4_fp8", 512), ("index.4", "index_fp4", 128)):
        group = groups[name]
        per_block = 128 // group.tokens_per_entry
        count = 2 * per_block
        number, table = torch.arange(count), torch.tensor([2, 0])
        values = torch.randn(count, dim) * torch.logspace(-3, 2, count)[:, None]
        block, place = table[number // per_block], number % per_block
        entries[name].write(block, place, values)
        stored = PagedKV(kv.data, layout, per_block, spec.block_bytes, group.offset, dim).read(block * per_block + place)
        assert torch.equal(stored, (kinds.index if dim == 128 else kinds.main).round(values))
        assert torch.equal(entries[name].read(block, place), stored)
        assert torch.equal(entries[name].read_blocks(table[None])[0], stored)
    assert not kv.data[1].any()


def test_states_travel_at_any_position_and_drafts_leave_no_trace(invariant):
    """A state packed in one slot continues in another; rows that are taken back change no later bit."""
    ids = random.Random(1).choices(range(3, 270), k=300)
    kv, states = KVPool(invariant.spec, 4), invariant.new_states(3)

    def rows(slot, start, stop):
        segment = Segment(slot, start, ids[start:stop], (), [0, 1, 2], outputs=range(start, stop))
        return invariant.logits(invariant.forward([segment], kv, states))

    expected = torch.cat([rows(0, 0, 131), rows(0, 131, 300)])
    for position in (3, 4, 17, 127, 128, 133, 256, 259):
        states.reset(0)
        rows(0, 0, position)
        state = states.pack(0, position)
        assert len(state) <= invariant.spec.state_bytes
        states.reset(1)
        states.unpack(1, position, memoryview(state))
        assert states.pack(1, position) == state
        wrong = Segment(1, position, [5] * 12, (), [0, 1, 2])
        invariant.forward([wrong], kv, states)
        states.rewind(1, position)
        assert states.pack(1, position) == state
        states.copy(1, 2)
        for slot in (1, 2):
            assert torch.equal(rows(slot, position, 300), expected[position:])
    with pytest.raises(ValueError, match="cannot step back 13 rows to 287"):
        states.rewind(1, 287)
    for data, at, message in (
        (state, 258, "is of position 259, expected 258"),
        (state[:40], 259, "shorter than its header"),
        (b"x" * len(state), 259, "not a packed state"),
        (state[:-1], 259, "bytes after its header"),
        (state[:-1] + bytes([state[-1] ^ 1]), 259, "does not match its digest"),
    ):
        with pytest.raises(ValueError, match=message):
            states.unpack(1, at, memoryview(data))
    with pytest.raises(ValueError, match="this model has v4-quantized-exact"):
        states.unpack(1, 259, memoryview(state[:36] + bytes(16) + state[52:]))


# ------------------------------------------------------------------ loading


def test_a_wrong_tensor_is_refused_by_name(checkpoint, tmp_path):
    tensors = {}
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())

    def load(**changes):
        changed = {k: v for k, v in (tensors | changes).items() if v is not None}
        save_file(changed, tmp_path / "model.safetensors")
        return load_model(tmp_path)

    def refused(message, **changes):
        with pytest.raises(CheckpointError, match=message):
            load(**changes)

    ape, table = "layers.2.attn.compressor.ape", "layers.0.ffn.gate.tid2eid"
    refused(r"compressor.ape \[4, 64\] is missing \(1 of", **{ape: None})
    refused(r"compressor.ape has shape \[4, 32\]; config.json says \[4, 64\]", **{ape: torch.zeros(4, 32)})
    refused(r"tid2eid names experts 0 to 9; there are 8", **{table: tensors[table] + (tensors[table] == 7) * 2})
    refused("layers.2.ffn.gate.tid2eid is not part of this model", **{"layers.2.ffn.gate.tid2eid": tensors[table].clone()})
    refused("wq_a.scale .* is missing", **{"layers.0.attn.wq_a.scale": None})
    refused("norm.weight holds values that are not finite", **{"norm.weight": torch.full((64,), torch.nan).bfloat16()})
    assert load(**{"mtp.0.enorm.weight": torch.ones(64)}).vocab_size == 281  # a draft layer is left out
    with pytest.raises(ValueError, match="keep_rows is 28"):
        load_model(tmp_path, keep_rows=28)
    with pytest.raises(ValueError, match="kv_store is 'int4'"):
        load_model(tmp_path, kv_store="int4")


def test_projections_may_be_plain_experts_fp8_and_a_token_may_name_an_expert_twice(checkpoint, tmp_path):
    """As base checkpoints and other exporters leave them: the same values in another format give the same rows."""
    tensors, table = {}, "layers.1.ffn.gate.tid2eid"
    for file in checkpoint.glob("*.safetensors"):
        tensors |= load_file(file)
    name, plain = "layers.2.ffn.experts.3.w1", "layers.2.attn.wq_a"
    tensors[table][:, 1] = tensors[table][:, 0]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    model = load_model(tmp_path, kv_store="fp32")
    expert = model.layers[2].ffn.w_in[0, 3]
    tensors[f"{name}.weight"] = (expert * 64).to(torch.float8_e4m3fn)  # MXFP4 times a power of two fits
    tensors[f"{name}.scale"] = torch.full((1, 1), 1 / 64)
    tensors[f"{plain}.weight"] = model.layers[2].attn.wq_a.weight.bfloat16()
    del tensors[f"{plain}.scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    other = load_model(tmp_path, kv_store="fp32")
    ids = random.Random(2).choices(range(3, 270), k=150)
    one, two = (run(m, [ids], lambda left: left)[0] for m in (model, other))
    assert torch.equal(one, two)
    assert torch.allclose(run(model, [ids], lambda _: 1)[0], one, atol=1e-3)


# ------------------------------------------------------------------ every way, the same bits


def run(model, prompts, choose, rng=None):
    """Logits of all rows of each prompt; `choose(rows left)` gives a chunk's length; with `rng` prompts pause at random."""
    kv, states = KVPool(model.spec, 16), model.new_states(len(prompts))
    free, at, rows = list(range(16)), [0] * len(prompts), [[] for _ in prompts]
    if rng:
        rng.shuffle(free)
    tables = [[free.pop() for _ in range(-(-len(p) // 128))] for p in prompts]
    while any(position < len(p) for position, p in zip(at, prompts, strict=True)):
        segments, who = [], []
        for i, prompt in enumerate(prompts):
            left = len(prompt) - at[i]
            if left and (not rng or rng.random() < 0.7):
                stop = at[i] + min(left, choose(left))
                segments.append(Segment(i, at[i], prompt[at[i] : stop], (), tables[i], outputs=range(at[i], stop)))
                who.append(i)
                at[i] = stop
        if segments:
            logits = model.logits(model.forward(segments, kv, states))
            for i, part in zip(who, logits.split([len(s.ids) for s in segments]), strict=True):
                rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


@pytest.mark.parametrize("hca_ratio", [128, 2])  # 2: contexts with more entries than one step of widths
def test_a_rows_bits_depend_on_its_sequence_alone(invariant, hca_ratio, tmp_path):
    if hca_ratio != 128:
        keys = PRESETS["v4-w16"] | {"compress_rate_hca": hca_ratio, "compress_ratios": [0, 0, 4, hca_ratio, 4, hca_ratio]}
        invariant = load_model(write_checkpoint(keys, 3, tmp_path), numerics="exact", batch_invariant=True)
    rng = random.Random(3)
    prompts = [rng.choices(range(3, 270), k=n) for n in (3, 129, 270, 200, 64)]
    alone = [run(invariant, [prompt], lambda _: 40)[0] for prompt in prompts]
    mixed = run(invariant, prompts, lambda left: rng.choice((1, 2, 17, 64, 150, left)), rng)
    for mine, theirs in zip(alone, mixed, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(7, 0, [1], (), [0]), "state slot 7 is not one of 3"),
        (Segment(0, 5, [], (), [0]), "a segment without rows at position 5"),
        (Segment(0, 127, [1, 2], (), [0]), "129 tokens need 2 blocks"),
        (Segment(0, 4, [1, 2], (), [0], outputs=(3,)), r"output 3 is not a row \[4, 6\)"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(invariant, segment, message):
    with pytest.raises(ValueError, match=message):
        invariant.forward([segment], KVPool(invariant.spec, 1), invariant.new_states(3))


# ------------------------------------------------------------------ through the engine


def test_hits_replays_chunks_and_a_hand_off_give_the_same_tokens_and_logprobs(invariant):
    rng = random.Random(1)
    base = rng.choices(range(3, 270), k=400)
    requests = [
        api.EngineRequest(
            f"r{i}", base[:shared] + rng.choices(range(3, 270), k=n), [],
            api.SamplingParams(temperature=i % 2, seed=i, max_tokens=6, logprobs=2, ignore_eos=True),
        )
        for i, (shared, n) in enumerate(((0, 30), (256, 1), (256, 0), (300, 90), (400, 112)))
    ]  # fmt: skip

    def engine(**config):
        return EngineCore(invariant, api.EngineConfig(**{"num_blocks": 64, "max_num_batched_tokens": 512} | config))

    def said(answers):
        assert not any(answer.error for answer in answers), answers
        return [[(c.ids, c.logprobs) for c in answer.choices] for answer in answers]

    alone = said([collect(engine(prefix_caching=False), [request])[0] for request in requests])
    for snapshots, replayed in ((1 << 24, 0), (0, 90)):  # a hit restores a state, or replays rows
        warm = engine(snapshot_bytes=snapshots)
        assert said(collect(warm, requests)) == alone
        again = collect(warm, requests)
        assert said(again) == alone
        assert [a.cached_tokens for a in again] == [0, 256, 128, 384, 384]  # a prompt's last row always runs
        assert [a.replay_rows for a in again][1:] == [replayed] * 4
    assert said(collect(engine(chunk_tokens=(37, 129, 5), max_num_seqs=2), requests)) == alone

    prefill, decode = engine(role="prefill"), engine(role="decode")
    for request, expected in zip(requests, alone, strict=True):
        prefill.submit(request)
        done = next(event for event in steps(prefill) if isinstance(event, api.PrefillDone))
        reservation = decode.reserve(request.request, [], len(request.ids))
        for source, target in zip(done.block_table, reservation.blocks, strict=True):
            decode.runner.kv.data[target] = prefill.runner.kv.data[source]
        decode.admit(reservation, done.handoff, request)
        tokens = [event for event in steps(decode) if isinstance(event, api.Tokens)]
        assert [token for event in tokens for token in event.ids] == expected[0][0]


def test_preemption_and_several_choices_change_nothing(invariant):
    """Three sequences of two choices grow into memory for half of them: some leave, and come back where they were."""
    rng = random.Random(6)
    params = [api.SamplingParams(temperature=1.0, seed=i, max_tokens=135, n=2, logprobs=0, ignore_eos=True) for i in range(3)]
    requests = [api.EngineRequest(f"r{i}", rng.choices(range(3, 270), k=125 + i), [], p) for i, p in enumerate(params)]
    said = {}
    for blocks in (64, 9):
        engine = EngineCore(invariant, api.EngineConfig(num_blocks=blocks, max_num_seqs=6, max_num_batched_tokens=512))
        said[blocks] = [[(c.ids, c.logprobs) for c in answer.choices] for answer in collect(engine, requests)]
        assert (engine.ledger.counters["preemptions"] > 0) == (blocks == 9)
    assert said[64] == said[9]


def test_class_bounded_replays_two_windows(checkpoint):
    model = load_model(checkpoint)
    engine = EngineCore(model, api.EngineConfig(num_blocks=64, max_num_batched_tokens=512, snapshot_bytes=0))
    ids = random.Random(4).choices(range(3, 270), k=300)
    params = api.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    first, second = (collect(engine, [api.EngineRequest(name, ids, [], params)])[0] for name in "ab")
    assert (first.cached_tokens, first.replay_rows) == (0, 0) and len(first.choices[0].ids) == 4
    assert (second.cached_tokens, second.replay_rows) == (256, 32) and len(second.choices[0].ids) == 4


def steps(engine):
    for _ in range(100):
        if not engine.has_work():
            return
        yield from engine.step() or ()


def test_the_checkpoint_is_the_released_layout(checkpoint):
    names = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    assert {"layers.0.ffn.gate.tid2eid", "layers.2.attn.indexer.compressor.ape", "layers.3.attn.compressor.wgate.weight",
            "hc_head_fn", "layers.2.ffn.gate.bias", "layers.0.ffn.experts.7.w2.scale"} <= names.keys()  # fmt: skip
    assert not {"layers.0.ffn.gate.bias", "layers.3.attn.indexer.wq_b.weight", "layers.1.attn.compressor.ape"} & names.keys()
