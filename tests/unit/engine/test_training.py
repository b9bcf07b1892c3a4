"""Training computes what serving computes: same logits without a cache, gradients everywhere, and a way back to disk."""

import json

import pytest
import torch
from tokenizers import Tokenizer

from headrace.engine.batch import ImageRows, Segment
from headrace.engine.cache import KVPool
from headrace.engine.config import parse_config
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import (
    PRESETS,
    config_json,
    make_checkpoint,
    save_checkpoint,
    small_tokenizer_json,
)
from headrace.engine.models.v41.cache import Codec, Codecs
from headrace.engine.models.v41.engram import compressed_ids
from headrace.engine.models.v41.schema import checkpoint_schema
from headrace.engine.models.v41.training import TrainingModel, indexer_loss, initialize, released_values
from headrace.engine.models.vision.loader import load_encoder


@pytest.fixture(scope="module", params=["w16", "nano"])
def path(request, tmp_path_factory):
    return make_checkpoint(request.param, 3, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def w16(tmp_path_factory):
    return make_checkpoint("w16", 3, tmp_path_factory.mktemp("w16"))


def tokens(seed, *shape):
    return torch.randint(3, 259, shape, generator=torch.Generator().manual_seed(seed))


def serve(model, ids, floor=0):
    kv, states = KVPool(model.spec, 4), model.new_states(1)
    segment = Segment(0, 0, ids.tolist(), [], range(4), decoder_floor=floor, outputs=range(floor, len(ids)))
    return model.logits(model.forward([segment], kv, states))


def row_errors(got, want):
    return (got - want).abs().amax(-1) / want.abs().max()


@pytest.mark.parametrize("length", [1, 15, 16, 33, 100, 257])
def test_logits_are_those_of_the_served_model(path, length):
    served = load_model(path, kv_store="fp32", numerics="exact")
    model = TrainingModel.of(served, quantize_cache=False)
    ids = tokens(length, 2, length)
    with torch.no_grad():
        got = model(ids).logits
    for row in range(2):
        errors = row_errors(got[row], serve(served, ids[row]))
        wide = "AVX512" in torch.backends.cpu.get_cpu_capability()  # without it one row of 100 was 0.02 apart
        assert errors.median() < 1e-5 and errors.max() < (1e-5 if wide else 0.04)


class Scaled(Codec):
    """Stands for rounding, without its jumps: what is stored is a share of the value."""

    def __init__(self, dim, share):
        super().__init__(dim)
        self.share = share

    def encode(self, values):
        return super().encode(values * self.share)

    def round(self, values):
        return values * self.share


@pytest.mark.parametrize("length", [33, 257])
def test_rounding_happens_where_the_store_rounds(path, length):
    """Each kind of value exactly once, at the same place. That a codec rounds as it stores is tested with the codecs."""
    served = load_model(path, kv_store="fp32", numerics="exact")
    model, ids = TrainingModel.of(served, quantize_cache=False), tokens(length, 1, length)
    head, index = served.config.head_dim, served.config.index_head_dim
    model.codecs = served.codecs = Codecs(window=Scaled(head, 0.9), main=Scaled(head, 0.8), index=Scaled(index, 0.7))
    with torch.no_grad():
        assert row_errors(model(ids).logits[0], serve(served, ids[0])).max() < 1e-5


def test_with_fake_quantisation_logits_are_those_of_the_quantised_store(path):
    """A sum in another order may round one value to its neighbour, and then every row that sees it moves: the served
    model differs from itself in that way when a prompt is cut otherwise. Most rows escape it, and no row moves far."""
    served = load_model(path, numerics="exact")
    model, ids = TrainingModel.of(served), tokens(1, 6, 100)
    with torch.no_grad():
        got, plain = model(ids).logits, TrainingModel.of(served, quantize_cache=False)(ids).logits
    want = torch.stack([serve(served, row) for row in ids])
    errors = row_errors(got, want)
    assert (errors < 1e-5).float().mean() > 0.75 and errors.max() < 1e-3, errors.amax(-1)
    assert row_errors(plain, want).median() > 1e-3  # not because rounding does nothing


def test_a_decoder_floor_is_that_of_a_bounded_prompt(w16):
    served = load_model(w16, kv_store="fp32", numerics="bounded", keep_rows=28)
    model = TrainingModel.of(served, quantize_cache=False)
    ids = tokens(1, 1, 130)
    with torch.no_grad():
        got = model(ids, decoder_floor=torch.tensor([102])).logits[0, 102:]
        exact = model(ids).logits[0, 102:]
    want = serve(served, ids[0], 102)
    assert row_errors(got, want).max() < 1e-5 < row_errors(exact, want).max()


def test_packed_documents_do_not_see_each_other(w16):
    model = TrainingModel.of(load_model(w16), quantize_cache=False)
    one, two = tokens(2, 1, 64), tokens(3, 1, 87)
    documents = torch.cat([torch.zeros(1, 64), torch.ones(1, 87)], dim=1).long()
    with torch.no_grad():
        got = model(torch.cat([one, two], dim=1), documents=documents).logits
        want = torch.cat([model(one).logits, model(two).logits], dim=1)
    assert row_errors(got, want).max() < 1e-5


def test_every_parameter_learns(w16):
    model = TrainingModel.of(load_model(w16))
    ids = tokens(4, 2, 130)
    out = model(ids, extras=("index", "router", "taps"))
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    indexer = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert all(".indexer." in name or name.endswith((".bias", ".bias_vl")) for name in indexer), indexer
    indexer_loss(out, model.config).backward()
    missing = {name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())}
    assert not missing
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert out.router.keys() == set(range(8)) and out.router[0][1].shape == (260, 2)


