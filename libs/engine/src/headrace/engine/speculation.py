"""How many drafts a step verifies, and when drafting pays. Policy in pure Python: no tensors, no model.

A draft that is verified costs one row of the step and saves a step of its sequence if it stands. With a(r, j) the probability
that the first j drafts of sequence r all stand, a step of B rows gives tau = sum over r of (1 + a(r, 1) + ... + a(r, l_r))
tokens; lengths l_r are chosen to make tau / seconds(B) large (DSpark, algorithm 1).

Which drafts are verified must not depend on what they say, or the output's distribution is bent: l_r >= j may depend on the
drafts before j only. a(r, j) does (the confidence head reads the token before). So:
  * the budget, how many drafts in all, is made from the blocks of the step before, whose tokens are settled, by looking at all
    budgets; where there are none it is made from the new ones, admitting the best first and stopping at the first that does not
    help, so that no draft is admitted or refused for the sake of one behind it. A step that is planned while the one before it
    runs (and proposes) has no new ones, and makes it from the older blocks always;
  * the budget is handed out to the new blocks by a(r, j), highest first; a(r, j + 1) <= a(r, j) keeps prefixes whole.

Who gets new drafts is chosen for the batch as a whole, by the past only: as many of the most hopeful sequences as make most
tokens a second, perhaps none (`_how_many`). What a sequence may hope for is what its own blocks promised lately, and at the
gate, where too many of its drafts failed, what they brought. Those left out are tried again out of a small share of all time.
With a fixed budget nothing is weighed: all draft but those at the gate.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import ClassVar

from . import sequence as seq
from .calibration import Calibration

GATE_STEPS = 3  # in a row with too many rejections: the gate closes
CLOSED_STEPS = 32  # ... for so many steps
PROBES, PROBE_SHARE = 4, 0.005  # sequences that try their luck at a time, and the share of all time that this may take
QUIET = 8  # steps for which it stands that nobody is to draft: the host's time to weigh them all would be felt in each
PLAIN_STEPS = 1024  # with drafts, after which one goes without: what that costs must stay known
FIRST_PLAIN = 16  # the same while it is hardly known: this, then twice as many each time
SLOW = 0.05  # weight of a new time in averages
SPEED, LOCAL, UNEVEN = 0.15, 0.05, 0.02  # of a time's error: by which a whole curve moves, its points next to it, `uneven`
GUESS, FAITH, MEMORY = 3, 20, 4000  # blocks that first guesses count for: at confidences, at their worth; what is remembered
RECENT, LATELY = 32, 8  # a sequence's blocks whose promises are remembered, and those whose outcome is
FRESH, OTHERS = 200, 8.0  # sequences that `typical` remembers; drafts of all that count beside a sequence's own at the gate
OUTLIER = 2.0  # a measurement counts as at most so many times what was expected: somebody else may have had the processor
COUNTS = ("drafted", "verified", "accepted", "pruned")  # by position in a block; pruned: drafted, not verified

Seconds = Callable[[int], float]  # rows of a step -> its seconds


# ---------------------------------------------------------------- choosing lengths


def best_budget(survival: Sequence[Sequence[float]], rows: int, seconds: Seconds, most: int, early_stop: bool) -> int:
    """The number of drafts, at most `most`, that makes tokens per second largest for `rows` sequences. With `early_stop` the
    first draft that does not help ends the search; without, all numbers are looked at and the smallest best one is taken."""
    ranked = sorted((a for block in survival for a in block), reverse=True)[:most]
    tau, best, at = float(rows), rows / seconds(rows), 0
    for count, a in enumerate(ranked, 1):
        tau += a
        rate = tau / seconds(rows + count)
        if rate > best:
            best, at = rate, count
        elif early_stop:
            break
    return at


def top_lengths(survival: Sequence[Sequence[float]], budget: int) -> list[int]:
    """Hand `budget` rows to the likeliest drafts. Ties: the lower position in its block, then the earlier sequence."""
    ranked = sorted((-a, place, i) for i, block in enumerate(survival) for place, a in enumerate(block))
    lengths = [0] * len(survival)
    for _, _, i in ranked[:budget]:
        lengths[i] += 1
    return lengths


def survival_of(confidence: Sequence[float], temperatures: Sequence[float]) -> list[float]:
    """Confidence logits -> probabilities that a draft and all before it are accepted, after sequential temperature scaling."""
    single = (1.0 / (1.0 + math.exp(-max(-60.0, min(60.0, z / t)))) for z, t in zip(confidence, temperatures, strict=False))
    return list(accumulate(single, mul))


CALIBRATION = "calibration.json"  # beside a checkpoint's weights


def calibration_file(choice: str, folder: Path | None) -> Path | None:
    """The file that `EngineConfig.draft_calibration` stands for. `folder`: the checkpoint's, None where there is none."""
    if choice != "auto":
        return None if choice in ("", "none") else Path(choice)
    found = folder / CALIBRATION if folder else None
    return found if found and found.is_file() else None


