"""Faults in real processes: what is killed, stopped, lost or late costs its own requests, and no memory.

After each: pools add up by walking owners, nothing is quarantined within two leases, no request outlives its deadline, and
every one ends with its answer or an error soon after the fault.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time

import pytest

from headrace.bus import messages as m
from headrace.worker.testing import Cluster, Process, Result, sim_answer

LEASE = 1.0  # seconds
CLIENTS = 12
SOON = 10.0  # seconds; well before the deadline of 30 s that would end it otherwise, and no matter how slow the machine is
SIM = ("--engine", "sim", "--max-num-batched-tokens", "2048", "--max-num-seqs", "32", "--num-blocks", "600")
DECODE = (*SIM, "--ticket-seconds", str(LEASE), "--sim-step-seconds", "0.003")
PREFILL = (*SIM, "--sim-prefill-seconds", "0.0001")
SLOW = ("--sim-prefill-seconds", "0.004")  # a prompt of 500 tokens takes two seconds


def expected(ids: list[int], max_tokens: int) -> list[int]:
    return sim_answer(ids, max_tokens=max_tokens)[0][0]


async def whole(cluster: Cluster, *processes: Process) -> None:
    """Soon after quiet (two leases, and what a busy machine needs) everything is free again, by walking owners."""
    for process in processes:
        await cluster.quiet(process, timeout=2 * LEASE + SOON)


async def request(cluster: Cluster, rng: random.Random, **options) -> tuple[Result, list[int], int]:
    """One random request."""
    ids = [rng.randrange(500) for _ in range(rng.choice([3, 128, 200, 500]))]
    max_tokens = rng.choice([1, 2, 20, 60])
    result = await cluster.gateway.generate(ids, m.Sampling(max_tokens=max_tokens), patience=10, **options)
    return result, ids, max_tokens


def judge(result: Result, ids: list[int], max_tokens: int) -> str:
    """Every end is one of: the whole answer, cancelled by its client, an error object. Tokens are never wrong."""
    want = expected(ids, max_tokens)
    for got in result.ids[:1]:
        assert got == want[: len(got)], "a token of something else"
    if result.ok and not result.cancelled:
        assert result.ids[0] == want
        return "answer"
    if result.cancelled:
        return "cancelled"
    assert result.problem is not None and result.problem.status >= 400 and result.problem.message, result
    return "error"


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_300_requests_with_cancels_and_killed_workers():
    """Random cancels, a prefill and a decode process killed again and again, expired tickets."""
    rng = random.Random(3)
    async with Cluster() as cluster:
        await cluster.start("kvstore")
        decodes = list(await asyncio.gather(*(cluster.start("decode", *DECODE) for _ in range(2))))
        prefills = list(await asyncio.gather(*(cluster.start("prefill", *PREFILL) for _ in range(2))))
        cluster.gateway.probe = True
        outcomes: dict[str, int] = {}
        left, faults, ended_at = 300, [], []

        async def client() -> None:
            nonlocal left
            while left > 0:
                left -= 1
                options = {"deadline": 15.0}
                if rng.random() < 0.25:
                    options["cancel_after"] = rng.random() * 0.2
                started = time.monotonic()
                result, ids, max_tokens = await request(cluster, rng, **options)
                outcome = judge(result, ids, max_tokens)
                outcomes[outcome] = outcomes.get(outcome, 0) + 1
                assert time.monotonic() - started < 15 + 10 + SOON  # deadline, patience
                if outcome == "error":
                    ended_at.append(time.monotonic())

        async def killer() -> None:
            """A fault each time that another 40 requests have begun."""
            for number in range(6):
                await cluster.until(lambda: asyncio.sleep(0), lambda _, n=number: left <= 270 - 40 * n, 60.0)
                role, group, flags = [("decode", decodes, DECODE), ("prefill", prefills, PREFILL)][number % 2]
                faults.append(time.monotonic())
                if number == 3:  # its tickets expire
                    group[0].signal(signal.SIGSTOP)
                    await asyncio.sleep(1.5 * LEASE)
                    group[0].signal(signal.SIGCONT)
                    faults.append(time.monotonic())
                else:
                    await asyncio.to_thread(group.pop(0).kill, False)
                    group.append(await cluster.start(role, *flags))

        killing = asyncio.create_task(killer())
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        await killing
        assert sum(outcomes.values()) == 300 and outcomes["cancelled"] > 0, outcomes
        assert len(faults) == 7
        assert outcomes.get("error", 0) <= CLIENTS * len(faults), "a fault costs what was in flight at most"
        # An error follows its fault, not its deadline: two missed pings of 250 ms, a lease where a process is only stopped.
        late = [when - max(fault for fault in faults if fault <= when) for when in ended_at]
        print(f"{outcomes}, {len(faults)} faults, errors at most {max(late, default=0):.2f} s after")
        assert max(late, default=0) < SOON
        await whole(cluster, *decodes, *prefills)


async def test_a_killed_prefill_frees_decodes_memory_and_its_client_hears_at_once():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM, *SLOW))
        tasks = [asyncio.create_task(cluster.gateway.generate([i] * 500, m.Sampling())) for i in range(3)]
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["tickets"] >= 1, SOON)
        prefill.kill()
        killed = time.monotonic()
        results = await asyncio.gather(*tasks)
        assert time.monotonic() - killed < SOON
        assert all(not r.ok for r in results) and any(
            "died" in r.problem.message or "gone" in r.problem.message for r in results if r.problem
        )
        await whole(cluster, decode)


async def test_a_killed_decode_frees_prefills_memory_and_its_client_hears_at_once():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM, *SLOW))
        cluster.gateway.probe = True
        tasks = [asyncio.create_task(cluster.gateway.generate([i] * 500, m.Sampling())) for i in range(3)]
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["tickets"] >= 1, SOON)
        decode.kill(notice=False)
        killed = time.monotonic()
        results = await asyncio.gather(*tasks)
        assert all(not r.ok and r.problem is not None for r in results)
        assert time.monotonic() - killed < SOON
        await whole(cluster, prefill)


async def test_a_stopped_prefill_is_not_dead():
    """Its ticket expires: the client has an error, the blocks stay in quarantine until it says that it is done."""
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM, *SLOW))
        task = asyncio.create_task(cluster.gateway.generate([7] * 500, m.Sampling(), deadline=20))
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["tickets"] == 1, SOON)
        prefill.signal(signal.SIGSTOP)
        result = await task
        assert result.problem.code == "handoff_expired" and result.problem.status == 504
        await asyncio.sleep(2 * LEASE)
        stopped = await cluster.audit(decode)
        assert stopped["ok"] and stopped["quarantined"] == 4 and stopped["slots_out"] == 1
        other = await cluster.start("prefill", *SIM)  # and meanwhile nobody else is in the way
        assert (await cluster.gateway.generate([8] * 300, m.Sampling(), prefill=cluster.find(other).instance)).ok
        prefill.signal(signal.SIGCONT)
        await whole(cluster, decode, prefill)


async def test_a_stopped_prefill_that_never_comes_back():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM, *SLOW))
        task = asyncio.create_task(cluster.gateway.generate([7] * 500, m.Sampling(), deadline=20))
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["tickets"] == 1, SOON)
        prefill.signal(signal.SIGSTOP)
        assert not (await task).ok
        assert (await cluster.audit(decode))["quarantined"] == 4
        prefill.kill()
        await whole(cluster, decode)


async def test_over_tcp_an_expired_ticket_needs_no_quarantine():
    """The owner's own server refuses late frames, so the memory is free at once."""
    async with Cluster() as cluster:
        decode = await cluster.start("decode", *DECODE, "--transports", "tcp")
        prefill = await cluster.start("prefill", *SIM, *SLOW, "--transports", "tcp")
        task = asyncio.create_task(cluster.gateway.generate([7] * 500, m.Sampling(), deadline=20))
        await cluster.until(lambda: cluster.audit(decode), lambda a: a["tickets"] == 1, SOON)
        prefill.signal(signal.SIGSTOP)
        assert (await task).problem.code == "handoff_expired"
        await whole(cluster, decode)
        prefill.signal(signal.SIGCONT)
        await whole(cluster, prefill)
        assert (await cluster.gateway.generate([9] * 500, m.Sampling(), deadline=20)).ok


