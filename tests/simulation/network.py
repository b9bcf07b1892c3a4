"""The simulated bus and tcp connections, under the project's own `Bus`, `Server` and `TcpPeer`.

Knows: subjects, delays, what is lost, doubled, held back or overtaken, broken connections. The bytes are real: messages are
encoded and decoded, frames are taken apart by `headrace.transfer.frames`. Does not know what messages mean beyond their names.

Messages between two processes keep their order, as NATS has it, unless a fault delays one or the schedule says that they
overtake each other.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nats.errors

from headrace.bus import messages as m
from headrace.bus.connection import Bus
from headrace.bus.errors import Disconnected

NOBODY = b"NATS/1.0 503\r\n\r\n"


class SimClient:
    """Stands where `connection._Client` stands: direct delivery, direct writes, and no socket."""

    max_payload = 1 << 20

    def __init__(self, network: Network, process: Any) -> None:
        self.network, self.process = network, process
        self.direct: dict[int, Callable] = {}
        self.riders: list[Callable] = []
        self.options: dict[str, Any] = {}
        self._sid = 0
        self.closed = False

    @property
    def is_connected(self) -> bool:
        return not (self.closed or self.network.down)

    def write(self, data: bytes) -> None:
        if not self.is_connected:
            raise Disconnected("not connected")
        head, rest = data.split(b"\r\n", 1)
        words = head.split(b" ")
        size = int(words[3]) if words[0] == b"HPUB" else 0
        self.network.publish(self.process, words[1], words[2], rest[:size], rest[size:-2])

    def write_turn(self) -> None:
        pass

    async def subscribe(self, subject: str, queue: str = "") -> Any:
        self._sid += 1
        sid = self._sid
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
        self.network.subscribe(subject.encode(), self, sid)

        async def unsubscribe() -> None:
            self.network.unsubscribe(self, sid)

        return SimpleNamespace(_id=sid, unsubscribe=unsubscribe)

    async def _flush_pending(self, force_flush: bool = False) -> None:
        pass

    async def flush(self, timeout: float = 1.0) -> None:
        if not self.is_connected:
            raise nats.errors.ConnectionClosedError
        await asyncio.sleep(2 * self.network.latency)

    async def close(self) -> None:
        self.network.leave(self)


class SimBus(Bus):
    """The project's bus over a simulated client."""

    @classmethod
    async def connect(cls, settings: Any, name: str = "headrace") -> SimBus:
        process = asyncio.get_running_loop().process
        while process.world.network.down:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        bus = cls(name)
        bus._client = process.client = SimClient(process.world.network, process)
        process.bus = bus
        await bus._subscribe(f"{bus._inbox.decode()}.*", "", bus._on_reply)
        await bus.flush()
        return bus