def test_gradients_are_the_slope(w16):
    """Central differences along the gradient. No selection and no routing changes on the way."""
    model = TrainingModel.of(load_model(w16), quantize_cache=False)
    ids = tokens(5, 2, 15)
    steps = {  # share of the weight's norm: large enough for fp32, too small to route another way
        "layers.1.attn.compressor.wgate.weight": 1e-4,
        "layers.0.attn.wkv.weight": 1e-4,
        "layers.4.attn.attn_sink": 3e-3,
        "layers.2.hc_attn_fn": 1e-4,
        "layers.6.ffn.gate.weight": 3e-4,
        "layers.1.engram.wkv.weight": 3e-5,
    }

    def loss():
        out = model(ids, extras=("router",))
        return out.logits.double().square().mean(), [chosen.sort(-1).values for _, chosen in out.router.values()]

    loss()[0].backward()
    for name, share in steps.items():
        parameter = model.get_parameter(name)
        slope, middle = parameter.grad.norm(), parameter.detach().clone()
        step = share * middle.norm()
        with torch.no_grad():
            parameter.add_(step * parameter.grad / slope)
            above, routes = loss()
            parameter.copy_(middle - step * parameter.grad / slope)
            below, same = loss()
            parameter.copy_(middle)
        assert all(map(torch.equal, routes, same))
        assert abs((above - below) / (2 * step) / slope - 1) < 0.05, name


def test_the_indexer_learns_what_attention_looks_at(w16):
    model = TrainingModel.of(load_model(w16))
    ids = tokens(6, 2, 100)
    indexer = [p for name, p in model.named_parameters() if ".indexer." in name]
    optimizer = torch.optim.Adam(indexer, 1e-2)
    losses = []
    for _ in range(8):
        loss = indexer_loss(model(ids, extras=("index",)), model.config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0], losses


def test_recomputing_activations_changes_nothing(w16):
    served = load_model(w16)
    ids, gradients = tokens(7, 1, 50), []
    for recompute in (False, True):
        model = TrainingModel.of(served, recompute=recompute)
        model(ids).logits.square().mean().backward()
        gradients.append(model.layers[0].ffn.w_in.grad)
    assert torch.equal(*gradients)


def test_bf16_activations_with_fp32_weights(w16):
    served = load_model(w16, kv_store="fp32")
    ids = tokens(8, 1, 60)
    wide = TrainingModel.of(served, quantize_cache=False)
    narrow = TrainingModel.of(served, dtype=torch.bfloat16)
    out = narrow(ids)
    assert out.hidden.dtype == torch.bfloat16 and out.logits.dtype == torch.float32
    out.logits.square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in narrow.parameters())
    with torch.no_grad():
        assert row_errors(out.logits, wide(ids).logits).median() < 0.2


