"""Decode workers killed with SIGKILL, or drained, under running streams of the whole system: every client gets the answer that
it would have got undisturbed, token by token, with its logprobs, its finish reason and its usage."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.testing import Cluster

from .streams import Answer, ask, start_gateway

SIM = ("--engine", "sim", "--num-blocks", "400", "--max-num-seqs", "32")
SLOW = ("--sim-step-seconds", "0.02")
EXACT = ("--numerics", "exact", "--batch-invariant", "--threads", "1", "--num-blocks", "256", "--max-num-seqs", "32")


async def gather(url: str, bodies: list[dict], salt: str, disturb: Callable[[list[Answer]], Any] | None = None) -> list[Answer]:
    """All at once; `disturb(answers)` runs beside them."""
    answers = [Answer() for _ in bodies]
    asked = [ask(url, body | {"cache_salt": salt}, answer) for body, answer in zip(bodies, answers, strict=True)]
    other = [disturb(answers)] if disturb else []
    await asyncio.gather(*asked, *other)
    return answers


def bodies(rng: random.Random, top: int, most: int, count: int) -> list[dict]:
    """Streams of every kind: short and long prompts, several choices, penalties, logprobs, minimum lengths."""
    out = []
    for number in range(count):
        body: dict[str, Any] = {
            "prompt": [rng.randrange(3, top) for _ in range(rng.choice([3, 64, 129, 200]))], "max_tokens": most, "stream": True,
            "stream_options": {"include_usage": True}, "seed": number, "temperature": rng.choice([0.0, 0.9]),
            "ignore_eos": True,
        }  # fmt: skip
        body |= [
            {"logprobs": 2}, {"n": 2, "logprobs": 1}, {"presence_penalty": 0.7, "frequency_penalty": 0.9},
            {"repetition_penalty": 1.3, "logprobs": 0}, {"top_p": 0.8, "top_k": 20, "min_tokens": most - 2}, {"n": 3},
        ][number % 6]  # fmt: skip
        out.append(body)
    return out


def same(got: Answer, want: Answer) -> None:
    assert got.error is None and got.done, got.error
    assert (got.text, got.logprobs, got.finish, got.usage) == (want.text, want.logprobs, want.finish, want.usage)


async def all_begun(answers: list[Answer]) -> None:
    await Cluster.until(lambda: asyncio.sleep(0), lambda _: all(answer.text for answer in answers), 120.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["kill", "drain", "kill both"])
async def test_streams_go_on_where_another_worker_is(how):
    """Twelve streams on two workers; one of them is killed, or drained with less time than they need."""
    rng = random.Random(5)
    async with Cluster() as cluster:
        await cluster.start("kvstore")
        both = ("--both",) if how.endswith("both") else ()  # one process computes prompts and goes on
        if not both:
            await cluster.start("prefill", *SIM)
        decodes = [await cluster.start("decode", *SIM, *SLOW, "--drain-seconds", "1", *both) for _ in range(2)]
        gateway, url = await start_gateway(cluster)
        todo = bodies(rng, 400, 300, 12)  # six seconds: the first still goes on when the last has begun, on a slow machine too
        want = await gather(url, todo, "undisturbed")

        async def disturb(answers: list[Answer]) -> None:
            await all_begun(answers)
            lives = [(await cluster.metrics(decode))["headrace_decode_live"] for decode in decodes]
            assert max(lives) > 0
            if lives[1] > lives[0]:  # the first has the most to lose
                decodes.reverse()
            if how != "drain":
                await asyncio.to_thread(decodes[0].kill, False)
            else:
                assert await asyncio.to_thread(decodes[0].terminate, 60.0) == 0

        for got, answer in zip(await gather(url, todo, "disturbed", disturb), want, strict=True):
            same(got, answer)
            assert got.usage["prompt_tokens_details"]["cached_tokens"] == 0, "cold, however much of it a replay found cached"
        metrics = await cluster.metrics(gateway)
        assert metrics["headrace_gateway_migrations_total"] >= 1
        await cluster.quiet(decodes[1])


@pytest.mark.timeout(240)
async def test_streams_wait_for_the_only_worker_to_start_again():
    rng = random.Random(6)
    async with Cluster() as cluster:
        await cluster.start("prefill", *SIM)
        decode = await cluster.start("decode", *SIM, *SLOW)
        _, url = await start_gateway(cluster)
        todo = bodies(rng, 400, 60, 6)
        want = await gather(url, todo, "undisturbed")

        async def disturb(answers: list[Answer]) -> None:
            await all_begun(answers)
            await asyncio.to_thread(decode.kill, False)
            await cluster.start("decode", *SIM, *SLOW)

        for got, answer in zip(await gather(url, todo, "disturbed", disturb), want, strict=True):
            same(got, answer)


@pytest.mark.timeout(240)
async def test_a_stopped_worker_is_left_and_what_it_says_later_is_dropped():
    """SIGSTOP is no proof of death; the streams go on elsewhere all the same, and no token comes twice."""
    rng = random.Random(7)
    async with Cluster() as cluster:
        await cluster.start("prefill", *SIM)
        decodes = [await cluster.start("decode", *SIM, *SLOW) for _ in range(2)]
        _, url = await start_gateway(cluster)
        todo = bodies(rng, 400, 100, 8)
        want = await gather(url, todo, "undisturbed")

        async def disturb(answers: list[Answer]) -> None:
            await all_begun(answers)
            decodes[0].signal(signal.SIGSTOP)
            await asyncio.sleep(1.5)
            decodes[0].signal(signal.SIGCONT)

        for got, answer in zip(await gather(url, todo, "disturbed", disturb), want, strict=True):
            same(got, answer)
        for decode in decodes:
            await cluster.quiet(decode, timeout=30.0)


@pytest.mark.timeout(240)
async def test_a_stop_text_over_the_seam_and_limits_counted_from_the_client_s_prompt():
    rng = random.Random(8)
    async with Cluster() as cluster:
        await cluster.start("prefill", *SIM)
        decode = await cluster.start("decode", *SIM, "--sim-step-seconds", "0.1")
        _, url = await start_gateway(cluster)
        plain = {"stream": True, "stream_options": {"include_usage": True}, "seed": 1, "max_tokens": 40}
        todo = [plain | {"prompt": [rng.randrange(3, 400) for _ in range(size)]} for size in (5, 127, 128)]
        texts = [answer.text[0] for answer in await gather(url, todo, "first")]
        # A text of several words that begins with the fourth: the kill comes after the third, before it is complete.
        stops = [" " + " ".join(text.split(" ")[3:30]) for text in texts]
        todo = [body | {"stop": [stop]} for body, stop in zip(todo, stops, strict=True)]
        want = await gather(url, todo, "undisturbed")
        assert all(answer.finish == {0: "stop"} for answer in want)

        async def disturb(answers: list[Answer]) -> None:
            await all_begun(answers)
            await asyncio.to_thread(decode.kill, False)
            await cluster.start("decode", *SIM)

        for got, answer in zip(await gather(url, todo, "disturbed", disturb), want, strict=True):
            same(got, answer)


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_the_continuation_is_the_undisturbed_one_bit_by_bit(tmp_path):
    """DeepSeek-V4.1 in class `exact`: SIGKILL in mid-stream, another process, the same ids and logprobs."""
    rng = random.Random(9)
    checkpoint = make_checkpoint("w16", 3, tmp_path / "w16")
    flags = ("--model", str(checkpoint), *EXACT, "--max-num-batched-tokens", "256")
    async with Cluster(tmp_path) as cluster:
        await cluster.start("kvstore")
        await cluster.start("prefill", *flags)
        decode = await cluster.start("decode", *flags)
        gateway, url = await start_gateway(cluster)
        todo = bodies(rng, 250, 40, 6)
        want = await gather(url, todo, "undisturbed")
        assert all(len(rows) == 40 for answer in want for rows in answer.logprobs.values())

        async def disturb(answers: list[Answer]) -> None:
            await all_begun(answers)
            await asyncio.to_thread(decode.kill, False)
            await cluster.start("decode", *flags)

        began = time.monotonic()
        for got, answer in zip(await gather(url, todo, "disturbed", disturb), want, strict=True):
            same(got, answer)
        print(f"{len(todo)} streams in {time.monotonic() - began:.1f} s, the start of a worker included")
        assert (await cluster.metrics(gateway))["headrace_gateway_migrations_total"] >= 1
