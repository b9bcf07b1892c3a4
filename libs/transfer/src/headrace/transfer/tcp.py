"""Bytes over tcp: frames, the owner's server, the writer's peer.

A frame is a u32 header length, a msgpack header, and the payload that the header announces. Payload goes from the socket
straight into the region (BufferedProtocol): the owner is asked where the next bytes belong just before the kernel copies
them, and that is where the generation is checked, for every piece of at most CHUNK bytes. A refused frame is read and
thrown away, so one stale ticket does not cost the connection. Frames of one connection are handled in order, so the answer
to a Flush means that everything before it is placed.

Knows frames and connections. Does not know files or shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import socket
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable

import msgspec

from headrace.transfer.address import Address
from headrace.transfer.copying import as_bytes
from headrace.transfer.errors import BadRange, DeadlineExceeded, GenerationRefused, PeerLost

CHUNK = 256 << 10  # bytes per recv or send: bounds the time a copy takes on the event loop (some 50 us)
FRAME = 1 << 20  # payload bytes per frame: bounds what a cancelled write still has to finish
HEADER_LIMIT = 1 << 16  # bytes
RANGES = 1024  # ranges per frame, so that its header stays far below HEADER_LIMIT
PENDING_READS = 64  # per connection, before the server stops listening to it
REMEMBERED = 1024  # refused generations per connection
SMALL = 16 << 10  # payload bytes that are copied rather than waited for
STALL = 30.0  # seconds that the server waits for a reader who does not read
CANCEL_GRACE = 0.25  # seconds for the frame in flight when a write is cancelled; then the connection goes

_LENGTH = struct.Struct("<I")


class Frame(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


class Hello(Frame):
    incarnation: str
    key: bytes
    version: int = 1


class Welcome(Frame):
    incarnation: str


class Write(Frame):
    generation: int
    region: str
    ranges: list[tuple[int, int]]  # (offset, nbytes); the payload is their concatenation


class Flush(Frame):
    id: int
    generation: int  # whose refusals to report


class Word(Frame):
    """Place the 8-byte word, if nothing of `generation` was refused before on this connection. Answered by Ack."""

    id: int
    generation: int
    region: str
    offset: int
    value: int


class Read(Frame):
    id: int
    generation: int
    region: str
    ranges: list[tuple[int, int]]


class Ack(Frame):
    """Answer to Flush and Word, or to a Read that is refused. `code`: "" | refused"""

    id: int
    code: str = ""
    message: str = ""


class Data(Frame):
    """Answer to Read; the payload is the ranges' concatenation."""

    id: int
    nbytes: int


class Refusal(Frame):
    """Sent at once when a Write is refused, so that its writer stops before its flush."""

    generation: int
    message: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Hello | Welcome | Write | Flush | Word | Read | Ack | Data | Refusal).decode


def pack(frame: Frame) -> bytes:
    header = _encode(frame)
    assert len(header) <= HEADER_LIMIT
    return _LENGTH.pack(len(header)) + header


