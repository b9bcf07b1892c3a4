"""Which pair of workers gets a request.

Knows: who is ready, their loads (from presence, pings and every reply), what each holds (KV events, and what was sent
there lately), and a cost in seconds for each pair. Does not know: the life of a request; it is asked for the best pair
and told what happened.

    cost(prefill, decode) = (tokens queued at prefill + tokens sent there since its last word + uncached tokens) / its speed
                          + bytes that decode does not hold / bandwidth
                          + the step time that one more sequence costs at decode

Costs within max(5 %, 5 ms) of the least are equal; then the first block of the prompt decides by rendezvous hashing, so
that equal prefixes meet at one worker while all are equally idle; prompts shorter than a block take turns.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import structlog

from headrace.bus import Bus, BusError, Peers, subjects
from headrace.bus import messages as m
from headrace.kv.prefix import PrefixIndex

TIE_SECONDS, TIE_SHARE = 0.005, 0.05
DEFAULT_SPEED = 20_000.0  # prompt tokens a second of a worker that has not measured itself
BANDWIDTH = 2e9  # bytes a second between two workers
RECENT_SECONDS, RECENT_BLOCKS = 5.0, 65_536  # own routing history, until the events are here
AVOID_SECONDS = 1.0  # after a failure, unless it speaks again

log = structlog.get_logger("headrace.gateway")


@dataclass(slots=True, eq=False)
class Worker:
    """One instance as routing sees it. `sent_*`: what went there since its last load, which that load can't know yet."""

    presence: m.Presence
    load: m.Load
    sent_tokens: int = 0
    sent_requests: int = 0
    in_flight: int = 0
    avoid_until: float = 0.0

    @property
    def instance(self) -> str:
        return self.presence.instance

    def prefill_seconds(self, tokens: int) -> float:
        """Until a prompt with so many uncached tokens would be done here."""
        return (self.load.queued_tokens + self.sent_tokens + tokens) / (self.load.tokens_per_second or DEFAULT_SPEED)

    def decode_seconds(self) -> float:
        """Step time that one more sequence costs: the share of a step that each of the present ones has."""
        running = self.load.running + self.load.waiting + self.sent_requests
        return self.load.step_seconds * (1.0 + running / max(1, running + self.load.credits))


@dataclass(frozen=True, slots=True)
class Group:
    """Workers whose memory means the same: any prefill here may write to any decode here."""

    model: str
    layout_id: str
    checkpoint: str
    block_tokens: int
    block_bytes: int
    max_model_len: int
    engine: str
    prefills: tuple[Worker, ...]
    decodes: tuple[Worker, ...]
    sees: bool = False  # this model takes images