async def test_cancels_in_every_phase_leave_nothing():
    """50 cancels spread over lookup, compute, write, commit and decode."""
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *DECODE, "--max-num-seqs", "64"),
            cluster.start(
                "prefill", *SIM, "--max-num-seqs", "64", "--max-num-batched-tokens", "8192", "--sim-prefill-seconds", "0.0002"
            ),
        )

        async def one(i: int) -> Result:
            await asyncio.sleep(i * 0.01)
            return await cluster.gateway.generate([i] * 400, m.Sampling(max_tokens=200), cancel_after=i * 0.004)

        results = await asyncio.gather(*(one(i) for i in range(50)))
        assert sum(r.cancelled for r in results) > 40
        await whole(cluster, decode, prefill)
        again = await cluster.gateway.generate([1, 2, 3], m.Sampling(max_tokens=2))
        assert again.ok


async def test_a_cancel_that_overtakes_its_request_wins():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM))
        gateway = cluster.gateway
        names = {role: cluster.find(p).instance for role, p in (("decode", decode), ("prefill", prefill))}
        for role in ("decode", "prefill"):
            answer = await gateway.bus.request(role, names[role], "cancel", m.Cancel("early", 0))
            assert answer == m.Done("unknown")
        admit = m.Admit("early", 0, gateway.instance, gateway.epoch, 1, b"", b"", m.Sampling(), SOON)
        assert (await gateway.bus.request("decode", names["decode"], "admit", admit)).code == "stale"
        run = m.Run("early", 0, gateway.instance, names["decode"], 0, m.pack_ids([1]), b"", b"", SOON)
        assert (await gateway.bus.request("prefill", names["prefill"], "run", run)).code == "stale"
        later = m.Admit("early", 1, gateway.instance, gateway.epoch, 1, b"", b"", m.Sampling(), 1.0)
        assert isinstance(await gateway.bus.request("decode", names["decode"], "admit", later), m.Admitted)
        await cluster.quiet(decode)  # nobody runs it: its deadline ends it


