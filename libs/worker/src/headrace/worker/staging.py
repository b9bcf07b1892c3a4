"""Room where others put bytes for a moment: one registered region, one grant per delivery.

Knows rooms, grants (`headrace.kv.grants.store`), checksums. Does not know what the bytes are or who asked for them. What
arrives is copied out and its room is free again, so a region is as large as what is under way. Room whose writer was not heard
of again is quarantined until that writer says that it is done or is proven unable to write.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from headrace.bus import nuid
from headrace.kv.arena import Arena
from headrace.kv.grants import Ledger, store
from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev
from headrace.transfer import Memory

INLINE_BYTES = 64 << 10  # more than this is copied and compared in a thread


class StagingError(Exception):
    """A delivery can't be taken. `code`: stale | corrupt."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Room:
    """A grant as its writer must know it. `sender`: the instance that is asked about it."""

    grant: str
    generation: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sender: str


class Staging:
    """`ask(sender, grant)`: have that instance asked for the grant's status; its answer goes to `writer_says`."""

    def __init__(self, memory: Memory, region: str, nbytes: int, ask: Callable[[str, str], None]) -> None:
        self.region, self.capacity = region, nbytes
        self._memory, self._ask = memory, ask
        self._view = memory.register(region, nbytes)
        self._arena = Arena(nbytes)
        self._grants: Ledger[store.Grant] = Ledger(store.step, store.tick, store.over)
        self._rooms: dict[str, Room] = {}
        self.counters = dict.fromkeys(("granted", "taken", "taken_bytes", "expired", "corrupt"), 0)

    def grant(self, writer: str, sender: str, sizes: Sequence[int], ttl: float, now: float) -> Room | None:
        """Room for deliveries of these sizes, all or nothing; None when there is not enough now. `writer`: incarnation.
        ValueError when it can never be."""
        if sum(sizes) > self.capacity:
            raise ValueError(f"{sum(sizes):,} bytes are to land in {self.region!r}, which has {self.capacity:,}")
        offsets: list[int] = []
        for size in sizes:
            offset = self._arena.allocate(size)
            if offset is None:
                for at, taken in zip(offsets, sizes, strict=False):
                    self._arena.free(at, taken)
                return None
            offsets.append(offset)
        room = Room(nuid(), self._grants.next_generation(), tuple(offsets), tuple(sizes), sender)
        self._rooms[room.grant] = room
        self.counters["granted"] += 1
        opened = store.reserve(room.generation, writer, len(sizes), ttl, now)
        self._carry(room.grant, self._grants.add(room.grant, *opened), now)
        return room

    async def take(self, room: Room, checksums: Sequence[int], now: Callable[[], float]) -> list[bytes]:
        """The writer says that everything is placed: copies of the deliveries. Raises StagingError: the grant is over, or a
        checksum does not fit. Not to be cancelled half-way: shield it."""
        effects = self._grants.feed(room.grant, ev.Committed(room.generation, 0, tuple(checksums)), now())
        self._carry(room.grant, effects, now())  # also of a grant that is over: the word ends its quarantine
        if not any(isinstance(effect, fx.Verify) for effect in effects):
            raise StagingError("stale", f"grant {room.grant} is over")

        def work() -> tuple[list[bytes], tuple[bool, ...]]:
            parts = [bytes(self._view[o : o + n]) for o, n in zip(room.offsets, room.sizes, strict=True)]
            sums = list(checksums)
            return parts, tuple(len(sums) == len(parts) and crc32(part) == sums[i] for i, part in enumerate(parts))

        parts, good = work() if sum(room.sizes) <= INLINE_BYTES else await asyncio.to_thread(work)
        self._carry(room.grant, self._grants.feed(room.grant, ev.Checked(good), now()), now())
        if not all(good):
            self.counters["corrupt"] += 1
            raise StagingError("corrupt", f"the checksum of delivery {good.index(False)} does not fit")
        self.counters["taken"] += len(parts)
        self.counters["taken_bytes"] += sum(room.sizes)
        return parts

    def abandon(self, room: Room, now: float) -> None:
        """Nobody wants the delivery any more; the room is free when its writer has let go."""
        self._carry(room.grant, self._grants.feed(room.grant, ev.Cancelled(), now), now)

    def writer_says(self, grant: str, status: str, now: float) -> None:
        """A writer's answer: "writing", or "done": it will not write under the grant, now or ever."""
        self._carry(grant, self._grants.feed(grant, ev.WriterStatus(status), now), now)

    def tick(self, now: float) -> None:
        """Leases and quarantine; call it every turn of the owner's sweep."""
        for grant, effect in self._grants.tick(now):
            self.counters["expired"] += isinstance(effect, fx.Disarm)
            self._carry(str(grant), [effect], now)

    def holds(self, room: Room) -> bool:
        """Whether the grant is still open."""
        state = self._grants.live.get(room.grant)
        return state is not None and state.phase == store.OPEN

    # ------------------------------------------------------------ numbers

    def bytes_by_place(self) -> dict[str, int]:
        quarantined = sum(sum(self._rooms[str(g)].sizes) for g, state in self._grants if state.phase == store.EXPIRED)
        return {"used": self._arena.used, "quarantined": quarantined, "free": self._arena.capacity - self._arena.used}

    def __len__(self) -> int:
        """Grants that are open, being checked or in quarantine."""
        return len(self._grants)

    def check(self) -> None:
        """AssertionError unless every byte is free or belongs to exactly one grant."""
        rooms, grants = set(self._rooms), {str(grant) for grant, _ in self._grants}
        assert rooms == grants, f"rooms without a grant: {rooms - grants}, grants without room: {grants - rooms}"
        pieces = [(o, o + n) for room in self._rooms.values() for o, n in zip(room.offsets, room.sizes, strict=True)]
        pieces = sorted([*pieces, *self._arena.gaps()])
        assert all(a[1] <= b[0] for a, b in zip(pieces, pieces[1:], strict=False)), "two grants share bytes"

    # ------------------------------------------------------------ below

    def _carry(self, grant: str, effects: Sequence[fx.Effect], now: float) -> None:
        room = self._rooms.get(grant)
        for effect in effects:
            match effect:
                case fx.Arm(generation):
                    ranges = list(zip(room.offsets, room.sizes, strict=True))
                    self._memory.arm(generation, {self.region: ranges})
                case fx.Disarm(generation):
                    self._memory.disarm(generation)
                case fx.CheckFence(writer):
                    if self._memory.fenced(writer):
                        self._carry(grant, self._grants.feed(grant, ev.Fenced(), now), now)
                case fx.AskStatus():
                    self._ask(room.sender, grant)
                case fx.Publish(objects) | fx.FreeRoom(objects):
                    for index in objects:
                        self._arena.free(room.offsets[index], room.sizes[index])
        if grant not in self._grants.live:
            self._rooms.pop(grant, None)
