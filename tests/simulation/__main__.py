"""Deterministic simulation: `python tests/simulation --help`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import report
from mutations import MUTATIONS
from runner import Hunt, Result, cores, hunts, kind, real_seconds, search, simulate
from schedule import draw, shrunk
from simulated import installed

PROGRESS = 5.0  # seconds between two lines
BASES = 20_000  # between the first seeds of two hunts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/simulation",
        description="The real services on a simulated bus, clock, memory and processes, under faults; checks what must hold.",
    )
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="begin none after so many seconds; 0: all")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the first schedule (default: %(default)s)")
    parser.add_argument(
        "--workers", type=int, default=cores(), metavar="N", help="processes (default: one per core, %(default)s)"
    )
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one schedule and tell what happened")
    parser.add_argument("--trace", action="store_true", help="with --replay: print every message that arrives")
    parser.add_argument("--mutate", metavar="NAME", help="take guards away, one after the other (names with commas, or `all`)")
    parser.add_argument("--bases", type=int, default=1, metavar="N", help="with --mutate: median over N first seeds")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first schedule that fails")
    parser.add_argument("--no-shrink", action="store_true", help="don't look for a smaller schedule that fails too")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    parser.add_argument("--out", metavar="FILE", help="write what is known there as well, again and again: .json or markdown")
    args = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names must be walked in the same order each time
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    warnings.simplefilter("ignore")  # coroutines of killed processes were never awaited: that is what being killed means
    if args.replay is not None:
        return replay(args)
    if args.mutate:
        return mutate(args)
    return run(args)


class Progress:
    """A line, and the file of `--out`, every few seconds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.began = self._shown = real_seconds()
        self._quiet, self._out = args.json, args.out

    @property
    def seconds(self) -> float:
        return real_seconds() - self.began

    def due(self) -> bool:
        if real_seconds() - self._shown <= PROGRESS:
            return False
        self._shown = real_seconds()
        return True

    def show(self, line: str, data: dict[str, Any], lines: list[str]) -> None:
        if not self._quiet:
            print(f"{self.seconds:.0f} s: {line}", flush=True)
        self.write(data, lines)

    def write(self, data: dict[str, Any], lines: list[str]) -> None:
        if self._out:
            report.write(self._out, data, lines)

    def end(self, data: dict[str, Any], lines: list[str]) -> None:
        self.write(data, lines)
        print(json.dumps(data) if self._quiet else "\n" + "\n".join(lines), flush=True)


def run(args: argparse.Namespace) -> int:
    shown = Progress(args)

    def progress(result: Result) -> None:
        if shown.due():
            line = f"{result.schedules} schedules, {len(result.failed)} failed, {result.schedules / shown.seconds:.0f} a second"
            seconds = shown.seconds
            shown.show(line, report.search_json(result, seconds), report.search_lines(result, seconds))

    result = search(args.seed, args.schedules, args.seconds, args.workers, not args.keep_going, progress)
    seconds = shown.seconds
    shown.end(report.search_json(result, seconds), report.search_lines(result, seconds))
    if result.failed:
        tell(min(result.failed), args)
    return 1 if result.failed else 0


def tell(seed: int, args: argparse.Namespace) -> None:
    """A schedule that fails, made small."""
    plan = draw(seed)
    with installed():
        world = simulate(plan)
        print(f"\nVIOLATION in schedule {seed}; replay it with: python tests/simulation --replay {seed}")
        for what in world.violations:
            print(f"  {what}")
        if not args.no_shrink:
            wrong = kind(world.violations)
            small = shrunk(plan, lambda less: kind(simulate(less).violations) == wrong)
            print("made smaller:\n" + small.describe())
            for what in simulate(small).violations:
                print(f"  {what}")
    sys.stdout.flush()


def replay(args: argparse.Namespace) -> int:
    plan = draw(args.replay)
    with installed():
        world = simulate(plan, args.trace)
    print(plan.describe())
    for asked in world.asked:
        what = f" {asked.error.code}: {asked.error}" if asked.error else ""
        print(f"  request {asked.number}: {asked.ended}{what}; {[len(t) for t in asked.tokens]} tokens, finish {asked.finish}")
    print(f"  {world.turns} turns, {world.now - 1000.0:.3f} simulated seconds, happened: {dict(world.network.happened)}")
    if world.violations:
        tell(args.replay, args)
    return 1 if world.violations else 0


def mutate(args: argparse.Namespace) -> int:
    """The table of guards: how soon the simulation fails without each."""
    names = list(MUTATIONS) if args.mutate == "all" else args.mutate.split(",")
    unknown = [name for name in names if name not in MUTATIONS]
    if unknown:
        print(f"no mutation {unknown[0]!r}; there are {', '.join(MUTATIONS)}", file=sys.stderr)
        return 2
    bases = [args.seed + BASES * number for number in range(args.bases)]
    shown = Progress(args)

    def progress(hunted: list[Hunt]) -> None:
        if shown.due():
            found, tried = sum(bool(one.found) for one in hunted), sum(one.tried for one in hunted)
            line = f"{found} of {len(hunted)} hunts have found it, {tried} schedules"
            shown.show(line, report.hunts_json(hunted), report.hunts_lines(hunted))

    hunted = hunts(names, bases, args.schedules, args.seconds, args.workers, progress)
    shown.end(report.hunts_json(hunted), report.hunts_lines(hunted))
    return 0 if all(one.found for one in hunted) else 1


if __name__ == "__main__":
    raise SystemExit(main())
