"""Temperatures from counts: those that the drafts were drawn with, whichever of them were verified."""

import math
import random

import pytest

from headrace.engine import api
from headrace.engine.calibration import LEAST, Calibration
from headrace.engine.core import EngineCore
from headrace.engine.llm import collect
from headrace.engine.toy import ToyModel


@pytest.mark.parametrize("likely_only", [False, True])
def test_the_temperatures_that_drafts_were_drawn_with_are_found(likely_only):
    """Also where only drafts with a high confidence were verified, as a scheduler does."""
    chance, wanted = random.Random(3), [0.7, 1.0, 2.5]
    calibration = Calibration(4)
    for _ in range(30_000):
        logits = [chance.gauss(1.0, 2.0) for _ in range(4)]
        stands = [chance.random() < 1 / (1 + math.exp(-z / t)) for z, t in zip(logits, [*wanted, 1.0], strict=True)]
        verified = next((i for i, z in enumerate(logits[:3]) if likely_only and z < 0), 3)
        calibration.observe(logits, verified, next((i for i in range(verified) if not stands[i]), verified))
    found = calibration.temperatures()
    assert [abs(t / w - 1) < 0.08 for t, w in zip(found, wanted, strict=False)] == [True] * 3, found
    assert found[3] == found[2], "of the last position nothing is known"


def test_without_data_nothing_is_changed():
    assert Calibration(3).temperatures() == [1.0, 1.0, 1.0]
    few = Calibration(2)
    for _ in range(LEAST - 1):
        few.observe([2.0, 2.0], 2, 0)
    assert few.temperatures() == [1.0, 1.0]


def test_an_engine_counts_each_draft_whose_predecessors_stood():
    core = EngineCore(
        ToyModel("exact", draft_block=3), api.EngineConfig(speculative="dspark", draft_budget=1 << 30, rollback_gate=1.0)
    )
    ids = list(range(2, 40))
    todo = [
        api.EngineRequest(f"{i}", ids[i:], [], api.SamplingParams(max_tokens=60, seed=i, ignore_eos=True)) for i in range(8)
    ]
    collect(core, todo)
    speculator = core.speculator
    counted = [sum(seen) for seen in speculator.calibration.seen]
    assert [sum(stood) for stood in speculator.calibration.stood] == speculator.counts["accepted"]
    assert counted[0] == speculator.counts["verified"][0] and counted[1] <= speculator.counts["accepted"][0] and counted[1] > 20
    stats = core.stats()
    assert [stats[f"draft_temperature/position={i}"] for i in (1, 2, 3)] == speculator.calibration.temperatures()
