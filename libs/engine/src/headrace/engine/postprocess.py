"""What becomes of a step's results: positions move, blocks get their identity, tokens are judged, the ended leave.

The last part of a step, after scheduler and runner; its product is events. Pure Python. What was cancelled while the step ran
is thrown away here, and its memory is free from here on.
"""

from __future__ import annotations

from dataclasses import replace

from . import api
from .ledger import Ledger
from .sequence import Chosen, Image, Plan, Restore, Result, Row, Sequence, Status
from .snapshots import encode


class Postprocessor:
    def __init__(self, ledger: Ledger, eos_token_ids: tuple[int, ...]) -> None:
        self.ledger, self.spec, self.eos = ledger, ledger.spec, frozenset(eos_token_ids)

    def commit(self, plan: Plan, result: Result) -> list[api.Event]:
        """Carry out what the step came to. Returns the events of it, and of the time since the last one."""
        self._leave_step(plan)
        for restore in plan.restore:
            if restore.sequence in result.failed and restore.sequence.status is Status.RUNNING:
                self._reject(restore, result.failed[restore.sequence])
        for sequence in plan.preempt:
            if sequence.status is Status.RUNNING:
                sequence.image, sequence.state = result.images[sequence], None
                self.ledger.requeue(sequence)
        for index, row in enumerate(plan.rows):
            if row.sequence.status is Status.RUNNING:
                self._advance(row, result.packed.get(index), result.hidden.get(index))
        for sequence in plan.fork:
            if sequence.status is Status.RUNNING:
                self._fork(sequence, result.images[sequence])
        for sample, chosen in zip(plan.samples, result.tokens, strict=True):
            if sample.sequence.status is Status.RUNNING and chosen is not None:
                self._append(sample.sequence, chosen)
        return self.ledger.take_events()

    def abort(self, plan: Plan | None, code: str, message: str) -> list[api.Event]:
        """The step broke: its requests (all, without a plan) end with an error."""
        names = list(self.ledger.live)
        if plan is not None:
            self._leave_step(plan)
            names = [s.name for s in plan.sequences()]
        for name in names:
            self.ledger.fail(name, code, message)
        return self.ledger.take_events()

    def _leave_step(self, plan: Plan) -> None:
        for sequence in plan.sequences():
            sequence.in_step = False
            if sequence.dropped and sequence.status is not Status.ENDED:
                self.ledger.end(sequence)

    def _reject(self, restore: Restore, message: str) -> None:
        """A state could not be restored. A bad snapshot is forgotten and the prompt starts over; else the request ends."""
        if not restore.snapshot:
            self.ledger.fail(restore.sequence.name, "bad_state", message)
            return
        self.ledger.counters["snapshots_rejected"] += 1
        self.ledger.snapshots.discard(restore.snapshot)
        self.ledger.requeue(restore.sequence)

    def _advance(self, row: Row, packed: bytes | None, hidden: bytes | None) -> None:
        """Rows are computed."""
        sequence, stop = row.sequence, row.segment.stop
        of_prompt = sequence.prefilling
        sequence.computed, sequence.hidden = stop, hidden or b""
        self.ledger.announce(sequence)
        if row.snapshot:
            sequence.snapshot = (stop, encode(stop, min(sequence.decoder_floor, stop), packed))
        if not of_prompt:
            return
        sequence.chunks += 1
        self._publish_snapshot(sequence)
        if sequence.prefill_only:
            position = max(stop, sequence.write_floor)
            self.ledger.events.append(api.ChunkDone(sequence.name, position, sequence.block_table))
        if stop == sequence.prompt_len:
            self._prompt_done(sequence, packed)

    def _publish_snapshot(self, sequence: Sequence) -> None:
        """The newest state at a block boundary: a prompt's at once, an output's when it ends."""
        if sequence.snapshot:
            position, record = sequence.snapshot
            key = sequence.hashes[position // self.spec.block_tokens - 1]
            self.ledger.counters["snapshots_taken"] += 1
            self.ledger.snapshots.add(key, record)
            self.ledger.events.append(api.SnapshotTaken(sequence.name, key, position, record))
            sequence.snapshot = None

    def _prompt_done(self, sequence: Sequence, packed: bytes | None) -> None:
        n, cached, counters = sequence.prompt_len, sequence.write_floor, self.ledger.counters
        usage = (cached, n - cached, sequence.replay_rows, sequence.snapshot_hit)
        for name, value in zip(("cached_tokens", "computed_rows", "replay_rows", "snapshot_hits"), usage, strict=True):
            counters[name] += value
        counters["prompt_tokens"] += n
        if not sequence.prefill_only:
            self.ledger.events.append(api.PromptDone(sequence.name, *usage))
            return
        handoff = api.Handoff(sequence.ids, packed, sequence.hidden, sequence.decoder_floor)
        self.ledger.events.append(api.PrefillDone(sequence.name, sequence.block_table, handoff, *usage))
        self.ledger.pin(sequence)

    def _fork(self, first: Sequence, image: Image) -> None:
        """The other choices begin as images of the first, with the hidden vector that their first token is sampled from."""
        for choice in range(1, first.request.sampling.n):
            sibling = replace(
                first, choice=choice, image=image, state=None, status=Status.WAITING, slot=-1, block_table=[],
                ids=first.ids[: first.prompt_len], hashes=first.hashes[: first.announced],
            )  # fmt: skip
            self.ledger.enqueue(sibling)

    def _append(self, sequence: Sequence, chosen: Chosen) -> None:
        """A token is sampled: it joins the sequence, which may end by it."""
        params, token, index = sequence.request.sampling, chosen.token, sequence.output_len
        sequence.hidden, sequence.state = b"", None
        sequence.ids.append(token)
        self.ledger.counters["generated_tokens"] += 1
        stopped = (token in self.eos and not params.ignore_eos) or token in params.stop_token_ids
        shown = not (stopped and token in self.eos)
        finish = "stop" if stopped else "length" if len(sequence.ids) >= sequence.max_len else ""
        logprobs = [(token, chosen.logprob, chosen.top)] if shown and chosen.top is not None else None
        self.ledger.events.append(
            api.Tokens(
                sequence.name, sequence.choice, index, [token] if shown else [], logprobs, finish, token if stopped else -1
            )
        )
        if finish:
            self.ledger.counters["finished"] += 1
            self._publish_snapshot(sequence)
            self.ledger.end(sequence)
