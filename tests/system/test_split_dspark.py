"""Speculative decoding across processes: prefill computes, the draft's rings travel in the state, decode drafts and verifies.

In class `exact` with batch invariance and exact acceptance, ids and logprobs must equal, bit for bit, those of one engine in
this process that never drafts; the workers' metrics must prove that drafts were accepted and rejected.
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from headrace.bus import messages as m
from headrace.engine import LLM, SamplingParams
from headrace.engine.agreeing import agreeing_checkpoint
from headrace.worker.testing import Cluster, Process

ENGINE = ("--numerics", "exact", "--batch-invariant", "--threads", "1", "--num-blocks", "128", "--max-num-seqs", "8")
DRAFT = ("--speculative", "dspark", "--draft-budget", "40", "--rollback-gate", "1")


def make_cases(vocab: int) -> list[tuple[list[int], dict]]:
    rng = random.Random(3)
    cases = []
    for i in range(14):
        ids = [rng.randrange(3, min(vocab, 280)) for _ in range(rng.choice([1, 17, 125, 128, 130, 260]))]
        sampling = {"max_tokens": rng.choice([2, 9, 16]), "seed": i, "logprobs": 1, "temperature": float(i % 2)}
        cases.append((ids, sampling | ({"n": 2} if i % 5 == 3 else {})))
    return cases


async def metric(cluster: Cluster, process: Process, sample: str) -> float:
    """One sample with its labels, as it is written."""
    async with aiohttp.ClientSession() as session, session.get(cluster.find(process).http + "/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(sample + " ")))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_split_with_drafts_equals_one_process_without(tmp_path):
    checkpoint = agreeing_checkpoint(tmp_path / "model", seed=5)
    llm = LLM(checkpoint, numerics="exact", batch_invariant=True, num_blocks=128, max_num_seqs=8)
    cases = make_cases(llm.engine.info.vocab_size)
    params = [SamplingParams(**sampling) for _, sampling in cases]
    answers = await asyncio.to_thread(llm.generate, [ids for ids, _ in cases], params)
    flags = ("--model", str(checkpoint), *ENGINE)
    async with Cluster(tmp_path) as cluster:
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *flags, *DRAFT), cluster.start("prefill", *flags, "--chunk-tokens", "37,128")
        )
        todo = list(zip(cases, answers, strict=True))

        async def worker() -> None:
            while todo:
                (ids, sampling), answer = todo.pop()
                result = await cluster.gateway.generate(ids, m.Sampling(**sampling), patience=60, deadline=100)
                assert result.ok, (result.problem, result.refused)
                for choice, want in enumerate(answer.choices):
                    got = (result.ids[choice], result.logprobs[choice], result.finish[choice])
                    assert got == (want.ids, [(t, p, list(top)) for t, p, top in want.logprobs], want.finish)

        await asyncio.gather(*(worker() for _ in range(4)))
        counts = {
            name: await metric(cluster, decode, f'headrace_engine_drafts_{name}{{position="1"}}')
            for name in ("drafted", "verified", "accepted")
        }
        assert 0 < counts["accepted"] < counts["verified"] <= counts["drafted"]
        for process in (decode, prefill):
            await cluster.quiet(process)
