"""The DRAM tier: arena, index, grants and pins joined; everything but bytes on the wire.

Knows what to do with each of the four verbs, eviction, expiry. Does not know the bus. Checksums are computed by `verify`,
which the caller runs off the loop. Time is passed in (monotonic seconds).

A key is visible only after its checksum fitted. What is pinned is never evicted, so bytes read under a pin are the stored
ones. Room that a worker may still write into comes back only when it committed, gave up, or is proven unable to write.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from headrace.bus import nuid
from headrace.kv.arena import Arena, room
from headrace.kv.grants import Ledger, pins, store
from headrace.kv.grants import effects as fx
from headrace.kv.grants import events as ev
from headrace.transfer import Memory
from headrace.transfer.incarnation import nonce_of

from .objects import BLOCK, KINDS, STATE, Key, Objects, Stored

REGION = "arena"
KEY_BYTES = 16
VICTIMS = 256  # evicted per turn: bounds the time on the event loop
FORCED = 256  # evicted for one request that finds no room (everything is clean here, so a victim costs nothing but itself)


class StoreError(Exception):
    """A verb is refused. `code` as in messages.Refused."""

    def __init__(self, code: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.code, self.retry_after = code, retry_after


@dataclass(slots=True)
class Limits:
    """Shares of the capacity; seconds; counts."""

    start: float = 0.80
    stop: float = 0.70
    refuse: float = 0.95
    ttl: float = 168 * 3600.0  # of objects
    lease: float = 60.0  # longest of pins and grants
    handles: int = 4096


@dataclass(slots=True, eq=False)
class Pending:
    """A grant's objects while they are being written."""

    objects: list[Stored]
    requests: list[str]
    since: float


