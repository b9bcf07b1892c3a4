"""The connection to NATS: requests, publishing, subscriptions, chunks.

Knows: bytes, subjects, replies, the server's max_payload, what happens when the connection breaks.
Does not know: what messages mean, services, presence.

Built on nats-py, which gives connecting, authentication, TLS, keep-alive, reconnecting and re-subscribing. `_Client` is the
only place that reaches into it, for two shortcuts (`benchmarks/gateway.md` has their worth): a message goes from the parser
straight into a synchronous callback (nats-py: a queue and a task per subscription), and a publish goes straight to the
list that leaves in one system call at the end of the loop turn (nats-py: a list, a future, a flusher task).

What follows for callers:
  * a callback runs inside the reader, so it must only enqueue or answer at once; nothing is buffered between socket and
    callback, so a slow process shows as a slow consumer at the server, which is counted here;
  * messages of one sender to one subscription arrive in order; between subscriptions there is no order;
  * nothing is kept for later: while disconnected, `publish` and `request` raise `Disconnected`, and requests in flight fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import nats.errors
import structlog
from nats.aio.client import Client

from . import messages as m
from .errors import BusError, BusTimeout, Disconnected, NoResponder, Overflow, TooLarge
from .subjects import command, nuid

CHUNK_ROOM = 256  # bytes of a chunk's envelope and headers, generously
MAX_MESSAGE = 64 << 20  # bytes of one message, all chunks together
MAX_PARTIAL = 128 << 20  # bytes of all unfinished messages
PARTIAL_SECONDS = 10.0  # an unfinished message is dropped after this
MAX_UNSENT = 64 << 20  # bytes waiting for the socket
SWEEP_SECONDS = 0.025  # time-outs are noticed this much late
PING_SECONDS = 2  # a server that leaves three of these pings unanswered is lost, and another connection is tried
CLOSE_SECONDS = 2.0  # for what is left to write and for the socket, when a connection is closed
LATE_SECONDS = 0.1  # a sweep that comes later than this shows that the process was held up
REPLY_PREFIX = "_INBOX"

log = structlog.get_logger("headrace.bus")

Callback = Callable[[m.Message, str], None]
RawCallback = Callable[[bytes, str, str], None]  # payload, subject, reply


@dataclass
class Counters:
    """What passed here. `bytes` are payload bytes, headers and protocol lines excluded."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    largest_out: int = 0
    chunks: int = 0
    slow_consumers: int = 0
    reconnects: int = 0
    malformed: int = 0
    callback_errors: int = 0
    timeouts: int = 0
    no_responders: int = 0
    refused_disconnected: int = 0


@dataclass
class BusSettings:
    """What `Bus.connect` reads; `Settings` has the same fields."""

    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password: str = ""
    nats_nkey: str = ""  # path of a file that holds an nkey seed
    nats_connect_seconds: float = 30.0


class _Client(Client):
    """nats-py's client with direct delivery and direct writes. See the module's docstring."""

    def __init__(self, counters: Counters):
        super().__init__()
        self.direct: dict[int, Callable[[bytes, bytes, bytes, bytes | None], None]] = {}
        self._counters = counters
        self._turn: list[bytes] = []  # written in this loop turn
        self.riders: list[Callable[[], None]] = []

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        deliver = self.direct.get(sid)
        if deliver is None:
            await super()._process_msg(sid, subject, reply, data, headers)
        else:
            deliver(subject, reply, data, headers)

    async def _process_err(self, err_msg: str) -> None:
        # The server says this and closes the socket. nats-py would close the client for good; we reconnect instead.
        if "slow consumer" in err_msg:
            self._counters.slow_consumers += 1
            return
        await super()._process_err(err_msg)

    def write(self, data: bytes) -> None:
        """Take `data` for the one write of this loop turn (uvloop by itself makes a system call of every write)."""
        if not self.is_connected:
            raise Disconnected("not connected to NATS; nothing is kept for later, so try again")
        if not self._turn:
            transport = self._transport._io_writer.transport
            unsent = transport.get_write_buffer_size()
            if unsent > MAX_UNSENT:
                raise Overflow(f"{unsent:,} bytes wait for the socket to NATS; the limit is {MAX_UNSENT:,}")
            asyncio.get_running_loop().call_soon(self.write_turn)
        self._turn.append(data)

    def write_turn(self) -> None:
        """Hand over what this turn wrote. What meets a broken connection is lost, as any message may be."""
        if self._turn:
            for rider in self.riders:
                rider()
        turn, self._turn = self._turn, []
        if turn and self.is_connected:
            self._transport._io_writer.transport.write(turn[0] if len(turn) == 1 else b"".join(turn))


