"""A service's life on a real nats-server, in this process and as a process of its own."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import pytest

from headrace.bus import Bus, BusSettings, Peers, Prober, Pulse, Service, Settings, StartError, Trace, gather, subjects
from headrace.bus import messages as m
from headrace.bus.testing import NatsServer, eventually


class Echo(Service):
    role = "decode"
    description = "answers for tests"
    running = 0
    steps = 0

    def verbs(self):
        return {"status": self.on_status, "fail": self.on_fail, "run": self.on_run}

    async def start(self):
        await super().start()
        self.set_state("ready")

    def load(self):
        return m.Load(running=self.running, credits=7)

    def describe(self):
        return {"model": "echo", "engine": "test"}

    def progress(self):
        return self.steps

    async def on_status(self, message):
        await asyncio.sleep(0)
        return m.Done("later")

    def on_run(self, message):
        return m.Done("now")

    def on_fail(self, message):
        raise RuntimeError("broken")


@pytest.fixture
def nats():
    with NatsServer() as server:
        yield server


@pytest.fixture
async def bus(nats):
    bus = await Bus.connect(BusSettings(nats_url=nats.url))
    yield bus
    await bus.close()


@pytest.fixture
async def echo(nats):
    service = Echo(Settings(nats_url=nats.url, stall_seconds=0.2))
    await service.start()
    yield service
    await service.stop()


async def get(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.text()


async def test_the_side_door_of_an_ipv6_address_has_a_url(nats):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no ::1 here")
    service = Echo(Settings(nats_url=nats.url, host="::1"))
    await service.start()
    assert service.http_url.startswith("http://[::1]:") and (await get(f"{service.http_url}/health"))[0] == 200
    await service.stop()


async def test_commands_answer_and_errors_are_answers_too(bus, echo):
    async def ask(verb):
        return await bus.request("decode", echo.instance, verb, m.Ping())

    assert await ask("run") == m.Done("now")
    assert await ask("status") == m.Done("later")
    pong = await ask("ping")
    assert (pong.instance, pong.epoch, pong.state) == (echo.instance, echo.epoch, "ready")
    refused = await ask("fail")
    assert refused.code == "failed" and "broken" in refused.message
    assert (await ask("nonsense")).code == "unknown"


async def test_service_discovery_counts(bus, echo):
    for _ in range(3):
        await bus.request("decode", echo.instance, "run", m.Ping())
    await bus.request("decode", echo.instance, "fail", m.Ping())
    answers = {}
    for verb in ("PING", "INFO", "STATS"):
        for subject in (f"$SRV.{verb}", f"$SRV.{verb}.headrace-decode", f"$SRV.{verb}.headrace-decode.{echo.instance}"):
            got = asyncio.get_running_loop().create_future()
            subscription = await bus.subscribe_bytes("_TEST.reply", lambda data, *_, got=got: got.set_result(json.loads(data)))
            bus.publish_bytes(subject, b"", reply="_TEST.reply")
            answers[verb] = await asyncio.wait_for(got, 2)
            await subscription.close()
    assert answers["PING"]["id"] == echo.instance and answers["PING"]["type"] == "io.nats.micro.v1.ping_response"
    assert {e["name"] for e in answers["INFO"]["endpoints"]} == {"ping", "trace", "status", "fail", "run"}
    stats = {e["name"]: e for e in answers["STATS"]["endpoints"]}
    assert stats["run"]["num_requests"] == 3 and stats["run"]["subject"] == f"headrace.decode.{echo.instance}.run"
    assert stats["fail"]["num_errors"] == 1 and "broken" in stats["fail"]["last_error"]


async def test_health_is_progress(echo):
    assert (await get(f"{echo.http_url}/health"))[0] == 200
    assert (await get(f"{echo.http_url}/ready"))[0] == 200
    await asyncio.sleep(0.3)
    echo._watch_progress()
    assert echo.state == "ready", "idle is healthy"
    echo.running = 1
    echo._watch_progress()
    await asyncio.sleep(0.3)
    echo._watch_progress()
    status, body = await get(f"{echo.http_url}/health")
    assert status == 503 and json.loads(body)["status"] == "stalled"
    echo.steps += 1
    echo._watch_progress()
    assert (await get(f"{echo.http_url}/health"))[0] == 200


async def test_metrics(bus, echo):
    await bus.request("decode", echo.instance, "run", m.Ping())
    _, text = await get(f"{echo.http_url}/metrics")
    assert 'headrace_state{role="decode",state="ready"} 1.0' in text
    assert "headrace_bus_messages_in_total" in text and "process_cpu_seconds_total" in text


async def test_a_taken_port_is_one_clear_sentence(nats, echo):
    port = int(echo.http_url.rsplit(":", 1)[1])
    second = Echo(Settings(nats_url=nats.url, metrics_port=port))
    with pytest.raises(StartError, match=f"{port} .*--metrics-port"):
        await second.start()
    await second.stop()


async def test_peers_see_join_state_and_leave(nats, bus):
    peers, seen = Peers(bus), []
    peers.watch(lambda kind, p: kind != "update" and seen.append((kind, p.state)))
    await peers.start()
    service = Echo(Settings(nats_url=nats.url))
    await service.start()
    found = await peers.wait_for("decode", timeout=3)
    assert [(p.model, p.load.credits, p.http) for p in found] == [("echo", 7, service.http_url)]
    service.set_state("draining")
    await eventually(lambda: not peers.by_role("decode"))
    assert peers.by_role("decode", None)[0].state == "draining"
    await service.stop()
    await eventually(lambda: not peers.by_role("decode", None))
    await peers.stop()
    assert [kind for kind, _ in seen] == ["join", "state", "state", "leave"]


async def test_who_comes_late_learns_at_once_who_is_there(bus, echo):
    peers = Peers(bus)
    await peers.start()
    await peers.wait_for("decode", timeout=0.5)  # well before the next presence by itself
    await peers.stop()


async def test_prober_finds_the_dead_but_not_the_idle(nats, bus, echo):
    dead = []
    prober = Prober(bus, "me", lambda instance, why: dead.append((instance, why)))
    prober.start()
    gone = Echo(Settings(nats_url=nats.url))
    await gone.start()
    mute = await bus.serve(subjects.command("decode", "mute", "*"), lambda *_: None)
    for instance in (echo.instance, gone.instance, "mute"):
        prober.watch("decode", instance)
    await asyncio.sleep(0.3)
    await gone.stop()
    await eventually(lambda: len(dead) >= 2)
    assert sorted(dead) == sorted([(gone.instance, "it has left the bus"), ("mute", "it missed 2 pings")])
    await mute.close()
    await prober.stop()


async def test_what_can_go_nowhere_else_has_a_lease(nats, bus, echo):
    """A dead one is found as soon; one that answers late lives; one that never answers is late, not dead."""
    told, began = [], time.monotonic()
    tell = {name: lambda i, why, name=name: told.append((name, i, why, time.monotonic() - began)) for name in ("dead", "late")}
    prober = Prober(bus, "me", tell["dead"], on_late=tell["late"], patient=lambda instance: True)
    prober.start()
    gone = Echo(Settings(nats_url=nats.url))
    await gone.start()

    def answer_late(message, subject, reply):
        asyncio.get_running_loop().call_later(0.4, bus.respond, reply, m.Pong("slow", 1, 0, "ready", m.Load()))

    mute = await bus.serve(subjects.command("decode", "mute", "*"), lambda *_: None)
    slow = await bus.serve(subjects.command("decode", "slow", "*"), answer_late)
    for instance in (gone.instance, "mute", "slow"):
        prober.watch("decode", instance)
    await asyncio.sleep(0.3)
    began = time.monotonic()
    await gone.stop()
    await eventually(lambda: len(told) >= 2)
    assert [entry[:3] for entry in told] == [
        ("dead", gone.instance, "it has left the bus"), ("late", "mute", "it missed 2 pings and was silent for 2 s more"),
    ]  # fmt: skip
    assert told[0][3] < 2.0 <= told[1][3]
    await mute.close()
    await slow.close()
    await prober.stop()


async def test_a_bus_that_carries_nothing_is_found_and_so_is_its_return(nats, bus):
    """Connected all the while: the client's own pings come to nothing later."""
    told = []
    pulse = Pulse(bus, lambda: told.append("silent"), lambda: told.append("back"))
    assert await pulse.doubt() and not pulse.silent and told == []
    nats.process.send_signal(signal.SIGSTOP)
    first, second = pulse.doubt(), pulse.doubt()
    assert not await first and not await second and pulse.silent and told == ["silent"]
    nats.process.send_signal(signal.SIGCONT)
    await eventually(lambda: not pulse.silent)
    assert told == ["silent", "back"] and await pulse.doubt()
    await pulse.stop()


