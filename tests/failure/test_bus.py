"""The bus goes away, and the gateway: a whole system with its real gateway, clients over HTTP.

Streams go on where they were, commands that were under way are sent again and happen once, nothing is lost and nothing stays
owed.
"""

from __future__ import annotations

import asyncio
import signal
import time

import aiohttp
import pytest

from headrace.cli.console import Console
from headrace.cli.drill.client import Client, Seen
from headrace.cli.drill.load import Answers, Mix
from headrace.cli.drill.rows import SETTINGS
from headrace.cli.drill.target import Own
from headrace.cli.drill.watch import Watch, to_unix

AWAY = 5.0
STREAMS = Mix(prompts=(100, 200), outputs=(60,))
PROMPTS = Mix(prompts=(300, 400), outputs=(4,))  # a third of a second to compute: some are between two commands at any moment


def small() -> Own:
    return Own(Console(quiet=True), SETTINGS, engine="sim", prefill=1, decode=1)


async def under_way(target: Own, client: Client, seed: int) -> tuple[list[Seen], list[asyncio.Task]]:
    """Streams that have output, and prompts that have none."""
    seens = [Seen(ask) for ask in STREAMS.asks(4, seed)]
    tasks = [asyncio.create_task(client.ask(seen.ask, seen=seen)) for seen in seens]
    await target.until(lambda: all(len(seen.ids) >= 3 for seen in seens), 15.0, "no streams")
    late = [Seen(ask) for ask in PROMPTS.asks(4, seed)]
    tasks += [asyncio.create_task(client.ask(seen.ask, seen=seen)) for seen in late]
    await asyncio.sleep(0.05)
    return seens + late, tasks


async def all_right(target: Own, client: Client, seens: list[Seen]) -> None:
    """Everything was answered, with the tokens of an undisturbed run, and nothing is owed."""
    assert {seen.end for seen in seens} == {"answer"}, [(seen.story(), seen.message) for seen in seens]
    await target.ready(30.0)
    await target.whole(15.0)
    answers = Answers()
    await answers.learn(client, [seen.ask for seen in seens])
    assert not any(map(answers.wrong, seens))


@pytest.mark.slow
@pytest.mark.timeout(200)
async def test_the_bus_stops_dies_and_is_away_for_five_seconds():
    async with small() as target, Client(target.url, target.model()) as client:
        watch = Watch()
        await watch.start(target.bus)

        # Stopped: silence of the bus says nothing about anybody, so nobody is taken for dead.
        seens, tasks = await under_way(target, client, 1)
        target.signal("nats", signal.SIGSTOP)
        await asyncio.sleep(2.0)
        target.signal("nats", signal.SIGCONT)
        await asyncio.gather(*tasks)
        await all_right(target, client, seens)
        assert not [event for event in watch.events if event.name == "gateway.failed"]

        # Killed: it starts again, empty.
        seens, tasks = await under_way(target, client, 2)
        killed = target.signal("nats", signal.SIGKILL)
        await target.until(lambda: target.pids().get("nats", killed) != killed, 10.0, "NATS did not come back")
        await asyncio.gather(*tasks)
        await all_right(target, client, seens)

        # Away for five seconds: /ready says why not; streams and commands wait for it.
        seens, tasks = await under_way(target, client, 3)
        before = {id(seen): len(seen.ids) for seen in seens}
        outage = asyncio.create_task(target.outage("nats", AWAY))
        await asyncio.sleep(1.0)
        assert await ready(target) == (503, "it is not connected to NATS")
        await outage
        back = time.monotonic()
        await asyncio.gather(*tasks)
        assert any(seen.ended > back and len(seen.ids) > before[id(seen)] > 0 for seen in seens), "no stream went on"
        await all_right(target, client, seens)
        assert (await ready(target))[0] == 200
        await watch.stop()


async def ready(target: Own) -> tuple[int, str]:
    """What /ready of the gateway says: status, why not."""
    async with aiohttp.ClientSession() as session, session.get(f"{target.url}/ready") as answer:
        return answer.status, (await answer.json()).get("why", "")


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_gateway_dies_in_mid_stream():
    """Its streams break; decode ends them within a lease and frees their memory; the next gateway serves."""
    async with small() as target, Client(target.url, target.model()) as client:
        watch = Watch()
        await watch.start(target.bus)
        seens, tasks = await under_way(target, client, 4)
        killed = time.monotonic()
        target.signal("gateway", signal.SIGKILL)
        await asyncio.gather(*tasks)
        assert all(seen.end == "broken" for seen in seens if seen.ended > killed), [seen.story() for seen in seens]
        await target.until(lambda: watch.first_reaction(to_unix(killed)), 5.0, "decode did not notice")
        event = watch.first_reaction(to_unix(killed))
        assert event.name == "decode.finished" and event.data["why"] == "gateway_died"
        audit = {"live": 1}
        while audit.get("live") or audit.get("used"):
            assert time.monotonic() - killed < 15.0, f"decode still holds {audit}"
            audit = await target.audit("decode-1")
        await target.ready(30.0)
        await target.whole(15.0)
        answers = Answers()
        await answers.learn(client, [seen.ask for seen in seens])
        assert not any(map(answers.wrong, seens)), "what came before the end was right"
        await watch.stop()
