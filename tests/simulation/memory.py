"""Memory that others write into, simulated: the owner's fencing is the project's own, the places are bytearrays.

Knows: shm (the writer copies slice by slice into the owner's memory; a slice that has begun lands, however late, unless its
process is dead) and tcp (the owner's real server places frames that come over a simulated connection). Every landing is told
to the world, which knows whom the place belongs to. Does not know tickets or requests.
"""

from __future__ import annotations

import asyncio
import struct
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from headrace.transfer import memory as memories
from headrace.transfer.copying import as_bytes, ended
from headrace.transfer.errors import DeadlineExceeded, GenerationRefused
from headrace.transfer.frames import Word
from headrace.transfer.incarnation import NO_NONCE, nonce_of
from headrace.transfer.memory import KINDS, Memory
from headrace.transfer.server import Server
from headrace.transfer.shm import ShmPeer

HOST = "host"  # nonce of the one shm directory there is


class SimMemory(Memory):
    """`Memory` without files: same regions, arming, fencing, server."""

    def __init__(self, instance: str, shm_dir: Any = "", kinds: Any = KINDS, tcp_host: str = "", tcp_port: int = 0,
                 tcp_bind: str | None = None) -> None:  # fmt: skip
        self.process = asyncio.get_running_loop().process
        world = self.process.world
        self.kinds = tuple(kind for kind in KINDS if kind in set(kinds))
        self.instance = instance
        self._shm_dir = HOST if "shm" in self.kinds else None
        nonce = HOST if self._shm_dir else NO_NONCE
        self.incarnation = f"{instance}~{nonce}~{world.count()}"
        self._incarnation = SimpleNamespace(name=self.incarnation, nonce=nonce, release=self._released)
        self._regions, self._views, self._maps, self._files, self._armed = {}, {}, [], [], {}
        self._fence = defaultdict(int) if self._shm_dir else None
        self._key = bytes(16)
        self._server = Server(self, "host", 0, "host", self._key) if "tcp" in self.kinds else None
        self._closed = False
        self.alive = True  # its lock is held
        self.placed: dict[int, set[tuple[str, int]]] = defaultdict(set)  # generation -> (region, offset) that it wrote
        self.raw: dict[str, memoryview] = {}  # also after it was closed: whoever mapped it still sees it
        world.memories[self.incarnation] = self

    def _map(self, name: str, nbytes: int) -> memoryview:
        view = self.raw[name] = memoryview(bytearray(nbytes))
        return view

    def _released(self) -> None:
        self.alive = False

    def is_dead(self, incarnation: str) -> bool:
        if self._shm_dir is None or nonce_of(incarnation) != HOST:
            return False
        return not self.process.world.memories[incarnation].alive


