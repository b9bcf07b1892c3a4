"""Which launch form of the FP8 products is fastest, on the benchmark's shapes, beside DeepGEMM. Needs a GPU.

    python -m headrace.kernels.tune_gemm --seconds 150 [--json FILE] [--only TEXT]

Compiles every candidate (and the peer's kernels) in parallel processes, compares each result with that of the tables as they
are, times it, and prints a line a shape, then the best configurations as JSON. What is worth keeping goes by hand into
`tuning`. Not timed: m = 1 and groups of ~20 rows, whose form met its promise.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time

import torch

from headrace.kernels import gemm_fp8, peers, tuning
from headrace.kernels.bench import input_sets, time_graph
from headrace.kernels.cases import Case
from headrace.kernels.cases import gemm as cases
from headrace.kernels.check import relative_error, tensors
from headrace.kernels.tune import compile_in_processes, table_says, usable_cores

BOUND = 1e-3  # of the tables' results: K may be split at other places
FEW = 64


@dataclasses.dataclass
class Shape:
    """m: rows, of each group on average where they are masked."""

    kind: str  # dense, contiguous, masked
    m: int
    n: int
    k: int
    groups: int = 1

    def case(self) -> Case:
        if self.kind == "dense":
            return cases.dense_fp8(self.m, self.n, self.k, "full", timed=True)
        grouped = cases.contiguous_fp8 if self.kind == "contiguous" else cases.masked_fp8
        return grouped(self.groups, self.m, self.n, self.k, "full", timed=True)

    def compile_calls(self, device: torch.device) -> dict[str, object]:
        """Ours, and the peer's, on memory of any content and no more than is read to compile the same kernels."""
        e4m3, steps = torch.float8_e4m3fn, self.k // 128
        groups, rows = (self.groups, 512) if self.kind == "masked" else (1, self.m)
        lead = (groups, rows) if self.kind == "masked" else (rows,)
        a, a_scale = torch.empty(*lead, self.k, dtype=e4m3, device=device), torch.ones(*lead, steps, device=device)
        b = torch.empty(self.groups, self.n, self.k, dtype=e4m3, device=device)
        b_scale = torch.ones(self.groups, -(-self.n // 128), steps, device=device)
        zeros = torch.zeros(groups if self.kind == "masked" else rows, dtype=torch.int32, device=device)
        columns = a_scale.T.contiguous().T if self.kind != "masked" else a_scale
        if self.kind == "dense":
            ours = functools.partial(gemm_fp8.gemm_fp8, a, columns, b[0], b_scale[0])
            return {"ours": ours} | peers.deep_gemm_dense(a, a_scale, b[0], b_scale[0])
        if self.kind == "contiguous":
            ours = functools.partial(gemm_fp8.grouped_gemm_fp8, a, columns, b, b_scale, group_of_row=zeros)
            return {"ours": ours} | peers.deep_gemm_contiguous(a, a_scale, b, b_scale, zeros)
        ours = functools.partial(gemm_fp8.grouped_gemm_fp8, a, a_scale, b, b_scale, counts=zeros, expected_rows=self.m)
        return {"ours": ours} | peers.deep_gemm_masked(a, a_scale, b, b_scale, zeros, self.m)


def shapes() -> list[Shape]:
    """Large products first: they have most to win."""
    found = [Shape("dense", 4096, n, k) for n, k in cases.DENSE]
    found += [Shape("contiguous", m, n, k, groups) for groups, m, n, k in cases.CONTIGUOUS]
    found += [Shape("masked", m, n, k, groups) for groups, m, n, k in cases.MASKED if m > FEW]
    return found + [Shape("dense", FEW, n, k) for n, k in cases.DENSE]


def candidates(shape: Shape) -> list[dict]:
    """Best guesses first: time may run out."""
    narrow, wide, tailed = tuning.narrow, tuning.wide, tuning.tailed
    if shape.m == FEW:
        left = {"ROWS_LEFT": 1}
        return [
            *(narrow(64, 64, PAIR=1, STAGES=3, WAVES=w, **left) for w in (1, 2)),
            *(narrow(64, 32, PAIR=1, STAGES=4, WAVES=w, **left) for w in (1, 2)),
            *(narrow(64, 64, STAGES=s, WAVES=w, **left) for s, w in ((4, 1), (4, 2), (6, 1), (6, 2))),
            *(narrow(64, 32, STAGES=6, WAVES=w, **left) for w in (1, 2)),
            narrow(64, 128, PAIR=1, STAGES=2, WAVES=1, num_warps=8, **left),
        ]
    pair = {"PAIR": 1, "ROWS_LEFT": 1, "WAVES": 0, "STAGES": 3, "num_warps": 8}
    blocks = (2, 4) if shape.kind == "masked" else (8, 16)
    return [
        *(tailed(64, GROUP_M=g) for g in blocks),
        *(narrow(128, 128, GROUP_M=g, **pair) for g in blocks),
        *(wide(64, 128, GROUP_M=g) for g in blocks),
    ]


def with_config(config: dict | None, call):
    """call() while `tuning` answers `config`; None: the tables as they are."""
    with table_says("gemm_fp8", config):
        return call()


def compile_part(part: int, parts: int, wanted: list[Shape]) -> None:
    """Launch the part's candidates once: what they compile stays in the caches on disk."""
    distinct: dict[str, tuple[Shape, dict | str | None]] = {}
    for shape in wanted:
        for config in ("peer", None, *candidates(shape)):
            whole = config is None or config == "peer" or shape.m == FEW  # a split depends on n
            key = [shape.kind, shape.k, shape.m == FEW, config, [shape.m, shape.n, shape.groups] if whole else None]
            distinct.setdefault(json.dumps(key), (shape, config))
    for shape, config in list(distinct.values())[part::parts]:
        calls = shape.compile_calls(torch.device("cuda"))
        ours = calls.pop("ours")
        try:
            for call in calls.values() if config == "peer" else [functools.partial(with_config, config, ours)]:
                call()
            torch.cuda.synchronize()
        except Exception as error:  # a configuration may not fit the device
            print(f"{shape} {config}: {type(error).__name__}: {error}"[:250], file=sys.stderr)


def tune(shape: Shape, device: torch.device, deadline: float) -> dict:
    case = shape.case()
    problems = input_sets(case, device)
    first = problems[0]
    calls = [p.run for p in problems]

    def output(call) -> torch.Tensor:
        return tensors(first.select(call()))[0].clone()

    row: dict = {"op": case.op, "case": case.name, "target": case.target, "now_us": time_graph(calls) * 1e6, "found": []}
    expected = output(first.run)
    for name in first.peers:
        try:
            row["peer_us"] = time_graph([p.peers[name] for p in problems]) * 1e6
            row["peer_difference"] = relative_error(expected, output(first.peers[name]))
        except Exception as error:
            row["peer_error"] = f"{type(error).__name__}: {error}"[:200]
    for config in candidates(shape):
        if time.monotonic() > deadline:
            row["stopped"] = True
            break
        entry: dict = {"config": config}
        try:
            entry["difference"] = relative_error(with_config(config, lambda: output(first.run)), expected)
            again = relative_error(with_config(config, lambda: output(first.run)), expected)
            if not entry["difference"] <= BOUND or again != entry["difference"]:
                raise ValueError(f"difference {entry['difference']}, then {again}")
            entry["us"] = with_config(config, lambda: time_graph(calls)) * 1e6
        except Exception as error:
            entry["why"] = f"{type(error).__name__}: {error}"[:200]
        row["found"].append(entry)
    row["found"].sort(key=lambda f: f.get("us", float("inf")))
    return row


def show(row: dict) -> str:
    peer = row.get("peer_us", float("nan"))
    line = f"{row['op']} {row['case']}: peer {peer:.1f} us, now {row['now_us']:.1f} ({peer / row['now_us']:.2f})"
    for f in row["found"]:
        form = " ".join(str(v) for v in f["config"].values())
        line += f"\n    {f['us']:8.1f} ({peer / f['us']:.2f}) {form}" if "us" in f else f"\n    failed {form}: {f['why'][:90]}"
    line += f"\n    {row['peer_error']}" if "peer_error" in row else ""
    return line + ("\n    out of time" if "stopped" in row else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.tune_gemm", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="stop after about so long, compilation included")
    parser.add_argument("--json", default="", help="write every timing to this file")
    parser.add_argument("--only", default="", help="only shapes whose 'kind MxNxK' contains one of these, by |")
    parser.add_argument("--jobs", type=int, default=min(16, usable_cores()), help="compiling processes")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    wanted = [s for s in shapes() if any(w in f"{s.kind} {s.m}x{s.n}x{s.k}" for w in options.only.split("|"))]
    if options.part:
        compile_part(*map(int, options.part.split("/")), wanted)
        return 0
    if not torch.cuda.is_available():
        print("headrace.kernels.tune_gemm needs a CUDA device: none is visible", file=sys.stderr)
        return 2
    module = "headrace.kernels.tune_gemm", "--only", options.only, "--part"
    compile_in_processes(options.jobs, 0.6 * options.seconds, *module)
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    device, rows = torch.device("cuda"), []
    for shape in wanted:
        if time.monotonic() > begin + options.seconds:
            print(f"no time left for {shape}")
            continue
        rows.append(tune(shape, device, begin + options.seconds))
        torch.cuda.empty_cache()
        print(show(rows[-1]), flush=True)
        if options.json:
            with open(options.json, "w") as file:
                json.dump({"card": torch.cuda.get_device_name(), "rows": rows}, file)
    best = {f"{r['op']} {r['case']}": r["found"][0]["config"] for r in rows if r["found"] and "us" in r["found"][0]}
    print(json.dumps({"best": best}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