async def test_nobody_is_dead_while_the_bus_itself_is_silent(nats, bus, echo):
    """A server that is stopped, or cut off in silence, keeps its connections: all peers would seem to have died at once."""
    dead, left = [], []
    prober = Prober(bus, "me", lambda instance, why: dead.append(instance))
    prober.start()
    prober.watch("decode", echo.instance)
    peers = Peers(bus)
    await peers.start()
    peers.watch(lambda kind, presence: left.append(presence.instance) if kind == "leave" else None)
    await peers.wait_for("decode")
    for _ in range(2):
        nats.process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2.2)
        nats.process.send_signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
    assert dead == left == []
    await echo.stop()
    await eventually(lambda: dead == [echo.instance])
    await peers.stop()
    await prober.stop()


async def test_ready_says_why_not(nats, bus, echo):
    status, body = await get(f"{echo.http_url}/ready")
    assert status == 200 and json.loads(body)["status"] == "ready"
    await asyncio.to_thread(nats.stop)
    await eventually(lambda: not echo.bus.connected)
    status, body = await get(f"{echo.http_url}/ready")
    said = json.loads(body)
    assert status == 503 and (said["status"], said["why"]) == ("not ready", "it is not connected to NATS")
    assert (await get(f"{echo.http_url}/health"))[0] == 200, "an outage of the bus is no reason to end this process"
    await asyncio.to_thread(nats.start)
    await eventually(lambda: echo.bus.connected and bus.connected)
    echo.set_state("draining")
    status, body = await get(f"{echo.http_url}/ready")
    assert status == 503 and json.loads(body)["why"] == "it is draining"


