"""The DSpark draft against NeMo-AutoModel 0.7.0, in fp32 with the cache quantisers off on both sides.

Target and draft weights travel from NeMo under their released names. The oracle's taps are taken where its layers hand
their streams to the attention, after Engram, so their place is compared too; layer 3 has an Engram and is an encoder
layer. NeMo's confidence head reads the normed hidden vector; the released one reads it before the norm, which is
compared with NeMo's head on NeMo's own unnormed vector.
"""

import json
import math
import os

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import PRESETS, config_json, small_tokenizer_json

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

# max|a - b| / max|b|. A CPU with AMX adds fp32 in another order than others: 1.4e-5 was seen.
TOLERANCE = 2e-5 if torch.cpu._is_amx_tile_supported() else 1e-5
TOKENS = 150
# The oracle always has an image encoder.
VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_image_tokens": 64,
}


@pytest.fixture(scope="module")
def nemo():
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    return pytest.importorskip("nemo_automodel.components.models.deepseek_v41", reason="the oracle is not installed")


class Oracle:
    def __init__(self):
        from nemo_automodel.components.models.common import BackendConfig
        from nemo_automodel.components.models.deepseek_v41 import attention, dspark
        from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
        from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
        from transformers import PreTrainedTokenizerFast

        attention.quantize_cache = dspark.quantize_cache = lambda values, **_: values
        tokenizer = Tokenizer.from_str(json.dumps(small_tokenizer_json()))
        self.data = config_json(dict(PRESETS["w16-draft"]), tokenizer) | {"vision_config": VISION}
        del self.data["quantization_config"]  # plain weights
        self.data["dtype"] = self.data["text_config"]["dtype"] = "float32"
        config = DeepseekV41Config(**{key: value for key, value in self.data.items() if key != "model_type"})
        backend = BackendConfig(
            attn="eager", linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch",
            rope_fusion=False, gate_precision="float32", enable_hf_state_dict_adapter=True,
        )  # fmt: skip
        self.target = DeepseekV41ForCausalLM(
            config, backend=backend, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        )
        self.target.initialize_weights(dtype=torch.float32)
        self.draft = dspark.DeepseekV41DSparkModel(
            config.text_config, backend, num_anchors=1, enable_confidence_head=True
        )
        self.propose = dspark.DeepseekV41DSparkBackbone.forward
        torch.manual_seed(7)
        for model in (self.target, self.draft):
            randomize(model.eval())
        self.taps, self.raw = {}, None
        layers = self.target.model.layers
        for index in config.text_config.dspark_target_layer_ids:
            layer = layers[str(index)] if isinstance(layers, torch.nn.ModuleDict) else layers[index]
            layer.attn_hc.register_forward_pre_hook(
                lambda module, args, index=index: self.taps.__setitem__(index, args[0].mean(2))
            )
        self.draft.mtp[-1].norm.register_forward_pre_hook(lambda module, args: setattr(self, "raw", args[0]))
        self.config = config.text_config

    def tensors(self):
        exported = self.target.state_dict_adapter.to_hf(self.target.state_dict())
        draft = self.draft.state_dict_adapter.to_hf(self.draft.state_dict())
        exported |= {name: value for name, value in draft.items() if name.startswith("mtp.")}
        return {name: value.float().contiguous() for name, value in exported.items()}

    @torch.no_grad()
    def step(self, ids, position, previous):
        """The target over all of `ids`, then the block whose anchor is ids[position]; row i is corrected by previous[i].
        -> (base [5, V], corrected [5, V], confidence logits on the normed and on the raw hidden vector)."""
        self.target(torch.tensor([ids]))
        features = torch.cat([self.taps[layer] for layer in self.config.dspark_target_layer_ids], dim=-1)
        anchor = torch.tensor([[position]])
        block = [ids[position], *[self.config.dspark_noise_token_id] * (self.config.dspark_block_size - 1)]
        mask = self.draft.build_attention_mask(anchor, torch.ones_like(anchor, dtype=torch.bool), len(ids), torch.float32)
        out = self.propose(
            self.draft,
            self.target.model.embed_tokens(torch.tensor([block])),
            features,
            position_ids=self.draft.build_position_ids(anchor, len(ids)),
            attention_mask=mask,
            previous_token_ids=torch.tensor([previous]),
        )
        base = self.target.lm_head(out.normalized_hidden_states)[0]
        last = self.draft.mtp[-1]
        _, embedded = last.markov_head(torch.tensor([previous]))
        raw = last.confidence_head(self.raw, embedded)
        return base, base + out.transition_logits[0], out.confidence_pred[0], raw[0]


@torch.no_grad()
def randomize(model):
    for value in (*model.parameters(), *model.buffers()):
        if not value.is_floating_point() or value.numel() == 1:
            continue
        if value.std() == 0:  # norms, sinks, biases, bases, scales
            value.add_(0.3 * torch.randn_like(value))
        else:
            value.normal_(0, 1 / math.sqrt(value.shape[-1]))


@pytest.fixture(scope="module")
def oracle(nemo):
    return Oracle()


