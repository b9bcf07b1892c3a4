"""Joins a plan to the step before it, during which it was made: the tokens that it waits for, the drafts that are to be
verified behind them, and who is not there any more.

Runs in the model's thread between two steps, so it costs what the model waits for: a few dictionary entries a sequence, and
with drafts a sort of their probabilities. Knows plans and results. Does not know tensors, and changes nothing that the owner's
thread reads or writes.
"""

from __future__ import annotations

from .postprocess import verdict
from .sequence import Plan, Proposal, Result, Sample, Sequence
from .speculation import Speculator
from .windows import LOOK_BACK, Windows


def join(plan: Plan, eos: frozenset[int], windows: Windows, speculator: Speculator | None = None) -> set[Sequence]:
    """Put the last step's tokens where `plan` waits for them, and its drafts behind them. Returns whose part of the plan must
    not be run: sequences that the last step ended, whose state it could not restore, or that were in it when it broke."""
    before, plan.after = plan.after, None
    if before is None:
        return set()
    result = before.result
    if result is None:
        gone = set(before.sequences())  # its failure may be known already: then it has no members
    else:
        gone, said = _outcome(before, result, eos)
        for sample in plan.samples:
            if sample.late and sample.sequence not in gone:
                _move(plan, sample, said[sample.sequence], windows)
    if plan.budget:
        drafts = _deal(plan, result.proposals if result else {}, gone, windows, speculator)
        plan.rows_planned += drafts - plan.budget
        plan.draft_rows, plan.budget = drafts, 0
    return gone


def _outcome(before: Plan, result: Result, eos: frozenset[int]) -> tuple[set[Sequence], dict[Sequence, list[int]]]:
    """(whom a step ended, the tokens of the others)."""
    gone, said = {*result.failed, *result.astray}, {}
    for sample, chosen in zip(before.samples, result.tokens, strict=True):
        if chosen and verdict(sample.sequence, sample.position, chosen, eos)[1]:
            gone.add(sample.sequence)
        elif chosen:
            said[sample.sequence] = [one.token for one in chosen]
    return gone, said


def _move(plan: Plan, sample: Sample, tokens: list[int], windows: Windows) -> None:
    """The plan counts on one token; each draft that was accepted moves what follows by one position."""
    row = plan.rows[sample.row]
    sample.late, sample.position = tokens, sample.position + len(tokens) - 1
    row.segment.ids = tokens[-1:]
    if len(tokens) > 1:
        row.segment.prev_ids = [*row.segment.prev_ids, *tokens[:-1]][-LOOK_BACK:]
        windows.place(row, sample)


def _deal(plan: Plan, proposals: dict[Sequence, Proposal], gone: set[Sequence], windows: Windows, policy: Speculator) -> int:
    """The budget goes to the likeliest of the drafts that the last step proposed. Returns how many are verified."""
    window = [s for s in plan.samples if s.most and s.sequence in proposals and s.sequence not in gone]
    most = []
    for s in window:
        fits = windows.most(s.position, len(plan.rows[s.row].segment.block_table), s.sequence.max_len)
        most.append(min(s.most, fits))
    lengths = policy.deal([proposals[s.sequence].confidence[:n] for s, n in zip(window, most, strict=True)], plan.budget)
    for s, n in zip(window, lengths, strict=True):
        if n:
            windows.place(plan.rows[s.row], s, proposals[s.sequence].tokens[:n])
    return sum(lengths)
