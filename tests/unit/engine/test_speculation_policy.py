"""The policy of speculative decoding as pure functions: budgets, lengths, step times, the gate, calibration files."""

import json
import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine import api, speculation_sim
from headrace.engine import sequence as seq
from headrace.engine.speculation import (
    CLOSED_STEPS,
    FIRST_PLAIN,
    GATE_STEPS,
    PLAIN_STEPS,
    PROBE_SHARE,
    PROBES,
    QUIET,
    Costs,
    Options,
    Ready,
    Speculator,
    StepCurve,
    best_budget,
    read_temperatures,
    survival_of,
    top_lengths,
)
from headrace.engine.stepcurve import _curve

blocks = st.lists(st.lists(st.floats(0.01, 1.0), max_size=5), min_size=1, max_size=6).map(
    lambda lists: [sorted(one, reverse=True) for one in lists]
)
curves = st.lists(st.floats(0.1, 3.0), min_size=2, max_size=6).map(lambda v: StepCurve({2**i: s for i, s in enumerate(v)}))


def rate(survival, lengths, seconds):
    tau = sum(1 + sum(block[:n]) for block, n in zip(survival, lengths, strict=True))
    return tau / seconds(len(survival) + sum(lengths))


@given(blocks, curves, st.integers(0, 40))
def test_the_search_over_all_budgets_finds_the_best_and_no_other_lengths_are_better(survival, curve, most):
    budget = best_budget(survival, len(survival), curve, most, early_stop=False)
    best = rate(survival, top_lengths(survival, budget), curve)
    rng = random.Random(1)
    assert budget <= most
    for _ in range(50):
        lengths = [rng.randint(0, len(block)) for block in survival]
        if sum(lengths) <= most:
            assert rate(survival, lengths, curve) <= best * (1 + 1e-9)


@given(blocks, curves)
def test_early_stop_is_the_first_peak_and_does_not_depend_on_what_comes_behind_it(survival, curve):
    """Algorithm 1: whether a draft is admitted is settled by those that are at least as likely."""
    rows, most = len(survival), 40
    budget = best_budget(survival, rows, curve, most, early_stop=True)
    rates = [rate(survival, top_lengths(survival, k), curve) for k in range(budget + 1)]
    assert all(a < b for a, b in zip(rates, rates[1:], strict=False))
    ranked = sorted((a for block in survival for a in block), reverse=True)
    if budget < len(ranked):
        floor = ranked[budget]  # the first that is refused; all behind it may be anything
        changed = [[a if a >= floor else 0.0 for a in block] for block in survival]
        assert best_budget(changed, rows, curve, most, early_stop=True) == budget


def test_the_papers_example():
    """SPS(1, 2, 3) = 1, 0.5, 0.45 and a = 0.8: behind the first draft, which does not help, a certain second one would."""
    curve = StepCurve({1: 1.0, 2: 1 / 0.5, 3: 1 / 0.45})
    for second, without in ((0.8, 2), (0.0, 0)):
        assert best_budget([[0.8, second]], 1, curve, 9, early_stop=True) == 0
        assert best_budget([[0.8, second]], 1, curve, 9, early_stop=False) == without


@given(blocks, st.integers(0, 40))
def test_lengths_are_prefixes_of_the_likeliest(survival, budget):
    lengths = top_lengths(survival, budget)
    assert sum(lengths) == min(budget, sum(map(len, survival)))
    admitted = [a for block, n in zip(survival, lengths, strict=True) for a in block[:n]]
    refused = [a for block, n in zip(survival, lengths, strict=True) for a in block[n:]]
    assert not admitted or not refused or min(admitted) >= max(refused)


def test_ties_go_to_the_lower_position_then_to_the_earlier_sequence():
    assert top_lengths([[0.5, 0.5], [0.5, 0.5], [0.5]], 3) == [1, 1, 1]
    assert top_lengths([[0.5, 0.5], [0.5, 0.5]], 3) == [2, 1]


