"""More work than there is room, and processes that are told to go while they work: who waits, goes first, ends with what."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import pytest

from headrace.bus import messages as m
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.testing import Cluster

from .streams import Answer, ask, start_gateway

SIM = ("--engine", "sim", "--num-blocks", "400", "--max-num-seqs", "32")
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "seed": 1}


async def metric(cluster: Cluster, process, name: str) -> float:
    return (await cluster.metrics(process))[name]


@pytest.mark.timeout(120)
async def test_the_more_urgent_prompt_is_computed_first():
    """Prefill has accepted four prompts; the last of them is urgent and overtakes those that are not begun."""
    async with Cluster() as cluster:
        prefill = await cluster.start(
            "prefill", "--engine", "sim", "--num-blocks", "400", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
            "--sim-prefill-seconds", "0.008",
        )  # fmt: skip
        decode = await cluster.start("decode", *SIM)
        _, url = await start_gateway(cluster)
        order: list[str] = []

        async def one(name: str, tokens: int, priority: int) -> None:
            body = STREAM | {"prompt": [ord(name)] * tokens, "max_tokens": 1, "priority": priority}
            answer = await ask(url, body, Answer())
            assert answer.error is None and answer.finish == {0: "length"}
            order.append(name)

        tasks = []
        for name, tokens, priority in (("a", 256, 0), ("b", 80, 0), ("c", 80, 5), ("d", 80, -1)):
            tasks.append(asyncio.create_task(one(name, tokens, priority)))
            await cluster.until(
                lambda: metric(cluster, prefill, "headrace_prefill_accepted_total"), lambda n: n == len(tasks), 30.0
            )
        await asyncio.gather(*tasks)
        assert order == ["a", "d", "b", "c"]
        await cluster.quiet(decode)
        await cluster.quiet(prefill)


@pytest.mark.timeout(120)
async def test_more_than_fits_waits_is_told_so_or_refused_with_retry_after():
    """Two run, two wait and hear that they live, the rest is a 429 that says when to come again."""
    async with Cluster() as cluster:
        await cluster.start("prefill", *SIM)
        decode = await cluster.start("decode", "--engine", "sim", "--max-num-seqs", "2", "--sim-step-seconds", "0.1")
        gateway, url = await start_gateway(cluster, "--max-queue", "2", "--keepalive-seconds", "0.2")
        comments, statuses = [], []

        async def one(number: int) -> None:
            body = STREAM | {"prompt": [number] * 20, "max_tokens": 20}
            async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as response:
                text = (await response.read()).decode()
                status = response.status
                if status == 200 and '"code":"overloaded"' in text:  # the headers were out already
                    status = 429
                elif status == 429:
                    assert int(response.headers["Retry-After"]) >= 1
                else:
                    assert "[DONE]" in text, text
                statuses.append(status)
                comments.append(text.count(": keep-alive"))

        running = [asyncio.create_task(one(number)) for number in range(2)]
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["live"] == 2, 30.0)
        waiting = [asyncio.create_task(one(number)) for number in range(2, 4)]
        await cluster.until(lambda: metric(cluster, gateway, "headrace_gateway_waiting"), lambda n: n == 2, 30.0)
        await asyncio.gather(*(one(number) for number in range(4, 8)))
        assert statuses == [429] * 4
        await asyncio.gather(*running, *waiting)
        assert statuses[4:] == [200] * 4 and any(comments)
        await one(9)
        assert statuses[-1] == 200
        await cluster.quiet(decode)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("budget", ["0", "1", "30"])
async def test_a_prefill_that_is_told_to_go_finishes_or_hands_over(budget):
    """SIGTERM in the middle of three prompts: whatever time it has, every client has its answer, and it exits with 0."""
    async with Cluster() as cluster:
        decode = await cluster.start("decode", *SIM)
        going = await cluster.start("prefill", *SIM, "--sim-prefill-seconds", "0.004", "--drain-seconds", budget)
        _, url = await start_gateway(cluster)
        bodies = [STREAM | {"prompt": [number] * 300, "max_tokens": 3} for number in range(3)]
        tasks = [asyncio.create_task(ask(url, body, Answer())) for body in bodies]
        await cluster.until(lambda: cluster.audit(going), lambda a: a["live"] == 3, 30.0)
        other = await cluster.start("prefill", *SIM)
        assert await asyncio.to_thread(going.terminate, 60.0) == 0
        for answer in await asyncio.gather(*tasks):
            assert answer.error is None and answer.done and answer.usage["completion_tokens"] == 3
        for process in (decode, other):
            await cluster.quiet(process, timeout=30.0)


@pytest.mark.timeout(120)
async def test_everybody_is_told_to_go_at_once():
    """Streams that fit the budget end well, and every process exits with 0."""
    async with Cluster() as cluster:
        kvstore = await cluster.start("kvstore")
        prefill = await cluster.start("prefill", *SIM)
        decode = await cluster.start("decode", *SIM, "--sim-step-seconds", "0.02")
        gateway, url = await start_gateway(cluster)
        tasks = [asyncio.create_task(ask(url, STREAM | {"prompt": [n] * 200, "max_tokens": 40}, Answer())) for n in range(4)]
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["live"] == 4, 30.0)
        await cluster.until(lambda: cluster.audit(prefill), lambda a: a["live"] == 0, 30.0)
        for process in (gateway, prefill, decode, kvstore):
            process.signal(signal.SIGTERM)
        for answer in await asyncio.gather(*tasks):
            assert answer.error is None and answer.done and answer.usage["completion_tokens"] == 40
        for process in (gateway, prefill, decode, kvstore):
            assert await asyncio.to_thread(process.popen.wait, 60) == 0, process.role




@pytest.mark.timeout(180)
async def test_a_long_prompt_does_not_keep_the_short_ones_out(tmp_path):
    """Forty steps of one prompt: a short one that comes meanwhile is taken, and answered long before it."""
    path = make_checkpoint("w16", 3, tmp_path / "w16")
    flags = ("--model", str(path), "--numerics", "exact", "--threads", "1", "--num-blocks", "128")
    async with Cluster(tmp_path) as cluster:
        await cluster.start("decode", *flags)
        prefill = await cluster.start("prefill", *flags, "--max-num-batched-tokens", "256")
        order: list[str] = []

        async def one(name: str, tokens: int) -> None:
            result = await cluster.gateway.generate([7] * tokens, m.Sampling(max_tokens=1), patience=60, deadline=100)
            assert result.ok, result
            order.append(name)

        long = asyncio.create_task(one("long", 5120))
        await cluster.until(lambda: metric(cluster, prefill, "headrace_prefill_accepted_total"), lambda n: n == 1, 30.0)
        await asyncio.gather(long, *(one("short", 5) for _ in range(3)))
        assert order == ["short"] * 3 + ["long"]