def test_draft_blocks_are_the_steps_of_the_served_draft(tmp_path):
    """Many anchors at once, also near the start, against one step each; then its weights travel as the others do."""
    served = load_model(make_checkpoint("w16-draft", 3, tmp_path / "a"), kv_store="fp32", numerics="exact")
    model, ids, anchors = TrainingModel.of(served, quantize_cache=False), tokens(12, 2, 100), [[0, 9, 60], [1, 17, 94]]
    with torch.no_grad():
        taps = model(ids, extras=("taps",)).taps
        got = model.draft(ids, taps, torch.tensor(anchors))
    for row, (sequence, position) in enumerate((s, p) for s in range(2) for p in anchors[s]):
        line = ids[sequence].tolist()
        kv, states = KVPool(served.spec, 1), served.new_states(1)
        if position:
            served.forward([Segment(0, 0, line[:position], [], [0])], kv, states)
        follow = torch.tensor(line[position + 1 : position + 6])
        want = served.draft([0], [line[position]], [position], states, lambda place, _, f=follow: f[place : place + 1])
        for part in ("base", "logits", "confidence_logits"):
            error = (getattr(got, part)[row] - getattr(want, part)[0]).abs().max() / getattr(want, part).abs().max()
            assert error < 1e-5, (part, position, error)
        assert torch.equal(got.tokens[row], follow)
    data = json.loads((tmp_path / "a" / "config.json").read_text())
    save_checkpoint(released_values(model), data, (tmp_path / "a" / "tokenizer.json").read_text(), tmp_path / "b")
    again = load_model(tmp_path / "b", kv_store="fp32", numerics="exact")
    for name, value in served.named_parameters():
        assert torch.equal(value, again.get_parameter(name)), name  # what FP8 and FP4 keep, they keep again


def test_packed_drafts_see_their_document_only(tmp_path):
    model = TrainingModel.of(load_model(make_checkpoint("w16-draft", 3, tmp_path)), quantize_cache=False)
    one, two = tokens(2, 1, 64), tokens(3, 1, 30)
    both, documents = torch.cat([one, two], dim=1), torch.cat([torch.zeros(1, 64), torch.ones(1, 30)], dim=1).long()
    with torch.no_grad():
        taps = model(both, documents=documents, extras=("taps",)).taps
        got = model.draft(both, taps, torch.tensor([[50, 70]]), documents)
        want = [model.draft(x, model(x, extras=("taps",)).taps, torch.tensor([[p]])) for x, p in ((one, 50), (two, 6))]
    for row in range(2):
        assert row_errors(got.logits[row], want[row].logits[0]).max() < 1e-5


def test_the_draft_learns_without_the_target(tmp_path):
    model = TrainingModel.of(load_model(make_checkpoint("w16-draft", 3, tmp_path)))
    ids = tokens(13, 2, 80)
    with torch.no_grad():
        taps = model(ids, extras=("taps",)).taps
    drafts = model.draft(ids, taps, torch.tensor([[5, 40], [20, 70]]))
    loss = torch.nn.functional.cross_entropy(drafts.logits.flatten(0, 1), drafts.tokens.flatten())
    (loss + drafts.confidence_logits.square().mean()).backward()
    for name, parameter in model.named_parameters():
        learned = parameter.grad is not None and bool(parameter.grad.any())
        want = name.startswith("mtp.") and parameter.requires_grad or name in ("embed.weight", "head.weight")
        assert learned == want, name


def test_no_operation_is_bound_to_a_device(tmp_path):
    """Tensors without values, on a device of their own: mixing in a tensor of the CPU, or asking for a value, fails."""
    served = load_model(make_checkpoint("w16-draft", 3, tmp_path))
    model = TrainingModel.of(served, dtype=torch.bfloat16, recompute=True).to("meta")
    ids, floor = (torch.zeros(*shape, dtype=torch.int64, device="meta") for shape in ((2, 100), (2,)))
    out = model(ids, documents=ids, decoder_floor=floor, extras=("index", "router", "taps"))
    drafts = model.draft(ids, out.taps, torch.zeros(2, 3, dtype=torch.int64, device="meta"), ids)
    (out.logits.sum() + indexer_loss(out, model.config) + drafts.logits.sum()).backward()
    assert out.logits.shape == (2, 100, model.config.vocab_size) and out.logits.is_meta


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_device_computes_the_same(tmp_path, dtype):
    served = load_model(make_checkpoint("w16-draft", 3, tmp_path), kv_store="fp32")
    ids, anchors = tokens(14, 2, 130), torch.tensor([[20, 90], [3, 124]])
    results = []
    for device in ("cpu", "cuda"):
        model = TrainingModel.of(served, quantize_cache=False, dtype=dtype).to(device)
        out = model(ids.to(device), extras=("taps", "index"))
        drafts = model.draft(ids.to(device), out.taps, anchors.to(device))
        (out.logits.square().mean() + drafts.logits.square().mean() + indexer_loss(out, model.config)).backward()
        gradients = torch.cat([p.grad.flatten().cpu() for p in model.parameters() if p.grad is not None])
        assert gradients.isfinite().all()
        results.append((out.logits.detach().cpu(), drafts.logits.detach().cpu().flatten(0, 1)))
    for one, two in zip(*results, strict=True):
        assert row_errors(two, one).median() < (1e-4 if dtype == torch.float32 else 0.1)


