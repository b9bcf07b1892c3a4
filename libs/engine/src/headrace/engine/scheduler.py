"""Who runs which rows in the next step, and what becomes of them afterwards. Pure Python: no tensors, no model, no thread.

    plan = scheduler.schedule()              # decodes first, then running prompts, then the queue
    events = scheduler.commit(plan, result)  # positions move, blocks get their identity, tokens are judged, the ended freed

Order of service is (priority, arrival). A sequence that needs a block which nobody can give makes the last sequence behind it
leave: its state and blocks are saved to host memory (`Image`) and it returns to the queue, to be resumed exactly there.

Memory changes hands at step boundaries only: what a running step may read or write is freed in `commit`, never before, for the
pool is also written by peers. Invariant, at any time between two calls: `pool.check(owners())`.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

from headrace.kv.hashing import ROOT, BlockHasher
from headrace.kv.pool import BlockPool

from . import api
from .batch import Segment
from .cache import CacheSpec
from .sequence import Chosen, Image, Plan, Restore, Result, Row, Sample, Sequence, Status
from .snapshots import Snapshot, SnapshotStore, encode

LOOK_BACK = 3  # ids before a segment that a model may ask for (n-gram memory)


class Scheduler:
    """Owns sequences, block references, state slots and snapshots of one engine."""

    def __init__(
        self,
        spec: CacheSpec,
        config: api.EngineConfig,
        pool: BlockPool,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.config, self.pool, self.clock = spec, config, pool, clock
        self.eos, self.max_model_len = frozenset(eos_token_ids), max_model_len
        self.snapshots = SnapshotStore(config.snapshot_bytes)
        self.waiting: list[Sequence] = []  # sorted by key
        self.running: list[Sequence] = []  # sorted by key
        self.live: dict[str, list[Sequence]] = {}  # waiting and running, by request
        self.pinned: dict[str, Sequence] = {}
        self.free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.counters = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "computed_rows", "replay_rows", "snapshot_hits", "snapshots_taken")
            + ("snapshots_rejected", "generated_tokens", "preemptions", "resumptions", "finished", "failed", "cancelled"),
            0,
        )
        self._events: list[api.Event] = []  # of between two steps; given out with the next one's
        self._deadlines: list[tuple[float, int, str]] = []
        self._hashers: dict[bytes, BlockHasher] = {}
        self._arrivals = 0

    # ------------------------------------------------------------ requests in and out

    def hasher(self, namespace: bytes) -> BlockHasher:
        if namespace not in self._hashers:
            if len(self._hashers) >= 1024:
                self._hashers.clear()
            self._hashers[namespace] = BlockHasher(self.spec.layout_id, namespace, self.spec.block_tokens)
        return self._hashers[namespace]

    def new_sequence(self, request: api.EngineRequest, ids: list[int]) -> Sequence:
        """A checked sequence, not queued yet. ValueError says what can't be."""
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
        hashes = list(request.hashes) or self.hasher(request.namespace).hashes(ids)
        self._arrivals += 1
        floor = max(0, n - self.spec.keep_rows) if self.spec.numerics == "bounded" else 0
        return Sequence(
            request, ids, hashes, self._arrivals,
            prompt_len=n, max_len=min(n + request.sampling.max_tokens, self.max_model_len), decoder_floor=floor,
        )  # fmt: skip

    def submit(self, request: api.EngineRequest) -> None:
        sequence = self.new_sequence(request, list(request.ids))
        self._register(sequence)
        insort(self.waiting, sequence, key=_key)

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
        insort(self.running, sequence, key=_key)
        self._announce(sequence)

    def cancel(self, name: str) -> bool:
        """End a request wherever it is. Memory that a running step touches is freed when the step ends."""
        if name in self.pinned:
            self.release(name)
            return True
        if name not in self.live:
            return False
        self.counters["cancelled"] += 1
        for sequence in list(self.live[name]):
            self._drop(sequence)
        return True

    def fail(self, name: str, code: str, message: str) -> None:
        """End a request with an error event."""
        if name in self.live:
            self.counters["failed"] += 1
            self._events.append(api.Failed(name, code, message))
            for sequence in list(self.live[name]):
                self._drop(sequence)

    def release(self, name: str) -> None:
        sequence = self.pinned.pop(name, None)
        if sequence is not None:
            self._free(sequence)
            sequence.status = Status.ENDED

    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._events)

    def owners(self) -> dict[int, int]:
        out: dict[int, int] = {}
        for sequence in [*self.running, *self.waiting, *self.pinned.values()]:
            for block in sequence.block_table:
                out[block] = out.get(block, 0) + 1
        return out

    @property
    def swapped_bytes(self) -> int:
        """Host memory of preempted sequences; choices that began as one image share it."""
        return sum({id(s.image): s.image.nbytes for s in self.waiting if s.image}.values())

    def room(self, blocks: int) -> bool:
        """Whether `blocks` more leave one block of growth to each running sequence that grows."""
        growing = sum(not self._prefill_only(s) for s in self.running)
        return self.pool.available >= blocks + growing

    # ------------------------------------------------------------ the plan

    def schedule(self) -> Plan | None:
        plan = Plan()
        self._expire()
        self._plan_decodes(plan)
        self._plan_prompts(plan)
        self._plan_queue(plan)
        touched = plan.sequences()
        for sequence in touched:
            sequence.in_step = True
        return plan if touched or self._events else None

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.clock():
            _, arrival, name = heappop(self._deadlines)
            if name in self.live and self.live[name][0].arrival == arrival:
                self.fail(name, "deadline", "the request's deadline passed before it was done")

    def _plan_decodes(self, plan: Plan) -> None:
        short = 0  # blocks that are wanted and will not come by the preemptions of this step
        for sequence in list(self.running):
            if sequence.prefilling or sequence.status is not Status.RUNNING or sequence in plan.preempt:
                continue
            if not self._grow(sequence):
                short += 1
                while short > 0 and (victim := self._last_behind(sequence, plan)):
                    short -= self._preempt(victim, plan)
                continue
            self._run(sequence, plan)

    def _grow(self, sequence: Sequence) -> bool:
        """A block for the row at `computed`, if it has none yet."""
        if sequence.hidden or sequence.computed < len(sequence.block_table) * self.spec.block_tokens:
            return True
        blocks = self.pool.allocate(1)
        sequence.block_table += blocks or ()
        return blocks is not None

    def _last_behind(self, sequence: Sequence, plan: Plan) -> Sequence | None:
        for victim in reversed(self.running):
            if victim is sequence:
                return None
            if victim not in plan.preempt:
                return victim
        return None

    def _preempt(self, victim: Sequence, plan: Plan) -> int:
        """Save the victim to host memory, or end it when that is full. Returns the blocks that come free: not shared ones."""
        freed = sum(self.pool.references(block) == 1 for block in victim.block_table)
        if victim.prefilling and not victim.chunks:  # nothing is computed yet, so there is nothing to save
            self._requeue(victim)
            return freed
        leaving = [victim, *plan.preempt]
        nbytes = sum(len(s.block_table) * self.spec.block_bytes + self.spec.state_bytes for s in leaving)
        if self.swapped_bytes + nbytes > self.config.swap_bytes:
            self.fail(
                victim.name, "overloaded",
                f"KV memory is full, and so is the memory for preempted sequences: {self.swapped_bytes + nbytes} bytes of "
                f"{self.config.swap_bytes} are needed; raise swap_bytes or num_blocks",
            )  # fmt: skip
            return freed
        self.counters["preemptions"] += 1
        plan.preempt.append(victim)
        return freed

    def _run(self, sequence: Sequence, plan: Plan) -> None:
        """The one row of a sequence whose prompt is done, and the token after it."""
        if sequence.hidden:
            if sequence.state is not None:
                plan.restore.append(Restore(sequence, sequence.prompt_len, sequence.state))
            if sequence.choice == 0 and sequence.request.sampling.n > 1:
                plan.fork.append(sequence)
            plan.samples.append(Sample(sequence, None, sequence.prompt_len))
            return
        stop = sequence.computed + 1
        pack = self.config.decode_snapshots and self._keeps_state and stop % self.spec.block_tokens == 0
        plan.samples.append(Sample(sequence, len(plan.rows), stop))
        plan.rows.append(Row(sequence, self._segment(sequence, stop, want=True), pack=pack))
        plan.rows_planned += 1

    def _plan_prompts(self, plan: Plan) -> None:
        for sequence in self.running:
            if sequence.prefilling and sequence not in plan.preempt:
                self._chunk(sequence, plan)

    def _plan_queue(self, plan: Plan) -> None:
        """Start what waits, strictly in order, as long as there are rows, slots and blocks."""
        while self.waiting and self.free_slots and not plan.preempt and self._budget(plan) > 0:
            sequence = self.waiting[0]
            if not (self._resume(sequence, plan) if sequence.image else self._start(sequence, plan)):
                return
            self.waiting.pop(0)
            sequence.slot, sequence.status = self.free_slots.pop(), Status.RUNNING
            insort(self.running, sequence, key=_key)
            if sequence.prefilling:
                self._chunk(sequence, plan)
            elif self._grow(sequence):
                self._run(sequence, plan)

    def _budget(self, plan: Plan) -> int:
        return self.config.max_num_batched_tokens - plan.rows_planned

    # ------------------------------------------------------------ starting

    def _start(self, sequence: Sequence, plan: Plan) -> bool:
        """Take what is resident and memory for the rest of the prompt; False when it is not to be had now."""
        block, n = self.spec.block_tokens, sequence.prompt_len
        known = sequence.hashes[: (n - 1) // block] if self.config.prefix_caching else []  # at least one row is left to compute
        resident = self.pool.match(known)
        start, snapshot = self._restart_point(sequence, len(resident) * block)
        if resident and start < 0:  # a hit that saves nothing
            self.pool.release(resident)
            resident, start = [], 0
        needed = -(-n // block) - len(resident)
        blocks = self.pool.allocate(needed) if self.room(needed) else None
        if blocks is None:
            self.pool.release(resident)
            return False
        sequence.block_table, sequence.announced, sequence.reported = resident + blocks, len(resident), len(resident)
        sequence.computed, sequence.write_floor = start, len(resident) * block
        sequence.replay_rows = sequence.write_floor - start
        sequence.window_floor = 0 if snapshot else start
        sequence.snapshot_hit = snapshot is not None
        if snapshot:
            plan.restore.append(Restore(sequence, start, snapshot.state, snapshot=sequence.hashes[start // block - 1]))
        else:
            plan.restore.append(Restore(sequence, start, None))
        return True

    def _restart_point(self, sequence: Sequence, hit: int) -> tuple[int, Snapshot | None]:
        """First row to compute after a hit of `hit` tokens: where the nearest snapshot ends, else `replay_rows` before the hit.
        Negative when the hit is worth nothing: class `bounded`, and no row would be saved."""
        block, replay = self.spec.block_tokens, self.spec.replay_rows
        if hit == 0 or replay == 0:
            return hit, None
        for position in range(hit, max(hit - replay - block, 0), -block):
            snapshot = self.snapshots.get(sequence.hashes[position // block - 1])
            if snapshot and snapshot.position == position and snapshot.serves(sequence.decoder_floor):
                return position, snapshot
        if self.spec.numerics == "bounded":
            return (hit - replay if hit > replay else -1), None
        return max(hit - replay, 0), None

    def _resume(self, sequence: Sequence, plan: Plan) -> bool:
        """Bring an image back: blocks that are still resident are used again, the others get their bytes back."""
        image = sequence.image
        resident = self.pool.match(sequence.hashes[: sequence.announced])
        needed = len(image.blocks) - len(resident)
        grows = sequence.computed == len(image.blocks) * self.spec.block_tokens
        blocks = self.pool.allocate(needed) if self.room(needed + grows) else None
        if blocks is None:
            self.pool.release(resident)
            return False
        saved = [(block, data) for block, data in zip(blocks, image.blocks[len(resident) :], strict=True) if data]
        plan.restore.append(Restore(sequence, image.position, image.state, saved))
        sequence.block_table, sequence.announced, sequence.image = resident + blocks, len(resident), None
        self.counters["resumptions"] += 1
        return True

    # ------------------------------------------------------------ rows of a prompt

    def _chunk(self, sequence: Sequence, plan: Plan) -> None:
        start, n = sequence.computed, sequence.prompt_len
        stop = self._chunk_stop(sequence, self._budget(plan))
        if stop <= start:
            return
        last = stop == n
        only = self._prefill_only(sequence)
        row = Row(sequence, self._segment(sequence, stop, want=last))
        row.hidden = last and (only or sequence.request.sampling.n > 1)
        row.pack = (last and only) or self._wants_snapshot(sequence, stop)
        if last and not only:
            plan.samples.append(Sample(sequence, len(plan.rows), n))
            if sequence.request.sampling.n > 1:
                plan.fork.append(sequence)
        plan.rows.append(row)
        plan.rows_planned += stop - start

    def _chunk_stop(self, sequence: Sequence, budget: int) -> int:
        """Where the next chunk ends. It never crosses the boundary where the snapshot is taken; in class `bounded` it ends
        before the last keep_rows rows or takes them all."""
        start, n, sizes = sequence.computed, sequence.prompt_len, self.config.chunk_tokens
        size = min(budget, sizes[sequence.chunks % len(sizes)]) if sizes else budget
        stop = min(start + size, n)
        boundary = self._snapshot_boundary(sequence) if self._keeps_state else 0
        if start < boundary:
            stop = min(stop, boundary)
        tail = sequence.decoder_floor
        if self.spec.numerics != "bounded" or stop <= tail:
            return stop
        if n - start <= size:
            return n
        if start < tail:
            return tail
        return n if n - start <= budget else start

    def _snapshot_boundary(self, sequence: Sequence) -> int:
        """Last block boundary of the prompt below its last row; class `bounded`: not above its last keep_rows rows either."""
        last = sequence.decoder_floor if self.spec.numerics == "bounded" else sequence.prompt_len - 1
        return last // self.spec.block_tokens * self.spec.block_tokens

    def _wants_snapshot(self, sequence: Sequence, stop: int) -> bool:
        block = self.spec.block_tokens
        if not self._keeps_state or stop % block or stop < sequence.write_floor:
            return False
        at = stop == self._snapshot_boundary(sequence) or stop == sequence.prompt_len
        return at and sequence.hashes[stop // block - 1] not in self.snapshots

    @property
    def _keeps_state(self) -> bool:
        return self.config.prefix_caching and self.spec.replay_rows > 0 and self.config.snapshot_bytes > 0

    def _prefill_only(self, sequence: Sequence) -> bool:
        return sequence.request.prefill_only or self.config.role == api.Role.PREFILL

    def _segment(self, sequence: Sequence, stop: int, want: bool) -> Segment:
        start = sequence.computed
        return Segment(
            slot=sequence.slot,
            start=start,
            ids=sequence.ids[start:stop],
            prev_ids=sequence.ids[max(0, start - LOOK_BACK) : start],
            block_table=sequence.block_table,
            write_floor=sequence.write_floor,
            window_floor=sequence.window_floor,
            decoder_floor=sequence.decoder_floor,
            outputs=(stop - 1,) if want else (),
        )

    # ------------------------------------------------------------ what became of it

    def commit(self, plan: Plan, result: Result) -> list[api.Event]:
        self._leave_step(plan)
        for restore in plan.restore:
            if restore.sequence in result.failed and restore.sequence.status is Status.RUNNING:
                self._reject(restore, result.failed[restore.sequence])
        for sequence in plan.preempt:
            if sequence.status is Status.RUNNING:
                self._put_away(sequence, result.images[sequence])
        for index, row in enumerate(plan.rows):
            if row.sequence.status is Status.RUNNING:
                self._advance(row, result.packed.get(index), result.hidden.get(index))
        for sequence in plan.fork:
            if sequence.status is Status.RUNNING:
                self._fork(sequence, result.images[sequence])
        for sample, chosen in zip(plan.samples, result.tokens, strict=True):
            if sample.sequence.status is Status.RUNNING and chosen is not None:
                self._append(sample.sequence, chosen)
        return self.take_events()

    def abort(self, plan: Plan | None, code: str, message: str) -> list[api.Event]:
        """The step broke: its requests end with an error."""
        if plan is None:
            names = list(self.live)
        else:
            self._leave_step(plan)
            names = [s.name for s in plan.sequences()]
        for name in dict.fromkeys(names):
            self.fail(name, code, message)
        return self.take_events()

    def take_events(self) -> list[api.Event]:
        events, self._events = self._events, []
        return events

    def _leave_step(self, plan: Plan) -> None:
        """The step is over: what was dropped meanwhile is freed."""
        for sequence in plan.sequences():
            sequence.in_step = False
            if sequence.dropped:
                self._end(sequence)

    def _reject(self, restore: Restore, message: str) -> None:
        """A state could not be restored. A bad snapshot is forgotten and the prompt starts over; else the request ends."""
        sequence = restore.sequence
        if not restore.snapshot:
            self.fail(sequence.name, "bad_state", message)
            return
        self.counters["snapshots_rejected"] += 1
        self.snapshots.discard(restore.snapshot)
        self._requeue(sequence)

    def _put_away(self, sequence: Sequence, image: Image) -> None:
        sequence.image, sequence.state = image, None
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._free(sequence)
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=_key)

    def _fork(self, first: Sequence, image: Image) -> None:
        """The other choices begin as images of the first, with the hidden vector that their first token is sampled from."""
        for choice in range(1, first.request.sampling.n):
            sibling = replace(
                first, choice=choice, image=image, state=None, status=Status.WAITING, slot=-1, block_table=[],
                ids=first.ids[: first.prompt_len], hashes=first.hashes[: first.announced],
            )  # fmt: skip
            self.live[first.name].append(sibling)
            insort(self.waiting, sibling, key=_key)

    def _advance(self, row: Row, packed: bytes | None, hidden: bytes | None) -> None:
        """Rows are computed."""
        sequence, stop = row.sequence, row.segment.stop
        was_prompt = sequence.prefilling
        sequence.computed = stop
        sequence.chunks += was_prompt
        sequence.hidden = hidden or b""
        self._announce(sequence)
        boundary = stop % self.spec.block_tokens == 0
        if not was_prompt:
            if row.pack:
                sequence.snapshot = (stop, encode(stop, min(sequence.decoder_floor, stop), packed))
            return
        if row.pack and boundary and self._wants_snapshot(sequence, stop):
            self._publish(sequence, stop, encode(stop, min(sequence.decoder_floor, stop), packed))
        if self._prefill_only(sequence):
            self._events.append(api.ChunkDone(sequence.name, max(stop, sequence.write_floor), sequence.block_table))
        if stop == sequence.prompt_len:
            self._prompt_done(sequence, packed)

    def _announce(self, sequence: Sequence) -> None:
        """Blocks whose last token is committed get their identity."""
        if not self.config.prefix_caching:
            return
        block, filled = self.spec.block_tokens, []
        for index in range(sequence.announced, sequence.computed // block):
            parent = sequence.hashes[index - 1] if index else ROOT
            if index == len(sequence.hashes):
                ids = sequence.ids[index * block : (index + 1) * block]
                sequence.hashes.append(self.hasher(sequence.request.namespace).next(parent, ids))
            self.pool.announce(sequence.block_table[index], sequence.hashes[index], parent)
            sequence.announced = index + 1
            if index >= sequence.reported:
                filled.append((sequence.hashes[index], sequence.block_table[index], parent))
                sequence.reported = index + 1
        if filled:
            self._events.append(api.BlocksFilled(sequence.name, filled))

    def _publish(self, sequence: Sequence, position: int, record: bytes) -> None:
        key = sequence.hashes[position // self.spec.block_tokens - 1]
        self.counters["snapshots_taken"] += 1
        self.snapshots.add(key, record)
        self._events.append(api.SnapshotTaken(sequence.name, key, position, record))

    def _prompt_done(self, sequence: Sequence, packed: bytes | None) -> None:
        n, cached = sequence.prompt_len, sequence.write_floor
        usage = (cached, n - cached, sequence.replay_rows, sequence.snapshot_hit)
        for name, value in zip(("cached_tokens", "computed_rows", "replay_rows", "snapshot_hits"), usage, strict=True):
            self.counters[name] += value
        self.counters["prompt_tokens"] += n
        if not self._prefill_only(sequence):
            self._events.append(api.PromptDone(sequence.name, *usage))
            return
        handoff = api.Handoff(sequence.ids, packed, sequence.hidden, sequence.decoder_floor)
        self._events.append(api.PrefillDone(sequence.name, sequence.block_table, handoff, *usage))
        self.running.remove(sequence)
        self.free_slots.append(sequence.slot)
        sequence.slot, sequence.status = -1, Status.PINNED
        self._unregister(sequence)
        self.pinned[sequence.name] = sequence

    def _append(self, sequence: Sequence, chosen: Chosen) -> None:
        """A token is sampled: it joins the sequence, which may end by it."""
        params, token = sequence.request.sampling, chosen.token
        sequence.hidden, sequence.state = b"", None
        index = sequence.output_len
        sequence.ids.append(token)
        self.counters["generated_tokens"] += 1
        is_eos = token in self.eos and not params.ignore_eos
        stopped = is_eos or token in params.stop_token_ids
        shown = not (stopped and token in self.eos)
        finish = "stop" if stopped else "length" if len(sequence.ids) >= sequence.max_len else ""
        self._events.append(
            api.Tokens(
                sequence.name, sequence.choice, index,
                [token] if shown else [],
                [(token, chosen.logprob, chosen.top)] if shown and chosen.top is not None else None,
                finish, token if stopped else -1,
            )  # fmt: skip
        )
        if finish:
            self.counters["finished"] += 1
            if sequence.snapshot:
                self._publish(sequence, *sequence.snapshot)
            self._end(sequence)

    # ------------------------------------------------------------ books

    def _register(self, sequence: Sequence) -> None:
        self.live.setdefault(sequence.name, []).append(sequence)
        if sequence.request.deadline is not None:
            heappush(self._deadlines, (sequence.request.deadline, sequence.arrival, sequence.name))

    def _unregister(self, sequence: Sequence) -> None:
        siblings = self.live[sequence.name]
        siblings.remove(sequence)
        if not siblings:
            del self.live[sequence.name]

    def _drop(self, sequence: Sequence) -> None:
        if sequence.in_step:
            sequence.dropped = True
            self._unregister(sequence)
        else:
            self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Out of every list, and its memory is free."""
        (self.waiting if sequence.status is Status.WAITING else self.running).remove(sequence)
        self._free(sequence)
        sequence.status = Status.ENDED
        if not sequence.dropped:
            self._unregister(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        if sequence.slot >= 0:
            self.free_slots.append(sequence.slot)
            sequence.slot = -1


def _key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.key
