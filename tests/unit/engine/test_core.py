"""The engine's contract: hand-offs, cancels while a step runs, errors that stay where they are, counters."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.snapshots import encode
from headrace.engine.toy import ToyModel

BLOCK = 8
MODEL = ToyModel("exact", block_tokens=BLOCK)
IDS = random.Random(3).choices(range(2, 97), k=120)


def engine(role="both", model=MODEL, **config) -> EngineCore:
    sizes = {"num_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32} | config
    return EngineCore(model, api.EngineConfig(role=role, **sizes))


def request(name, ids, **sampling) -> api.EngineRequest:
    defaults = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return api.EngineRequest(name, ids, [], api.SamplingParams(**defaults | sampling))


def drain(core: EngineCore) -> list[api.Event]:
    events = []
    while core.has_work() and (more := core.step()) is not None:
        events += more
        core.pool.check(core.owners())
    return events


def tokens(events) -> dict[str, list[int]]:
    out = {}
    for e in events:
        if isinstance(e, api.Tokens):
            out.setdefault(e.request if e.choice == 0 else f"{e.request}.{e.choice}", []).extend(e.ids)
    return out


def hand_over(prefill: EngineCore, decode: EngineCore, r: api.EngineRequest, done: api.PrefillDone) -> bool:
    """What two workers do over a transport: reserve, write the missing blocks, admit, release. False: decode has no room."""
    r.hashes = decode.ledger.hasher(r.namespace).hashes(r.ids)
    reservation = decode.reserve(r.request, r.hashes, len(r.ids))
    decode.pool.check(decode.owners())
    if reservation is None:
        return False
    for block, source in zip(reservation.blocks, done.block_table[reservation.have :], strict=True):
        decode.runner.kv.data[block] = prefill.runner.kv.data[source]
    decode.admit(reservation, done.handoff, r)
    prefill.release(r.request)
    return True


def test_a_prompt_has_begun_while_it_has_memory():
    """Not while it waits for what another one holds."""
    core = engine("prefill", num_blocks=4)
    for first, name in enumerate(("first", "second"), start=2):
        core.submit(request(name, [first] * (3 * core.info.block_tokens)))
    assert not core.begun("first")
    drain(core)
    assert core.begun("first") and not core.begun("second") and not core.begun("nobody")
    core.release("first")
    drain(core)
    assert not core.begun("first") and core.begun("second")


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=6), st.sampled_from([(), (3,), (7, 1)]), st.integers(17, 40))
def test_split_over_two_engines_gives_what_one_engine_gives(lengths, chunks, num_blocks):
    todo = [request(f"r{i}", IDS[i % 3 : i % 3 + n], n=1 + 2 * (i == 2)) for i, n in enumerate(lengths)]
    whole = tokens(drain(_filled(engine(num_blocks=80), todo)))
    prefill = _filled(engine("prefill", num_blocks=num_blocks, chunk_tokens=chunks), todo)
    decode = engine("decode", num_blocks=num_blocks)
    finished, events, positions = [], [], {}
    while prefill.has_work() or finished or decode.has_work():
        for e in (prefill.step() if prefill.has_work() else None) or ():
            if isinstance(e, api.PrefillDone):
                finished.append(e)
                assert e.cached_tokens + e.computed_rows == len(e.handoff.ids)
            elif isinstance(e, api.ChunkDone):
                assert positions.get(e.request, 0) <= e.position
                positions[e.request] = e.position
            else:
                assert isinstance(e, api.BlocksFilled | api.SnapshotTaken)
        if finished and hand_over(prefill, decode, next(r for r in todo if r.request == finished[0].request), finished[0]):
            finished.pop(0)
        events += (decode.step() if decode.has_work() else None) or ()
        prefill.pool.check(prefill.owners())
        decode.pool.check(decode.owners())
    assert tokens(events) == whole
    assert positions == {r.request: len(r.ids) for r in todo}
    assert prefill.pool.used == decode.pool.used == 0 and not prefill.ledger.pinned


def _filled(core: EngineCore, todo) -> EngineCore:
    for r in todo:
        core.submit(api.EngineRequest(r.request, r.ids, [], r.sampling))
    return core


def test_a_prompt_alone_is_counted_row_by_row():
    core = engine()
    cold, again, longer = (collect(core, [request(name, IDS[:n])])[0] for name, n in (("a", 50), ("b", 50), ("c", 70)))
    assert (cold.cached_tokens, cold.computed_rows, cold.replay_rows, cold.snapshot_hit) == (0, 50, 0, False)
    assert (again.cached_tokens, again.computed_rows, again.replay_rows, again.snapshot_hit) == (48, 2, 0, True)
    assert (longer.cached_tokens, longer.computed_rows) == (48, 22) and longer.snapshot_hit
    assert cold.choices[0].ids == again.choices[0].ids
    stats = core.stats()
    assert stats["cached_tokens"] == 96 and stats["computed_rows"] == 74 and stats["snapshot_hits"] == 2


@pytest.mark.parametrize("n", [48, 49, 55, 56])
def test_a_hit_leaves_at_least_one_row_to_compute(n):
    core = engine(snapshot_bytes=0)
    collect(core, [request("a", IDS[:n])])
    hit = collect(core, [request("b", IDS[:n])])[0]
    assert hit.cached_tokens == (n - 1) // BLOCK * BLOCK and hit.replay_rows == MODEL.spec.replay_rows


def test_an_exact_replay_that_would_begin_before_the_prompt_begins_at_its_start():
    core = engine(snapshot_bytes=0)
    first = collect(core, [request("a", IDS[:10])])[0]
    hit = collect(core, [request("b", IDS[:10])])[0]
    assert (hit.cached_tokens, hit.computed_rows, hit.replay_rows) == (8, 2, 8)
    assert hit.choices[0].ids == first.choices[0].ids


def test_a_bounded_hit_that_saves_no_row_is_a_miss():
    model = ToyModel("bounded", block_tokens=BLOCK, keep_rows=12)
    core = engine(model=model, snapshot_bytes=0)
    collect(core, [request("a", IDS[:20], max_tokens=1)])
    small = collect(core, [request("b", IDS[:12], max_tokens=1)])[0]
    large = collect(core, [request("c", IDS[:20], max_tokens=1)])[0]
    assert (small.cached_tokens, small.replay_rows) == (0, 0)
    assert (large.cached_tokens, large.computed_rows, large.replay_rows) == (16, 4, 12)


def test_a_bounded_snapshot_serves_only_prompts_whose_decoder_rows_it_has():
    model = ToyModel("bounded", block_tokens=BLOCK, keep_rows=12)
    core = engine(model=model)
    cold = collect(core, [request("a", IDS[:50], max_tokens=4)])[0]  # decoder rows from 38 on, snapshot at 32
    hashes = core.ledger.hasher(b"").hashes(IDS[:50])
    assert core.would_restore(hashes, 50)
    assert not core.would_restore(hashes, 41) and core.would_restore([], 41)
    again = collect(core, [request("b", IDS[:50], max_tokens=4)])[0]
    assert again.snapshot_hit and again.cached_tokens == 48 and again.replay_rows == 16
    assert again.choices[0].ids == cold.choices[0].ids, "the encoder's state is exact, so this hit is"
    shorter = collect(core, [request("c", IDS[:41], max_tokens=4)])[0]  # its decoder rows begin at 29, below the snapshot
    assert not shorter.snapshot_hit and shorter.cached_tokens == 40 and shorter.replay_rows == 12


@pytest.mark.parametrize("when", ["waiting", "before a step", "while a step runs", "pinned"])
def test_cancel_frees_everything_and_drops_the_result(when):
    core = engine("prefill" if when == "pinned" else "both", max_num_seqs=1)
    core.submit(request("gone", IDS[:40]))
    core.submit(request("stays", IDS[50:60]))
    if when == "waiting":
        assert core.cancel("stays")
        core.submit(request("stays", IDS[50:60]))
    plan = core.plan()
    if when == "while a step runs":
        assert core.cancel("gone") and not core.cancel("gone")
        assert core.pool.used > 0, "the step still writes there"
        core.submit(request("gone", IDS[70:75]))  # the name is free again
    core.apply(plan, core.execute(plan))
    core.pool.check(core.owners())
    if when == "before a step":
        assert core.cancel("gone")
    events = drain(core)
    if when == "pinned":
        assert {e.request for e in events if isinstance(e, api.PrefillDone)} == {"gone", "stays"}
        assert core.pool.used == 7 and core.cancel("gone") and core.cancel("stays")
    assert core.pool.used == 0 and not core.cancel("gone") and not core.cancel("unknown")
    if when == "while a step runs":
        alone = tokens(drain(_filled(engine(), [request("gone", IDS[70:75])])))
        assert tokens(events)["gone"] == alone["gone"]
    elif when == "before a step":
        assert "gone" not in tokens(events)


class Faulty(ToyModel):
    """Raises when a segment holds token 13."""

    def forward(self, segments, kv, states):
        if any(13 in segment.ids for segment in segments):
            raise RuntimeError("unlucky")
        return super().forward(segments, kv, states)


def test_a_step_that_raises_ends_its_requests_and_no_others():
    core = engine(model=Faulty("exact", block_tokens=BLOCK), max_num_seqs=2)
    clean = [i for i in IDS if i != 13]
    todo = [request("good", clean[:10]), request("bad", [13] * 9), request("later", clean[20:30])]
    answers = {a.request: a for a in collect(core, todo)}
    assert "unlucky" in answers["bad"].error and answers["bad"].error.startswith("internal")
    assert not answers["later"].error and len(answers["later"].choices[0].ids) == 12
    assert core.pool.used == 0 and core.stats()["free_slots"] == 2
    core.pool.check(core.owners())


class Slow(ToyModel):
    """Gives the other thread time in the middle of a step."""

    def forward(self, segments, kv, states):
        time.sleep(0.0005)
        out = super().forward(segments, kv, states)
        time.sleep(0.0005)
        return out


def test_the_owner_may_do_anything_while_a_step_runs_in_another_thread():
    """Submit, cancel, reserve, write into reserved blocks, abandon: during `execute`, as an event loop does."""
    rng, core = random.Random(8), engine(model=Slow("exact", block_tokens=BLOCK), num_blocks=24, max_num_seqs=5)
    todo = {f"r{i}": request(f"r{i}", IDS[i : i + rng.randint(1, 40)], max_tokens=rng.randint(1, 30)) for i in range(20)}
    waiting, cancelled, reserved, said = list(todo), set(), [], {}
    with ThreadPoolExecutor(1) as thread:
        while waiting or core.has_work():
            plan = core.plan()
            step = thread.submit(core.execute, plan) if plan else None
            while step and not step.done():
                dice = rng.random()
                if dice < 0.3 and waiting and len(core.ledger.waiting) < 3:
                    core.submit(todo[waiting.pop(0)])
                elif dice < 0.31 and core.ledger.live and len(cancelled) < 6:
                    name = rng.choice(list(core.ledger.live))
                    assert core.cancel(name)
                    cancelled.add(name)
                elif dice < 0.5 and len(reserved) < 2 and (taken := core.reserve("peer", [], rng.randint(1, 30))):
                    core.runner.kv.data[taken.blocks] = 255  # a peer writes: nobody else may hold these blocks
                    reserved.append(taken)
                elif dice < 0.6 and reserved:
                    taken = reserved.pop()
                    core.abandon(taken)
                    core.pool.release(taken.blocks)
                core.pool.check(core.owners())
                time.sleep(0.0001)
            if step:
                for name, ids in tokens(core.apply(plan, step.result())).items():
                    said.setdefault(name, []).extend(ids)
            elif waiting:
                core.submit(todo[waiting.pop(0)])
            elif reserved:
                taken = reserved.pop()
                core.abandon(taken)
                core.pool.release(taken.blocks)
            core.pool.check(core.owners())
    assert cancelled and core.stats()["finished"] >= 14
    for name in todo.keys() - cancelled:
        alone = api.EngineRequest(name, todo[name].ids, [], todo[name].sampling)
        assert said[name] == collect(engine(prefix_caching=False), [alone])[0].choices[0].ids


def test_without_a_plan_fail_ends_everything():
    core = _filled(engine(max_num_seqs=1), [request("a", IDS[:9]), request("b", IDS[:9])])
    core.step()
    events = core.fail(None, RuntimeError("lost"))
    assert {e.request for e in events} == {"a", "b"} and not core.has_work() and core.pool.used == 0


def test_a_damaged_snapshot_is_forgotten_and_the_prompt_computed():
    core = engine()
    cold = collect(core, [request("a", IDS[:50])])[0]
    hashes = core.ledger.hasher(b"").hashes(IDS[:50])
    good = core.ledger.snapshots.get(hashes[5])
    assert good.position == 48
    core.add_snapshot(hashes[5], 48, encode(48, 0, bytes(good.state[:-1]) + b"\xff"))
    again = collect(core, [request("b", IDS[:50])])[0]
    assert again.choices[0].ids == cold.choices[0].ids and not again.snapshot_hit and again.cached_tokens == 48
    assert core.stats()["snapshots_rejected"] == 1
    core.add_snapshot(hashes[5], 40, encode(48, 0, bytes(good.state)))
    core.add_snapshot(hashes[5], 48, b"short")
    assert core.stats()["snapshots_rejected"] == 3


def test_a_snapshot_and_blocks_from_elsewhere_make_a_hit():
    first, other = engine(), engine()
    taken = []
    first.submit(request("a", IDS[:50]))
    while first.has_work():
        taken += [e for e in first.step() if isinstance(e, api.SnapshotTaken)]
    hashes = first.ledger.hasher(b"").hashes(IDS[:50])
    blocks, source = other.pool.allocate(6), first.pool.match(hashes)
    for target, block in zip(blocks, source, strict=True):
        other.runner.kv.data[target] = first.runner.kv.data[block]
    parent = bytes(16)
    for block, digest in zip(blocks, hashes, strict=True):
        other.pool.announce(block, digest, parent)
        parent = digest
    other.pool.release(blocks)
    other.add_snapshot(taken[0].key, taken[0].position, taken[0].state)
    assert hashes[5] in other.ledger.snapshots
    hit, cold = collect(other, [request("b", IDS[:50])])[0], collect(engine(), [request("b", IDS[:50])])[0]
    assert (hit.cached_tokens, hit.snapshot_hit, hit.replay_rows) == (48, True, 0) and hit.choices[0].ids == cold.choices[0].ids


def test_reserve_is_all_or_nothing_and_abandon_leaves_written_blocks_to_the_caller():
    core = engine("decode", num_blocks=10, max_num_seqs=2)
    a = core.reserve("a", [], 48)
    assert a.have == 0 and len(a.blocks) == 6
    free = core.pool.free
    assert core.reserve("b", [], 48) is None and core.pool.free == free
    core.pool.check(core.owners())
    core.abandon(a)
    core.abandon(a)  # twice is once
    assert core.pool.used == 6, "the writer may still be writing"
    core.pool.quarantine(a.blocks, "a")
    core.pool.check(core.owners())
    assert core.pool.unquarantine("a") == 6 and core.stats()["free_slots"] == 2


def test_admit_refuses_what_was_not_reserved_and_keeps_the_reservation():
    prefill, decode = engine("prefill"), engine("decode")
    r = request("r", IDS[:30])
    prefill.submit(r)
    done = next(e for e in drain(prefill) if isinstance(e, api.PrefillDone))
    reservation = decode.reserve("r", [], 30)
    short = api.Handoff(IDS[:20], done.handoff.state, done.handoff.hidden)
    with pytest.raises(ValueError, match="4 blocks were reserved; the hand-off has 20 tokens"):
        decode.admit(reservation, short, r)
    with pytest.raises(ValueError, match="hidden vector has 4 bytes; this model's has 16"):
        decode.admit(reservation, api.Handoff(IDS[:30], done.handoff.state, b"1234"), r)
    decode.admit(reservation, api.Handoff(IDS[:30], b"no state", done.handoff.hidden), r)
    with pytest.raises(ValueError, match="not open here"):
        decode.admit(reservation, done.handoff, r)
    failed = [e for e in drain(decode) if isinstance(e, api.Failed)]
    assert [(e.request, e.code) for e in failed] == [("r", "bad_state")] and decode.pool.used == 0


def test_admitted_blocks_are_resident_for_the_next_hand_off():
    prefill, decode = engine("prefill"), engine("decode")
    for name in ("a", "b"):
        r = request(name, IDS[:48])
        prefill.submit(r)
        done = next(e for e in drain(prefill) if isinstance(e, api.PrefillDone))
        r.hashes = decode.ledger.hasher(b"").hashes(r.ids)
        reservation = decode.reserve(name, r.hashes, 48)
        assert reservation.have == (6 if name == "b" else 0), "a whole prompt may be resident: its hidden vector comes along"
        decode.abandon(reservation)
        decode.pool.release(reservation.blocks)
        assert hand_over(prefill, decode, r, done)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": []}, "empty"),
        ({"ids": [3] * 600}, "the prompt has 600 tokens; this engine holds at most 512"),
        ({"ids": [3, 97]}, "token ids are from 0 to 96; got 97"),
        ({"hashes": [b"0" * 16]}, "5 tokens have 0 full blocks of 8; got 1"),
        ({"sampling": api.SamplingParams(top_p=0.0)}, "top_p must be above 0 and at most 1; got 0.0"),
        ({"sampling": api.SamplingParams(temperature=-1)}, "temperature must be at least 0"),
        ({"sampling": api.SamplingParams(max_tokens=4, min_tokens=5)}, r"min_tokens must be from 0 to max_tokens \(4\); got 5"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_name(change, message):
    core = engine()
    fields = {"request": "r", "ids": IDS[:5], "hashes": [], "sampling": api.SamplingParams()} | change
    with pytest.raises(ValueError, match=message):
        core.submit(api.EngineRequest(**fields))
    assert not core.has_work()


def test_a_name_is_taken_once():
    core = engine()
    core.submit(request("r", IDS[:5]))
    with pytest.raises(ValueError, match="'r' is here already"):
        core.submit(request("r", IDS[:5]))


def test_a_configuration_that_cannot_work_is_refused():
    with pytest.raises(ValueError, match="tokens is 8; one row of each of 4 sequences and a prompt's last 6 rows need 10"):
        engine(model=ToyModel("bounded"), max_num_batched_tokens=8)
    with pytest.raises(ValueError, match="KV buffer has 10 bytes"):
        EngineCore(MODEL, api.EngineConfig(), kv_buffer=bytearray(10))
    with pytest.raises(ValueError, match="chaos"):
        engine("chaos")


def test_stops_eos_min_and_max_tokens():
    core = engine()
    free = collect(core, [request("free", IDS[:20], max_tokens=40)])[0].choices[0]
    assert len(free.ids) == 40 and free.finish == "length" and free.stop_id == -1
    stop = free.ids[7]
    first = free.ids.index(stop)
    stopped = collect(core, [request("stop", IDS[:20], max_tokens=40, stop_token_ids=[stop])])[0].choices[0]
    assert (stopped.ids, stopped.finish, stopped.stop_id) == (free.ids[: first + 1], "stop", stop)
    later = request("later", IDS[:20], max_tokens=40, stop_token_ids=[stop], min_tokens=first + 3)
    held = collect(core, [later])[0].choices[0]
    assert held.ids[:first] == free.ids[:first] and stop not in held.ids[: first + 3] and len(held.ids) >= first + 3
    model = ToyModel("exact", block_tokens=BLOCK)
    model.eos_token_ids = (stop,)
    eos = collect(engine(model=model), [request("eos", IDS[:20], max_tokens=40, ignore_eos=False)])[0].choices[0]
    assert (eos.ids, eos.finish, eos.stop_id) == (free.ids[:first], "stop", stop), "EOS is not part of the output"


def test_namespaces_share_nothing():
    core = engine()
    for namespace, cached in ((b"a", 0), (b"b", 0), (b"a", 48)):
        r = api.EngineRequest("r", IDS[:50], [], api.SamplingParams(max_tokens=2), namespace)
        assert collect(core, [r])[0].cached_tokens == cached


def test_the_engine_works_in_memory_of_the_caller():
    buffer = bytearray(64 * MODEL.spec.block_bytes)
    core = EngineCore(MODEL, api.EngineConfig(num_blocks=64, max_num_seqs=4), kv_buffer=buffer)
    core.submit(request("r", IDS[:40], max_tokens=1))
    drain(core)
    assert any(buffer)


def test_blocks_are_reported_as_filled_once_and_by_who_filled_them():
    prefill, decode = engine("prefill"), engine("decode", num_blocks=9, max_num_batched_tokens=64)
    todo = [request(name, IDS[i : i + 24], max_tokens=30) for i, name in enumerate("ab")]
    events = []
    for r in todo:
        prefill.submit(r)
    done = [e for e in drain(prefill) if isinstance(e, api.PrefillDone)]
    assert all(hand_over(prefill, decode, r, d) for r, d in zip(todo, done, strict=True))
    events = drain(decode)
    assert decode.stats()["preemptions"] > 0
    filled = [digest for e in events if isinstance(e, api.BlocksFilled) for digest, _, _ in e.blocks]
    assert len(filled) == len(set(filled)) > 0
    hasher = decode.ledger.hasher(b"")
    assert not {digest for r in todo for digest in hasher.hashes(r.ids)} & set(filled)


def test_admission_leaves_a_block_of_growth_to_each_running_sequence():
    core = engine(num_blocks=10, max_num_seqs=4)
    core.submit(request("first", IDS[:30], max_tokens=40))
    core.step()  # 4 of 10 blocks
    core.submit(request("large", IDS[40:88], max_tokens=2))  # 6 blocks: nothing would be left to grow into
    core.step()
    assert core.stats()["running"] == 1 and core.stats()["waiting"] == 1
    assert core.reserve("other", [], 8) is None, "what came first goes first"
    assert core.cancel("large") and core.reserve("other", [], 48) is None
    assert core.reserve("other", [], 40) is not None


def test_a_postprocessor_that_breaks_leaves_the_books_whole(monkeypatch):
    core = _filled(engine(), [request("a", IDS[:7]), request("b", IDS[20:28]), request("gone", IDS[40:45])])
    plan = core.plan()
    core.cancel("gone")
    result = core.execute(plan)
    monkeypatch.setattr(core.postprocessor, "_append", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        core.apply(plan, result)
    events = core.fail(plan, ZeroDivisionError())
    assert {e.request for e in events if isinstance(e, api.Failed)} == {"a", "b"}
    assert core.pool.used == 0 and core.stats()["free_slots"] == 4 and not core.has_work()
    core.pool.check(core.owners())