class Connection(asyncio.BufferedProtocol):
    """Both ends: takes frames apart. Subclasses implement `received` (header -> where its payload goes) and `lost`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.reason = "closed"
        self._head = bytearray(HEADER_LIMIT)
        self._want, self._have, self._in_header = _LENGTH.size, 0, False
        self._scratch: bytearray | None = None
        self._targets: deque[tuple[memoryview | None, int]] = deque()  # where the payload goes (None: nowhere), bytes left
        self._allowed: Callable[[], bool] = bool
        self._writable = asyncio.Event()
        self._writable.set()

    # ---- to implement

    def received(self, frame: Frame) -> tuple[list[tuple[memoryview | None, int]], Callable[[], bool]] | None:
        """A header came. Returns payload targets [(view or None, nbytes)] and a check made before each piece is placed."""
        raise NotImplementedError

    def payload_done(self) -> None:
        """The payload of the last header with one is placed (or thrown away)."""

    def lost(self) -> None:
        """The connection is gone; `reason` says why."""

    # ---- asyncio calls these

    def connection_made(self, transport) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=0)  # `drained` means: the kernel has it all, our buffers are the caller's again
        tune(transport.get_extra_info("socket"))

    def get_buffer(self, sizehint: int) -> memoryview:
        if not self._targets:
            return memoryview(self._head)[self._have : self._want]
        view, left = self._targets[0]
        size = min(left, CHUNK)
        if view is not None and self._allowed():
            return view[:size]
        if self._scratch is None:
            self._scratch = bytearray(CHUNK)
        return memoryview(self._scratch)[:size]

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._targets:
                self._advance(nbytes)
            else:
                self._have += nbytes
                if self._have == self._want:
                    self._head_complete()
        except Exception as error:  # a frame we can't read: nothing after it can be trusted
            self.abort(f"protocol error: {error}")

    def eof_received(self) -> None:
        self.reason = "closed by the other side"

    def connection_lost(self, error: Exception | None) -> None:
        if error is not None:
            self.reason = f"{type(error).__name__}: {error}"
        self.closed = True
        self._targets.clear()
        self._writable.set()
        self.lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # ---- for subclasses

    def send(self, data: bytes | memoryview) -> None:
        if not self.closed:
            self.transport.write(data)

    async def drained(self) -> None:
        """All that was sent is with the kernel. ConnectionError when the connection is gone."""
        await self._writable.wait()
        if self.closed:
            raise ConnectionError(self.reason)

    def abort(self, reason: str) -> None:
        if not self.closed:
            self.reason, self.closed = reason, True
            self._writable.set()
            self.transport.abort()

    # ---- below

    def _head_complete(self) -> None:
        if not self._in_header:
            (size,) = _LENGTH.unpack_from(self._head)
            if not 1 <= size <= HEADER_LIMIT:
                raise ValueError(f"a header of {size} bytes (limit {HEADER_LIMIT})")
            self._want, self._have, self._in_header = size, 0, True
            return
        frame = _decode(memoryview(self._head)[: self._want])
        self._want, self._have, self._in_header = _LENGTH.size, 0, False
        if payload := self.received(frame):
            targets, self._allowed = payload
            self._targets.extend(target for target in targets if target[1])
            if not self._targets:
                self.payload_done()

    def _advance(self, nbytes: int) -> None:
        view, left = self._targets[0]
        if nbytes < left:
            self._targets[0] = (None if view is None else view[nbytes:], left - nbytes)
            return
        self._targets.popleft()
        if not self._targets:
            self.payload_done()


def tune(sock: socket.socket) -> None:
    """No Nagle; a host that vanished is noticed within some seconds."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


# ---------------------------------------------------------------- owner


