"""A prefill worker in a network namespace of its own, and a wire that is cut: in silence, in either direction or both.

Over the wire go its commands, its presence and its bytes (tcp). After each cut: clients have an end within a lease or two,
the decode side is whole without its peer, a worker on this side serves meanwhile, and when the wire is whole again so is
everything.
"""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from headrace.bus import messages as m
from headrace.cli.drill import netns
from headrace.worker.testing import Cluster, Process, Result, sim_answer

LEASE = 1.0  # seconds
SIM = ("--engine", "sim", "--transports", "tcp", "--max-num-batched-tokens", "256", "--num-blocks", "200")
DECODE = (*SIM, "--ticket-seconds", str(LEASE), "--sim-step-seconds", "0.002")
PREFILL = (*SIM, "--sim-prefill-seconds", "0.001")  # a prompt of 900 tokens takes a second
CUTS = {"nothing comes in": (True, False), "nothing gets out": (False, True), "neither": (True, True)}


@pytest.fixture
def wire():
    if reason := netns.cannot():
        pytest.skip(reason)
    with netns.Wire() as wire:
        yield wire


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_a_partition_in_either_direction(wire, tmp_path):
    rng = random.Random(11)
    async with Cluster(tmp_path, host=wire.here) as cluster:
        decode, near, far = await asyncio.gather(
            cluster.start("decode", *DECODE, "--host", wire.here),
            cluster.start("prefill", *PREFILL, "--host", wire.here),
            cluster.start("prefill", *PREFILL, "--host", wire.there, before=wire.inside([])),
        )
        names = {process.name: cluster.find(process).instance for process in (near, far)}

        async def ask(prefill: Process) -> Result:
            ids, name = [rng.randrange(3, 500) for _ in range(900)], names[prefill.name]
            result = await cluster.gateway.generate(ids, m.Sampling(max_tokens=4), prefill=name, deadline=20.0, patience=5)
            want = sim_answer(ids, max_tokens=4)[0][0]
            assert not result.ids or result.ids[0] == want[: len(result.ids[0])], "a wrong token"
            assert result.ok or result.problem is not None, result
            return result

        assert (await ask(far)).ok
        for name, (into, out) in CUTS.items():
            running = asyncio.create_task(ask(far))
            await cluster.until(lambda: cluster.audit(decode), lambda a: a["tickets"] == 1, 10.0)
            wire.cut(into, out)
            cut = time.monotonic()
            result = await running
            assert not result.ok and time.monotonic() - cut < 10.0, f"{name}: {result}"
            # Without its peer: over tcp the owner refuses late frames by itself, so nothing stays in quarantine.
            await cluster.quiet(decode, timeout=3 * LEASE + 5.0)
            assert (await ask(near)).ok, f"{name}: this side goes on"
            wire.heal()
            await cluster.quiet(far, timeout=30.0)
            await cluster.quiet(decode)
            # What TCP had in flight comes with its next retransmission, which a cut of seconds puts seconds off.
            healed = [await ask(far) for _ in range(2)]
            while not healed[-1].ok and len(healed) < 5:
                healed.append(await ask(far))
            assert healed[-1].ok and (await ask(near)).ok, f"{name}: {healed}"