class Store:
    """One arena. `memory` must have no region named "arena" yet."""

    def __init__(self, memory: Memory, capacity: int, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.memory = memory
        self.view = memory.register(REGION, capacity, readable=True)
        self.arena = Arena(capacity)
        self.objects = Objects(self.limits.ttl)
        self.grants: Ledger[store.Grant] = Ledger(store.step, store.tick, store.over)
        self.held: Ledger[pins.Held] = Ledger(pins.held_step, pins.held_tick, pins.held_over)
        self.pending: dict[str, Pending] = {}
        self.pinned: dict[str, list[Stored]] = {}
        self.counters = dict.fromkeys(
            ("lookups", "lookup_keys", "hit_keys", "hit_states", "reserved", "already_stored", "stored_blocks", "stored_states",
             "stored_bytes", "rejected", "evicted_blocks", "evicted_states", "evicted_bytes", "expired_objects", "expired_pins",
             "expired_grants", "refused_full", "refused_busy"), 0
        )  # fmt: skip
        self._writing: set[Key] = set()  # keys of pending objects
        self._draining = False

    # ------------------------------------------------------------------ reading

    def lookup(
        self, worker: str, namespace: bytes, keys: bytes, states: bytes, ttl: float, now: float
    ) -> tuple[str, list[Stored], list[Stored | None]]:
        """(handle, longest stored prefix of `keys`, snapshot or None per key of `states`), all pinned under the handle; the
        handle is "" when nothing was found. `keys`, `states`: 16-byte keys, concatenated."""
        self.counters["lookups"] += 1
        wanted = _split(keys)
        blocks: list[Stored] = []
        for key in wanted:
            found = self.objects.get((BLOCK, namespace, key), now)
            if found is None:
                break
            blocks.append(found)
        snapshots = [self.objects.get((STATE, namespace, key), now) for key in _split(states)]
        found = blocks + [snapshot for snapshot in snapshots if snapshot is not None]
        self.counters["lookup_keys"] += len(wanted)
        self.counters["hit_keys"] += len(blocks)
        self.counters["hit_states"] += len(found) - len(blocks)
        if not found:
            return "", [], snapshots
        self._check_handles()
        handle = nuid()
        self.held.add(handle, *pins.hold(worker, min(ttl, self.limits.lease), now))
        self.pinned[handle] = found
        for stored in found:
            self.objects.touch(stored, now)
            self.objects.pin(stored)
        return handle, blocks, snapshots

    def release(self, handle: str, now: float) -> bool:
        """Drop a lookup's pins, or give a write grant up. True when pins held until now."""
        if self.grants.get(handle) is not None:
            self._carry(handle, self.grants.feed(handle, ev.Released(), now), now)
            return True
        return any(effect == fx.Valid(True) for effect in self._let_go(handle, self.held.feed(handle, ev.Released(), now)))

    # ------------------------------------------------------------------ writing

    def reserve(
        self,
        writer: str,
        namespace: bytes,
        keys: bytes,
        sizes: Sequence[int],
        kind: str,
        parents: bytes,
        ttl: float,
        requests: list[str],
        now: float,
    ) -> tuple[str, int, list[int]]:
        """(grant, generation, offset per key): room for the keys that are neither stored nor being written; those get -1.
        The grant is "" when none is left. Raises StoreError: invalid, busy, full."""
        names, above = _split(keys), _split(parents) or [bytes(KEY_BYTES)] * (len(keys) // KEY_BYTES)
        self._validate(writer, names, sizes, kind, above)
        self._check_handles()
        offsets, new = [], []
        for name, nbytes, parent in zip(names, sizes, above, strict=True):
            key = (kind, namespace, name)
            known = self.objects.get(key, now)
            if known is not None:
                self.objects.touch(known, now)
            if known is not None or key in self._writing or any(other.key == key for other in new):
                self.counters["already_stored"] += 1
                offsets.append(-1)
                continue
            offsets.append(0)
            new.append(Stored(key, (BLOCK, namespace, parent), 0, nbytes, 0, 0))
        if not new:
            return "", 0, offsets
        self._place(new, now)
        places = iter(new)
        offsets = [-1 if offset < 0 else next(places).offset for offset in offsets]
        grant, generation = nuid(), self.grants.next_generation()
        for stored in new:
            stored.generation = generation
        self.pending[grant] = Pending(new, requests, now)
        self._writing.update(stored.key for stored in new)
        self.counters["reserved"] += len(new)
        lease = min(ttl, self.limits.lease)
        self._carry(grant, self.grants.add(grant, *store.reserve(generation, writer, len(new), lease, now)), now)
        return grant, generation, offsets

    def commit(self, grant: str, generation: int, checksums: list[int], now: float) -> list[fx.Effect]:
        """The worker says that the grant's objects are written. Effects for the caller: Verify (run `verify` off the loop,
        then feed `checked`), Stored, Stale or Unknown."""
        pending = self.pending.get(grant)
        if pending is not None and len(checksums) != len(pending.objects):
            raise StoreError("invalid", f"the grant has {len(pending.objects)} objects; {len(checksums)} checksums were given")
        return self._carry(grant, self.grants.feed(grant, ev.Committed(generation, record=list(checksums)), now), now)

    def verify(self, grant: str, checksums: Sequence[int]) -> tuple[bool, ...]:
        """Does each object's crc32 fit? Reads the whole grant: not for the event loop."""
        objects = self.pending[grant].objects
        return tuple(
            crc32(self.view[stored.offset : stored.offset + stored.nbytes]) == checksum
            for stored, checksum in zip(objects, checksums, strict=True)
        )

    def checked(self, grant: str, checksums: Sequence[int], good: tuple[bool, ...], now: float) -> list[fx.Effect]:
        """`verify` has ended: publish what is whole."""
        for stored, checksum in zip(self.pending[grant].objects, checksums, strict=True):
            stored.checksum = checksum
        return self._carry(grant, self.grants.feed(grant, ev.Checked(good), now), now)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[tuple[str, str]]:
        """Leases, quarantine, expiry, eviction. Every turn of the loop, also when nothing is asked. -> (grant, incarnation of
        its writer) of grants in quarantine whose writers should be asked now; `writer_says` takes the answers."""
        asking: list[tuple[str, str]] = []
        for handle, effect in self.held.tick(now):
            self.counters["expired_pins"] += 1
            self._let_go(handle, [effect])
        for grant, effect in self.grants.tick(now):
            self.counters["expired_grants"] += isinstance(effect, fx.Disarm)
            if isinstance(effect, fx.AskStatus):
                asking.append((grant, self.grants.get(grant).writer))
            self._carry(grant, [effect], now)
        self.evict(now)
        return asking

    def writer_says(self, grant: str, state: str, now: float) -> None:
        """A writer's answer about a grant: "writing", or "done": it will not write under it, now or ever."""
        self._carry(grant, self.grants.feed(grant, ev.WriterStatus(state), now), now)

    def evict(self, now: float) -> bool:
        """Some victims, if it is time; True when there is more to do."""
        capacity = self.arena.capacity
        for _ in range(VICTIMS):
            if self.arena.used > self.limits.start * capacity:
                self._draining = True
            elif self.arena.used <= self.limits.stop * capacity:
                self._draining = False
            if not (self._draining or self.objects.expired(now)):
                return False
            if not self._evict_one(now):
                self._draining = False
                return False
        return True

    # ------------------------------------------------------------------ numbers

    def bytes_by_state(self) -> dict[str, int]:
        """Arena bytes by what they are: stored, pinned (part of stored), writing, quarantined, free."""
        phases = {grant: state.phase for grant, state in self.grants}
        sizes = {"writing": 0, "quarantined": 0}
        for grant, pending in self.pending.items():
            place = "quarantined" if phases[grant] == store.EXPIRED else "writing"
            sizes[place] += sum(room(stored.nbytes) for stored in pending.objects)
        stored = self.arena.used - sum(sizes.values())
        return {"stored": stored, "pinned": self.objects.pinned_bytes, **sizes, "free": self.arena.capacity - self.arena.used}

    def check(self) -> None:
        """AssertionError unless every byte of the arena is free or has exactly one owner, by walking them."""
        owners = [*self.objects, *(stored for pending in self.pending.values() for stored in pending.objects)]
        spans = sorted((stored.offset, stored.offset + room(stored.nbytes)) for stored in owners)
        spans = sorted([*spans, *self.arena.gaps()])
        assert all(before[1] == after[0] for before, after in zip(spans, spans[1:], strict=False)), "overlap or hole"
        assert spans[0][0] == 0 and spans[-1][1] == self.arena.capacity
        assert self.arena.used == sum(room(stored.nbytes) for stored in owners)
        held = [stored for found in self.pinned.values() for stored in found]
        assert all(stored.pins == held.count(stored) for stored in self.objects)
        here = set(map(id, self.objects))
        assert all(id(stored) in here for stored in held), "a pinned object was evicted"
        assert self.pinned.keys() == set(dict(self.held)) and self.pending.keys() == set(dict(self.grants))
        assert self._writing == {stored.key for pending in self.pending.values() for stored in pending.objects}

    # ------------------------------------------------------------------ below

    def _carry(self, grant: str, effects: list[fx.Effect], now: float) -> list[fx.Effect]:
        """Carry out what concerns memory; return the rest."""
        rest = []
        for effect in effects:
            match effect:
                case fx.Arm(generation):
                    ranges = [(stored.offset, stored.nbytes) for stored in self.pending[grant].objects]
                    self.memory.arm(generation, {REGION: ranges})
                case fx.Disarm(generation):
                    self.memory.disarm(generation)
                case fx.CheckFence(writer):
                    if self.memory.fenced(writer):
                        rest += self._carry(grant, self.grants.feed(grant, ev.Fenced(), now), now)
                case fx.Publish(objects):
                    self._publish([self.pending[grant].objects[index] for index in objects], now)
                case fx.FreeRoom(objects):
                    self._give_back(grant, objects)
                case _:
                    rest.append(effect)
        return rest

    def _publish(self, objects: list[Stored], now: float) -> None:
        for stored in objects:
            self._writing.discard(stored.key)
            if not self.objects.add(stored, now):  # an equal one that had expired was not swept yet, and now lives on
                self.arena.free(stored.offset, stored.nbytes)
                continue
            self.counters[f"stored_{stored.key[0]}s"] += 1
            self.counters["stored_bytes"] += stored.nbytes

    def _give_back(self, grant: str, indices: tuple[int, ...]) -> None:
        """Room of objects that will not be published. Always a grant's last effect on memory: it is forgotten after it."""
        pending = self.pending.pop(grant)
        for index in indices:
            stored = pending.objects[index]
            self._writing.discard(stored.key)
            self.arena.free(stored.offset, stored.nbytes)

    def _let_go(self, handle: str, effects: list[fx.Effect]) -> list[fx.Effect]:
        for effect in effects:
            if isinstance(effect, fx.Unpin):
                for stored in self.pinned.pop(handle):
                    self.objects.unpin(stored)
        return effects

    def _place(self, new: list[Stored], now: float) -> None:
        """Offsets for all, or StoreError full and no change."""
        need = sum(room(stored.nbytes) for stored in new)
        limit = self.limits.refuse * self.arena.capacity
        self.evict(now)
        placed: list[Stored] = []
        forced = 0
        for stored in new:
            size, high = room(stored.nbytes), stored.key[0] == STATE
            while (offset := self.arena.allocate(size, high) if self.arena.used + size <= limit else None) is None:
                if forced == FORCED or not self._evict_one(now):
                    for other in placed:
                        self.arena.free(other.offset, other.nbytes)
                    self.counters["refused_full"] += 1
                    raise StoreError(
                        "full",
                        f"no room for {need:,} bytes: {self.arena.used:,} of {self.arena.capacity:,} are in use, "
                        f"{self.objects.pinned_bytes:,} of them pinned, the largest gap has {self.arena.largest:,}",
                        retry_after=0.25,
                    )
                forced += 1
            stored.offset = offset
            placed.append(stored)

    def _evict_one(self, now: float) -> bool:
        victim = self.objects.evict(now)
        if victim is None:
            return False
        stored, reason = victim
        self.arena.free(stored.offset, stored.nbytes)
        self.counters[f"evicted_{stored.key[0]}s"] += 1
        self.counters["evicted_bytes"] += stored.nbytes
        self.counters["expired_objects"] += reason == "expired"
        return True

    def _check_handles(self) -> None:
        if len(self.held) + len(self.grants) >= self.limits.handles:
            self.counters["refused_busy"] += 1
            raise StoreError("busy", f"{self.limits.handles} lookups and grants are open", retry_after=0.25)

    def _validate(self, writer: str, names: list[bytes], sizes: Sequence[int], kind: str, above: list[bytes]) -> None:
        if kind not in KINDS:
            raise StoreError("invalid", f"kind {kind!r}; there are {', '.join(KINDS)}")
        if not len(names) == len(sizes) == len(above):
            raise StoreError("invalid", f"{len(names)} keys, {len(sizes)} sizes and {len(above)} parents don't go together")
        if bad := [size for size in sizes if not 1 <= size <= self.arena.capacity]:
            raise StoreError("invalid", f"an object of {bad[0]:,} bytes; the arena has {self.arena.capacity:,}")
        try:
            nonce_of(writer)
        except ValueError as error:
            raise StoreError("invalid", str(error)) from None


def _split(keys: bytes) -> list[bytes]:
    if len(keys) % KEY_BYTES:
        raise StoreError("invalid", f"keys are {KEY_BYTES} bytes each; got {len(keys)} bytes")
    return [keys[i : i + KEY_BYTES] for i in range(0, len(keys), KEY_BYTES)]
