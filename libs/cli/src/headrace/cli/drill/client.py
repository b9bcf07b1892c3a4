"""A client of the system under drill: what it asks, and exactly what it sees, token by token.

Knows: /v1/completions with token ids in and out (`return_token_ids`), chats with a picture, streams that end well, with an
error object, or not at all. Does not know: faults, or what the right answer is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import random
import struct
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

import aiohttp

HANGS = 60.0  # seconds without an end after which a request counts as hung: more than any deadline of a drill
ENDS = ("answer", "error", "broken", "cancelled", "hung")


@dataclass(frozen=True)
class Ask:
    """One request. Equal asks have equal answers: sampling is seeded."""

    ids: tuple[int, ...]
    max_tokens: int
    seed: int
    temperature: float = 0.0
    sees: bool = False  # a chat about a picture of its own; the ids are its text then

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.sees else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            **(self._chat() if self.sees else {"prompt": list(self.ids)}),
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "temperature": self.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }

    def _chat(self) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(picture(self.seed)).decode()
        said = {"type": "text", "text": " ".join(map(str, self.ids))}
        content = [said, {"type": "image_url", "image_url": {"url": url}}]
        return {"messages": [{"role": "user", "content": content}], "thinking": {"type": "disabled"}}


def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    """A PNG of coloured squares."""
    colours = random.Random(seed)
    squares = [[colours.randbytes(3) for _ in range(width // 16)] for _ in range(height // 16)]
    lines = b"".join(b"\0" + b"".join(colour * 16 for colour in squares[y // 16]) for y in range(height))

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, RGB
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


@dataclass
class Seen:
    """What a client saw of one request. Times are of time.monotonic(); 0: it did not happen."""

    ask: Ask
    request: str = ""  # the server's name for it, without its prefix
    ids: list[int] = field(default_factory=list)
    end: str = ""  # one of ENDS
    status: int = 0
    code: str = ""  # of the error object
    message: str = ""
    began: float = 0.0
    first: float = 0.0
    ended: float = 0.0
    pause: float = 0.0  # longest silence between two pieces of output
    refused: bool = False  # there was no connection at all

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def wrong(self, want: list[int]) -> bool:
        """Whether a token is not the undisturbed run's, or a whole answer is not whole."""
        return self.ids != want[: len(self.ids)] or (self.end == "answer" and self.ids != want)

    def story(self) -> str:
        """For a table: how it ended."""
        if self.end == "error":
            return f"{self.code} in the stream" if self.status == 200 else f"{self.status} {self.code}".strip()
        return self.end


class Client:
    """Sends asks to one gateway. `async with Client(url, model) as client`."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def ask(self, ask: Ask, cancel_at: int | None = None, seen: Seen | None = None) -> Seen:
        """Send it and read to its end; leave after `cancel_at` tokens. `seen` is filled as it goes. Raises nothing."""
        seen = seen or Seen(ask)
        seen.began = time.monotonic()
        try:
            async with asyncio.timeout(HANGS):
                await self._stream(seen, cancel_at)
        except TimeoutError:
            seen.end = "hung"
        except (aiohttp.ClientError, OSError) as error:
            seen.end, seen.message = "broken", f"{type(error).__name__}: {error}"
            seen.refused = isinstance(error, aiohttp.ClientConnectorError)
        seen.ended = time.monotonic()
        return seen

    async def _stream(self, seen: Seen, cancel_at: int | None) -> None:
        async with self._session.post(self.url + seen.ask.path, json=seen.ask.body(self.model)) as response:
            if response.status != 200:
                return _failed(seen, response.status, await response.text())
            heard = time.monotonic()
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    seen.end = "answer"
                    return
                event = json.loads(data)
                if "error" in event:
                    return _failed(seen, 200, data.decode())
                now = time.monotonic()
                _take(seen, event, now, heard)
                heard = now
                if cancel_at is not None and len(seen.ids) >= cancel_at:
                    seen.end = "cancelled"
                    response.close()
                    return
            seen.end, seen.message = "broken", "the stream ended without [DONE]"


def _take(seen: Seen, event: dict[str, Any], now: float, heard: float) -> None:
    seen.request = event.get("id", "").partition("-")[2] or seen.request
    for choice in event.get("choices", ()):
        ids = choice.get("token_ids") or ()
        if ids:
            seen.first = seen.first or now
            if seen.ids:
                seen.pause = max(seen.pause, now - heard)
            seen.ids += ids


def _failed(seen: Seen, status: int, body: str) -> None:
    seen.end, seen.status, seen.message = "error", status, body[:300]
    with contextlib.suppress(ValueError, TypeError, AttributeError):
        error = json.loads(body)["error"]
        seen.code, seen.message = str(error.get("code") or error.get("type") or ""), str(error.get("message", ""))
