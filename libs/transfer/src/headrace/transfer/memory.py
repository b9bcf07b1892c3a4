"""The owner's side: regions that others write into, and which generations may.

Knows regions, armed ranges, files in the shm directory and its tcp server. Does not know why a generation is armed.

Files of a memory with incarnation I in the shm directory: `I.lock` (its life, see `incarnation`), `I.<region>` (the bytes)
and `I.fence`: for each armed generation g the word at g mod FENCE_SLOTS holds g. Writers over shm look there before every
slice. That stops a late writer early; it can't stop one that is inside a copy, so memory that went out to a writer over shm
may be used again only when `fenced` says so or the writer said that it is done. Over tcp this process places the bytes
itself, and looks before every one of them: after `disarm` nothing more arrives.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import struct
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path

from headrace.transfer import incarnation as incarnations
from headrace.transfer.address import VERSION, Address, Region
from headrace.transfer.errors import BadRange, OutOfSpace, TransferError
from headrace.transfer.server import Server

KINDS = ("shm", "tcp")  # best first
FENCE_SLOTS = 1 << 16  # generations are counted up, so two that live at once share a slot only 65,536 tickets apart
Ranges = Iterable[tuple[int, int]]  # (offset, nbytes)


class Memory:
    """Registered regions of one process. One event loop's thread calls everything here."""

    def __init__(
        self,
        instance: str,
        shm_dir: str | os.PathLike = "/dev/shm/headrace",
        kinds: Iterable[str] = KINDS,
        tcp_host: str = "127.0.0.1",
        tcp_port: int = 0,
        tcp_bind: str | None = None,
    ) -> None:
        """`tcp_host` is what others connect to; `tcp_bind` (default: the same) is what the server binds."""
        self.kinds = tuple(kind for kind in KINDS if kind in set(kinds))
        if unknown := set(kinds) - set(KINDS):
            raise ValueError(f"unknown transports {sorted(unknown)}; there are {', '.join(KINDS)}")
        if not self.kinds:
            raise ValueError(f"no transport chosen; there are {', '.join(KINDS)}")
        self.instance, self._closed = instance, False
        self._shm_dir = Path(shm_dir).absolute() if "shm" in self.kinds else None
        self._incarnation = incarnations.Incarnation(instance, self._shm_dir)
        self.incarnation = self._incarnation.name
        self.swept = incarnations.sweep(self._shm_dir) if self._shm_dir else []
        self._regions: dict[str, Region] = {}
        self._views: dict[str, memoryview] = {}
        self._maps: list[mmap.mmap] = []
        self._files: list[Path] = []
        self._armed: dict[int, dict[str, list[tuple[int, int]]]] = {}  # generation -> region -> sorted, merged (start, end)
        self._fence: memoryview | None = None
        self._key = secrets.token_bytes(16)
        self._server = Server(self, tcp_host, tcp_port, tcp_bind or tcp_host, self._key) if "tcp" in self.kinds else None
        if self._shm_dir:
            try:
                self._fence = self._map("fence", 4 * FENCE_SLOTS).cast("I")
            except BaseException:
                self._incarnation.release()
                raise

    # ------------------------------------------------------------------ regions

    def register(self, name: str, nbytes: int, readable: bool = False) -> memoryview:
        """A zeroed region of `nbytes`, really allocated before this returns (about 0.25 s per GiB, so call it at start).

        `readable`: peers may read it without an armed generation. Raises OutOfSpace with size, free space and the way out.
        """
        if self._closed:
            raise TransferError(f"{self.instance} is closed; region {name!r} would outlive it")
        if name in self._regions or name in ("lock", "draft", "fence") or not name.isidentifier():
            raise ValueError(f"region name {name!r} is taken or not a plain word")
        if nbytes < 1:
            raise ValueError(f"region {name!r} needs at least one byte; got {nbytes}")
        view = self._map(name, nbytes)
        self._views[name] = view
        self._regions[name] = Region(nbytes, readable)
        return view

    def view(self, name: str) -> memoryview:
        try:
            return self._views[name]
        except KeyError:
            raise BadRange(f"{self.instance} has no region {name!r}; it has {sorted(self._views)}") from None

    # ------------------------------------------------------------------ fencing

    def arm(self, generation: int, ranges: Mapping[str, Ranges]) -> None:
        """Whoever names `generation` may write into these (offset, nbytes) ranges of these regions until `disarm`.

        A generation is minted once in the life of a memory (count up from 1) and fits a u32.
        """
        if not 1 <= generation < 1 << 32:
            raise ValueError(f"a generation is 1 to {(1 << 32) - 1}; got {generation}")
        if generation in self._armed:
            raise ValueError(f"generation {generation} is armed already; each grant has its own")
        merged = {}
        for region, pieces in ranges.items():
            size = len(self.view(region))
            merged[region] = _merge(pieces)
            for start, end in merged[region]:
                if start < 0 or end > size:
                    raise BadRange(f"range {start}..{end} is outside region {region!r} of {size} bytes")
        if self._fence is not None:
            slot = generation % FENCE_SLOTS
            if self._fence[slot]:
                raise ValueError(
                    f"generation {generation} shares a fence slot with the live {self._fence[slot]}; take the next one"
                )
            self._fence[slot] = generation
        self._armed[generation] = merged

    def disarm(self, generation: int) -> None:
        """From now on nothing named `generation` is placed over tcp, and shm writers stop at their next slice. Idempotent."""
        if self._armed.pop(generation, None) is not None and self._fence is not None:
            self._fence[generation % FENCE_SLOTS] = 0

    def is_armed(self, generation: int) -> bool:
        return generation in self._armed

    def allows(self, generation: int, region: str, offset: int, nbytes: int) -> bool:
        """May `nbytes` at `offset` be written (or read) under this generation now?"""
        armed = self._armed.get(generation, {}).get(region)
        if not armed or nbytes < 0:
            return False
        start, end = armed[bisect_right(armed, (offset, 1 << 63)) - 1]
        return start <= offset and offset + nbytes <= end

    def readable(self, generation: int, region: str, offset: int, nbytes: int) -> bool:
        """May these bytes be read now?"""
        known = self._regions.get(region)
        inside = known is not None and offset >= 0 and nbytes >= 0 and offset + nbytes <= known.nbytes
        return inside and (known.readable or self.allows(generation, region, offset, nbytes))

    def is_dead(self, incarnation: str) -> bool:
        """Proof that a process is gone; see `incarnation.is_dead`."""
        return self._shm_dir is not None and incarnations.is_dead(incarnation, self._shm_dir)

    def fenced(self, writer: str) -> bool:
        """Once its generation is disarmed: is it certain that no byte of this writer can land any more? True when the writer is
        proven dead, or can reach this memory by tcp only (it does not see our shm directory)."""
        if self._shm_dir is None or incarnations.nonce_of(writer) != self._incarnation.nonce:
            return True
        return self.is_dead(writer)

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the tcp server, if tcp is wanted. Before this, `address` raises."""
        if self._server:
            await self._server.start()

    def address(self) -> bytes:
        """What a writer hands to `connect`. Ask again after registering another region."""
        return Address(
            version=VERSION,
            instance=self.instance,
            incarnation=self.incarnation,
            kinds=self.kinds,
            regions=dict(self._regions),
            nonce=self._incarnation.nonce if self._shm_dir else "",
            shm_dir=str(self._shm_dir or ""),
            host=self._server.host if self._server else "",
            port=self._server.port if self._server else 0,
            key=self._key if self._server else b"",
        ).encode()

    def stats(self) -> dict[str, int]:
        """Bytes placed and frames refused by the tcp server, connections, armed generations."""
        served = self._server.stats() if self._server else {}
        return {"armed": len(self._armed), **served}

    async def close(self) -> None:
        """Disarm everything, stop serving, remove the files. Idempotent. The views stay valid until they are dropped."""
        if self._closed:
            return
        self._closed = True
        for generation in list(self._armed):
            self.disarm(generation)
        if self._server:
            await self._server.close()
        self._fence = None
        for path in self._files:
            path.unlink(missing_ok=True)
        self._incarnation.release()
        self._views.clear()
        for mapping in self._maps:
            with contextlib.suppress(BufferError):  # somebody (a tensor) still looks at it: freed with its last view
                mapping.close()

    # ------------------------------------------------------------------ below

    def _map(self, name: str, nbytes: int) -> memoryview:
        mapping = self._anonymous(name, nbytes) if self._shm_dir is None else self._segment(name, nbytes)
        self._maps.append(mapping)
        return memoryview(mapping)

    def _segment(self, name: str, nbytes: int) -> mmap.mmap:
        path = self._shm_dir / f"{self.incarnation}.{name}"
        self._files.append(path)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)  # a sparse file would be killed by SIGBUS later instead
            mapping = mmap.mmap(fd, nbytes)
        except OSError as error:
            path.unlink(missing_ok=True)
            stat = os.statvfs(self._shm_dir)
            raise OutOfSpace(
                f"region {name!r} of {self.instance} wants {nbytes:,} bytes of shared memory; {self._shm_dir} has "
                f"{stat.f_bavail * stat.f_frsize:,} of {stat.f_blocks * stat.f_frsize:,} bytes free ({error.strerror}). "
                "Enlarge it (mount -o remount,size=...; containers: shm_size), name a larger tmpfs with --shm-dir, "
                "ask for less, or do without shared memory with --transports tcp"
            ) from error
        finally:
            os.close(fd)
        if self._closed:  # meanwhile, by another thread: it may have looked for the file before there was one
            path.unlink(missing_ok=True)
            raise TransferError(f"{self.instance} was closed while region {name!r} was made")
        return mapping

    def _anonymous(self, name: str, nbytes: int) -> mmap.mmap:
        free = _memory_available()
        try:
            if free is not None and nbytes > free:
                raise OSError(None, "not enough memory")
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        except OSError as error:
            raise OutOfSpace(
                f"region {name!r} of {self.instance} wants {nbytes:,} bytes of memory; "
                f"{'an unknown number' if free is None else f'{free:,}'} are free ({error.strerror}). Ask for less"
            ) from error


def _merge(pieces: Ranges) -> list[tuple[int, int]]:
    """(offset, nbytes) in any order -> sorted, merged (start, end)."""
    merged: list[tuple[int, int]] = []
    for start, nbytes in sorted(pieces):
        if nbytes < 0:
            raise BadRange(f"a range can't have {nbytes} bytes")
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], start + nbytes))
        else:
            merged.append((start, start + nbytes))
    return merged


def _memory_available() -> int | None:
    """Bytes that Linux thinks it could give without swapping."""
    with contextlib.suppress(OSError, ValueError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def read_u64(view: memoryview, offset: int) -> int:
    """One mailbox word (little-endian, 8-byte aligned)."""
    return struct.unpack_from("<Q", view, offset)[0]