@pytest.fixture(scope="module")
def checkpoint(oracle, tmp_path_factory):
    def write(**text):
        path = tmp_path_factory.mktemp("dspark")
        save_file(tensors, path / "model.safetensors")
        data = oracle.data | {"text_config": oracle.data["text_config"] | text}
        (path / "config.json").write_text(json.dumps(data))
        (path / "tokenizer.json").write_text(json.dumps(small_tokenizer_json()))
        return path

    tensors = oracle.tensors()
    return write


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_model(checkpoint(), kv_store="fp32", numerics="exact")


def tokens(seed, count=TOKENS):
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Memory:
    def __init__(self, model, slots=4, ring=None):
        self.model, self.kv, self.states = model, KVPool(model.spec, 2 * slots), model.new_states(slots, ring)

    def feed(self, slot, ids, start, stop, **floors):
        segment = Segment(slot, start, ids[start:stop], ids[max(0, start - 3) : start], (2 * slot, 2 * slot + 1), **floors)
        self.model.forward([segment], self.kv, self.states)

    def draft(self, *steps):
        """steps: (slot, ids, position); greedy."""
        slots, sequences, positions = zip(*steps, strict=True)
        anchors = [ids[position] for ids, position in zip(sequences, positions, strict=True)]
        return self.model.draft(slots, anchors, positions, self.states, lambda place, logits: logits.argmax(-1))


def assert_close(got, want):
    assert got.shape == want.shape
    error = ((got - want).abs().max() / want.abs().max()).item()
    assert error <= TOLERANCE, error


def assert_same_step(oracle, drafts, row, ids, position, confidence=3):
    previous = [ids[position], *drafts.tokens[row, :-1].tolist()]
    want = oracle.step(ids, position, previous)
    assert_close(drafts.base[row], want[0])
    assert_close(drafts.logits[row], want[1])
    assert_close(drafts.confidence_logits[row], want[confidence])
    assert torch.equal(drafts.tokens[row], want[1].argmax(-1))


@pytest.mark.parametrize("position", [0, 1, 9, 15, 16, 17, 64, 149])
def test_a_step_behind_a_prompt(oracle, model, position):
    """Also with fewer rows than a window, or none."""
    ids, memory = tokens(1), Memory(model)
    if position:
        memory.feed(0, ids, 0, position)
    assert_same_step(oracle, memory.draft((0, ids, position)), 0, ids, position)


def test_confidence_on_the_normed_hidden_vector_is_a_switch(oracle, checkpoint, model):
    ids = tokens(2)
    normed = Memory(load_model(checkpoint(dspark_confidence_normed=True), kv_store="fp32", numerics="exact"))
    raw = Memory(model)
    for memory in (normed, raw):
        memory.feed(0, ids, 0, 90)
    drafts, others = normed.draft((0, ids, 90)), raw.draft((0, ids, 90))
    assert_same_step(oracle, drafts, 0, ids, 90, confidence=2)
    assert torch.equal(drafts.logits, others.logits)
    assert (drafts.confidence_logits - others.confidence_logits).abs().max() > 0.1


def test_a_batch_of_steps_after_chunks_and_decode_rows(oracle, model):
    memory, prompts = Memory(model), [tokens(10 + slot) for slot in range(3)]
    for slot, sizes in enumerate([(60, 40, 1, 1), (1, 1, 29), (147, 1)]):
        start = 0
        for size in sizes:
            memory.feed(slot, prompts[slot], start, start + size)
            start += size
    steps = [(2, prompts[2], 148), (0, prompts[0], 102), (1, prompts[1], 31)]
    drafts = memory.draft(*steps)
    for row, (_, ids, position) in enumerate(steps):
        assert_same_step(oracle, drafts, row, ids, position)


def test_the_choice_of_a_token_reaches_the_next_place(oracle, model):
    """`choose` may sample; the Markov head and confidence follow what it took."""
    ids, memory, seen = tokens(3), Memory(model), []

    def choose(place, logits):
        seen.append(place)
        return torch.full((1,), 40 + place)

    memory.feed(0, ids, 0, 50)
    drafts = model.draft([0], [ids[50]], [50], memory.states, choose)
    _, want, _, confidence = oracle.step(ids, 50, [ids[50], 40, 41, 42, 43])
    assert seen == [0, 1, 2, 3, 4] and drafts.tokens.tolist() == [[40, 41, 42, 43, 44]]
    assert_close(drafts.logits[0], want)
    assert_close(drafts.confidence_logits[0], confidence)


@pytest.mark.parametrize("position", [7, 16, 100, 131])
def test_draft_rings_travel_with_the_state(oracle, model, position):
    ids, here, there = tokens(4), Memory(model), Memory(model, ring=16)
    here.feed(0, ids, 0, position)
    there.feed(3, tokens(5), 0, 40)  # the slot had another tenant
    there.states.unpack(3, position, memoryview(here.states.pack(0, position)))
    assert_same_step(oracle, there.draft((3, ids, position)), 0, ids, position)


def test_a_verified_block_that_is_rejected_leaves_no_trace(oracle, model):
    """The target ran on anchor and five wrong drafts; the next block begins behind the first of them."""
    ids, memory = tokens(6), Memory(model)
    memory.feed(0, ids, 0, 100)
    memory.feed(0, ids[:101] + tokens(7, 5), 100, 106)
    assert_same_step(oracle, memory.draft((0, ids, 101)), 0, ids, 101)
