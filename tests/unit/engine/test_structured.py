"""Outputs under a grammar in a whole engine: mixed batches, several choices, preemption, two processes, other parameters.

The model is the toy: its logits know nothing, so whatever order there is in an answer the grammar has made.
"""

from __future__ import annotations

import json
import random

import jsonschema
import numpy as np
import pytest
import torch

from headrace.engine import LLM, api
from headrace.engine.api import Grammar
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.engine.sampler import Draw, sample
from headrace.engine.toy import ToyModel

from .grammars import EOS, HOSTILE, SCHEMAS, closed, small_grammars

CONTROL: dict[str, int] = {}
IDS = random.Random(4).choices(range(3, 250), k=90)
NAMES = ["closed", "enum", "array of objects", "integer range", "recursive", "any of", "pattern", "tuple"]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory):
    return small_grammars(tmp_path_factory.mktemp("tokenizer"), CONTROL)


def engine(grammars, role="both", **config) -> EngineCore:
    sizes = {"num_blocks": 96, "max_num_seqs": 6, "max_num_batched_tokens": 48} | config
    model = ToyModel("exact", block_tokens=8, vocab_size=grammars.vocab_size, draft_block=4)
    return EngineCore(model, api.EngineConfig(role=role, **sizes), grammars=grammars)


def request(name, ids=IDS[:20], grammar=None, **sampling) -> api.EngineRequest:
    if isinstance(grammar, str):
        grammar = Grammar("json_schema", json.dumps(SCHEMAS[grammar]))
    defaults = {"max_tokens": 200, "temperature": 1.0, "seed": 5}
    return api.EngineRequest(name, ids, [], api.SamplingParams(**defaults | sampling, grammar=grammar))


def spelled(ids, grammars) -> str:
    grammars.load()
    return grammars._tokenizer.decode_bytes(ids).decode("utf-8", "replace")


def check(choice, name, grammars) -> None:
    assert choice.finish in ("stop", "length")
    if choice.finish == "stop":
        jsonschema.validate(json.loads(spelled(choice.ids, grammars)), SCHEMAS[name])


