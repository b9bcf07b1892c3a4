"""Connections that a box in the middle forgot while they were idle (ten minutes of silence, as its timer has it).

The decode worker announces an address behind which a relay stands for such a box: it lets bytes through until it is told to
forget what it knows, with a reset, or without a word and swallowing what comes. A reset costs no request anything; what is
swallowed costs at most the request that finds out.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.bus import messages as m
from headrace.transfer import Address
from headrace.worker.testing import Cluster

SIM = ("--engine", "sim", "--transports", "tcp", "--num-blocks", "200")
NEAR, FAR = "127.0.0.1", "127.0.0.2"  # where decode listens, and where it says that it does


class Box:
    """Relays FAR:port to NEAR:port."""

    def __init__(self, port: int) -> None:
        self.port, self.opened = port, 0
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> Box:
        self._server = await asyncio.start_server(self._accept, FAR, self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self.forget(loudly=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        inner_reader, inner_writer = await asyncio.open_connection(NEAR, self.port)
        self._writers += [writer, inner_writer]
        for source, sink in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(self._carry(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    @staticmethod
    async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                sink.write(data)
                await sink.drain()

    async def forget(self, loudly: bool) -> None:
        """Drop every connection: with a reset, or so that whatever comes is swallowed from now on."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if loudly:
            writers, self._writers = self._writers, []
            for writer in writers:
                writer.transport.abort()
            await asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_idle_connections_that_a_box_in_the_middle_forgot():
    async with Cluster() as cluster:
        decode = await cluster.start("decode", *SIM, "--tcp-host", FAR, "--ticket-seconds", "2")
        async with Box(Address.decode(cluster.find(decode).memory).port) as box:
            prefill = await cluster.start("prefill", *SIM)

            async def ask(n: int):
                return await cluster.gateway.generate([n] * 300, m.Sampling(max_tokens=3), deadline=15.0)

            assert (await ask(1)).ok and box.opened == 1
            await box.forget(loudly=True)
            await asyncio.sleep(0.2)
            assert (await ask(2)).ok and box.opened == 2, "a reset is seen before anything is written"
            await box.forget(loudly=False)
            lost, again = await ask(3), await ask(4)
            assert not lost.ok and lost.problem is not None, "its bytes were swallowed"
            assert again.ok and box.opened == 3, f"the connection was not given up: {again}"
            await cluster.quiet(decode)
            await cluster.quiet(prefill)
