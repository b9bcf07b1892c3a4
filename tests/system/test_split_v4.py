"""V4 through the real services: prefill and decode apart, and in one process; cold, from a snapshot, and by replay of what the
kvstore holds. Ids and log-probabilities are bit for bit those of `LLM.generate`, and usage says which path was taken."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.engine import LLM, SamplingParams
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.testing import Cluster

from .test_split_v41 import Case, compare

SIZES = (1, 5, 127, 129, 261, 300, 385, 530)  # on both sides of an entry's, a window's and a block's end
ENGINE = ("--numerics", "exact", "--batch-invariant", "--threads", "1", "--num-blocks", "128", "--max-num-seqs", "8")
CHUNKS = ("--max-num-batched-tokens", "256", "--chunk-tokens", "37,128,201,64")


def make_cases(llm: LLM) -> list[Case]:
    rng = random.Random(4)
    shared = [rng.randrange(3, 280) for _ in range(260)]
    cases = []
    for i, size in enumerate(SIZES):
        ids = ([] if i % 2 else shared[:size]) + [rng.randrange(3, 280) for _ in range(size)]
        sampling = {"max_tokens": 8, "seed": i, "temperature": i % 3 / 2, "logprobs": 2, "ignore_eos": True}
        cases.append(Case(ids[:size] if i % 4 else ids, sampling))
    answers = llm.generate([c.ids for c in cases], [SamplingParams(**c.sampling) for c in cases])
    for case, answer in zip(cases, answers, strict=True):
        case.reference = [(c.ids, [(t, p, list(top)) for t, p, top in c.logprobs], c.finish) for c in answer.choices]
    return cases


async def ask(cluster: Cluster, cases: list[Case]) -> list:
    """Answers of all cases at once, each compared; those of prompts that hold a whole block."""
    from headrace.bus import messages as m

    results = await asyncio.gather(*(cluster.gateway.generate(c.ids, m.Sampling(**c.sampling), patience=60) for c in cases))
    for index, (case, result) in enumerate(zip(cases, results, strict=True)):
        compare(index, case, result)
    return [r.usage for c, r in zip(cases, results, strict=True) if len(c.ids) > 128]


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_every_path_gives_the_same_bits(tmp_path):
    checkpoint = make_checkpoint("v4-w16", 7, tmp_path / "v4-w16")
    llm = LLM(checkpoint, numerics="exact", batch_invariant=True, num_blocks=128, max_num_seqs=8, max_num_batched_tokens=256)
    cases = await asyncio.to_thread(make_cases, llm)
    flags = ("--model", str(checkpoint), *ENGINE)
    async with Cluster(tmp_path) as cluster:
        await cluster.start("kvstore")
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *flags, "--checksums"), cluster.start("prefill", *flags, *CHUNKS, "--checksums")
        )
        await ask(cluster, cases)
        assert all(u.hit_source == "worker+snapshot" and u.replay_rows < 128 for u in await ask(cluster, cases))
        for process in (prefill, decode):
            await cluster.quiet(process, timeout=30.0)
        await cluster.stored(prefill)
        prefill.kill()
        decode.kill()
        both = await cluster.start("decode", *flags, *CHUNKS, "--both", "--snapshot-bytes", "0")
        first = await ask(cluster, cases)
        assert any(u.hit_source == "kvstore" and u.replay_rows == 90 for u in first), first
        assert all(u.hit_source == "worker" and u.replay_rows == 90 for u in await ask(cluster, cases))
        await cluster.quiet(both, timeout=30.0)