def test_survival_is_the_product_of_calibrated_confidences():
    assert survival_of([0.0, 0.0], [1.0, 1.0]) == [0.5, 0.25]
    assert survival_of([2.0], [2.0]) == [1 / (1 + math.exp(-1))]
    assert survival_of([1e9, -1e9], [1.0, 1.0])[1] < 1e-20


def test_a_calibration_file_is_read_or_named(tmp_path):
    path = tmp_path / "sts.json"
    for content, message in (
        (None, "No such file"),
        ("{", "draft_calibration"),
        ("[1, 2]", "temperatures"),
        ('{"temperatures": [1, -2]}', "positive"),
        ('{"temperatures": [1, 2, 3]}', "3 temperatures; this draft's block has 2"),
    ):
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=message):
            read_temperatures(path, 2)
    path.write_text(json.dumps({"temperatures": [1, 0.5], "dataset": "x", "num_samples": 9}))
    assert read_temperatures(path, 2) == [1.0, 0.5]


def test_a_curve_is_straight_between_points_and_rises_behind_them():
    curve = StepCurve({1: 1.0, 3: 2.0, 5: 6.0})
    assert [curve(n) for n in (1, 2, 3, 4, 5, 6)] == [1.0, 1.5, 2.0, 4.0, 6.0, 8.0]
    falling = StepCurve({1: 2.0, 2: 1.0})
    assert falling(5) == 1.0 and StepCurve({4: 3.0})(100) == 3.0
    with pytest.raises(ValueError, match="points"):
        StepCurve({})


@given(st.floats(0.2, 5.0), st.integers(1, 64))
def test_a_curve_learns_what_is_measured(factor, size):
    """A machine that is slower everywhere moves everything; a size that is slower moves most where it is."""
    curve = StepCurve({1: 1.0, 8: 2.0, 64: 4.0})
    want = curve(size) * factor
    for _ in range(200):
        curve.observe(size, want)
    assert math.isclose(curve(size), want, rel_tol=1e-3)
    assert all(value > 0 for value in curve.values)


def sequence(name: str, *survival: float, ids: int = 4, max_tokens: int = 100) -> seq.Sequence:
    request = api.EngineRequest(name, [5] * ids, [], api.SamplingParams(max_tokens=max_tokens))
    one = seq.Sequence(request, [5] * ids, [], 0, prompt_len=ids, max_len=ids + max_tokens)
    one.draft.tokens, one.draft.survival = [7] * len(survival), list(survival)
    one.draft.confidence = [0.0] * len(survival)
    return one


def verified(speculator: Speculator, one: seq.Sequence, drafts: int, accepted: int, running=True) -> None:
    """One step in which `one` verified so many drafts."""
    speculator.lengths([Ready(one, 5)], 100)
    plan = seq.Plan(samples=[seq.Sample(one, 0, 4, one.draft.tokens[:drafts])])
    chosen = [seq.Chosen(7)] * (accepted + 1)
    result = seq.Result(tokens=[chosen], proposals={one: seq.Proposal([7] * 5, [2.0] * 5)})
    speculator.settle(plan, result, [one] if running else [])


def test_the_gate_closes_after_three_bad_steps_and_opens_again():
    speculator, one = Speculator(Options(5, budget=100)), sequence("a", *[0.9] * 5)
    for accepted in (1, 1, 4, 1, 1):  # two bad ones, a good one, two bad ones
        verified(speculator, one, 5, accepted)
        assert speculator.wants([one]) == [one]
    verified(speculator, one, 5, 3)  # 2 of 5 are more than 0.3
    assert speculator.wants([one]) == [] and speculator.gated == 1
    other = sequence("b")
    for _ in range(CLOSED_STEPS - 1):
        speculator.lengths([Ready(one, 0)], 100)
        assert speculator.wants([one, other]) == [other]
    speculator.lengths([], 100)
    assert speculator.wants([one]) == [one]
    never = Speculator(Options(5, budget=100, gate=1.0))
    for _ in range(GATE_STEPS + 1):
        verified(never, one, 5, 0)
    assert never.gated == 0


