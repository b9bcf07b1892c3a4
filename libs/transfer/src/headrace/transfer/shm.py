"""Bytes over shared memory: the writer maps the owner's segments and copies.

Knows files and copies. Does not know connections: there is none, so nothing here can stop a copy from the owner's side; see
`Memory.fenced`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from headrace.transfer import incarnation as incarnations
from headrace.transfer.address import Address
from headrace.transfer.copying import INLINE, as_bytes, copy_pieces, ended
from headrace.transfer.errors import BadRange, DeadlineExceeded, GenerationRefused, PeerLost, TransferError


def visible(address: Address, shm_dir: str | os.PathLike | None = None) -> Path | None:
    """The directory in which the owner's segments lie, if this process sees the same one: its nonce is the owner's and the
    owner's lock file is there. It may be mounted elsewhere here, hence `shm_dir`."""
    for path in (shm_dir, address.shm_dir):
        if path and address.nonce and incarnations.read_nonce(path) == address.nonce:
            return Path(path)
    return None


class ShmPeer:
    """Writes into and reads from the memory of another process on this host. Shared by all writers of a process."""

    kind = "shm"

    def __init__(self, address: Address, shm_dir: Path) -> None:
        self.address, self.incarnation, self.instance = address, address.incarnation, address.instance
        self.closed = False
        self.reason = "closed"
        self._dir = shm_dir
        self._maps: dict[str, mmap.mmap] = {}
        self._views: dict[str, memoryview] = {}
        self._pool: ThreadPoolExecutor | None = None  # one thread: copies to one peer don't fight for the same memory bus
        self._owner = incarnations.Watch(self.incarnation, shm_dir)
        try:
            self._check_alive()
            self._fence = self._map("fence", None).cast("I")
        except BaseException:
            self._owner.close()
            raise

    async def write(self, region: str, pieces, generation: int, deadline: float) -> None:
        """Place [(offset, buffer)] in `region`. Returns when the bytes are there."""
        pairs = [(self._range(region, offset, len(source)), source) for offset, source in ((o, as_bytes(b)) for o, b in pieces)]
        await self._copy(pairs, generation, deadline)

    async def flush(self, deadline: float, generation: int = 0) -> None:
        """What was written is placed already. Raises when the owner is dead or has disarmed `generation`."""
        self._check(generation, deadline)

    async def commit(self, region: str, offset: int, value: int, generation: int, deadline: float) -> None:
        """Write the 8-byte word `value`, in one store."""
        if offset % 8:
            raise BadRange(f"a commit word is 8-byte aligned; got offset {offset}")
        self._range(region, offset, 8)
        self._check(generation, deadline)
        ctypes.c_uint64.from_buffer(self._maps[region], offset).value = value

    async def read(self, region: str, ranges, generation: int = 0, deadline: float = 0.0, into=None) -> list[memoryview]:
        """Bytes of [(offset, nbytes)], in new buffers or in `into` (one writable buffer per range)."""
        ranges = list(ranges)
        known = self.address.regions.get(region)
        if known is not None and not known.readable and not generation:
            raise GenerationRefused(f"region {region!r} of {self.instance} is not readable without a generation")
        sources = [self._range(region, offset, nbytes) for offset, nbytes in ranges]
        targets = [memoryview(bytearray(len(s))) for s in sources] if into is None else [as_bytes(buffer) for buffer in into]
        if list(map(len, targets)) != list(map(len, sources)):
            raise BadRange(f"{len(sources)} ranges and {len(targets)} buffers of other sizes")
        await self._copy(list(zip(targets, sources, strict=True)), generation, deadline)
        return targets

    async def close(self) -> None:
        """Idempotent. Waits for the copy that is running (one slice)."""
        if self.closed:
            return
        self.closed, self.reason = True, "closed here"
        if self._pool:
            await asyncio.get_running_loop().run_in_executor(None, self._pool.shutdown)
        self._owner.close()
        self._fence.release()
        for view in self._views.values():
            view.release()
        self._views.clear()
        for mapping in self._maps.values():
            with contextlib.suppress(BufferError):
                mapping.close()
        self._maps.clear()

    # ------------------------------------------------------------------ below

    def _check(self, generation: int, deadline: float) -> None:
        if self.closed:
            raise PeerLost(f"{self.instance}: {self.reason}")
        self._check_alive()
        if generation and self._stale(generation):
            raise self._refusal(generation)
        if time.monotonic() > deadline:
            raise DeadlineExceeded(f"the deadline for {self.instance} has passed")

    def owner_is_dead(self) -> bool:
        """Proof that the owner is gone; see `incarnation.Watch`."""
        return self._owner.is_dead()

    def _check_alive(self) -> None:
        if self.owner_is_dead():
            self.reason = "its process is gone"
            raise PeerLost(f"{self.instance} ({self.incarnation}) is dead: the lock on its incarnation is free")

    def _stale(self, generation: int) -> bool:
        return self._fence[generation % len(self._fence)] != generation

    def _refusal(self, generation: int) -> GenerationRefused:
        return GenerationRefused(f"generation {generation} is not armed at {self.instance}")

    def _range(self, region: str, offset: int, nbytes: int) -> memoryview:
        known = self.address.regions.get(region)
        if known is None:
            raise BadRange(f"{self.instance} has no region {region!r}; it has {sorted(self.address.regions)}")
        if offset < 0 or nbytes < 0 or offset + nbytes > known.nbytes:
            raise BadRange(f"range {offset}..{offset + nbytes} is outside region {region!r} of {known.nbytes} bytes")
        view = self._views.get(region) or self._map(region, known.nbytes)
        return view[offset : offset + nbytes]

    def _map(self, name: str, nbytes: int | None) -> memoryview:
        path = self._dir / f"{self.incarnation}.{name}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise PeerLost(f"{self.instance} has no segment {path.name}: it is gone") from None
        except OSError as error:
            raise TransferError(f"can't open {path}: {error.strerror}; both processes need the same user or group") from error
        try:
            size = os.fstat(fd).st_size
            if nbytes is not None and size != nbytes:
                raise TransferError(f"{path.name} has {size} bytes; its address says {nbytes}")
            mapping = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        self._maps[name] = mapping
        view = memoryview(mapping)
        self._views[name] = view
        return view

    async def _copy(self, pairs: list[tuple[memoryview, memoryview]], generation: int, deadline: float) -> None:
        """Small copies here, large ones in the peer's thread. Either way no copy runs on after this has ended."""
        self._check(generation, deadline)
        stopped = threading.Event()

        def stop() -> BaseException | None:
            if stopped.is_set():
                return PeerLost("cancelled")
            return self._refusal(generation) if generation and self._stale(generation) else None

        try:
            if sum(len(source) for _, source in pairs) <= INLINE:
                return copy_pieces(pairs, deadline, stop)
            self._pool = self._pool or ThreadPoolExecutor(1, thread_name_prefix=f"shm-{self.instance}")
            job = asyncio.get_running_loop().run_in_executor(self._pool, copy_pieces, pairs, deadline, stop)
            try:
                await asyncio.shield(job)
            except asyncio.CancelledError:
                stopped.set()
                await ended(job)  # at most one slice
                if not job.cancelled():
                    job.exception()
                raise
        except TimeoutError as error:
            raise DeadlineExceeded(f"copying to or from {self.instance} was not done before the deadline") from error
