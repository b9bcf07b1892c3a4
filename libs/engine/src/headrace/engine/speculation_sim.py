"""The policy of speculative decoding on a clock of its own: `python -m headrace.engine.speculation_sim` prints how near it
comes to the better of "never draft" and "verify all drafts", for step costs of several shapes.

No model runs. Steps take what a formula or a measured curve says, drafts stand by lot, confidences tell the lot's chances
exactly. With several profiles sequences differ, and another takes a sequence's place when it ends. So the figures are about the
policy alone, the same on every machine; what a step really costs is measured by `headrace bench engine --speculation`.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from . import api
from . import sequence as seq
from .speculation import Costs, Options, Ready, Speculator, StepCurve

Curve = Callable[[int], float]
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536)  # measured at the start
BUDGETS: dict[str, int | None] = {"none": 0, "full": 1 << 30, "scheduled": None}
REST = 1e-4  # seconds of a step besides model and draft
LIFE = 100  # tokens of a sequence
Profile = list[float]  # of each draft: the probability that it stands if all before it do
PROFILES: dict[str, list[Profile]] = {
    "0.95": [[0.95] * 5],
    "0.8 falling": [[0.8, 0.75, 0.7, 0.65, 0.6]],
    "0.5": [[0.5] * 5],
    "0.2": [[0.2] * 5],
    "half 0.95, half 0.2": [[0.95] * 5, [0.2] * 5],
    "0.95, 0.9, 0.8, 0.1": [[p] * 5 for p in (0.95, 0.9, 0.8, 0.1)],
}


@dataclass(frozen=True, slots=True)
class Machine:
    """Seconds of a forward pass by rows, and of a draft by sequences."""

    forward: Curve
    draft: Curve


MACHINES = {
    "flat, then linear": Machine(lambda rows: 0.002 + max(0.012, 0.00012 * rows), lambda n: 0.0015 + 0.00001 * n),
    "stairs of 64 rows": Machine(lambda rows: 0.01 + 0.004 * math.ceil(rows / 64), lambda n: 0.002),
    "linear": Machine(lambda rows: 0.012 + 0.0006 * rows, lambda n: 0.003 + 0.0008 * n),
    "linear, dear rows": Machine(lambda rows: 0.002 + 0.002 * rows, lambda n: 0.001 + 0.002 * n),
    # headrace-tiny on one core: seconds measured at the start of an engine on 2026-11-30
    "a CPU": Machine(
        StepCurve({1: 0.0124, 2: 0.0130, 4: 0.0146, 8: 0.0171, 16: 0.0200, 32: 0.0269, 64: 0.0381, 128: 0.0717, 384: 0.1759}),
        StepCurve({1: 0.0056, 2: 0.0067, 4: 0.0072, 8: 0.0101, 16: 0.0157, 32: 0.0268, 64: 0.0486}),
    ),
}


def throughput(
    way: str, machine: Machine, profiles: list[Profile], batch: int, *, steps: int = 400, warm_up: int = 150, seed: int = 0,
    spread: float = 0.2,
) -> float:  # fmt: skip
    """Tokens a second of `batch` sequences at a time, behind `warm_up` steps."""
    rng = random.Random(seed)
    costs = Costs(*(StepCurve({n: curve(n) for n in SIZES}) for curve in (machine.forward, machine.draft)))
    policy = Speculator(Options(len(profiles[0]), BUDGETS[way], gate=1.0), costs)
    sequences, said = [_sequence(i) for i in range(batch)], [rng.randrange(LIFE) for _ in range(batch)]
    chances: dict[seq.Sequence, list[float]] = {}
    tokens, seconds = 0.0, 0.0
    for step in range(steps):
        lengths = policy.lengths([Ready(s, len(s.draft.tokens)) for s in sequences], 1 << 30)
        plan, result, expected = seq.Plan(), seq.Result(), float(batch)
        for i, (sequence, length) in enumerate(zip(sequences, lengths, strict=True)):
            own = chances.get(sequence, [])[:length]
            expected += sum(accumulate(own, mul))
            lots = [rng.random() < chance for chance in own]
            stands = lots.index(False) if False in lots else length
            plan.samples.append(seq.Sample(sequence, i, 0, sequence.draft.tokens[:length]))
            plan.rows.append(None)  # nobody looks at it here
            result.tokens.append([seq.Chosen(0)] * (stands + 1))
            said[i] += stands + 1
        plan.draft_rows, plan.rows_planned = sum(lengths), batch + sum(lengths)
        plan.propose = policy.wants(sequences) if way != "none" else []
        for sequence in plan.propose:
            profile = profiles[sequence.arrival % len(profiles)]
            own = chances[sequence] = [min(0.99, max(0.01, p + rng.uniform(-spread, spread))) for p in profile]
            result.proposals[sequence] = seq.Proposal([0] * len(own), [math.log(p / (1 - p)) for p in own])
        forward = machine.forward(plan.rows_planned)
        draft = machine.draft(len(plan.propose)) if plan.propose else 0.0
        result.seconds = {"forward": forward, "logits": 0.0, "draft": draft, "restore": 0.0, "sample": REST, "pack": 0.0}
        policy.settle(plan, result, sequences)
        for i, sequence in enumerate(sequences):
            if said[i] >= LIFE:
                chances.pop(sequence, None)
                sequences[i], said[i] = _sequence(sequence.arrival + batch + 1), 0
        if step >= warm_up:
            tokens += expected
            seconds += forward + draft + REST
    return tokens / seconds


def _sequence(number: int) -> seq.Sequence:
    request = api.EngineRequest(str(number), [0], [], api.SamplingParams())
    return seq.Sequence(request, [0], [], number, prompt_len=1, max_len=1 << 30)


def against_the_better(machine: Machine, profiles: list[Profile], batch: int, **options) -> float:
    """Throughput of the schedule, as a share of the better of the two fixed ways."""
    rate = {way: throughput(way, machine, profiles, batch, **options) for way in BUDGETS}
    return rate["scheduled"] / max(rate["none"], rate["full"])


def main() -> int:
    batches = (1, 4, 16, 64, 256)
    print("scheduled / better of none and full, by batch size")
    print(f"{'step costs':<20}{'drafts stand with':<22}" + "".join(f"{batch:>8}" for batch in batches))
    worst = math.inf
    for name, machine in MACHINES.items():
        for label, profiles in PROFILES.items():
            shares = [against_the_better(machine, profiles, batch) for batch in batches]
            worst = min(worst, *shares)
            print(f"{name:<20}{label:<22}" + "".join(f"{share:>8.3f}" for share in shares), flush=True)
    print(f"worst: {worst:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
