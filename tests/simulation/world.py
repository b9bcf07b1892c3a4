"""A whole Headrace in one thread: processes that can be stopped and killed, a network, memories, clients; and what must hold.

Knows: the order in which things happen (one heap of events, one loop per process), every client's request, and the
invariants, which it checks after each turn of each process. Does not know how schedules are made.

    world = World(plan)
    world.run()
    world.violations            # empty, or what was seen, in words
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import traceback
from array import array
from base64 import b64encode
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from zlib import crc32

import nats.errors
from clock import ProcessLoop, Schedule
from network import Network
from simulated import (
    ATTEMPTS,
    BLOCK_BYTES,
    CLASSES,
    CLOCK,
    IMAGE_TOKEN,
    Broken,
    answer_length,
    fresh,
    meaning,
    picture,
    prompt,
    rows,
    settings,
)  # fmt: skip

from headrace.bus import BusError, StartError
from headrace.bus import messages as m
from headrace.gateway.dispatch import Record
from headrace.gateway.errors import GatewayError
from headrace.gateway.images import Seen, expand
from headrace.kv.grants import owner, store
from headrace.kv.hashing import BlockHasher
from headrace.recipe import ImageSource

NAMESPACE = bytes(16)
UNSEEN = 0.15  # seconds that blocks may be in nobody's books: between two tasks' hands
LATE = 0.4  # seconds after its deadline by which a request must have ended
LEASE = 3.0  # seconds after the last fault in which somebody may still be thought dead
QUIET = 9.0  # seconds after the last fault and request in which everything must be given back
HANGS = 12.0  # seconds after the last fault in which every request must end


class Violation(Exception):
    pass


@dataclass(eq=False)
class Process:
    world: Any
    role: str
    number: int
    place: tuple[str, int]  # role, index: a restarted process takes the place of the old one
    shm: bool
    loop: ProcessLoop = None  # type: ignore[assignment]
    service: Any = None
    bus: Any = None
    client: Any = None
    dead: bool = False
    paused: bool = False
    cut: str = ""  # "lose" | "hold": nothing passes between it and the bus
    dirty: bool = False  # bytes arrived in its memory
    seen: Any = None
    pool: Any = None  # of its engine, once it is ready
    engine: Any = None
    tickets: Any = None
    doubtful: tuple[float, str] | None = None
    breaks: bool = False  # its engine's next step fails
    unheard: float = 0.0  # when its clients could last not expect it to be in time

    @property
    def ready(self) -> bool:
        return not self.dead and self.service is not None and self.service.state == "ready"


@dataclass(eq=False)
class Asked:
    """One client and what it saw."""

    number: int
    plan: Any
    ids: array
    gateway: Process
    began: float
    record: Record | None = None
    task: Any = None
    tokens: list[list[int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    ended: str = ""
    usage: m.Usage | None = None
    error: Any = None
    sent: bool = False  # something has left for the client
    left: bool = False  # the client has gone

    # ------------------------------------------------------------ the sink of its record

    def fresh(self) -> None:
        self.tokens, self.finish = [[] for _ in range(self.plan.n)], [""] * self.plan.n

    def tokens_(self, choice: int, ids: array) -> int:
        world, have = self.gateway.world, self.tokens[choice]
        if self.ended and not self.left:
            world.violate(f"request {self.number} got tokens after its end")
        for one in ids:
            number, attempt, index, position = meaning(one)
            if number != self.number or index != choice:
                world.violate(f"request {self.number}, choice {choice} got a token of request {number}, choice {index}")
            running = next((part for part in self.record.parts if part.first_choice == choice), self.record)
            if attempt != running.attempt % ATTEMPTS:
                world.violate(f"request {self.number} got a token of attempt {attempt}; {running.attempt} is running")
            if position != len(have):
                world.violate(f"request {self.number} got token {position} of choice {choice} after {len(have)}")
            have.append(one)
        stop = self.plan.stop_at
        return stop if stop and len(have) >= stop else -1


class Sink:
    """`dispatch.Sink` for one client."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    def tokens(self, choice: int, ids: array, logprobs: Any) -> int:
        return self.asked.tokens_(choice, ids)

    def finish(self, choice: int, reason: str, last: bool) -> None:
        asked = self.asked
        if asked.finish[choice]:
            asked.gateway.world.violate(f"choice {choice} of request {asked.number} finished twice")
        asked.finish[choice] = reason

    def end(self, usage: m.Usage) -> None:
        self.asked.usage = usage
        self.asked.gateway.world.ended(self.asked, "answer")

    def tick(self, now: float, silence: float) -> None:
        pass

    def flush(self) -> None:
        self.asked.sent = True

    def fail(self, error: Any) -> None:
        self.asked.error = error
        self.asked.gateway.world.ended(self.asked, "error")