def read_temperatures(path: str | Path, block: int) -> list[float]:
    """The table {"temperatures": [one a draft position], ...} of a calibration. ValueError names what is wrong."""
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"draft_calibration {path}: {error}") from None
    values = data.get("temperatures") if isinstance(data, dict) else None
    if not isinstance(values, list) or not all(isinstance(v, (int, float)) and 0 < v < math.inf for v in values):
        raise ValueError(f'draft_calibration {path} must be {{"temperatures": [positive numbers]}}; got {values!r}')
    if len(values) != block:
        raise ValueError(f"draft_calibration {path} has {len(values)} temperatures; this draft's block has {block} tokens; fit "
                         "them anew, or go without: draft_calibration 'none'")  # fmt: skip
    return [float(v) for v in values]


# ---------------------------------------------------------------- what a step costs


class StepCurve:
    """Seconds of something by its size, from measured points: straight lines between them, corrected while running.

    A measurement moves the whole curve (a machine that is slower now) and its two neighbours a little more (longer contexts at
    that size): sizes that are not used just now must keep their place beside those that are."""

    def __init__(self, points: Mapping[int, float]) -> None:
        if not points or min(points) < 1 or min(points.values()) <= 0:
            raise ValueError(f"a curve needs points with sizes from 1 and seconds above 0; got {dict(points)}")
        self.sizes, self.values = map(list, zip(*sorted(points.items()), strict=True))

    def __call__(self, size: int) -> float:
        right, share = self._place(size)
        left_value, value = self.values[right - 1], self.values[right]
        if share > 1:  # behind the last point its line goes on, rising
            return value + (share - 1) * max(value - left_value, 0.0)
        return left_value + share * (value - left_value)

    def observe(self, size: int, seconds: float) -> float:
        """Returns the factor by which the whole curve moved."""
        error = bounded(seconds / self(size))
        moved = error**SPEED
        self.scale(moved)
        right, share = self._place(size)
        for at, weight in ((right, share), (right - 1, 1 - share)):
            self.values[at] *= error ** (LOCAL * max(0.0, min(weight, 1.0)))
        return moved

    def scale(self, factor: float) -> None:
        self.values = [value * factor for value in self.values]

    def _place(self, size: int) -> tuple[int, float]:
        """The point to the right of a size (or the last one), and how far it has come towards it from the one before."""
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        if right == 0:
            return 0, 1.0
        left = self.sizes[right - 1]
        return right, (size - left) / (self.sizes[right] - left)


def bounded(error: float) -> float:
    return min(max(error, 1 / OUTLIER), OUTLIER)


@dataclass(slots=True)
class Costs:
    """What a step takes apart: the forward pass and logits by rows, a draft by sequences, and the rest: sampling, the host."""

    forward: StepCurve
    draft: StepCurve
    rest: list[float] = field(default_factory=lambda: [0.0, 0.0])  # seconds of steps that verify no draft, and that do

    uneven: float = 1.0  # what a forward pass takes where sequences verify different numbers of drafts, for its curve's seconds

    def step(self, sequences: int, drafting: int, even: bool = True) -> Seconds:
        """Rows -> seconds of a step of so many sequences, of which `drafting` get drafts behind it."""
        plain, verifies = self.rest
        fixed = self.draft(drafting) if drafting else 0.0

        def seconds(rows: int) -> float:
            if rows <= sequences:
                return self.forward(rows) + fixed + (plain or verifies)
            return self.forward(rows) * (1.0 if even else self.uneven) + fixed + (verifies or plain)

        return seconds

    def observe(self, rows: int, drafted: int, seconds: Mapping[str, float], verifies: bool, even: bool = True) -> None:
        """A step that only decoded. seconds: as in `Result`. `even`: all sequences verified as many drafts."""
        took = seconds["forward"] + seconds["logits"]
        if not even:
            took /= self.uneven
            self.uneven = max(1.0, self.uneven * bounded(took / self.forward(rows)) ** UNEVEN)
        moved = self.forward.observe(rows, took)
        if drafted:
            self.draft.observe(drafted, seconds["draft"])
        else:  # the same machine
            self.draft.scale(moved)
        rest = sum(seconds.get(name, 0.0) for name in ("restore", "sample", "pack", "host"))
        known = self.rest[verifies]
        self.rest[verifies] += SLOW * (rest - known) if known else rest


