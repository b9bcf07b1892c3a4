"""What becomes of a step's results: positions move, blocks get their identity, tokens are judged, the ended leave.

The last part of a step, after scheduler and runner; its product is events. Pure Python. What was cancelled while the step ran
is thrown away here, and its memory is free from here on.
"""

from __future__ import annotations

from dataclasses import replace

from . import api
from .ledger import Ledger
from .sequence import Chosen, Draft, Image, Plan, Restore, Result, Row, Sample, Sequence, Status
from .snapshots import encode
from .speculation import Speculator


class Postprocessor:
    def __init__(self, ledger: Ledger, eos_token_ids: tuple[int, ...], speculator: Speculator | None = None) -> None:
        self.ledger, self.spec, self.eos = ledger, ledger.spec, frozenset(eos_token_ids)
        self.speculator = speculator

    def commit(self, plan: Plan, result: Result) -> list[api.Event]:
        """Carry out what the step came to. Returns the events of it, and of the time since the last one."""
        self._leave_step(plan)
        if self.speculator is not None:
            pairs = zip(plan.samples, result.tokens, strict=True)
            kept = [len(verdict(s.sequence, s.position, chosen, self.eos)[0]) for s, chosen in pairs]
            self.speculator.settle(plan, result, self.ledger.running, kept)
        for sample in plan.samples:
            sample.sequence.pending -= sample.sequence not in result.gone

        def here(sequence: Sequence) -> bool:
            """It wasn't cancelled, and what this step did is of it as it is now."""
            return sequence.status is Status.RUNNING and not sequence.dropped and sequence not in result.gone

        for restore in plan.restore:
            if restore.sequence in result.failed and here(restore.sequence):
                self._reject(restore, result.failed[restore.sequence])
        for sequence in plan.preempt:
            if here(sequence):
                sequence.image, sequence.state = result.images[sequence], None
                self.ledger.requeue(sequence)
        for index, row in enumerate(plan.rows):
            if here(row.sequence) and result.scores.get(index):
                scores = result.scores[index]
                self.ledger.events.append(api.PromptScores(row.sequence.name, row.segment.start + 1, scores))
            if here(row.sequence) and not row.drafts:
                self._advance(row, row.segment.stop, result.packed.get(index), result.hidden.get(index))
        for sequence in plan.fork:
            if here(sequence):
                self._fork(sequence, result.images[sequence])
        for sequence, why in result.astray.items():
            if here(sequence):
                self.ledger.fail(sequence.name, "grammar", why)
        for sample, chosen in zip(plan.samples, result.tokens, strict=True):
            if here(sample.sequence) and chosen:
                self._append(sample, plan, result, chosen)
        return self.ledger.take_events()

    def abort(self, plan: Plan | None, code: str, message: str) -> list[api.Event]:
        """The step broke: its requests (all, without a plan) end with an error."""
        names = list(self.ledger.live)
        if plan is not None:
            names = [s.name for s in plan.sequences() if not s.dropped]
            self._leave_step(plan)
        for name in names:
            self.ledger.fail(name, code, message)
        return self.ledger.take_events()

    def _leave_step(self, plan: Plan) -> None:
        leaving, plan.members = plan.members, []  # once, also where `abort` follows a `commit` that broke
        for sequence in leaving:
            sequence.in_steps -= 1
            if sequence.dropped and not sequence.in_steps and sequence.status is not Status.ENDED:
                self.ledger.end(sequence)

    def _reject(self, restore: Restore, message: str) -> None:
        """A state could not be restored. A bad snapshot is forgotten and the prompt starts over; else the request ends."""
        if not restore.snapshot:
            self.ledger.fail(restore.sequence.name, "bad_state", message)
            return
        self.ledger.counters["snapshots_rejected"] += 1
        self.ledger.snapshots.discard(restore.snapshot)
        self.ledger.requeue(restore.sequence)

    def _advance(self, row: Row, stop: int, packed: bytes | None, hidden: bytes | None) -> None:
        """Rows below `stop` are computed, and hold the sequence's ids: of drafts, those that were accepted."""
        sequence = row.sequence
        of_prompt = row.segment.start < sequence.prompt_len
        sequence.hidden = hidden or b""
        self.ledger.announce(sequence, stop)
        if row.snapshot and stop == row.segment.stop:
            sequence.snapshot = (stop, encode(stop, min(sequence.decoder_floor, stop), packed))
        if not of_prompt:
            return
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
                first, choice=choice, image=image, state=None, status=Status.WAITING, slot=-1, block_table=[], pending=0,
                computed=first.prompt_len, in_steps=0,
                ids=first.ids[: first.prompt_len], hashes=first.hashes[: first.announced], draft=Draft(),
                matcher=first.matcher and first.matcher.fresh(),
            )  # fmt: skip
            self.ledger.enqueue(sibling)

    def _append(self, sample: Sample, plan: Plan, result: Result, chosen: list[Chosen]) -> None:
        """Tokens are chosen: they join the sequence up to the first that ends it."""
        sequence, index = sample.sequence, sample.sequence.output_len
        sequence.hidden, sequence.state = b"", None
        kept, finish, stop_id = verdict(sequence, sample.position, chosen, self.eos)
        sequence.ids += [one.token for one in kept]
        self.ledger.counters["generated_tokens"] += len(kept)
        if sample.drafts:
            row = plan.rows[sample.row]
            sequence.computed += len(kept) - 1
            self._advance(row, row.segment.start + len(kept), result.packed.get(sample.row), None)
        shown = kept[:-1] if stop_id in self.eos else kept
        logprobs = [(one.token, one.logprob, one.top) for one in shown if one.top is not None] or None
        ids = [one.token for one in shown]
        self.ledger.events.append(api.Tokens(sequence.name, sequence.choice, index, ids, logprobs, finish, stop_id))
        if finish:
            self.ledger.counters["finished"] += 1
            self._publish_snapshot(sequence)
            self.ledger.end(sequence)


def verdict(sequence: Sequence, position: int, chosen: list[Chosen], eos: frozenset[int]) -> tuple[list[Chosen], str, int]:
    """Of tokens for the positions from `position` on: (those up to the one that ends the output, how it ended or "", the id
    that stopped it or -1). Reads nothing of a sequence that changes, so any thread may ask."""
    params = sequence.request.sampling
    for count, one in enumerate(chosen, 1):
        may_stop = position - sequence.output_start + count > params.min_tokens  # a grammar may leave only what would stop
        at_eos = one.token in eos and (one.ended or (may_stop and not params.ignore_eos))
        if at_eos or (may_stop and one.token in params.stop_token_ids):
            return chosen[:count], "stop", one.token
        if one.ended:
            return chosen[:count], "stop", -1
        if position + count >= sequence.max_len:
            return chosen[:count], "length", -1
    return chosen, "", -1
