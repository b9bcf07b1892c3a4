"""Joins a plan to the step before it, during which it was made: the tokens that it waits for, and who is not there any more.

Runs in the model's thread between two steps, so it costs what the model waits for: a few dictionary entries a sequence. Knows
plans and results. Does not know tensors, and changes nothing that the owner's thread reads or writes.
"""

from __future__ import annotations

from .postprocess import verdict
from .sequence import Plan, Sequence


def join(plan: Plan, eos: frozenset[int]) -> set[Sequence]:
    """Put the last step's tokens where `plan` waits for them. Returns whose part of the plan must not be run: sequences that
    the last step ended, whose state it could not restore, or that were in it when it broke."""
    before, plan.after = plan.after, None
    if before is None:
        return set()
    result = before.result
    if result is None:
        return set(before.members)
    gone, said = {*result.failed, *result.astray}, {}
    for sample, chosen in zip(before.samples, result.tokens, strict=True):
        if chosen and verdict(sample.sequence, sample.position, chosen, eos)[1]:
            gone.add(sample.sequence)
        elif chosen:
            said[sample.sequence] = chosen[-1].token
    for sample in plan.samples:
        if sample.late and sample.sequence not in gone:
            sample.late = plan.rows[sample.row].segment.ids = [said[sample.sequence]]
    return gone