async def test_trace_is_published_in_order_and_remembered(bus, echo):
    got = []
    await bus.subscribe_bytes(subjects.TRACE, lambda data, subject, _: got.append((subject, json.loads(data))))
    for number, event in enumerate(("gateway.received", "decode.admitted", "gateway.finished")):
        echo.trace.event("r1", event, ms=1.5, number=number, client_id="a.b.*")
    echo.trace.event("r2", "gateway.received")
    await bus.request("decode", echo.instance, "run", m.Ping())
    assert [s for s, _ in got] == [
        "headrace.trace.r1.gateway.received", "headrace.trace.r1.decode.admitted", "headrace.trace.r1.gateway.finished",
        "headrace.trace.r2.gateway.received",
    ]  # fmt: skip
    assert got[0][1]["ms"] == 1.5 and got[0][1]["instance"] == echo.instance
    for name in ("r1", "a.b.*"):  # afterwards, by the server's id and by the client's
        events = await gather(bus, [("decode", echo.instance), ("decode", "gone")], name)
        assert [e["number"] for e in events] == [0, 1, 2]


def test_trace_ring_is_bounded():
    trace = Trace(None, "x", capacity=10)
    for number in range(100):
        trace.event(f"r{number}", "e")
    assert not trace.remembered("r1") and trace.remembered("r99")


PROGRAM = """
import asyncio
from headrace.bus import Service, run_service
class Sleeper(Service):
    role = "decode"
    async def start(self):
        await super().start()
        self.set_state("ready")
    async def drain(self):
        print("draining", flush=True)
        await asyncio.sleep({drain})
        print("drained", flush=True)
run_service(Sleeper)
"""


def start_process(nats, drain: float, before: str = "") -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", before + PROGRAM.format(drain=drain), "--nats-url", nats.url, "--log-format", "json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for line in process.stderr:
        if '"ready"' in line:
            return process
    raise AssertionError("never ready")


def test_sigterm_drains_and_exits_with_zero(nats):
    process = start_process(nats, 0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "draining\ndrained\n")


def test_after_its_stop_a_process_ends_without_taking_the_interpreter_apart(nats):
    """What torch and a model take for that is seconds on a busy machine. What was printed is out."""
    process = start_process(nats, 0.1, "import atexit, time; atexit.register(time.sleep, 60)")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "draining\ndrained\n")


def test_a_second_signal_ends_it_at_once(nats):
    process = start_process(nats, 60)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "draining\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=5)
    assert process.returncode == 1


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {program!r}, "--nats-url", {url!r}, "--log-format", "json"])
print(child.pid, flush=True)
child.wait()
"""


def test_signals_of_a_dead_parents_kernel_are_no_impatience(nats):
    """A killed parent's kernel sends its children the promised signal once for each of its threads: they drain all the same."""
    program = PARENT.format(program=PROGRAM.format(drain=0.5), url=nats.url)
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert any('"ready"' in line for line in parent.stderr)
    parent.kill()
    parent.wait(5)
    os.kill(pid, signal.SIGTERM)
    assert parent.stdout.readline() == "draining\n"
    os.kill(pid, signal.SIGTERM)
    assert parent.stdout.read() == "drained\n", "it was ended at once"
    parent.stderr.read()
    parent.stderr.close()
    parent.stdout.close()


def test_a_start_without_nats_is_one_clear_line():
    argv = [sys.executable, "-c", PROGRAM.format(drain=0), "--nats-url", "nats://127.0.0.1:1", "--nats-connect-seconds", "0.2"]
    done = subprocess.run([*argv, "--log-level", "error"], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert done.stderr.startswith("headrace decode: no NATS server at nats://127.0.0.1:1") and done.stderr.count("\n") == 1
