"""Search launch configurations: `python -m headrace.kernels.tune [--only TEXT] [--processes N] [--seconds N] [--json]`.

For each timed case it times every candidate of its operation's grid beside what `tuning` has now, compares outputs, and
prints a table, best first; then it runs the check cases of those operations under every candidate. What is worth keeping
goes by hand into `tuning`, whose tables are what runs. FP8 products: `tune_gemm`; latent attention: `tune_attention`; the
indexer's scores, on more shapes: `tune_indexer`.
--processes compiles first, so many at a time. Needs a GPU. For example, in a minute on 16 cores:

    python -m headrace.kernels.tune --only "sample:|verify_drafts|topk|route" --processes 16 --seconds 55 --json
"""

import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import torch

from headrace.kernels import tuning
from headrace.kernels.bench import input_sets, time_graph
from headrace.kernels.cases import Case, all_cases
from headrace.kernels.check import check, relative_error, tensors


@contextlib.contextmanager
def table_says(name: str, config: dict | None) -> Iterator[None]:
    """Within it every row of a table of `tuning` is this one; None: the table as it is."""
    kept = getattr(tuning, name)
    if config is not None:
        setattr(tuning, name, lambda *_: config)
    try:
        yield
    finally:
        setattr(tuning, name, kept)


def usable_cores() -> int:
    """Cores that this process may use, for as many that compile at a time: a container has fewer than its machine."""
    return len(os.sched_getaffinity(0))


def grid(**axes: tuple) -> list[dict]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


SIMPLE = {  # operation: (function in `tuning`, candidates)
    "index_scores": ("indexer", grid(BLOCK_N=(128, 64), TILES=(4, 16), REGISTERS=(None, 96))),
    "topk": (
        "topk",
        [{"FORM": 0}, *grid(FORM=(1,), BITS=(4, 2), WAVES=(1, 2, 4), REGISTERS=(None,), num_warps=(8,))]
        + grid(FORM=(1,), BITS=(4,), WAVES=(1, 2, 4), REGISTERS=(128,), num_warps=(8,)),
    ),
    "sample": (
        "sample",
        [tuning.sample_parts(4096), tuning.sample_parts(4096, num_warps=8), tuning.sample_parts(8192, num_warps=16)]
        + [tuning.sample_parts(2048), tuning.sample_parts(4096, JOIN_WARPS=8)],
    ),
    "verify_drafts": ("verify_drafts", grid(PART=(4096, 2048, 8192), num_warps=(8, 4))),
    "quantise": (
        "quantise",
        grid(FORM=(0,), ELEMENTS=(4096,), num_warps=(4,))
        + grid(FORM=(1,), ELEMENTS=(2048, 4096), num_warps=(4,))
        + grid(FORM=(1,), ELEMENTS=(8192,), num_warps=(4, 8)),
    ),
    "rope": ("rope", grid(BLOCK_H=(64,), num_warps=(4, 8)) + grid(BLOCK_H=(16, 32), num_warps=(2, 4))),
    "engram_gather": ("engram_gather", grid(BLOCK=(8, 16, 32), num_warps=(4, 8))),
    "engram_gate": ("engram_gate", grid(num_warps=(4, 8, 16))),
    "route": ("route", grid(num_warps=(1, 2))),
    "permute+combine": ("plan_rows", grid(BLOCK=(1024, 4096, 8192), num_warps=(4, 8))),
}


def candidates(case: Case) -> tuple[str, list[dict]] | None:
    """(name of the function in `tuning`, configurations worth trying for this case)."""
    if case.op in SIMPLE:
        return SIMPLE[case.op]
    if case.op == "swiglu" and "fp8_fp32" in case.name:
        return SIMPLE["quantise"]
    if case.op == "mhc":
        few = {"STAGES": (1,), "SPLITS": (0,), "num_warps": (4,)}
        if case.name.startswith("64x"):
            return "mhc", grid(BLOCK_T=(16,), BLOCK_D=(64, 32), WAVES=(1, 2, 4), **few)
        return "mhc", [
            {"BLOCK_T": t, "BLOCK_D": d, "STAGES": s, "SPLITS": 0, "WAVES": v, "num_warps": w}
            for t, d, s, w in ((32, 32, 3, 4), (64, 64, 1, 8), (64, 64, 2, 8), (64, 32, 3, 4), (64, 32, 1, 8), (32, 64, 1, 8))
            for v in (2, 4)
        ]
    if case.op == "mla_decode" and "16 heads" in case.name:
        few = {"SPREAD": (0,), "PAGES": (0,), "num_warps": (4,)}
        return "mla_decode", grid(BLOCK_M=(16,), BLOCK_N=(32, 64), STAGES=(2, 3, 5), WAVES=(4, 8), **few)
    if case.op in ("gemm_upcast", "grouped gemm_upcast masked", "grouped gemm_upcast contiguous"):
        block_m = (16,) if " 1x" in case.name else (32,) if "~20" in case.name else (64,) if " 64x" in case.name else (128, 256)
        return "gemm_upcast", grid(
            BLOCK_M=block_m, BLOCK_N=(64, 128), WAVES=(1, 3), STAGES=(2, 3, 4), num_warps=(4, 8)
        )
    if case.op == "mla_prefill":
        return "mla_prefill", grid(BLOCK_M=(128,), BLOCK_N=(64, 128), STAGES=(2, 3), num_warps=(4, 8))
    return None