def test_drafts_live_for_one_step_and_the_block_before_is_remembered():
    speculator, one = Speculator(Options(5, budget=100)), sequence("a", 0.9, 0.8)
    verified(speculator, one, 2, 1)
    assert one.draft.older == [0.9, 0.8] and len(one.draft.tokens) == 5
    speculator.settle(seq.Plan(), seq.Result(), [one])
    assert one.draft.tokens == [] and one.draft.survival == []
    counts = speculator.counts
    assert (counts["drafted"][0], counts["verified"][1], counts["accepted"][:2]) == (1, 1, [1, 0])


def costs(row: float = 0.0, draft: float = 1e-9) -> Costs:
    """A step of B rows takes 1 + row * (B - 1) seconds, a draft step `draft`."""
    return Costs(StepCurve({1: 1.0, 101: 1.0 + 100 * row}), StepCurve({1: draft}))


def test_cheap_rows_verify_everything_and_dear_ones_nothing():
    ready = [Ready(sequence("a", 0.9, 0.5), 5), Ready(sequence("b", 0.8, 0.1), 5)]
    assert Speculator(Options(5), costs()).lengths(ready, 100) == [2, 2]
    assert Speculator(Options(5), costs(row=1.0)).lengths(ready, 100) == [0, 0]
    assert Speculator(Options(5), costs(row=0.25)).lengths(ready, 100) == [1, 1]
    assert Speculator(Options(5), costs()).lengths(ready, 3) == [2, 1], "rows are left to prompts"


def test_the_budget_is_made_from_older_confidences_and_handed_out_by_newer_ones():
    a, b = sequence("a", 0.99, 0.99), sequence("b", 0.6, 0.5)
    a.draft.older, b.draft.older = [0.9, 0.0], [0.0, 0.0]
    speculator = Speculator(Options(5), costs(row=0.3))
    assert speculator.lengths([Ready(a, 5), Ready(b, 5)], 100) == [1, 0]
    a.draft.older, b.draft.older = [0.9, 0.9], [0.9, 0.9]
    assert speculator.lengths([Ready(a, 5), Ready(b, 5)], 100) == [2, 2]


def test_where_nothing_can_be_bent_the_newest_confidences_make_the_budget():
    """Exact acceptance: the tokens are the same however many drafts are verified."""
    curve = StepCurve({1: 1.0, 2: 1.05, 64: 60.0})
    for exact, budget in ((False, 0), (True, 1)):
        speculator, one = Speculator(Options(1, exact=exact), Costs(curve, StepCurve({1: 1e-6}))), sequence("a", 0.9)
        one.draft.older = [0.01]
        assert speculator.lengths([Ready(one, 1)], 9) == [budget]


def test_uneven_windows_that_cost_as_much_as_whole_ones_are_not_chosen():
    rows = {n: 1.0 + 0.02 * n for n in (1, 2, 4, 8, 12)}
    speculator = Speculator(Options(5, exact=True), Costs(StepCurve(rows), StepCurve({1: 1e-6})))
    some = [sequence("a", 0.9, 0.8, 0.7, 0.6, 0.5), sequence("b", 0.9, 0.8, 0.01, 0.01, 0.01)]
    ready = [Ready(one, 5) for one in some]
    assert speculator.lengths(ready, 99) == [5, 2], "by the rows alone"
    seconds = dict.fromkeys(("logits", "restore", "sample", "pack"), 0.0)
    for _ in range(300):
        speculator.costs.observe(9, 0, seconds | {"forward": 1.25}, True, even=False)
        speculator.costs.observe(12, 0, seconds | {"forward": 1.24}, True, even=True)
    assert speculator.costs.uneven > 1.01
    assert speculator.lengths(ready, 99) == [5, 5]


