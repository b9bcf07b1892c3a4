"""`headrace up` as a person runs it, with the real engine on a random checkpoint: one system for all tests of this file.

Every process is real. Tests that kill something come last in the file, and leave a working system behind.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.bus import Bus, Peers, gather, subjects
from headrace.cli.shared_memory import folder_of
from headrace.cli.state import Running, StateDir

START_BUDGET = 90.0  # seconds until the ready line; a first checkpoint and a loaded machine included
PROMPT = " ".join(f"The {n}th bucket of the wheel takes its water and turns." for n in range(40))


class Refused(Exception):
    """An answer other than 200: status, body."""


@dataclass
class Up:
    """A system started by `headrace up`."""

    process: subprocess.Popen
    state: StateDir
    message: str  # what it printed when it was ready
    errors: Path  # its stderr

    @property
    def running(self) -> Running:
        found = self.state.read()
        assert found is not None
        return found

    def cli(self, *argv: str) -> subprocess.CompletedProcess:
        """Another command against this system."""
        return headrace(*argv, "--state-dir", str(self.state.path))

    def post(self, path: str, body: dict, **headers: str) -> tuple[dict, dict]:
        """-> (answer, its headers). Refused says with what the gateway refused."""
        request = urllib.request.Request(
            self.running.url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer), dict(answer.headers)
        except urllib.error.HTTPError as error:
            with error:
                raise Refused(error.code, error.read().decode()) from None


def headrace(*argv: str, timeout: float = 60) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "headrace.cli", *argv], capture_output=True, text=True, timeout=timeout)


def start_up(folder: Path, *flags: str) -> Up:
    """Start a system and wait for its ready line; its stderr is shown when it does not come."""
    out, errors = folder / "stdout", folder / "stderr"
    argv = [sys.executable, "-m", "headrace.cli", "up", "--port", "0", "--state-dir", str(folder / "state"), *flags]
    with out.open("w") as stdout, errors.open("w") as stderr:
        process = subprocess.Popen(argv, stdout=stdout, stderr=stderr)
    deadline = time.monotonic() + START_BUDGET
    while not out.read_text().endswith("\n") and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    line = out.read_text()
    if "Headrace is ready" not in line:
        process.kill()
        process.wait()
        pytest.fail(f"no ready line:\n{errors.read_text()}")
    return Up(process, StateDir(folder / "state"), line, errors)


def stop(up: Up) -> int:
    up.process.send_signal(signal.SIGINT)
    try:
        return up.process.wait(40)
    finally:
        up.process.kill()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """A random checkpoint, made by the command."""
    out = tmp_path_factory.mktemp("checkpoint") / "nano"
    done = headrace("make-checkpoint", "--preset", "nano", "--tokenizer", "small", str(out))
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def up(tmp_path_factory, checkpoints) -> Iterator[Up]:
    started = start_up(tmp_path_factory.mktemp("up"), "--model", str(checkpoints))
    yield started
    if started.process.poll() is None:
        stop(started)


def chat(text: str = "Hello", **more) -> dict:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return body | more


def test_ready_message_has_the_url_and_requests_that_work_on_lines_of_their_own(up):
    lines = [line.strip() for line in up.message.splitlines()]
    assert up.running.url in lines[0]
    assert any("headrace chat " in line for line in lines)
    (command,) = (line for line in lines if line.startswith("curl "))
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("data: {")
    assert done.stdout.rstrip().endswith("data: [DONE]")


def test_every_service_and_nats_are_processes_of_their_own(up):
    processes = up.running.processes
    assert set(processes) == {"nats", "kvstore", "prefill-1", "decode-1", "gateway"}
    assert len({up.process.pid, *processes.values()}) == 6


def test_chat_command_streams_an_answer_and_names_the_request(up):
    done = up.cli("chat", "Hello", "--max-tokens", "5", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert re.search(r"\[\S+\] (length|stop); \d+ prompt tokens \(\d+ cached\), \d+ new", done.stderr)


def test_chat_command_reads_what_is_piped_to_it(up):
    argv = [sys.executable, "-m", "headrace.cli", "chat", "--max-tokens", "3", "--state-dir", str(up.state.path)]
    done = subprocess.run(argv, input="Hello\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "3 new" in done.stderr


def test_doctor_finds_a_healthy_system(up):
    done = up.cli("doctor", "--json")
    findings = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert {"python", "torch", "nats-server", "/dev/shm", "bus", "gateway", "prefill-1", "decode-1", "kvstore"} <= set(findings)
    assert [f for f in findings.values() if f["level"] == "problem"] == []
    assert done.returncode == 0


def test_trace_of_an_answered_request_is_in_order_and_names_every_leg(up):
    answer, _ = up.post("/v1/chat/completions", chat(PROMPT))
    done = up.cli("trace", answer["id"], "--json")
    assert done.returncode == 0, done.stderr
    events = json.loads(done.stdout)
    names = [event["event"] for event in events]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    order = ["gateway.received", "decode.admit", "prefill.accepted", "decode.bound", "prefill.computed", "decode.first_token"]
    assert [name for name in names if name in order] == order
    assert {name.split(".")[0] for name in names} >= {"gateway", "prefill", "decode", "kvstore"}
    for role in ("gateway", "prefill", "decode", "kvstore"):
        assert any(event.get("ms") for event in events if event["event"].startswith(role)), f"no duration of {role}"
    shown = up.cli("trace", answer["id"]).stdout
    assert shown.startswith(f"request {events[0]['request']}: ")
    assert all(name in shown for name in names)


def test_trace_of_an_unknown_request_says_so(up):
    done = up.cli("trace", "nobody")
    assert done.returncode == 1
    assert "nobody remembers a request 'nobody'" in done.stderr


async def test_request_id_of_a_client_harms_nothing_and_is_found_again(up):
    """Names with a meaning on NATS stay attributes: they never become a part of a subject."""
    bus = await Bus.connect(up.running.bus_settings(), name="test")
    peers = Peers(bus)
    await peers.start()
    try:
        for role in ("gateway", "prefill", "decode"):
            await peers.wait_for(role)
        instances = [(presence.role, presence.instance) for presence in peers.all()]
        for name in ("a.b.*", "a.b.>", "$SRV.STATS", "headrace.trace", "x" * 200):
            answer, headers = await asyncio.to_thread(up.post, "/v1/chat/completions", chat(), **{"X-Request-Id": name})
            assert headers["X-Request-Id"] == name
            assert answer["choices"][0]["finish_reason"] == "length"
            events = await gather(bus, instances, name)
            assert {event["event"].split(".")[0] for event in events} >= {"gateway", "prefill", "decode"}
            assert all(name not in event["request"] for event in events)
    finally:
        await peers.stop()
        await bus.close()


async def test_trace_events_are_published_and_services_answer_discovery(up):
    """What `nats sub 'headrace.trace.>'` and `nats micro stats` would see."""
    bus = await Bus.connect(up.running.bus_settings(), name="test")
    seen: list[tuple[str, dict]] = []
    stats: list[dict] = []
    try:
        await bus.subscribe_bytes(subjects.TRACE, lambda data, subject, reply: seen.append((subject, json.loads(data))))
        await asyncio.to_thread(up.post, "/v1/chat/completions", chat())
        await bus.subscribe_bytes("test.stats", lambda data, subject, reply: stats.append(json.loads(data)))
        bus.publish_bytes("$SRV.STATS", b"", reply="test.stats")
        async with asyncio.timeout(5):
            while len(stats) < 4 or "gateway.finished" not in [event["event"] for _, event in seen]:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        await bus.close()
    requests = {event["request"] for _, event in seen}
    assert all(subject == f"headrace.trace.{event['request']}.{event['event']}" for subject, event in seen)
    assert len(requests) == 1
    assert {s["name"] for s in stats} == {"headrace-gateway", "headrace-prefill", "headrace-decode", "headrace-kvstore"}
    prefill = next(s for s in stats if s["name"] == "headrace-prefill")
    assert next(e for e in prefill["endpoints"] if e["name"] == "run")["num_requests"] > 0


def test_openai_sdk_unchanged_streams_a_chat(up):
    import openai

    with openai.OpenAI(base_url=f"{up.running.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        with client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)
    assert len({chunk.id for chunk in chunks}) == 1
    assert any(choice.finish_reason in ("stop", "length") for chunk in chunks for choice in chunk.choices)
    last = chunks[-1]
    assert last.choices == [], "usage comes in a last chunk with empty choices"
    assert last.usage.prompt_tokens > 0
    assert last.usage.completion_tokens <= 8
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_openai_sdk_gets_errors_as_its_own_exceptions(up):
    import openai

    with openai.OpenAI(base_url=f"{up.running.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="no-such-model"):
            client.chat.completions.create(model="no-such-model", messages=[{"role": "user", "content": "x"}])
        model = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], max_tokens=-1)


def test_second_system_in_the_same_state_directory_is_refused(up):
    done = up.cli("up")
    assert done.returncode == 1
    assert f"a system already runs from {up.state.path} (pid {up.process.pid}, {up.running.url})" in done.stderr


def test_port_in_use_names_who_holds_it(up, tmp_path):
    port = up.running.url.rsplit(":", 1)[1]
    done = headrace("up", "--port", port, "--state-dir", str(tmp_path))
    assert done.returncode == 1
    assert f"port {port} is in use by pid {up.running.processes['gateway']}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.parametrize("victim", ["prefill-1", "decode-1", "kvstore", "gateway", "nats"])
def test_killed_process_is_named_and_started_again(up, victim):
    before = child_pid(up, victim)
    os.kill(before, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline, f"{victim} did not come back:\n{up.errors.read_text()[-3000:]}"
        time.sleep(0.1)
        if child_pid(up, victim) in (0, before):
            continue
        try:
            answer, _ = up.post("/v1/chat/completions", chat())
        except (OSError, Refused):
            continue
        break
    assert answer["usage"]["completion_tokens"] == 8
    said = up.errors.read_text()
    assert f"{victim} was killed by SIGKILL after" in said
    assert '"level": "info"' not in said, "what is no trouble explains no death"
    while not re.search(rf"\] {victim} is ready again, \d+\.\d s after it died\n", up.errors.read_text()):
        assert time.monotonic() < deadline, f"{victim} was never said to be ready again:\n{up.errors.read_text()[-3000:]}"
        time.sleep(0.1)


def child_pid(up: Up, name: str) -> int:
    """Pid of a child of `up` now, by the name in its command line (NATS: by its program)."""
    for task in Path(f"/proc/{up.process.pid}/task").iterdir():
        for pid in (task / "children").read_text().split():
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if name in words or (name == "nats" and words[0].endswith("nats-server")):
                return int(pid)
    return 0


def test_a_record_that_cannot_be_written_is_told_and_written_later(up):
    """Meanwhile the pid of the dead process, which may be anybody's by now, is nobody's."""
    before = up.running.alive()
    temporary = up.state.path / "running.tmp"
    temporary.symlink_to("/dev/full")  # removed with the attempt: the next one finds room
    os.kill(before["kvstore"], signal.SIGKILL)
    said = f"cannot record in {up.state.path} which processes run: {temporary} can't be written (No space left on device; "
    wait_until(lambda: said in up.errors.read_text(), "nobody was told")
    assert not temporary.is_symlink()
    assert up.running.processes["kvstore"] == before["kvstore"] and "kvstore" not in up.running.alive()
    wait_until(lambda: up.running.alive().get("kvstore") == child_pid(up, "kvstore"), "it was never recorded")
    assert up.errors.read_text().count("cannot record in") == 1


def wait_until(condition, otherwise: str, timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.05)


def test_interrupt_drains_and_leaves_nothing(up):
    children = [child_pid(up, name) for name in ("nats", "kvstore", "prefill-1", "decode-1", "gateway")]
    assert stop(up) == 0
    assert all(not Path(f"/proc/{pid}").exists() for pid in children)
    assert up.state.read() is None
    text = up.errors.read_text()
    assert "draining" in text
    assert "did not stop within" not in text
    assert not folder_of(up.state.path).exists()
