"""Prefill and decode as real processes over a real NATS server, with the simulated engine: it notices every wrong byte."""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from headrace.bus import Settings, gather
from headrace.bus import messages as m
from headrace.kv.hashing import BlockHasher
from headrace.worker.sim import SimConfig
from headrace.worker.testing import NAMESPACE, Cluster, TestGateway, sim_answer

SIM = ("--engine", "sim", "--max-num-batched-tokens", "4096", "--max-num-seqs", "32")


def prompts(count: int, seed: int = 1, longest: int = 900) -> list[list[int]]:
    rng = random.Random(seed)
    shared = [rng.randrange(1000) for _ in range(longest)]
    out = []
    for i in range(count):
        size = rng.choice([1, 127, 128, 129, rng.randint(1, longest)])
        ids = [rng.randrange(1000) for _ in range(size)]
        if i % 3 == 0:
            ids[: size // 2] = shared[: size // 2]
        out.append(ids)
    return out


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_split_equals_one_process_and_no_tensor_rides_on_the_bus(transport):
    async with Cluster() as cluster:
        flags = (*SIM, "--transports", transport, "--checksums", "--sim-block-bytes", "131072", "--num-blocks", "400")
        decode, prefill = await asyncio.gather(cluster.start("decode", *flags), cluster.start("prefill", *flags))
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
        await cluster.quiet(decode)
        await cluster.quiet(prefill)

        moved = (await cluster.metrics(prefill))["headrace_prefill_bytes_written_total"]
        for process in (prefill, decode):
            metrics = await cluster.metrics(process)
            assert metrics["headrace_bus_largest_out_bytes"] < 16384, "a block is 131072 bytes"
            assert metrics["headrace_bus_bytes_out_total"] < moved / 10
        assert moved > 50 * 131072


async def test_stops_and_first_tokens_are_those_of_sim_answer():
    """max_tokens 1 and 2, min_tokens, EOS first, stop ids, text stops: the same answer, and usage that fits."""
    ids = [7, 8, 9]
    config = SimConfig(echo=True, num_blocks=16)
    async with Cluster() as cluster:
        await asyncio.gather(*(cluster.start(role, *SIM, "--sim-echo") for role in ("decode", "prefill")))
        for prompt in (ids, [1, 7]):  # the second one's answer begins with EOS
            for max_tokens in (1, 2, 9):
                for stop in ([], [8], [7]):
                    for min_tokens in (0, 1, 2):
                        if min_tokens > max_tokens:
                            continue
                        sampling = {"max_tokens": max_tokens, "min_tokens": min_tokens, "stop_token_ids": stop}
                        result = await cluster.gateway.generate(prompt, m.Sampling(**sampling))
                        assert (result.ids, result.finish) == sim_answer(prompt, config, **sampling), sampling
                        assert result.usage.completion_tokens <= max_tokens and result.usage.cached_tokens == 0
        result = await cluster.gateway.generate([5], m.Sampling(max_tokens=0))
        assert result.refused.code == "invalid" and "max_tokens must be at least 1; got 0" in result.refused.message
        result = await cluster.gateway.generate(range(200_000), m.Sampling())
        assert result.refused.code == "invalid" and "200000 tokens; 1 to 131071" in result.refused.message


async def test_a_text_stop_gets_the_usage_that_counts():
    async with Cluster() as cluster:
        decode, _ = await asyncio.gather(
            cluster.start("decode", *SIM, "--sim-step-seconds", "0.005"), cluster.start("prefill", *SIM)
        )
        result = await cluster.gateway.generate([1, 2, 3], m.Sampling(max_tokens=500), cancel_at=4, reason="stop")
        assert result.usage.completion_tokens == 4 and result.finish == ["stop"] and len(result.ids[0]) < 500
        await cluster.quiet(decode)


async def test_lost_output_is_asked_for_again():
    async with Cluster() as cluster:
        decode, _ = await asyncio.gather(
            cluster.start("decode", *SIM, "--sim-step-seconds", "0.001"), cluster.start("prefill", *SIM)
        )
        cluster.gateway.drop_out = 0.3
        results = await asyncio.gather(
            *(cluster.gateway.generate([i], m.Sampling(max_tokens=40, logprobs=0)) for i in range(10))
        )
        for i, result in enumerate(results):
            assert result.ids == sim_answer([i], max_tokens=40)[0] and len(result.logprobs[0]) == 40, result
        assert sum(r.gaps for r in results) > 5
        assert (await cluster.metrics(decode))["headrace_decode_resumed_total"] >= sum(r.gaps for r in results)


async def test_peers_with_other_memory_are_refused_with_both_values():
    async with Cluster() as cluster:
        await asyncio.gather(cluster.start("decode", *SIM), cluster.start("prefill", *SIM, "--sim-block-bytes", "8192"))
        ids = list(range(300))
        hashes = b"".join(BlockHasher("sim-b8192-s1024", NAMESPACE).hashes(ids))
        result = await cluster.gateway.generate(ids, m.Sampling(), hashes=hashes)
        assert result.problem.code.endswith("mismatch")
        assert "sim-b4096-s1024" in result.problem.message and "sim-b8192-s1024" in result.problem.message
        assert result.ended < 10.0, "at once, not at its deadline of 30 s"
        wrong = await cluster.gateway.generate(ids, m.Sampling())  # hashed for decode's layout: prefill notices
        assert wrong.refused.code == "mismatch"


async def test_a_peer_with_another_checkpoint_is_refused_with_both_names():
    async with Cluster() as cluster:
        decode, _ = await asyncio.gather(cluster.start("decode", *SIM), cluster.start("prefill", *SIM, "--sim-model", "other"))
        result = await cluster.gateway.generate([1, 2, 3], m.Sampling())
        assert result.problem.code.endswith("mismatch") and result.ended < 10.0
        assert "'sim:other'" in result.problem.message and "'sim:sim'" in result.problem.message
        await cluster.quiet(decode)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--model", "/nowhere"), "/nowhere does not exist"),
        (("--engine", "sim", "--sim-script", "/nowhere"), "/nowhere"),
        (("--engine", "sim", "--nats-url", "nats://127.0.0.1:1", "--nats-connect-seconds", "0.2"), "nats://127.0.0.1:1"),
        ((), "needs a checkpoint"),
    ],
)
async def test_a_start_that_can_not_work_says_why(flags, text):
    async with Cluster() as cluster:
        process = await cluster.start("prefill", *flags, ready=False)
        assert await asyncio.to_thread(process.popen.wait, 60) in (1, 2)
        assert text in process.log and "Traceback" not in process.log, process.log


