"""Race forms of latent attention: `python -m headrace.kernels.tune_attention [--only TEXT] [--seconds N]`. Needs a GPU.

Compiles every form first, one process a core; times each on the benchmark shapes beside what `tuning` has and beside FlashMLA
where that is installed; then runs the check cases of the two best new forms of a table row against the reference. Prints a JSON
object a line; the last one is what the tables should say, judged by the geometric mean over a row's shapes of forms whose
outputs agree and whose checks pass. It changes no table.
"""

import argparse
import json
import math
import re
import subprocess
import sys
import time

import torch

from headrace.kernels._triton import processor_count
from headrace.kernels.bench import input_sets, time_graph
from headrace.kernels.cases import Case, all_cases
from headrace.kernels.check import check, relative_error, tensors
from headrace.kernels.tune import grid, table_says, usable_cores

AGREE = 1e-2  # relative difference of outputs: the bound of the check cases

_WIDE = {"BLOCK_M": 64, "BLOCK_N": 64, "SPREAD": 1, "WAVES": 8, "num_warps": 8}
DENSE = [_WIDE | {"STAGES": stages, "PAGES": pages} for pages in (1, 0) for stages in (2, 3)]
SPARSE = grid(BLOCK_N=(32, 64), STAGES=(2, 3, 5), SPREAD=(1,), PAIRS=(0,), num_warps=(8,))
SMALL = grid(BLOCK_N=(64,), STAGES=(3, 5), SPREAD=(1,), PAIRS=(0, 1), num_warps=(8,))


def row_of(case: Case) -> str | None:
    """The row of `tuning` that a case is timed or checked for, as far as this module races it."""
    layout = case.name.split(",")[0]
    if case.op == "mla_decode" and layout == "bf16" and "16 heads" not in case.name:
        return "mla_decode bf16"
    if case.op == "sparse_attention" and ", 4 rows" not in case.name:
        return f"sparse_attention {layout}" + " 576" * (layout == "bf16" and "128 heads" in case.name)
    return None


def wanted(timed: bool, only: list[str]) -> list[Case]:
    cases = [c for c in all_cases() if c.timed == timed and row_of(c) and c.size == "full"]
    return [c for c in cases if any(w in f"{c.op}: {c.name}" for w in only)]


def forms(case: Case) -> list[dict | None]:
    """None: as `tuning` has it."""
    return [None, *(DENSE if case.op == "mla_decode" else SMALL if "main_fp4" in case.name else SPARSE)]


def kernel_of(case: Case) -> tuple[str | None, bool]:
    """What shapes share, whose kernel is the same: their row, and whether few query rows are split."""
    rows = re.search(r"(\d+) rows", case.name)
    return row_of(case), bool(rows) and int(rows[1]) <= processor_count() // 2


def in_processes(jobs: list[list[str]], until: float) -> list[str]:
    """Run this module with each list of arguments, as many at a time as there are cores; the JSON line that each printed."""
    printed, running = [json.dumps({"error": "out of time", "job": job}) for job in jobs], {}
    waiting = list(range(len(jobs)))
    while waiting or running:
        while waiting and len(running) < usable_cores():
            i = waiting.pop(0)
            command = [sys.executable, "-m", "headrace.kernels.tune_attention", *jobs[i]]
            running[i] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in [i for i, p in running.items() if p.poll() is not None or time.monotonic() > until]:
            process = running.pop(i)
            if process.poll() is None:
                process.kill()
                waiting.clear()
            out, errors = process.communicate()
            lines = [line for line in out.splitlines() if line.startswith("{")]
            printed[i] = lines[-1] if lines else json.dumps({"error": errors[-300:] or "out of time", "job": jobs[i]})
        time.sleep(0.05)
    return printed


def compile_form(case: Case, form: dict | None) -> None:
    begin = time.monotonic()
    line: dict = {"compiled": f"{case.op}: {case.name}", "form": form}
    try:
        with table_says(case.op, form):
            case.build(torch.device("cuda"), 0).run()
        torch.cuda.synchronize()
    except Exception as error:  # a form may not fit the device
        line["error"] = f"{type(error).__name__}: {error}"[:200]
    print(json.dumps(line | {"seconds": round(time.monotonic() - begin, 1)}))


def race(case: Case, device: torch.device, until: float) -> list[dict]:
    """A line for each form, the present one first, then the peer's; differences are to the present form's output."""
    problems = input_sets(case, device)
    lines: list[dict] = []
    present: torch.Tensor | None = None
    for form in forms(case):
        line: dict = {"row": row_of(case), "case": case.name, "form": form}
        if time.monotonic() > until:
            lines.append(line | {"error": "out of time"})
            continue
        try:
            with table_says(case.op, form):
                out = tensors(problems[0].run())[0].clone()
                seconds = time_graph([p.run for p in problems])
            present = out if present is None else present
            line |= {"us": round(seconds * 1e6, 1), "difference": relative_error(out, present)}
            line |= {"tflops": round(case.flops / seconds / 1e12), "gbps": round(case.bytes / seconds / 1e9)}
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        lines.append(line)
    for name, peer in problems[0].peers.items():
        line = {"row": row_of(case), "case": case.name, "peer": name}
        try:
            seconds = time_graph([p.peers[name] for p in problems])
            line |= {"us": round(seconds * 1e6, 1), "difference": relative_error(tensors(peer())[0], present)}
            for ours in lines:
                if "us" in ours and "form" in ours:
                    ours["ratio"] = round(line["us"] / ours["us"], 3)
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:200]
        lines.append(line)
    return lines


