"""A request's machines against everything that may happen to it, in any order: it ends once, its client gets each token once
and in order, every attempt is given back, and no effect that has a key happens twice for it.

A driver without I/O carries the effects out; workers answer, refuse, say nothing, die; messages are lost, doubled, overtake
each other and come after their attempt is over. Guards taken away are found, or the properties would prove nothing.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.bus import messages as m
from headrace.gateway import choice, errors, request
from headrace.gateway.choice import Came, Choice
from headrace.gateway.request import Phase, Request

LIMITS = request.Limits(max_attempts=3, max_migrations=4, queue=6.0, worker=4.0, last_word=1.0, bus=2.0)
LENGTHS, STOPS = (7, 1, 12), (-1, -1, 5)  # of each choice: tokens that decode samples; where a text stop ends it
REFUSALS = ("busy", "full", "stale", "draining", "closed", "mismatch", "invalid")


class Play:
    """One request; `rng` decides what happens to it."""

    def __init__(self, rng: random.Random, choices: int, number: int = 0, parent: "Play | None" = None) -> None:
        self.rng, self.number, self.parent = rng, number, parent
        self.now = 100.0
        self.r = Request(self.now + 30.0, 30.0, choices, choices, choices)
        self.choices = [Choice() for _ in range(choices)]
        self.given = [0] * choices  # tokens that the client has of each
        self.parts: list[Play] = []
        self.pending: list = []  # what may happen next, because somebody was asked
        self.messages: list[tuple[int, int, Came]] = []  # attempt, choice; on their way, or lost
        self.sent: dict[tuple[int, int], int] = {}  # attempt, choice -> tokens that decode has told
        self.keys: Counter = Counter()
        self.attempts: list[int] = []
        self.open: dict[int, str] = {}  # attempts whose decode worker may hold a credit
        self.admitted: set[int] = set()
        self.held: set[int] = set()
        self.watched: Counter = Counter()
        self.lined = False
        self.ends: list[str] = []
        self.finished: Counter = Counter()

    # ------------------------------------------------------------ driver

    def happens(self, event) -> None:
        self.carry(*request.step(self.r, event, self.now))

    def carry(self, after: Request, effects: list) -> None:
        assert self.r.phase is not Phase.OVER or (after is self.r and not effects), "something follows the end"
        assert after.attempt >= self.r.attempt
        self.r = after
        for effect in effects:
            about = request.key(effect)
            self.keys[about] += bool(about)
            assert self.keys[about] <= 1 or isinstance(effect, request.Cancel), f"{effect} for the second time"
            self.do(effect)

    def do(self, effect) -> None:
        rng, r = self.rng, self.r
        match effect:
            case request.Place():
                self.happens(request.Placed(rng.random() < 0.3))
            case request.Choose(without):
                left = [name for name in ("d1", "d2", "d3") if name not in without]
                if r.begun and rng.random() < 0.05:
                    return self.happens(request.OtherOutput("worker"))
                if not left or rng.random() < 0.2:
                    return self.happens(request.NoPair("worker"))
                decode = rng.choice(left)
                self.happens(request.Pair(decode if rng.random() < 0.2 else "p1", decode))
            case request.Join(always):
                if not always and rng.random() < 0.1:
                    return self.happens(request.LineFull(9))
                self.lined = True
                self.pending.append(request.Called())
            case request.LeaveLine():
                assert self.lined, "left the line that it was not in"
                self.lined = False
            case request.Look():
                self.pending.append(request.Seen(errors.no_vision(True) if rng.random() < 0.2 else None))
            case request.Admit(attempt, decode):
                self.attempts.append(attempt)
                self.open[attempt] = decode
                self.ask(attempt, decode, request.Admitted(attempt))
            case request.Run(attempt, prefill, _):
                assert attempt in self.admitted, "decode did not take this attempt"
                for number, c in enumerate(self.choices):
                    self.sent[attempt, number] = c.next
                self.ask(attempt, prefill, request.Accepted(attempt))
            case request.Hold(attempt, watched):
                assert not self.held
                self.held.add(attempt)
                self.watched.update(watched)
            case request.LetGo(attempt, watched):
                assert attempt in self.held, "let go twice"
                self.held.remove(attempt)
                self.watched.subtract(watched)
            case request.Unwatch(_, worker):
                self.watched[worker] -= 1
            case request.Cancel(attempt, role, worker):
                if role == "decode":
                    assert self.open.get(attempt, worker) == worker
                    self.open.pop(attempt, None)
            case request.Retry():
                self.choices = [c.carried() for c in self.choices]
            case request.Split():
                self.split()
            case request.EndParts():
                for part in self.parts:
                    part.happens(request.Leaves("failed"))
            case request.Finish(number, _, last):
                self.finished[number] += 1
                assert last == (sum(self.finished.values()) == len(self.choices))
                if self.parent is not None:
                    self.parent.happens(request.ChoiceOver(self.number, "stop", False))
            case request.End() | request.Fail() | request.Shed():
                self.ended(effect)

    def split(self) -> None:
        for number, c in enumerate(self.choices):
            if not c.over:
                part = Play(self.rng, 1, number, self)
                part.r, part.now, part.choices, part.given = self.r.part(), self.now, [c], [self.given[number]]
                self.parts.append(part)
        for part in self.parts:
            part.happens(request.Arrives(LIMITS))

    def ended(self, effect) -> None:
        self.ends.append(type(effect).__name__)
        if isinstance(effect, request.End):
            for number, c in enumerate(self.choices):
                assert c.over and self.given[number] == self.whole(number), "an answer without all of its tokens"
        if self.parent is not None and isinstance(effect, request.End):
            self.parent.choices[self.number] = replace(self.choices[0], finished=True)
            self.parent.given[self.number] = self.given[0]
            self.parent.happens(request.ChoiceFinished())
        elif self.parent is not None and isinstance(effect, request.Fail):
            self.parent.happens(request.Breaks(effect.error))

    def ask(self, attempt: int, worker: str, good) -> None:
        """A worker answers, now or later; or doesn't."""
        refusal = self.rng.choice(REFUSALS)
        refused = request.Refused(attempt, worker, m.Refused(refusal, "why"))
        silent, offline = request.Refused(attempt, worker, None), request.Offline(attempt)
        self.pending.append(self.rng.choices([good, refused, silent, offline], [12, 2, 1, 1])[0])

    def answer(self, event) -> None:
        if isinstance(event, request.Admitted):
            self.admitted.add(event.attempt)
        took = isinstance(event, request.Refused) and event.refusal is not None and event.worker == self.open.get(event.attempt)
        if took and event.refusal.code != "stale":
            self.open.pop(event.attempt, None)  # nothing is held there
        self.happens(event)

    # ------------------------------------------------------------ output

    def whole(self, number: int) -> int:
        """Tokens of a choice that the client is due."""
        stop = STOPS[number + self.number]
        return min(LENGTHS[number + self.number], stop if stop >= 0 else 99)

    def speak(self) -> None:
        """Decode of some attempt that was run sends more."""
        attempt, number = self.rng.choice(list(self.sent))
        at, end = self.sent[attempt, number], LENGTHS[number + self.number]
        if at <= end:
            count = min(self.rng.randint(1, 3), end - at)
            last = at + count == end
            self.messages.append((attempt, number, Came(at, count, "stop" if last else "", end if last else 0)))
            self.sent[attempt, number] = end + 1 if last else at + count

    def hear(self) -> None:
        """A message comes: in any order, perhaps again later, perhaps never."""
        message = self.rng.choice(self.messages)
        if self.rng.random() < 0.8:
            self.messages.remove(message)
        if self.rng.random() < 0.8:
            self.take(*message)

    def take(self, attempt: int, number: int, came: Came) -> None:
        takes = (Phase.STARTING, Phase.RUNNING, Phase.STREAMING, Phase.SETTLING)
        if attempt != self.r.attempt or self.r.phase not in takes:
            return
        others = [c for index, c in enumerate(self.choices) if index != number]
        if came.finish and all(c.finished for c in others):
            self.open.pop(attempt, None)  # decode's last word
        self.tell(number, came)

    def tell(self, number: int, event) -> None:
        self.choices[number], effects = choice.step(self.choices[number], event)
        for effect in effects:
            match effect:
                case choice.Deliver(skip, finish):
                    self.deliver(number, event, skip, finish)
                case choice.Over(reason, finished):
                    self.happens(request.ChoiceOver(number, reason, finished))
                case choice.LastWord():
                    self.happens(request.ChoiceFinished())
                case choice.Ask(start):
                    self.pending.append(("resume", self.r.attempt, number, start))

    def deliver(self, number: int, came: Came, skip: int, finish: str) -> None:
        assert self.r.phase is not Phase.OVER and came.index + skip == self.given[number], "a token twice, or one is missing"
        if self.r.phase in (Phase.STARTING, Phase.RUNNING):
            self.happens(request.FirstOutput())
        self.given[number] += came.count - skip
        stop = STOPS[number + self.number]
        kept = stop if 0 <= stop <= self.given[number] else -1
        self.given[number] = self.whole(number) if kept >= 0 else self.given[number]
        self.tell(number, choice.Delivered(kept, finish))

    def resumed(self, attempt: int, number: int, start: int) -> None:
        if attempt != self.r.attempt or self.r.phase is Phase.OVER:
            return
        how = self.rng.choices(["answered", "silent", "unreachable", "gone"], [8, 2, 1, 0.3])[0]
        if how == "gone":
            self.open.pop(attempt, None)  # decode does not know it
            return self.happens(request.Unrepeatable(attempt, "not kept"))
        if how == "answered":
            end, told = LENGTHS[number + self.number], self.sent[attempt, number]
            last = told > end
            self.take(attempt, number, Came(start, min(told, end) - start, "stop" if last else "", end if last else 0))
            if attempt != self.r.attempt or self.r.phase is Phase.OVER:
                return
        events = {"answered": choice.Answered(), "silent": choice.Unanswered(), "unreachable": choice.Unreachable()}
        self.tell(number, events[how])

    # ------------------------------------------------------------ what happens next

    def trouble(self) -> None:
        rng, r = self.rng, self.r
        worker = rng.choice(["p1", "d1", "d2", "d3"])
        if rng.random() < 0.5:
            if worker in r.watched:
                self.watched[worker] -= 1  # the prober has let go of it
            return self.happens(request.Died(worker, "decode", "it was silent"))
        problems = [("draining", 503), ("prefill_vision_lost", 503), ("broken", 500), ("bad", 400), ("busy", 429)]
        code, status = rng.choice(problems)
        attempt = r.attempt - (rng.random() < 0.3)
        if self.open.get(attempt) == worker:
            del self.open[attempt]
        self.happens(request.Problem(attempt, worker, m.Problem(status, code, "why")))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.carry(*request.tick(self.r, self.now))
        for part in self.parts:
            part.pass_time(seconds)

    def turn(self) -> None:
        rng = self.rng
        if self.parts and rng.random() < 0.8:
            rng.choice(self.parts).turn()
        elif self.pending and rng.random() < 0.5:
            what = self.pending.pop(rng.randrange(len(self.pending)))
            self.resumed(*what[1:]) if isinstance(what, tuple) else self.answer(what)
        elif rng.random() < 0.05:
            self.trouble()
        elif rng.random() < 0.05:
            self.happens(request.BusBack())
        elif rng.random() < 0.05:
            for number in range(len(self.choices)):
                if self.r.phase in (Phase.RUNNING, Phase.STREAMING, Phase.SETTLING):
                    self.tell(number, choice.Missing())
        elif rng.random() < 0.01:
            self.happens(rng.choice([request.Leaves(), request.Breaks(errors.draining())]))
        elif self.messages and rng.random() < 0.6:
            self.hear()
        elif self.sent and rng.random() < 0.6:
            self.speak()
        else:
            self.pass_time(rng.choice([0.05, 0.05, 0.5]))

    def check_end(self) -> None:
        assert self.r.phase is Phase.OVER and len(self.ends) == 1, f"{self.r.phase}: {self.ends}"
        assert not self.held and not +self.watched and not self.lined, "workers or the line still count it"
        assert not -self.watched, "a worker is no longer probed for another request"
        assert not self.open, f"nobody told decode that these attempts are over: {self.open}"
        assert self.attempts == sorted(set(self.attempts))
        assert max(self.finished.values(), default=0) <= 1
        for part in self.parts:
            part.check_end()