async def test_a_gateways_requests_end_with_it():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *SIM, "--sim-step-seconds", "0.02"), cluster.start("prefill", *SIM)
        )
        other = TestGateway(Settings(nats_url=cluster.nats.url, trace=False, drain_seconds=0))
        await other.start()
        tasks = [asyncio.create_task(other.generate([i] * 200, m.Sampling(max_tokens=5000), deadline=100)) for i in range(4)]
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["live"] == 4, 5.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        other.state = "stopped"  # so that it leaves without a word
        await other.stop()
        started = time.monotonic()
        await cluster.quiet(decode, timeout=30.0)
        await cluster.quiet(prefill, timeout=30.0)
        assert time.monotonic() - started < 50.0, "they would run for 100 s"


async def test_sigterm_drains():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *SIM, "--sim-step-seconds", "0.01"), cluster.start("prefill", *SIM)
        )
        running = asyncio.create_task(cluster.gateway.generate([1, 2], m.Sampling(max_tokens=60)))
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["live"] == 1, 5.0)
        instance = cluster.find(decode).instance
        decode.signal(signal.SIGTERM)
        await cluster.until(lambda: asyncio.sleep(0, cluster.gateway.peers.get(instance)), lambda p: p.state == "draining", 2.0)
        refused = await cluster.gateway.attempt([3], m.Sampling(), decode=instance)
        assert refused.refused.code == "draining"
        result = await running
        assert result.ok and len(result.ids[0]) == 60
        assert await asyncio.to_thread(decode.popen.wait, 10) == 0
        assert prefill.terminate() == 0


async def test_a_trace_tells_a_requests_life_in_order():
    async with Cluster() as cluster:
        roles = await asyncio.gather(
            *(cluster.start(role, *(SIM if role != "kvstore" else ())) for role in ("decode", "prefill", "kvstore"))
        )
        await cluster.gateway.generate(list(range(400)), m.Sampling(max_tokens=3))
        await cluster.stored(roles[1])
        roles[1].kill()
        await cluster.start("prefill", *SIM)
        result = await cluster.gateway.generate(list(range(400)), m.Sampling(max_tokens=3))
        assert result.usage.hit_source == "kvstore+snapshot"
        peers = [(p.role, p.instance) for p in cluster.gateway.peers.all() if p.role != "gateway"]
        events = await cluster.until(
            lambda: gather(cluster.gateway.bus, peers, result.request),
            lambda events: any(event["event"] == "prefill.committed" for event in events),
            5.0,
        )
        names = [event["event"] for event in events]
        life = ["decode.admit", "prefill.accepted", "prefill.fetched", "prefill.lookup", "decode.bound", "prefill.bound"]
        life += ["prefill.written", "decode.admitted", "decode.first_token", "decode.finished"]
        assert [name for name in names if name in life] == life, names
        assert {"kvstore.lookup", "prefill.chunk"} <= set(names)
        timed = {event["event"] for event in events if event.get("ms", -1) >= 0}
        assert {
            "prefill.lookup",
            "prefill.chunk",
            "prefill.written",
            "decode.admitted",
            "decode.first_token",
            "decode.finished",
        } <= timed


async def test_too_little_shared_memory_is_a_clear_error_at_start():
    async with Cluster() as cluster:
        process = await cluster.start("decode", *SIM, "--num-blocks", "1000000", "--sim-block-bytes", "1048576", ready=False)
        assert await asyncio.to_thread(process.popen.wait, 20) == 1
        assert "1,048,576,000,000 bytes of shared memory" in process.log and "--transports tcp" in process.log


async def test_a_prompt_larger_than_a_bus_message():
    """300,000 tokens are 1.2 MB of ids; the server takes 1 MB at a time (T21)."""
    flags = (*SIM, "--max-model-len", "310000", "--num-blocks", "2600", "--sim-block-bytes", "256")
    async with Cluster() as cluster:
        await asyncio.gather(cluster.start("decode", *flags, "--slab-slots", "2"), cluster.start("prefill", *flags))
        rng = random.Random(5)
        ids = [rng.randrange(1000) for _ in range(300_000)]
        result = await cluster.gateway.generate(ids, m.Sampling(max_tokens=3), deadline=60)
        assert result.ok and result.usage.computed_rows == 300_000
        assert result.ids == sim_answer(ids, SimConfig(num_blocks=2600, block_bytes=16, max_model_len=310_000), max_tokens=3)[0]
        other = list(ids)
        other[17] ^= 1
        hashes = b"".join(BlockHasher("sim-b256-s1024", NAMESPACE).hashes(ids))
        wrong = await cluster.gateway.generate(other, m.Sampling(max_tokens=3), hashes=hashes)
        assert wrong.problem.code == "prefill_mismatch"
