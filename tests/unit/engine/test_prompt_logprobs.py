"""Log-probabilities of a prompt: each against the answer to the prompt up to there, at any chunking, beside any others."""

import random

import pytest

from headrace.engine import LLM, api
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.engine.toy import ToyModel

IDS = random.Random(8).choices(range(2, 97), k=70)


def engine(numerics="exact", **config) -> EngineCore:
    sizes = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 24} | config
    return EngineCore(ToyModel(numerics, block_tokens=8), api.EngineConfig(**sizes))


def request(name, ids, **sampling) -> api.EngineRequest:
    return api.EngineRequest(name, ids, [], api.SamplingParams(**{"max_tokens": 4, "seed": 2, "ignore_eos": True} | sampling))


def reference(ids: list[int]) -> list[float]:
    """Of each token but the first: what a prompt of those before it says of it."""
    prefixes = [request(str(p), ids[:p], max_tokens=1, logprobs=97) for p in range(1, len(ids))]
    answers = collect(engine(), prefixes)
    return [dict(a.choices[0].logprobs[0][2])[ids[p]] for p, a in enumerate(answers, 1)]


@pytest.mark.parametrize("chunks", [(), (1,), (5, 9)])
@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_every_token_is_scored_as_if_it_were_to_be_sampled(chunks, numerics):
    """Class `bounded` too: decoder layers run on all rows of such a prompt."""
    core, want = engine(numerics, chunk_tokens=chunks), reference(IDS)
    collect(core, [request("before", IDS)])  # its blocks are resident: a hit would leave rows out
    scored = request("scored", IDS, prompt_logprobs=2, n=2)
    others = [request(f"other{i}", IDS[i:], logprobs=1) for i in range(3)]
    answer, *rest = collect(core, [scored, *others])
    assert not answer.error and not any(a.prompt_logprobs for a in rest)
    assert (answer.cached_tokens, answer.computed_rows) == (0, len(IDS))
    first, *entries = answer.prompt_logprobs
    assert first is None and [token for token, _, _ in entries] == IDS[1:]
    assert [logprob for _, logprob, _ in entries] == want
    for token, logprob, top in entries:
        assert len(top) == 2 and top[0][1] >= top[1][1] >= min(logprob, top[1][1])
        assert dict(top).get(token, logprob) == logprob
    assert len(answer.choices[0].ids) == len(answer.choices[1].ids) == 4
    core.pool.check(core.owners())
    again = collect(core, [request("again", IDS)])[0]
    assert again.cached_tokens > 0, "its blocks serve others"


def test_the_output_is_what_it_is_without():
    plain = collect(engine(), [request("r", IDS, temperature=1.0, logprobs=1)])[0].choices[0]
    scored = collect(engine(), [request("r", IDS, temperature=1.0, logprobs=1, prompt_logprobs=0)])[0]
    assert (scored.choices[0].ids, scored.choices[0].logprobs) == (plain.ids, plain.logprobs)
    assert all(top == [] for _, _, top in scored.prompt_logprobs[1:])


def test_short_prompts_and_preemption():
    core = engine(num_blocks=14, max_num_seqs=4)
    answers = collect(core, [request(f"r{i}", IDS[: 1 + 11 * i], prompt_logprobs=0, max_tokens=40) for i in range(4)])
    for i, answer in enumerate(answers):
        assert not answer.error
        assert [e and e[1] for e in answer.prompt_logprobs] == ([None, *reference(IDS[: 1 + 11 * i])] if i else [])
    core.pool.check(core.owners())


@pytest.mark.parametrize("numerics", ["exact", "bounded"])
def test_prefill_tells_what_one_engine_tells(numerics):
    """... and what it hands over is the same too: the output goes on as that of a prompt whose rows all ran everywhere."""
    whole = collect(engine(numerics), [request("r", IDS, prompt_logprobs=3)])[0]
    prefill, decode = engine(numerics, role="prefill", chunk_tokens=(7, 16)), engine(numerics, role="decode")
    for name in ("first", "again"):
        prefill.submit(request(name, IDS, prompt_logprobs=3))
        told, done = [None], None
        while prefill.has_work():
            for event in prefill.step():
                if isinstance(event, api.PromptScores):
                    assert event.start == len(told)
                    told += event.logprobs
                elif isinstance(event, api.PrefillDone):
                    done = event
        assert told == whole.prompt_logprobs and (done.cached_tokens, done.computed_rows) == (0, len(IDS))
        prefill.release(name)
    reservation = decode.reserve("r", [], len(IDS))
    decode.runner.kv.data[reservation.blocks] = prefill.runner.kv.data[done.block_table]
    decode.admit(reservation, done.handoff, request("r", IDS))
    ids = []
    while decode.has_work():
        ids += [i for event in decode.step() if isinstance(event, api.Tokens) for i in event.ids]
    assert ids == whole.choices[0].ids


def test_not_across_a_hand_off():
    prefill, decode = engine(), engine()
    reservation = decode.reserve("r", [], 5)
    handoff = api.Handoff(IDS[:5], b"", bytes(16))
    with pytest.raises(ValueError, match="log-probabilities of a prompt don't come with a hand-off"):
        decode.admit(reservation, handoff, request("r", IDS[:5], prompt_logprobs=1))
    decode.abandon(reservation)
    with pytest.raises(ValueError, match="prompt_logprobs must be at least -1"):
        prefill.submit(request("r", IDS[:5], prompt_logprobs=-2))


@pytest.mark.slow
def test_a_model_of_tensors(tmp_path):
    path = make_checkpoint("w16", 2, tmp_path / "w16")
    llm = LLM(path, numerics="exact", batch_invariant=True, num_blocks=32, max_num_seqs=4)
    ids = random.Random(1).choices(range(3, 250), k=150)
    score = api.SamplingParams(max_tokens=1, prompt_logprobs=3)
    answer = llm.generate([ids], score)[0]
    assert len(answer.prompt_logprobs) == 150
    for p in (1, 64, 65, 128, 149):
        vocabulary = llm.engine.info.vocab_size
        likely = llm.generate([ids[:p]], api.SamplingParams(max_tokens=1, logprobs=vocabulary))[0].choices[0].logprobs[0][2]
        token, logprob, top = answer.prompt_logprobs[p]
        assert token == ids[p] and logprob == dict(likely)[token] and top == likely[:3]
