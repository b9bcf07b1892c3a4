"""A reader and the store's pins, with messages that are lost, doubled and late, a reader that is paused, and a store
that evicts as soon as it may. What is used must be what was stored."""

from dataclasses import dataclass

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev
from headrace.kv.grants import pins

TTL = 3.0
pick = st.integers(0, 1 << 30)


@dataclass
class Reader:
    state: pins.Reading
    held: pins.Held
    here: bool = True  # the answer to its lookup has come
    copying: bool = False
    torn: bool = False  # the object was overwritten before its copy had ended
    outcome: str = ""


class PinWorld(RuleBasedStateMachine):
    """One object that is overwritten whenever nobody pins it; readers that want the version they looked up."""

    def __init__(self):
        super().__init__()
        self.now, self.paused = 10.0, False
        self.readers: list[Reader] = []
        self.bag: list[tuple[str, int, object]] = []

    @precondition(lambda self: sum(not reader.outcome for reader in self.readers) < 2)
    @rule(deadline=st.sampled_from([1.0, 20.0, 20.0]), delay=st.sampled_from([0.0, 0.0, 0.5, 4.0]))
    def lookup(self, deadline, delay):
        """The answer may come long after the store has pinned; the reader counts from when it asked."""
        sent = self.now
        reader = Reader(pins.found(TTL, sent, sent + delay + deadline)[0], pins.hold("w", TTL, sent)[0])
        self.readers.append(reader)
        if delay:
            reader.here = False
            self.pass_time(delay)
            reader.here = True

    @rule()
    def overwrite(self):
        """Eviction and another object in its place."""
        if any(reader.held.phase == pins.PINNED for reader in self.readers):
            return
        for reader in self.readers:
            reader.torn = reader.torn or reader.state.phase in (pins.FOUND, pins.READING)

    @precondition(lambda self: self.readers and not self.paused)
    @rule(which=pick)
    def copy(self, which):
        index = len(self.readers) - 1 - which % min(2, len(self.readers))
        reader = self.readers[index]
        if reader.copying:
            reader.copying = False
            self.tell(index, ev.ReadEnded(True))
        elif fx.Go() in self.tell(index, ev.ReadBegins()):
            reader.copying = True

    @precondition(lambda self: self.readers and not self.paused)
    @rule(which=pick)
    def cancel(self, which):
        if which % 3 == 0:
            self.tell(which % len(self.readers), ev.Cancelled("client"))

    @precondition(lambda self: self.bag)
    @rule(picks=st.lists(pick, min_size=1, max_size=4), twice=st.booleans())
    def deliver(self, picks, twice):
        for which in picks:
            if not self.bag:
                return
            index = which % len(self.bag)
            to, key, event = self.bag[index]
            if to == "reader" and self.paused:
                continue
            if not twice:
                self.bag.pop(index)
            if to == "reader":
                self.tell(key, event)
            else:
                self.at_store(key, pins.held_step(self.readers[key].held, event, self.now))

    @precondition(lambda self: self.bag)
    @rule(which=pick)
    def lose(self, which):
        self.bag.pop(which % len(self.bag))

    @rule(seconds=st.sampled_from([0.1, 0.3, 1.0, 3.0]))
    def pass_time(self, seconds):
        self.now += seconds
        for key, reader in enumerate(self.readers):
            self.at_store(key, pins.held_tick(reader.held, self.now))
            if not self.paused and reader.here:
                self.carry(key, *pins.reading_tick(reader.state, self.now))

    @rule()
    def pause_or_go_on(self):
        self.paused = not self.paused

    def teardown(self):
        self.paused = False
        for _ in range(60):
            for key, reader in enumerate(self.readers):
                if reader.copying:
                    reader.copying = False
                    self.tell(key, ev.ReadEnded(True))
            while self.bag:
                self.bag.pop()
            self.pass_time(1.0)
        assert all(reader.outcome for reader in self.readers), "a reader was left without a word"
        assert all(reader.state.phase == pins.RELEASED for reader in self.readers)
        assert not any(reader.held.phase == pins.PINNED for reader in self.readers)

    # ------------------------------------------------------------ effects

    def tell(self, key: int, event) -> list:
        state, effects = pins.reading_step(self.readers[key].state, event, self.now)
        self.carry(key, state, effects)
        return effects

    def carry(self, key: int, state, effects) -> None:
        reader = self.readers[key]
        reader.state = state
        for effect in effects:
            match effect:
                case fx.UseData():
                    assert not reader.torn, "bytes of another object were used"
                    assert not reader.outcome and not reader.copying
                    reader.outcome = "used"
                case fx.DiscardData():
                    assert not reader.outcome and not reader.copying, "decided while the copy was running, or twice"
                    reader.outcome = "discarded"
                case fx.SendRelease():
                    self.bag.append(("store", key, ev.Released()))

    def at_store(self, key: int, after) -> None:
        self.readers[key].held, effects = after
        for effect in effects:
            if isinstance(effect, fx.Valid):
                self.bag.append(("reader", key, ev.ReleaseAnswered(effect.valid)))


TestPinWorld = PinWorld.TestCase
TestPinWorld.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def always_valid(held, event, now, step=pins.held_step):
    after, effects = step(held, event, now)
    return after, [fx.Valid(True) if isinstance(effect, fx.Valid) else effect for effect in effects]


def use_at_once(reading, now):
    after, effects = pins._decide(reading, reading.good)
    return pins.replace(after, phase=pins.ASKING, send=now + 1), [*effects, fx.SendRelease()]


def test_the_world_notices_data_used_too_early(monkeypatch):
    """Without the question whether the pins held, the machine above finds a violation: the invariant is alive."""
    monkeypatch.setattr(pins, "_ask", use_at_once)
    quick = settings(
        max_examples=1000, derandomize=True, stateful_step_count=40, deadline=None, database=None, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, ExceptionGroup)):
        run_state_machine_as_test(PinWorld, settings=quick)


def overwritten_while_copied() -> PinWorld:
    world = PinWorld()
    world.lookup(deadline=20.0, delay=0.0)
    world.copy(0)
    world.pass_time(TTL)
    world.overwrite()
    world.copy(0)
    world.deliver([0], False)
    world.deliver([0], False)
    return world


def test_pins_that_expired_during_the_copy_spoil_it(monkeypatch):
    assert overwritten_while_copied().readers[0].outcome == "discarded"
    monkeypatch.setattr(pins, "held_step", always_valid)
    with pytest.raises(AssertionError, match="another object"):
        overwritten_while_copied()