class Network:
    def __init__(self, world: Any, latency: float, overtake: float) -> None:
        self.world, self.latency, self.overtake = world, latency, overtake
        self.down = False
        self.loss = 0.0
        self.link_held = False  # tcp connections between workers carry nothing for now
        self.counts: Counter[str] = Counter()  # messages by name
        self.faults: dict[tuple[str, int], tuple] = {}  # (name, which one) -> what happens to it
        self.hooks: dict[tuple[str, int], Callable[[Any, Any], None]] = {}  # ... -> called with (sender, receiver)
        self.unwarned: dict[tuple[str, int], float] = {}  # ... -> seconds in which no cancel reaches its receiver
        self.happened: Counter[str] = Counter()
        self._exact: dict[bytes, list[tuple[SimClient, int]]] = defaultdict(list)
        self._star: dict[bytes, list[tuple[SimClient, int]]] = defaultdict(list)
        self._deep: list[tuple[bytes, SimClient, int]] = []
        self._last: dict[tuple[int, int], float] = {}
        self._no_cancel: dict[Any, float] = {}  # process -> until when none reaches it
        self._held: list[tuple[Any, Callable[[], None]]] = []
        self._listeners: dict[int, tuple[Any, Callable]] = {}
        self._transports: list[SimTransport] = []

    # ------------------------------------------------------------ the bus

    def subscribe(self, subject: bytes, client: SimClient, sid: int) -> None:
        if subject.endswith(b">"):
            self._deep.append((subject[:-1], client, sid))
        elif subject.endswith(b"*"):
            self._star[subject[:-1]].append((client, sid))
        else:
            self._exact[subject].append((client, sid))

    def unsubscribe(self, client: SimClient, sid: int) -> None:
        for table in (self._exact, self._star):
            for entries in table.values():
                if (client, sid) in entries:
                    entries.remove((client, sid))
        self._deep = [entry for entry in self._deep if entry[1:] != (client, sid)]

    def leave(self, client: SimClient) -> None:
        """The connection is closed: by its process, or by the kernel when that is gone."""
        client.closed = True
        for table in (self._exact, self._star):
            for subject in list(table):
                table[subject] = [entry for entry in table[subject] if entry[0] is not client]
        self._deep = [entry for entry in self._deep if entry[1] is not client]

    def publish(self, source: Any, subject: bytes, reply: bytes, headers: bytes, data: bytes) -> None:
        if source.dead or self.world.over:
            return
        name = message_name(data)
        self.counts[name] += 1
        number = self.counts[name]
        targets = self._exact.get(subject, [])
        if not targets:
            targets = self._star.get(subject[: subject.rfind(b".") + 1], [])
            if self._deep:
                targets = targets + [(c, sid) for prefix, c, sid in self._deep if subject.startswith(prefix)]
        if not targets and reply:
            return self._nobody(source, reply)
        action = self.faults.get((name, number))
        hook = self.hooks.get((name, number))
        unwarned = self.unwarned.get((name, number))
        for client, sid in targets:
            if unwarned is not None:
                self._no_cancel[client.process] = self.world.now + unwarned
            self._send(source, client, sid, (subject, reply, data, headers or None), action, name)
            if hook is not None:
                self.world.at(self.world.now + 2 * self.latency, hook, source, client.process)

    def _nobody(self, source: Any, reply: bytes) -> None:
        for client, sid in self._star.get(reply[: reply.rfind(b".") + 1], []):
            self._send(source, client, sid, (reply, b"", b"", NOBODY), None, "")

    def _send(self, source: Any, client: SimClient, sid: int, args: tuple, action: tuple | None, name: str) -> None:
        target, rng, now = client.process, self.world.rng, self.world.now
        delay, times = (0.3 + 1.7 * rng.random()) * self.latency, 1
        overtake = self.overtake and rng.random() < self.overtake
        if overtake:
            delay *= 20
        if self.loss and rng.random() < self.loss:
            self.happened["lost"] += 1
            return
        if name == "Cancel" and now < self._no_cancel.get(target, 0.0):
            self.happened["drop Cancel"] += 1
            return
        if action is not None:
            self.happened[f"{action[0]} {name}"] += 1
            if action[0] == "drop":
                return
            if action[0] == "double":
                times = 2
            else:
                delay, overtake = action[1], True
        when = now + delay
        if not overtake:
            pair = (source.number, target.number)
            when = self._last[pair] = max(when, self._last.get(pair, 0.0))
        for again in range(times):
            self.world.at(when + again * 0.05, self._deliver, source, client, sid, args)

    def _deliver(self, source: Any, client: SimClient, sid: int, args: tuple) -> None:
        if client.closed or client.process.dead or self.down:
            return
        for process, one_way in ((source, "mute"), (client.process, "deaf")):
            if process.cut in ("lose", one_way):
                self.happened["cut off"] += 1
                return
            if process.cut == "hold":
                self.happened["held back"] += 1
                self._held.append((process, lambda: self._deliver(source, client, sid, args)))
                return
        deliver = client.direct.get(sid)
        if self.world.traced:
            self._tell(source, client.process, args)
        if deliver is not None:
            client.process.loop.call_soon(deliver, *args)

    def _tell(self, source: Any, target: Any, args: tuple) -> None:
        name = message_name(args[2])
        if name not in ("Ping", "Pong", "Presence", "KvEvents"):
            text = str(m.decode(args[2]) if args[2] else "nobody listens")
            print(f"{self.world.now - 1000.0:9.4f} {source.role}{source.number} -> {target.role}{target.number} {text[:230]}")

    def fault(self, name: str) -> tuple | None:
        """One more of what is no message (flags, bytes): what happens to it."""
        self.counts[name] += 1
        action = self.faults.get((name, self.counts[name]))
        if action is not None:
            self.happened[f"{action[0]} {name}"] += 1
        return action

    def heal(self) -> None:
        """Somebody is connected again: what was held back arrives."""
        held, self._held = self._held, []
        for _, deliver in held:
            deliver()

    def set_down(self, down: bool) -> None:
        self.down = down
        for process in self.world.processes:
            bus = process.bus
            if bus is not None and not process.dead and not bus._client.closed:
                process.loop.create_task(bus._on_disconnected() if down else bus._on_reconnected())

    # ------------------------------------------------------------ tcp

    def listen(self, process: Any, factory: Callable) -> Any:
        port = 40_000 + self.world.count()
        self._listeners[port] = (process, factory)

        async def wait_closed() -> None:
            pass

        sock = SimpleNamespace(getsockname=lambda: ("host", port))
        return SimpleNamespace(sockets=[sock], close=lambda: self._listeners.pop(port, None), wait_closed=wait_closed)

    def connect(self, process: Any, factory: Callable, port: int) -> tuple[Any, Any]:
        owner, make = self._listeners.get(port, (None, None))
        if owner is None or owner.dead:
            raise ConnectionRefusedError(f"nobody listens on {port}")
        here, there = SimTransport(self, process), SimTransport(self, owner)
        here.other, there.other = there, here
        here.protocol = factory()
        self._transports += [here, there]

        def accepted() -> None:
            there.protocol = make()
            there.protocol.connection_made(there)

        here.protocol.connection_made(here)
        there.arrive(accepted)
        return here, here.protocol

    def set_link(self, held: bool) -> None:
        self.link_held = held
        if not held:
            for transport in self._transports:
                transport.release()

    def gone(self, process: Any) -> None:
        """A process died: its connections are closed by the kernel, after what it had sent."""
        if process.client is not None:
            self.leave(process.client)
        for transport in self._transports:
            if transport.process is process:
                transport.abort()