@dataclass
class _Partial:
    started: float
    pieces: list[bytes | None]
    missing: int
    size: int = 0


@dataclass
class Joiner:
    """Joins chunks. Bounded in bytes and in time; what is dropped is simply never delivered, like any lost message."""

    partial: dict[str, _Partial] = field(default_factory=dict)
    size: int = 0

    def push(self, chunk: m.Chunk, now: float) -> bytes | None:
        """-> the whole encoded message once its last piece is here."""
        self._expire(now)
        if not 0 <= chunk.number < chunk.total <= MAX_MESSAGE // 1024:
            return None
        partial = self.partial.get(chunk.id)
        if partial is None:
            partial = self.partial[chunk.id] = _Partial(now, [None] * chunk.total, chunk.total)
        if len(partial.pieces) != chunk.total or partial.pieces[chunk.number] is not None:
            return None
        partial.pieces[chunk.number] = chunk.data
        partial.missing -= 1
        partial.size += len(chunk.data)
        self.size += len(chunk.data)
        if partial.missing == 0:
            self._drop(chunk.id)
            return b"".join(partial.pieces)  # type: ignore[arg-type]
        while self.size > MAX_PARTIAL:
            self._drop(next(iter(self.partial)))
        return None

    def _expire(self, now: float) -> None:
        while self.partial:
            oldest = next(iter(self.partial))
            if now - self.partial[oldest].started < PARTIAL_SECONDS:
                return
            self._drop(oldest)

    def _drop(self, name: str) -> None:
        self.size -= self.partial.pop(name).size


@dataclass(slots=True)
class _Asked:
    """A request without an answer yet."""

    future: asyncio.Future[m.Message]
    deadline: float  # loop time
    subject: str
    timeout: float


class Subscription:
    """What `Bus.subscribe` gives; `close()` ends it."""

    def __init__(self, client: _Client, inner: Any):
        self._client, self._inner = client, inner

    async def close(self) -> None:
        self._client.direct.pop(self._inner._id, None)
        with _leaving():
            await self._inner.unsubscribe()


@contextlib.contextmanager
def _leaving() -> Iterator[None]:
    """What a server that is away, or goes meanwhile, does to who leaves it. Then nats-py cancels what it waits for itself: only
    a cancellation that somebody asked of this task goes on."""
    try:
        yield
    except (nats.errors.Error, OSError, TimeoutError, BusError):
        pass
    except asyncio.CancelledError:
        if asyncio.current_task().cancelling():
            raise


