"""Workers killed at every named state of a hand-off, behind the real gateway: no client loses its answer while one is left.

`test_states.py` looks at the same states from inside: memory, tickets, ends. Here it is the client that counts.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "system"))

from streams import Answer, ask, start_gateway

from headrace.worker.testing import Cluster

SIM = ("--engine", "sim", "--max-num-batched-tokens", "256", "--num-blocks", "200", "--max-num-seqs", "16")
FLAGS = {
    "prefill": (*SIM, "--sim-prefill-seconds", "0.0001"),
    "decode": (*SIM, "--sim-step-seconds", "0.002"),
}
STATES = {
    "prefill": ["accepted", "bound", "chunk:2", "written", "committed"],
    "decode": ["admit", "bound", "admitted", "first_token", "finished"],
}
REQUESTS, ROUNDS = 6, 40


def body(number: int) -> dict:
    return {
        "prompt": [number] * 400, "max_tokens": 8, "seed": number, "stream": True, "n": 1 + number % 2, "logprobs": 1,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    }  # fmt: skip


async def round_(url: str, salt: str) -> list[Answer]:
    return await asyncio.gather(*(ask(url, body(number) | {"cache_salt": salt}, Answer()) for number in range(REQUESTS)))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", STATES)
async def test_a_kill_at_any_state_costs_no_answer(role):
    other = {"prefill": "decode", "decode": "prefill"}[role]
    async with Cluster() as cluster:
        healthy = [await cluster.start(each, *FLAGS[each]) for each in (other, role)]
        _, url = await start_gateway(cluster)
        want = await round_(url, "undisturbed")
        for state in STATES[role]:
            victim = await cluster.start(role, *FLAGS[role], "--test-faults", f"kill={role}.{state}")
            rounds = 0
            while victim.popen.poll() is None:  # until a request has met it
                assert rounds < ROUNDS, f"nothing came to {role}.{state}"
                rounds += 1
                for got, answer in zip(await round_(url, f"{state} {rounds}"), want, strict=True):
                    assert got.error is None, f"{role} killed at {state}: {got.error}"
                    assert (got.text, got.logprobs, got.finish) == (answer.text, answer.logprobs, answer.finish), state
                    assert got.usage["completion_tokens"] == answer.usage["completion_tokens"], state
            for process in healthy:
                await cluster.quiet(process, timeout=30.0)