class Router:
    """`group(model)` then `choose(...)`; `loaded`, `sent`, `done`, `avoid` keep it honest."""

    def __init__(
        self, bus: Bus, peers: Peers, on_capacity: Callable[[], None] = lambda: None, keep_seconds: float = 0.0
    ):  # fmt: skip
        """`keep_seconds`: a model whose last worker left is still known so long, for another one may come."""
        self._bus, self._peers, self._on_capacity, self._keep_seconds = bus, peers, on_capacity, keep_seconds
        self.workers: dict[str, Worker] = {}
        self.groups: dict[str, Group] = {}  # model name -> the largest group that serves it
        self._left: dict[str, float] = {}  # model without workers -> when it will be forgotten
        self.residency = Residency(bus, self._role_of)
        self._turn = itertools.count()
        peers.watch(self._on_presence)

    # ------------------------------------------------------------ the choice

    def choose(
        self, group: Group, hashes: Sequence[bytes], prompt_tokens: int, excluded: set[str]
    ) -> tuple[Worker, Worker] | None:
        """The best (prefill, decode) without the excluded instances, or None."""
        prefills = _usable(group.prefills, excluded)
        decodes = _usable(group.decodes, excluded)
        pairs = [(prefill, decode) for decode in decodes for prefill in prefills if _fit(prefill, decode)]
        if len(pairs) <= 1:
            return pairs[0] if pairs else None
        held = self.residency.match(hashes) if hashes else {}
        block_tokens, block_bytes = group.block_tokens, group.block_bytes
        costs: list[tuple[float, Worker, Worker]] = []
        for prefill, decode in pairs:
            at_decode = held.get(decode.instance, 0)
            at_prefill = max(held.get(prefill.instance, 0), at_decode)
            compute = prefill.prefill_seconds(max(1, prompt_tokens - at_prefill * block_tokens))
            move = 0.0 if prefill is decode else (len(hashes) + 1 - at_decode) * block_bytes / BANDWIDTH
            costs.append((compute + move + decode.decode_seconds(), prefill, decode))
        least = min(cost for cost, _, _ in costs)
        limit = least + max(TIE_SECONDS, least * TIE_SHARE)
        equal = [(prefill, decode) for cost, prefill, decode in costs if cost <= limit]
        if len(equal) == 1:
            return equal[0]
        if hashes:
            return max(equal, key=lambda pair: _rendezvous(hashes[0], pair[0].instance, pair[1].instance))
        fewest = min(prefill.in_flight + decode.in_flight for prefill, decode in equal)
        idle = [pair for pair in equal if pair[0].in_flight + pair[1].in_flight == fewest]
        return idle[next(self._turn) % len(idle)]

    def elsewhere(self, model: str, without: set[str]) -> bool:
        """Whether a pair serves the model that has none of these workers."""
        group = self.groups.get(model)
        return group is not None and any(
            _fit(prefill, decode)
            for prefill in group.prefills if prefill.instance not in without
            for decode in group.decodes if decode.instance not in without
        )  # fmt: skip

    def coming(self, group: Group) -> bool:
        """Whether a worker is starting whose role nobody has in this group."""
        missing = {role for role, there in (("prefill", group.prefills), ("decode", group.decodes)) if not there}
        starting = [w.presence for w in self.workers.values() if w.presence.state == "starting"]
        return any((p.role in missing or p.both) and p.model in ("", group.model) for p in starting)

    def resident(self, group: Group, hashes: Sequence[bytes]) -> int:
        """Leading tokens of a prompt that some worker holds."""
        return max(self.residency.match(hashes).values(), default=0) * group.block_tokens if hashes else 0

    def room(self) -> int:
        """Admissions that decode workers would accept now, as far as is known."""
        return sum(max(0, w.load.credits - w.sent_requests) for g in self.groups.values() for w in g.decodes)

    def group(self, model: str) -> Group | None:
        return self.groups.get(model)

    # ------------------------------------------------------------ what happened

    def loaded(self, instance: str, load: m.Load | None) -> None:
        """A fresh word from a worker."""
        worker = self.workers.get(instance)
        if worker is not None and load is not None:
            worker.load, worker.sent_tokens, worker.sent_requests, worker.avoid_until = load, 0, 0, 0.0

    def sent(self, prefill: Worker, decode: Worker, hashes: Sequence[bytes], tokens: int) -> None:
        prefill.sent_tokens += tokens
        decode.sent_requests += 1
        prefill.in_flight += 1
        decode.in_flight += 1
        if hashes:
            self.residency.expect(prefill.instance, hashes)

    def done(self, worker: Worker) -> None:
        worker.in_flight -= 1

    def avoid(self, instance: str) -> None:
        """It did not answer, or answered that it can't: others first, for a while."""
        worker = self.workers.get(instance)
        if worker is not None:
            worker.avoid_until = time.monotonic() + AVOID_SECONDS

    # ------------------------------------------------------------ who is there

    def _role_of(self, instance: str) -> str | None:
        worker = self.workers.get(instance)
        return worker.presence.role if worker else None

    def _on_presence(self, kind: str, presence: m.Presence) -> None:
        if presence.role not in ("prefill", "decode"):
            return
        instance = presence.instance
        if kind == "leave":
            self.workers.pop(instance, None)
            self.residency.drop(instance)
            return self._regroup()
        worker = self.workers.get(instance)
        if worker is None:
            worker = self.workers[instance] = Worker(presence, presence.load)
        if kind == "update":
            changed = worker.presence.max_model_len != presence.max_model_len or worker.presence.layout_id != presence.layout_id
            worker.presence = presence
            self.loaded(instance, presence.load)
            if changed:
                self._regroup()
            if presence.load.credits:
                self._on_capacity()
            return
        worker.presence = presence
        if kind in ("join", "epoch"):
            self.residency.drop(instance)
        self._regroup()
        self._on_capacity()

    def _regroup(self) -> None:
        members: dict[tuple[str, str, str], dict[str, list[Worker]]] = {}
        for worker in self.workers.values():
            p = worker.presence
            if p.state == "ready":
                roles = members.setdefault((p.model, p.layout_id, p.checkpoint), {"prefill": [], "decode": []})
                roles[p.role].append(worker)
                if p.both:
                    roles["prefill"].append(worker)
        groups: dict[str, Group] = {}
        for (model, layout_id, checkpoint), roles in members.items():
            prefills, decodes = roles["prefill"], roles["decode"]
            lengths = [w.presence.max_model_len for w in prefills + decodes if w.presence.max_model_len]
            first = (decodes or prefills)[0].presence
            group = Group(
                model, layout_id, checkpoint, first.block_tokens, first.block_bytes, min(lengths, default=0), first.engine,
                tuple(sorted(prefills, key=lambda w: w.instance)), tuple(sorted(decodes, key=lambda w: w.instance)),
                all(w.presence.sees for w in prefills + decodes),
            )  # fmt: skip
            other = groups.get(model)
            if other is None or _pairs(group) > _pairs(other):
                if other is not None:
                    log.warning("workers of one model differ in layout or checkpoint; the smaller group is not used",
                                model=model, used=layout_id, unused=other.layout_id)  # fmt: skip
                groups[model] = group
        self.groups = groups | self._kept(groups)

    def _kept(self, groups: dict[str, Group]) -> dict[str, Group]:
        """Models of which no worker is left, for a while."""
        now, kept = time.monotonic(), {}
        for model, group in self.groups.items():
            if model in groups:
                self._left.pop(model, None)
                continue
            if model not in self._left and self._keep_seconds:
                self._left[model] = now + self._keep_seconds
                asyncio.get_running_loop().call_later(self._keep_seconds + 0.01, self._regroup)
            if self._left.get(model, now) > now:
                kept[model] = replace(group, prefills=(), decodes=())
            else:
                self._left.pop(model, None)
        return kept