# ---------------------------------------------------------------- the policy


@dataclass(slots=True)
class Options:
    block: int  # drafts that the model proposes at a time
    budget: int | None = None  # drafts that a step verifies at most; None: what the costs say
    temperatures: Sequence[float] = ()  # of sequential calibration, one a position; none: 1
    gate: float = 0.3  # a step that rejects more of a sequence's drafts than this is a bad one
    exact: bool = False  # acceptance that gives the same tokens however many are verified: then a choice can bend nothing
    calibration: str = "none"  # the file that the temperatures are of


@dataclass(slots=True)
class Ready:
    """A sequence about to decode, and how many drafts it could verify at most."""

    sequence: seq.Sequence
    most: int


@dataclass(slots=True)
class Speculator:
    """Policy and statistics of one engine. `lengths` (or `budget`, and then `deal`) and `wants` before a step, `settle` behind
    it."""

    stops_early: ClassVar[bool] = True  # what the proof of unbiasedness needs where a budget is made from new confidences

    options: Options
    costs: Costs | None = None  # needed without a fixed budget
    step: int = 0
    counts: dict[str, list[int]] = field(init=False)
    calibration: Calibration = field(init=False)
    tokens: int = 0  # chosen in steps that verified drafts
    windows: int = 0  # sequences' steps that verified drafts
    gated: int = 0  # times that the gate closed
    typical: list[float] = field(init=False)  # survival by position, averaged over sequences, those that draft little too
    _promised: float = 1.0  # of verified drafts, how many the confidences let expect and how many became output: averages
    _kept: float = 1.0
    _spread: float = 1.0  # of those that stood, averaged: the variance
    _drafting: int = 0  # sequences that have drafted
    _saved: float = 0.0  # seconds that may go into trying
    _probing: bool = False
    _fitted: list[float] = field(default_factory=list)
    _fitted_at: int = 1  # windows, when they were fitted
    _plain_at: int = 0  # the last step without any
    _plain_after: int = FIRST_PLAIN
    _quiet_until: int = 0  # the step that asks again who should draft

    def __post_init__(self) -> None:
        block = self.options.block
        self.counts = {name: [0] * block for name in COUNTS}
        self.typical = [1.0] * block  # optimistic until known
        self.calibration = Calibration(block)
        self.options.temperatures = list(self.options.temperatures) or [1.0] * block
        assert self.costs is not None or self.options.budget is not None

    # ------------------------------------------------------------ before a step

    def lengths(self, ready: Sequence[Ready], spare: int) -> list[int]:
        """How many drafts each sequence verifies in the coming step: at most `spare` rows in all."""
        newest = [entry.sequence.draft.survival[: entry.most] for entry in ready]
        settled, survival = not self.options.exact and any(entry.sequence.draft.older for entry in ready), newest
        if settled:  # a sequence without an older block counts as a typical one
            survival = [
                (entry.sequence.draft.older or self.typical)[: len(block)] for entry, block in zip(ready, newest, strict=True)
            ]
        return top_lengths(newest, self._step(survival, spare, early=not settled and not self.options.exact))

    def budget(self, ready: Sequence[Ready], spare: int) -> int:
        """How many drafts the coming step verifies in all, where they are proposed while it is planned: made from the blocks
        before them, which the step under way settles. `deal` then says which they are."""
        survival = [self._hope(entry.sequence)[: entry.most] for entry in ready]
        return self._step(survival, spare, early=False)

    def deal(self, confidence: Sequence[Sequence[float]], budget: int) -> list[int]:
        """Hand a budget to new blocks of these confidence logits: how many each verifies. Any thread may ask."""
        return top_lengths([survival_of(block, self.options.temperatures) for block in confidence], budget)

    def _step(self, survival: list[list[float]], spare: int, early: bool) -> int:
        """A step begins. How many drafts it verifies in all, by what is thought of them."""
        self.step += 1
        if not any(survival):
            self._plain_at = self.step
            return 0
        most = sum(map(len, survival))
        return min(self._budget(survival, most, early and self.stops_early), most, spare)

    def _budget(self, survival: list[list[float]], most: int, early: bool) -> int:
        if self.options.budget is not None:
            return self.options.budget
        if self._probing:
            self._probing = False
            return PROBES
        sequences, drafting = len(survival), sum(map(bool, survival))  # again as many, as far as is known
        worth = [[a * self.trust for a in block] for block in survival]
        uneven, even = (self.costs.step(sequences, drafting, even) for even in (False, True))
        budget = best_budget(worth, sequences, uneven if sequences > 1 else even, most, early_stop=early)
        if early or len({len(block) for block in survival}) > 1:
            return budget
        tau = [sequences + sum(sorted((a for block in worth for a in block), reverse=True)[:n]) for n in (budget, most)]
        rate = tau[0] / (uneven if 0 < budget < most and sequences > 1 else even)(sequences + budget)
        return most if tau[1] / even(sequences + most) >= rate else budget

    def wants(self, sampled: Sequence[seq.Sequence]) -> list[seq.Sequence]:
        """Who of those that get a token in this step is to get new drafts behind it."""
        may = [s for s in sampled if not self._ends(s)]
        if self.options.budget is not None:
            return [s for s in may if s.draft.closed_until <= self.step]
        if self.step - self._plain_at >= self._plain_after:
            self._plain_after = min(2 * self._plain_after, PLAIN_STEPS)
            return []
        if self._quiet_until > self.step:
            return self._tries(len(sampled), 0, may)
        ranked = sorted(((-sum(self._hope(s)) * trust, i, trust) for i, s in enumerate(may) for trust in (self._trust_in(s),)))
        may, trusts = [may[i] for _, i, _ in ranked], [trust for *_, trust in ranked]
        count = self._how_many(len(sampled), may, trusts)
        if not count:
            self._quiet_until = self.step + QUIET
        return may[:count] + self._tries(len(sampled), count, may[count:])

    def _how_many(self, sequences: int, ranked: Sequence[seq.Sequence], trusts: Sequence[float]) -> int:
        """How many, the first of `ranked`, should draft in a step of `sequences` for most tokens a second, if all of them
        verify equally many. In doubt they do: who drafts learns what drafts are worth, who stopped by mistake does not."""
        best, at = sequences / self.costs.step(sequences, 0)(sequences), 0
        stand = [0.0] * self.options.block  # by position, of all so far
        doubt = self._doubt
        for count, (one, trust) in enumerate(zip(ranked, trusts, strict=True), 1):
            stand = [all_ + a * (trust + doubt) for all_, a in zip(stand, self._hope(one), strict=True)]
            if count % (1 << max(0, count.bit_length() - 4)) and count < len(ranked):
                continue  # eight numbers between one and its double do
            seconds, tau = self.costs.step(sequences, count, even=count == sequences), float(sequences)
            for length, more in enumerate(stand, 1):
                tau += more
                if (rate := tau / seconds(sequences + count * length)) > best:
                    best, at = rate, count
        return at

    def _tries(self, sequences: int, drafting: int, others: Sequence[seq.Sequence]) -> list[seq.Sequence]:
        """Who drafts to learn whether times have changed: those longest without, when enough is saved for what it costs."""
        count = min(PROBES, len(others))
        if not count:
            return []
        step = self.costs.step(sequences, drafting)(sequences)
        price = max(0.0, self.costs.step(sequences, drafting + count)(sequences + PROBES) - step)
        self._saved = min(self._saved + PROBE_SHARE * step, price)
        if self._saved < price:
            return []
        self._saved, self._probing = 0.0, not drafting  # where nobody else drafts they verify, or `trust` would learn nothing
        return sorted(others, key=lambda s: s.draft.seen)[:count]

    def _hope(self, sequence: seq.Sequence) -> list[float]:
        """Survival by position that may be expected of its next block."""
        return sequence.draft.hope or self.typical

    def _trust_in(self, sequence: seq.Sequence) -> float:
        """What its confidences are worth: what those of all are, and at the gate what its own were lately, beside a few of all:
        two unlucky blocks are not the truth."""
        draft = sequence.draft
        if draft.closed_until <= self.step:
            return self.trust
        return (draft.kept + OTHERS * self.trust) / (draft.promised + OTHERS)

    @staticmethod
    def _ends(sequence: seq.Sequence) -> bool:
        """At most one token may follow this step's first: a draft could not save a step."""
        before = max(0, sequence.pending - 1)  # tokens of a step under way
        return sequence.max_len - len(sequence.ids) - before <= 2

    @property
    def trust(self) -> float:
        """What a confidence is worth here: drafts that stood per draft that was promised, lately."""
        return self._kept / self._promised

    @property
    def _doubt(self) -> float:
        """One standard error of `trust`."""
        return math.sqrt(self._spread * _weight(self.windows, FAITH)) / self._promised

    # ------------------------------------------------------------ behind a step

    def settle(
        self, plan: seq.Plan, result: seq.Result, running: Sequence[seq.Sequence], kept: Sequence[int] | None = None
    ) -> None:
        """Learn from a step; hand out its proposals. Drafts live for one step: who got none has none. `kept`: of each sample's
        tokens those up to the one that ends its output."""
        kept = kept or [len(chosen) for chosen in result.tokens]
        for sample, chosen, useful in zip(plan.samples, result.tokens, kept, strict=True):
            for place in range(len(sample.sequence.draft.tokens)):
                self.counts["verified" if place < len(sample.drafts) else "pruned"][place] += 1
            if sample.drafts and chosen:
                self._judge(sample, len(chosen) - 1, useful - 1)
        for sequence in running:
            draft, proposal = sequence.draft, result.proposals.get(sequence)
            draft.older = draft.survival
            draft.tokens, draft.confidence, draft.survival = [], [], []
            if proposal is not None:
                draft.tokens, draft.confidence = proposal.tokens, proposal.confidence
                draft.survival = survival_of(proposal.confidence, self.options.temperatures)
                self._learn(draft)
        decodes_only = len(plan.samples) == len(plan.rows) == plan.rows_planned - plan.draft_rows > 0
        whole = not (result.gone or result.failed or result.astray)  # else fewer rows ran than were planned, perhaps none
        if self.costs is not None and decodes_only and whole and not plan.restore:
            even = len({len(sample.drafts) for sample in plan.samples}) == 1
            self.costs.observe(plan.rows_planned, len(result.proposals), result.seconds, plan.draft_rows > 0, even)

    def _learn(self, draft: seq.Draft) -> None:
        """From a new block."""
        if not draft.hope:
            self._drafting, draft.hope = self._drafting + 1, list(self.typical)
        draft.blocks, draft.seen = draft.blocks + 1, self.step
        draft.hope = _moved(draft.hope, draft.survival, _weight(draft.blocks, 1, RECENT))
        self.typical = _moved(self.typical, draft.survival, _weight(self._drafting, GUESS, FRESH) / draft.blocks)
        for place in range(len(draft.tokens)):
            self.counts["drafted"][place] += 1

    def _judge(self, sample: seq.Sample, accepted: int, useful: int) -> None:
        """`useful`: of the accepted drafts, those that are output."""
        draft, verified = sample.sequence.draft, len(sample.drafts)
        self.windows += 1
        self.tokens += accepted + 1
        self.calibration.observe(draft.confidence, verified, accepted)
        for place in range(accepted):
            self.counts["accepted"][place] += 1
        weight = _weight(self.windows, FAITH)
        promised = sum(draft.survival[:verified])
        self._promised += weight * (promised - self._promised)
        self._spread += weight * ((useful - self._kept) ** 2 - self._spread)
        self._kept += weight * (useful - self._kept)
        draft.promised += promised - draft.promised / LATELY
        draft.kept += useful - draft.kept / LATELY
        if (verified - accepted) / verified <= self.options.gate:
            draft.bad_steps = 0
            return
        draft.bad_steps += 1
        if draft.bad_steps >= GATE_STEPS:
            draft.bad_steps, draft.closed_until = 0, self.step + CLOSED_STEPS
            self.gated += 1

    # ------------------------------------------------------------ what is told

    def stats(self) -> dict[str, float]:
        """Numbers for `/metrics`; "name/label=value" has a label."""
        if self.windows >= 1.2 * self._fitted_at:  # each takes some milliseconds
            self._fitted_at, self._fitted = self.windows, self.calibration.temperatures()
        out: dict[str, float] = {f"draft_temperature/position={i}": t for i, t in enumerate(self._fitted, 1)}
        out |= {f"draft_temperature_used/position={i}": t for i, t in enumerate(self.options.temperatures, 1)}
        out |= {
            "draft_windows": self.windows,
            "draft_window_tokens": self.tokens,
            "draft_gate_closed": self.gated,
            "draft_trust": self.trust,
        }
        for name, counts in self.counts.items():
            out |= {f"drafts_{name}/position={place}": count for place, count in enumerate(counts, 1)}
        if self.costs is not None:
            for kind, curve in (("forward", self.costs.forward), ("draft", self.costs.draft)):
                points = zip(curve.sizes, curve.values, strict=True)
                out |= {f"step_curve_{kind}_seconds/size={size}": value for size, value in points}
        return out


def _weight(count: int, guess: int, memory: int = MEMORY) -> float:
    """Of the newest of `count` values in an average that began as a guess: a plain average at first, then one that forgets."""
    return 1 / min(count + guess, memory)


def _moved(known: Sequence[float], values: Sequence[float], weight: float) -> list[float]:
    return [old + weight * (new - old) for old, new in zip(known, values, strict=True)]
