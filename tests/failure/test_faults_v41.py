"""Killed workers and cancels under the real engine: no answer is ever a wrong one, and the memory comes back.

An error is allowed to those only that ran on a killed worker, however fast or slow the machine is."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.bus import messages as m
from headrace.engine import LLM, SamplingParams
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.testing import Cluster

ENGINE = ("--numerics", "exact", "--batch-invariant", "--threads", "1", "--num-blocks", "128", "--max-num-seqs", "8")
COUNT, CLIENTS = 36, 4


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_disturbed_requests_have_their_own_answer_or_an_error(tmp_path):
    rng = random.Random(9)
    checkpoint = make_checkpoint("w16", 3, tmp_path / "w16")
    llm = LLM(checkpoint, numerics="exact", batch_invariant=True, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=256)
    top = min(280, llm.engine.info.vocab_size)
    prompts = [[rng.randrange(3, top) for _ in range(rng.choice([5, 64, 129, 200]))] for _ in range(COUNT)]
    params = [{"temperature": 0.8, "seed": i, "max_tokens": 12, "ignore_eos": True} for i in range(COUNT)]
    answers = await asyncio.to_thread(llm.generate, prompts, [SamplingParams(**p) for p in params])
    want = [answer.choices[0].ids for answer in answers]
    del llm
    flags = ("--model", str(checkpoint), *ENGINE, "--max-num-batched-tokens", "256")
    async with Cluster(tmp_path) as cluster:
        decode = await cluster.start("decode", *flags, "--ticket-seconds", "1")
        prefill = await cluster.start("prefill", *flags)
        first = [cluster.find(process).instance for process in (prefill, decode)]
        todo, results, killed = list(range(COUNT)), {}, set()

        async def client() -> None:
            while todo:
                index = todo.pop(0)
                cancel = rng.random() * 0.5 if index % 6 == 5 else None
                results[index] = await cluster.gateway.generate(
                    prompts[index], m.Sampling(**params[index]), patience=60, deadline=40, cancel_after=cancel
                )

        async def killer() -> None:
            nonlocal decode, prefill
            await cluster.until(lambda: asyncio.sleep(0), lambda _: len(todo) < COUNT - 8, 60.0)
            killed.add(first[0])
            await asyncio.to_thread(prefill.kill)
            prefill = await cluster.start("prefill", *flags)
            await cluster.until(lambda: asyncio.sleep(0), lambda _: len(todo) < COUNT - 20, 60.0)
            killed.add(first[1])
            await asyncio.to_thread(decode.kill)
            decode = await cluster.start("decode", *flags)

        await asyncio.gather(killer(), *(client() for _ in range(CLIENTS)))
        assert len(killed) == 2 and len(results) == COUNT
        ended = {"answer": 0, "cancelled": 0, "error": 0}
        for index, result in results.items():
            assert result.ids[0] == want[index][: len(result.ids[0])], "a wrong token"
            ended["answer" if result.ok else "cancelled" if result.cancelled else "error"] += 1
            assert not result.ok or result.ids[0] == want[index]
            if not result.ok and not result.cancelled:
                assert result.problem is not None
                assert {result.prefill, result.decode} & killed, f"an error, and nobody had killed its workers: {result}"
        print(ended)
        assert ended["error"] <= len(killed) * CLIENTS, "each kill costs what ran there at most: others wait for the next one"
        await cluster.quiet(decode)
        await cluster.quiet(prefill)
