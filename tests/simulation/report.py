"""What many schedules gave, as text, JSON and markdown.

Knows how results are written. Does not run anything.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mutations import MUTATIONS
from runner import Hunt, Result, kind
from simulated import TABLE
from table import cannot

WIDTH = 120


def write(path: str, data: dict[str, Any], lines: list[str]) -> None:
    """`data` into a file whose name ends in .json, else `lines`; at once, for whoever reads it while we run."""
    text = json.dumps(data, indent=1) if path.endswith(".json") else "\n".join(lines)
    part = Path(f"{path}.part")
    part.write_text(text + "\n")
    part.replace(path)


# ------------------------------------------------------------------ a search


def search_json(result: Result, seconds: float) -> dict[str, Any]:
    return {
        "schedules": result.schedules, "failed": sorted(result.failed), "seconds": round(seconds, 1),
        "cpu_seconds": round(result.cpu_seconds, 1), "simulated_seconds": round(result.simulated_seconds),
        "turns": result.turns, "messages": result.messages.total(), "outcomes": dict(result.outcomes.most_common()),
        "planned": dict(result.planned.most_common()), "happened": dict(result.happened.most_common()),
        "rows": {" | ".join(row): result.rows[row] for row in TABLE.rows},
        "violations": {seed: result.failed[seed] for seed in sorted(result.failed)},
    }  # fmt: skip


def search_lines(result: Result, seconds: float) -> list[str]:
    """In words; markdown as well."""
    count = max(1, result.schedules)
    each = result.cpu_seconds / count * 1e3
    out = [f"{result.schedules:,} schedules in {seconds:.1f} s ({count / seconds:.0f} a second, {each:.1f} "
           f"ms of computing each): {result.simulated_seconds:,.0f} simulated seconds, {result.messages.total():,} messages, "
           f"{result.turns:,} checked turns"]  # fmt: skip
    for title in ("outcomes", "planned", "happened"):
        out += ["", f"{title}:", *_filled(getattr(result, title))]
    out += ["", "rows of docs/handoff.md that happened:", *_rows(result)]
    return [*out, "", f"violations: {len(result.failed)}", *_failed(result)]


def _failed(result: Result) -> Iterator[str]:
    """Every kind of violation with all of its seeds, for whoever replays them."""
    kinds: dict[str, list[int]] = {}
    for seed in sorted(result.failed):
        kinds.setdefault(kind(result.failed[seed]), []).append(seed)
    for what, seeds in kinds.items():
        yield f"  {len(seeds)} of: {what}; seeds {' '.join(map(str, seeds))}"


def _filled(counts: Counter[str]) -> Iterator[str]:
    line = "  "
    for name, count in counts.most_common():
        item = f"{name} {count:,}; "
        if len(line) + len(item) > WIDTH:
            yield line.rstrip(" ")
            line = "  "
        line += item
    yield line.rstrip("; ")


def _rows(result: Result) -> Iterator[str]:
    """Which rows of the tables of docs/handoff.md happened, and how often the rarest; those that did not are listed."""
    for machine in dict.fromkeys(row[0] for row in TABLE.rows):
        mine = [row for row in TABLE.rows if row[0] == machine and not cannot(row)]
        excused = sum(row[0] == machine and bool(cannot(row)) for row in TABLE.rows)
        seen = sorted((row for row in mine if result.rows[row]), key=lambda row: result.rows[row])
        rare = ", ".join(f"{phase}: {event} ({result.rows[machine, phase, event]})" for _, phase, event in seen[:3])
        yield (f"  {machine}: {len(seen)} of {len(mine)}" + (f", and {excused} that can't" if excused else "")
               + (f"; rarest {rare}" if seen else ""))  # fmt: skip
        never = [f"{phase}: {event}" for _, phase, event in mine if not result.rows[machine, phase, event]]
        if never:
            yield f"    never: {'; '.join(never)}"
    odd = [": ".join(row) for row in result.rows if cannot(row)]
    if odd:
        yield f"  and these, which can't: {'; '.join(odd)}"


# ------------------------------------------------------------------ guards taken away


def _median(hunted: list[Hunt]) -> float:
    """Schedules until it was found; 0 where it was not in half of the hunts."""
    found = [one.found for one in hunted if one.found]
    counts = [one.found or one.tried for one in hunted]
    return statistics.median(counts) if len(found) > len(hunted) / 2 else 0


def _by_guard(hunted: list[Hunt]) -> dict[str, list[Hunt]]:
    return {name: [one for one in hunted if one.name == name] for name in dict.fromkeys(one.name for one in hunted)}


def hunts_json(hunted: list[Hunt]) -> dict[str, Any]:
    return {
        "guards": {
            name: {"what": MUTATIONS[name][0].what, "median": _median(mine), "hunts": [vars(one) for one in mine]}
            for name, mine in _by_guard(hunted).items()
        }
    }


def hunts_lines(hunted: list[Hunt]) -> list[str]:
    """A markdown table."""
    out = ["| guard taken away | found after | each hunt | seconds | seed | first violation |", "|---|---|---|---|---|---|"]
    for name, mine in _by_guard(hunted).items():
        middle = _median(mine)
        every = " ".join(f"{one.found:,}" if one.found else f">{one.tried:,}" for one in mine)
        seconds = statistics.median(one.cpu_seconds for one in mine)
        first = min((one for one in mine if one.found), key=lambda one: one.found, default=None)
        seed, seen = (first.seed, first.violation[:WIDTH].replace("|", "/")) if first else ("", "")
        found = f"{middle:,.0f}" if middle else "NOT FOUND"
        out.append(f"| {name} | {found} | {every} | {seconds:.1f} | {seed} | {seen} |")
    total = sum(one.cpu_seconds for one in hunted)
    missed = sum(not one.found for one in hunted)
    return [*out, "", f"{len(hunted)} hunts, {missed} without a find; {total:,.0f} seconds of computing"]
