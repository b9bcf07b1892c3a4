"""Owner, writer, pool and memory in one small world with a bad network and bad processes; hypothesis tries to break it.

The world's memory is what a test can see and real code can't: which generation may write a block, and which one did. A
running operation of a writer may land in its blocks at any time until it has ended or its process is dead, also after the
owner disarmed (that is shared memory); a stopped process keeps its operation and lands it after it resumes.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.kv.grants import Ledger, Tombstones, owner, writer
from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev
from headrace.kv.hashing import ROOT
from headrace.kv.pool import BlockPool, walk

BLOCKS, TTL, DEADLINE = 10, 4.0, 12.0
pick = st.integers(0, 1 << 30)


@dataclass
class Job:
    """One attempt, as everybody's notes of it together; only the test sees all."""

    generation: int
    blocks: list[int]
    process: int
    left: list[int] = field(default_factory=list)  # blocks still to be written
    running: list[int] = field(default_factory=list)  # blocks of the operation in flight
    flag_sent: bool = False
    flag: bool = False  # it is in the mailbox
    admitted: bool = False
    ended: int = 0  # FailRequest or Admit or cancel: how often the request ended at decode
    cancelled: bool = False


class World(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.now = 100.0
        self.pool = BlockPool(BLOCKS)
        self.owners = Ledger(owner.step, owner.tick, owner.over, keep=1000)
        self.writers = {0: self.new_writer()}
        self.process = 0  # the living prefill process
        self.stopped = False
        self.dead: set[int] = set()
        self.jobs: dict[int, Job] = {}
        self.used: dict[int, list[int]] = {}  # job -> blocks that its admitted request holds
        self.wrote: dict[int, int] = {}  # block -> job whose bytes lie there
        self.bag: list[tuple[str, int, object]] = []  # messages under way: (to, job, event)

    @staticmethod
    def new_writer() -> Ledger:
        return Ledger(writer.step, writer.tick, writer.over, keep=1000)

    # ------------------------------------------------------------ what happens

    @precondition(lambda self: not self.stopped)
    @rule(n=st.integers(1, 4))
    def bind(self, n):
        blocks = self.pool.allocate(n)
        if blocks is None:
            return
        key, generation = len(self.jobs) + 1, self.owners.next_generation()
        for block in blocks:
            self.wrote.pop(block, None)
        self.jobs[key] = Job(generation, blocks, self.process, left=list(blocks))
        state, effects = owner.bind(generation, f"w{self.process}", tuple(blocks), n, TTL, self.now)
        assert self.owners.add(key, state, effects) == [fx.Arm(generation)]
        state, effects = writer.bound(generation, TTL, self.now, self.now + DEADLINE)
        self.carry_writer(key, self.writers[self.process].add(key, state, effects))

    @precondition(lambda self: self.bag)
    @rule(picks=st.lists(pick, min_size=1, max_size=6), twice=st.booleans())
    def deliver(self, picks, twice):
        """Some messages, any ones, so order means nothing; perhaps they come again later."""
        for which in picks:
            if not self.bag:
                return
            index = which % len(self.bag)
            to, key, event = self.bag[index]
            if to != "owner" and (self.stopped or self.jobs[key].process in self.dead):
                continue  # a stopped process reads nothing; a dead one never will
            if not twice:
                self.bag.pop(index)
            self.arrive(to, key, event)

    @precondition(lambda self: self.bag)
    @rule(which=pick)
    def lose(self, which):
        index = which % len(self.bag)
        if self.bag[index][2] != ev.SlabTaken():  # that one never leaves decode
            self.bag.pop(index)

    @precondition(lambda self: not self.stopped)
    @rule(which=pick, steps=st.integers(1, 6))
    def go_on(self, which, steps):
        """A writer's next natural steps: start an operation, end it, or commit when all are done."""
        for key in self.some(self.writers[self.process].live, which):
            for _ in range(steps):
                self.one_step(key)

    def one_step(self, key: int) -> None:
        job = self.jobs[key]
        if job.running:
            self.end(key)
        elif job.left:
            if fx.Go() in self.feed_writer(key, ev.WriteBegins()):
                job.running, job.left = job.left[:2], job.left[2:]
        else:
            job.flag_sent = job.flag_sent or self.writers[self.process].get(key).phase == writer.WRITING
            self.feed_writer(key, ev.Placed())

    @rule(which=pick)
    def land(self, which):
        """Bytes of an operation in flight, and flags, get to where they go, now. Not those of a dead process."""
        under_way = [k for k, job in self.jobs.items() if (job.running or job.flag_sent) and job.process not in self.dead]
        for key in self.some(under_way, which):
            for block in self.jobs[key].running:
                self.place(key, block)
            self.jobs[key].flag = self.jobs[key].flag_sent

    @precondition(lambda self: not self.stopped)
    @rule(which=pick)
    def write_fails(self, which):
        running = [key for key, job in self.jobs.items() if job.running and job.process == self.process]
        for key in self.some(running, which):
            self.jobs[key].left = self.jobs[key].running + self.jobs[key].left  # not all of it got there
            self.jobs[key].running = []
            self.feed_writer(key, ev.WriteEnded("broken"))

    @rule(which=pick, owner_too=st.booleans(), writer_too=st.booleans())
    def cancel(self, which, owner_too, writer_too):
        for key in self.some(self.jobs, which):
            if owner_too:
                self.arrive("owner", key, ev.Cancelled("client"))
            if writer_too and not self.stopped and self.jobs[key].process not in self.dead:
                self.feed_writer(key, ev.Cancelled("client"))

    @rule(seconds=st.sampled_from([0.05, 0.05, 0.3, 0.3, 1.0, 5.0]))
    def time_passes(self, seconds):
        self.now += seconds
        self.tick()

    @rule(really=st.integers(0, 2))
    def stop_or_resume(self, really):
        self.stopped = not self.stopped and not really
        if not self.stopped:
            self.tick()

    @rule(really=st.integers(0, 4))
    def kill(self, really):
        """kill -9, and a new process in its place. Probes tell decode some time; so does the lock, when asked."""
        if really:
            return
        for key, _ in self.writers[self.process]:
            self.bag.append(("owner", key, ev.WriterLost()))
        self.dead.add(self.process)
        self.process += 1
        self.stopped = False
        self.writers[self.process] = self.new_writer()

    @precondition(lambda self: self.used)
    @rule(which=pick)
    def request_finishes(self, which):
        for key in self.some(self.used, which):
            self.pool.release(self.used.pop(key))

    def teardown(self):
        """Quiet: nothing new, everybody runs, the network works. Two leases later nothing may be left."""
        self.stopped = False
        for _ in range(200):
            for key, job in self.jobs.items():
                job.flag = job.flag or (job.flag_sent and job.process not in self.dead)
                if job.running and job.process == self.process:
                    self.end(key)
            while self.bag:
                to, key, event = self.bag.pop()
                if to == "owner" or self.jobs[key].process not in self.dead:
                    self.arrive(to, key, event)
            self.now += 0.1
            self.tick()
        for key in list(self.used):
            self.pool.release(self.used.pop(key))
        assert self.pool.quarantined == 0 and self.pool.used == 0, self.pool.quarantines()
        assert len(self.owners) == 0 and len(self.writers[self.process]) == 0
        assert all(job.ended == 1 for job in self.jobs.values()), "a request ended twice or never"

    # ------------------------------------------------------------ what must hold

    @invariant()
    def books_add_up(self):
        bound = [state.blocks for _, state in self.owners if state.phase in (owner.BOUND, owner.COMMITTED)]
        self.pool.check(walk(*bound, *self.used.values()))
        quarantined = sum(len(state.blocks) for _, state in self.owners if state.quarantined)
        assert self.pool.quarantined == quarantined

    @invariant()
    def what_is_in_use_is_intact(self):
        for key, blocks in self.used.items():
            assert all(self.wrote.get(block) == key for block in blocks), f"blocks of {key} hold another's bytes"

    # ------------------------------------------------------------ how the hosts carry effects out

    def end(self, key: int) -> None:
        for block in self.jobs[key].running:
            self.place(key, block)
        self.jobs[key].running = []
        self.feed_writer(key, ev.WriteEnded())

    def place(self, key: int, block: int) -> None:
        """Bytes of `key` land in `block`: nobody else may own it, and no request may use it yet."""
        for other, state in self.owners:
            assert other == key or block not in state.blocks or state.phase == owner.ADMITTED, "written into another ticket"
        for other, blocks in self.used.items():
            assert block not in blocks, f"the bytes of {key} landed in a block that {other} uses"
        assert self.pool.references(block) or block in {b for k in self.owners.live for b in self.owners.live[k].blocks}
        self.wrote[block] = key

    def arrive(self, to: str, key: int, event) -> None:
        if to == "owner":
            self.carry_owner(key, self.owners.feed(key, event, self.now))
        elif event == "status":
            self.bag.append(("owner", key, self.status(key)))
        else:
            self.feed_writer(key, event)

    def status(self, key: int):
        """Prefill answers with its record, or with what it does."""
        job = self.jobs[key]
        answer = writer.status(self.writers[job.process].get(key))
        return ev.Committed(job.generation, len(job.blocks), key) if answer == "committed" else ev.WriterStatus(answer)

    def feed_writer(self, key: int, event) -> list:
        effects = self.writers[self.jobs[key].process].feed(key, event, self.now)
        self.carry_writer(key, effects)
        return effects

    def tick(self) -> None:
        """Decode scans mailboxes and ticks; prefill ticks when it runs."""
        for key, _ in self.owners:
            if self.jobs[key].flag:
                self.arrive("owner", key, ev.FlagSeen(owner.flag_value(self.jobs[key].generation)))
        for key, effect in self.owners.tick(self.now):
            self.carry_owner(key, [effect])
        if not self.stopped:
            for key, effect in self.writers[self.process].tick(self.now):
                self.carry_writer(key, [effect])

    def carry_owner(self, key: int, effects: list) -> None:
        job = self.jobs[key]
        for effect in effects:
            match effect:
                case fx.Admit():
                    assert not job.left and not job.running and job.flag, "admitted before all was placed"
                    assert all(self.wrote.get(block) == key for block in job.blocks)
                    job.admitted, job.ended = True, job.ended + 1
                    self.used[key] = list(job.blocks)
                    self.pool.announce(job.blocks[0], key.to_bytes(16, "big"), ROOT)
                    self.bag.append(("owner", key, ev.SlabTaken()))
                case fx.FreeBlocks(blocks):
                    self.pool.release(blocks)
                case fx.Quarantine(blocks):
                    self.pool.quarantine(blocks, key)
                case fx.Unquarantine():
                    self.pool.unquarantine(key)
                case fx.Abandon():
                    assert not job.admitted
                    job.ended += 1
                case fx.Answer(verdict):
                    self.bag.append(("writer", key, ev.CommitAnswered(verdict)))
                case fx.CheckFence():
                    if job.process in self.dead:
                        self.carry_owner(key, self.owners.feed(key, ev.Fenced(), self.now))
                case fx.AskStatus():
                    self.bag.append(("writer", key, "status"))
                case fx.FailRequest() | fx.Disarm() | fx.FreeSlots():
                    pass
                case _:
                    raise AssertionError(effect)

    def carry_writer(self, key: int, effects: list) -> None:
        job = self.jobs[key]
        for effect in effects:
            match effect:
                case fx.SendCommit():
                    self.bag.append(("owner", key, ev.Committed(job.generation, len(job.blocks), key)))
                case fx.SendFail(code, message):
                    self.bag.append(("owner", key, ev.WriterFailed(code, message)))
                case fx.SendDone():
                    self.bag.append(("owner", key, ev.WriterDone(job.generation)))
                    self.bag.append(("writer", key, ev.DoneAnswered()))  # may be lost, or come before the owner has seen it
                case fx.ReleaseSource():
                    assert not job.running, "own blocks unpinned while they are being sent"
                case fx.Go() | fx.No() | fx.StopTransfers() | fx.Report() | fx.Unknown():
                    pass
                case _:
                    raise AssertionError(effect)

    def some(self, keys, which: int):
        keys = sorted(keys)
        return [keys[which % len(keys)]] if keys else []


TestWorld = World.TestCase
TestWorld.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)