class World:
    def __init__(self, plan: Any) -> None:
        self.plan, self.config = plan, plan.config
        self.schedule = Schedule(1000.0)
        self.at = self.schedule.at
        self.rng = random.Random(plan.seed)
        self.over = self.healed = False
        self.violations: list[str] = []
        self.processes: list[Process] = []
        self.places: dict[tuple[str, int], Process] = {}
        self.memories: dict[str, Any] = {}
        self.pictures: dict[bytes, list[Any]] = {}  # hash of a block -> the images in it and before it
        self.network = Network(self, plan.config.latency, plan.config.overtake)
        self.asked: list[Asked] = []
        self.outcomes: Counter[str] = Counter()
        self.slow = 0.0  # seconds that a slice takes at most
        self.slice_bytes = 64
        self.traced = False  # print every message that arrives
        self.trouble_until = 0.0
        self._names = itertools.count(1)
        self._open = 0  # requests that have not ended
        CLOCK.world, CLOCK.schedule = self, self.schedule
        fresh(self.config)

    # ------------------------------------------------------------ time

    @property
    def now(self) -> float:
        return self.schedule.now

    @property
    def turns(self) -> int:
        return self.schedule.turns

    def count(self) -> int:
        return next(self._names)

    def slice_seconds(self) -> float:
        return self.rng.uniform(0.0, self.slow) if self.slow else 0.0001

    def run_until(self, until: float, done: Any = None, every: float = 0.02) -> bool:
        """What happens until then, or until `done` says so, which is asked every so many simulated seconds."""
        while done is None or not done():
            self.schedule.run(until if done is None else min(until, self.now + every))
            if self.violations:
                raise Violation
            if self.now >= until:
                return done is not None and done()
        return True

    # ------------------------------------------------------------ processes

    def spawn(self, role: str, index: int) -> Process:
        place = (role, index)
        process = Process(self, role, len(self.processes), place, "shm" in self.config.transports)
        process.loop = ProcessLoop(self, process, self._watcher(process))
        self.processes.append(process)
        self.places[place] = process

        async def main() -> None:
            service = CLASSES[role].__new__(CLASSES[role])
            service.process, service.cancelled = process, {}
            service.__init__(settings(role, self.config, f"{role}{index}"))
            process.service = service
            await service.start()

        def started(task: asyncio.Task) -> None:
            """A start that failed (the bus went down in it) ends the process; whoever supervises it starts another one."""
            if task.cancelled() or task.exception() is None or process.dead or self.over:
                return
            if not isinstance(task.exception(), (BusError, StartError, nats.errors.Error)):
                self.violate(f"the start of {role}{index} failed: {task.exception()!r}")
            self.network.happened[f"failed start of {role}"] += 1
            self.at(self.now, self.kill, process)
            self.at(self.now + 0.5, lambda: self.spawn(role, index) if self.places[place] is process else None)

        process.loop.create_task(main()).add_done_callback(started)
        return process

    def kill(self, process: Process) -> None:
        """SIGKILL: nothing of it runs any more, the kernel closes its connections and drops its lock."""
        if process.dead:
            return
        process.dead = True
        process.loop.die()
        self.network.gone(process)
        for memory in self.memories.values():
            if memory.process is process:
                memory.alive = False
        for asked in self.asked:
            if asked.gateway is process and not asked.ended:
                self.ended(asked, "connection lost")

    @staticmethod
    def pause(process: Process) -> None:
        process.paused = True
        if not process.dead:
            process.loop.stop_running()

    def resume(self, process: Process) -> None:
        if process.paused and not process.dead:
            process.paused = False
            process.loop.go_on()
            process.unheard = self.now

    def terminate(self, process: Process, budget: float) -> None:
        """SIGTERM: drain within its budget, stop, exit."""
        if process.dead or process.service is None or process.service.state != "ready":
            return
        service = process.service
        service.settings.drain_seconds = budget
        service.set_state("draining")

        async def end() -> None:
            try:
                async with asyncio.timeout(budget):
                    await service.drain()
            except TimeoutError:
                pass
            try:
                async with asyncio.timeout(10.0):
                    await service.stop()
            except TimeoutError:
                self.violate(f"{service.instance} did not stop within 10 s of its drain")
            self.at(self.now, self.kill, process)

        self.schedule.enter(process.loop)
        process.loop.create_task(end())

    def cut(self, process: Process, how: str) -> None:
        process.cut = how
        process.unheard = self.now

    # ------------------------------------------------------------ clients

    def ask(self, number: int, plan: Any) -> None:
        ready = [p for (role, _), p in sorted(self.places.items()) if role == "gateway" and p.ready and not p.paused]
        if not ready:
            self.outcomes["no gateway"] += 1
            return
        gateway = ready[number % len(ready)]
        ids = prompt(number, plan.group, plan.tokens, len(plan.images))
        asked = Asked(number, plan, ids, gateway, self.now)
        asked.fresh()
        self.asked.append(asked)
        self._open += 1
        self.schedule.enter(gateway.loop)
        asked.task = gateway.loop.create_task(self._serve(asked))
        if plan.cancel_after:
            self.at(self.now + plan.cancel_after, self._client_leaves, asked)

    async def _serve(self, asked: Asked) -> None:
        service, plan = asked.gateway.service, asked.plan
        group = service.router.group("sim")
        if group is None:
            return self.ended(asked, "no group")
        sampling = m.Sampling(seed=asked.number, max_tokens=plan.max_tokens, n=plan.n)
        try:
            seen = await self._look(service, asked, group) if plan.images else None
        except GatewayError as error:
            if not asked.ended:
                Sink(asked).fail(error)
            return
        record = asked.record = Record(
            f"{service.instance[8:]}r{asked.number}", sink=Sink(asked), group=group, ids=asked.ids,
            hashes=block_hashes(group.layout_id, asked.ids.tobytes(), m.image_starts(seen.spans) if seen else ()),
            namespace=NAMESPACE, sampling=sampling, seconds=plan.deadline, received=asked.began,
        )  # fmt: skip
        record.seen, record.look_again = seen, service.images.again
        await service.dispatcher.run(record)
        if not asked.ended:
            self.ended(asked, "shed")
            if not asked.left:
                self.violate(f"request {asked.number} was shed though its client was there")

    @staticmethod
    async def _look(service: Any, asked: Asked, group: Any) -> Seen:
        """As the gateway's api does: its images are identified, and their tokens stand in the prompt."""
        plan = asked.plan
        sources = [ImageSource("data_url", f"data:image/png;base64,{b64encode(picture(n)).decode()}") for n in plan.images]
        request, until = f"{service.instance[8:]}r{asked.number}", asked.began + plan.deadline
        seen = await service.images.look(request, sources, NAMESPACE, group, until, "")
        asked.ids, seen.spans = expand(asked.ids, IMAGE_TOKEN, seen.found)
        return seen

    def _client_leaves(self, asked: Asked) -> None:
        if not asked.ended and not asked.gateway.dead:
            asked.left = True
            asked.gateway.loop.call_soon(asked.task.cancel)
            self.ended(asked, "client left")

    def ended(self, asked: Asked, how: str) -> None:
        if asked.ended:
            if asked.ended == "client left":
                return
            self.violate(f"request {asked.number} ended twice: {asked.ended}, then {how}")
        asked.ended = how
        self._open -= 1
        self.outcomes[how if how != "error" else f"error {asked.error.code}"] += 1
        if how == "answer":
            self._check_answer(asked)

    def _check_answer(self, asked: Asked) -> None:
        plan, usage = asked.plan, asked.usage
        total = 0
        for choice, have in enumerate(asked.tokens):
            natural = answer_length(asked.number, choice)
            want = min(natural, plan.max_tokens)
            reason = "length" if natural >= plan.max_tokens else "stop"
            counted = min(natural + 1, plan.max_tokens)  # EOS counts
            if plan.stop_at and len(have) >= plan.stop_at:
                reason, counted = "stop", plan.stop_at
            elif len(have) != want:
                self.violate(f"request {asked.number}, choice {choice}: {len(have)} tokens of {want}, then it ended well")
            if asked.finish[choice] != reason:
                self.violate(f"request {asked.number}, choice {choice} finished by {asked.finish[choice]!r}, not {reason!r}")
            total += counted
        if usage.prompt_tokens != len(asked.ids) or not 0 <= usage.cached_tokens <= len(asked.ids):
            self.violate(f"request {asked.number}: {usage} for a prompt of {len(asked.ids)} tokens")
        if usage.completion_tokens != total:
            self.violate(f"request {asked.number}: {usage.completion_tokens} completion tokens; {total} count")

    # ------------------------------------------------------------ what must hold

    def violate(self, what: str) -> None:
        if not self.over:
            self.violations.append(f"{self.now - 1000.0:.3f} s: {what}")
            self.schedule.halted = True

    def on_log(self, event: dict) -> None:
        """Services log an error where something is broken in them."""
        error = event.get("exc_info")
        if self.over or error is None and event.get("event") != "hand-off refused":
            return
        error = sys.exc_info()[1] if error is True else error
        if isinstance(error, Broken):
            return
        where = "".join(traceback.format_exception(error)[-2:]).strip() if error is not None else ""
        self.violate(f"{event.get('event')}: {event.get('why', '')} {where}".replace("\n", " | "))

    def spinning(self, process: Process, tasks: list[str]) -> None:
        self.violate(f"{process.role}{process.place[1]} spins: many turns in no time; its tasks: {', '.join(tasks)}")

    def on_exception(self, process: Process, context: dict) -> None:
        if not (self.over or process.dead):
            error = context.get("exception")
            self.violate(f"{process.role}{process.place[1]}: {context.get('message')}: {error!r}")

    def landed(self, memory: Any, generation: int, region: str, offset: int, nbytes: int) -> None:
        """Bytes of a generation were just placed. Whose memory is that now?"""
        process = memory.process
        process.dirty = True
        if process.dead or memory._closed or self.over:
            return
        if region == "mailbox":  # wherever that is by now: a flag of another generation is no flag
            memory.placed[generation].add((region, offset))
            return
        if region in ("intake", "images"):
            return self._landed_for(process, generation, region, offset, nbytes)
        for start in range(offset, offset + nbytes, BLOCK_BYTES) if region == "kv" else (offset,):
            memory.placed[generation].add((region, start))
        service = process.service
        if process.role == "decode":
            landing = service.landing
            for ticket, landed in landing.landed.items():
                if landed.wire.generation == generation:
                    phase = landing.ledger.get(ticket).phase
                    if phase in (owner.COMMITTED, owner.ADMITTED):
                        self.violate(f"bytes of generation {generation} landed in {region!r} when it was {phase}")
                    if region == "kv" and offset // BLOCK_BYTES not in landed.reservation.blocks:
                        self.violate(f"generation {generation} wrote block {offset // BLOCK_BYTES}, which is not its own")
                    return
        else:
            for grant, pending in service.store.pending.items():
                if pending.objects[0].generation == generation:
                    if service.store.grants.get(grant).phase == store.CHECKING:
                        self.violate(f"bytes of generation {generation} landed while it was checked")
                    if not any(o.offset <= offset and offset + nbytes <= o.offset + o.nbytes for o in pending.objects):
                        self.violate(f"generation {generation} wrote at {offset}, which is not its own")
                    return
        self.violate(f"bytes of generation {generation} landed in {region!r} of {service.instance} after it was over")

    def _landed_for(self, process: Process, generation: int, region: str, offset: int, nbytes: int) -> None:
        """Bytes of an image, or of its embeddings."""
        service = process.service
        staging = service.staging if region == "intake" else service.sight.staging
        for grant, state in staging._grants:
            if state.generation == generation:
                room = staging._rooms[grant]
                if state.phase == store.CHECKING:
                    self.violate(f"bytes of generation {generation} landed in {region!r} while it was checked")
                if not any(o <= offset and offset + nbytes <= o + n for o, n in zip(room.offsets, room.sizes, strict=True)):
                    self.violate(f"generation {generation} wrote at {offset} of {region!r}, which is not its own")
                break
        else:
            self.violate(f"bytes of generation {generation} landed in {region!r} of {service.instance} after it was over")
        try:
            staging.check()
        except AssertionError as error:
            self.violate(f"{service.instance}, {region!r}: {error}")

    def submitting(self, request: Any) -> None:
        """A prompt is given to its engine: are these the embeddings of its images, and are its blocks no other images'?"""
        for image in request.images:
            if image.embeddings is not None and bytes(image.embeddings) != rows(image.digest, image.tokens):
                self.violate(f"{request.request} was given other embeddings than those of its image at {image.start}")
        for number, block in enumerate(request.hashes, 1):
            within = [(i.start, i.digest) for i in request.images if i.start < 128 * number]
            if self.pictures.setdefault(block, within) != within:
                self.violate(f"block {number} of {request.request} has the hash of a block of other images")

    def admitting(self, process: Process, reservation: Any, key: str) -> None:
        """Is everything there that the reservation stands for?"""
        service = process.service
        memory, landing = service.memory, service.landing
        wire = next((x.wire for x in landing.landed.values() if x.reservation is reservation), None)
        if wire is None:
            return self.violate(f"{key} was admitted without a ticket")
        placed = memory.placed[wire.generation]
        missing = [b for b in reservation.blocks if ("kv", b * BLOCK_BYTES) not in placed]
        if missing or ("slab", wire.slab_offset) not in placed:
            self.violate(f"{key} was admitted without blocks {missing} or its slab")
        if ("mailbox", wire.mailbox) not in placed:  # a late one of an older generation may have taken its place since
            self.violate(f"{key} was admitted without its flag")

    def _watcher(self, process: Process) -> Callable[[], None]:
        """What is called after each turn of a process: it looks at its memory, if something about that has changed."""
        if process.role in ("gateway", "vision"):
            return lambda: None
        if process.role == "kvstore":
            return lambda: self._watch_store(process)
        return lambda: self._watch_worker(process)

    def _watch_worker(self, process: Process) -> None:
        pool = process.pool
        if pool is None:
            service = process.service
            if service is None or service.state != "ready":
                return
            pool = process.pool = service.engine.pool
            process.engine = service.engine
            process.tickets = service.landing.ledger.live if process.role == "decode" else service.tickets.live
        seen = (pool._clock, len(pool._free), len(pool._cached), len(process.tickets), process.engine._steps)
        if seen != process.seen or process.dirty or process.doubtful:
            process.seen, process.dirty = seen, False
            if not process.dead:
                self._check_worker(process, process.service, pool)

    def _watch_store(self, process: Process) -> None:
        if process.service is None or process.dead or process.service.store is None:
            return
        s = process.service.store
        evicted = s.counters["evicted_blocks"] + s.counters["evicted_states"]
        seen = (len(s.objects), s.arena.used, len(s.held.live), len(s.grants.live), evicted)
        if seen != process.seen or process.dirty:
            process.seen, process.dirty = seen, False
            self._check_store(s)

    def _check_worker(self, process: Process, service: Any, pool: Any) -> None:
        engine = service.engine
        owners: dict[int, int] = {}
        for source in (engine.owners(), service.store.owners(), service.owners()):
            for block, count in source.items():
                owners[block] = owners.get(block, 0) + count
        try:
            pool.check(owners)
            process.doubtful = None
        except AssertionError as error:
            if process.doubtful is None:
                process.doubtful = (self.now, str(error))
            elif self.now - process.doubtful[0] > UNSEEN:
                self.violate(f"{service.instance}: {error}")
        for block_hash, block in pool._index.items():
            if engine._block(block) != block_hash * (BLOCK_BYTES // 16):
                self.violate(f"{service.instance}: cached block {block} does not hold the bytes of its hash")
        if process.role != "decode":
            return
        for sequence in engine._decoding:
            full, rest = divmod(sequence.prompt, 128)
            for index in range(full + bool(rest and len(sequence.hashes) == full)):
                if engine._block(sequence.table[index]) != engine._content(sequence, index, sequence.prompt):
                    self.violate(f"{service.instance}: block {index} of running {sequence.request.request} was overwritten")
        landing, mine = service.landing, {}
        quarantined = 0
        for ticket, state in landing.ledger:
            quarantined += len(state.blocks) if state.quarantined else 0
            for block in state.blocks:
                if block in mine:
                    self.violate(f"block {block} belongs to tickets {mine[block]} and {ticket}")
                mine[block] = ticket
        for sequence in engine._decoding:
            for block in sequence.table:
                if block in mine and landing.ledger.live[mine[block]].phase != owner.ADMITTED:
                    self.violate(f"block {block} belongs to ticket {mine[block]} and to running {sequence.request.request}")
        if quarantined != pool.quarantined:
            self.violate(f"{service.instance}: {pool.quarantined} blocks are in quarantine, tickets say {quarantined}")

    def _check_store(self, s: Any) -> None:
        try:
            s.check()
        except AssertionError as error:
            self.violate(f"kvstore: {error}")
        for stored in s.objects:
            data = s.view[stored.offset : stored.offset + stored.nbytes]
            if crc32(data) != stored.checksum:
                self.violate(f"kvstore: the object at {stored.offset} is not what was stored")
            if stored.key[0] == "block" and data != stored.key[2] * (stored.nbytes // 16):
                self.violate(f"kvstore: the block at {stored.offset} does not hold the bytes of its key")

    def check_deadlines(self) -> None:
        for asked in self.asked:
            gateway = asked.gateway
            if gateway.paused or gateway.dead or gateway.cut or self.network.down:
                gateway.unheard = self.now
            late = max(asked.began + asked.plan.deadline, gateway.unheard) + LATE
            if not asked.ended and self.now > late:
                self.violate(f"request {asked.number} goes on {self.now - late:.2f} s after its deadline")
        if not self.over:
            self.at(self.now + 0.25, self.check_deadlines)

    def debts(self) -> dict[str, Any]:
        """Whatever is still held, pinned, leased or in quarantine, in words; empty when everything is given back."""
        out: dict[str, Any] = {}
        for process in self.processes:
            if process.dead:
                continue
            service, name = process.service, f"{process.role}{process.place[1]}"
            if service is None or service.state != "ready":
                out[name] = "is not ready"
                continue
            for key, value in self._debts_of(process, service).items():
                if value:
                    out[f"{name}.{key}"] = value
        return out

    def _debts_of(self, process: Process, service: Any) -> dict[str, Any]:
        if process.role == "gateway":
            dispatcher = service.dispatcher
            return {
                "records": len(dispatcher.records), "queued": dispatcher.queued, "trying": dispatcher.line.trying,
                "in_flight": sum(w.in_flight for w in service.router.workers.values()),
                "watched": sum(max(0, state[1]) for state in service.prober._watched.values())
                if hasattr(service, "prober") else sum(max(0, s[1]) for s in dispatcher.prober._watched.values()),
                "looking": service.images._busy, "writing": len(service.images.writing),
            }  # fmt: skip
        if process.role == "vision":
            running = service.identifying.running + service.delivering.running
            return {
                "running": running, "deposits": len(service.staging), "writing": len(service.writing),
                "rooms": len(service._rooms), "held": service._held, "turns": service.encoding.pending,
                "armed": len(service.memory._armed),
            }  # fmt: skip
        if process.role == "kvstore":
            s = service.store
            armed = len(service.memory._armed)
            return {"pins": len(s.held), "grants": len(s.grants), "checking": service._checking, "armed": armed}
        engine, pool = service.engine, service.engine.pool
        return service.debts() | {
            "used": pool.used, "quarantined": pool.quarantined, "held": len(engine._held), "running": len(engine._live),
            "reserved": len(engine._tables), "slots": engine.config.max_num_seqs - engine._free_slots,
            "armed": len(service.memory._armed), "needed": len(service._needed), "to_store": service.store.pending,
        }  # fmt: skip

    # ------------------------------------------------------------ a schedule

    def run(self) -> None:
        """Start everything, let the plan happen, heal, and see that nothing is left."""
        try:
            self._run()
        except Violation:
            pass
        finally:
            self.over = True
            self.schedule.enter(None)
            for process in self.processes:
                process.loop.discard()

    def _run(self) -> None:
        config, plan = self.config, self.plan
        for role, count in config.counts.items():
            for index in range(count):
                self.spawn(role, index)
        if not self.run_until(self.now + 5.0, self._served):
            return self.violate("the system did not get ready")
        began = self.now
        self.check_deadlines()
        for number, request in enumerate(plan.requests):
            self.at(began + request.at, self.ask, number, request)
        for fault in plan.faults:
            fault.arm(self, began)
        last = max([r.at for r in plan.requests], default=0.0)
        self.run_until(max(began + last + 0.5, self.trouble_until))
        self.run_until(max(self.now, self.trouble_until))
        self.heal()
        healed = self.now
        if not self.run_until(healed + HANGS, self._all_ended):
            names = [f"{a.number} (attempt {a.record.attempt if a.record else '-'})" for a in self.asked if not a.ended]
            return self.violate(f"{HANGS:g} s after the last fault these requests hang: {', '.join(names)}")
        if not self.run_until(self.now + QUIET, lambda: not self.debts()):
            return self.violate(f"after {QUIET:g} s of quiet: {self.debts()}")
        self._check_residency()
        if plan.probes:
            if plan.faults:
                self.run_until(healed + LEASE)
            self._probe()

    def _probe(self) -> None:
        """The system serves as on its first day."""
        if not self.run_until(self.now + 5.0, self._served):
            return self.violate("the system did not get ready again")
        for number, request in enumerate(self.plan.probes, start=len(self.plan.requests)):
            self.ask(number, request)
            if not self.run_until(self.now + 6.0, self._all_ended):
                return self.violate("after everything was healed a new request hangs")
            asked = self.asked[-1]
            if asked.ended != "answer":
                self.violate(f"after everything was healed a new request got {asked.ended} {asked.error or ''}")
        if not self.run_until(self.now + QUIET, lambda: not self.debts()):
            self.violate(f"{QUIET:g} s after the last requests: {self.debts()}")

    def _check_residency(self) -> None:
        """What a gateway believes of a worker, all of whose events it has heard of, is not more than what is there."""
        live = {p.service.instance: p.service for p in self.processes if not p.dead and p.role in ("prefill", "decode")}
        for process in self.processes:
            if process.dead or process.role != "gateway":
                continue
            residency = process.service.router.residency
            index = residency._index
            for instance, position in residency._position.items():
                worker, bit = live.get(instance), index._bits.get(instance, 0)
                if worker is None or position != (worker.epoch, worker.event_seq) or instance in residency._syncing:
                    continue
                too_much = {h for h, mask in index._masks.items() if mask & bit} - set(worker.engine.pool.resident())
                if too_much and not worker.engine.pool._changes:
                    self.violate(f"{process.service.instance} believes {len(too_much)} blocks at {instance} that are not there")

    def _served(self) -> bool:
        """Everybody is ready, and the gateways know it."""
        if not all(process.ready for process in self.places.values()):
            return False
        workers = {p.service.instance for (role, _), p in self.places.items() if role in ("prefill", "decode")}
        eyes = {p.service.instance for (role, _), p in self.places.items() if role == "vision"}
        for (role, _), process in self.places.items():
            if role == "prefill" and any(process.service.peers.get(one) is None for one in eyes):
                return False
            if role == "gateway":
                if {p.instance for p in process.service.peers.by_role("vision")} != eyes:
                    return False
                group = process.service.router.group("sim")
                if group is None or {w.instance for w in (*group.prefills, *group.decodes)} != workers:
                    return False
        return True

    def _all_ended(self) -> bool:
        return not self._open

    def heal(self) -> None:
        """No fault any more: everybody runs, everything is connected, the dead are replaced."""
        self.healed = True
        self.network.faults.clear()
        self.network.hooks.clear()
        self.network.unwarned.clear()
        self.network.loss = self.slow = 0.0
        if self.network.down:
            self.network.set_down(False)
        self.network.set_link(False)
        for process in list(self.processes):
            if process.cut:
                self.cut(process, "")
            self.resume(process)
        self.network.heal()
        for (role, index), process in list(self.places.items()):
            if process.dead or (process.service is not None and process.service.state in ("draining", "stopped")):
                self.kill(process)
                self.spawn(role, index)


@lru_cache(maxsize=4096)
def _hashes(layout: str, ids: bytes, images: tuple[Any, ...]) -> tuple[bytes, ...]:
    return tuple(BlockHasher(layout, NAMESPACE).hashes(ids, images))


def block_hashes(layout: str, ids: bytes, images: Any = ()) -> list[bytes]:
    return list(_hashes(layout, ids, tuple(images)))