class Residency:
    """Which worker holds which prefix: KV events, and for a few seconds what was sent where. Undercounts, never overcounts.

    A publisher's events carry an epoch and a sequence: a gap or a new epoch voids what was known, and a snapshot is
    asked for."""

    def __init__(self, bus: Bus, role_of: Callable[[str], str | None]):
        self._bus, self._role_of = bus, role_of
        self._index = PrefixIndex()
        self._position: dict[str, tuple[int, int]] = {}  # instance -> epoch, seq
        self._syncing: dict[str, asyncio.Task] = {}
        self._removed: dict[str, list[tuple[int, list[bytes]]]] = {}  # while syncing: event seq, what it removed
        self._stale: set[str] = set()  # while syncing: a page that was asked for is too old, for there was a gap
        self._recent: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # block hash -> who got it, until
        self.resyncs = 0

    async def start(self) -> None:
        await self._bus.subscribe(subjects.KV_EVENTS, self.on_events)

    async def stop(self) -> None:
        for task in self._syncing.values():
            task.cancel()
        await asyncio.gather(*self._syncing.values(), return_exceptions=True)

    def match(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Instance -> leading blocks that it holds, or soon will."""
        held = dict(self._index.match(hashes))
        now = time.monotonic()
        for number in range(len(hashes), 0, -1):
            found = self._recent.get(hashes[number - 1])
            if found is not None and found[1] > now:
                held[found[0]] = max(held.get(found[0], 0), number)
                break
        return held

    def expect(self, instance: str, hashes: Sequence[bytes]) -> None:
        """A prompt with these blocks was sent there."""
        until = time.monotonic() + RECENT_SECONDS
        recent = self._recent
        for block_hash in hashes:
            recent[block_hash] = (instance, until)
        while len(recent) > RECENT_BLOCKS:
            recent.popitem(last=False)

    def drop(self, instance: str) -> None:
        self._position.pop(instance, None)
        self._index.clear(instance)
        for block_hash in [h for h, (who, _) in self._recent.items() if who == instance]:
            del self._recent[block_hash]

    def on_events(self, events: m.Message, subject: str) -> None:
        if not isinstance(events, m.KvEvents) or self._role_of(events.instance) is None:
            return
        epoch, seq = self._position.get(events.instance, (0, 0))
        if events.epoch == epoch and events.seq <= seq:
            return
        if events.epoch != epoch or events.seq != seq + 1:
            self._index.clear(events.instance)
            self._position[events.instance] = (events.epoch, events.seq)
            if events.seq != 1:
                return self._resync(events.instance)
        self._position[events.instance] = (events.epoch, events.seq)
        if events.cleared:
            self._index.clear(events.instance)
        if events.removed:
            removed = _split(events.removed)
            self._index.remove(events.instance, removed)
            if events.instance in self._removed:
                self._removed[events.instance].append((events.seq, removed))
        if events.stored:
            self._index.add(events.instance, _split(events.stored))

    def _resync(self, instance: str) -> None:
        self._stale.add(instance)
        if instance not in self._syncing:
            self.resyncs += 1
            task = self._syncing[instance] = asyncio.create_task(self._fetch(instance))
            task.add_done_callback(lambda _: self._synced(instance))

    def _synced(self, instance: str) -> None:
        del self._syncing[instance]
        self._removed.pop(instance, None)
        self._stale.discard(instance)

    async def _fetch(self, instance: str) -> None:
        """Pages of a snapshot; from the first again if there was another gap meanwhile. Events that arrive meanwhile are
        applied, also to a page that is older than they: what they removed must not come back. A block that moves between two
        pages may be missed."""
        start = 0
        while start >= 0 or instance in self._stale:
            if instance in self._stale:
                self._stale.discard(instance)
                self._removed[instance], start = [], 0
            role = self._role_of(instance)
            if role is None:
                return
            try:
                page = await self._bus.request(role, instance, "blocks", m.KvSnapshot(start), timeout=2.0)
            except BusError:
                return
            if not isinstance(page, m.KvBlocks):
                return
            if instance in self._stale:
                continue
            if self._position.get(instance, (0, 0))[0] != page.epoch:
                return  # it left while it was asked
            gone = {block_hash for seq, removed in self._removed[instance] if seq > page.seq for block_hash in removed}
            self._index.add(instance, [block_hash for block_hash in _split(page.hashes) if block_hash not in gone])
            start = page.next


def _usable(workers: tuple[Worker, ...], excluded: set[str]) -> list[Worker]:
    """Those not excluded; those lately in trouble only when there is nobody else."""
    now = time.monotonic()
    left = [w for w in workers if w.presence.instance not in excluded]
    return [w for w in left if w.avoid_until < now] or left


def _fit(prefill: Worker, decode: Worker) -> bool:
    """A decode worker that computes prompts computes its own, and hands none over."""
    return prefill is decode or not prefill.presence.both


def _pairs(group: Group) -> int:
    return sum(_fit(prefill, decode) for prefill in group.prefills for decode in group.decodes)


def _rendezvous(key: bytes, prefill: str, decode: str) -> bytes:
    return blake2b(key + prefill.encode() + b"|" + decode.encode(), digest_size=8).digest()


def _split(hashes: bytes) -> list[bytes]:
    return [hashes[i : i + m.HASH_BYTES] for i in range(0, len(hashes), m.HASH_BYTES)]
