"""Prefill and decode in one process (`--both`): the same answers, prefix hits of its own and from the kvstore, nothing left
over after ends of every kind; and behind a real gateway, `headrace up --both`."""

from __future__ import annotations

import asyncio
import random

from headrace.bus import messages as m
from headrace.worker.testing import NAMESPACE, Cluster, sim_answer

from .test_cli_system import chat, start_up, stop
from .test_split import SIM, prompts

BOTH = (*SIM, "--both", "--num-blocks", "400")


async def test_one_process_gives_the_same_answers():
    async with Cluster() as cluster:
        both = await cluster.start("decode", *BOTH)
        todo = list(enumerate(prompts(40)))

        async def worker() -> None:
            while todo:
                seed, ids = todo.pop()
                sampling = {"max_tokens": 1 + seed * 7 % 200, "seed": seed, "n": 1 + seed % 3, "logprobs": 1}
                result = await cluster.gateway.generate(ids, m.Sampling(**sampling), patience=20)
                assert (result.ids, result.finish) == sim_answer(ids, **sampling), result
                usage = result.usage
                assert usage.prompt_tokens == usage.cached_tokens + usage.computed_rows == len(ids)
                assert usage.completion_tokens == sampling["max_tokens"] * sampling["n"]

        await asyncio.gather(*(worker() for _ in range(4)))
        first = await cluster.gateway.generate(range(700, 1300), m.Sampling(max_tokens=3))
        again = await cluster.gateway.generate(range(700, 1300), m.Sampling(max_tokens=3))
        assert first.usage.cached_tokens == 0 and first.usage.hit_source == ""
        assert (again.usage.cached_tokens, again.usage.hit_source) == (512, "worker+snapshot") and again.ids == first.ids
        await cluster.quiet(both)


async def test_a_prefix_comes_from_the_kvstore_after_a_restart():
    async with Cluster() as cluster:
        both, _ = await asyncio.gather(cluster.start("decode", *BOTH), cluster.start("kvstore"))
        first = await cluster.gateway.generate(list(range(400)), m.Sampling(max_tokens=3))
        await cluster.stored(both)
        both.kill()
        both = await cluster.start("decode", *BOTH)
        again = await cluster.gateway.generate(list(range(400)), m.Sampling(max_tokens=3))
        assert again.ids == first.ids
        assert (again.usage.cached_tokens, again.usage.hit_source) == (384, "kvstore+snapshot")
        await cluster.quiet(both)


async def test_whatever_ends_a_request_early_leaves_nothing():
    async with Cluster() as cluster:
        both = await cluster.start("decode", *BOTH, "--sim-prefill-seconds", "0.0002", "--sim-step-seconds", "0.002")
        rng = random.Random(5)

        async def one(number: int) -> None:
            ids = [rng.randrange(1000) for _ in range(rng.choice([5, 300, 900]))]
            how = [{}, {"cancel_after": rng.random() * 0.2}, {"cancel_at": 3, "reason": "stop"}, {"deadline": 0.1}][number % 4]
            result = await cluster.gateway.generate(ids, m.Sampling(max_tokens=60), patience=20, **how)
            if not how:
                assert (result.ids, result.finish) == sim_answer(ids, max_tokens=60)

        await asyncio.gather(*(one(number) for number in range(40)))
        await cluster.quiet(both)


async def test_what_was_not_admitted_so_is_refused():
    async with Cluster() as cluster:
        both = await cluster.start("decode", *BOTH)
        good = await cluster.gateway.attempt([1, 2, 3] * 100, hashes=bytes(32))  # of another prompt
        assert good.refused.code == "mismatch" and "block hashes" in good.refused.message
        instance = cluster.find(both).instance
        run = m.Run("nobody", 0, "g", instance, 0, b"", b"", NAMESPACE, 1.0)
        answer = await cluster.gateway.bus.ask(f"headrace.decode.{instance}.run", run, 1.0)
        assert isinstance(answer, m.Refused) and answer.code == "unknown"
        await cluster.quiet(both)


def test_up_both_answers_over_http_without_a_prefill_worker(tmp_path):
    up = start_up(tmp_path, "--engine", "sim", "--both")
    try:
        assert set(up.running.processes) == {"nats", "kvstore", "decode-1", "gateway"}
        answer, _ = up.post("/v1/chat/completions", chat("Hello"))
        assert answer["usage"]["completion_tokens"] == 8
    finally:
        stop(up)
