"""Frames of a tcp connection, and the end of one: takes frames apart, puts payload where it belongs.

A frame is a u32 header length, a msgpack header, and the payload that the header announces. Payload goes from the
socket straight to its place (BufferedProtocol): whoever owns the place is asked just before the kernel copies, for
every piece of at most CHUNK bytes, whether it may still go there. What may not is read and thrown away, so the
connection lives on.

Knows frames and sockets. Does not know regions, generations or who is at the other end.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections import deque
from collections.abc import Callable

import msgspec

CHUNK = 256 << 10  # bytes per recv or send: bounds the time a copy takes on the event loop (some 50 us)
HEADER_LIMIT = 1 << 16  # bytes
UNANSWERED_MS = 8000  # the connection goes when bytes are not acknowledged for so long
REMEMBERED = 1024  # refused generations per connection, at both ends

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
        self.heard = 0.0  # time.monotonic() of the last bytes
        self._head = bytearray(HEADER_LIMIT)
        self._want, self._have, self._in_header = _LENGTH.size, 0, False
        self._scratch: bytearray | None = None
        self._targets: deque[tuple[memoryview | None, int]] = deque()  # where the payload goes (None: nowhere), bytes left
        self._allowed: Callable[[], bool] = bool
        self._writable = asyncio.Event()
        self._writable.set()

    # ---- to implement

    def received(self, frame: Frame) -> tuple[list[tuple[memoryview | None, int]], Callable[[], bool]] | None:
        """A header came. Returns payload targets [(view or None, nbytes)] and a check made before each piece is
        placed."""
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
        self.heard = time.monotonic()
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
    """No Nagle; a host that vanished is noticed within some seconds, idle or not: keep-alive probes are not sent while bytes
    are unacknowledged, and the kernel by itself would repeat those for a quarter of an hour, longer and longer apart."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    silence = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", UNANSWERED_MS))
    for name, value in silence:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
