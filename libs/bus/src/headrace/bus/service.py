"""What every service process has: a life, a name, commands, presence, health, metrics, and an orderly end.

Knows: starting -> ready -> draining -> stopped (and stalled: work exists, but nothing moves), signals, the HTTP side door.
Does not know: what the service does. A service subclasses `Service` and says so in `verbs`, `load`, `describe`, `progress`.

    class Decode(Service):
        role, Settings = "decode", DecodeSettings
        def verbs(self): return {"admit": self.admit, ...}
        async def start(self):
            await super().start()      # bus, commands, presence ("starting"), HTTP
            ...                        # load the model
            self.set_state("ready")

    run_service(Decode)                # the whole of __main__.py
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, NoReturn

import structlog
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from . import log as logs
from . import messages as m
from . import subjects
from .connection import Bus, Subscription
from .errors import BusError, StartError
from .faults import Faults
from .micro import MicroService, VerbStats
from .settings import Settings, SettingsError
from .trace import Trace

PRESENCE_SECONDS = 1.0
MAX_COMMANDS = 4096  # asynchronous commands in flight; more are refused as busy
STATES = ("starting", "ready", "draining", "stalled", "stopped")

Handler = Callable[[Any], m.Message | Awaitable[m.Message]]


@functools.cache
def package_version(role: str) -> str:
    for name in (f"headrace-{role}", "headrace-bus"):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return "0.0.0"


def authority(host: str, port: int) -> str:
    """As it stands in a URL: an IPv6 address has its own colons."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Service:
    """One per process."""

    role: ClassVar[str] = "service"
    description: ClassVar[str] = "A Headrace service"
    Settings: ClassVar[type[Settings]] = Settings
    http_reuse_port: bool = False

    def __init__(self, settings: Settings):
        self.settings = settings
        try:
            self.faults = Faults(settings.test_faults)
        except ValueError as error:
            raise SettingsError(f"--test-faults: {error}") from None
        self.instance = f"{self.role}-{subjects.nuid()}"
        self.epoch = time.time_ns()
        self.version = package_version(self.role)
        self.log = structlog.get_logger(f"headrace.{self.role}").bind(instance=self.instance)
        self.metrics = CollectorRegistry()
        self.state = "starting"
        self.bus: Bus = None  # type: ignore[assignment]  # set by start()
        self.trace: Trace = None  # type: ignore[assignment]
        self.http_url = ""
        self.failed: asyncio.Future[str] | None = None  # set when the process must end; run_service watches it
        self.before_ready: Callable[[], None] | None = None  # called once, before peers learn that work may come
        self._seq = 0
        self._verbs: dict[str, VerbStats] = {}
        self._handlers: dict[str, Handler] = {}
        self._commands: set[asyncio.Task] = set()
        self._background: list[asyncio.Task] = []
        self._subscriptions: list[Subscription] = []
        self._micro: MicroService | None = None
        self._http: web.AppRunner | None = None
        self._progress = (0, time.monotonic())

    # ------------------------------------------------------------ what a service says about itself

    def verbs(self) -> dict[str, Handler]:
        """Commands: verb -> handler(message) -> answer, or an awaitable of it. Handlers of one sender run in its order; a
        synchronous one answers in the same loop turn without a task."""
        return {}

    def load(self) -> m.Load:
        return m.Load()

    def describe(self) -> dict[str, Any]:
        """More fields of this service's Presence."""
        return {}

    def progress(self) -> int:
        """A number that grows while work gets done (engine steps)."""
        return 0

    def patience(self) -> float:
        """Seconds without progress that are no stall yet."""
        return self.settings.stall_seconds

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Connect, listen for commands, announce `starting`, open the HTTP side door. Raises BusError, StartError."""
        self.failed = asyncio.get_running_loop().create_future()
        self.bus = await Bus.connect(self.settings, name=self.settings.name or self.instance)
        self.bus.on_closed = lambda: self.fail("NATS closed the connection for good")
        self.bus.on_reconnect.append(self.announce)
        self.trace = Trace(self.bus, self.instance, publish=self.settings.trace)
        self.faults.hook(self.bus, self.trace)
        self.metrics.register(_ServiceCollector(self))
        ProcessCollector(registry=self.metrics)
        PlatformCollector(registry=self.metrics)
        GCCollector(registry=self.metrics)
        await self._start_http()

        self._handlers = {"ping": self._ping, "trace": self._trace_get} | self.verbs()
        if self.faults.remote:
            self._handlers["arm"] = self._arm
        self._verbs = {verb: VerbStats(subjects.command(self.role, self.instance, verb)) for verb in self._handlers}
        # One subscription for all verbs: commands of one sender then arrive in the order in which they were sent.
        self._subscriptions.append(await self.bus.serve(subjects.command(self.role, self.instance, "*"), self._dispatch))
        self._subscriptions.append(await self.bus.subscribe_bytes(subjects.HELLO, lambda *_: self.announce()))
        self._micro = MicroService(self.bus, f"headrace-{self.role}", self.instance, self.version, self.description,
                                   {"label": self.settings.name} if self.settings.name else {}, self._verbs)  # fmt: skip
        await self._micro.start()
        self.announce()
        self.background(self._presence_loop())

    async def drain(self) -> None:
        """Finish work in flight; new work is refused already (`self.state` is draining). Bounded by `drain_seconds` outside."""

    async def stop(self) -> None:
        """Leave the bus and close everything. Safe after a start that failed half-way."""
        self.set_state("stopped")
        for task in [*self._background, *self._commands]:
            task.cancel()
        await asyncio.gather(*self._background, *self._commands, return_exceptions=True)
        if self._http is not None:
            await self._http.cleanup()
        if self.bus is not None:
            await self.bus.close()

    def set_state(self, state: str) -> None:
        assert state in STATES, state
        if state == self.state:
            return
        if state == "ready" and self.before_ready is not None:
            self.before_ready, call = None, self.before_ready
            call()
        self.log.info("state", state=state, was=self.state)
        self.state = state
        if self.bus is not None:
            self.announce()

    def fail(self, why: str) -> None:
        """End the process with an error; whoever supervises it starts a new one."""
        if self.failed is not None and not self.failed.done():
            self.failed.set_result(why)

    def background(self, coroutine: Awaitable[None]) -> asyncio.Task:
        """A task that lives as long as the service; if it dies of an error, so does the service."""
        task = asyncio.ensure_future(coroutine)
        self._background.append(task)

        def ended(task: asyncio.Task) -> None:
            if not task.cancelled() and task.exception() is not None:
                self.log.error("background task failed", exc_info=task.exception())
                self.fail(f"a background task failed: {task.exception()}")

        task.add_done_callback(ended)
        return task

    # ------------------------------------------------------------ presence and health

    def announce(self) -> None:
        """Publish presence now."""
        self._seq += 1
        presence = m.Presence(
            role=self.role, instance=self.instance, name=self.settings.name, epoch=self.epoch, seq=self._seq, state=self.state,
            load=self.load(), version=self.version, http=self.http_url, **self.describe(),
        )  # fmt: skip
        with contextlib.suppress(BusError):
            self.bus.publish(subjects.presence(self.role, self.instance), presence)

    async def _presence_loop(self) -> None:
        while True:
            await asyncio.sleep(PRESENCE_SECONDS)
            self._watch_progress()
            self.announce()

    def _watch_progress(self) -> None:
        """Work that does not move for as long as `patience` says is `stalled`; idle is healthy."""
        now, steps = time.monotonic(), self.progress()
        if steps != self._progress[0] or not self.load().running:
            self._progress = (steps, now)
            if self.state == "stalled":
                self.set_state("ready")
        elif self.state == "ready" and now - self._progress[1] > self.patience():
            self.set_state("stalled")

    @property
    def healthy(self) -> bool:
        return self.state != "stalled"

    @property
    def ready(self) -> bool:
        return not self.not_ready_because()

    def not_ready_because(self) -> str:
        """Why no work should be sent here now; "" when it should."""
        if self.state != "ready":
            return f"it is {self.state}"
        return "" if self.bus is not None and self.bus.connected else "it is not connected to NATS"

    async def _start_http(self) -> None:
        host, port, flag = self.http_address()
        self._http = self.http_runner()
        await self._http.setup()
        site = web.TCPSite(self._http, host, port, reuse_port=self.http_reuse_port or None, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            what = f"can't listen on {authority(host, port)} ({error.strerror or error})"
            raise StartError(f"{what}; choose another {flag} (0 takes a free one) or --host") from error
        self.http_url = f"http://{authority(host, self._http.addresses[0][1])}"
        self.log.info("listening", url=self.http_url)

    def http_address(self) -> tuple[str, int, str]:
        """Where HTTP is served: host, port, and the flag that sets the port."""
        return self.settings.host, self.settings.metrics_port, "--metrics-port"

    def http_runner(self) -> web.AppRunner:
        app = web.Application()
        app.add_routes(self.side_door())
        return web.AppRunner(app, access_log=None)

    def side_door(self) -> list[web.RouteDef]:
        """Routes of health, readiness and metrics; the gateway puts them beside its API."""

        async def health(_: web.Request) -> web.Response:
            return web.json_response(self.status(), status=200 if self.healthy else 503)

        async def ready(_: web.Request) -> web.Response:
            why = self.not_ready_because()
            if not why:
                return web.json_response(self.status())
            said = self.status() | {"status": "not ready" if self.state == "ready" else self.state, "why": why}
            return web.json_response(said, status=503)

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(body=generate_latest(self.metrics), headers={"Content-Type": "text/plain; version=0.0.4"})

        return [
            web.get("/health", health), web.get("/live", health), web.get("/ready", ready), web.get("/health/ready", ready),
            web.get("/metrics", metrics),
        ]  # fmt: skip

    def status(self) -> dict[str, Any]:
        return {
            "status": self.state, "role": self.role, "instance": self.instance,
            "bus": "connected" if self.bus is not None and self.bus.connected else "disconnected",
        }  # fmt: skip

    # ------------------------------------------------------------ commands

    def _dispatch(self, message: m.Message, subject: str, reply: str) -> None:
        verb = subject[subject.rfind(".") + 1 :]
        handler = self._handlers.get(verb)
        if handler is None:
            self.bus.respond(reply, m.Refused("unknown", f"{self.role} has no command {verb}"))
            return
        stats = self._verbs[verb]
        stats.requests += 1
        started = time.perf_counter_ns()
        try:
            answer = handler(message)
        except Exception as error:
            answer = self._command_failed(verb, stats, error)
        stats.nanoseconds += time.perf_counter_ns() - started
        if isinstance(answer, m.Message):
            self.bus.respond(reply, answer)
        elif len(self._commands) >= MAX_COMMANDS:
            answer.close()  # type: ignore[attr-defined]
            self.bus.respond(reply, m.Refused("busy", f"{MAX_COMMANDS} commands are in flight", self.load(), 1.0))
        else:
            task = asyncio.ensure_future(self._finish_command(verb, stats, answer, reply))
            self._commands.add(task)
            task.add_done_callback(self._commands.discard)

    async def _finish_command(self, verb: str, stats: VerbStats, awaitable: Awaitable[m.Message], reply: str) -> None:
        try:
            answer = await awaitable
        except Exception as error:
            answer = self._command_failed(verb, stats, error)
        self.bus.respond(reply, answer)

    def _command_failed(self, verb: str, stats: VerbStats, error: Exception) -> m.Refused:
        stats.errors += 1
        stats.last_error = f"{type(error).__name__}: {error}"
        self.log.error("command failed", verb=verb, exc_info=error)
        return m.Refused("failed", f"{verb} failed in {self.instance}: {stats.last_error}")

    def _ping(self, message: m.Ping) -> m.Pong:
        return m.Pong(self.instance, self.epoch, self.progress(), self.state, self.load())

    def _arm(self, message: m.Arm) -> m.Message:
        try:
            self.faults.arm(message.faults)
        except ValueError as error:
            return m.Refused("invalid", str(error))
        return m.Done()

    def _trace_get(self, message: m.TraceGet) -> m.TraceEvents:
        return m.TraceEvents(self.trace.remembered(message.request))


class _ServiceCollector:
    """Prometheus: state, load and bus counters, read when somebody asks."""

    def __init__(self, service: Service):
        self._service = service

    def describe(self) -> list:
        return []

    def collect(self) -> Any:
        service = self._service
        state = GaugeMetricFamily("headrace_state", "1 for the state that the service is in", labels=["role", "state"])
        for name in STATES:
            state.add_metric([service.role, name], float(name == service.state))
        yield state
        if service.bus is not None:
            counters = service.bus.counters
            for name in counters.__dataclass_fields__:
                if name != "largest_out":
                    text = f"bus: {name.replace('_', ' ')}"
                    yield CounterMetricFamily(f"headrace_bus_{name}", text, value=getattr(counters, name))
            yield GaugeMetricFamily("headrace_bus_largest_out_bytes", "bus: largest message sent", value=counters.largest_out)
            yield GaugeMetricFamily("headrace_bus_connected", "bus: 1 while connected", value=float(service.bus.connected))


def run_service(service_class: type[Service], argv: Sequence[str] | None = None) -> None:
    """A process from settings to signals. Exits with 0 after a drain, 1 after a failure, 2 for bad settings."""
    try:
        settings = service_class.Settings.load(argv, service_class.role, service_class.description)
        logs.configure(settings.log_level, settings.log_format)
        service = service_class(settings)
    except SettingsError as error:
        print(f"headrace {service_class.role}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    leave(uvloop.run(_live(service)))


def leave(status: int) -> NoReturn:
    """End the process now: all that must happen has happened. The interpreter would take every object and library
    apart first, which is a good part of a second of computing with torch, and many seconds of waiting on a busy machine."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


async def _live(service: Service) -> int:
    stop = asyncio.Event()
    _catch_signals(stop)
    service.before_ready = _settle_memory  # it takes a tenth of a second, which the first request need not wait for
    starting = asyncio.ensure_future(service.start())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return 0
        try:
            starting.result()
        except (BusError, StartError, SettingsError) as error:
            print(f"headrace {service.role}: {error}", file=sys.stderr)
            return 1
        assert service.failed is not None
        await asyncio.wait({service.failed, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if service.failed.done():
            service.log.error("ending", why=service.failed.result())
            return 1
        service.set_state("draining")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(service.settings.drain_seconds):
                await service.drain()
        return 0
    finally:
        stopping.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(10.0):
                await service.stop()


def _catch_signals(stop: asyncio.Event) -> None:
    """The first SIGTERM or SIGINT drains, the second ends the process at once.

    Not so when the parent is gone: its kernel sends the signal that it promised once for each thread of the parent, some time
    apart, and nobody was impatient."""
    parent = os.getppid()

    def on_signal() -> None:
        if not stop.is_set():
            stop.set()
        elif os.getppid() == parent:
            os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def _settle_memory() -> None:
    """What lives now lives for good: keep it out of every later collection, and collect the young less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)
