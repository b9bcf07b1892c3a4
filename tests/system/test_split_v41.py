"""One process or two, cold or cached, over shared memory or tcp: the same bits.

60 random prompts through the real services, in class `exact` with batch invariance, against `LLM.generate` in this process:
ids and logprobs must be equal bit for bit, and the usage counters must prove that each path was really taken.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest

from headrace.bus import messages as m
from headrace.engine import LLM, SamplingParams
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.testing import Cluster, Result

PROMPTS = 60
SIZES = [1, 2, 3, 15, 16, 17, 31, 126, 127, 128, 129, 130, 255, 256, 257, 300, 383, 385, 640, 900]
ENGINE = ("--numerics", "exact", "--batch-invariant", "--threads", "1", "--num-blocks", "512", "--max-num-seqs", "12")


@dataclass
class Case:
    ids: list[int]
    sampling: dict
    keep: int = 0  # a text stop after this many tokens
    reference: list[tuple] = field(default_factory=list)  # (ids, logprobs, finish) of each choice


def make_cases(llm: LLM) -> list[Case]:
    """Odd and even lengths, shared prefixes, greedy and seeded; then id stops and text stops taken from a first run."""
    rng = random.Random(16)
    top = min(280, llm.engine.info.vocab_size)
    shared = [[rng.randrange(3, top) for _ in range(size)] for size in (129, 260)]
    cases = []
    for i in range(PROMPTS):
        size = SIZES[i] if i < len(SIZES) else rng.choice([rng.randint(1, 128), rng.randint(129, 320)])
        ids = [rng.randrange(3, top) for _ in range(size)]
        if i % 3 == 2:
            prefix = shared[i % 2]
            ids[: len(prefix)] = prefix[: len(ids)]
        sampling = {"max_tokens": rng.choice([1, 2, 3, 6, 9]), "seed": rng.randrange(1 << 40), "logprobs": rng.choice([0, 2])}
        sampling |= (
            {"temperature": 0.0}
            if i % 2
            else {"temperature": 0.9, "top_p": rng.choice([1.0, 0.8]), "top_k": rng.choice([0, 20])}
        )
        if i % 10 == 4:
            sampling |= {"n": 2}
        cases.append(Case(ids, sampling))
    for case, answer in zip(cases, answers(llm, cases), strict=True):
        out = answer.choices[0].ids
        if len(out) > 2 and rng.random() < 0.5:
            at = rng.randrange(len(out))
            case.sampling |= {"stop_token_ids": [out[at]], "min_tokens": rng.choice([0, 1])}
        elif len(out) > 5 and "n" not in case.sampling:
            case.keep = rng.randint(1, 3)
    for case, answer in zip(cases, answers(llm, cases), strict=True):
        case.reference = [(c.ids, [(t, p, list(top)) for t, p, top in c.logprobs], c.finish) for c in answer.choices]
    return cases


def answers(llm: LLM, cases: list[Case]) -> list:
    got = llm.generate([c.ids for c in cases], [SamplingParams(**c.sampling) for c in cases])
    assert not any(a.error for a in got), [a.error for a in got if a.error]
    return got


async def run_all(cluster: Cluster, cases: list[Case]) -> list[Result]:
    """All cases, six at a time; every answer is compared with the reference."""
    todo, out = list(enumerate(cases)), {}

    async def worker() -> None:
        while todo:
            index, case = todo.pop(0)
            result = await cluster.gateway.generate(
                case.ids, m.Sampling(**case.sampling), patience=60, deadline=100, cancel_at=case.keep or None, reason="stop"
            )
            out[index] = result

    await asyncio.gather(*(worker() for _ in range(6)))
    for index, case in enumerate(cases):
        compare(index, case, out[index])
    assert any(stopped(case, out[index]) for index, case in enumerate(cases))
    return [out[i] for i in range(len(cases))]


def stopped(case: Case, result: Result) -> bool:
    """The text stop came before the last token; on a busy machine it may come after it, and the whole answer is right then."""
    return bool(case.keep) and result.cancelled and result.finish[0] == "stop"


def compare(index: int, case: Case, result: Result) -> None:
    assert result.ok, (index, result.problem, result.refused)
    usage = result.usage
    if stopped(case, result):
        assert result.ids[0][: case.keep] == case.reference[0][0][: case.keep]
        assert usage.completion_tokens == case.keep
    else:
        for choice, (ids, logprobs, finish) in enumerate(case.reference):
            assert result.ids[choice] == ids, f"case {index}: {len(case.ids)} prompt tokens, {case.sampling}"
            assert result.logprobs[choice] == logprobs, f"case {index}: the ids are equal, the logprobs are not"
            assert result.finish[choice] == finish
        assert usage.completion_tokens >= sum(len(ids) for ids, _, _ in case.reference)
    assert usage.prompt_tokens == len(case.ids)
    assert usage.cached_tokens + usage.computed_rows == len(case.ids) and usage.computed_rows > 0
    assert usage.cached_tokens % 128 == 0


def longer_than_a_block(cases: list[Case], results: list[Result]) -> list[Result]:
    return [r for c, r in zip(cases, results, strict=True) if len(c.ids) > 128]


async def whole(cluster: Cluster, *processes) -> None:
    for process in processes:
        await cluster.quiet(process, timeout=30.0)


@pytest.mark.slow
@pytest.mark.timeout(540)
async def test_every_path_gives_the_same_bits(tmp_path):
    checkpoint = make_checkpoint("w16", 7, tmp_path / "w16")
    llm = LLM(checkpoint, numerics="exact", batch_invariant=True, num_blocks=512, max_num_seqs=12, max_num_batched_tokens=512)
    cases = await asyncio.to_thread(make_cases, llm)
    del llm
    flags = ("--model", str(checkpoint), *ENGINE)
    odd = ("--max-num-batched-tokens", "512", "--chunk-tokens", "37,128,201,64")
    async with Cluster(tmp_path) as cluster:
        store = await cluster.start("kvstore")
        decode = await cluster.start("decode", *flags, "--transports", "shm", "--checksums")
        prefill = await cluster.start("prefill", *flags, *odd, "--transports", "shm", "--checksums")

        cold = await run_all(cluster, cases)  # split over shared memory
        assert sum(r.usage.hit_source == "" for r in cold) > PROMPTS // 2
        hit = longer_than_a_block(cases, await run_all(cluster, cases))  # in the worker, state restored
        assert all(r.usage.hit_source == "worker+snapshot" and r.usage.replay_rows < 128 for r in hit), [r.usage for r in hit]
        await whole(cluster, prefill, decode)
        await cluster.stored(prefill)

        prefill.kill()
        decode.kill()
        decode = await cluster.start("decode", *flags, "--transports", "tcp")
        prefill = await cluster.start("prefill", *flags, *odd, "--transports", "tcp")
        hit = longer_than_a_block(cases, await run_all(cluster, cases))  # in the kvstore, after a restart; split over tcp
        first = [r for r in hit if r.usage.hit_source.startswith("kvstore")]
        assert len(first) > len(hit) // 2 and all(r.usage.hit_source.endswith("+snapshot") for r in hit), [r.usage for r in hit]
        await whole(cluster, prefill, decode)

        assert prefill.terminate() == 0
        prefill = await cluster.start("prefill", *flags, *odd, "--transports", "tcp", "--snapshot-bytes", "0")
        hit = longer_than_a_block(cases, await run_all(cluster, cases))  # in the kvstore, state replayed
        assert any(r.usage.hit_source == "kvstore" and r.usage.replay_rows > 0 for r in hit), [r.usage for r in hit]
        hit = longer_than_a_block(cases, await run_all(cluster, cases))  # in the worker, state replayed
        assert all(r.usage.hit_source == "worker" and r.usage.replay_rows > 0 for r in hit), [r.usage for r in hit]
        await whole(cluster, prefill, decode)
        assert decode.terminate() == 0 and prefill.terminate() == 0 and store.terminate() == 0
