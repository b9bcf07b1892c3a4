"""Correctness of every kernel against its reference: `python -m headrace.kernels.check [--json] [--only OP]`.

Each case runs three times on one set of inputs, with freshly poisoned memory behind every output, and must be within
its bound of the reference (NaN never is) and bit-equal between runs. Set TRITON_INTERPRET=1 to run small cases on a CPU.
"""

import argparse
import json
import sys
import traceback
import warnings

import torch

from headrace.kernels.cases import Case, all_cases

RUNS = 3


def check(case: Case, device: torch.device, seed: int = 0) -> dict:
    """Run one case; the result has `ok`, the worst relative errors and, if it failed, why."""
    result: dict = {"op": case.op, "case": case.name, "size": case.size}
    try:
        problem = case.build(device, seed)
        outputs = []
        for _ in range(RUNS):
            poison(device)
            outputs.append([t.clone() for t in tensors(problem.select(problem.run()))])
        expected = tensors(problem.select(problem.reference()))
    except Exception as error:
        return result | {"ok": False, "why": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    bounds = case.bound if isinstance(case.bound, tuple) else (case.bound,) * len(expected)
    errors = [relative_error(o, e) for o, e in zip(outputs[0], expected, strict=True)]
    repeatable = all(torch.equal(bits(a), bits(b)) for run in outputs[1:] for a, b in zip(outputs[0], run, strict=True))
    within = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
    result |= {"ok": within and repeatable, "errors": errors, "bounds": list(bounds), "repeatable": repeatable}
    return result


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected||; for integers the fraction of unequal elements."""
    if out.shape != expected.shape:
        return float("inf")
    if not out.numel():
        return 0.0
    if not out.is_floating_point() or out.dtype.itemsize == 1:
        return (bits(out) != bits(expected)).double().mean().item()
    difference = (out.double() - expected.double()).norm()
    error = (difference / expected.double().norm().clamp_min(1e-30)).item()
    return error if error == error else float("inf")


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize])


def tensors(outputs: object) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


def poison(device: torch.device) -> None:
    """Fill memory that the allocator will hand out next with NaN, so that an unwritten output shows."""
    if device.type != "cuda":
        return
    torch.cuda.synchronize()
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 23, 1 << 26):
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(4)]
        del blocks


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per case")
    parser.add_argument("--size", choices=["small", "full"], help="default: full on a GPU, small without one")
    parser.add_argument("--only", default="", help="only operations that contain this text")
    parser.add_argument("--part", default="0/1", help="I/N: only the I-th of N parts of the cases, to run N processes")
    options = parser.parse_args(arguments)
    part, parts = map(int, options.part.split("/"))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = options.size or ("full" if device.type == "cuda" else "small")
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # numpy's, from log2(0) in masked lanes of the interpreter
    failures = 0
    for case in list(all_cases())[part::parts]:
        if options.only not in case.op or case.timed or (size == "small" and case.size != "small"):
            continue
        result = check(case, device)
        failures += not result["ok"]
        if options.json:
            print(json.dumps(result), flush=True)
        else:
            detail = result.get("why") or f"errors {[float(f'{e:.1e}') for e in result['errors']]}"
            extra = "" if result.get("repeatable", True) else " NOT REPEATABLE"
            print(f"{'ok  ' if result['ok'] else 'FAIL'} {case.op}: {case.name}: {detail}{extra}", flush=True)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
