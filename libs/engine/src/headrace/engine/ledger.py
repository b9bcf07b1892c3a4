"""Who is here and who holds what: sequences, block references, state slots, snapshots, counters.

Both halves of a step work on it: the scheduler takes memory, the postprocessor gives it back. Pure Python: no tensors, no
policy.

    waiting  new requests, and preempted ones with an image            owns nothing
    running  has a slot and blocks
    pinned   PREFILL, prompt computed: blocks stay until `release`     its slot is free

Memory changes hands at step boundaries only: what a running step may read or write is freed when the step ends, never before,
for the pool is also written by peers. Invariant, at any time between two calls: `pool.check(owners())`.
"""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush

from headrace.kv.hashing import ROOT, BlockHasher
from headrace.kv.pool import BlockPool

from . import api
from .cache import CacheSpec
from .images import check_images, starts
from .sequence import Sequence, Status
from .snapshots import SnapshotStore

COUNTERS = (
    "prompt_tokens", "cached_tokens", "computed_rows", "replay_rows", "generated_tokens",
    "snapshot_hits", "snapshots_taken", "snapshots_rejected",
    "preemptions", "resumptions", "finished", "failed", "cancelled",
)  # fmt: skip
HASHERS = 1024  # namespaces whose hasher is kept


class Ledger:
    """The books of one engine."""

    def __init__(self, spec: CacheSpec, config: api.EngineConfig, pool: BlockPool, max_model_len: int) -> None:
        self.spec, self.config, self.pool, self.max_model_len = spec, config, pool, max_model_len
        self.snapshots = SnapshotStore(config.snapshot_bytes)
        self.waiting: list[Sequence] = []  # in order of service
        self.running: list[Sequence] = []  # in order of service
        self.live: dict[str, list[Sequence]] = {}  # waiting and running, by request
        self.pinned: dict[str, Sequence] = {}
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.events: list[api.Event] = []  # since the last step; given out with the next one's
        self._deadlines: list[tuple[float, int, str]] = []
        self._hashers: dict[bytes, BlockHasher] = {}
        self._arrivals = 0

    # ------------------------------------------------------------ in

    def new_sequence(self, request: api.EngineRequest, ids: list[int]) -> Sequence:
        """A checked sequence, not here yet. ValueError says what can't be."""
        n, block = len(ids), self.spec.block_tokens
        if request.request in self.live or request.request in self.pinned:
            raise ValueError(f"request {request.request!r} is here already")
        if n < 1:
            raise ValueError("the prompt is empty; it needs at least one token")
        prefill_only = request.prefill_only or self.config.role == api.Role.PREFILL
        if n + (not prefill_only) > self.max_model_len:
            raise ValueError(
                f"the prompt has {n} tokens; this engine holds at most {self.max_model_len} of a sequence, answer included"
            )
        if request.hashes and len(request.hashes) != n // block:
            raise ValueError(f"{n} tokens have {n // block} full blocks of {block}; got {len(request.hashes)} hashes")
        request.sampling.check()
        api.check_output(n, request.output_tokens, request.first_choice, request.sampling)
        if request.images:
            check_images(request.images, n)
        self._arrivals += 1
        scored = request.sampling.prompt_logprobs >= 0
        return Sequence(
            request,
            ids,
            hashes=list(request.hashes) or self.hasher(request.namespace).hashes(ids, starts(request.images)),
            arrival=self._arrivals,
            prefill_only=prefill_only,
            prompt_len=n,
            max_len=min(n - request.output_tokens + request.sampling.max_tokens, self.max_model_len),
            decoder_floor=0 if scored else self.decoder_floor(n),
        )

    def enqueue(self, sequence: Sequence) -> None:
        self._register(sequence)
        insort(self.waiting, sequence, key=_order)

    def admit(self, sequence: Sequence, slot: int, blocks: list[int], resident: int, handoff: api.Handoff) -> None:
        """A handed-over prompt: its blocks are placed, `resident` of them had their identity before. None was filled here."""
        sequence.slot, sequence.block_table, sequence.announced = slot, blocks, resident
        sequence.reported = sequence.prompt_len // self.spec.block_tokens
        # Not prompt_len: an entry of several tokens may begin before it and be completed by the first row after it.
        sequence.computed, sequence.write_floor = sequence.prompt_len, resident * self.spec.block_tokens
        sequence.decoder_floor, sequence.hidden = handoff.decoder_floor, bytes(handoff.hidden)
        sequence.state = bytes(handoff.state)
        sequence.status = Status.RUNNING
        self._register(sequence)
        insort(self.running, sequence, key=_order)
        self.announce(sequence, sequence.computed)

    def start(self, sequence: Sequence) -> None:
        """The first in the queue, whose blocks are taken, gets a slot."""
        assert self.waiting.pop(0) is sequence
        sequence.slot, sequence.status = self.free_slots.pop(), Status.RUNNING
        insort(self.running, sequence, key=_order)

    def requeue(self, sequence: Sequence) -> None:
        """Back to the queue, without memory."""
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_order)

    # ------------------------------------------------------------ out

    def cancel(self, name: str) -> bool:
        """End a request wherever it is; False if it is nowhere."""
        if name in self.pinned:
            self.release(name)
            return True
        if name not in self.live:
            return False
        self.counters["cancelled"] += 1
        self._drop(name)
        return True

    def fail(self, name: str, code: str, message: str) -> None:
        """End a request with an error event, if it is here."""
        if name in self.live:
            self.counters["failed"] += 1
            self.events.append(api.Failed(name, code, message))
            self._drop(name)

    def expire(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, name = heappop(self._deadlines)
            if self._is_live(arrival, name):
                self.fail(name, "deadline", "the request's deadline passed before it was done")

    def pin(self, sequence: Sequence) -> None:
        """A computed prompt keeps its blocks and nothing else."""
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot, sequence.status = -1, Status.PINNED
        self._unregister(sequence)
        self.pinned[sequence.name] = sequence

    def release(self, name: str) -> None:
        sequence = self.pinned.pop(name, None)
        if sequence is not None:
            self._free(sequence)
            sequence.status = Status.ENDED

    def end(self, sequence: Sequence) -> None:
        """Out of every list, and its memory is free."""
        (self.waiting if sequence.status is Status.WAITING else self.running).remove(sequence)
        self._free(sequence)
        sequence.status = Status.ENDED
        if not sequence.dropped:
            self._unregister(sequence)

    def take_events(self) -> list[api.Event]:
        events, self.events = self.events, []
        return events

    # ------------------------------------------------------------ identity of blocks

    def hasher(self, namespace: bytes) -> BlockHasher:
        if namespace not in self._hashers:
            if len(self._hashers) >= HASHERS:
                self._hashers.clear()
            self._hashers[namespace] = BlockHasher(self.spec.layout_id, namespace, self.spec.block_tokens)
        return self._hashers[namespace]

    def announce(self, sequence: Sequence, stop: int) -> None:
        """Blocks below row `stop`, whose ids are known and computed, get their identity; those filled here are reported."""
        if not self.config.prefix_caching:
            return
        block, filled = self.spec.block_tokens, []
        for index in range(sequence.announced, stop // block):
            parent = sequence.hashes[index - 1] if index else ROOT
            if index == len(sequence.hashes):
                ids = sequence.ids[index * block : (index + 1) * block]
                inside = [(at - index * block, d) for at, d in starts(sequence.request.images) if at // block == index]
                sequence.hashes.append(self.hasher(sequence.request.namespace).next(parent, ids, inside))
            self.pool.announce(sequence.block_table[index], sequence.hashes[index], parent)
            sequence.announced = index + 1
            if index >= sequence.reported:
                filled.append((sequence.hashes[index], sequence.block_table[index], parent))
                sequence.reported = index + 1
        if filled:
            self.events.append(api.BlocksFilled(sequence.name, filled))

    # ------------------------------------------------------------ questions

    def begun(self, name: str) -> bool:
        """It left the queue, and has its slot and blocks."""
        return name in self.pinned or any(s.status is Status.RUNNING for s in self.live.get(name, ()))

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.events)

    def owners(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for sequence in [*self.running, *self.waiting, *self.pinned.values()]:
            for block in sequence.block_table:
                out[block] = out.get(block, 0) + 1
        return out

    def room(self, blocks: int) -> bool:
        """Whether `blocks` more leave one block of growth to each running sequence that grows."""
        return self.pool.available >= blocks + sum(not s.prefill_only for s in self.running)

    def decoder_floor(self, prompt_tokens: int) -> int:
        """Class `bounded`: decoder layers run on a prompt's last keep_rows rows."""
        return max(0, prompt_tokens - self.spec.keep_rows) if self.spec.numerics == "bounded" else 0

    @property
    def swapped_bytes(self) -> int:
        """Host memory of preempted sequences; choices that began as one image share it."""
        return sum({id(s.image): s.image.nbytes for s in self.waiting if s.image}.values())

    @property
    def keeps_state(self) -> bool:
        """Whether snapshots are of any use here."""
        return self.config.prefix_caching and self.spec.replay_rows > 0 and self.config.snapshot_bytes > 0

    # ------------------------------------------------------------ below

    def _register(self, sequence: Sequence) -> None:
        siblings = self.live.setdefault(sequence.name, [])
        siblings.append(sequence)
        if len(siblings) == 1 and sequence.request.deadline is not None:
            if len(self._deadlines) > 1024 + 2 * len(self.live):  # most of them are of requests that ended long before
                self._deadlines = [entry for entry in self._deadlines if self._is_live(*entry[1:])]
                heapify(self._deadlines)
            heappush(self._deadlines, (sequence.request.deadline, sequence.arrival, sequence.name))

    def _is_live(self, arrival: int, name: str) -> bool:
        return name in self.live and self.live[name][0].arrival == arrival

    def _unregister(self, sequence: Sequence) -> None:
        siblings = self.live[sequence.name]
        siblings.remove(sequence)
        if not siblings:
            del self.live[sequence.name]

    def _drop(self, name: str) -> None:
        """All choices of a request leave: at once, or as soon as the running step has let go of their memory."""
        for sequence in list(self.live[name]):
            if sequence.in_steps:
                sequence.dropped = True
                self._unregister(sequence)
            else:
                self.end(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        if sequence.slot >= 0:
            self.free_slots.append(sequence.slot)
            sequence.slot = -1


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.key