class SimShmPeer(ShmPeer):
    """`ShmPeer` on the owner's simulated memory. A check and the copy that follows it are two moments."""

    def __init__(self, address: Any, shm_dir: Any) -> None:
        self.address, self.incarnation, self.instance = address, address.incarnation, address.instance
        self.closed, self.reason = False, "closed"
        self.process = asyncio.get_running_loop().process
        self.world = self.process.world
        self.owner = self.world.memories[address.incarnation]
        self._views = {}
        self._check_alive()

    @property
    def _fence(self) -> Any:
        return self.owner._fence or defaultdict(int)

    def owner_is_dead(self) -> bool:
        return not self.owner.alive

    def _stale(self, generation: int) -> bool:
        return self._fence[generation % memories.FENCE_SLOTS] != generation

    def _map(self, name: str, nbytes: int | None) -> memoryview:
        view = self._views[name] = self.owner.raw[name]
        return view

    async def write(self, region: str, pieces: Any, generation: int, deadline: float) -> None:
        self._check(generation, deadline)
        for offset, buffer in pieces:
            source = as_bytes(buffer)
            size = self.world.slice_bytes
            for start in range(0, len(source), size):
                if self._stale(generation):
                    raise self._refusal(generation)
                if self.world.now > deadline:
                    raise DeadlineExceeded(f"copying to {self.instance} was not done before the deadline")
                await self._slice(region, offset + start, source[start : start + size], generation)

    async def commit(self, region: str, offset: int, value: int, generation: int, deadline: float) -> None:
        self._check(generation, deadline)
        fault = self.world.network.fault("Flag")
        word = memoryview(struct.pack("<Q", value))
        if fault is None:
            await self._slice(region, offset, word, generation)
        elif fault[0] == "delay":
            self.world.at(self.world.now + fault[1], self._late_word, region, offset, word, generation)

    def _late_word(self, region: str, offset: int, word: memoryview, generation: int) -> None:
        """A flag that its writer believes to be there lands only now, whoever's place that is meanwhile."""
        if self.owner.alive:
            self._range(region, offset, len(word))[:] = word
            self.world.landed(self.owner, generation, region, offset, len(word))

    async def read(self, region: str, ranges: Any, generation: int = 0, deadline: float = 0.0, into: Any = None) -> Any:
        known = self.address.regions[region]
        if not known.readable and not generation:
            raise GenerationRefused(f"region {region!r} is not readable without a generation")
        self._check(generation, deadline)
        targets = [memoryview(bytearray(n)) for _, n in ranges] if into is None else [as_bytes(b) for b in into]
        for (offset, nbytes), target in zip(ranges, targets, strict=True):
            if self.world.now > deadline:
                raise DeadlineExceeded(f"reading from {self.instance} was not done before the deadline")
            source, fault = self._range(region, offset, nbytes), self.world.network.fault("Read")
            await self._moment(lambda target=target, source=source: self._copy_now(target, source), fault)
            self._flip(fault, target)
        return targets

    async def close(self) -> None:
        self.closed, self.reason = True, "closed here"

    async def _slice(self, region: str, offset: int, source: memoryview, generation: int) -> None:
        target, fault = self._range(region, offset, len(source)), self.world.network.fault("Bytes")

        def land() -> None:
            target[:] = source
            self.world.landed(self.owner, generation, region, offset, len(source))
            if self._checked_there(region):
                self._flip(fault, target)

        await self._moment(land, fault)

    def _checked_there(self, region: str) -> bool:
        """Somebody compares checksums of what is written there."""
        return region in ("arena", "intake", "images") or self.world.config.checksums

    @staticmethod
    def _flip(fault: tuple | None, target: memoryview) -> None:
        """A byte comes out wrong, if the schedule says so."""
        if fault is not None and fault[0] == "flip":
            target[len(target) // 2] ^= 0xFF

    async def _moment(self, what: Any, fault: tuple | None = None) -> None:
        """`what` happens after the time that a slice takes; who is cancelled meanwhile waits for it."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def end() -> None:
            what()
            if not done.done():
                done.set_result(None)

        late = fault[1] if fault is not None and fault[0] == "delay" else 0.0
        loop.call_later(self.world.slice_seconds() + late, end)
        try:
            await asyncio.shield(done)
        except asyncio.CancelledError:
            await ended(done)
            raise

    @staticmethod
    def _copy_now(target: memoryview, source: memoryview) -> None:
        target[:] = source


def visible(address: Any, shm_dir: Any = None) -> Any:
    """In place of `shm.visible`: everybody with shm sees the same directory."""
    process = asyncio.get_running_loop().process
    return HOST if address.nonce == HOST and process.shm else None


def watched_write(original: Any) -> Any:
    """`Owned._write`, with every range told to the world when its bytes are placed."""

    def _write(self: Any, frame: Any) -> Any:
        targets, allowed = original(self, frame)
        memory, left = self.server.memory, list(frame.ranges)

        def watch() -> bool:
            if not allowed():
                return False
            if left:
                offset, nbytes = left.pop(0)
                memory.process.world.landed(memory, frame.generation, frame.region, offset, nbytes)
            return True

        return targets, watch

    return _write


def faulty_flags(original: Any) -> Any:
    """`Owned.received`, with the flags that the schedule loses or delays: acknowledged, but not (yet) there."""

    def received(self: Any, frame: Any) -> Any:
        if not (isinstance(frame, Word) and self.incarnation):
            return original(self, frame)
        memory = self.server.memory
        world, allowed = memory.process.world, memory.allows(frame.generation, frame.region, frame.offset, 8)
        fault = world.network.fault("Flag")
        if fault is None or not allowed:
            if allowed:
                world.landed(memory, frame.generation, frame.region, frame.offset, 8)
            return original(self, frame)

        def late() -> None:
            if memory.allows(frame.generation, frame.region, frame.offset, 8):
                memory.view(frame.region)[frame.offset : frame.offset + 8] = frame.value.to_bytes(8, "little")
                world.landed(memory, frame.generation, frame.region, frame.offset, 8)

        if fault[0] == "delay":
            world.at(world.now + fault[1], late)
        self._acknowledge(frame.id, frame.generation)
        return None

    return received


SHM = SimpleNamespace(visible=visible, ShmPeer=SimShmPeer)  # in place of the module `shm`
