"""The draft beside the served model: the same bits however a sequence was computed, and what a state says of it. Values
against an independent implementation are in tests/parity/test_dspark.py."""

import pytest
import torch

from headrace.engine.batch import Segment
from headrace.engine.cache import KVPool
from headrace.engine.config import ConfigError
from headrace.engine.loader import load_model
from headrace.engine.make_checkpoint import PRESETS, make_checkpoint, write_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint("w16-draft", 3, tmp_path_factory.mktemp("w16-draft"))


@pytest.fixture(scope="module")
def model(path):
    return load_model(path, numerics="exact", batch_invariant=True)


def tokens(seed, count):
    return torch.randint(3, 259, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Memory:
    def __init__(self, model, ring=None):
        self.model, self.kv, self.states = model, KVPool(model.spec, 16), model.new_states(4, ring)

    def feed(self, slot, ids, *bounds, table=(0, 1, 2), **floors):
        for start, stop in zip(bounds, bounds[1:], strict=False):
            segment = Segment(slot, start, ids[start:stop], ids[max(0, start - 3) : start], table, **floors)
            self.model.forward([segment], self.kv, self.states)
        return self

    def draft(self, *steps):
        slots, sequences, positions = zip(*steps, strict=True)
        anchors = [ids[position] for ids, position in zip(sequences, positions, strict=True)]
        return self.model.draft(slots, anchors, positions, self.states, lambda place, logits: logits.argmax(-1))


def assert_same_bits(got, want):
    assert all(map(torch.equal, got, want))


def test_chunks_and_company_do_not_change_a_bit(model):
    one, two, three = tokens(1, 300), tokens(2, 90), tokens(3, 40)
    want = Memory(model).feed(0, one, 0, 299).draft((0, one, 299))
    memory = Memory(model).feed(0, one, 0, 100, 101, 231, 299)
    memory.feed(1, two, 0, 88, table=[5]).feed(2, three, 0, 3, 4, 5, table=[6])
    drafts = memory.draft((2, three, 5), (0, one, 299), (1, two, 88))
    assert_same_bits((part[1:2] for part in drafts), want)
    assert drafts.tokens.shape == drafts.confidence_logits.shape == (3, 5)
    assert drafts.base.shape == drafts.logits.shape == (3, 5, model.vocab_size)


def test_a_state_brings_the_draft_along(model):
    ids = tokens(4, 202)
    here, there = Memory(model, ring=40).feed(2, ids, 0, 201), Memory(model).feed(0, tokens(5, 60), 0, 60, table=[7])
    there.states.unpack(0, 201, memoryview(here.states.pack(2, 201)))
    assert_same_bits(there.draft((0, ids, 201)), here.draft((2, ids, 201)))
    here.states.copy(2, 3)
    assert_same_bits(here.draft((3, ids, 201)), there.draft((0, ids, 201)))


@pytest.mark.parametrize("ends", [256, 257])
def test_a_replay_rebuilds_the_draft(model, ends):
    """Exactly, with the row more that a draft looks back over: `ends` 256 drafts right behind the hit."""
    ids = tokens(6, 258)
    want = Memory(model).feed(0, ids, 0, ends).draft((0, ids, ends))
    memory = Memory(model).feed(0, ids, 0, 256)
    memory.states.reset(1)
    start = 256 - model.spec.replay_rows
    memory.feed(1, ids, start, ends, table=(0, 1, 8), write_floor=256, window_floor=start)
    assert_same_bits(memory.draft((1, ids, ends)), want)
    assert model.spec.replay_rows == 122  # 8 windows of 15, one row more, even


def test_a_bounded_prompt_fills_the_rings_with_what_its_decoder_ran_on(path):
    """Taps of an encoder layer (3) are taken of the same rows; chunks do not matter."""
    bounded = load_model(path, numerics="bounded", batch_invariant=True, keep_rows=28)
    ids, floor = tokens(7, 231), 202
    one = Memory(bounded).feed(0, ids, 0, 230, decoder_floor=floor)
    two = Memory(bounded).feed(0, ids, 0, 101, 205, 206, 230, decoder_floor=floor)
    assert one.states.first_draft(0, 230) == two.states.first_draft(0, 230) == floor
    assert_same_bits(one.draft((0, ids, 230)), two.draft((0, ids, 230)))
    packed = one.states.pack(0, 230)
    assert packed == two.states.pack(0, 230) and len(packed) <= bounded.spec.state_bytes
    exact = load_model(path, numerics="exact", batch_invariant=True)
    assert not torch.equal(Memory(exact).feed(0, ids, 0, 230).draft((0, ids, 230)).base, one.draft((0, ids, 230)).base)


def test_drafting_changes_no_state(model):
    ids = tokens(8, 80)
    memory = Memory(model).feed(0, ids, 0, 60)
    before = memory.states.pack(0, 60), memory.kv.data.clone()
    first = memory.draft((0, ids, 60))
    assert memory.states.pack(0, 60) == before[0] and torch.equal(memory.kv.data, before[1])
    assert_same_bits(memory.draft((0, ids, 60)), first)


def test_a_step_at_a_wrong_position_is_refused(model):
    ids = tokens(9, 80)
    memory = Memory(model).feed(0, ids, 0, 60)
    with pytest.raises(ValueError, match="slot 0 cannot draft at position 61: its rows end at 60"):
        memory.draft((0, ids, 61))
    with pytest.raises(ValueError, match="cannot draft at position 47: its rows end at 60, and its ring of 28"):
        memory.draft((0, ids, 47))
    memory.draft((0, ids, 48))


def test_without_a_draft_there_is_none(tmp_path, model):
    plain = load_model(make_checkpoint("w16", 3, tmp_path), numerics="exact", batch_invariant=True)
    with pytest.raises(ValueError, match="no draft"):
        plain.draft([0], [5], [0], plain.new_states(1), lambda place, logits: logits.argmax(-1))
    ids = [spec.layout_id.rpartition("-")[0] for spec in (plain.spec, model.spec)]
    assert ids[0] != ids[1] and plain.spec.state_bytes < model.spec.state_bytes


def test_a_draft_does_not_change_the_target(tmp_path, path, model):
    """The same weights without mtp.* give the same logits."""
    import json

    from safetensors.torch import load_file, save_file

    tensors = {n: t for file in path.glob("*.safetensors") for n, t in load_file(file).items() if n[:4] != "mtp."}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_nextn_predict_layers"] = 0
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text((path / "tokenizer.json").read_text())
    plain, ids = load_model(tmp_path, numerics="exact", batch_invariant=True), tokens(10, 150)
    segment = Segment(0, 0, ids, [], (0, 1), outputs=range(150))
    rows = [m.logits(m.forward([segment], KVPool(m.spec, 2), m.new_states(1))) for m in (plain, model)]
    assert torch.equal(*rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dspark_noise_token_id": 281}, "dspark_noise_token_id 281 lies outside vocab_size 281"),
        ({"dspark_num_experts_per_tok": 5}, "dspark_num_experts_per_tok 5 exceeds dspark_n_routed_experts 4"),
        ({"dspark_block_size": 0}, "dspark_block_size is 0"),
    ],
)
def test_a_config_that_contradicts_itself(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        write_checkpoint(PRESETS["w16-draft"] | change, 0, tmp_path)
