"""All grants of one kind on one node: states by id, what is over remembered for a while, generations counted up.

The only part with a memory; still no I/O and no clock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, TypeVar

from headrace.kv.grants import effects as fx

State = TypeVar("State")
LAST_GENERATION = (1 << 32) - 1


class Ledger(Generic[State]):
    """`step`, `tick`, `over`: a machine's functions. What is over is remembered `keep` seconds (at most `limit` of them),
    so that a late duplicate has its old answer; after that it is unknown."""

    def __init__(
        self,
        step: Callable[[State, Any, float], tuple[State, list[fx.Effect]]],
        tick: Callable[[State, float], tuple[State, list[fx.Effect]]],
        over: Callable[[State], bool],
        keep: float = 30.0,
        limit: int = 65536,
    ) -> None:
        self._step, self._tick, self._over, self._keep, self._limit = step, tick, over, keep, limit
        self.live: dict[Hashable, State] = {}
        self._past: OrderedDict[Hashable, tuple[State, float]] = OrderedDict()  # over: state, when to forget
        self._generation = 0

    def next_generation(self) -> int:
        """Never the same twice in the life of this ledger. OverflowError after four thousand million: restart the instance."""
        if self._generation == LAST_GENERATION:
            raise OverflowError("all generations of this incarnation are used up; restart the instance")
        self._generation += 1
        return self._generation

    def add(self, key: Hashable, state: State, effects: list[fx.Effect]) -> list[fx.Effect]:
        """A new grant, as its machine's first function made it."""
        if key in self.live or key in self._past:
            raise ValueError(f"grant {key!r} exists already; one is never minted twice")
        self.live[key] = state
        return effects

    def get(self, key: Hashable) -> State | None:
        """The state, also of what is over and still remembered."""
        if key in self.live:
            return self.live[key]
        past = self._past.get(key)
        return past[0] if past else None

    def feed(self, key: Hashable, event: Any, now: float) -> list[fx.Effect]:
        """One event. [Unknown()] when nobody knows `key`."""
        if key in self.live:
            state, effects = self._step(self.live[key], event, now)
            self._put(key, state, now)
            return effects
        past = self._past.get(key)
        if past is None:
            return [fx.Unknown()]
        state, effects = self._step(past[0], event, now)
        self._past[key] = (state, past[1])
        return effects

    def tick(self, now: float) -> list[tuple[Hashable, fx.Effect]]:
        """Time passed for all of them. Call it on every turn of the loop, also when nothing else happens."""
        out = []
        for key in list(self.live):
            state, effects = self._tick(self.live[key], now)
            if state is not self.live[key]:
                self._put(key, state, now)
            out += [(key, effect) for effect in effects]
        while self._past and next(iter(self._past.values()))[1] <= now:
            self._past.popitem(last=False)
        return out

    def __iter__(self) -> Iterator[tuple[Hashable, State]]:
        """(key, state) of those that are not over."""
        return iter(list(self.live.items()))

    def __len__(self) -> int:
        return len(self.live)

    def _put(self, key: Hashable, state: State, now: float) -> None:
        if not self._over(state):
            self.live[key] = state
            return
        del self.live[key]
        self._past[key] = (state, now + self._keep)
        if len(self._past) > self._limit:
            self._past.popitem(last=False)


class Tombstones:
    """Keys that must be refused from now on: a cancel that came before its run. Bounded in time and number."""

    def __init__(self, keep: float = 60.0, limit: int = 65536) -> None:
        self._keep, self._limit = keep, limit
        self._until: OrderedDict[Hashable, float] = OrderedDict()

    def add(self, key: Hashable, now: float) -> None:
        self._until.pop(key, None)
        self._until[key] = now + self._keep
        while len(self._until) > self._limit:
            self._until.popitem(last=False)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._until

    def tick(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)


class Writing:
    """The writer's books of grants whose owner may ask about them: under which something may be written now, and to which it
    must never be. "done" is a promise, so who does not know a grant when asked refuses it when it comes."""

    def __init__(self) -> None:
        self._live: set[Hashable] = set()
        self._denied = Tombstones()

    def begin(self, grant: Hashable) -> bool:
        """False: its owner was told that nothing will be written under it."""
        if grant in self._denied:
            return False
        self._live.add(grant)
        return True

    def end(self, grant: Hashable, now: float) -> None:
        """Nothing is in flight any more, and nothing will be."""
        self._live.discard(grant)
        self._denied.add(grant, now)

    def status(self, grant: Hashable, now: float) -> str:
        """Either "writing" or "done"."""
        self._denied.tick(now)
        if grant in self._live:
            return "writing"
        self._denied.add(grant, now)
        return "done"

    def __len__(self) -> int:
        return len(self._live)
