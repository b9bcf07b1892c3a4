"""What DSpark brings on a GPU: throughput by batch size without drafts, with all verified, and with as many as pay.

    python -m headrace.engine.models.v41.gpu.bench_drafts [--batch 1,8,32,64,128,256] [--context 4096] [--profile 0.8,0.75,...]

The model is that of `bench` with the draft's stages: random weights, released dimensions, so no draft would stand by itself.
Acceptance is by lot: draft i stands with profile[i], give or take a spread, if those before it do, and the confidence head
tells exactly that. First the step curve is measured on the device at the given context (a forward pass with its logits by rows,
a draft by sequences, as a caller sees them who waits). Then `speculation_sim` runs the engine's policy on a clock that takes
what was measured, which the policy sees too; with --curves FILE, what an earlier run measured (the lines of its --json that
have a `curve`), without a device. With --engine the whole engine runs, drafts, verification and sampling included, and only the
decision who stands is replaced (`headrace.engine.bench_speculation`); there the host's work counts, as far as a step that is
planned ahead does not hide it. With both, the whole engine runs on passes of zeros that take what was measured: the host's part
of this machine, beside a device's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .... import bench as engine_bench
from .... import bench_speculation
from ....batch import Segment
from ....runner import Runner
from ....speculation import StepCurve
from ....speculation_sim import BUDGETS, PROFILES, Machine, Profile, throughput
from .bench import RELEASED, SMALL, Rows, Steps, arguments_for, balance, build, configure, device_of, forget, numbers, wait
from .bench_host import without_device
from .model import V41Gpu

Curve = dict[int, float]
LOTS = 5  # seeds of the policy's draws: one alone is off by 2 % and more where a draft hardly pays
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536)  # rows of a graph


def curves(model: V41Gpu, batches: list[int], context: int, times: int, rows: Rows) -> tuple[Curve, Curve]:
    """(rows -> seconds of a forward pass and its logits, sequences -> seconds of a draft) up to the largest batch."""
    most, window = max(batches), model.draft_block + 1
    forward: Curve = {}
    steps = Steps(model, most, context)
    wide = Steps(model, most, context, window)
    for size in [size for size in SIZES if size < most * window] + [most * window]:

        def one(size: int = size) -> dict[str, Any]:
            sequences = size if size <= most else size // window  # no more rows than a graph of this size has
            issue = (steps if size <= most else wide).issue
            count = size if size <= most else sequences * window
            forward[count] = _seconds(model, lambda: issue(sequences), times)
            return {"ms": forward[count] * 1e3, "sequences": sequences, "computed": count}

        rows.add({"curve": "forward", "rows": size}, one)
    draft: Curve = {}
    steps.issue()
    positions = [context] * most
    anchors = [segment.ids[-1] for segment in steps.segments]
    for size in sorted({*(s for s in SIZES if s < most), most}):

        def one(size: int = size) -> dict[str, Any]:
            def issue() -> None:
                model.draft(range(size), anchors[:size], positions[:size], steps.states, lambda _, logits: logits.argmax(-1))

            draft[size] = _seconds(model, issue, times)
            return {"ms": draft[size] * 1e3}

        rows.add({"curve": "draft", "sequences": size}, one)
    return forward, draft


def _seconds(model: V41Gpu, work: Callable[[], Any], times: int) -> float:
    """The fastest of a few, each waited for."""
    spans = []
    for _ in range(times + 1):  # the first captures
        start = time.perf_counter()
        work()
        wait(model.device)
        spans.append(time.perf_counter() - start)
    return min(spans[1:])


def read_curves(path: Path) -> tuple[Curve, Curve]:
    """`curves` of an earlier run, from its --json lines. ValueError: there are none of one of the two."""
    found: dict[str, Curve] = {"forward": {}, "draft": {}}
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        if "ms" in row and row.get("curve") in found:
            size = row.get("computed", row.get("rows")) if row["curve"] == "forward" else row["sequences"]
            found[row["curve"]][size] = row["ms"] / 1e3
    if missing := [name for name, curve in found.items() if not curve]:
        raise ValueError(f"{path} has no line of the curve {' nor '.join(missing)}; it should be what --json printed")
    return found["forward"], found["draft"]


def policy(forward: Curve, draft: Curve, profiles: list[Profile], batch: int) -> dict[str, float]:
    """Tokens a second of the three ways on what was measured, and the schedule's share of the better of the others: medians."""
    runs = []
    for seed in range(LOTS):
        machine = Machine(StepCurve(forward), StepCurve(draft))
        rate = {way: throughput(way, machine, profiles, batch, seed=seed) for way in BUDGETS}
        runs.append(rate | {"of_best": rate["scheduled"] / max(rate["none"], rate["full"])})
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def policies(forward: Curve, draft: Curve, options: argparse.Namespace, rows: Rows) -> float:
    """A row for each profile and batch; the worst of them, as a share of the better of drafting never and always."""
    profiles = {"given": [options.profile]} if options.profile else PROFILES
    worst = 9.9
    for label, chances in profiles.items():
        for batch in options.batch:
            row = rows.add({"policy": label, "batch": batch}, lambda p=chances, b=batch: policy(forward, draft, p, b))
            worst = min(worst, row.get("of_best", 9.9))
    return worst


