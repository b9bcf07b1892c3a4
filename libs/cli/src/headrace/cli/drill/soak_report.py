"""What a soak showed: figures, verdicts, a table, a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.drill import plot
from headrace.cli.drill.figures import quantile

if TYPE_CHECKING:
    from headrace.cli.drill.soak import Life, Soak, Window

P99_LIMIT = 1.5
OTHERS = "during a fault, other workers"


def report(
    soak: Soak, quiet: Soak, capacity: float, rate: float, minutes: float, every: float, owed: dict[str, str]
) -> dict[str, Any]:
    """Figures and verdicts. Seconds and bytes."""
    for window in soak.windows:
        window.ended = window.ended or soak.now()
    groups: dict[str, list[Life]] = {"quiet run": quiet.lives, "untouched": [], OTHERS: [], "victim's": []}
    ends: dict[str, int] = {}
    for life in soak.lives:
        touched = soak.touched(life)
        groups["victim's" if life.victim else OTHERS if touched else "untouched"].append(life)
        ends[life.end] = ends.get(life.end, 0) + 1
    latency = {}
    for name, lives in groups.items():
        answered = [life for life in lives if life.end == "answer"]
        latency[name] = {
            "requests": len(lives), "answers": len(answered),
            "p50": quantile([x.seconds for x in answered], 0.5), "p99": quantile([x.seconds for x in answered], 0.99),
            "ttft_p50": quantile([x.ttft for x in answered], 0.5), "ttft_p99": quantile([x.ttft for x in answered], 0.99),
        }  # fmt: skip
    ratio = latency["untouched"]["p99"] / latency["quiet run"]["p99"] if latency["quiet run"]["p99"] else 0.0
    memory = soak.flatness()
    failed = [f"{w.began:.0f} s {w.fault}: {w.why}" for w in soak.windows if not w.recovered and w.why]
    lasted = [w.ended - w.began for w in soak.windows if w.recovered]
    checks = {
        "0 wrong tokens": not soak.wrong and not quiet.wrong,
        "no request hung": not ends.get("hung"),
        "every untouched request was answered or left by its client": all(
            life.end in ("answer", "cancelled") for life in groups["untouched"]
        ),
        "recovered from every fault": not failed,
        "pools whole at the end": not owed,
        "memory flat": all(each["flat"] for each in memory.values()),
        f"p99 of untouched requests within {P99_LIMIT} of the quiet run": 0 < ratio <= P99_LIMIT,
    }
    return {
        "ok": all(checks.values()), "checks": checks, "minutes": minutes, "every": every, "capacity": capacity, "rate": rate,
        "requests": len(soak.lives), "ends": ends, "faults": len(soak.windows), "failed_faults": failed,
        "recovery_p50": quantile(lasted, 0.5), "recovery_max": max(lasted, default=0.0), "latency": latency,
        "p99_ratio": ratio, "memory": memory, "shm_first": soak.shm[len(soak.shm) // 4][1] if soak.shm else 0,
        "shm_last": soak.shm[-1][1] if soak.shm else 0, "owed": owed, "wrong": soak.wrong + quiet.wrong,
        "quiet_load_p50": quantile([x for _, x in quiet.load], 0.5),
        "load_p50": quantile([x for _, x in soak.load], 0.5), "load_max": max((x for _, x in soak.load), default=0.0),
        "by_fault": by_fault(soak.windows),
    }  # fmt: skip


def by_fault(windows: list[Window]) -> dict[str, dict[str, float]]:
    """How often each fault came, and how long until all was as before: median and longest, seconds."""
    lasted: dict[str, list[float]] = {}
    for window in windows:
        lasted.setdefault(window.fault, []).append(window.ended - window.began)
    return {
        name: {"times": len(each), "p50": quantile(each, 0.5), "max": max(each)} for name, each in sorted(lasted.items())
    }


def table(result: dict[str, Any]) -> str:
    """For people; Markdown."""
    lines = [
        f"{result['minutes']:g} minutes at {result['rate']:.1f} requests/s (capacity {result['capacity']:.1f}), "
        f"{result['faults']} faults: {result['requests']} requests, "
        + ", ".join(f"{count} {end}" for end, count in sorted(result["ends"].items())),
        f"as before after a fault: p50 {result['recovery_p50']:.1f} s, at most {result['recovery_max']:.1f} s; "
        f"load average of the machine p50 {result['load_p50']:.1f}, at most {result['load_max']:.1f}; in the quiet run before "
        f"{result['quiet_load_p50']:.1f}",
        "",
        "| requests | count | answers | p50 s | p99 s | first token p50 s | p99 s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, x in result["latency"].items():
        lines.append(
            f"| {name} | {x['requests']} | {x['answers']} | {x['p50']:.2f} | {x['p99']:.2f} | {x['ttft_p50']:.2f} | "
            f"{x['ttft_p99']:.2f} |"
        )
    lines += ["", "| process | starts | longest life s | RSS 2nd quarter MiB | last quarter MiB | flat |"]
    lines.append("|---|---|---|---|---|---|")
    for name, x in sorted(result["memory"].items()):
        lines.append(
            f"| {name} | {x['lives']} | {x['seconds']} | {x['second'] / 2**20:.1f} | {x['last'] / 2**20:.1f} | "
            f"{'yes' if x['flat'] else 'NO'} |"
        )
    lines += [f"| shared memory | | | {result['shm_first'] / 2**20:.1f} | {result['shm_last'] / 2**20:.1f} | |"]
    lines += ["", "| fault | times | as before after p50 s | at most s |", "|---|---|---|---|"]
    lines += [f"| {name} | {x['times']} | {x['p50']:.1f} | {x['max']:.1f} |" for name, x in result["by_fault"].items()]
    lines += ["", *(f"{'yes' if holds else 'NO '}  {check}" for check, holds in result["checks"].items())]
    lines += [f"     {text}" for text in [*result["failed_faults"][:10], *result["wrong"][:10]]]
    lines += [f"     owed by {name}: {text}" for name, text in result["owed"].items()]
    return "\n".join(lines)


def save(out: Path, soak: Soak, result: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    windows = [[w.fault, round(w.began, 2), round(w.ended, 2), w.recovered, w.why] for w in soak.windows]
    (out / "soak.json").write_text(json.dumps(result | {"windows": windows}, indent=1) + "\n")
    (out / "soak.svg").write_text(picture(soak))


def picture(soak: Soak) -> str:
    minute = 60.0
    marks = [w.began / minute for w in soak.windows]
    memory = {name: [(t / minute, rss / 2**20) for t, rss, _ in line] for name, line in sorted(soak.rss.items())}
    memory["shared memory"] = [(t / minute, size / 2**20) for t, size in soak.shm]
    by_minute: dict[bool, dict[int, list[float]]] = {True: {}, False: {}}
    for life in soak.lives:
        if life.end == "answer":
            by_minute[soak.touched(life)].setdefault(int(life.began // minute), []).append(life.seconds)
    latency = {
        name: [(at + 0.5, quantile(values, 0.99)) for at, values in sorted(by_minute[touched].items())]
        for name, touched in (("untouched, p99", False), ("touched, p99", True))
    }
    panels = [
        plot.Panel("memory of each process (marks: faults)", "MiB", memory, marks),
        plot.Panel("time of a request, per minute", "s", latency, marks),
        plot.Panel("load average of the machine", "", {"load": [(t / minute, x) for t, x in soak.load]}),
    ]
    return plot.svg("headrace drill soak", panels, "min")