class Bus:
    """One connection. Made by `await Bus.connect(...)`; every method belongs to the loop that made it."""

    def __init__(self, name: str):
        self.name = name
        self.counters = Counters()
        self.on_disconnect: list[Callable[[], None]] = []
        self.on_reconnect: list[Callable[[], None]] = []
        self.on_closed: Callable[[], None] | None = None
        self._client = _Client(self.counters)
        self._loop = asyncio.get_running_loop()
        self._joiner = Joiner()
        self._waiting: dict[bytes, _Asked] = {}
        self._sweeping = False
        self._sweep_due = 0.0
        self._inbox = f"{REPLY_PREFIX}.{nuid()}".encode()
        self._next_token = 0
        self._closing = False
        self._url = ""
        self.send = self._send  # whatever is sent goes through here; fault points put themselves in front of it

    # ------------------------------------------------------------ life

    @classmethod
    async def connect(cls, settings: Any, name: str = "headrace") -> Bus:
        """Connect; waits up to `nats_connect_seconds` for a server that is still starting. BusError says what was tried."""
        bus = cls(name)
        bus._url = without_secrets(settings.nats_url)
        urls = [url.strip() for url in settings.nats_url.split(",") if url.strip()]
        options: dict[str, Any] = {}
        if settings.nats_user:
            options |= {"user": settings.nats_user, "password": settings.nats_password}
        if settings.nats_nkey:
            if not Path(settings.nats_nkey).is_file():
                raise BusError(f"there is no nkey seed at {settings.nats_nkey} (--nats-nkey)")
            if find_spec("nkeys") is None:
                raise BusError("--nats-nkey needs the nkeys package: pip install 'headrace-bus[nkeys]'")
            options["nkeys_seed"] = settings.nats_nkey
        await _wait_for_port(urls, settings.nats_connect_seconds)
        try:
            async with asyncio.timeout(max(settings.nats_connect_seconds, 1.0)):
                await bus._client.connect(
                    urls, name=name, connect_timeout=2, reconnect_time_wait=0.1, max_reconnect_attempts=-1,
                    allow_reconnect=False, ping_interval=PING_SECONDS, max_outstanding_pings=2, pending_size=0,
                    error_cb=bus._on_error, disconnected_cb=bus._on_disconnected, reconnected_cb=bus._on_reconnected,
                    closed_cb=bus._on_client_closed, **options,
                )  # fmt: skip
        except (OSError, TimeoutError, nats.errors.Error) as error:
            bus._closing = True
            with contextlib.suppress(nats.errors.Error, OSError):
                await bus._client.close()
            raise BusError(f"can't connect to NATS at {bus._url}: {error or type(error).__name__}") from error
        bus._client.options["allow_reconnect"] = True  # the first connect fails fast and loud; later ones repeat for ever
        await bus._subscribe(f"{bus._inbox.decode()}.*", "", bus._on_reply)
        await bus.flush()
        return bus

    def ride(self, rider: Callable[[], None]) -> None:
        """`rider()` is called before every write and may publish what should travel with it."""
        self._client.riders.append(rider)

    async def close(self) -> None:
        """Raises nothing, and takes a few seconds at most: what a server that is away takes no more is lost, and the
        connection is closed all the same."""
        self._closing = True
        self._fail_waiting("the bus is closing")
        with _leaving():
            if self.connected:
                for rider in self._client.riders:
                    rider()
                await self.flush(1.0)
        with _leaving():
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._client.close()

    async def flush(self, timeout: float = 2.0) -> None:
        """Returns when the server has seen everything written so far; a subscription counts only after this."""
        try:
            self._client.write_turn()
            # nats-py writes a PING at once but a SUB one loop turn later; push the SUB out first or the PONG proves nothing.
            async with asyncio.timeout(timeout):
                await self._client._flush_pending(force_flush=True)
            await self._client.flush(timeout)  # type: ignore[arg-type]
        except TimeoutError as error:  # nats.errors.TimeoutError is one
            raise BusTimeout(f"NATS did not answer within {timeout} s") from error
        except nats.errors.Error as error:
            raise Disconnected(f"not connected to NATS at {self._url}") from error

    @property
    def connected(self) -> bool:
        return self._client.is_connected

    @property
    def max_payload(self) -> int:
        """Bytes; from the server's INFO."""
        return self._client.max_payload

    # ------------------------------------------------------------ sending

    async def request(
        self, role: str, instance: str, verb: str, message: m.Message, timeout: float = 1.0, request_id: str = "",
        traceparent: str = "",
    ) -> m.Message:  # fmt: skip
        """Send a command to one instance and wait for its answer (`Refused` is an answer).

        Raises NoResponder, BusTimeout, Disconnected, TooLarge. `request_id` and `traceparent` travel as headers too."""
        return await self.call(role, instance, verb, message, timeout, request_id, traceparent)

    def call(
        self, role: str, instance: str, verb: str, message: m.Message, timeout: float = 1.0, request_id: str = "",
        traceparent: str = "",
    ) -> asyncio.Future[m.Message]:  # fmt: skip
        """`request` without a coroutine: a future of the answer."""
        return self.ask(command(role, instance, verb), message, timeout, _headers(request_id, traceparent))

    def ask(self, subject: str, message: m.Message, timeout: float = 1.0, headers: bytes = b"") -> asyncio.Future[m.Message]:
        """A message to a subject that answers: a future of that. Fails as `request` does."""
        self._next_token += 1
        token = b"%x" % self._next_token
        future: asyncio.Future[m.Message] = self._loop.create_future()
        try:
            self.send(subject.encode(), m.encode(message), b"%s.%s" % (self._inbox, token), headers, message)
        except BusError as error:
            future.set_exception(error)
            return future
        self._await(token, future, subject, timeout)
        return future

    def _await(self, token: bytes, future: asyncio.Future[m.Message], subject: str, timeout: float) -> None:
        self._waiting[token] = _Asked(future, self._loop.time() + timeout, subject, timeout)
        if not self._sweeping:
            self._sweeping = True
            self._sweep_soon()

    def echo(self, timeout: float) -> asyncio.Future[m.Message]:
        """Send a message to ourselves: it comes back if the server works and we can hear it. Fails as `ask` does."""
        self._next_token += 1
        token = b"%x" % self._next_token
        subject = b"%s.%s" % (self._inbox, token)
        future: asyncio.Future[m.Message] = self._loop.create_future()
        self._await(token, future, subject.decode(), timeout)
        try:
            self._send(subject, m.encode(m.Done()), b"", b"", None)
        except BusError as error:
            del self._waiting[token]
            future.set_exception(error)
        return future

    def publish(self, subject: str, message: m.Message) -> None:
        """Hand a message to the socket; all writes of one loop turn become one system call. Nobody listening is no error.
        Raises Disconnected, TooLarge, Overflow."""
        self.send(subject.encode(), m.encode(message), b"", b"", message)

    def publish_bytes(self, subject: str, data: bytes, reply: str = "") -> None:
        """Publish ready bytes (trace events and service discovery are JSON)."""
        self.send(subject.encode(), data, reply.encode(), b"", None)

    def respond(self, reply: str, message: m.Message) -> None:
        """Answer a command; an answer that can't be sent is lost, as any message may be."""
        if reply:
            with contextlib.suppress(Disconnected):
                self.send(reply.encode(), m.encode(message), b"", b"", message)

    def _send(self, subject: bytes, data: bytes, reply: bytes, headers: bytes, message: Any) -> None:
        size = len(data)
        limit = self._client.max_payload - len(headers)
        if size > limit:
            return self._send_chunks(subject, data, reply, message)
        counters = self.counters
        counters.messages_out += 1
        counters.bytes_out += size
        if size > counters.largest_out:
            counters.largest_out = size
        try:
            if headers:
                total = len(headers) + size
                self._client.write(b"HPUB %s %s %d %d\r\n%s%s\r\n" % (subject, reply, len(headers), total, headers, data))
            else:
                self._client.write(b"PUB %s %s %d\r\n%s\r\n" % (subject, reply, size, data))
        except Disconnected:
            counters.refused_disconnected += 1
            raise

    def _send_chunks(self, subject: bytes, data: bytes, reply: bytes, message: Any) -> None:
        room = self._client.max_payload - CHUNK_ROOM
        if len(data) > MAX_MESSAGE or message is None or room < 1024:
            limit = min(MAX_MESSAGE, self._client.max_payload) if message is None or room < 1024 else MAX_MESSAGE
            raise TooLarge(f"message {type(message).__name__} to {subject.decode()}", len(data), limit)
        name, total = nuid(), -(-len(data) // room)
        for number in range(total):
            chunk = m.Chunk(name, number, total, data[number * room : (number + 1) * room])
            self.counters.chunks += 1
            self._send(subject, m.encode(chunk), reply, b"", chunk)

    # ------------------------------------------------------------ receiving

    async def subscribe(self, subject: str, callback: Callback, queue: str = "") -> Subscription:
        """`callback(message, subject)` runs in the reader: it only enqueues. Active when this returns."""

        def deliver(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            message = self._decode(data)
            if message is not None:
                callback(message, subject.decode())

        subscription = await self._subscribe(subject, queue, deliver)
        await self.flush()
        return subscription

    async def serve(self, subject: str, callback: Callable[[m.Message, str, str], None]) -> Subscription:
        """Like `subscribe`, for commands: `callback(message, subject, reply)`."""

        def deliver(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            message = self._decode(data)
            if message is not None:
                callback(message, subject.decode(), reply.decode())

        subscription = await self._subscribe(subject, "", deliver)
        await self.flush()
        return subscription

    async def subscribe_bytes(self, subject: str, callback: RawCallback) -> Subscription:
        """Like `subscribe`, undecoded: `callback(payload, subject, reply)`."""

        def deliver(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            callback(data, subject.decode(), reply.decode())

        subscription = await self._subscribe(subject, "", deliver)
        await self.flush()
        return subscription

    async def _subscribe(self, subject: str, queue: str, deliver: Callable) -> Subscription:
        client, counters = self._client, self.counters

        def guarded(subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
            counters.messages_in += 1
            counters.bytes_in += len(data)
            try:
                deliver(subject, reply, data, headers)
            except Exception:  # a callback must never stop the reader
                counters.callback_errors += 1
                log.exception("bus callback failed", subject=subject.decode())

        sid = client._sid + 1  # taken synchronously by the call below, before anything can arrive
        client.direct[sid] = guarded
        try:
            inner = await client.subscribe(subject, queue=queue)
        except nats.errors.Error as error:
            client.direct.pop(sid, None)
            raise Disconnected(f"not connected to NATS at {self._url}") from error
        assert inner._id == sid
        return Subscription(client, inner)

    def _decode(self, data: bytes) -> m.Message | None:
        try:
            message = m.decode(data)
            if type(message) is m.Chunk:
                whole = self._joiner.push(message, time.monotonic())
                return None if whole is None else m.decode(whole)
            return message
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.counters.malformed += 1
            log.warning("malformed message dropped", error=str(error), size=len(data))
            return None

    def _on_reply(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        token = subject[subject.rfind(b".") + 1 :]
        asked = self._waiting.get(token)
        if asked is None:
            return
        future = asked.future
        if headers is not None and not data and headers.startswith(b"NATS/1.0 503"):
            self.counters.no_responders += 1
            if not future.done():
                future.set_exception(NoResponder(f"{asked.subject}: nobody listens there; the instance is gone"))
        else:
            message = self._decode(data)
            if message is None:
                return  # malformed, or a chunk of more to come
            if not future.done():
                future.set_result(message)
        del self._waiting[token]

    def _sweep(self) -> None:
        """Time out what got no answer. One timer for all requests: a timer for each would cost more than sending it."""
        now = self._loop.time()
        if now > self._sweep_due + LATE_SECONDS:  # we were held up: answers may lie unread in the socket, so look there first
            return self._sweep_soon()
        for token, asked in list(self._waiting.items()):
            if asked.future.done():  # its caller gave up
                del self._waiting[token]
            elif now >= asked.deadline:
                del self._waiting[token]
                self.counters.timeouts += 1
                asked.future.set_exception(BusTimeout(f"{asked.subject}: no answer within {asked.timeout:.3g} s"))
        self._sweeping = bool(self._waiting)
        if self._sweeping:
            self._sweep_soon()

    def _sweep_soon(self) -> None:
        self._sweep_due = self._loop.time() + SWEEP_SECONDS
        self._loop.call_at(self._sweep_due, self._sweep)

    # ------------------------------------------------------------ trouble

    def _fail_waiting(self, why: str) -> None:
        waiting, self._waiting = self._waiting, {}
        for asked in waiting.values():
            if not asked.future.done():
                asked.future.set_exception(Disconnected(why))

    async def _on_error(self, error: Exception) -> None:
        if isinstance(error, nats.errors.SlowConsumerError):
            self.counters.slow_consumers += 1
        elif not self._closing and not isinstance(error, OSError | nats.errors.UnexpectedEOF):
            log.warning("bus error", error=str(error) or type(error).__name__)

    async def _on_disconnected(self) -> None:
        self._fail_waiting("the connection to NATS broke; the command may or may not have been carried out")
        if self._closing:
            return
        log.warning("disconnected from NATS; reconnecting", url=self._url)
        for callback in self.on_disconnect:
            callback()

    async def _on_reconnected(self) -> None:
        self.counters.reconnects += 1
        log.info("connected to NATS again", url=self._url)
        for callback in self.on_reconnect:
            callback()

    async def _on_client_closed(self) -> None:
        self._fail_waiting("the connection to NATS is closed")
        if not self._closing and self.on_closed is not None:
            self.on_closed()


def _headers(request_id: str, traceparent: str) -> bytes:
    """NATS headers; ids are the server's own, so there is nothing to escape. `traceparent` was checked where it came in."""
    if not request_id:
        return b""
    if traceparent:
        return b"NATS/1.0\r\nHeadrace-Request-Id: %s\r\ntraceparent: %s\r\n\r\n" % (request_id.encode(), traceparent.encode())
    return b"NATS/1.0\r\nHeadrace-Request-Id: %s\r\n\r\n" % request_id.encode()


def without_secrets(urls: str) -> str:
    """NATS addresses as logs and errors may show them: without user and password."""
    return re.sub(r"//[^@,]*@", "//", urls)


async def _wait_for_port(urls: list[str], seconds: float) -> None:
    """Wait until one of the servers accepts connections: nats-py's own first connect waits two seconds between tries."""
    deadline = time.monotonic() + seconds
    told = False
    shown = without_secrets(", ".join(urls))
    try:
        parts = [urlsplit(url if "//" in url else f"nats://{url}") for url in urls]
        addresses = [(part.hostname or "127.0.0.1", part.port or 4222) for part in parts]
    except ValueError as error:
        raise BusError(f"--nats-url {shown} is no address of a NATS server ({error}); write nats://HOST:PORT") from None
    while True:
        for address in addresses:
            try:
                async with asyncio.timeout(2.0):
                    _, writer = await asyncio.open_connection(*address)
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
                return
            except (OSError, TimeoutError):
                continue
        if time.monotonic() > deadline:
            tried = f"no NATS server at {shown} after {seconds:g} s"
            raise BusError(f"{tried}; start one (`headrace up` does) or set --nats-url")
        if not told:
            told = True
            log.info("waiting for NATS", url=shown)
        await asyncio.sleep(0.05)
