"""Compile kernels before traffic: `python -m headrace.kernels.warm [--json]`. Needs a GPU.

Runs every operation once on the shapes of the cases, so that Triton's cache folder (TRITON_CACHE_DIR, by default
~/.triton/cache) holds them, and reports how long each first call took and how long the second.
"""

import argparse
import json
import os
import sys
import time

import torch

from headrace.kernels.cases import all_cases


def warm(device: torch.device, timed: bool = False) -> list[dict]:
    """First and second call of every case in seconds; `timed` takes the benchmark shapes, else the check shapes."""
    report = []
    for case in all_cases():
        if case.timed != timed:
            continue
        row: dict = {"op": case.op, "case": case.name}
        try:
            problem = case.build(device, 0)
            for name in ("first_seconds", "second_seconds"):
                begin = time.perf_counter()
                problem.run()
                torch.cuda.synchronize()
                row[name] = time.perf_counter() - begin
        except Exception as error:  # reported, so that one kernel does not hide the others
            row["error"] = f"{type(error).__name__}: {error}"
        report.append(row)
    return report


def cache_folder() -> str:
    return os.environ.get("TRITON_CACHE_DIR") or os.path.join(os.path.expanduser("~"), ".triton", "cache")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.warm", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("headrace.kernels.warm needs a CUDA device: none is visible", file=sys.stderr)
        return 2
    report = warm(torch.device("cuda"))
    if options.json:
        print(json.dumps({"cache": cache_folder(), "kernels": report}))
    else:
        total = sum(row.get("first_seconds", 0.0) for row in report)
        print(f"{len(report)} cases warmed in {total:.1f} s into {cache_folder()}")
        for row in report:
            if "error" in row:
                print(f"{row['op']}: {row['case']}: {row['error']}")
    return int(any("error" in row for row in report))


if __name__ == "__main__":
    sys.exit(main())
