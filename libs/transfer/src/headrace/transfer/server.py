"""The owner's end of tcp: places what peers write, and nothing that its memory does not allow.

The generation and the ranges of a frame are checked before its first byte is placed, the generation again before
every piece. One stale ticket does not cost the connection: its frames are thrown away and its writer is told. Frames
of one connection are handled in order, so the answer to a Flush means that everything before it is placed.

Knows what is armed (it asks its Memory). Does not know files or shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections import OrderedDict, deque

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

PENDING_READS = 64  # per connection, before the server stops listening to it
HELLO = 5.0  # seconds until a connection must have introduced itself
STALL = 30.0  # seconds that the server waits for a reader who does not read


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
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport) -> None:
        super().connection_made(transport)
        self.server.connections.add(self)
        self._timer = asyncio.get_running_loop().call_later(HELLO, self.abort, "did not introduce itself")

    def lost(self) -> None:
        self._timer.cancel()
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
        self._timer.cancel()
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
