"""What happens in one simulated world: sizes, requests and faults, all from one integer.

Knows: the kinds of faults and how to draw, describe and leave out some of them. A fault is a value of its own, so a schedule
that fails can be tried again without it (`shrunk`). Does not know services.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Config:
    counts: dict[str, int]
    transports: list[str]
    decode_blocks: int
    prefill_blocks: int
    max_num_seqs: int
    slab_slots: int
    chunk: int
    checksums: bool
    ticket_seconds: float
    store_seconds: float
    store_objects: int  # above so many the kvstore evicts
    queue_seconds: float
    prefill_seconds: float  # per token
    step_seconds: float
    tick_seconds: float
    latency: float
    overtake: float  # share of messages that may be overtaken


@dataclass(frozen=True)
class Request:
    at: float
    tokens: int
    group: int
    n: int = 1
    max_tokens: int = 32
    stop_at: int = 0  # a text stop after so many tokens
    cancel_after: float = 0.0
    deadline: float = 30.0
    stream: bool = True
    images: tuple[int, ...] = ()  # which pictures

    def words(self, number: int) -> str:
        name = f"request {number}" if number >= 0 else "a request"
        out = f"{name}: {self.tokens} tokens of group {self.group}, at most {self.max_tokens} of output"
        out += f", {self.n} choices" if self.n > 1 else ""
        out += f", a text stop after {self.stop_at}" if self.stop_at else ""
        out += f", with pictures {', '.join(map(str, self.images))}" if self.images else ""
        out += f"; its client leaves {self.cancel_after:.3f} s later" if self.cancel_after else ""
        return f"{out}; deadline {self.deadline:g} s, {'streamed' if self.stream else 'in one piece'}"


@dataclass(frozen=True)
class Message:
    """The nth message of a name is lost, comes twice, or comes later than those sent after it. Flags may be lost or late as
    well; of bytes written or read a slice may be late, or one come out wrong ("flip"), where checksums must find it."""

    name: str
    nth: int
    action: str
    seconds: float = 0.0

    def words(self) -> str:
        done = {
            "drop": "is lost",
            "double": "comes twice",
            "delay": f"comes {self.seconds:g} s late",
            "flip": "has a wrong byte",
        }
        return f"{self.name} number {self.nth} {done[self.action]}"

    def arm(self, world: Any, began: float) -> None:
        nth = world.network.counts[self.name] + self.nth
        world.network.faults[self.name, nth] = (self.action, self.seconds)


@dataclass(frozen=True)
class Late:
    """As a message that comes late, and no `cancel` reaches its receiver before it: what made it old is not known there."""

    name: str
    nth: int
    seconds: float

    def words(self) -> str:
        return f"{self.name} number {self.nth} comes {self.seconds:g} s late, and no Cancel reaches its receiver before it"

    def arm(self, world: Any, began: float) -> None:
        key = self.name, world.network.counts[self.name] + self.nth
        world.network.faults[key] = ("delay", self.seconds)
        world.network.unwarned[key] = self.seconds


@dataclass(frozen=True)
class When:
    """At the nth message of a name its sender or receiver is killed, or stopped for some seconds."""

    name: str
    nth: int
    whom: str
    what: str
    seconds: float

    def words(self) -> str:
        return f"at {self.name} number {self.nth} its {self.whom}: {self.what}, for {self.seconds:g} s"

    def arm(self, world: Any, began: float) -> None:
        def now(sender: Any, receiver: Any) -> None:
            process = sender if self.whom == "sender" else receiver
            _hurt(world, process, self.what, self.seconds)

        world.network.hooks[self.name, world.network.counts[self.name] + self.nth] = now


@dataclass(frozen=True)
class Hurt:
    """A process is killed (and another one takes its place), stopped, drained, cut off from the bus (both ways, or one), or a
    step of its engine fails."""

    what: str
    role: str
    index: int
    at: float
    seconds: float

    def words(self) -> str:
        return f"{self.role} {self.index}: {self.what}, for {self.seconds:g} s"

    def arm(self, world: Any, began: float) -> None:
        world.at(began + self.at, lambda: _hurt(world, world.places[self.role, self.index], self.what, self.seconds))
        world.trouble_until = max(world.trouble_until, began + self.at)


@dataclass(frozen=True)
class Span:
    """For some seconds: the bus is down, messages get lost, bytes between workers are held back, copies are slow."""

    what: str
    at: float
    seconds: float
    amount: float = 0.0

    def words(self) -> str:
        return f"{self.what}{f' ({self.amount:g})' if self.amount else ''} for {self.seconds:g} s"

    def arm(self, world: Any, began: float) -> None:
        def turn(on: bool) -> None:
            network = world.network
            world.network.happened[self.what] += on
            if self.what == "bus down":
                network.set_down(on)
                for process in world.processes:
                    process.unheard = world.now + 0.5
            elif self.what == "loss":
                network.loss = self.amount if on else 0.0
            elif self.what == "link held":
                network.set_link(on)
            else:
                world.slow = self.amount if on else 0.0

        world.at(began + self.at, turn, True)
        world.at(began + self.at + self.seconds, turn, False)
        world.trouble_until = max(world.trouble_until, began + self.at + self.seconds)


def _hurt(world: Any, process: Any, what: str, seconds: float) -> None:
    if process.dead or process.service is None or world.healed:
        return
    place = process.place
    world.network.happened[f"{what} {process.role}"] += 1

    def back() -> None:
        if world.places[place] is process:
            world.spawn(*place)

    if what == "kill":
        world.kill(process)
        world.at(world.now + seconds, back)
    elif what == "stop":
        world.pause(process)
        world.at(world.now + seconds, world.resume, process)
    elif what == "break":
        process.breaks = True
    elif what == "drain":
        world.terminate(process, 2.0)

        def end() -> None:
            if not process.dead:
                world.at(world.now + 0.5, end)
            else:
                back()

        end()
    else:
        world.cut(process, what.split()[1])

        def heal() -> None:
            world.cut(process, "")
            world.network.heal()

        world.at(world.now + seconds, heal)
    world.trouble_until = max(world.trouble_until, world.now + seconds)


PROBES = (Request(0.0, 200, 0, stream=False), Request(0.0, 40, 1, n=2))


@dataclass(frozen=True)
class Plan:
    seed: int
    config: Config
    requests: tuple[Request, ...]
    faults: tuple[Any, ...]
    probes: tuple[Request, ...] = ()  # asked after everything was healed: they must succeed

    def describe(self) -> str:
        """What happens, in words, in the order of time; what waits for a message comes last."""
        c = self.config
        what = ", ".join(f"{count} {role}" for role, count in c.counts.items() if count)
        sizes = ", ".join(f"{name} {getattr(c, name)}" for name in Config.__dataclass_fields__ if name != "counts")
        steps = [(request.at, request.words(number)) for number, request in enumerate(self.requests)]
        steps += [(getattr(fault, "at", float("inf")), fault.words()) for fault in self.faults]
        steps += [(float("inf"), f"at the end: {request.words(-1)}; it must succeed") for request in self.probes]
        lines = [f"seed {self.seed}: {what}", f"  {sizes}"]
        for at, words in sorted(steps, key=lambda step: step[0]):
            lines.append(f"  {'' if at == float('inf') else f'{at:.3f} s: '}{words}")
        return "\n".join(lines)


NAMES = (
    "Admit", "Admitted", "Run", "Accepted", "Bind", "Bound", "Commit", "Verdict", "WriterDone", "Done", "Fail", "TicketStatus",
    "Cancel", "Out", "Resume", "Resumed", "Refused", "KvLookup", "KvFound", "KvReserve", "KvReserved", "KvCommit", "KvStored",
    "KvRelease", "KvReleased", "KvEvents", "Presence", "Ping", "Pong",
)  # fmt: skip
USUAL = ("Admit", "Admitted", "Run", "Accepted", "Bind", "Bound", "Commit", "Verdict", "Cancel", "Out")
RARE = ("Fail", "WriterDone", "TicketStatus", "Resume", "Resumed", "Done", "Refused", "KvRelease", "KvReleased", "KvStored")
STATES = (
    "Admit", "Admitted", "Run", "Accepted", "Bind", "Bound", "Commit", "Verdict", "Out", "Cancel", "Fail", "WriterDone",
    "TicketStatus", "KvLookup", "KvFound", "KvReserve", "KvReserved", "KvCommit", "KvRelease",
)  # fmt: skip
OF_STORE = (
    "KvLookup", "KvFound", "KvReserve", "KvReserved", "KvReserved", "KvCommit", "KvStored", "KvRelease", "KvReleased",
    "KvEvents",
)  # fmt: skip
STATES_OF_STORE = ("KvLookup", "KvFound", "KvFound", "KvReserve", "KvReserved", "KvCommit", "KvRelease")
OF_VISION = ("Deposit", "Deposited", "Identify", "Identified", "Encode", "Encoded", "Encode", "EncodeCancel", "Working")
STATES_OF_VISION = ("Deposit", "Deposited", "Identify", "Identified", "Encode", "Encode", "Encoded", "EncodeCancel")
LATE = ("Admit", "Admit", "Run", "Bind", "Bound", "Bound", "Bound")
PATIENCE = {  # seconds that whoever asks or is asked waits: what comes just before they are over is taken
    "Admit": 1.0, "Admitted": 1.0, "Run": 1.0, "Accepted": 1.0, "Bind": 0.5, "Bound": 0.5, "Commit": 0.5, "Verdict": 0.5,
    "WriterDone": 0.5, "Done": 0.5, "TicketStatus": 0.5, "Cancel": 1.0, "Resume": 1.0, "Resumed": 1.0, "KvLookup": 0.1,
    "KvFound": 0.1, "KvReserve": 1.0, "KvReserved": 1.0, "KvCommit": 2.0, "KvStored": 2.0, "KvRelease": 0.5, "KvReleased": 0.5,
    "Deposit": 1.0, "Deposited": 1.0, "Identify": 1.0, "Identified": 1.0, "Encode": 1.0, "Encoded": 1.0, "EncodeCancel": 1.0,
}  # fmt: skip
CUTS = ("cut lose", "cut lose", "cut hold", "cut hold", "cut deaf", "cut mute")  # both directions; only in; only out


def draw(seed: int) -> Plan:
    rng = random.Random(seed)
    pick = rng.choice
    about = rng.random()
    stored, left = about < ABOUT_STORE, about >= 1.0 - ABOUT_LEFT
    counts = {"gateway": pick((1, 1, 2)), "prefill": pick((1, 1, 2)), "decode": pick((1, 1, 2)), "kvstore": pick((0, 1))}
    config = Config(
        counts=counts,
        transports=pick((["shm"], ["tcp"], ["shm", "tcp"])),
        decode_blocks=pick((8, 12, 24)),
        prefill_blocks=pick((8, 12, 24)),
        max_num_seqs=pick((2, 4, 8)),
        slab_slots=pick((0, 1, 2)),
        chunk=pick((128, 256, 1024)),
        checksums=pick((False, True)),
        ticket_seconds=pick((0.5, 1.0, 2.0)),
        store_seconds=pick((0.5, 1.0, 3.0)),
        store_objects=pick((3, 6, 400)),
        queue_seconds=pick((1.0, 20.0)),
        prefill_seconds=pick((0.0001, 0.0005, 0.001)),
        step_seconds=pick((0.01, 0.03)),
        tick_seconds=pick((0.02, 0.05, 0.1)),
        latency=pick((0.0005, 0.003)),
        overtake=pick((0.0, 0.0, 0.1)),
    )
    if stored:  # prefills that forget soon share what a small kvstore keeps for moments
        counts |= {"prefill": pick((1, 2, 2)), "kvstore": 1}
        sizes = {"prefill_blocks": pick((5, 5, 8)), "store_seconds": pick((0.5, 0.5, 1.0)), "store_objects": pick((3, 3, 6))}
        config = replace(config, **sizes)
    requests = tuple(
        Request(
            at=round(rng.uniform(0.0, 2 * REQUESTS_WITHIN if stored else REQUESTS_WITHIN), 3),
            tokens=rng.randint(130 if stored else 3, 500),
            group=rng.randint(0, 1),
            n=pick((1, 1, 1, 2)),
            max_tokens=pick((1, 2, 8, 32)),
            stop_at=pick((0, 0, 0, 3)),
            cancel_after=round(rng.uniform(0.001, 0.5), 3) if rng.random() < (0.75 if left else 0.25) else 0.0,
            deadline=pick((2.0, 8.0, 30.0, 30.0)),
            stream=pick((True, False)),
        )
        for _ in range(rng.randint(3 if stored else REQUESTS[0], REQUESTS[1]))
    )
    special = _fault_of_store if stored else _too_late if left else _fault
    faults = tuple((special if rng.random() < 0.7 else _fault)(rng, counts) for _ in range(pick(FAULTS)))
    probes = PROBES if rng.random() < PROBED else ()
    eyes = random.Random(f"images of {seed}")  # apart: what has no images is what it was before there were any
    if eyes.random() < ABOUT_IMAGES:
        counts["vision"] = eyes.choice((1, 1, 2))
        pictures = [tuple(eyes.randrange(PICTURES) for _ in range(eyes.choice((0, 1, 1, 2)))) for _ in requests]
        requests = tuple(replace(request, images=images) for request, images in zip(requests, pictures, strict=True))
        faults += tuple(_fault_of_vision(eyes, counts) for _ in range(eyes.choice((1, 1, 2))))
    reader = random.Random(f"readers of {seed}")  # apart, as above
    if stored and reader.random() < ABOUT_READERS:
        config, faults = _slow_reader(config, counts), (*faults, _slow_read(reader))
    return Plan(seed, config, requests, faults, probes)


# How dense a schedule is: what finds most taken-away guards per second of computing (`benchmarks/simulation.md`).
REQUESTS, REQUESTS_WITHIN = (1, 6), 0.8
FAULTS, FAULTS_WITHIN, LONG = (1, 1, 2, 2, 3, 4), 1.0, 3.0
PROBED, ABOUT_STORE, ABOUT_LEFT = 0.2, 0.3, 0.15
ABOUT_IMAGES, PICTURES = 0.2, 4
ABOUT_READERS = 0.3  # of those about the store


def _fault(rng: random.Random, counts: dict[str, int]) -> Any:
    at, pick = round(rng.uniform(0.0, FAULTS_WITHIN), 3), rng.choice
    seconds = round(pick((rng.uniform(0.05, 0.6), rng.uniform(0.3, LONG))), 3)
    role = pick([role for role in ("prefill", "decode", "kvstore", "gateway", "prefill", "decode") if counts[role]])
    index = rng.randrange(counts[role])
    kind = rng.random()
    if kind < 0.06:
        name = pick(("Flag", "Flag", "Bytes", "Read"))
        return Message(name, rng.randint(1, 6), pick(("drop" if name == "Flag" else "flip", "delay")), seconds)
    if kind < 0.34:
        name = pick(pick((USUAL, USUAL, NAMES, RARE)))
        return Message(name, rng.randint(1, 8), pick(("drop", "double", "delay")), _late(rng, name, seconds))
    if kind < 0.40:
        return _too_late(rng, counts)
    if kind < 0.60:
        return When(pick(STATES), rng.randint(1, 6), pick(("sender", "receiver")), pick(("kill", "stop", "stop")), seconds)
    if kind < 0.80:
        what = pick(("kill", "stop", "stop", "drain", "break", pick(CUTS), pick(CUTS)))
        return Hurt(what, role, index, at, seconds)
    what = pick(("bus down", "loss", "link held", "slow", "slow"))
    amount = {"loss": pick((0.1, 0.5)), "slow": pick((0.05, 0.5, 3.0))}.get(what, 0.0)
    return Span(what, at, min(seconds, 4.0), amount)


def _late(rng: random.Random, name: str, seconds: float) -> float:
    """Seconds that a message is late: often just not too late."""
    return round(PATIENCE[name] * rng.uniform(0.5, 1.0), 3) if name in PATIENCE and rng.random() < 0.4 else seconds


def _too_late(rng: random.Random, counts: dict[str, int]) -> Late:
    """What is taken only by whoever does not know that it is over."""
    name = rng.choice(LATE)
    late = PATIENCE[name] * (rng.uniform(0.5, 1.0) if name == "Bound" else rng.uniform(1.0, 2.5))
    return Late(name, rng.randint(1, 5), round(late, 3))


def _fault_of_vision(rng: random.Random, counts: dict[str, int]) -> Any:
    """What may go wrong between gateways or prefills and vision workers."""
    at, pick = round(rng.uniform(0.0, FAULTS_WITHIN), 3), rng.choice
    seconds, kind = round(pick((rng.uniform(0.05, 0.6), rng.uniform(0.3, LONG))), 3), rng.random()
    if kind < 0.35:
        name = pick(OF_VISION)
        return Message(name, rng.randint(1, 5), pick(("drop", "double", "delay", "delay")), _late(rng, name, seconds))
    if kind < 0.5:
        return Message("Bytes", rng.randint(1, 8), pick(("flip", "delay")), seconds)
    if kind < 0.7:
        whom, what = pick(("sender", "receiver")), pick(("kill", "stop", "stop"))
        return When(pick(STATES_OF_VISION), rng.randint(1, 5), whom, what, seconds)
    if kind < 0.85:
        return Hurt(pick(("kill", "stop", "stop", "drain", pick(CUTS))), "vision", rng.randrange(counts["vision"]), at, seconds)
    return Span(pick(("slow", "slow", "link held")), at, min(seconds, 4.0), pick((0.05, 0.5, 3.0)))


def _fault_of_store(rng: random.Random, counts: dict[str, int]) -> Any:
    """What may go wrong between workers and the kvstore."""
    at, pick = round(rng.uniform(0.0, 2 * FAULTS_WITHIN), 3), rng.choice
    seconds, kind = round(rng.uniform(0.3, LONG), 3), rng.random()
    if kind < 0.4:
        name = pick(OF_STORE)
        return Message(name, rng.randint(1, 4), pick(("drop", "double", "delay", "delay")), _late(rng, name, seconds))
    if kind < 0.5:
        return Message(pick(("Read", "Bytes")), rng.randint(1, 6), pick(("flip", "delay", "delay")), seconds)
    if kind < 0.75:
        whom = pick(("sender", "receiver"))
        return When(pick(STATES_OF_STORE), rng.randint(1, 4), whom, pick(("kill", "stop", "stop", "stop")), seconds)
    return Span("slow", at, seconds, pick((0.3, 1.0, 3.0)))


def _slow_reader(config: Config, counts: dict[str, int]) -> Config:
    """A kvstore that is full at once and pins for moments: what a worker found may be another object when it is read."""
    counts |= {"prefill": 2}
    return replace(config, store_objects=3, store_seconds=0.5, prefill_blocks=5)


def _slow_read(rng: random.Random) -> Message:
    """Longer than pins last, shorter than a worker goes on with a read that nobody waits for."""
    return Message("Read", rng.randint(1, 3), "delay", round(rng.uniform(0.7, 2.1), 3))


SIMPLE = {"overtake": 0.0, "checksums": False, "slab_slots": 0, "max_num_seqs": 8, "decode_blocks": 24, "prefill_blocks": 24,
          "store_objects": 400, "latency": 0.0005}  # fmt: skip
SIMPLE_REQUEST = {"n": 1, "stop_at": 0, "cancel_after": 0.0, "stream": False, "deadline": 30.0, "max_tokens": 8,
                  "images": ()}  # fmt: skip


def shrunk(plan: Plan, fails: Callable[[Plan], bool], tries: int = 300) -> Plan:
    """Leave faults, requests and processes out, one by one, and take the plainest sizes, as long as it still fails in the same
    way (`fails` says so)."""
    before = None
    while plan != before and tries > 0:  # what became plainer may make more needless
        before = plan
        for part in ("faults", "requests"):
            index = 0
            while index < len(getattr(plan, part)) and tries > 0:
                kept = getattr(plan, part)
                less = replace(plan, **{part: kept[:index] + kept[index + 1 :]})
                tries -= 1
                if fails(less):
                    plan = less
                else:
                    index += 1
        for change in _plainer(plan):
            candidate = change(plan)
            if candidate != plan and tries > 0:
                tries -= 1
                plan = candidate if fails(candidate) else plan
    return plan


def _plainer(plan: Plan) -> list[Callable[[Plan], Plan]]:
    """Changes, each of which makes a plan plainer."""

    def sizes(name: str, value: Any) -> Callable[[Plan], Plan]:
        return lambda p: replace(p, config=replace(p.config, **{name: value}))

    def count(role: str, least: int) -> Callable[[Plan], Plan]:
        used = max((fault.index + 1 for fault in plan.faults if isinstance(fault, Hurt) and fault.role == role), default=least)
        return lambda p: replace(p, config=replace(p.config, counts=p.config.counts | {role: max(least, used)}))

    def request(number: int, name: str, value: Any) -> Callable[[Plan], Plan]:
        def change(p: Plan) -> Plan:
            changed = replace(p.requests[number], **{name: value})
            return replace(p, requests=(*p.requests[:number], changed, *p.requests[number + 1 :]))

        return change

    out: list[Callable[[Plan], Plan]] = [lambda p: replace(p, probes=())]
    out += [count("vision", 0)] if "vision" in plan.config.counts else []
    out += [count("kvstore", 0), count("gateway", 1), count("prefill", 1), count("decode", 1)]
    out += [sizes(name, value) for name, value in SIMPLE.items()]
    return out + [request(n, name, value) for n in range(len(plan.requests)) for name, value in SIMPLE_REQUEST.items()]


def mix(plans: Counter[str], plan: Plan) -> None:
    """Count what a plan holds."""
    for fault in plan.faults:
        match fault:
            case Message(name, _, action):
                plans[f"{action} {name}"] += 1
            case Late(name):
                plans[f"late {name}"] += 1
            case When(name, _, whom, what):
                plans[f"{what} {whom} at {name}"] += 1
            case Hurt(what, role):
                plans[f"{what} {role}"] += 1
            case Span(what):
                plans[what] += 1