def release_at_once(ticket, outcome, now, *tell, let_go=owner._let_go):
    return let_go(replace(ticket, phase=owner.COMMITTED), outcome, now, *tell)


def admit_without_flag(ticket, gate=owner._gate):
    return gate(replace(ticket, flag=True))


def admit_late(ticket, event, quarantined=owner._quarantined):
    return owner._admit(ticket) if isinstance(event, ev.Committed) else quarantined(ticket, event)


def admit_again(ticket, event, admitted=owner._admitted):
    return owner._admit(ticket) if isinstance(event, ev.Committed) else admitted(ticket, event)


def never_released(ticket, event):
    return ticket, []


def done_while_in_flight(ticket, outcome, now, code, message, stop=writer._stop):
    after, effects = stop(replace(ticket, in_flight=0), outcome, now, code, message)
    return replace(after, in_flight=ticket.in_flight), effects


@pytest.mark.parametrize(
    ("where", "name", "broken"),
    [
        (owner, "_let_go", release_at_once),
        (owner, "_gate", admit_without_flag),
        (owner, "_quarantined", admit_late),
        (owner, "_admitted", admit_again),
        (owner, "_quarantined", never_released),
        (writer, "_stop", done_while_in_flight),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_the_world_notices_a_missing_guard(where, name, broken, monkeypatch):
    """Without each guard the machine above finds a violation: the invariants are alive."""
    monkeypatch.setattr(where, name, broken)
    quick = settings(
        max_examples=1000, derandomize=True, stateful_step_count=60, deadline=None, database=None, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, ValueError, ExceptionGroup)):
        run_state_machine_as_test(World, settings=quick)


def test_the_writer_says_done_only_when_nothing_is_in_flight():
    ticket, _ = writer.bound(7, TTL, 0.0, DEADLINE)
    assert writer.status(None) == "done" and writer.status(ticket) == "writing"
    writing, _ = writer.step(ticket, ev.WriteBegins(), 1.0)
    stopping, effects = writer.step(writing, ev.Cancelled("client"), 1.0)
    assert writer.status(stopping) == "writing" and fx.StopTransfers() in effects and fx.SendDone() not in effects
    stopped, effects = writer.step(stopping, ev.WriteEnded("cancelled"), 1.1)
    assert writer.status(stopped) == "done" and fx.SendDone() in effects
    placed, _ = writer.step(writer.step(writing, ev.WriteEnded(), 1.0)[0], ev.Placed(), 1.0)
    assert writer.status(placed) == "committed"
    over, _ = writer.step(placed, ev.CommitAnswered("admitted"), 1.1)
    assert writer.status(over) == "committed"  # the owner may ask late: its answer to the commit was lost


# ---------------------------------------------------------------- ledger and tombstones


def test_ledger_remembers_what_is_over_for_a_while():
    ledger = Ledger(owner.step, owner.tick, owner.over, keep=10.0, limit=2)
    for key in ("a", "b", "c"):
        ledger.add(key, *owner.bind(ledger.next_generation(), "w", (1,), 1, 5.0, 0.0))
        ledger.feed(key, ev.WriterDone(ledger.get(key).generation), 1.0)
    assert len(ledger) == 0
    assert ledger.feed("a", ev.Committed(1, 1), 2.0) == [fx.Unknown()]  # pushed out by the limit
    assert ledger.feed("c", ev.Committed(3, 1), 2.0) == [fx.Answer("stale")]
    ledger.tick(11.5)
    assert ledger.feed("c", ev.Committed(3, 1), 11.5) == [fx.Unknown()]


def test_a_grant_is_never_minted_twice():
    ledger = Ledger(owner.step, owner.tick, owner.over)
    ledger.add("a", *owner.bind(1, "w", (1,), 1, 5.0, 0.0))
    with pytest.raises(ValueError, match="'a' exists"):
        ledger.add("a", *owner.bind(2, "w", (1,), 1, 5.0, 0.0))
    ledger._generation = (1 << 32) - 1
    with pytest.raises(OverflowError):
        ledger.next_generation()


def test_tombstones_are_bounded():
    stones = Tombstones(keep=10.0, limit=2)
    for now, key in enumerate("abc"):
        stones.add(key, float(now))
    assert "a" not in stones and "b" in stones and "c" in stones
    stones.tick(11.5)
    assert "b" not in stones and "c" in stones