def lots(options: argparse.Namespace) -> argparse.Namespace:
    return by_lot(options.prompt, options.seconds, options.profile or PROFILES["0.8 falling"][0])


def by_lot(prompt: int, seconds: float, profile: list[float]) -> argparse.Namespace:
    """What `headrace bench engine --speculation` has by default, but for these."""
    given = engine_bench.arguments().parse_args([])
    given.prompt, given.seconds, given.profile, given.spread, given.output = prompt, seconds, profile, 0.1, 2048
    given.ahead = True
    return given


def engine(model: V41Gpu, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """The whole engine, three ways in turns, steps planned ahead; wall time."""
    ways = bench_speculation.ways_of(model, batch, args)
    rate = {name: figures["tokens_per_second"] for name, figures in ways.items()}
    lengths = {f"length_{name}": figures["tokens_per_step"] for name, figures in ways.items()}
    parts = {name: {part: figures[f"{part}_ms"] for part in bench_speculation.PARTS} for name, figures in ways.items()}
    return rate | {"of_best": rate["scheduled"] / max(rate["none"], rate["full"])} | lengths | {"ms": parts}


class Clock:
    """A device that only takes its time: passes of zeros follow each other, and who waits sleeps until the last one is over."""

    def __init__(self, forward: Curve, draft: Curve) -> None:
        self._forward, self._draft, self._over = StepCurve(forward), StepCurve(draft), 0.0

    def model(self) -> V41Gpu:
        """Of the smallest dimensions: host work does not depend on widths."""
        model = without_device(build(configure(SMALL, 8, 4, draft=True), torch.device("cpu")))
        forward, draft = model.forward, model.draft

        def timed_forward(segments: Sequence[Segment], *rest: Any) -> torch.Tensor:
            out = forward(segments, *rest)
            self._takes(self._forward(sum(len(segment.ids) for segment in segments)))
            return out

        def timed_draft(slots: Sequence[int], *rest: Any) -> Any:
            out = draft(slots, *rest)
            self._takes(self._draft(len(slots)))
            self.wait()  # its tokens are read
            return out

        model.forward, model.draft = timed_forward, timed_draft
        return model

    def wait(self) -> None:
        time.sleep(max(0.0, self._over - time.perf_counter()))

    def _takes(self, seconds: float) -> None:
        self._over = max(self._over, time.perf_counter()) + seconds


def engine_by_clock(forward: Curve, draft: Curve, options: argparse.Namespace, rows: Rows) -> float:
    """The worst row."""
    clock, worst = Clock(forward, draft), 9.9
    model, wait = clock.model(), Runner.wait
    Runner.wait = lambda _: clock.wait()
    try:
        for batch in options.batch:
            name = {"engine": "0.8 falling, by the clock", "batch": batch}
            row = rows.add(name, lambda b=batch: engine(model, b, lots(options)))
            worst = min(worst, row.get("of_best", 9.9))
    finally:
        Runner.wait = wait
    return worst


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_for("headrace.engine.models.v41.gpu.bench_drafts", __doc__)
    parser.add_argument("--batch", type=numbers, default=[1, 8, 32, 64, 128, 256], help="sequences (default: 1 to 256)")
    parser.add_argument("--context", type=int, default=4096, help="tokens of each (default: 4096)")
    parser.add_argument(
        "--profile", type=_chances, help="the engine's and the only one of the policy (default: those of speculation_sim)"
    )
    parser.add_argument("--engine", action="store_true", help="run the whole engine too")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of the engine's sequences (default: 128)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of the engine, for each way and batch (default: 4)")
    parser.add_argument(
        "--curves", type=Path, metavar="FILE", help="take the times that an earlier run measured, in place of a device"
    )
    options = parser.parse_args(arguments)
    rows = Rows(options.json, options.budget)
    if options.curves is not None:
        try:
            measured = read_curves(options.curves)
        except (OSError, ValueError) as error:
            parser.error(str(error))
        worst = {"policy": policies(*measured, options, rows)}
        if options.engine:
            worst["engine"] = engine_by_clock(*measured, options, rows)
        rows.say({"worst_of_best": worst})
        return int(rows.failed > 0)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device is visible; --curves takes measured times in its place (benchmarks/h200-curves.jsonl)")
    device = device_of(parser, options)
    config = configure(SMALL if options.small else RELEASED, options.layers, options.experts, draft=True)
    model = build(config, device, not options.eager, not options.plain)
    model.overlap = not options.one_stream
    balance(model, 256 if device.type == "cuda" else 4, 24 if device.type == "cuda" else 1)
    forget(model)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows.say({"card": card, "torch": torch.__version__, "layers": options.layers, "experts": options.experts,
              "context": options.context, "draft_block": model.draft_block})  # fmt: skip
    forward, draft = curves(model, options.batch, options.context, options.times, rows)
    forget(model)
    worst: dict[str, float] = {}
    if forward and draft:
        worst["policy"] = policies(forward, draft, options, rows)
    if options.engine:
        given = lots(options)
        for batch in options.batch:
            row = rows.add({"engine": "0.8 falling", "batch": batch}, lambda b=batch: engine(model, b, given))
            worst["engine"] = min(worst.get("engine", 9.9), row.get("of_best", 9.9))
            forget(model)
    rows.say({"worst_of_best": worst})
    return int(rows.failed > 0)


def _chances(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
