"""The row `partition-*`: a prefill worker in a network namespace, and its wire cut in the middle of a hand-off.

Knows: how to put a worker behind a wire of a system that listens on loopback only: a relay brings NATS to the wire, the decode
workers listen on its near end. Does not know what a round is good for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from urllib.parse import urlsplit

from headrace.cli.drill.client import Ask
from headrace.cli.drill.netns import Wire
from headrace.cli.drill.rounds import MOMENT, Round
from headrace.cli.drill.target import Own

CUT_SECONDS = 4.0
FAR = "prefill-far"


class Relay:
    """Whoever connects to `host` speaks with NATS. `async with Relay(host, nats_url) as url`."""

    def __init__(self, host: str, nats_url: str) -> None:
        self.host, self._nats = host, urlsplit(nats_url)
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        return f"nats://{self.host}:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection(self._nats.hostname, self._nats.port)
        self._writers |= {writer, inner_writer}
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(_carry(reader, inner_writer), _carry(inner_reader, writer))
        self._writers -= {writer, inner_writer}


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while (data := await source.read(1 << 16)) and not sink.is_closing():
        sink.write(data)
        await sink.drain()
    sink.close()


async def partition(this: Round, asks: list[Ask], into: bool, out: bool) -> None:
    """Cut the wire when the far worker holds a ticket; heal it after CUT_SECONDS."""
    target = this.target
    assert isinstance(target, Own) and target.wire is not None
    wire: Wire = target.wire
    flags = ["--transports", "tcp", "--host", wire.there, "--metrics-port", "0"]
    async with Relay(wire.here, target.system.nats.url) as url:
        child = await target.another("prefill", FAR, wire.inside([]), [*flags, "--nats-url", url])
        try:
            far = target.presence(FAR).instance
            this.send(asks)
            end = time.monotonic() + MOMENT
            while not (bound := [e for e in this.watch.events if e.name == "prefill.bound" and e.instance == far]):
                if time.monotonic() > end:
                    break
                if all(task.done() for task in this.tasks):  # none came by it
                    this.send([Ask(ask.ids, ask.max_tokens, ask.seed + len(this.seens)) for ask in asks[:3]])
                await asyncio.sleep(0.002)
            if bound:
                wire.cut(into, out)
                this.at = time.monotonic()
                await asyncio.sleep(CUT_SECONDS)
                wire.heal()
                this.over = time.monotonic()
            await asyncio.gather(*this.tasks)
            await target.ready(30.0)
            await target.whole(25.0)
        finally:
            wire.heal()
            await target.remove(child)
    await target.until(lambda: bound, 0.0, f"no request came by {FAR}")
