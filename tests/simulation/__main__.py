"""Deterministic simulation: `python tests/simulation --help`."""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from schedule import draw, mix, shrunk
from simulated import installed
from world import World

_clock = time.perf_counter  # real seconds; `time.monotonic` is simulated below


def simulate(plan: Any, traced: bool = False) -> World:
    world = World(plan)
    world.traced = traced
    world.run()
    return world


def kind(world: World) -> str:
    """What a violation is about, without its numbers."""
    return re.sub(r"\d+|\w*simulated\w*", "#", world.violations[0])[:60] if world.violations else ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python tests/simulation",
        description="The real services on a simulated bus, clock, memory and processes, under faults; checks what must hold.",
    )
    parser.add_argument("--schedules", type=int, default=1000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="stop after so many real seconds; 0: don't")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="of the first schedule (default: %(default)s)")
    parser.add_argument("--replay", type=int, metavar="SEED", help="run one schedule and tell what happened")
    parser.add_argument("--trace", action="store_true", help="with --replay: print every message that arrives")
    parser.add_argument("--mutate", metavar="NAME", help="take a guard away (or `all`, in turn) until a violation is found")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first schedule that fails")
    parser.add_argument("--no-shrink", action="store_true", help="don't look for a smaller schedule that fails too")
    parser.add_argument("--json", action="store_true", help="one JSON object at the end instead of text")
    args = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != "0":  # sets of names must be walked in the same order each time
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    gc.collect()
    gc.freeze()  # what is imported stays; only worlds are looked through
    gc.disable()
    warnings.simplefilter("ignore")  # coroutines of killed processes were never awaited: that is what being killed means
    with installed():
        if args.replay is not None:
            return replay(args)
        if args.mutate:
            return mutate(args)
        return run(args)


def run(args: argparse.Namespace) -> int:
    began, done, turns, simulated = _clock(), 0, 0, 0.0
    planned: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    messages: Counter[str] = Counter()
    failed: list[int] = []
    shown = began
    for seed in range(args.seed, args.seed + args.schedules):
        if args.seconds and _clock() - began > args.seconds:
            break
        plan = draw(seed)
        world = simulate(plan)
        mix(planned, plan)
        happened += world.network.happened
        outcomes += world.outcomes
        messages += world.network.counts
        done, turns, simulated = done + 1, turns + world.turns, simulated + world.now - 1000.0
        if world.violations:
            failed.append(seed)
            if not args.json or len(failed) == 1:
                tell(plan, world, args)
            if not args.keep_going:
                break
        del world
        if done % 20 == 0:
            gc.collect()
        if not args.json and _clock() - shown > 5.0:
            shown = _clock()
            print(f"{done} schedules, {len(failed)} failed, {(shown - began) / done * 1e3:.0f} ms each", flush=True)
    seconds = _clock() - began
    result = {
        "schedules": done, "failed": failed, "seconds": round(seconds, 1), "simulated_seconds": round(simulated),
        "turns": turns, "messages": sum(messages.values()), "outcomes": dict(outcomes.most_common()),
        "planned": dict(planned.most_common()), "happened": dict(happened.most_common()),
    }  # fmt: skip
    if args.json:
        print(json.dumps(result))
    else:
        report(result)
    return 1 if failed else 0


def report(result: dict[str, Any]) -> None:
    each = result["seconds"] / max(1, result["schedules"]) * 1e3
    print(f"\n{result['schedules']} schedules in {result['seconds']} s ({each:.0f} ms each): {result['simulated_seconds']:,} "
          f"simulated seconds, {result['messages']:,} messages, {result['turns']:,} checked turns")  # fmt: skip
    for title in ("outcomes", "planned", "happened"):
        print(f"\n{title}:")
        items = [f"{name} {count:,}" for name, count in result[title].items()]
        line = "  "
        for item in items:
            if len(line) + len(item) > 120:
                print(line.rstrip(" "))
                line = "  "
            line += item + "; "
        print(line.rstrip("; "))
    print(f"\nviolations: {len(result['failed'])}" + (f" (seeds {result['failed'][:20]})" if result["failed"] else ""))


def tell(plan: Any, world: World, args: argparse.Namespace) -> None:
    """A schedule that fails, made small."""
    print(f"\nVIOLATION in schedule {plan.seed}; replay it with: python tests/simulation --replay {plan.seed}")
    for what in world.violations:
        print(f"  {what}")
    if not args.no_shrink:
        small = shrunk(plan, lambda less: kind(simulate(less)) == kind(world))
        print("made smaller:\n" + small.describe())
        for what in simulate(small).violations:
            print(f"  {what}")
    sys.stdout.flush()


def replay(args: argparse.Namespace) -> int:
    plan = draw(args.replay)
    world = simulate(plan, args.trace)
    print(plan.describe())
    for asked in world.asked:
        what = f" {asked.error.code}: {asked.error}" if asked.error else ""
        print(f"  request {asked.number}: {asked.ended}{what}; {[len(t) for t in asked.tokens]} tokens, finish {asked.finish}")
    print(f"  {world.turns} turns, {world.now - 1000.0:.3f} simulated seconds, happened: {dict(world.network.happened)}")
    if world.violations:
        tell(plan, world, args)
    return 1 if world.violations else 0


def mutate(args: argparse.Namespace) -> int:
    from mutations import MUTATIONS, without

    names = list(MUTATIONS) if args.mutate == "all" else [args.mutate]
    unknown = [name for name in names if name not in MUTATIONS]
    if unknown:
        print(f"no mutation {unknown[0]!r}; there are {', '.join(MUTATIONS)}", file=sys.stderr)
        return 2
    missed = []
    print(f"{'guard taken away':18}{'found after':>12}{'seed':>8}{'seconds':>9}  first violation", flush=True)
    for name in names:
        began, found = _clock(), None
        for number in range(args.schedules):
            plan = draw(args.seed + number)
            with without(name):
                world = simulate(plan)
            if world.violations and not simulate(plan).violations:  # it is the guard, nothing else
                found = (number + 1, plan.seed, world.violations[0])
                break
            if number % 20 == 19:
                gc.collect()
            if args.seconds and _clock() - began > args.seconds:
                break
        seconds = _clock() - began
        if found is None:
            missed.append(name)
            print(f"{name:18}{'NOT FOUND':>12}{'':8}{seconds:9.1f}  in {number + 1} schedules", flush=True)
        else:
            print(f"{name:18}{found[0]:>12}{found[1]:>8}{seconds:9.1f}  {found[2][:150]}", flush=True)
        gc.collect()
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