def test_what_a_step_without_drafts_takes_is_measured_soon_and_again_now_and_then():
    speculator, one = (
        Speculator(Options(5), Costs(StepCurve({1: 1.0, 6: 1.1}), StepCurve({1: 1e-3}))),
        sequence("a", *[0.99] * 5),
    )
    drafts = []
    for _ in range(2 * PLAIN_STEPS + 10):
        lengths = speculator.lengths([Ready(one, len(one.draft.tokens))], 100)
        wanted = speculator.wants([one])
        drafts.append(bool(wanted))
        plan = seq.Plan(samples=[seq.Sample(one, 0, 4, one.draft.tokens[: lengths[0]])])
        result = seq.Result(tokens=[[seq.Chosen(7)] * (lengths[0] + 1)])
        result.proposals = {one: seq.Proposal([7] * 5, [5.0] * 5)} if wanted else {}
        speculator.settle(plan, result, [one])
    plain = [step for step, drafted in enumerate(drafts, 1) if not drafted]
    gaps = [after - before for before, after in pairwise([0, *plain])]
    assert gaps == [FIRST_PLAIN] + [1 + min(PLAIN_STEPS, FIRST_PLAIN << i) for i in range(1, len(gaps))]
    assert gaps[-1] == PLAIN_STEPS + 1


@pytest.mark.parametrize("lost", ["gone", "failed", "astray"])
def test_a_step_that_lost_a_sequence_measures_nothing(lost):
    """Fewer rows ran than were planned; where nobody was left there are no seconds of logits at all."""
    costs = Costs(StepCurve({1: 1.0, 6: 1.1}), StepCurve({1: 1e-3}))
    speculator, one = Speculator(Options(5), costs), sequence("a")
    plan = seq.Plan(rows=[None], samples=[seq.Sample(one, 0, 4)], rows_planned=1)
    result = seq.Result(tokens=[[]], seconds={"forward": 9.0})
    setattr(result, lost, {one: "an error"} if lost == "failed" else {one})
    speculator.settle(plan, result, [])
    assert costs.forward(1) == 1.0 and costs.rest == [0.0, 0.0]


def test_drafts_behind_the_end_of_an_output_are_worth_nothing():
    """They stood, so the gate has nothing against them; but what is promised for the next ones counts output alone."""
    speculator, one = Speculator(Options(5, budget=100)), sequence("a", *[0.99] * 5)
    for _ in range(60):
        speculator.lengths([Ready(one, 5)], 100)
        plan = seq.Plan(samples=[seq.Sample(one, 0, 4, [7] * 5)])
        result = seq.Result(tokens=[[seq.Chosen(7)] * 6], proposals={one: seq.Proposal([7] * 5, [5.0] * 5)})
        speculator.settle(plan, result, [one], kept=[2])
    assert speculator.trust < 0.5 and speculator.gated == 0 and speculator.counts["accepted"] == [60] * 5


def test_step_times_take_turns_and_never_fall_with_more_rows():
    clock, calls = [0.0], []

    def work(size: int) -> None:
        calls.append(size)
        slow = 3.0 if len(calls) < 5 else 1.0  # the machine is busy at first
        clock[0] += slow * size

    assert _curve([1, 2, 4], work, math.inf, lambda: clock[0]) == {1: 1.0, 2: 2.0, 4: 4.0}
    clock[0], calls[:] = 0.0, []
    assert _curve([1, 2, 4], lambda size: clock.__setitem__(0, clock[0] + 5 - size), math.inf, lambda: clock[0]) == {
        1: 1.0, 2: 1.0, 4: 1.0
    }  # fmt: skip


def test_the_first_run_of_all_which_compiles_leaves_the_time_for_measuring(monkeypatch):
    """Else the curve of a machine's first engine had one point, and drafts cost nothing by it."""
    now, calls = [0.0], []

    def work(size: int) -> None:
        now[0] += 0.01 * size if calls else 100.0
        calls.append(size)

    monkeypatch.setattr("headrace.engine.stepcurve.time.monotonic", lambda: now[0])
    assert _curve([1, 2, 4], work, 3.0, lambda: now[0]) == pytest.approx({1: 0.01, 2: 0.02, 4: 0.04})