def play(rng: random.Random, turns: int = 120) -> Play:
    it = Play(rng, rng.choice([1, 1, 2, 3]))
    it.happens(request.Arrives(LIMITS))
    for _ in range(turns):
        it.turn()
    it.pass_time(40.0)  # beyond the deadline, whatever was going on
    for _ in range(5):
        it.turn()
    it.check_end()
    return it


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, (1 << 32) - 1))
def test_it_ends_once_with_each_token_once_and_gives_everything_back(seed):
    play(random.Random(seed))


def test_what_is_played_reaches_every_phase_and_every_end():
    """The properties are about something."""
    ends, phases = Counter(), set()
    step = request.step

    def watched(r, event, now):
        phases.add(r.phase)
        return step(r, event, now)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request, "step", watched)
        for seed in range(600):
            it = play(random.Random(seed))
            ends[it.ends[0]] += 1
            ends["migrated"] += it.r.migrations > 0 and it.ends == ["End"]
            ends["split"] += bool(it.parts) and it.ends == ["End"]
    assert phases == set(Phase)
    assert all(ends[name] > 10 for name in ("End", "Fail", "Shed", "migrated")) and ends["split"], ends


GUARDS = {
    "output is not carried to the next attempt": (Choice, "carried", lambda c: Choice()),
    "an index says nothing": (choice, "_came", lambda c, came: came_(c, replace(came, index=c.next))),
    "legs are not cancelled": (request, "_cancels", lambda r, reason, but="": []),
    "workers are not let go": (request, "_let_go", lambda r, dead="": []),
    "the dead are let go twice": (request, "_let_go", lambda r, dead="": let_go(r)),
    "an answer of another attempt is taken": (request, "_admitted", lambda r, e: admitted(r, request.Admitted(r.attempt))),
}
came_, let_go, admitted = choice._came, request._let_go, request._admitted


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_missing_is_found(guard, monkeypatch):
    where, name, instead = GUARDS[guard]
    monkeypatch.setattr(where, name, instead)
    with pytest.raises(AssertionError):
        for seed in range(2000):
            play(random.Random(seed))