def test_images_are_seen_as_the_served_model_sees_them(tmp_path):
    """Two sequences, one of them with two images: embeddings, n-grams that stop at a span, routing by `bias_vl`."""
    path = make_checkpoint("nano-vision", 3, tmp_path)
    served, encoder = load_model(path, kv_store="fp32", numerics="exact"), load_encoder(path)
    model = TrainingModel.of(served, encoder, quantize_cache=False)
    pixels = torch.randint(0, 256, (2, 84, 126, 3), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    span = encoder.tokens(encoder.grid(126, 84))
    ids = tokens(15, 2, 80)
    places = (4, 40)
    for at in places:
        ids[1, at : at + span] = served.image_token_id
    with torch.no_grad():
        got = model(ids, images=pixels).logits
        blind = model(ids).logits[1, places[0] :]
    parts = [
        ImageRows(at, at + span, encoded.float().numpy().tobytes(), "float32")
        for at, encoded in zip(places, encoder.encode(list(pixels)), strict=True)
    ]
    for row, images in enumerate(([], parts)):
        kv, states = KVPool(served.spec, 2), served.new_states(1)
        segment = Segment(0, 0, ids[row].tolist(), [], range(2), outputs=range(80), images=images)
        want = served.logits(served.forward([segment], kv, states))
        assert row_errors(got[row], want).max() < 1e-5
    assert row_errors(blind, want[places[0] :]).median() > 1e-2
    model(ids, images=pixels).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.image_encoder.parameters())


def test_unknown_extras_are_named(w16):
    with pytest.raises(ValueError, match=r"\['atlas'\] are unknown; there are taps, index, router"):
        TrainingModel.of(load_model(w16))(tokens(1, 1, 4), extras=("atlas",))


# ------------------------------------------------------------------ from nothing to disk and back


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("preset", ["w16", "nano"])
def test_weights_travel_from_random_to_the_released_layout_and_back(preset, quantized, tmp_path):
    tokenizer = json.dumps(small_tokenizer_json())
    data = config_json(PRESETS[preset], Tokenizer.from_str(tokenizer))
    if not quantized:
        del data["quantization_config"]
    config = parse_config(data)
    model = TrainingModel(config, compressed_ids(Tokenizer.from_str(tokenizer)), quantize_cache=False)
    initialize(model, 11)
    with torch.no_grad():
        for parameter in model.parameters():  # so that BF16 tensors are kept exactly
            parameter.copy_(parameter.bfloat16())
    save_checkpoint(released_values(model), data, tokenizer, tmp_path)
    served = load_model(tmp_path, kv_store="fp32", numerics="exact")
    back = TrainingModel.of(served, quantize_cache=False)
    stored = dict(released_values(back))
    schema = checkpoint_schema(config)
    for name, value in released_values(model):
        if not quantized or schema[name].kind in ("bf16", "f32"):
            assert torch.equal(stored[name], value), name
        else:
            step = {"fp4": 0.5, "fp8": 0.07, "fp8_rows": 0.07}[schema[name].kind]
            assert (stored[name] - value).abs().max() <= step * value.abs().max(), name
    ids = tokens(9, 1, 90)
    with torch.no_grad():
        want, got = model(ids).logits[0], serve(served, ids[0])
        assert row_errors(back(ids).logits[0], got).max() < 1e-5
    if quantized:
        assert 1e-4 < row_errors(got, want).median() < 0.3
    else:
        assert row_errors(got, want).max() < 1e-5


def test_initial_weights_are_reproducible_and_sane():
    tokenizer = Tokenizer.from_str(json.dumps(small_tokenizer_json()))
    config = parse_config(config_json(PRESETS["nano"], tokenizer))
    models = [TrainingModel(config, compressed_ids(tokenizer)) for _ in range(3)]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        initialize(model, seed)
    ids = tokens(10, 1, 80)
    with torch.no_grad():
        one, same, other = (model(ids).logits for model in models)
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert 0.3 < one.std() < 3


def test_a_checkpoint_with_a_hole_is_refused(tmp_path):
    tokenizer = json.dumps(small_tokenizer_json())
    data = config_json(PRESETS["w16"], Tokenizer.from_str(tokenizer))
    with pytest.raises(ValueError, match=r"embed.weight is missing \(\d+ tensors are\)"):
        save_checkpoint([], data, tokenizer, tmp_path)
    with pytest.raises(ValueError, match=r"norm.weight has shape \[2\]; config.json says \[64\]"):
        save_checkpoint([("norm.weight", torch.zeros(2))], data, tokenizer, tmp_path)
