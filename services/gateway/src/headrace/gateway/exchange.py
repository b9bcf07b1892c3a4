"""One HTTP request and its answer, written straight to the connection.

Knows: status line, headers, chunked framing, `X-Request-Id`, keep-alive comments, slow and vanished clients. Does not
know what the bytes mean. aiohttp parses requests and owns connections; an answer is written here in one call per event,
without a task switch, which aiohttp's own response writer would need.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus

from aiohttp import web

from headrace.recipe.errors import RecipeError

from .errors import brief

KEEPALIVE = b": keep-alive\n\n"  # a comment; Messages has an event of its own for it
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
EVENTS = b"text/event-stream; charset=utf-8"
JSON = b"application/json"

_PHRASES = {status.value: status.phrase for status in HTTPStatus} | {529: "Site is overloaded"}


class Written(web.StreamResponse):
    """What a handler returns when everything is on the wire already."""

    def __init__(self, keep_alive: bool):
        super().__init__()
        self._keeps = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._keeps

    async def prepare(self, request: web.BaseRequest) -> None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class Turn:
    """Gathers what is written to all connections in one loop turn: one system call per connection, however many bus
    messages the turn brought."""

    __slots__ = ("_exchanges", "_loop")

    def __init__(self) -> None:
        self._exchanges: list[Exchange] = []
        self._loop = asyncio.get_running_loop()

    def add(self, exchange: Exchange) -> None:
        if not self._exchanges:
            self._loop.call_soon(self._hand_over)
        self._exchanges.append(exchange)

    def _hand_over(self) -> None:
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            exchange.hand_over()


class Exchange:
    """Answer a request: either `answer` once, or `open` (implied), `send`..., `close`.

    `client_id` is what the client called the request (any bytes that HTTP allows; never part of a subject);
    `request_id` is ours.
    """

    __slots__ = (
        "_chunked", "_keep", "_limit", "_lives", "_on_slow", "_opened", "_transport", "_turn", "_unsent", "_written", "closed",
        "client_id", "head_only", "request_id",
    )  # fmt: skip

    def __init__(self, request: web.BaseRequest, request_id: str, turn: Turn, limit: int):
        self.request_id = request_id
        self.client_id = client_request_id(request)
        self.closed = False
        self.head_only = request.method == "HEAD"
        self._transport = request.transport
        self._chunked = request.version >= (1, 1)
        self._keep = request.keep_alive and self._chunked
        self._turn, self._limit = turn, limit
        self._opened = False
        self._lives = KEEPALIVE
        self._unsent: list[bytes] = []  # of this loop turn
        self._written = 0.0  # when the client last got something, or when the stream began
        self._on_slow: Callable[[], None] | None = None  # set while this is a stream

    @property
    def shown_id(self) -> str:
        """The client's name for the request as text, for logs and traces; "" if it has none."""
        return self.client_id.decode("utf-8", "replace")

    @property
    def opened(self) -> bool:
        """A status line is on the wire; an error can only be told in the stream."""
        return self._opened

    def result(self) -> Written:
        """For the handler to return."""
        return Written(self._keep)

    # ------------------------------------------------------------ one answer

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, headers: bytes = b"") -> None:
        """A whole answer."""
        assert not self._opened
        self._opened = self.closed = True
        head = self._head(status, content_type, b"Content-Length: %d\r\n" % len(body) + headers)
        self._write(head if self.head_only else head + body)

    def fail(self, error: RecipeError, protocol: str, dialect: str = "open", headers: bytes = b"") -> None:
        """An error as a whole answer, with Retry-After where it has one, behind these headers."""
        retry = getattr(error, "retry_after", 0.0)
        if retry:
            headers += b"Retry-After: %d\r\n" % max(1, round(retry))
        if error.status == 401:
            headers += b"WWW-Authenticate: Bearer\r\n"
        self.answer(error.status, brief(error).body(protocol, dialect, self.shown_id or self.request_id), JSON, headers)

    # ------------------------------------------------------------ a stream of events

    def streams(self, on_slow: Callable[[], None], lives: bytes = KEEPALIVE) -> None:
        """This will be a stream. `on_slow`: its client does not read. `lives`: what to say in long silence."""
        self._on_slow = on_slow
        self._lives = lives
        self._written = time.monotonic()

    def send(self, data: bytes) -> None:
        """Events. The first ones travel with the headers."""
        if self.closed or not data:
            return
        self._write(self._open() + self._frame(data))

    def close(self, data: bytes = b"") -> None:
        """The last events and the end."""
        if self.closed:
            return
        self.closed = True
        end = b"0\r\n\r\n" if self._chunked else b""
        self._write(self._open() + (self._frame(data) if data else b"") + end)

    def settle(self) -> None:
        """The handler ends, whatever happened."""
        self.hand_over()
        self._on_slow = None

    def abort(self) -> None:
        """Drop the connection."""
        self.closed = True
        self._keep = False
        self._unsent.clear()
        if self._transport is not None:
            self._transport.abort()

    def _open(self) -> bytes:
        if self._opened:
            return b""
        self._opened = True
        return self._head(200, EVENTS, b"Cache-Control: no-cache\r\nX-Accel-Buffering: no\r\n" +
                          (b"Transfer-Encoding: chunked\r\n" if self._chunked else b""))  # fmt: skip

    def _frame(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data

    def comment(self, now: float, silence: float) -> None:
        """A sign of life, if this is a stream that has been silent for so many seconds: it keeps proxies and clients from
        giving up."""
        if self._on_slow is not None and now - self._written >= silence:
            self.send(self._lives)

    # ------------------------------------------------------------ bytes

    def _head(self, status: int, content_type: bytes, more: bytes) -> bytes:
        connection = b"" if self._keep else b"Connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\nX-Request-Id: %b\r\n%b%b\r\n" % (
            status, _PHRASES.get(status, "Error").encode(), content_type, self.client_id or self.request_id.encode(),
            connection, more
        )  # fmt: skip

    def _write(self, data: bytes) -> None:
        if not self._unsent:
            self._turn.add(self)
        self._unsent.append(data)

    def hand_over(self) -> None:
        """Give the connection what this turn wrote."""
        unsent, transport = self._unsent, self._transport
        if not unsent:
            return
        self._unsent = []
        if transport is None or transport.is_closing():
            self.closed = True
            return
        self._written = time.monotonic()
        transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))
        if transport.get_write_buffer_size() > self._limit and self._on_slow is not None:
            self._on_slow()
            self.abort()


def client_request_id(request: web.BaseRequest) -> bytes:
    """The client's name for a request, as bytes, at most 256 of them."""
    if "X-Request-Id" not in request.headers:
        return b""
    for name, value in request.raw_headers:
        if name.lower() == b"x-request-id":
            return value[:256]
    return b""