class Server:
    """Places what peers write into `memory`, a Memory (its `view`, `allows`, `readable` and `incarnation` are used)."""

    def __init__(self, memory, host: str, port: int, bind: str, key: bytes) -> None:
        self.memory, self.host, self.port, self.bind, self.key = memory, host, port, bind, key
        self.connections: set[Owned] = set()
        self.placed = self.refused = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: Owned(self), self.bind, self.port)
        except OSError as error:
            raise OSError(error.errno, f"can't listen on {self.bind}:{self.port} for transfers: {error.strerror}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server:
            self._server.close()
            for connection in list(self.connections):
                connection.abort("owner closed")
            await asyncio.sleep(0)  # let the transports report that they are gone
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await self._server.wait_closed()

    def stats(self) -> dict[str, int]:
        return {"connections": len(self.connections), "placed_bytes": self.placed, "refused_frames": self.refused}


class Owned(Connection):
    """The owner's end of one connection."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.incarnation = ""  # of the writer, once it has said Hello
        self._refused: OrderedDict[int, str] = OrderedDict()  # generation -> why
        self._reads: deque[Read] = deque()
        self._reader: asyncio.Task | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.server.connections.add(self)

    def lost(self) -> None:
        self.server.connections.discard(self)
        if self._reader:
            self._reader.cancel()

    def received(self, frame: Frame):
        if not self.incarnation:
            return self._hello(frame)
        match frame:
            case Write():
                return self._write(frame)
            case Flush(id, generation):
                self._acknowledge(id, generation)
            case Word(id, generation, region, offset, value):
                if not self.server.memory.allows(generation, region, offset, 8):
                    self._refuse(generation, f"may not write {(offset, 8)} of {region!r}")
                if generation not in self._refused:
                    self.server.memory.view(region)[offset : offset + 8] = value.to_bytes(8, "little")
                self._acknowledge(id, generation)
            case Read():
                self._read(frame)
            case _:
                raise ValueError(f"a writer does not send {type(frame).__name__}")

    def _hello(self, frame: Frame) -> None:
        if not isinstance(frame, Hello) or not hmac.compare_digest(frame.key, self.server.key):
            raise PermissionError("not introduced with this memory's key")
        self.incarnation = frame.incarnation
        self._answer(Welcome(self.server.memory.incarnation))

    def _write(self, frame: Write):
        memory, generation = self.server.memory, frame.generation
        if not all(memory.allows(generation, frame.region, offset, nbytes) for offset, nbytes in frame.ranges):
            self._refuse(
                generation, "is not armed" if not memory.is_armed(generation) else f"may not write {frame.ranges[:4]}..."
            )
            return [(None, nbytes) for _, nbytes in frame.ranges], bool
        view = memory.view(frame.region)
        self.server.placed += sum(nbytes for _, nbytes in frame.ranges)

        def allowed() -> bool:
            if armed := memory.is_armed(generation):
                return armed
            self._refuse(generation, "was disarmed while bytes arrived")
            return False

        return [(view[offset : offset + nbytes], nbytes) for offset, nbytes in frame.ranges], allowed

    def _refuse(self, generation: int, why: str) -> None:
        if generation not in self._refused:
            message = f"generation {generation} {why} at {self.server.memory.instance}"
            self._refused[generation] = message
            if len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)
            self.server.refused += 1
            self._answer(Refusal(generation, message))

    def _acknowledge(self, id: int, generation: int) -> None:
        message = self._refused.get(generation, "")
        self._answer(Ack(id, "refused" if message else "", message))

    def _answer(self, frame: Frame) -> None:
        self.send(pack(frame))
        if self.transport.get_write_buffer_size() > 4 * HEADER_LIMIT and not self._reader:
            self.abort("answers are not read")

    # ---- reads: a task per connection, since sending may have to wait

    def _read(self, frame: Read) -> None:
        self._reads.append(frame)
        if len(self._reads) > PENDING_READS:
            self.transport.pause_reading()
        if self._reader is None:
            self._reader = asyncio.ensure_future(self._serve_reads())

    async def _serve_reads(self) -> None:
        try:
            while self._reads:
                frame = self._reads.popleft()
                if len(self._reads) == PENDING_READS // 2:
                    self.transport.resume_reading()
                await self._serve(frame)
        except (ConnectionError, TimeoutError):
            self.abort("a reader did not read")
        finally:
            self._reader = None

    async def _serve(self, frame: Read) -> None:
        memory = self.server.memory
        if not all(memory.readable(frame.generation, frame.region, offset, nbytes) for offset, nbytes in frame.ranges):
            message = f"generation {frame.generation} may not read {frame.ranges[:4]} of {frame.region!r} at {memory.instance}"
            return self._answer(Ack(frame.id, "refused", message))
        view = memory.view(frame.region)
        async with asyncio.timeout(STALL):
            self.send(pack(Data(frame.id, sum(nbytes for _, nbytes in frame.ranges))))
            for offset, nbytes in frame.ranges:
                for start in range(offset, offset + nbytes, CHUNK):
                    self.send(view[start : min(start + CHUNK, offset + nbytes)])
                    await self.drained()


# ---------------------------------------------------------------- writer


class TcpPeer(Connection):
    """The writer's end. Shared by all writers of a process; frames of different writes interleave, each write's own are in
    order."""

    kind = "tcp"

    def __init__(self, address: Address) -> None:
        super().__init__()
        self.address, self.incarnation, self.instance = address, address.incarnation, address.instance
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future] = {}
        self._reading: dict[int, list[memoryview]] = {}
        self._refused: OrderedDict[int, str] = OrderedDict()
        self._sending = asyncio.Lock()
        self._done: asyncio.Future | None = None  # the read whose payload is arriving

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
        if found != address.incarnation:
            await peer.close()
            raise PeerLost(
                f"{address.host}:{address.port} is {found} now; {address.incarnation} was wanted: get its new address"
            )
        return peer

    async def write(self, region: str, pieces, generation: int, deadline: float) -> None:
        """Place [(offset, buffer)] in `region`. Returns when the kernel has the bytes; `flush` tells that they are placed."""
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
                self._done = waiting
                self._done_id = id
                if targets is None or waiting is None:  # given up meanwhile: throw the payload away
                    return [(None, nbytes)], bool
                if sum(map(len, targets)) != nbytes:
                    raise ValueError(f"{nbytes} bytes for a read of {sum(map(len, targets))}")
                return [(target, len(target)) for target in targets], lambda: not waiting.done()
            case _:
                raise ValueError(f"an owner does not send {type(frame).__name__}")

    def payload_done(self) -> None:
        self._settle(self._done_id, None)

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
            if not sending.done():
                sending.cancel()
            await asyncio.wait([sending])
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
        try:
            async with self._turn(deadline):
                self._check(0)
                await self._send_frame(pack(frame(id)), [], deadline)
            async with asyncio.timeout(_left(deadline)):
                await answer
        except DeadlineExceeded:
            raise
        except TimeoutError as error:
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
