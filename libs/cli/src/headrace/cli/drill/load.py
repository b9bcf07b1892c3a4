"""What is asked during a drill, and the right answers.

Knows: random requests whose prompts share beginnings (so that caches matter), an undisturbed run as the reference, open and
closed loops of clients. Does not know: faults.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.cli.drill.client import Ask, Client, Seen
from headrace.cli.errors import CommandError

BLOCK = 128  # tokens


@dataclass(frozen=True)
class Mix:
    """Sizes of random requests, in tokens. `top`: prompt ids are below it."""

    prompts: tuple[int, ...] = (3, 100, 200, 400)
    outputs: tuple[int, ...] = (4, 12, 24)
    top: int = 250
    temperature: float = 0.0
    sees: bool = False  # each with a picture

    def asks(self, count: int, seed: int) -> list[Ask]:
        """`count` different requests; half of them begin with one of four common prefixes of a block."""
        rng = random.Random(seed)
        common = [tuple(rng.randrange(3, self.top) for _ in range(BLOCK)) for _ in range(4)]
        out = []
        for number in range(count):
            ids = tuple(rng.randrange(3, self.top) for _ in range(rng.choice(self.prompts)))
            if rng.random() < 0.5:
                ids = (rng.choice(common) + ids)[: max(self.prompts)]
            out.append(Ask(ids, rng.choice(self.outputs), seed * 1000 + number, self.temperature, self.sees))
        return out


@dataclass
class Answers:
    """Tokens of undisturbed runs, by ask."""

    by_ask: dict[Ask, list[int]] = field(default_factory=dict)

    async def learn(self, client: Client, asks: list[Ask], at_a_time: int = 4) -> None:
        """Run every ask undisturbed. CommandError when one has no whole answer: then nothing could be compared."""
        waiting = list(asks)

        async def one() -> None:
            while waiting:
                seen = await client.ask(waiting.pop())
                if seen.end != "answer" or len(seen.ids) != seen.ask.max_tokens:
                    raise CommandError(f"an undisturbed request had no whole answer: {seen.story()} {seen.message}")
                self.by_ask[seen.ask] = seen.ids

        await asyncio.gather(*(one() for _ in range(at_a_time)))

    def wrong(self, seen: Seen) -> bool:
        return seen.wrong(self.by_ask[seen.ask])


async def closed_loop(client: Client, asks: list[Ask], clients: int, seconds: float, rng: random.Random) -> list[Seen]:
    """`clients` that each ask again as soon as they have their answer, for `seconds`."""
    out: list[Seen] = []
    end = time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < end:
            out.append(await client.ask(rng.choice(asks)))

    await asyncio.gather(*(one() for _ in range(clients)))
    return out


async def open_loop(
    client: Client, asks: list[Ask], rate: float, until: float, rng: random.Random, done: Callable[[Seen], None],
    cancels: float = 0.0,
) -> None:  # fmt: skip
    """Requests at random moments, `rate` a second on average whatever becomes of them, until time.monotonic() is `until`.
    A share `cancels` of clients leaves after some tokens. Returns when all have ended; `done` is called for each."""
    tasks: set[asyncio.Task] = set()

    async def one(ask: Ask, cancel_at: int | None) -> None:
        done(await client.ask(ask, cancel_at))

    due = time.monotonic()
    while (due := due + rng.expovariate(rate)) < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        ask = rng.choice(asks)
        cancel_at = rng.randrange(1, ask.max_tokens) if rng.random() < cancels else None
        task = asyncio.create_task(one(ask, cancel_at))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    if tasks:
        await asyncio.gather(*tasks)
