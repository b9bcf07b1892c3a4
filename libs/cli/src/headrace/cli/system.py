"""A whole system on one machine: which processes it has, in which order they start and stop, when it is ready.

Knows: the children of a system and their flags. Does not know: how a process is kept alive (supervisor.py) or what `up`
and `demo` do with a running system.

Start: NATS, then all services at once. Ready: every service announces `ready` on the bus and the gateway answers /ready.
Stop: gateway first, so that no new work comes in and running requests finish while the workers still live; then prefill,
decode and vision; then kvstore; then NATS.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from headrace.bus import Bus, Peers
from headrace.bus.cores import usable_cores
from headrace.bus.service import authority
from headrace.cli import checkpoint, shared_memory
from headrace.cli.console import Console
from headrace.cli.errors import CommandError
from headrace.cli.full_disk import trouble
from headrace.cli.log_lines import telling
from headrace.cli.nats_server import NatsServer
from headrace.cli.ports import check_host, free_port, holder, is_free
from headrace.cli.returns import Returns
from headrace.cli.state import Running, StateDir
from headrace.cli.supervisor import Child, Death, Supervisor

DEFAULT_PORT = 8000
START_TIMEOUT = 180.0  # seconds from the first process to `ready`
STOP_MARGIN = 5.0  # seconds beyond a service's own drain budget before it is killed
STOP_BUDGET = 10.0  # seconds for services that have nothing left to finish
RECORD_SECONDS = 5.0  # between two tries at recording which processes run


@dataclass
class Options:
    """What a person may choose about a system."""

    # None: the bundled checkpoint, or a random one of `preset` if that is named or nothing is bundled; none for engine sim.
    model: Path | None = None
    preset: str | None = None
    engine: str = "v41"
    host: str = "127.0.0.1"
    port: int | None = None  # None: 8000, or a free one where that is taken
    prefill: int = 1
    decode: int = 1
    drafts: bool = True  # as the settings say: by default where the checkpoint has a draft; False: none
    both: bool = False  # decode workers compute prompts too, and there is no prefill worker
    vision: int = 1  # of a checkpoint with vision weights; else there is none
    gateway_workers: int = 1
    drain_seconds: float = 20.0
    config: Path | None = None  # settings file for every service


class System:
    """Processes of one system. `await start()`, use it, `await stop()`; both may be interrupted by an exception of `failed`."""

    def __init__(self, options: Options, state: StateDir, console: Console):
        self.options, self.state, self.console = options, state, console
        self.supervisor = Supervisor(self._on_death, self._on_restart)
        self.nats: NatsServer | None = None
        self.bus: Bus | None = None
        self.peers: Peers | None = None
        self.services: dict[str, list[Child]] = {}  # role -> children
        self.url = ""
        chosen = options.model or options.preset or options.engine == "sim"
        self.bundled = None if chosen else checkpoint.bundled_checkpoint()
        self.model: Path | None = None
        self.ready = False
        self.amiss: list[str] = []  # what did not stop as it should; each was told
        self.killed = False
        self._returns = Returns(console.say)
        self._failure = ""
        self._failed = asyncio.Event()
        self.shm_dir = shared_memory.folder_of(state.path)
        self._memory: shared_memory.Claim | None = None
        self._again: asyncio.TimerHandle | None = None  # the next try at recording

    @property
    def random_words(self) -> bool:
        """Whether the model was not trained: its output means nothing."""
        return self.options.model is None and not self.bundled

    async def start(self) -> None:
        """Bring everything up. Raises CommandError, and leaves nothing running, when that fails."""
        self.state.acquire()
        try:
            await self._start()
            self.ready = True
            self.state.write(self.running())
        except OSError as error:
            why = trouble(error)  # before the stop makes room
            await self.stop()
            raise CommandError(f"cannot start from {self.state.path}: {why}, or use --state-dir") from None
        except BaseException:
            await self.stop()
            raise

    async def _start(self) -> None:
        if named := self.options.model or self.bundled:
            self.model = checkpoint.check_model(named)
        check_host(self.options.host)
        port = self._choose_port()
        self.url = f"http://{authority(self.options.host, port)}"
        if not self.model and self.options.engine != "sim":  # sim needs none, and the gateway brings a tokenizer
            preset = self.options.preset or checkpoint.PRESETS[0]
            self.model = await checkpoint.random_checkpoint(self.state.checkpoints, preset, self.console)
        for folder, held in shared_memory.clear_dead():
            self.console.say(f"removed {folder}, {held >> 20} MiB that a killed system had left")
        self._memory = shared_memory.Claim(self.shm_dir)
        self.nats = NatsServer(self.state.path, self.state.logs / "nats.log")
        await self.supervisor.start(self.nats.child)
        await self._unless_failed(self.nats.ready())
        self.bus = await Bus.connect(self.nats.settings, name="headrace-up")
        self.bus.on_reconnect.append(lambda: self._returns.back("nats"))
        self.peers = Peers(self.bus)
        self.peers.watch(self._returns.on_presence)
        await self.peers.start()
        self.console.say(f"NATS listens on {self.nats.url}; starting {self._plan()}")
        for role, children in self._children(port).items():
            self.services[role] = children
            for child in children:
                await self.supervisor.start(child)
        await self._unless_failed(self._wait_ready())

    async def stop(self) -> None:
        """Drain in order, within budgets. Safe to call in any state, more than once. Whatever fails is told and noted in
        `amiss`, and all that comes after it is done: nothing runs on, and nothing is left behind."""
        self.ready = False
        peers, bus = self.peers, self.bus
        self.peers = self.bus = None
        with self._noted("leaving the bus"):
            if peers:
                await peers.stop()
            if bus:
                await bus.close()
        drain = self.options.drain_seconds + STOP_MARGIN
        order = ((("gateway",), drain), (("prefill", "decode", "vision"), STOP_BUDGET), (("kvstore",), STOP_BUDGET))
        for roles, budget in order:
            children = [child for role in roles for child in self.services.pop(role, [])]
            if any(child.pid for child in children):
                self.console.status(f"stopping {', '.join(child.name for child in children)}")
            await self._stop(children, budget)
        nats, self.nats = self.nats, None
        if nats:
            await self._stop([nats.child], STOP_BUDGET)
            with self._noted(f"removing its port files from {nats.folder}"):
                nats.forget()
        self.console.clear()
        memory, self._memory = self._memory, None
        if memory:
            with self._noted(f"removing {memory.folder}"):
                memory.release()
        with self._noted(f"removing the record from {self.state.path}"):
            self.state.release()

    async def _stop(self, children: list[Child], budget: float) -> None:
        """End these, within `budget` seconds."""
        with self._noted(f"stopping {', '.join(child.name for child in children)}"):
            for child in await self.supervisor.stop(children, budget):
                self._note(f"{child.name} did not stop within {budget:.0f} s and was killed; its log: {child.log}")

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """A step of the stop, whose failure keeps no other from being done."""
        try:
            yield
        except Exception as error:
            self._note(f"{what}: {error or type(error).__name__}")

    def _note(self, text: str) -> None:
        """Something did not stop as it should. Said only if that was not wanted: what is killed at once answers nobody."""
        self.amiss.append(text)
        if not self.killed:
            self.console.alert(text)

    def kill(self) -> None:
        """No more patience: end every process at once."""
        self.killed = True
        self.supervisor.kill_all()

    def running(self) -> Running:
        """What other commands need to find this system."""
        return Running(
            pid=os.getpid(),
            url=self.url,
            nats_url=self.nats.url,
            nats_user=self.nats.settings.nats_user,
            nats_password=self.nats.settings.nats_password,
            model=str(self.model or self.options.engine),
            engine=self.options.engine,
            processes={child.name: child.pid for child in self.supervisor.children if child.pid},
        )

    # ------------------------------------------------------------ what runs

    def _plan(self) -> str:
        o = self.options
        workers = f"{o.decode} x prefill and decode in one" if o.both else f"{o.prefill} x prefill, {o.decode} x decode"
        vision = f"{o.vision} x vision, " if self._sees() else ""
        return f"kvstore, {workers}, {vision}gateway (engine {o.engine})"

    def _sees(self) -> bool:
        """Whether this system has vision workers: its checkpoint has their weights, and an engine that computes runs it."""
        return self.options.engine != "sim" and self.model is not None and checkpoint.has_vision(self.model)

    def _children(self, port: int) -> dict[str, list[Child]]:
        o = self.options
        model = ["--model", str(self.model)] if self.model else []
        worker = [*model, "--engine", o.engine]
        decode = [*(["--both"] if o.both else []), *([] if o.drafts else ["--speculative", "off"])]
        gateway = [
            *model,
            "--host",
            o.host,
            "--port",
            str(port),
            "--workers",
            str(o.gateway_workers),
        ]
        plan = {
            "kvstore": [("kvstore", [])],
            "decode": [(f"decode-{i + 1}", [*worker, *decode]) for i in range(o.decode)],
            "prefill": [(f"prefill-{i + 1}", worker) for i in range(0 if o.both else o.prefill)],
            "vision": [(f"vision-{i + 1}", model) for i in range(o.vision if self._sees() else 0)],
            "gateway": [("gateway", gateway)],
        }
        return {role: [self._child(role, name, flags) for name, flags in children] for role, children in plan.items()}

    def _child(self, role: str, name: str, flags: list[str]) -> Child:
        env = {
            "HEADRACE_NATS_URL": self.nats.settings.nats_url,
            "HEADRACE_NATS_USER": self.nats.settings.nats_user,
            "HEADRACE_NATS_PASSWORD": self.nats.settings.nats_password,
            "HEADRACE_SHM_DIR": str(self.shm_dir),
            "HEADRACE_DRAIN_SECONDS": str(self.options.drain_seconds if role == "gateway" else STOP_BUDGET - 2),
            "PYTHONUNBUFFERED": "1",
        }
        if self.options.config:
            env["HEADRACE_CONFIG"] = str(self.options.config.absolute())
        if role in ("prefill", "decode"):
            workers = self.options.decode + (0 if self.options.both else self.options.prefill)
            threads = max(1, usable_cores() // workers)
            env["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", str(threads))
        argv = [sys.executable, "-m", f"headrace.{role}", "--name", name, "--metrics-port", "0", *flags]
        return Child(name, argv, self.state.logs / f"{name}.log", env)

    def _choose_port(self) -> int:
        host, wanted = self.options.host, self.options.port
        if wanted is None:
            if is_free(DEFAULT_PORT, host):
                return DEFAULT_PORT
            self.console.say(f"port {DEFAULT_PORT} is in use by {holder(DEFAULT_PORT) or 'another user'}; taking a free one")
            return free_port(host)
        if wanted and not is_free(wanted, host):
            who = holder(wanted) or "another user's process"
            raise CommandError(
                f"port {wanted} is in use by {who}; stop it, or choose another port with --port (0: any free one)"
            )
        return wanted or free_port(host)

    # ------------------------------------------------------------ what happens to it

    def _on_death(self, death: Death) -> bool:
        """A child ended by itself: during the start that is the end of it all, later it is started again."""
        log = death.child.log
        lines = telling(death.child.last_lines(200), time.time())
        said = "\n    ".join([f"The end of {log}:", *lines]) if lines else f"Its log: {log}"
        if not self.ready:
            self._failure = self._failure or f"{death} while starting. {said}"
            self._failed.set()
            return False
        self._returns.died(death.child.name, self.peers)
        self.console.alert(f"{death}; starting it again in {death.pause:.1f} s. {said}")
        return True

    def _on_restart(self, child: Child) -> None:
        """Other commands find the process that runs now."""
        if self.ready:
            self._record()

    def _record(self, told: str = "") -> None:
        """Tries until it is possible: a full disk costs the record, not the system. `told`: why it was not, as it was said."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        if not self.ready:
            return
        try:
            self.state.write(self.running())
        except OSError as error:
            if str(error) != told:
                self.console.alert(
                    f"cannot record in {self.state.path} which processes run: {trouble(error)} "
                    f"(it is tried again every {RECORD_SECONDS:.0f} s). All goes on meanwhile, but `drill --running` does not "
                    "see those started since"
                )
            self._again = asyncio.get_running_loop().call_later(RECORD_SECONDS, self._record, str(error))

    async def _unless_failed(self, work) -> None:
        """Await `work`, but raise CommandError at once when a child has failed."""
        task, failed = asyncio.ensure_future(work), asyncio.create_task(self._failed.wait())
        try:
            await asyncio.wait({task, failed}, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.is_set():
                raise CommandError(self._failure)
            await task
        finally:
            task.cancel()
            failed.cancel()

    def states(self) -> dict[str, str]:
        """What each service says of itself, by name; `absent` before it is on the bus."""
        said = {presence.name: presence.state for presence in self.peers.all()}
        return {child.name: said.get(child.name, "absent") for children in self.services.values() for child in children}

    async def _wait_ready(self) -> None:
        told: set[str] = set()
        deadline = time.monotonic() + START_TIMEOUT
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            while True:
                states = self.states()
                for name, state in states.items():
                    if state == "ready" and name not in told:
                        told.add(name)
                        self.console.say(f"{name} is ready")
                waiting = [f"{name} ({state})" for name, state in states.items() if state != "ready"]
                names = ", ".join(waiting) or "/ready of the gateway"
                if not waiting and await self._answers(session):
                    return
                if time.monotonic() > deadline:
                    raise CommandError(f"not ready after {START_TIMEOUT:.0f} s: {names}; logs: {self.state.logs}")
                self.console.status(f"waiting for {names}")
                await asyncio.sleep(0.05)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/ready") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
