"""A request that goes on with output of another engine: from any token on it is what it would have been undisturbed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.toy import ToyModel

BLOCK = 8
MODEL = ToyModel("exact", block_tokens=BLOCK)
IDS = random.Random(4).choices(range(2, 97), k=60)


def engine(role="both") -> EngineCore:
    return EngineCore(MODEL, api.EngineConfig(role=role, num_blocks=96, max_num_seqs=4, max_num_batched_tokens=32))


def run(core: EngineCore) -> dict[int, list[api.Tokens]]:
    """Token events by choice."""
    out: dict[int, list[api.Tokens]] = {}
    while core.has_work() and (events := core.step()) is not None:
        for event in events:
            if isinstance(event, api.Tokens):
                out.setdefault(event.choice, []).append(event)
    return out


def told(events: list[api.Tokens], start: int = 0) -> list[tuple]:
    """What a client sees of a choice from output token `start` on."""
    out = []
    for event in events:
        logprobs = event.logprobs or [None] * len(event.ids)
        out += [(event.index + i, *pair) for i, pair in enumerate(zip(event.ids, logprobs, strict=True))]
    return [entry for entry in out if entry[0] >= start] + [(events[-1].finish, events[-1].stop_id)]


def whole(ids: list[int], params: api.SamplingParams) -> dict[int, list[api.Tokens]]:
    core = engine()
    core.submit(api.EngineRequest("whole", ids, [], params))
    return run(core)


def continued(ids: list[int], output: list[int], params: api.SamplingParams, choice: int, split: bool) -> list[api.Tokens]:
    """The rest of one choice: computed in one engine, or handed from a prefill engine to a decode engine."""
    sampling = api.SamplingParams(**{name: getattr(params, name) for name in params.__slots__} | {"n": 1})
    request = api.EngineRequest("rest", ids + output, [], sampling, output_tokens=len(output), first_choice=choice)
    decode = engine("decode" if split else "both")
    if split:
        prefill = engine("prefill")
        prefill.submit(api.EngineRequest("rest", ids + output, [], api.SamplingParams(), prefill_only=True))
        events = []
        while not any(isinstance(event, api.PrefillDone) for event in events):
            events += prefill.step()
        (done,) = [event for event in events if isinstance(event, api.PrefillDone)]
        request.hashes = decode.ledger.hasher(b"").hashes(request.ids)
        reservation = decode.reserve("rest", request.hashes, len(request.ids))
        for block, source in zip(reservation.blocks, done.block_table[reservation.have :], strict=True):
            decode.runner.kv.data[block] = prefill.runner.kv.data[source]
        decode.admit(reservation, done.handoff, request)
    else:
        decode.submit(request)
    return run(decode)[0]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40), st.integers(1, 14), st.integers(0, 6), st.integers(1, 3), st.booleans(), st.booleans(), st.data()
)  # fmt: skip
def test_from_any_token_on_it_is_what_it_would_have_been(prompt, most, least, n, greedy, split, data):
    ids = IDS[:prompt]
    params = api.SamplingParams(
        temperature=0.0 if greedy else 1.1, top_p=data.draw(st.sampled_from([1.0, 0.8])), seed=data.draw(st.integers(0, 9)),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5])), frequency_penalty=data.draw(st.sampled_from([0.0, 0.9])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3])), max_tokens=most, min_tokens=min(least, most),
        stop_token_ids=tuple(range(2, 97, 7)), logprobs=data.draw(st.sampled_from([-1, 0, 3])), n=n,
    )  # fmt: skip
    want = whole(ids, params)
    choice = data.draw(st.integers(0, n - 1))
    output = [token for event in want[choice] for token in event.ids]
    last = want[choice][-1]
    ends = last.finish == "length" or last.stop_id in output[-1:]  # whoever has the last token has the end too
    given_ = data.draw(st.integers(0, len(output) - ends))
    got = continued(ids, output[:given_], params, choice, split)
    assert told(got, given_) == told(want[choice], given_)


def test_what_output_means_is_told_apart_from_the_prompt():
    """The same ids as prompt and as output are different requests: limits and penalties count output only."""
    params = api.SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, frequency_penalty=2.0)
    output = [t for event in whole(IDS[:20], params)[0] for t in event.ids]
    rest = continued(IDS[:20], output[:4], params, 0, split=False)
    assert [event.index for event in rest] == [4, 5] and rest[-1].finish == "length"
    as_prompt = whole(IDS[:20] + output[:4], params)[0]
    assert [event.index for event in as_prompt] == list(range(6))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"output_tokens": 10}, "of 10 ids and max_tokens 16 it must leave a prompt"),
        ({"output_tokens": -1}, "output_tokens is -1"),
        ({"output_tokens": 9, "max_tokens": 9}, "a token to sample"),
        ({"output_tokens": 3, "n": 2}, "each choice goes on by itself"),
        ({"first_choice": -2}, "first_choice must be at least 0"),
    ],
)
def test_what_cannot_be_continued_is_refused_by_name(change, text):
    sampling = api.SamplingParams(max_tokens=change.pop("max_tokens", 16), n=change.pop("n", 1))
    with pytest.raises(ValueError, match=text):
        engine().submit(api.EngineRequest("r", IDS[:10], [], sampling, **change))
