"""Who runs which rows in the next step. Pure Python: no tensors, no model, no thread.

Decodes first, one row each and the drafts that `speculation.py` lets them verify; then prompts that have begun; then the
queue, strictly in order, while there are rows, slots and blocks. Order of service is (priority, arrival). A sequence that needs
a block which nobody can give makes the last one behind it leave: its state and blocks are saved to host memory (`Image`) and it
returns to the queue, to be resumed exactly there.
"""

from __future__ import annotations

from .batch import Segment
from .images import missing_embeddings, rows_of, without_images
from .ledger import Ledger
from .sequence import PENDING, Plan, Restore, Row, Sample, Sequence, Status
from .snapshots import Snapshot
from .speculation import Ready, Speculator
from .windows import LOOK_BACK, Windows


class Scheduler:
    """Policy over a ledger. `schedule` makes a plan; `Postprocessor.commit` must follow each, in order. One more may be made
    before that: rows of a plan count as computed from then on, and the token that is sampled behind them as pending. Drafts
    don't count: they may be rejected. What would follow if they are not, a plan that is made meanwhile has memory for."""

    def __init__(self, ledger: Ledger, speculator: Speculator | None = None) -> None:
        self.ledger, self.speculator = ledger, speculator
        self.spec, self.config, self.pool = ledger.spec, ledger.config, ledger.pool
        self.bounded = self.spec.numerics == "bounded"
        self.windows = Windows(self.spec.block_tokens, self.config.decode_snapshots and ledger.keeps_state)

    def schedule(self, now: float, after: Plan | None = None) -> Plan | None:
        """The next step, or None when nothing can run and nothing is to be told. `after`: the plan that is under way; None then
        also means that this step can't be planned before that one is known: what memory it frees, or leaves."""
        plan = Plan(after=after)
        if after is not None:
            plan.unsure = {sample.sequence: sample.most for sample in after.samples if sample.most}
            if after.preempt or not self._all_can_grow(plan):
                return None
        self.ledger.expire(now)
        self._decodes(plan)
        self._prompts(plan)
        self._queue(plan)
        if self.speculator is not None:
            plan.propose = self.speculator.wants([sample.sequence for sample in plan.samples])
        plan.members = plan.sequences()
        for sequence in plan.members:
            sequence.in_steps += 1
        return plan if plan.members or (self.ledger.events and after is None) else None

    def _decodes(self, plan: Plan) -> None:
        ready = self._growing(plan)
        if plan.after is not None and self.speculator is not None:
            return self._decodes_ahead(ready, plan)
        for sequence, drafts in zip(ready, self._drafts(ready), strict=True):
            self._run(sequence, plan, drafts)

    def _decodes_ahead(self, ready: list[Sequence], plan: Plan) -> None:
        """The step under way says what their drafts are, and where they begin. What is settled here: how many the step has
        rows for in all, and memory. `ahead.join` deals them out."""
        proposed = set(plan.after.propose)
        entries = [Ready(s, self._most_drafts_ahead(s, plan) if s in proposed else 0) for s in ready]
        plan.budget = self.speculator.budget(entries, self._spare)
        plan.rows_planned += plan.budget
        for entry in entries:
            self._run(entry.sequence, plan, most=entry.most)

    def _growing(self, plan: Plan) -> list[Sequence]:
        """Sequences that have a block for their next row; others may have to leave for it."""
        ready, short = [], 0  # blocks that are wanted and will not come by the preemptions of this step
        for sequence in list(self.ledger.running):
            if sequence.prefilling or sequence.status is not Status.RUNNING or sequence in plan.preempt:
                continue
            if sequence.ending or sequence.dropped:  # a step under way is its last
                continue
            if self._grow(sequence, plan):
                ready.append(sequence)
                continue
            short += 1
            while short > 0 and (victim := self._last_behind(sequence, plan)):
                short -= self._preempt(victim, plan)
        return ready

    def _all_can_grow(self, plan: Plan) -> bool:
        """Nobody has to leave: there are blocks for all running sequences that need one for their next row."""
        full = sum(self._full(s, plan) for s in self.ledger.running if not (s.prefilling or s.ending or s.dropped))
        return full <= self.pool.available

    def _full(self, sequence: Sequence, plan: Plan) -> bool:
        """Its next row needs a block, or does if the step under way accepts all drafts (which end inside its blocks, and leave
        a token to come behind them)."""
        holds = len(sequence.block_table) * self.spec.block_tokens
        return min(sequence.computed + plan.unsure.get(sequence, 0), sequence.max_len - 2) >= holds

    def _drafts(self, ready: list[Sequence]) -> list[int]:
        """How many drafts each verifies. A prompt's part of the step is left to it."""
        if self.speculator is None:
            return [0] * len(ready)
        most = [self._most_drafts(sequence) if sequence.draft.tokens else 0 for sequence in ready]
        return self.speculator.lengths(list(map(Ready, ready, most)), self._spare)

    @property
    def _spare(self) -> int:
        """Rows of a step that drafts may take."""
        return max(0, self.config.max_num_batched_tokens - self.config.max_num_seqs - max(self.spec.keep_rows, 1))

    def _most_drafts(self, sequence: Sequence) -> int:
        """Drafts that may be verified."""
        first, drafts = sequence.computed + 1, len(sequence.draft.tokens)
        self._make_room(sequence, first, drafts)
        return min(drafts, self.windows.most(first, len(sequence.block_table), sequence.max_len))

    def _most_drafts_ahead(self, sequence: Sequence, plan: Plan) -> int:
        """An upper bound of that, where they may begin at several positions. `ahead.join` knows which."""
        first, drafts = sequence.computed + 1, self.speculator.options.block
        self._make_room(sequence, first + plan.unsure.get(sequence, 0), drafts)
        return min(drafts, max(0, sequence.max_len - first - 1))

    def _make_room(self, sequence: Sequence, first: int, drafts: int) -> None:
        """A block for drafts from position `first` on, only while none is missing elsewhere. (Where they end at a boundary,
        none is needed.)"""
        drafts = min(drafts, sequence.max_len - first - 1)
        beyond = first + drafts > len(sequence.block_table) * self.spec.block_tokens
        if drafts > 0 and not self.windows.snapshots and beyond and self.ledger.room(1):
            sequence.block_table += self.pool.allocate(1) or ()

    def _prompts(self, plan: Plan) -> None:
        for sequence in self.ledger.running:
            if sequence.prefilling and not sequence.dropped and sequence not in plan.preempt:
                self._chunk(sequence, plan)

    def _queue(self, plan: Plan) -> None:
        ledger = self.ledger
        while ledger.waiting and ledger.free_slots and not plan.preempt and self._budget(plan) > 0:
            sequence = ledger.waiting[0]
            if not (self._resume(sequence, plan) if sequence.image else self._start(sequence, plan)):
                return
            if sequence.status is Status.ENDED:  # it can't run
                continue
            ledger.start(sequence)
            if sequence.prefilling:
                self._chunk(sequence, plan)
            elif self._grow(sequence, plan):
                self._run(sequence, plan)

    def _budget(self, plan: Plan) -> int:
        """Rows that this step may still have."""
        return self.config.max_num_batched_tokens - plan.rows_planned

    # ------------------------------------------------------------ a decode row

    def _run(self, sequence: Sequence, plan: Plan, drafts: int = 0, most: int = 0) -> None:
        """The row of a sequence whose prompt is done, drafts to verify behind it, and the token after them. `most`: of drafts,
        where they are not known yet."""
        if sequence.hidden and not sequence.pending:
            if sequence.state is not None:
                plan.restore.append(Restore(sequence, sequence.prompt_len, sequence.state))
            if sequence.choice == 0 and sequence.request.sampling.n > 1:
                plan.fork.append(sequence)
            plan.samples.append(Sample(sequence, None, sequence.prompt_len))
            sequence.pending += 1
            return
        first = sequence.computed + 1
        late = [PENDING] * sequence.pending
        sample = Sample(sequence, len(plan.rows), first, late=late, most=most or drafts)
        row = Row(sequence, self._segment(sequence, first, want=True))
        row.segment.ids = late or row.segment.ids
        self.windows.place(row, sample, sequence.draft.tokens[:drafts])
        plan.samples.append(sample)
        plan.rows.append(row)
        plan.rows_planned += 1 + drafts
        plan.draft_rows += drafts
        sequence.pending += 1
        sequence.computed = first

    def _grow(self, sequence: Sequence, plan: Plan) -> bool:
        """A block for the next row, if it has none yet."""
        if (sequence.hidden and not sequence.pending) or not self._full(sequence, plan):
            return True
        blocks = self.pool.allocate(1)
        sequence.block_table += blocks or ()
        return blocks is not None

    def _last_behind(self, sequence: Sequence, plan: Plan) -> Sequence | None:
        for victim in reversed(self.ledger.running):
            if victim is sequence:
                return None
            if victim not in plan.preempt:
                return victim
        return None

    def _preempt(self, victim: Sequence, plan: Plan) -> int:
        """Save the victim to host memory, or end it when that is full. Returns the blocks that come free: not shared ones."""
        ledger = self.ledger
        freed = sum(self.pool.references(block) == 1 for block in victim.block_table)
        if victim.prefilling and not victim.chunks:  # nothing is computed yet, so there is nothing to save
            ledger.requeue(victim)
            return freed
        leaving = [victim, *plan.preempt]
        nbytes = sum(len(s.block_table) * self.spec.block_bytes + self.spec.state_bytes for s in leaving)
        if ledger.swapped_bytes + nbytes > self.config.swap_bytes:
            ledger.fail(
                victim.name, "overloaded",
                f"KV memory is full, and so is the memory for preempted sequences: {ledger.swapped_bytes + nbytes} bytes of "
                f"{self.config.swap_bytes} are needed; raise swap_bytes or num_blocks",
            )  # fmt: skip
            return freed
        ledger.counters["preemptions"] += 1
        plan.preempt.append(victim)
        return freed

    # ------------------------------------------------------------ starting

    def _start(self, sequence: Sequence, plan: Plan) -> bool:
        """Take what is resident and memory for the rest of the prompt; False when it is not to be had now."""
        block, n = self.spec.block_tokens, sequence.prompt_len
        known = sequence.hashes[: (n - 1) // block] if self.config.prefix_caching and not sequence.scored else []
        resident = self.pool.match(known)
        start, snapshot = self.restart_point(sequence.hashes, len(resident) * block, sequence.decoder_floor)
        if start < 0:  # a hit that saves nothing
            self.pool.release(resident)
            resident, start = [], 0
        if missing := missing_embeddings(sequence.request.images, start):
            self.pool.release(resident)
            self.ledger.fail(sequence.name, "images", f"row {start} is the first to compute, but {missing}")
            return True
        needed = -(-n // block) - len(resident)
        blocks = self.pool.allocate(needed) if self.ledger.room(needed) else None
        if blocks is None:
            self.pool.release(resident)
            return False
        sequence.block_table = resident + blocks
        sequence.announced = sequence.reported = len(resident)
        sequence.computed, sequence.write_floor = start, len(resident) * block
        sequence.pending = sequence.chunks = 0
        sequence.replay_rows = sequence.write_floor - start
        sequence.window_floor = 0 if snapshot else start
        sequence.snapshot_hit = snapshot is not None
        if snapshot:
            plan.restore.append(Restore(sequence, start, snapshot.state, snapshot=sequence.hashes[start // block - 1]))
        else:
            plan.restore.append(Restore(sequence, start, None))
        return True

    def restart_point(self, hashes: list[bytes], hit: int, decoder_floor: int) -> tuple[int, Snapshot | None]:
        """First row to compute after a hit of `hit` tokens: where the nearest snapshot ends, else `replay_rows` before the hit.
        Negative when the hit is worth nothing: class `bounded`, and no row would be saved."""
        block, replay = self.spec.block_tokens, self.spec.replay_rows
        if hit == 0 or replay == 0:
            return hit, None
        for position in range(hit, max(hit - replay - block, 0), -block):
            snapshot = self.ledger.snapshots.get(hashes[position // block - 1])
            if snapshot and snapshot.position == position and snapshot.serves(decoder_floor):
                return position, snapshot
        return self.replay_start(hit), None

    def replay_start(self, hit: int) -> int:
        """`restart_point` without a snapshot."""
        replay = self.spec.replay_rows
        if hit == 0 or replay == 0:
            return hit
        if self.bounded:
            return hit - replay if hit > replay else -1
        return max(hit - replay, 0)

    def _resume(self, sequence: Sequence, plan: Plan) -> bool:
        """Bring an image back: blocks that are still resident are used again, the others get their bytes back."""
        image = sequence.image
        resident = self.pool.match(sequence.hashes[: sequence.announced])
        needed = len(image.blocks) - len(resident)
        grows = sequence.computed == len(image.blocks) * self.spec.block_tokens
        blocks = self.pool.allocate(needed) if self.ledger.room(needed + grows) else None
        if blocks is None:
            self.pool.release(resident)
            return False
        saved = [(block, data) for block, data in zip(blocks, image.blocks[len(resident) :], strict=True) if data]
        plan.restore.append(Restore(sequence, image.position, image.state, saved))
        sequence.block_table, sequence.announced, sequence.image = resident + blocks, len(resident), None
        self.ledger.counters["resumptions"] += 1
        return True

    # ------------------------------------------------------------ rows of a prompt

    def _chunk(self, sequence: Sequence, plan: Plan) -> None:
        start, n = sequence.computed, sequence.prompt_len
        stop = self._chunk_stop(sequence, self._budget(plan))
        if stop <= start:
            return
        last, several = stop == n, sequence.request.sampling.n > 1 and not sequence.prefill_only
        row = Row(sequence, self._segment(sequence, stop, want=last))
        if sequence.scored:
            row.segment.outputs = range(start, stop)
        row.snapshot = self._wants_snapshot(sequence, stop)
        row.pack = row.snapshot or (last and sequence.prefill_only)
        row.hidden = last and (sequence.prefill_only or several)
        if last and not sequence.prefill_only:
            plan.samples.append(Sample(sequence, len(plan.rows), n))
            sequence.pending += 1
        if last and several:
            plan.fork.append(sequence)
        plan.rows.append(row)
        plan.rows_planned += stop - start
        sequence.computed = stop
        sequence.chunks += 1

    def _chunk_stop(self, sequence: Sequence, budget: int) -> int:
        """Where the next chunk ends. It never crosses the boundary where the snapshot is taken; in class `bounded` it ends
        before the last keep_rows rows or takes them all."""
        start, n, sizes = sequence.computed, sequence.prompt_len, self.config.chunk_tokens
        size = min(budget, sizes[sequence.chunks % len(sizes)]) if sizes else budget
        stop = min(start + size, n)
        boundary = self._snapshot_boundary(sequence) if self.ledger.keeps_state else 0
        if start < boundary:
            stop = min(stop, boundary)
        tail = sequence.decoder_floor
        if not self.bounded or stop <= tail or sequence.scored:
            return stop
        if n - start <= size:
            return n
        if start < tail:
            return tail
        return n if n - start <= budget else start

    def _snapshot_boundary(self, sequence: Sequence) -> int:
        """Last block boundary of the prompt below its last row; class `bounded`: not above its last keep_rows rows either."""
        last = sequence.decoder_floor if self.bounded else sequence.prompt_len - 1
        return last // self.spec.block_tokens * self.spec.block_tokens

    def _wants_snapshot(self, sequence: Sequence, stop: int) -> bool:
        block = self.spec.block_tokens
        if not self.ledger.keeps_state or stop % block or stop < sequence.write_floor:
            return False
        at = stop == self._snapshot_boundary(sequence) or stop == sequence.prompt_len
        return at and sequence.hashes[stop // block - 1] not in self.ledger.snapshots

    def _segment(self, sequence: Sequence, stop: int, want: bool) -> Segment:
        start, images = sequence.computed, sequence.request.images
        before = sequence.ids[max(0, start - LOOK_BACK) : start]
        return Segment(
            slot=sequence.slot,
            start=start,
            ids=sequence.ids[start:stop],
            prev_ids=without_images(before, start, images) if images else before,
            block_table=list(sequence.block_table),
            write_floor=sequence.write_floor,
            window_floor=sequence.window_floor,
            decoder_floor=sequence.decoder_floor,
            outputs=(stop - 1,) if want else (),
            images=rows_of(images, start, stop) if images else (),
        )
