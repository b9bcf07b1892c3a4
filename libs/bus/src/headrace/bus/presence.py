"""Who is there, and who has died.

Knows: presence messages (`Peers`), pings (`Prober`), the bus's own silence (`Pulse`). Presence says who exists, in which state,
with which load; it is too slow to say who is dead. Death is found by probing instances that have work in flight, every 250 ms:
nobody listens there (the kernel closes a dead process's connections). Two misses are no death: a process that has too much to
do, is stopped or cut off is late. When the bus itself answers nothing, silence says nothing about anybody.
Does not know: what anybody does with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import structlog

from . import messages as m
from .connection import Bus, Subscription
from .errors import BusError, BusTimeout, Disconnected, NoResponder
from .subjects import HELLO, PRESENCE

FRESH_SECONDS = 3.5  # three missed presences
PROBE_SECONDS = 0.25
PROBE_MISSES = 2
LEASE_SECONDS = 2.0  # silence of a peer after which work that depends on it ends
SILENT_SECONDS = 0.5  # patience with the bus itself

log = structlog.get_logger("headrace.bus")

Watcher = Callable[[str, m.Presence], None]  # kind: join | update | state | epoch | leave


class Peers:
    """All instances that speak on the bus. `await peers.start()` before use."""

    def __init__(self, bus: Bus):
        self._bus = bus
        self._seen: dict[str, tuple[m.Presence, float]] = {}  # instance -> presence, monotonic time
        self._watchers: list[Watcher] = []
        self._subscription: Subscription | None = None
        self._sweeper: asyncio.Task | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(PRESENCE, self._on_presence)
        self._sweeper = asyncio.create_task(self._sweep())
        self._bus.publish_bytes(HELLO, b"")

    async def stop(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        if self._subscription is not None:
            await self._subscription.close()

    def by_role(self, role: str, state: str | None = "ready") -> list[m.Presence]:
        """Fresh instances of a role in a state (None: any), in order of their names."""
        return sorted(
            (p for p, _ in self._seen.values() if p.role == role and (state is None or p.state == state)),
            key=lambda p: p.instance,
        )

    def get(self, instance: str) -> m.Presence | None:
        found = self._seen.get(instance)
        return found[0] if found else None

    def all(self) -> list[m.Presence]:
        return [p for p, _ in self._seen.values()]

    def watch(self, watcher: Watcher) -> None:
        """`watcher(kind, presence)` for: join, update (every message), state, epoch (a new incarnation), leave."""
        self._watchers.append(watcher)

    def forget(self, instance: str) -> None:
        """It was found dead; it comes back by itself if it was not."""
        found = self._seen.pop(instance, None)
        if found:
            self._tell("leave", found[0])

    async def wait_for(self, role: str, count: int = 1, timeout: float = 10.0) -> list[m.Presence]:
        """Wait until `count` instances of a role are ready. BusTimeout says how many there were."""
        deadline = time.monotonic() + timeout
        while len(found := self.by_role(role)) < count:
            self._changed.clear()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    await self._changed.wait()
            except TimeoutError:
                raise BusTimeout(f"{len(found)} of {count} {role} instances were ready after {timeout:g} s") from None
        return found

    def _on_presence(self, presence: m.Message, subject: str) -> None:
        if not isinstance(presence, m.Presence):
            return
        old = self._seen.get(presence.instance)
        if old and (presence.epoch, presence.seq) < (old[0].epoch, old[0].seq):
            return
        if presence.state == "stopped":
            return self.forget(presence.instance)
        self._seen[presence.instance] = (presence, time.monotonic())
        if not old:
            self._tell("join", presence)
        elif presence.epoch != old[0].epoch:
            self._tell("epoch", presence)
        elif presence.state != old[0].state:
            self._tell("state", presence)
        self._tell("update", presence)

    def _tell(self, kind: str, presence: m.Presence) -> None:
        if kind != "update":
            self._changed.set()
        for watcher in self._watchers:
            try:
                watcher(kind, presence)
            except Exception:
                log.exception("presence watcher failed", kind=kind, instance=presence.instance)

    async def _sweep(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.5)
            if not self._bus.connected or time.monotonic() - before > 1.5:  # our silence, not theirs
                now = time.monotonic()
                self._seen = {name: (presence, now) for name, (presence, _) in self._seen.items()}
                continue
            oldest = time.monotonic() - FRESH_SECONDS
            gone = [name for name, (_, seen) in self._seen.items() if seen < oldest]
            if gone and not await answers(self._bus):
                now = time.monotonic()
                self._seen = {name: (presence, now) for name, (presence, _) in self._seen.items()}
                continue
            for instance in gone:
                if instance in self._seen and self._seen[instance][1] < oldest:
                    self.forget(instance)


async def answers(bus: Bus) -> bool:
    """Whether the bus carries anything for us now."""
    try:
        await bus.echo(SILENT_SECONDS)
    except BusError:
        return False
    return True


async def is_silent(bus: Bus, role: str, instance: str, sender: str) -> bool:
    """Whether the bus answers and the instance does not, asked once more in between."""
    if not await answers(bus):
        return False
    try:
        await bus.request(role, instance, "ping", m.Ping(sender), PROBE_SECONDS)
    except NoResponder:
        return True
    except BusTimeout:
        return await answers(bus)
    except BusError:
        return False
    return False


async def lost(bus: Bus, role: str, instance: str, sender: str, wanted: Callable[[], bool]) -> BusError | None:
    """Ask an instance that missed pings, with more patience each time, as long as `wanted()`. -> why it is lost: nobody listens
    there, or it was silent for LEASE_SECONDS; None: it answered, or nothing can be said."""
    end = time.monotonic() + LEASE_SECONDS
    while wanted():
        try:
            await bus.request(role, instance, "ping", m.Ping(sender), timeout=LEASE_SECONDS / 4)
        except BusTimeout as error:
            if time.monotonic() < end:
                continue
            return error if await is_silent(bus, role, instance, sender) else None
        except NoResponder as error:
            return error
        except BusError:
            pass  # our own connection is down
        return None
    return None


class Pulse:
    """Whether the bus carries anything for us, though it seems connected: a wire that swallows everything is found by the
    client's own pings only after three of them. Asked only when somebody gave no answer.

    `on_silent()` and `on_back()` are called in turn."""

    def __init__(self, bus: Bus, on_silent: Callable[[], None], on_back: Callable[[], None]):
        self._bus, self._on_silent, self._on_back = bus, on_silent, on_back
        self.silent = False
        self._task: asyncio.Task | None = None
        self._verdict: asyncio.Future[bool] | None = None

    def doubt(self) -> asyncio.Future[bool]:
        """Somebody gave no answer. -> whether the bus carries anything, known within SILENT_SECONDS."""
        if self._task is None:
            self._verdict = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._look(self._verdict))
        assert self._verdict is not None
        return self._verdict

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _look(self, verdict: asyncio.Future[bool]) -> None:
        try:
            if await answers(self._bus):
                return verdict.set_result(True)
            log.warning("nothing comes back from the bus", seconds=SILENT_SECONDS)
            self.silent = True
            self._on_silent()
            verdict.set_result(False)
            while not await answers(self._bus):  # noqa: ASYNC110
                await asyncio.sleep(0.05)  # off the bus it fails at once
            self.silent = False
            self._on_back()
        finally:
            self._task = None


class Prober:
    """Pings watched instances. `on_dead(instance, why)`, or `on_late` where it is there and does not answer, is called once;
    the instance is then no longer watched. `on_doubt()`: one missed its pings. `patient(instance)`: whether its work had better
    wait for it than go elsewhere; it is late then only after LEASE_SECONDS of silence.

    While this process itself is disconnected nobody is declared dead."""

    def __init__(
        self, bus: Bus, sender: str, on_dead: Callable[[str, str], None], on_pong: Callable[[m.Pong], None] | None = None,
        on_doubt: Callable[[], object] = lambda: None, on_late: Callable[[str, str], None] | None = None,
        patient: Callable[[str], bool] = lambda instance: False,
    ):  # fmt: skip
        self._bus, self._sender, self._on_dead, self._on_pong, self._on_doubt = bus, sender, on_dead, on_pong, on_doubt
        self._on_late, self._patient = on_late or on_dead, patient
        self._watched: dict[str, list] = {}  # instance -> [role, uses, misses, epoch]
        self._task: asyncio.Task | None = None
        self._doubts: dict[str, asyncio.Task] = {}  # instances that missed pings, while the bus is asked for a sign of life
        self._wake = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        for task in [*self._doubts.values(), *([self._task] if self._task is not None else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def watch(self, role: str, instance: str) -> None:
        """There is work in flight there. Counted: every watch needs its unwatch."""
        found = self._watched.get(instance)
        if found is not None:
            found[1] += 1
        else:
            self._watched[instance] = [role, 1, 0, 0]
            self._wake.set()

    def unwatch(self, instance: str) -> None:
        found = self._watched.get(instance)
        if found is not None:
            found[1] -= 1

    @property
    def doubted(self) -> set[str]:
        """Instances whose last ping had no answer."""
        return {instance for instance, state in self._watched.items() if state[2]}

    async def _run(self) -> None:
        while True:
            if not self._watched:
                self._wake.clear()
                await self._wake.wait()
            await asyncio.sleep(PROBE_SECONDS)
            for instance, state in list(self._watched.items()):
                if state[1] <= 0:
                    self._watched.pop(instance, None)
                elif self._bus.connected:
                    future = self._bus.ask(f"headrace.{state[0]}.{instance}.ping", m.Ping(self._sender), PROBE_SECONDS)
                    future.add_done_callback(lambda f, instance=instance: self._judge(instance, f))

    def _judge(self, instance: str, future: asyncio.Future) -> None:
        error = None if future.cancelled() else future.exception()
        state = self._watched.get(instance)
        if state is None or isinstance(error, Disconnected):
            return
        if error is None:
            pong = future.result()
            if isinstance(pong, m.Pong):
                if state[3] and pong.epoch != state[3]:
                    return self._declare(instance, "it restarted")
                state[2], state[3] = 0, pong.epoch
                if self._on_pong is not None:
                    self._on_pong(pong)
            return
        state[2] += 1
        if isinstance(error, NoResponder):
            self._declare(instance, "it has left the bus")
        elif isinstance(error, BusError) and state[2] >= PROBE_MISSES and instance not in self._doubts:
            self._on_doubt()
            self._doubts[instance] = task = asyncio.ensure_future(self._doubt(instance))
            task.add_done_callback(lambda _: self._doubts.pop(instance, None))

    async def _doubt(self, instance: str) -> None:
        """It missed pings; if the bus itself was silent, that says nothing."""
        role, why = self._watched[instance][0], f"it missed {PROBE_MISSES} pings"
        late = await is_silent(self._bus, role, instance, self._sender)
        if late and self._patient(instance):
            log.warning("instance is late; its work waits", instance=instance, why=why, seconds=LEASE_SECONDS)
            error = await lost(self._bus, role, instance, self._sender, lambda: instance in self._watched)
            if isinstance(error, NoResponder):
                return self._declare(instance, "it has left the bus")
            late, why = error is not None, f"{why} and was silent for {LEASE_SECONDS:g} s more"
        state = self._watched.get(instance)
        if state is None or state[2] < PROBE_MISSES:
            return  # let go, or it answered meanwhile
        if late:
            self._declare(instance, why, late=True)
        else:
            state[2] = 0

    def _declare(self, instance: str, why: str, late: bool = False) -> None:
        if self._watched.pop(instance, None) is None:
            return
        log.warning("instance is overloaded, stopped or cut off" if late else "instance is dead", instance=instance, why=why)
        (self._on_late if late else self._on_dead)(instance, why)