def ranking(lines: list[dict]) -> dict[str, list[tuple[float, dict | None]]]:
    """Row: (geometric mean of times relative to the present form, form), best first, of forms that ran on all shapes."""
    times: dict[str, dict[str, list[float]]] = {}
    now = {line["case"]: line["us"] for line in lines if line.get("form", 0) is None and "us" in line}
    for line in lines:
        if "form" in line and line["case"] in now:
            good = "us" in line and line["difference"] < AGREE
            share = math.log(line["us"] / now[line["case"]]) if good else math.inf
            times.setdefault(line["row"], {}).setdefault(json.dumps(line["form"]), []).append(share)
    return {
        row: sorted(((math.exp(sum(s) / len(s)), json.loads(f)) for f, s in found.items()), key=lambda pair: pair[0])
        for row, found in times.items()
    }


def proposal(ranked: dict[str, list[tuple[float, dict | None]]], failed: set[tuple[str, str]]) -> dict:
    """For each row the best form that agreed and did not fail its checks; None: keep the table."""
    best = {}
    for row, found in ranked.items():
        passed = [(t, f) for t, f in found if math.isfinite(t) and (row, json.dumps(f)) not in failed]
        best[row] = {"form": passed[0][1], "time of present": round(passed[0][0], 3)} if passed else None
    return best


def check_form(row: str, form: dict, device: torch.device) -> None:
    """The check cases of a row under a form, one JSON line."""
    failures, done = [], 0
    for case in wanted(False, [""]):
        if row_of(case) == row:
            with table_says(case.op, form):
                result = check(case, device)
            done += 1
            if not result["ok"]:
                failures.append({"case": case.name, "why": result.get("why", result.get("errors"))})
    print(json.dumps({"checked": row, "form": form, "cases": done, "ok": bool(done) and not failures, "failures": failures}))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.tune_attention", description=__doc__)
    parser.add_argument("--only", default="", help="only cases whose operation or shape contains one of these, by |")
    parser.add_argument("--seconds", type=float, default=170, help="start nothing after so long")
    parser.add_argument("--compile", default="", help="of the list of (case, form), only compile this one")
    parser.add_argument("--check", default="", help="JSON [row, form]: only run its check cases")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    cases = wanted(True, options.only.split("|"))
    pairs, seen = [], set()
    for case in cases:
        for form in forms(case):
            if (key := (kernel_of(case), json.dumps(form))) not in seen:
                seen.add(key)
                pairs.append((case, form))
    if options.compile:
        compile_form(*pairs[int(options.compile)])
        return 0
    if options.check:
        check_form(*json.loads(options.check), device)
        return 0
    begin = time.monotonic()
    until = begin + options.seconds
    jobs = [["--only", options.only, "--compile", str(i)] for i in range(len(pairs))]
    for text in in_processes(jobs, begin + options.seconds / 2):
        line = json.loads(text)
        if "error" in line:
            print(json.dumps(line), flush=True)
    print(json.dumps({"forms": len(pairs), "compiling_seconds": round(time.monotonic() - begin, 1)}), flush=True)
    lines = []
    for case in cases:
        try:
            found = race(case, device, begin + options.seconds * 0.75)
        except Exception as error:  # such as too little memory for the inputs: the other cases go on
            found = [{"row": row_of(case), "case": case.name, "error": f"{type(error).__name__}: {error}"[:200]}]
        lines += found
        print("\n".join(map(json.dumps, found)), flush=True)
        torch.cuda.empty_cache()
    ranked = ranking(lines)
    trials = [(row, f) for row, found in ranked.items() for t, f in [p for p in found if p[1] is not None][:2] if t < 1]
    failed = set()
    for (row, form), text in zip(trials, in_processes([["--check", json.dumps(t)] for t in trials], until), strict=True):
        line = json.loads(text)
        print(json.dumps(line), flush=True)
        if not line.get("ok"):
            failed.add((row, json.dumps(form)))
    tried = [(row, json.dumps(form)) for row, form in trials]
    pairs = {(row, json.dumps(form)) for row, found in ranked.items() for _, form in found if form is not None}
    best = proposal(ranked, failed | (pairs - set(tried)))
    print(json.dumps({"proposal": best, "seconds": round(time.monotonic() - begin, 1)}), flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
