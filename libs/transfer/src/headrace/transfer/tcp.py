"""The writer's end of tcp: one connection, shared by all writers of a process.

Knows frames under way, turns, answers and deadlines. Does not know what is armed: the owner's server decides (see
`server`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable

from headrace.transfer.address import Address
from headrace.transfer.copying import as_bytes, ended
from headrace.transfer.errors import BadRange, DeadlineExceeded, GenerationRefused, PeerLost
from headrace.transfer.frames import (
    CHUNK,
    HEADER_LIMIT,
    REMEMBERED,
    Ack,
    Connection,
    Data,
    Flush,
    Frame,
    Hello,
    Read,
    Refusal,
    Welcome,
    Word,
    Write,
    pack,
)

FRAME = 1 << 20  # payload bytes per frame: bounds what a cancelled write still has to finish
RANGES = 1024  # ranges per frame, so that its header stays far below HEADER_LIMIT
SMALL = 16 << 10  # payload bytes that are copied rather than waited for
SILENCE = 1.0  # seconds without a byte, while an answer was due, after which a connection is given up with its question
CANCEL_GRACE = 0.25  # seconds for the frame in flight when a write is cancelled; then the connection goes


class TcpPeer(Connection):
    """The writer's end. Shared by all writers of a process; frames of different writes interleave, each write's own
    are in order."""

    kind = "tcp"

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address, self.incarnation, self.instance = address, address.incarnation, address.instance
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future] = {}
        self._reading: dict[int, list[memoryview]] = {}
        self._refused: OrderedDict[int, str] = OrderedDict()
        self._sending = asyncio.Lock()
        self._arriving = 0  # the read whose payload is coming in

    @classmethod
    async def open(cls, address: Address, incarnation: str, deadline: float) -> TcpPeer:
        peer = cls(address)
        try:
            async with asyncio.timeout(_left(deadline)):
                await asyncio.get_running_loop().create_connection(lambda: peer, address.host, address.port)
                peer._waiting[0] = welcome = asyncio.get_running_loop().create_future()
                peer.send(pack(Hello(incarnation, address.key)))
                found = await welcome
        except TimeoutError as error:
            await peer.close()
            raise DeadlineExceeded(f"{address.instance} at {address.host}:{address.port} did not answer in time") from error
        except OSError as error:
            raise PeerLost(f"can't reach {address.instance} at {address.host}:{address.port}: {error}") from error
        except asyncio.CancelledError:
            await peer.close()
            raise
        if found != address.incarnation:
            await peer.close()
            raise PeerLost(
                f"{address.host}:{address.port} is {found} now; {address.incarnation} was wanted: get its new address"
            )
        return peer

    async def write(self, region: str, pieces, generation: int, deadline: float) -> None:
        """Place [(offset, buffer)] in `region`. Returns when the kernel has the bytes; `flush` tells that they are
        placed."""
        views = [(offset, as_bytes(buffer)) for offset, buffer in pieces]
        for ranges, parts in _frames(views):
            async with self._turn(deadline):
                self._check(generation)
                await self._send_frame(pack(Write(generation, region, ranges)), parts, deadline)

    async def flush(self, deadline: float, generation: int = 0) -> None:
        """Everything written before is placed. Raises GenerationRefused when a write of `generation` was not."""
        await self._ask(lambda id: Flush(id, generation), deadline, f"flush to {self.instance}")
        self._check(generation)

    async def commit(self, region: str, offset: int, value: int, generation: int, deadline: float) -> None:
        """Write the 8-byte word `value` after everything written before is placed, and know that it is there."""
        if offset % 8:
            raise BadRange(f"a commit word is 8-byte aligned; got offset {offset}")
        self._check(generation)
        await self._ask(lambda id: Word(id, generation, region, offset, value), deadline, f"commit at {self.instance}")
        self._check(generation)

    async def read(self, region: str, ranges, generation: int = 0, deadline: float = 0.0, into=None) -> list[memoryview]:
        """Bytes of [(offset, nbytes)], in new buffers or in `into` (one writable buffer per range)."""
        ranges = [(int(offset), int(nbytes)) for offset, nbytes in ranges]
        targets = [memoryview(bytearray(nbytes)) for _, nbytes in ranges] if into is None else [as_bytes(b) for b in into]
        if [len(target) for target in targets] != [nbytes for _, nbytes in ranges]:
            raise BadRange(f"{len(ranges)} ranges and {len(targets)} buffers of other sizes")
        for start in range(0, len(ranges), RANGES):
            part = slice(start, start + RANGES)

            def frame(id: int, part: slice = part) -> Read:
                self._reading[id] = targets[part]
                return Read(id, generation, region, ranges[part])

            await self._ask(frame, deadline, f"read from {self.instance}")
        return targets

    async def close(self) -> None:
        if self.transport and not self.closed:
            self.reason = "closed here"
            self.transport.abort()
            await asyncio.sleep(0)

    # ---- answers

    def received(self, frame: Frame):
        match frame:
            case Welcome(incarnation):
                self._settle(0, incarnation)
            case Ack(id, code, message):
                self._reading.pop(id, None)
                self._settle(id, None, GenerationRefused(message) if code else None)
            case Refusal(generation, message):
                self._refused[generation] = message
                if len(self._refused) > REMEMBERED:
                    self._refused.popitem(last=False)
            case Data(id, nbytes):
                targets = self._reading.pop(id, None)
                waiting = self._waiting.get(id)
                self._arriving = id
                if targets is None or waiting is None:  # given up meanwhile: throw the payload away
                    return [(None, nbytes)], bool
                if sum(map(len, targets)) != nbytes:
                    raise ValueError(f"{nbytes} bytes for a read of {sum(map(len, targets))}")
                return [(target, len(target)) for target in targets], lambda: not waiting.done()
            case _:
                raise ValueError(f"an owner does not send {type(frame).__name__}")

    def payload_done(self) -> None:
        self._settle(self._arriving, None)

    def lost(self) -> None:
        for id in list(self._waiting):
            self._settle(id, None, PeerLost(f"connection to {self.instance} is gone: {self.reason}"))

    def abort(self, reason: str) -> None:
        super().abort(reason)
        self.lost()

    # ---- below

    def _settle(self, id: int, value, error: Exception | None = None) -> None:
        future = self._waiting.pop(id, None)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(value)
        else:
            future.set_exception(error)

    def _check(self, generation: int) -> None:
        if self.closed:
            raise PeerLost(f"connection to {self.instance} is gone: {self.reason}")
        if message := self._refused.get(generation):
            raise GenerationRefused(message)

    @contextlib.asynccontextmanager
    async def _turn(self, deadline: float):
        """The right to send one frame."""
        try:
            async with asyncio.timeout(_left(deadline)):
                await self._sending.acquire()
        except TimeoutError as error:
            raise DeadlineExceeded(f"no turn to send to {self.instance} before the deadline") from error
        try:
            yield
        finally:
            self._sending.release()

    async def _send_frame(self, header: bytes, parts: list[memoryview], deadline: float) -> None:
        """One whole frame, or the connection goes: half a frame would make nonsense of all that follows."""
        if sum(map(len, parts)) <= SMALL and self.transport.get_write_buffer_size() <= HEADER_LIMIT:
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"the deadline for {self.instance} has passed")
            return self.send(b"".join((header, *parts)))  # a copy: the caller's buffers are free, nobody has to wait
        sending = asyncio.ensure_future(self._send_parts(header, parts))
        try:
            async with asyncio.timeout(_left(deadline)):
                await asyncio.shield(sending)
        except TimeoutError as error:
            self.abort(f"stalled: {self.instance} took no bytes before the deadline")
            raise DeadlineExceeded(f"{self.instance} took no bytes before the deadline; the connection is closed") from error
        except asyncio.CancelledError:
            done, _ = await asyncio.wait([sending], timeout=CANCEL_GRACE)
            if not done:
                self.abort("stalled while a write was cancelled")
            raise
        except ConnectionError as error:
            raise PeerLost(f"connection to {self.instance} is gone: {self.reason}") from error
        finally:
            if not sending.done():  # cancelled again while its frame was going out
                self.abort("a write was given up inside a frame")
                sending.cancel()
                await ended(sending)
            if not sending.cancelled():
                sending.exception()  # seen

    async def _send_parts(self, header: bytes, parts: list[memoryview]) -> None:
        self.send(header)
        for part in parts:
            for start in range(0, len(part), CHUNK):
                self.send(part[start : start + CHUNK])
                await self.drained()
        await self.drained()

    async def _ask(self, frame: Callable[[int], Frame], deadline: float, what: str) -> None:
        """Send a frame and wait for its answer. An answer that comes after the deadline is thrown away."""
        id = next(self._ids)
        self._check(0)
        self._waiting[id] = answer = asyncio.get_running_loop().create_future()
        asked = time.monotonic()
        try:
            async with self._turn(deadline):
                self._check(0)
                await self._send_frame(pack(frame(id)), [], deadline)
            async with asyncio.timeout(_left(deadline)):
                await answer
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
            if time.monotonic() - max(asked, self.heard) > SILENCE:
                self.abort("it answers nothing: the next writer opens another connection")
            raise DeadlineExceeded(f"{what} was not answered before the deadline") from error
        finally:
            self._waiting.pop(id, None)
            self._reading.pop(id, None)
            if not answer.done():
                answer.cancel()
            elif not answer.cancelled():
                answer.exception()


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _frames(views: list[tuple[int, memoryview]]):
    """Pieces -> frames of at most FRAME bytes and RANGES ranges: (ranges, parts)."""
    ranges: list[tuple[int, int]] = []
    parts: list[memoryview] = []
    size = 0
    for offset, view in views:
        for start in range(0, len(view), FRAME):
            part = view[start : start + FRAME]
            if ranges and (size + len(part) > FRAME or len(ranges) == RANGES):
                yield ranges, parts
                ranges, parts, size = [], [], 0
            ranges.append((offset + start, len(part)))
            parts.append(part)
            size += len(part)
    if ranges:
        yield ranges, parts