def stepped(speculator: Speculator, many: list[seq.Sequence], accepted: int, confidence: dict[str, float]) -> list[str]:
    """One whole step, each verifying what it is given; who drafts behind it. `accepted`: of each one's drafts at most."""
    lengths = speculator.lengths([Ready(one, len(one.draft.tokens)) for one in many], 1000)
    verified = [one.draft.tokens[:n] for one, n in zip(many, lengths, strict=True)]
    plan = seq.Plan(samples=[seq.Sample(one, i, 4, drafts) for i, (one, drafts) in enumerate(zip(many, verified, strict=True))])
    wanted = speculator.wants(many)
    result = seq.Result(tokens=[[seq.Chosen(7)] * (min(n, accepted) + 1) for n in lengths])
    result.proposals = {one: seq.Proposal([7] * 5, [confidence[one.name]] * 5) for one in wanted}
    speculator.settle(plan, result, many)
    return sorted(one.name for one in wanted)


def test_drafting_stops_where_it_costs_more_than_it_brings_and_is_tried_again_for_a_small_share_of_the_time():
    """A step takes 1 second, one with drafts 10 more: never worth it, however well they stand."""
    speculator, many = Speculator(Options(5), costs(draft=10.0)), [sequence(str(i)) for i in range(8)]
    tries = []
    for step in range(10_001):
        tries += [(step, name) for name in stepped(speculator, many, 5, dict.fromkeys("01234567", 5.0))]
    assert len({name for _, name in tries}) == 8, "those who have waited longest take their turn"
    steps = sorted({step for step, _ in tries})
    assert len(tries) == PROBES * len(steps)
    assert 0.8 * PROBE_SHARE < 10.0 * len(steps) / 10_000 < 1.1 * PROBE_SHARE
    assert steps[-1] < 10_000
    assert sum(speculator.counts["verified"]) == PROBES * len(steps), "a try verifies, or nothing would be learned"


def test_where_nobody_is_to_draft_that_is_not_weighed_in_every_step(monkeypatch):
    """The host's time for it would be felt in each. Those that are tried meanwhile are tried all the same."""
    asked = []
    how_many = Speculator._how_many
    monkeypatch.setattr(Speculator, "_how_many", lambda self, *rest: asked.append(self.step) or how_many(self, *rest))
    dear = StepCurve({1: 1.0, 64: 64.0})
    policy = Speculator(Options(5), Costs(dear, dear))
    policy.typical, policy.windows, sequences = [0.01] * 5, 1000, [sequence(str(i)) for i in range(8)]
    tried = []
    for _ in range(4000):
        policy.lengths([Ready(one, 0) for one in sequences], 64)
        tried.append(len(policy.wants(sequences)))
    assert asked == [*range(1, 4001, QUIET)]
    assert set(tried) == {0, PROBES}


def test_a_few_among_many_do_not_draft_where_that_costs_the_others_more():
    """A draft of one sequence takes as long as one of all here: all gain by it, one does not make up for it."""
    speculator = Speculator(Options(5), Costs(StepCurve({1: 1.0, 101: 3.0}), StepCurve({1: 0.5})))
    many = [sequence(str(i)) for i in range(16)]
    assert speculator.wants(many) == many
    for one in many[1:]:
        one.draft.hope = [0.05, 0.0, 0.0, 0.0, 0.0]
    assert speculator.wants(many) == []


def test_those_whose_own_blocks_promise_little_are_left_out_and_the_others_go_on():
    """On a curve where every row and every drafting sequence costs: half of the batch drafts well, half never does."""
    curve = Costs(StepCurve({1: 1.0, 101: 3.0}), StepCurve({1: 0.1, 16: 0.8}))
    speculator, many = Speculator(Options(5, exact=True), curve), [sequence(str(i)) for i in range(10, 26)]
    confidence = {one.name: 4.0 if i % 2 else -4.0 for i, one in enumerate(many)}
    speculator._plain_after = PLAIN_STEPS
    history = [stepped(speculator, many, 5, confidence) for _ in range(120)]
    good = sorted(name for name, z in confidence.items() if z > 0)
    assert history[0] == sorted(confidence), "nothing is known of anybody"
    assert [wanted for wanted in history[20:] if not set(good) <= set(wanted)] == []
    assert sum(wanted == good for wanted in history[20:]) > 80