class SimTransport:
    """One end of a connection. What is written arrives in order, some time later, also after the writer has died."""

    def __init__(self, network: Network, process: Any) -> None:
        self.network, self.process = network, process
        self.protocol: Any = None
        self.other: SimTransport = None  # type: ignore[assignment]
        self.closed = False
        self._last = 0.0
        self._held: list[Callable[[], None]] = []

    def write(self, data: bytes) -> None:
        if not self.closed and not self.process.dead:
            self.other.arrive(lambda data=bytes(data): self.other.feed(data))

    def arrive(self, what: Callable[[], None]) -> None:
        """Something comes in here."""
        world = self.network.world
        if self.network.link_held:
            self._held.append(what)
            return
        self._last = max(self._last, world.now + world.rng.uniform(0.0002, 0.002))
        world.at(self._last, self._hand_over, what)

    def release(self) -> None:
        held, self._held = self._held, []
        for what in held:
            self.arrive(what)

    def _hand_over(self, what: Callable[[], None]) -> None:
        if not self.process.dead:
            self.process.loop.call_soon(what)

    def feed(self, data: bytes) -> None:
        if self.closed:
            return
        self.process.dirty = True
        view = memoryview(data)
        while view and not self.closed:
            buffer = self.protocol.get_buffer(-1)
            size = min(len(buffer), len(view))
            buffer[:size] = view[:size]
            self.protocol.buffer_updated(size)
            view = view[size:]

    def abort(self) -> None:
        if self.closed:
            return
        self.closed = True
        if not self.process.dead:
            self.process.loop.call_soon(self.protocol.connection_lost, None)
        self.other.arrive(self.other._end)

    close = abort

    def _end(self) -> None:
        if not self.closed:
            self.closed = True
            self.protocol.eof_received()
            self.protocol.connection_lost(None)

    def set_write_buffer_limits(self, high: int = 0) -> None:
        pass

    def get_extra_info(self, name: str) -> Any:
        return SimpleNamespace(setsockopt=lambda *_: None)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


def message_name(data: bytes) -> str:
    """The tag of an encoded message (a msgpack array whose first element is its name); "" for anything else."""
    if not data:
        return ""
    at = 1 if data[0] & 0xF0 == 0x90 else 3 if data[0] == 0xDC else 0
    if not at:
        return ""
    size = data[at] & 0x1F if data[at] & 0xE0 == 0xA0 else 0
    return data[at + 1 : at + 1 + size].decode("ascii", "replace")