def todo(count: int) -> list[api.EngineRequest]:
    """Half of them follow a grammar, some in two choices; sampling parameters of every kind."""
    out = []
    for i in range(count):
        more = [{}, {"top_p": 0.9}, {"top_k": 5}, {"n": 2}, {"min_p": 0.01, "presence_penalty": 0.5}, {"temperature": 0}][i % 6]
        grammar = NAMES[i // 2 % len(NAMES)] if i % 2 else None
        limit = 200 if grammar else 40
        out.append(request(f"r{i}", IDS[i % 7 : i % 7 + 9 + i], grammar, seed=i, max_tokens=limit, **more))
    return out


@pytest.mark.parametrize("num_blocks", [96, 30])
def test_alone_in_a_batch_and_preempted_the_answers_are_the_same(grammars, num_blocks):
    alone = {}
    for r in todo(16):
        alone[r.request] = collect(engine(grammars), [r])[0]
    core = engine(grammars, num_blocks=num_blocks)
    together = {a.request: a for a in collect(core, todo(16))}
    finished = 0
    for r in todo(16):
        a, b = alone[r.request], together[r.request]
        assert not a.error and not b.error
        assert [(c.ids, c.finish) for c in a.choices] == [(c.ids, c.finish) for c in b.choices]
        if r.sampling.grammar:
            name = NAMES[int(r.request[1:]) // 2 % len(NAMES)]
            for choice in b.choices:
                check(choice, name, grammars)
                finished += choice.finish == "stop"
    assert finished >= 6
    assert (core.stats()["preemptions"] > 0) == (num_blocks == 30)
    core.pool.check(core.owners())


@pytest.mark.parametrize("num_blocks", [96, 30])
def test_drafts_change_nothing(grammars, num_blocks):
    """Exact acceptance: whole windows are masked row by row, and what is drafted behind a grammar's end is not said."""
    plain = collect(engine(grammars), todo(16))
    core = engine(grammars, num_blocks=num_blocks, speculative="dspark", draft_budget=100, rollback_gate=1.0)
    drafted = collect(core, todo(16))
    for a, b in zip(plain, drafted, strict=True):
        assert [(c.ids, c.finish, c.stop_id) for c in a.choices] == [(c.ids, c.finish, c.stop_id) for c in b.choices]
    assert sum(core.speculator.counts["accepted"]) > 100
    core.pool.check(core.owners())


def test_rejection_sampling_keeps_to_the_grammar(grammars):
    core = engine(grammars, speculative="dspark", draft_budget=100, rollback_gate=1.0, acceptance="standard")
    finished = 0
    for answer, r in zip(collect(core, todo(16)), todo(16), strict=True):
        for choice in answer.choices if r.sampling.grammar else ():
            check(choice, NAMES[int(r.request[1:]) // 2 % len(NAMES)], grammars)
            finished += choice.finish == "stop"
    assert finished >= 6 and sum(core.speculator.counts["accepted"]) > 50


def test_the_choices_of_a_request_stand_in_their_own_places(grammars):
    answer = collect(engine(grammars), [request("r", grammar="array of objects", n=5)])[0]
    assert len({tuple(c.ids) for c in answer.choices}) > 1
    for choice in answer.choices:
        check(choice, "array of objects", grammars)


def test_decode_follows_the_grammar_of_a_hand_off(grammars):
    whole = collect(engine(grammars), [request("r", grammar="recursive", n=2)])[0]
    prefill, decode = engine(grammars, "prefill"), engine(grammars, "decode")
    r = request("r", grammar="recursive", n=2)
    prefill.submit(api.EngineRequest("r", IDS[:20], [], api.SamplingParams()))
    done = next(e for e in _drain(prefill) if isinstance(e, api.PrefillDone))
    r.hashes = decode.ledger.hasher(b"").hashes(r.ids)
    reservation = decode.reserve("r", r.hashes, 20)
    for block, source in zip(reservation.blocks, done.block_table, strict=True):
        decode.runner.kv.data[block] = prefill.runner.kv.data[source]
    decode.admit(reservation, done.handoff, r)
    out = [[], []]
    for e in _drain(decode):
        if isinstance(e, api.Tokens):
            out[e.choice] += e.ids
    assert out == [c.ids for c in whole.choices]


@pytest.mark.parametrize("name", ["closed", "recursive", "pattern"])
def test_an_output_that_began_elsewhere_goes_on_in_its_grammar(grammars, name):
    """At every length: the grammar's state comes from the ids, thinking or not."""
    grammar = Grammar("json_schema", json.dumps(SCHEMAS[name]), after=CONTROL["</think>"])
    more = {"grammar": grammar, "logit_bias": {CONTROL["</think>"]: 4}, "max_tokens": 120}
    whole = collect(engine(grammars), [request("r", **more)])[0].choices[0]
    core = engine(grammars, max_num_batched_tokens=200)
    for given in range(1, len(whole.ids), 3):
        r = request(f"r{given}", IDS[:20] + whole.ids[:given], **more)
        r.output_tokens = given
        rest = collect(core, [r])[0]
        assert not rest.error and (rest.choices[0].ids, rest.choices[0].finish) == (whole.ids[given:], whole.finish), given


def _drain(core):
    events = []
    while core.has_work() and (more := core.step()) is not None:
        events += more
    return events


def test_thinking_is_free_and_can_not_be_the_end(grammars):
    """EOS is what this model likes best, then the end of thinking."""
    after = CONTROL["</think>"]
    grammar = Grammar("json_schema", json.dumps(SCHEMAS["closed"]), after=after)
    r = request("r", grammar=grammar, logit_bias={EOS: 100, after: 4})
    choice = collect(engine(grammars), [r])[0].choices[0]
    assert choice.finish == "stop" and choice.ids.count(after) == 1
    thought, answer = choice.ids[: choice.ids.index(after)], choice.ids[choice.ids.index(after) + 1 :]
    assert len(thought) > 0 and EOS not in choice.ids
    jsonschema.validate(json.loads(spelled(answer, grammars)), SCHEMAS["closed"])
    r.sampling.grammar = Grammar("regex", "ab", after=after, optional=True)
    assert collect(engine(grammars), [r])[0].choices[0].finish == "stop", "an optional grammar lets the output end before it"


@pytest.mark.parametrize("name", ["closed", "array of objects"])
def test_an_output_goes_on_in_another_engine_by_its_grammar(grammars, name):
    """What an engine that died had said comes with the prompt; the grammar takes it first, and the rest is the same."""
    whole = collect(engine(grammars), [request("r", grammar=name)])[0].choices[0]
    for given in range(1, len(whole.ids), 7):
        rest = request("r", IDS[:20] + whole.ids[:given], grammar=name)
        rest.output_tokens = given
        (got,) = collect(engine(grammars), [rest])
        assert got.choices[0].ids == whole.ids[given:] and got.choices[0].finish == whole.finish


def test_the_grammars_end_is_the_outputs(grammars):
    for more in ({}, {"ignore_eos": True}, {"min_tokens": 30}, {"min_tokens": 30, "ignore_eos": True, "temperature": 0.0}):
        choice = collect(engine(grammars), [request("r", grammar=Grammar("regex", "abc"), **more)])[0].choices[0]
        assert (spelled(choice.ids, grammars), choice.finish) == ("abc", "stop"), more


def test_other_limits_hold_inside_a_grammar(grammars):
    a_or_more = Grammar("regex", "a{1,50}")
    run = lambda **more: collect(engine(grammars), [request("r", grammar=a_or_more, **more)])[0].choices[0]  # noqa: E731
    a = run(max_tokens=1).ids[0]
    short = run(logit_bias={EOS: 100})
    assert (short.ids, short.finish, short.stop_id) == ([a], "stop", EOS)
    assert len(run(logit_bias={EOS: 100}, min_tokens=7).ids) == 7
    assert len(run(logit_bias={EOS: 100}, ignore_eos=True).ids) == 50
    assert run(max_tokens=3, logit_bias={EOS: -100}).finish == "length"
    stopped = run(stop_token_ids=[a])
    assert (stopped.ids, stopped.finish, stopped.stop_id) == ([a], "stop", a)
    assert len(run(stop_token_ids=[a], min_tokens=9, logit_bias={EOS: -100}).ids) == 10, "the grammar has the last word"


def test_log_probabilities_are_the_models_own(grammars):
    """Before the grammar, like those of every other parameter."""
    choice = collect(engine(grammars), [request("r", grammar=Grammar("regex", "abc"), logprobs=3)])[0].choices[0]
    assert all(logprob < top[0][1] or token == top[0][0] for token, logprob, top in choice.logprobs)
    assert any(token not in dict(top) for token, _, top in choice.logprobs)


def test_a_grammar_that_grows_too_complex_ends_its_own_request(grammars):
    bad = Grammar("json_schema", HOSTILE["wide in the middle"])
    core = engine(grammars)
    answers = collect(core, [request("bad", grammar=bad, n=2), request("good", grammar="closed")])
    assert answers[0].error.startswith("grammar: the grammar is too complex to go on")
    assert not answers[1].error
    check(answers[1].choices[0], "closed", grammars)
    core.pool.check(core.owners())
    assert not core.has_work()


def test_a_wrong_grammar_is_refused_before_anything_is_done(grammars):
    core = engine(grammars)
    for grammar, why in [
        (Grammar("json_schema", '{"not": {}}'), "#: .*not"),
        (Grammar("regex", "("), "unclosed"),
        (Grammar("words", ""), "kind"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=why):
            core.submit(request("r", grammar=grammar))
    assert not core.has_work()
    without = EngineCore(ToyModel(), api.EngineConfig(max_num_seqs=2))
    with pytest.raises(ValueError, match="without a tokenizer"):
        without.submit(request("r", [3, 4], Grammar("regex", "a")))
    assert not without.has_work()


def test_logit_bias_is_checked(grammars):
    core = engine(grammars)
    with pytest.raises(ValueError, match=r"logit_bias: token ids are from 0 to 2\d\d; got 5000"):
        core.submit(request("r", logit_bias={5000: 1.0}))
    with pytest.raises(ValueError, match=r"logit_bias of token 7 must be from -100 to 100; got 101"):
        core.submit(request("r", logit_bias={7: 101.0}))
    with pytest.raises(ValueError, match="2000 tokens; at most 1024"):
        core.submit(request("r", logit_bias=dict.fromkeys(range(2000), 1.0)))


# ---------------------------------------------------------------- the sampler alone


def allowed(vocab: int, tokens) -> np.ndarray:
    bits = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("vocab", [97, 1200, 5000])
def test_rows_are_masked_before_anything_else_and_alone(vocab):
    """Against the same logits with the forbidden entries at -inf, sampled without a mask; and in a batch against alone."""
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.standard_normal((24, vocab)).astype(np.float32) * 3)
    draws, plain, masked = [], [], logits.clone()
    for row in range(24):
        params = api.SamplingParams(
            temperature=[0.0, 0.7, 1.3][row % 3], top_k=[0, 3][row % 2], top_p=[1.0, 0.6][row // 2 % 2], seed=row,
            repetition_penalty=1.2, logit_bias={3: 5.0, vocab - 1: -4.0}, logprobs=1,
        )  # fmt: skip
        some = sorted({*rng.choice(vocab, size=1 + row).tolist(), vocab - 1})
        at = (params, 0, 9 + row, [3, 4, 5], 2)
        bits = allowed(vocab, some) if row % 4 else None
        draws.append(Draw(*at, allowed=bits))
        plain.append(Draw(*at))
        if bits is not None:
            keep = torch.zeros(vocab, dtype=torch.bool)
            keep[some] = True
            masked[row, ~keep] = -torch.inf
    got, want = sample(logits, draws, (1,)), sample(masked, plain, (1,))
    assert [c.token for c in got] == [c.token for c in want]
    for row, draw in enumerate(draws):
        one = sample(logits[row : row + 1], [draw], (1,))[0]
        assert (one.token, one.logprob, one.top) == (got[row].token, got[row].logprob, got[row].top)
    raw = torch.log_softmax(logits, -1)
    assert [c.logprob for c in got] == [float(raw[row, c.token]) for row, c in enumerate(got)]


def test_logit_bias_is_added_after_penalties():
    logits = torch.tensor([[1.0, 2.0, 0.5, -1.0]])
    pick = lambda **p: sample(logits, [Draw(api.SamplingParams(temperature=0.0, **p), 0, 5, [1, 1], 1)], ())[0].token  # noqa: E731
    assert pick() == 1
    assert pick(logit_bias={2: 1.6}) == 2 and pick(logit_bias={2: 1.4}) == 1
    assert pick(logit_bias={1: -1.1}) == 0
    assert pick(repetition_penalty=2.0, logit_bias={1: 0.5}) == 1, "2 / 2 + 0.5, not (2 + 0.5) / 2"


@pytest.mark.slow
def test_offline_with_a_checkpoint(tmp_path):
    """Through `LLM`, with the checkpoint's own tokenizer and a real model of random weights."""
    llm = LLM(make_checkpoint("w16", 2, tmp_path / "w16"), num_blocks=64, max_num_seqs=8)
    schema = closed({"name": {"enum": ["ä", "b"]}, "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}})
    grammar = Grammar("json_schema", json.dumps(schema))
    params = api.SamplingParams(temperature=1.0, max_tokens=400, n=2, seed=3, grammar=grammar)
    plain = api.SamplingParams(temperature=1.0, max_tokens=20, seed=3)
    answers = llm.generate(["one", "two", "three"], [params, plain, params])
    texts = [c.text for a in (answers[0], answers[2]) for c in a.choices if c.finish == "stop"]
    assert texts and answers[1].choices[0].finish == "length"
    for text in texts:
        jsonschema.validate(json.loads(text), schema)
