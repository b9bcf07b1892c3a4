"""A worker killed or stopped at every named state of a hand-off: the other side is whole, every client has an end."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from headrace.bus import messages as m
from headrace.worker.testing import Cluster, Process, Result, sim_answer

LEASE = 1.0  # seconds
DEADLINE = 30.0
SIM = ("--engine", "sim", "--max-num-batched-tokens", "256", "--num-blocks", "200")
FLAGS = {
    "prefill": (*SIM, "--sim-prefill-seconds", "0.0001"),
    "decode": (*SIM, "--ticket-seconds", str(LEASE), "--sim-step-seconds", "0.002"),
}
STATES = {
    ("kill", "prefill"): ["accepted", "bound", "chunk:2", "written", "committed"],
    ("kill", "decode"): ["admit", "bound", "admitted", "first_token", "finished"],
    ("stop", "prefill"): ["bound", "chunk:2", "written"],
    ("stop", "decode"): ["bound", "admitted"],
}


async def four(cluster: Cluster, **pair: str) -> list[Result]:
    """Four requests of two chunks each, whatever becomes of them; no token is ever a wrong one."""
    prompts = [[i] * 400 for i in range(4)]
    began = time.monotonic()
    tasks = [cluster.gateway.generate(ids, m.Sampling(max_tokens=8), patience=8, deadline=DEADLINE, **pair) for ids in prompts]
    results = await asyncio.gather(*tasks)
    assert time.monotonic() - began < DEADLINE + 12, "a request outlived its deadline"
    for ids, result in zip(prompts, results, strict=True):
        got = result.ids[0] if result.ids else []
        assert got == sim_answer(ids, max_tokens=8)[0][0][: len(got)], "a wrong token"
        assert result.ok or result.problem is not None or result.refused is not None, result
    return results


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("fault", "role"), STATES)
async def test_at_every_state(fault, role):
    other = {"prefill": "decode", "decode": "prefill"}[role]
    async with Cluster() as cluster:
        healthy = await cluster.start(other, *FLAGS[other])
        spare = await cluster.start(role, *FLAGS[role])
        names = {process.role: cluster.find(process).instance for process in (healthy, spare)}
        cluster.gateway.probe = True
        for state in STATES[fault, role]:
            victim = await cluster.start(role, *FLAGS[role], "--test-faults", f"{fault}={role}.{state}")
            began = time.monotonic()
            results = await four(cluster, **(names | {role: cluster.find(victim).instance}))
            took = time.monotonic() - began
            assert took < DEADLINE / 2, f"{fault} at {role}.{state}: {took:.2f} s until every client had an end"
            await recovered(cluster, fault, healthy, victim)
            await cluster.audit(spare)  # it is seen again, should a busy machine have made it miss its pings
            assert all(r.ok for r in await four(cluster, **names)), "the healthy pair is not as before"
            print(fault, f"{role}.{state}", [r.ok or r.problem and r.problem.code for r in results], f"{took:.2f} s")


async def recovered(cluster: Cluster, fault: str, healthy: Process, victim: Process) -> None:
    """The healthy side owes nothing: at once after a death, after the return of a stopped process otherwise."""
    if fault == "kill":
        await asyncio.to_thread(victim.popen.wait, 10)
        await cluster.quiet(healthy, timeout=2 * LEASE + 10)
        return
    await cluster.until(lambda: cluster.audit(healthy), lambda a: a["ok"] and a["live"] == 0, 3 * LEASE + 10)
    victim.signal(signal.SIGCONT)
    await cluster.quiet(healthy, timeout=3 * LEASE + 10)
    await cluster.quiet(victim, timeout=3 * LEASE + 10)
    await asyncio.to_thread(victim.kill)
