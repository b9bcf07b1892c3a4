"""Every default that is a number of threads counts the cores that the process may use, not those of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ASK = """
import json, os
from pathlib import Path
os.cpu_count = lambda: 32  # a large machine
os.environ.pop("OMP_NUM_THREADS", None)
from headrace.bus import BusSettings
from headrace.cli import testing
from headrace.cli.console import Console
from headrace.cli.state import StateDir
from headrace.cli.system import Options, System
from headrace.decode.service import DecodeSettings
from headrace.vision.settings import VisionSettings
from headrace.worker.settings import WorkerSettings

class Nats:
    settings = BusSettings("nats://127.0.0.1:1")

def threads(**options):
    system = System(Options(engine="sim", **options), StateDir(Path("nowhere")), Console(quiet=True))
    system.nats = Nats()
    return [int(child.env["OMP_NUM_THREADS"]) for child in system._children(1)["decode"]]

print(json.dumps({
    "worker": WorkerSettings(engine="sim").compute_threads, "both": DecodeSettings(engine="sim", both=True).compute_threads,
    "vision": VisionSettings(model="m").compute_threads, "system": threads(both=True), "shared": threads(prefill=2, decode=2),
    "pytest": testing.defaults(),
}))
"""


def ask(cores: set[int]) -> dict:
    def pin() -> None:
        os.sched_setaffinity(0, cores)

    done = subprocess.run(
        [sys.executable, "-c", ASK], preexec_fn=pin, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    return json.loads(done.stdout)


def test_one_core_of_a_large_machine_is_one_core():
    said = ask({min(os.sched_getaffinity(0))})
    one = {"worker": 1, "both": 1, "vision": 1, "system": [1], "shared": [1, 1]}
    assert {name: said[name] for name in one} == one
    assert "-n" not in said["pytest"]


def test_all_cores_that_it_may_use_are_shared_out():
    cores = os.sched_getaffinity(0)
    said = ask(cores)
    assert said["both"] == len(cores) and said["system"] == [len(cores)]
    assert said["worker"] == said["vision"] == max(1, len(cores) // 2)
    assert said["shared"] == 2 * [max(1, len(cores) // 4)]


def test_nobody_asks_for_the_cores_of_the_machine_except_who_reads_its_load():
    root = Path(__file__).parents[3]
    sources = [path for part in ("libs", "services", "models") for path in (root / part).rglob("*.py")]
    assert [path.name for path in sources if "cpu_count(" in path.read_text() and path.name != "cores.py"] == ["doctor.py"]