def race(case: Case, name: str, configs: list[dict], device: torch.device, until: float) -> list[tuple]:
    """(seconds, worst relative error of an output to that of the tables as they are, configuration), best first."""
    problems = input_sets(case, device)

    def outputs() -> list[torch.Tensor]:
        problem = case.build(device, 0) if case.op == "rope" else problems[0]  # rope turns its input where it lies
        return [t.clone() for t in tensors(problem.select(problem.run()))]

    now = outputs()
    results = []
    for config in configs:
        if time.monotonic() > until:
            break
        try:
            with table_says(name, config):
                error = max(relative_error(a, b) for a, b in zip(outputs(), now, strict=True))
                results.append((time_graph([p.run for p in problems]), error, config))
        except Exception as failure:  # a configuration may not fit the device
            results.append((float("inf"), 0.0, config | {"error": f"{type(failure).__name__}: {failure}"[:90]}))
    return sorted(results, key=lambda r: r[0])


def try_checks(chosen: dict[str, tuple[str, list[dict]]], device: torch.device, until: float, as_json: bool) -> int:
    """The check cases of these operations under every candidate; prints what fails, returns how many do."""
    done = failures = 0
    for case in all_cases():
        if case.timed or case.op not in chosen:
            continue
        name, configs = chosen[case.op]
        for config in configs:
            if time.monotonic() > until:
                late = f"{case.op}: {case.name}"
                print(json.dumps({"out of time": late, "checks": done, "failed": failures}) if as_json else
                      f"out of time at the check of {late}; {done} done")  # fmt: skip
                return failures
            with table_says(name, config):
                result = check(case, device)
            done += 1
            if not result["ok"]:
                failures += 1
                why = result.get("why", result.get("errors"))
                if as_json:
                    print(json.dumps({"failed": f"{case.op}: {case.name}", "config": config, "why": why}), flush=True)
                    continue
                print(f"FAIL {case.op}: {case.name}: {json.dumps(config)}: {why} {result.get('repeatable')}", flush=True)
    print(json.dumps({"checks": done, "failed": failures}) if as_json else f"{done} checks, {failures} failed")
    return failures


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.tune", description=__doc__)
    parser.add_argument("--only", default="", help="only rows whose operation or shape contains one of these, by |")
    parser.add_argument("--warm", default="", help="I/N: only compile the I-th of N parts of the candidates")
    parser.add_argument("--processes", type=int, default=0, help="compile every candidate first, so many at a time")
    parser.add_argument("--json", action="store_true", help="a JSON object for each case and candidate, and one of the checks")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing after so long")
    parser.add_argument("--copy", type=float, default=4.2e12, help="bytes/s of a device copy, for the share of it")
    parser.add_argument("--most", type=int, default=6, help="configurations printed of a case")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    wanted = options.only.split("|")
    until = time.monotonic() + options.seconds
    part, parts = map(int, (options.warm or "0/1").split("/"))
    chosen: dict[str, tuple[str, list[dict]]] = {}
    pairs = 0
    if options.processes:
        module = "headrace.kernels.tune", "--only", options.only, "--warm"
        compile_in_processes(options.processes, options.seconds / 2, *module)
    for case in all_cases():
        found = candidates(case)
        if not case.timed or found is None or not any(w in f"{case.op}: {case.name}" for w in wanted):
            continue
        name, configs = found
        if options.warm:
            compile_all(case, name, [c for i, c in enumerate(configs, pairs) if i % parts == part], device)
            pairs += len(configs)
            continue
        chosen[case.op] = name, [c for c in chosen.get(case.op, (name, []))[1] if c not in configs] + configs
        if time.monotonic() > until:
            print(f"{case.op}: {case.name}: out of time")
            continue
        results = race(case, name, configs, device, until)
        if options.json:
            print("\n".join(json.dumps(row) for row in rows(case, results, options.copy)), flush=True)
            torch.cuda.empty_cache()
            continue
        print(f"{case.op}: {case.name}")
        first = next((t for t, _, c in results if c == configs[0]), float("nan"))
        for seconds, error, config in results[: options.most] + [r for r in results[options.most :] if r[2] == configs[0]]:
            rate = case.bytes / seconds
            speed = f"{rate / 1e9:6.0f} GB/s {rate / options.copy * 100:4.0f} % x{first / seconds:5.2f}"
            print(f"  {seconds * 1e6:9.1f} us {speed} difference {error:.0e} {json.dumps(config)}", flush=True)
        torch.cuda.empty_cache()
    return 0 if options.warm else min(1, try_checks(chosen, device, until, options.json))


def rows(case: Case, results: list[tuple], copy: float) -> list[dict]:
    """What a race of one case found, best first; a candidate that did not run has an error instead of times."""
    found = []
    for seconds, error, config in results:
        row = {"op": case.op, "case": case.name, "config": config}
        if "error" not in config:
            rate = case.bytes / seconds
            row |= {"us": round(seconds * 1e6, 1), "gbps": round(rate / 1e9), "of_copy": round(rate / copy, 3)}
            row["difference"] = error
        found.append(row)
    return found


def compile_in_processes(count: int, seconds: float, *module: str) -> None:
    """`python -m` a module and its arguments, the last of which asks for a part (I/N), in so many processes; those that are not
    done after so long are ended."""
    until = time.monotonic() + seconds
    running = [subprocess.Popen([sys.executable, "-m", *module, f"{i}/{count}"]) for i in range(count)]
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def compile_all(case: Case, name: str, configs: list[dict], device: torch.device) -> None:
    if not configs:
        return
    problem = case.build(device, 0)
    for config in configs:
        try:
            with table_says(name, config):
                problem.run()
        except Exception as error:
            print(f"warm {case.op}: {case.name}: {config}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
