"""A bounded share of the simulation, as anybody runs it: `python tests/simulation` (more of it: `benchmarks/simulation.md`)."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def simulation(*flags: str) -> subprocess.CompletedProcess:
    """Bounded by the number of schedules, never by time: a slow machine finds the same as a fast one."""
    return subprocess.run([sys.executable, str(HERE), *flags], capture_output=True, text=True, timeout=1800.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_whatever_happens_every_invariant_holds():
    """A failure prints the seed that replays it, and a smaller schedule that fails too."""
    done = simulation("--schedules", "400", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["schedules"] == 400 and result["outcomes"]["answer"] > 400, result


def test_a_seed_is_one_schedule():
    """Every message, in the same order at the same time."""
    first, second = (simulation("--replay", "1017", "--trace") for _ in range(2))
    assert first.returncode == 0, first.stdout + first.stderr
    assert first.stdout == second.stdout and first.stdout.count(" -> ") > 100


@pytest.mark.parametrize("name", ["duplicate-commit", "all-or-nothing", "record", "flag", "index", "gap"])
def test_a_missing_guard_is_found(name):
    """The guards whose absence shows within some tens of schedules; `--mutate all` has the others."""
    done = simulation("--mutate", name, "--schedules", "400")
    assert done.returncode == 0, done.stdout + done.stderr


def test_results_do_not_depend_on_how_many_processes_there_are(tmp_path):
    """Neither of a search nor of a hunt, but for the seconds; and what is written is what is printed."""

    def timeless(data):
        if isinstance(data, dict):
            return {key: timeless(value) for key, value in data.items() if "seconds" not in key or "simulated" in key}
        return [timeless(one) for one in data] if isinstance(data, list) else data

    for flags in (["--keep-going"], ["--mutate", "gap,index,pins", "--bases", "2"]):
        said = []
        for workers in ("1", "3"):
            out = tmp_path / f"{workers}.json"
            done = simulation("--schedules", "50", *flags, "--workers", workers, "--json", "--out", str(out))
            data = json.loads(done.stdout)
            assert data == json.loads(out.read_text())
            said.append(timeless(data))
        assert said[0] == said[1] and said[0]


def test_what_does_not_exist_is_named():
    done = simulation("--mutate", "nonsense")
    assert done.returncode == 2 and "nonsense" in done.stderr and "quarantine" in done.stderr


def test_every_guard_can_be_taken_away():
    """Each mutation still fits the code that it edits; what it does is `--mutate all`'s business."""
    sys.path.insert(0, str(HERE))
    from mutations import MUTATIONS, without
    from simulated import installed

    with installed():
        for name in MUTATIONS:
            with without(name):
                pass
    assert len(MUTATIONS) >= 25


def test_a_world_leaves_no_loop_running_behind():
    """Else every event loop of this process that comes after it cannot start."""
    sys.path.insert(0, str(HERE))
    from schedule import draw
    from simulated import installed
    from world import World

    with installed():
        World(draw(1)).run()
    assert asyncio._get_running_loop() is None