@pytest.mark.parametrize(("row", "goes_on"), [(0.001, True), (0.02, False)])
def test_at_the_gate_a_sequence_is_held_to_what_its_own_drafts_brought(row, goes_on):
    """One of nine brings one draft of five, where its confidences promise all. Where rows are cheap that pays all the same."""
    speculator, many = Speculator(Options(5, exact=True), costs(row=row)), [sequence(str(i)) for i in range(9)]
    one, surely = many[0], {str(i): 5.0 for i in range(9)}
    speculator._plain_after = PLAIN_STEPS
    for _ in range(30):
        stepped(speculator, many, 5, surely)
    assert speculator.gated == 0 and speculator.wants(many) == many
    for _ in range(4 * GATE_STEPS):
        speculator._judge(seq.Sample(one, 0, 4, one.draft.tokens), 1, 1)
    assert speculator.gated == 4 and one.draft.kept / one.draft.promised < 0.4
    assert (one in speculator.wants(many)) == goes_on
    speculator.step = one.draft.closed_until
    assert one in speculator.wants(many), "for a while"


def test_nobody_drafts_for_the_last_token():
    speculator = Speculator(Options(5, budget=9))
    assert speculator.wants([sequence("a", max_tokens=2), sequence("b", max_tokens=3)])[0].name == "b"


def test_confidences_that_promise_too_much_are_trusted_less():
    speculator, one = Speculator(Options(5, budget=100, gate=1.0)), sequence("a", *[0.99] * 5)
    for _ in range(60):
        verified(speculator, one, 5, 0)
    assert speculator.trust < 0.2
    for _ in range(200):
        verified(speculator, one, 5, 5)
    assert speculator.trust > 1.0


@pytest.mark.parametrize("machine", speculation_sim.MACHINES)
@pytest.mark.parametrize("profile", ["0.8 falling", "0.2"])
def test_on_a_clock_of_its_own_the_schedule_comes_near_the_better_fixed_way(machine, profile):
    """By formula, so the same on every machine. All of it: python -m headrace.engine.speculation_sim."""
    chosen = speculation_sim.MACHINES[machine], speculation_sim.PROFILES[profile]
    for batch in (2, 12):
        assert speculation_sim.against_the_better(*chosen, batch, steps=300, warm_up=120) > 0.95


def test_the_schedule_beats_both_fixed_ways_where_only_the_likely_drafts_pay():
    machine, profile = speculation_sim.MACHINES["flat, then linear"], speculation_sim.PROFILES["0.8 falling"]
    assert speculation_sim.against_the_better(machine, profile, 64, steps=200, warm_up=80) > 1.15


# Milliseconds measured on an H200 on 2026-11-30 (gpu.bench_drafts --batch 1,8, 8 layers, context 4,096): benchmarks/gpu.md. A
# draft there takes nearly as long as a step, so at one sequence and even chances drafting pays by three percent.
H200_FORWARD = {1: 4.521, 2: 4.565, 4: 4.537, 8: 5.189, 16: 6.173, 32: 7.442, 48: 7.746}
H200_DRAFT = {1: 3.848, 2: 3.611, 4: 4.157, 8: 4.927}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("profile", ["0.8 falling", "0.5"])
def test_on_a_measured_curve_the_schedule_stays_near_the_better_fixed_way(profile, batch):
    """Where both are nearly the same too: a policy that takes a few unlucky blocks for the truth gives up drafting for good."""
    curves = [StepCurve({size: ms / 1e3 for size, ms in curve.items()}) for curve in (H200_FORWARD, H200_DRAFT)]
    machine = speculation_sim.Machine(*curves)
    chances = speculation_sim.PROFILES[profile]
    for seed in range(2):
        assert speculation_sim.against_the_better(machine, chances, batch, steps=2000, seed=seed) > 0.98
