"""Search launch configurations: `python -m headrace.kernels.tune [--only TEXT] [--warm I/N]`. Needs a GPU.

For each timed case it times every candidate of its operation's grid and prints them best first. What is worth keeping
goes by hand into `tuning`, whose tables are what runs.
"""

import argparse
import itertools
import json
import sys

import torch

from headrace.kernels import tuning
from headrace.kernels.bench import time_graph
from headrace.kernels.cases import Case, all_cases


def grid(**axes: tuple) -> list[dict]:
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def candidates(case: Case) -> tuple[str, list[dict]] | None:
    """(name of the function in `tuning`, configurations worth trying for this case)."""
    if case.op == "sparse_attention":
        return "sparse_attention", grid(BLOCK_N=(32, 64), STAGES=(1, 2, 3, 5), SPREAD=(0, 1), num_warps=(8,))
    if case.op == "mla_decode":
        few = grid(BLOCK_M=(16,), BLOCK_N=(32, 64), STAGES=(2, 3, 5), SPREAD=(0,), WAVES=(4, 8), num_warps=(4,))
        wide = grid(BLOCK_M=(64,), BLOCK_N=(32, 64), STAGES=(2, 3, 5), SPREAD=(0, 1), WAVES=(4, 8, 16), num_warps=(8,))
        return "mla_decode", few if "16 heads" in case.name else wide
    if case.op in ("gemm_upcast", "grouped gemm_upcast masked", "grouped gemm_upcast contiguous"):
        block_m = (16,) if " 1x" in case.name else (32,) if "~20" in case.name else (64,) if " 64x" in case.name else (128, 256)
        return "gemm_upcast", grid(
            BLOCK_M=block_m, BLOCK_N=(64, 128), WAVES=(1, 3), STAGES=(2, 3, 4), num_warps=(4, 8)
        )
    if case.op == "mla_prefill":
        return "mla_prefill", grid(BLOCK_M=(128,), BLOCK_N=(64, 128), STAGES=(2, 3), num_warps=(4, 8))
    if case.op.startswith(("gemm_fp8", "grouped_gemm_fp8")):
        narrow = case.ceiling == "copy"
        if not narrow:
            tiles = [(128, 128, 2, 4), (128, 128, 1, 8), (64, 128, 1, 4), (64, 256, 2, 4), (128, 64, 1, 4)]
            return "gemm_fp8", [
                {"NARROW": 0, "BLOCK_M": m, "BLOCK_N": n, "HALVES": h, "num_warps": w, "GROUP_M": g, "STAGES": s}
                for (m, n, h, w), g, s in itertools.product(tiles, (8, 16), (2, 3, 4))
            ]
        if "~98" in case.name or "~202" in case.name:
            wide = grid(
                NARROW=(0,), HALVES=(1,), num_warps=(4,), GROUP_M=(1, 2, 4), BLOCK_M=(64,), BLOCK_N=(64, 128), STAGES=(3, 4)
            )
            return "gemm_fp8", wide + grid(
                NARROW=(1,), BLOCK_M=(64, 128), BLOCK_N=(64, 128), WAVES=(1,), STAGES=(3, 4), num_warps=(4, 8)
            )
        if case.name.startswith("64x"):
            return "gemm_fp8", grid(
                NARROW=(0,), HALVES=(1,), num_warps=(4,), GROUP_M=(1,), BLOCK_M=(64,), BLOCK_N=(16, 32, 64), STAGES=(4, 6, 8)
            ) + grid(NARROW=(1,), BLOCK_M=(64,), BLOCK_N=(64,), WAVES=(1, 2), STAGES=(4,), num_warps=(4,))
        blocks = (16,) if case.name.startswith("1x") else (32, 64)
        return "gemm_fp8", grid(
            NARROW=(1,), BLOCK_M=blocks, BLOCK_N=(64, 128), WAVES=(1, 2, 4), STAGES=(3, 4, 6), num_warps=(4, 8)
        )
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.tune", description=__doc__)
    parser.add_argument("--only", default="", help="only rows whose operation or shape contains one of these, by |")
    parser.add_argument("--warm", default="", help="I/N: only compile the I-th of N parts of the candidates")
    options = parser.parse_args(arguments)
    device = torch.device("cuda")
    wanted = options.only.split("|")
    part, parts = map(int, (options.warm or "0/1").split("/"))
    for case in all_cases():
        found = candidates(case)
        if not case.timed or found is None or not any(w in f"{case.op}: {case.name}" for w in wanted):
            continue
        name, configs = found
        problems = [case.build(device, 1000 * i) for i in range(1 if options.warm else 2)]
        kept = getattr(tuning, name)
        results = []
        for config in configs[part::parts]:
            setattr(tuning, name, lambda *_, config=config: config)
            try:
                if options.warm:
                    problems[0].run()
                else:
                    results.append((time_graph([p.run for p in problems]), config))
            except Exception as error:  # a configuration may not fit the device
                results.append((float("inf"), config | {"error": f"{type(error).__name__}: {error}"[:60]}))
        setattr(tuning, name, kept)
        if not options.warm:
            best = sorted(results, key=lambda r: r[0])[:4]
            print(f"{case.op}: {case.name}", *(f"\n   {t * 1e6:9.1f} us {json.dumps(c)}" for t, c in best), flush=True)
        del problems
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
