"""The event loop stays free while long prompts are read, rendered and sent."""

import asyncio
import random
import time

from gateway_cluster import chat

from headrace.bus.testing import eventually


async def test_a_long_prompt_does_not_hold_up_the_loop(cluster):
    for worker in cluster.decodes + cluster.prefills:
        worker.max_model_len = 1 << 20
        worker.announce()
    await eventually(lambda: cluster.gateway.router.groups["fake"].max_model_len == 1 << 20)
    words = ["alpha", "beta", "gamma", "delta", "water", "wheel", "mill", "stone"]
    rng = random.Random(3)
    text = " ".join(rng.choice(words) + str(rng.randrange(10_000)) for _ in range(60_000))  # 0.5 MB, 200,000 tokens
    lags, busy = [], True

    async def probe():
        while busy:
            before = time.monotonic()
            cpu = time.process_time()
            await asyncio.sleep(0.005)
            # What this process did not run does not count: the machine may be busy with other work.
            lags.append(min(time.monotonic() - before, time.process_time() - cpu) - 0.005)

    probing = asyncio.create_task(probe())
    started = time.monotonic()
    status, _, reply = await cluster.post(chat(messages=[{"role": "user", "content": text}], max_tokens=4))
    took, busy = time.monotonic() - started, False
    await probing
    assert status == 200 and reply["usage"]["prompt_tokens"] > 100_000
    assert max(lags) < max(0.05, took / 4), f"the loop was held up for {max(lags) * 1e3:.0f} ms of {took * 1e3:.0f}"
