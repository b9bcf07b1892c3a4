"""Deterministic simulation: `python tests/simulation --help`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from mutations import MUTATIONS
from runner import Result, cores, hunts, kind, real_seconds, search, simulate
from schedule import draw, shrunk
from simulated import TABLE, installed
from table import cannot

BASES = 20_000  # between the first seeds of two hunts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/simulation",
        description="The real services on a simulated bus, clock, memory and processes, under faults; checks what must hold.",
    )
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="begin none after so many seconds; 0: all")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the first schedule (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=cores(), metavar="N", help="default: one per core, %(default)s")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one schedule and tell what happened")
    parser.add_argument("--trace", action="store_true", help="with --replay: print every message that arrives")
    parser.add_argument("--mutate", metavar="NAME", help="take guards away, one after the other (names with commas, or `all`)")
    parser.add_argument("--bases", type=int, default=1, metavar="N", help="with --mutate: median over N first seeds")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first schedule that fails")
    parser.add_argument("--no-shrink", action="store_true", help="don't look for a smaller schedule that fails too")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    args = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names must be walked in the same order each time
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    warnings.simplefilter("ignore")  # coroutines of killed processes were never awaited: that is what being killed means
    if args.replay is not None:
        return replay(args)
    if args.mutate:
        return mutate(args)
    return run(args)


def run(args: argparse.Namespace) -> int:
    began = shown = real_seconds()

    def progress(result: Result) -> None:
        nonlocal shown
        if not args.json and real_seconds() - shown > 5.0:
            shown = real_seconds()
            rate = result.schedules / (shown - began)
            print(f"{result.schedules} schedules, {len(result.failed)} failed, {rate:.0f} a second", flush=True)

    result = search(args.seed, args.schedules, args.seconds, args.processes, not args.keep_going, progress)
    seconds = real_seconds() - began
    if args.json:
        print(json.dumps(as_json(result, seconds)))
    else:
        report(result, seconds)
    if result.failed:
        tell(min(result.failed), args)
    return 1 if result.failed else 0


def as_json(result: Result, seconds: float) -> dict[str, Any]:
    return {
        "schedules": result.schedules, "failed": sorted(result.failed), "seconds": round(seconds, 1),
        "cpu_seconds": round(result.cpu_seconds, 1), "simulated_seconds": round(result.simulated_seconds),
        "turns": result.turns, "messages": result.messages.total(), "outcomes": dict(result.outcomes.most_common()),
        "planned": dict(result.planned.most_common()), "happened": dict(result.happened.most_common()),
        "rows": {" | ".join(row): result.rows[row] for row in TABLE.rows},
    }  # fmt: skip


def report(result: Result, seconds: float) -> None:
    count = max(1, result.schedules)
    each = result.cpu_seconds / count * 1e3
    print(f"\n{result.schedules} schedules in {seconds:.1f} s ({count / seconds:.0f} a second, {each:.1f} "
          f"ms of computing each): {result.simulated_seconds:,.0f} simulated seconds, {result.messages.total():,} messages, "
          f"{result.turns:,} checked turns")  # fmt: skip
    for title in ("outcomes", "planned", "happened"):
        print(f"\n{title}:")
        items = [f"{name} {count:,}" for name, count in getattr(result, title).most_common()]
        line = "  "
        for item in items:
            if len(line) + len(item) > 120:
                print(line.rstrip(" "))
                line = "  "
            line += item + "; "
        print(line.rstrip("; "))
    reached(result)
    print(f"\nviolations: {len(result.failed)}" + (f" (seeds {sorted(result.failed)[:20]})" if result.failed else ""))


def reached(result: Result) -> None:
    """Which rows of the tables of docs/handoff.md happened, and how often the rarest; those that did not are listed."""
    print("\nrows of docs/handoff.md that happened:")
    for machine in dict.fromkeys(row[0] for row in TABLE.rows):
        mine = [row for row in TABLE.rows if row[0] == machine and not cannot(row)]
        excused = sum(row[0] == machine and bool(cannot(row)) for row in TABLE.rows)
        seen = sorted((row for row in mine if result.rows[row]), key=lambda row: result.rows[row])
        rare = ", ".join(f"{phase}: {event} ({result.rows[machine, phase, event]})" for _, phase, event in seen[:3])
        print(f"  {machine}: {len(seen)} of {len(mine)}" + (f", and {excused} that can't" if excused else "")
              + (f"; rarest {rare}" if seen else ""))  # fmt: skip
        never = [f"{phase}: {event}" for _, phase, event in mine if not result.rows[machine, phase, event]]
        if never:
            print(f"    never: {'; '.join(never)}")
    odd = [": ".join(row) for row in result.rows if cannot(row)]
    if odd:
        print(f"  and these, which can't: {'; '.join(odd)}")


def tell(seed: int, args: argparse.Namespace) -> None:
    """A schedule that fails, made small."""
    plan = draw(seed)
    with installed():
        world = simulate(plan)
        print(f"\nVIOLATION in schedule {seed}; replay it with: python tests/simulation --replay {seed}")
        for what in world.violations:
            print(f"  {what}")
        if not args.no_shrink:
            wrong = kind(world)
            small = shrunk(plan, lambda less: kind(simulate(less)) == wrong)
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
    print(
        f"{'guard taken away':18}{'found after':>12}{'(all hunts)':>24}{'seconds':>9}{'seed':>9}  first violation", flush=True
    )
    missed = False
    total = 0.0
    for name, hunted in hunts(names, bases, args.schedules, args.processes):
        found = [one for one in hunted if one.schedules]
        missed |= len(found) < len(hunted)
        counts = [one.schedules or args.schedules for one in hunted]
        seconds = statistics.median(one.cpu_seconds for one in hunted)
        total += seconds
        every = " ".join(str(one.schedules or f">{args.schedules}") for one in hunted)
        first = min(found, key=lambda one: one.schedules, default=None)
        middle = f"{statistics.median(counts):.0f}" if len(found) > len(hunted) / 2 else "NOT FOUND"
        print(f"{name:18}{middle:>12}{every:>24}{seconds:9.1f}{first.seed if first else '':>9}"
              f"  {first.violation[:120] if first else ''}", flush=True)  # fmt: skip
    print(f"{len(names)} guards, median seconds of computing for all of them: {total:.1f}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