async def test_no_request_outlives_its_deadline():
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *DECODE, "--sim-step-seconds", "0.05"), cluster.start("prefill", *SIM, *SLOW)
        )
        for ids in ([1, 2], [3] * 1500):  # too slow in decode, too slow in prefill
            started = time.monotonic()
            result = await cluster.gateway.generate(ids, m.Sampling(max_tokens=1000), deadline=0.7)
            assert not result.ok and time.monotonic() - started < SOON
            await whole(cluster, decode, prefill)


async def test_a_lost_commit_is_asked_for():
    """The flag is there and the record is not: decode asks prefill, and the request goes on."""
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(
            cluster.start("decode", *DECODE), cluster.start("prefill", *SIM, "--test-faults", "lose=commit")
        )
        results = await asyncio.gather(*(cluster.gateway.generate([i] * 200, m.Sampling(max_tokens=5)) for i in range(5)))
        assert all(r.ok and r.ended < SOON for r in results), results
        await whole(cluster, decode)
        await cluster.until(lambda: cluster.audit(prefill), lambda a: a["ok"] and a["quarantined"] == 0, SOON)


async def test_a_dead_or_stopped_kvstore_costs_a_request_little():
    async with Cluster() as cluster:
        store = await cluster.start("kvstore")
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM))
        assert (await cluster.gateway.generate([1] * 500, m.Sampling(max_tokens=2))).ok
        store.signal(signal.SIGSTOP)
        for i in range(6):
            result = await cluster.gateway.generate([10 + i] * 500, m.Sampling(max_tokens=2))
            assert result.ok and result.usage.cached_tokens == 0 and result.ended < SOON, result
        store.signal(signal.SIGCONT)
        store.kill(notice=False)
        for i in range(6):
            result = await cluster.gateway.generate([20 + i] * 500, m.Sampling(max_tokens=2))
            assert result.ok and result.ended < SOON, result
        await whole(cluster, prefill, decode)


