"""For tests and drills: services as real processes over a real NATS server, and a gateway's legs without HTTP.

Knows how to start, kill and find services, and how a request goes: admit, run, collect output, ask again after a gap, give
up at a deadline or a death. Does not know protocols or texts. Stands in for nothing but the HTTP half of a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from headrace.bus import BusError, Peers, Prober, Service, Settings, subjects
from headrace.bus import messages as m
from headrace.bus.testing import NatsServer
from headrace.engine import api
from headrace.kv.hashing import BlockHasher

from .sim import SimConfig, SimEngine

NAMESPACE = b"test-namespace.."
COMMAND_SECONDS = 1.0  # patience with a command


def sim_answer(ids: Sequence[int], config: SimConfig | None = None, **sampling: Any) -> tuple[list[list[int]], list[str]]:
    """What the simulated engine says when nothing is split: (ids, finish) of each choice."""
    engine = SimEngine(config or SimConfig(num_blocks=64 + len(ids) // 128, block_bytes=16, state_bytes=16))
    params = api.SamplingParams(**sampling)
    hashes = BlockHasher(engine.info.layout_id, NAMESPACE).hashes(ids)
    engine.submit(api.EngineRequest("r", array("I", ids), hashes, params, NAMESPACE))
    out, finish = [[] for _ in range(params.n)], [""] * params.n
    while engine.has_work():
        plan = engine.plan()
        for event in engine.apply(plan, engine.execute(plan)):
            if isinstance(event, api.Tokens):
                out[event.choice] += event.ids
                finish[event.choice] = event.finish
    return out, finish


@dataclass
class Process:
    """One service. `log` is its standard error so far."""

    role: str
    popen: subprocess.Popen
    path: Path
    name: str
    peers: Peers  # of the test's gateway

    @property
    def log(self) -> str:
        return self.path.read_text(errors="replace")

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def kill(self, notice: bool = True) -> None:
        """SIGKILL, and wait for the end. With `notice` the gateway is told of it too."""
        self.signal(signal.SIGKILL)
        self.popen.wait(10)
        for presence in [p for p in self.peers.by_role(self.role, None) if p.name == self.name and notice]:
            self.peers.forget(presence.instance)

    def terminate(self, timeout: float = 20.0) -> int:
        self.signal(signal.SIGTERM)
        return self.popen.wait(timeout)


class Cluster:
    """`async with Cluster() as cluster: await cluster.start("decode", "--engine", "sim")`. Kills everything at the end."""

    def __init__(self, folder: str | os.PathLike | None = None, host: str = "127.0.0.1") -> None:
        """`host`: the address on which NATS listens."""
        self._scratch = None if folder else tempfile.TemporaryDirectory(prefix="headrace-test-", ignore_cleanup_errors=True)
        self.folder = Path(folder or self._scratch.name)
        shared = Path("/dev/shm")
        self._shm = tempfile.TemporaryDirectory(
            prefix="headrace-test-", dir=shared if shared.is_dir() else self.folder, ignore_cleanup_errors=True
        )
        self.shm_dir = self._shm.name
        self.nats = NatsServer(host=host)
        self.processes: list[Process] = []
        self.gateway: TestGateway = None  # type: ignore[assignment]  # set on entry

    async def __aenter__(self) -> Cluster:
        await asyncio.to_thread(self.nats.start)
        self.gateway = TestGateway(Settings(nats_url=self.nats.url, trace=False, drain_seconds=0))
        await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self.processes:
            process.signal(signal.SIGCONT)
            process.signal(signal.SIGKILL)
        for process in self.processes:
            process.popen.wait(10)
        await self.gateway.stop()
        await asyncio.to_thread(self.nats.stop)
        for folder in (self._shm, self._scratch):
            if folder is not None:
                folder.cleanup()

    async def start(
        self, role: str, *flags: str, ready: bool = True, timeout: float = 60.0, before: Sequence[str] = ()
    ) -> Process:
        """Start `python -m headrace.<role>`, behind the words `before`; with `ready`, return when it says so on the bus."""
        name = f"{role}{len(self.processes)}"
        path = self.folder / f"{name}.log"
        command = [
            *before,
            sys.executable,
            "-m",
            f"headrace.{role}",
            "--nats-url",
            self.nats.url,
            "--name",
            name,
            "--shm-dir",
            self.shm_dir,
        ]
        with path.open("wb") as log:
            popen = subprocess.Popen(  # noqa: ASYNC220  milliseconds
                [*command, "--log-format", "json", *flags], stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        process = Process(role, popen, path, name, self.gateway.peers)
        self.processes.append(process)
        deadline = time.monotonic() + timeout
        while ready and self.find(process) is None:
            if popen.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} is not ready (exit status {popen.poll()}):\n{process.log[-4000:]}")
            await asyncio.sleep(0.02)
        return process

    def find(self, process: Process) -> m.Presence | None:
        """The ready instance of a process."""
        return next((p for p in self.gateway.peers.by_role(process.role) if p.name == process.name), None)

    async def audit(self, process: Process) -> dict[str, Any]:
        """What the service finds when it walks the owners of all its memory."""
        await self.until(lambda: asyncio.sleep(0, self.find(process)), lambda found: found is not None, 5.0)
        instance = self.find(process).instance
        answer = await self.gateway.bus.request(process.role, instance, "audit", m.Ping(), timeout=5.0)
        assert isinstance(answer, m.Done), answer
        return json.loads(answer.state)

    async def stored(self, process: Process, timeout: float = 20.0) -> dict[str, Any]:
        """Wait until a worker has written through to the kvstore whatever it wanted to."""
        return await self.until(lambda: self.audit(process), lambda a: a["to_store"] == 0, timeout)

    async def quiet(self, process: Process, timeout: float = 10.0) -> dict[str, Any]:
        """Wait until a worker owes nothing: no live request, ticket, slot, quarantined or used block."""
        owed = ("live", "tickets", "used", "quarantined", "credits_used", "promised", "slots_out", "unbound")
        return await self.until(lambda: self.audit(process), lambda a: a["ok"] and not any(a.get(k, 0) for k in owed), timeout)

    @staticmethod
    async def until(ask: Callable[[], Awaitable[Any]], good: Callable[[Any], bool], timeout: float) -> Any:
        end = time.monotonic() + timeout
        while not good(last := await ask()):
            if time.monotonic() > end:
                raise AssertionError(f"after {timeout:g} s it is still {last}")
            await asyncio.sleep(0.02)
        return last

    async def metrics(self, process: Process) -> dict[str, float]:
        """Prometheus samples by name; of several with labels, the sum."""
        async with aiohttp.ClientSession() as session, session.get(self.find(process).http + "/metrics") as response:
            text = await response.text()
        out: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                out[sample.name] = out.get(sample.name, 0.0) + sample.value
        return out


@dataclass
class Result:
    """What a client would have seen of one attempt. Times are seconds since the start."""

    request: str
    ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[tuple]] = field(default_factory=list)
    scores: list[tuple] = field(default_factory=list)  # of the prompt, from its second token on
    finish: list[str] = field(default_factory=list)
    usage: m.Usage | None = None
    problem: m.Problem | None = None
    refused: m.Refused | None = None
    cancelled: bool = False
    first_token: float = 0.0
    ended: float = 0.0
    gaps: int = 0
    died: str = ""  # the worker whose death ended it
    prefill: str = ""  # instances that it was meant for
    decode: str = ""
    homeless: bool = False  # nobody took it: it can have no output, and may go elsewhere

    @property
    def ok(self) -> bool:
        return self.usage is not None


class _Stream:
    def __init__(self, result: Result, attempt: int, n: int) -> None:
        self.result, self.attempt = result, attempt
        result.ids, result.logprobs, result.finish = [[] for _ in range(n)], [[] for _ in range(n)], [""] * n
        self.began = self.heard = time.monotonic()
        self.over = asyncio.get_running_loop().create_future()
        self.gap: tuple[int, int] | None = None
        self.prefill = self.decode = ""

    def take(self, entry: m.OutEntry) -> None:
        result, choice = self.result, entry.choice
        if self.over.done() or entry.attempt != self.attempt:
            return
        self.heard = time.monotonic()
        if entry.problem is not None:
            result.problem = entry.problem
            return self.end()
        if entry.scores is not None:
            result.scores += [(p.token, p.logprob, p.top) for p in entry.scores.logprobs]
            return
        have = len(result.ids[choice])
        if entry.index > have:
            self.gap = (choice, have)
            return
        ids = list(m.unpack_ids(entry.ids))[have - entry.index :]
        if ids and not result.first_token:
            result.first_token = time.monotonic() - self.began
        result.ids[choice] += ids
        if entry.logprobs is not None:
            result.logprobs[choice] += [(p.token, p.logprob, p.top) for p in entry.logprobs[have - entry.index :]]
        result.finish[choice] = entry.finish or result.finish[choice]
        if entry.usage is not None:
            result.usage = entry.usage
            self.end()

    def end(self) -> None:
        self.result.ended = time.monotonic() - self.began
        if not self.over.done():
            self.over.set_result(None)


class TestGateway(Service):
    """A gateway without HTTP: presence, pings, output."""

    __test__ = False  # not a test, whatever pytest thinks of its name
    role = "gateway"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.streams: dict[str, _Stream] = {}
        self.seen: dict[str, int] = {}  # instance -> last Out.seq
        self.probe = False  # look whether the workers of a request live: two missed pings end it
        self.drop_out = 0.0  # share of Out messages to lose

    async def start(self) -> None:
        await super().start()
        self._subscriptions.append(await self.bus.subscribe(subjects.out(self.instance), self._out))
        self.peers = Peers(self.bus)
        self.peers.watch(lambda kind, peer: self._died(peer.instance, "it left") if kind == "leave" else None)
        await self.peers.start()
        self.prober = Prober(self.bus, self.instance, self._died)
        self.prober.start()
        self.set_state("ready")

    async def stop(self) -> None:
        await self.prober.stop()
        await self.peers.stop()
        await super().stop()

    def _out(self, message: m.Out, subject: str) -> None:
        if self.drop_out and random.random() < self.drop_out:
            return
        for entry in message.entries:
            stream = self.streams.get(entry.request)
            if stream is not None:
                stream.take(entry)

    def _died(self, instance: str, why: str) -> None:
        self.peers.forget(instance)
        for stream in list(self.streams.values()):
            if instance in (stream.prefill, stream.decode) and not stream.over.done():
                stream.result.died = instance
                stream.result.problem = m.Problem(502, "worker_died", f"{instance} died: {why}")
                stream.end()

    # ------------------------------------------------------------ one request

    async def generate(
        self, ids: Sequence[int], sampling: m.Sampling | None = None, *, patience: float = 0.0, **options: Any
    ) -> Result:
        """Run one request to its end; see `attempt` for the options. A pair that does not take it (busy, full, killed, not
        there) is no end for `patience` seconds: waiting and asking elsewhere is the gateway's part."""
        end, named = time.monotonic() + patience, bool(options.get("prefill") or options.get("decode"))
        while True:
            for role in self._roles() - options.keys():  # one that was killed may be starting again
                await self.peers.wait_for(role, timeout=max(10.0, end - time.monotonic()))
            result = await self.attempt(ids, sampling, **options)
            refused = result.refused
            homeless = result.homeless and not any(result.ids) and not named
            again = refused.code in ("busy", "full", "draining") if refused else homeless
            if not again or time.monotonic() > end:
                return result
            await asyncio.sleep(min(max(refused.retry_after if refused else 0.0, 0.01), 0.1))

    def _roles(self) -> set[str]:
        """Who is needed: prefill not where decode workers compute prompts."""
        return {"decode"} if any(p.both for p in self.peers.by_role("decode")) else {"prefill", "decode"}

    async def attempt(
        self,
        ids: Sequence[int],
        sampling: m.Sampling | None = None,
        *,
        prefill: str = "",
        decode: str = "",
        deadline: float = 30.0,
        cancel_after: float | None = None,
        cancel_at: int | None = None,
        reason: str = "client",
        namespace: bytes = NAMESPACE,
        hashes: bytes | None = None,
    ) -> Result:
        """One attempt. `cancel_after` seconds or at `cancel_at` tokens it is cancelled."""
        sampling = sampling or m.Sampling()
        request = subjects.nuid()
        decode = decode or random.choice(await self.peers.wait_for("decode")).instance
        presence = self.peers.get(decode)
        both = presence is not None and presence.both
        prefill = decode if both else prefill or random.choice(await self.peers.wait_for("prefill")).instance
        if presence is None:
            gone = m.Problem(502, "gone", f"{decode} is not there")
            return Result(request, problem=gone, prefill=prefill, decode=decode, homeless=True)
        layout = presence.layout_id
        packed = array("I", ids).tobytes()
        if hashes is None:
            hashes = b"".join(BlockHasher(layout, namespace).hashes(packed))
        result = Result(request, prefill=prefill, decode=decode, homeless=True)
        stream = self.streams[request] = _Stream(result, 0, sampling.n)
        stream.prefill, stream.decode = prefill, decode
        if self.probe:
            self.prober.watch("decode" if both else "prefill", prefill)
            self.prober.watch("decode", decode)
        try:
            admit = m.Admit(request, 0, self.instance, self.epoch, len(ids), hashes, namespace, sampling, deadline)
            admitted = await self.bus.ask(f"headrace.decode.{decode}.admit", admit, COMMAND_SECONDS)
            if isinstance(admitted, m.Refused):
                result.refused = admitted
                return result
            run = m.Run(
                request, 0, self.instance, decode, admitted.have, packed, hashes, namespace, deadline,
                prompt_logprobs=sampling.prompt_logprobs,
            )  # fmt: skip
            accepted = await self.bus.ask(f"headrace.{'decode' if both else 'prefill'}.{prefill}.run", run, COMMAND_SECONDS)
            if isinstance(accepted, m.Refused):
                result.refused = accepted
                await self._cancel(request, prefill, decode, "failed")
                return result
            result.homeless = False
            await self._collect(stream, deadline, cancel_after, cancel_at, reason)
            return result
        except BusError as error:
            result.problem = result.problem or m.Problem(502, type(error).__name__, str(error))
            await self._cancel(request, prefill, decode, "failed")
            return result
        finally:
            result.ended = result.ended or time.monotonic() - stream.began
            del self.streams[request]
            self.prober.unwatch(prefill)
            self.prober.unwatch(decode)

    async def _collect(
        self, stream: _Stream, deadline: float, cancel_after: float | None, cancel_at: int | None, reason: str
    ) -> None:
        result, end = stream.result, stream.began + deadline
        while not stream.over.done():
            now = time.monotonic()
            enough = cancel_at is not None and len(result.ids[0]) >= cancel_at
            if enough or (cancel_after is not None and now - stream.began >= cancel_after) or now >= end:
                result.cancelled = True
                keep = {0: cancel_at} if cancel_at is not None else {}
                why = reason if now < end else "deadline"
                await self._cancel(result.request, stream.prefill, stream.decode, why, keep)
                if why == "stop":
                    await asyncio.wait({stream.over}, timeout=2.0)
                return
            if stream.gap is not None:
                await self._resume(stream)
            await asyncio.wait({stream.over}, timeout=0.01 if cancel_at is not None or cancel_after is not None else 0.05)
            if not stream.over.done() and time.monotonic() - stream.heard > 1.0:  # the last message may be the lost one
                stream.heard = time.monotonic()
                choice = next((i for i, finish in enumerate(result.finish) if not finish), 0)
                stream.gap = (choice, len(result.ids[choice]))
        if result.problem is not None:
            await self._cancel(result.request, stream.prefill, stream.decode, "failed")

    async def _resume(self, stream: _Stream) -> None:
        (choice, start), stream.gap = stream.gap, None
        stream.result.gaps += 1
        with contextlib.suppress(BusError):
            resume = m.Resume(stream.result.request, stream.attempt, choice, start)
            answer = await self.bus.ask(f"headrace.decode.{stream.decode}.resume", resume, 1.0)
            for entry in answer.entries if isinstance(answer, m.Resumed) else ():
                stream.take(entry)

    async def _cancel(self, request: str, prefill: str, decode: str, reason: str, keep: dict[int, int] | None = None) -> None:
        message = m.Cancel(request, 0, reason, keep or {})
        asks = [
            self.bus.ask(f"headrace.{role}.{name}.cancel", message, 1.0)
            for role, name in (("decode", decode), ("prefill", prefill))
        ]
        await asyncio.gather(*asks, return_exceptions=True)
