"""The simulated engine keeps the engine's contract, and finds bytes that are not those of the prompt."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import api
from headrace.kv.hashing import BlockHasher
from headrace.worker import slab
from headrace.worker.sim import Corrupt, SimConfig, SimEngine, load_script

SMALL = dict(num_blocks=64, block_bytes=64, state_bytes=64, max_num_batched_tokens=200, max_num_seqs=8, max_model_len=2000)
NAMESPACE = b"n" * 16


def make(**changes) -> SimEngine:
    return SimEngine(SimConfig(**(SMALL | changes)))


def request(engine, name, ids, prefill_only=False, **sampling) -> api.EngineRequest:
    hashes = BlockHasher(engine.info.layout_id, NAMESPACE).hashes(ids)
    return api.EngineRequest(
        name, array("I", ids), hashes, api.SamplingParams(**sampling), namespace=NAMESPACE, prefill_only=prefill_only
    )


def step(engine) -> list[api.Event]:
    plan = engine.plan()
    if plan is None:
        return []
    return engine.apply(plan, engine.execute(plan))


def run(engine, limit=5000) -> list[api.Event]:
    events = []
    while engine.has_work():
        events += step(engine)
        limit -= 1
        assert limit, "the engine makes no progress"
    return events


def text(events, name, choice=0) -> tuple[list[int], str]:
    mine = [e for e in events if isinstance(e, api.Tokens) and (e.request, e.choice) == (name, choice)]
    assert [e.index for e in mine] == list(range(len(mine)))
    return [i for e in mine for i in e.ids], mine[-1].finish


def hand_over(prefill, decode, name, ids, **sampling) -> api.PrefillDone:
    """Run a prompt in one engine and move its memory into another, as a transport would."""
    wanted = request(prefill, name, ids, prefill_only=True, **sampling)
    prefill.submit(wanted)
    done = next(e for e in run(prefill) if isinstance(e, api.PrefillDone))
    reservation = decode.reserve(name, wanted.hashes, len(ids))
    for source, target in zip(done.block_table[reservation.have :], reservation.blocks, strict=True):
        decode._block(target)[:] = prefill._block(source)
    decode.admit(reservation, slab.unpack(memoryview(slab.pack(done.handoff))), wanted)
    prefill.release(name)
    return done


def test_split_equals_one_process():
    rng = random.Random(1)
    shared = [rng.randrange(1000) for _ in range(300)]
    one, prefill, decode = make(), make(), make()
    for i, n in enumerate([1, 2, 127, 128, 129, 255, 256, 300, 301, 600]):
        ids = (shared + [rng.randrange(1000) for _ in range(300)])[:n]
        one.submit(request(one, f"r{i}", ids, max_tokens=140, seed=i))
        hand_over(prefill, decode, f"r{i}", ids, max_tokens=140, seed=i)
        assert text(run(one), f"r{i}") == text(run(decode), f"r{i}")
    for engine in (one, prefill, decode):
        engine.pool.check(engine.owners())
        assert engine.pool.used == 0 and engine.stats()["free_slots"] == SMALL["max_num_seqs"]


def test_second_run_is_a_hit_with_snapshot_and_without():
    engine = make()
    ids = list(range(300))
    for replay, snapshot, forget in [(0, False, False), (0, True, False), (128, False, True)]:
        if forget:
            engine._snapshots.clear()
        engine.submit(request(engine, "r", ids, prefill_only=True))
        done = next(e for e in run(engine) if isinstance(e, api.PrefillDone))
        assert (done.replay_rows, done.snapshot_hit) == (replay, snapshot)
        assert done.cached_tokens + done.computed_rows == 300
        engine.release("r")
    assert done.cached_tokens == 256


def test_corruption_is_found_at_admit_and_at_a_hit():
    prefill, decode = make(), make()
    ids = list(range(200))
    wanted = request(prefill, "r", ids, prefill_only=True)
    prefill.submit(wanted)
    done = next(e for e in run(prefill) if isinstance(e, api.PrefillDone))
    reservation = decode.reserve("r", wanted.hashes, len(ids))
    with pytest.raises(Corrupt, match="logical block 0"):
        decode.admit(reservation, done.handoff, wanted)
    decode.abandon(reservation)
    decode.pool.release(reservation.blocks)
    decode.pool.check({})
    prefill.release("r")
    prefill._block(done.block_table[0])[5] ^= 1
    prefill.submit(request(prefill, "again", ids, prefill_only=True))
    assert [e.code for e in run(prefill)] == ["corrupt"]
    prefill.pool.check({})


@pytest.mark.parametrize("echo", [True, False])
def test_scripts_and_stops(tmp_path, echo):
    path = tmp_path / "script"
    path.write_text("[5, 6, 7]\n\n[8, 9, 10]\n")
    engine = make(script=load_script(str(path))[0], echo=echo)
    ids = [5, 6, 7]
    for name, sampling, length, finish in [
        ("eos", {"max_tokens": 9}, 3, "stop"),
        ("length", {"max_tokens": 2}, 2, "length"),
        ("one", {"max_tokens": 1}, 1, "length"),
        ("stop id", {"max_tokens": 9, "stop_token_ids": (6, 9)}, 2, "stop"),
        ("min", {"max_tokens": 9, "min_tokens": 9}, 9, "length"),
        ("ignored", {"max_tokens": 9, "ignore_eos": True}, 9, "length"),
    ]:
        engine.submit(request(engine, name, ids, **sampling))
        out, got = text(run(engine), name)
        assert (len(out), got) == (length, finish), name
    path.write_text("[1]\n{}\n")
    with pytest.raises(ValueError, match=r"script:2.*token ids"):
        load_script(str(path))


def test_a_reply_follows_the_cue_that_comes_last_in_the_prompt(tmp_path):
    path = tmp_path / "script"
    path.write_text('{"cue": [5, 6], "ids": [50]}\n{"cue": [7], "ids": [70, 71]}\n[90]\n')
    script, replies = load_script(str(path))
    engine = make(script=script, replies=replies)
    for ids, answer in [([1, 5, 6, 2], [50]), ([5, 6, 7], [70, 71]), ([7, 5, 6], [50]), ([5, 1, 6], [90]), ([1792], [90])]:
        engine.submit(request(engine, "r", ids, max_tokens=9))
        assert text(run(engine), "r") == (answer, "stop"), ids
    path.write_text('{"cue": [1]}\n')
    with pytest.raises(ValueError, match=r"script:1.*cue"):
        load_script(str(path))


def test_choices_share_the_prompt():
    engine = make()
    engine.submit(request(engine, "r", list(range(200)), n=3, max_tokens=70))
    events = run(engine)
    outputs = [text(events, "r", choice)[0] for choice in range(3)]
    assert all(len(out) == 70 for out in outputs) and len({tuple(out) for out in outputs}) == 3
    engine.pool.check({})
    assert engine.stats()["free_slots"] == SMALL["max_num_seqs"]


def test_a_broken_step_ends_its_requests_only():
    engine = make()
    engine.submit(request(engine, "r", list(range(200))))
    plan = engine.plan()
    engine.submit(request(engine, "s", list(range(5)), max_tokens=2))
    assert [e.request for e in engine.fail(plan, RuntimeError("boom"))] == ["r"]
    assert text(run(engine), "s")[1] == "length"
    engine.pool.check({})


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pools_add_up_whatever_is_cancelled(data):
    """Random submits, cancels and steps over a small pool; what a request was given comes back."""
    engine, count, total = make(num_blocks=9), 0, {}
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["submit", "cancel", "step", "release"])):
            case "submit":
                n = data.draw(st.integers(1, 500))
                ids = [data.draw(st.integers(0, 1))] * n
                total[f"r{count}"] = prefill = data.draw(st.booleans())
                engine.submit(
                    request(engine, f"r{count}", ids, prefill_only=prefill, max_tokens=data.draw(st.integers(1, 200)))
                )
                count += 1
            case "cancel" if count:
                engine.cancel(f"r{data.draw(st.integers(0, count - 1))}")
            case "release" if count:
                engine.release(f"r{data.draw(st.integers(0, count - 1))}")
            case _ if plan := engine.plan():
                if count and data.draw(st.booleans()):
                    engine.cancel(f"r{data.draw(st.integers(0, count - 1))}")  # while the step runs
                engine.pool.check(engine.owners())
                engine.apply(plan, engine.execute(plan))
        engine.pool.check(engine.owners())
    for name in total:
        engine.cancel(name)
    engine.pool.check(engine.owners())
    assert engine.pool.used == 0 and engine.stats()["free_slots"] == SMALL["max_num_seqs"]


@pytest.mark.parametrize("kind", ["words", "script", "echo"])
def test_a_continuation_elsewhere_says_what_is_left(kind):
    """From any token on, in any choice, over a block boundary, up to EOS or the limit."""
    config = {"words": {}, "script": {"script": [list(range(40, 60))]}, "echo": {"echo": True}}[kind]
    prompt = list(range(120))
    for n, most in ((1, 30), (3, 6)):
        engine = make(**config)
        engine.submit(request(engine, "whole", prompt, seed=4, n=n, max_tokens=most))
        events = run(engine)
        for choice in range(n):
            ids, finish = text(events, "whole", choice)
            for begun in range(len(ids)):
                other = make(**config)
                rest = request(other, "rest", prompt + ids[:begun], seed=4, max_tokens=most)
                rest.output_tokens, rest.first_choice = begun, choice
                other.submit(rest)
                told = [e for e in run(other) if isinstance(e, api.Tokens)]
                assert [e.index for e in told] == list(range(begun, len(ids) + (finish == "stop")))
                assert [i for e in told for i in e.ids] == ids[begun:] and told[-1].finish == finish
                other.pool.check(other.owners())
