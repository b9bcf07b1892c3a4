"""Fault points: what may be written, which occasions are hit, and that an unarmed process has none."""

from __future__ import annotations

import asyncio

import pytest

from headrace.bus import Bus, BusTimeout, Service, Settings, SettingsError
from headrace.bus import messages as m
from headrace.bus.faults import Faults, Point, message_names, parse
from headrace.bus.testing import NatsServer


def hits(text: str, occasions: int) -> list[int]:
    (point,) = parse(text)
    return [n for n in range(1, occasions + 1) if point.due()]


def test_which_occasions():
    assert hits("kill=decode.bound", 3) == [1]
    assert hits("stop=prefill.chunk:2", 4) == [2]
    assert hits("lose=bind", 3) == [1, 2, 3]
    assert hits("lose=bind:2", 4) == [2]
    assert hits("lose=bind:2+", 4) == [2, 3, 4]
    assert hits("repeat=commit:0%", 50) == []
    assert 5 < len(hits("lose=out:50%", 50)) < 45
    assert parse("delay=out:0.5:3+, hold=flush:2") == [Point("delay", "out", 0.5, first=3), Point("hold", "flush", 2.0)]
    assert parse("remote, ,") == [] and Faults("lose=a,remote").remote


WRONG = ["kill", "kill=", "burn=decode.bound", "kill=a:x", "delay=out", "hold=nowhere:1", "lose=a:1:2"]


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_fault_point_is_named(text):
    with pytest.raises(ValueError, match="is no fault point; write kill=EVENT"):
        parse(text)
    with pytest.raises(SettingsError, match="--test-faults"):
        Service(Settings(test_faults=text))


def test_names_of_messages():
    assert message_names(b"headrace.decode.decode-X.bind", None) == ("bind", "decode.bind")
    assert message_names(b"headrace.out.gateway-X", None) == ("out",)
    assert message_names(b"_INBOX.x.1", m.Verdict("admitted")) == ("Verdict",)


async def test_messages_are_lost_repeated_and_late_and_only_where_armed():
    with NatsServer() as nats:
        service, plain = Service(Settings(nats_url=nats.url, test_faults="remote")), Service(Settings(nats_url=nats.url))
        for each in (service, plain):
            await each.start()
        assert plain.bus.send.__func__ is Bus._send, "an unarmed service has nothing in the way"
        bus, instance = service.bus, service.instance
        got: list[bytes] = []
        await bus.subscribe_bytes("headrace.out.x", lambda data, *_: got.append(data))

        async def arm(text: str) -> m.Message:
            return await plain.bus.request("service", instance, "arm", m.Arm(text))

        assert await arm("lose=out:1") == m.Done()
        for number in b"123":
            bus.publish_bytes("headrace.out.x", bytes([number]))
        await bus.flush()
        assert got == [b"2", b"3"]
        await arm("repeat=out")
        bus.publish_bytes("headrace.out.x", b"4")
        await asyncio.sleep(0.2)
        assert got[2:] == [b"4", b"4"]
        await arm("delay=out:0.1:1")
        for number in b"56":
            bus.publish_bytes("headrace.out.x", bytes([number]))
        await asyncio.sleep(0.3)
        assert got[4:] == [b"6", b"5"]
        assert (await arm("nonsense")).code == "invalid"
        assert (await plain.bus.request("service", plain.instance, "ping", m.Ping())).instance == plain.instance
        refused = await plain.bus.request("service", plain.instance, "arm", m.Arm("kill=x"))
        assert refused.code == "unknown", "a service that was not started with the flag can't be armed"
        await arm("lose=Pong")
        with pytest.raises(BusTimeout):
            await plain.bus.request("service", instance, "ping", m.Ping(), timeout=0.2)
        for each in (service, plain):
            await each.stop()