async def test_a_full_decode_recovers_without_new_traffic():
    """Hand-offs that are cancelled while the pool is full: the sweep frees them though nothing is scheduled (T06)."""
    async with Cluster() as cluster:
        decode = await cluster.start("decode", *DECODE, "--num-blocks", "40")
        prefill = await cluster.start("prefill", *SIM, *SLOW)
        tasks = [
            asyncio.create_task(cluster.gateway.generate([i] * 1000, m.Sampling(max_tokens=50), cancel_after=0.6))
            for i in range(12)
        ]
        results = await asyncio.gather(*tasks)
        assert any(r.refused is not None and r.refused.code in ("full", "busy") for r in results)
        await whole(cluster, decode, prefill)


async def test_nats_restarts():
    """Nothing is lost but what needed the bus meanwhile; then everything works again and nothing leaks."""
    async with Cluster() as cluster:
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *SIM))
        running = asyncio.create_task(cluster.gateway.generate([1, 2, 3], m.Sampling(max_tokens=400), deadline=20))
        streams = cluster.gateway.streams
        await cluster.until(lambda: asyncio.sleep(0), lambda _: any(s.result.first_token for s in streams.values()), SOON)
        await asyncio.to_thread(cluster.nats.stop)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(cluster.nats.start)
        result = await running
        assert result.ok and result.ids[0] == expected([1, 2, 3], 400) and result.gaps >= 1
        assert (await cluster.gateway.generate([4] * 300, m.Sampling(max_tokens=3))).ok
        await whole(cluster, decode, prefill)


async def test_every_message_twice_and_the_second_one_late():
    """A relay on the bus repeats each command and each output once, up to 0.3 s later: nothing happens twice."""
    rng = random.Random(8)
    async with Cluster() as cluster:
        await cluster.start("kvstore")
        decode, prefill = await asyncio.gather(cluster.start("decode", *DECODE), cluster.start("prefill", *PREFILL))
        bus, loop = cluster.gateway.bus, asyncio.get_running_loop()
        seen, repeated = set(), []

        def again(data: bytes, subject: str, reply: str) -> None:
            if (subject, data) not in seen and subject.split(".")[1] in ("decode", "prefill", "kvstore", "out"):
                seen.add((subject, data))
                repeated.append(subject.rsplit(".", 1)[-1])
                loop.call_later(rng.random() * 0.3, bus.publish_bytes, subject, data)

        for subject in ("headrace.*.*.*", "headrace.out.*"):
            await bus.subscribe_bytes(subject, again)
        await bus.flush()

        async def client() -> None:
            for _ in range(10):
                options = {"cancel_after": rng.random() * 0.1} if rng.random() < 0.2 else {}
                result, ids, max_tokens = await request(cluster, rng, **options)
                assert judge(result, ids, max_tokens) in ("answer", "cancelled"), result

        await asyncio.gather(*(client() for _ in range(6)))
        assert {"admit", "run", "bind", "commit", "cancel", "lookup", "reserve"} <= set(repeated)
        await asyncio.sleep(0.4)
        await whole(cluster, decode, prefill)
        metrics = await cluster.metrics(decode)
        assert metrics["headrace_decode_admitted_total"] <= 60 + metrics["headrace_decode_refused_total"]
