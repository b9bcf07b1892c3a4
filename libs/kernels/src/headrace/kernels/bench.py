"""Benchmarks: `python -m headrace.kernels.bench [--json] [--only TEXT] [--warm I/N] [--table FILE]`. Needs a GPU.

Per row: median time over replays of a CUDA graph that walks several input sets (together larger than the L2 cache),
TFLOP/s, GB/s of the least bytes that the operation must move, the fraction of this run's own measured ceiling (device
copy, bf16 or fp8 matrix product), and, where a peer is installed, its time on the same inputs and our ratio to it
(above 1: we are faster). Ceilings and peers are always of the same run: absolute times drift between machines.
"""

import argparse
import datetime
import json
import sys

import torch

from headrace.kernels import peers
from headrace.kernels.cases import Case, Problem, all_cases
from headrace.kernels.check import relative_error, tensors

L2_BYTES = 60e6
REPLAYS = 12
MIN_GRAPH_SECONDS = 4e-4


def time_graph(calls: list) -> float:
    """Median seconds of one call, from replays of a graph that makes each call in turn, repeated while short."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for call in calls:
            call()
        end.record()
        stream.synchronize()
        once = begin.elapsed_time(end) / 1e3
        repeats = max(1, min(8, int(MIN_GRAPH_SECONDS / max(once, 1e-6))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for call in calls:
                    call()
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2] / repeats / len(calls)


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """copy: bytes/s read plus written; bf16, fp8: FLOP/s of an 8192-cubed product through torch."""
    both = torch.randn(2, 1 << 29, device=device)
    ways = [lambda: both[1].copy_(both[0]), lambda: torch.mul(both[0], 1.0, out=both[1])]
    copy = both.numel() * 4 / min(time_graph([way]) for way in ways)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    bf16 = 2 * 8192**3 / time_graph([lambda: a @ b])
    ceilings = {"copy": copy, "bf16": bf16}
    try:
        a8, b8, one = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn), torch.ones((), device=device)
        product = lambda: torch._scaled_mm(a8, b8.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)  # noqa: E731
        ceilings["fp8"] = 2 * 8192**3 / time_graph([product])
    except RuntimeError:
        ceilings["fp8"] = 2 * bf16
    return ceilings


def input_sets(case: Case, device: torch.device) -> list[Problem]:
    """Several sets of inputs, together larger than the L2 cache where six sets are."""
    sets = min(6, int(2 * L2_BYTES / max(case.bytes, 1)) + 1)
    return [case.build(device, 1000 * i) for i in range(max(sets, 2))]


def bench(case: Case, device: torch.device, ceilings: dict[str, float]) -> dict:
    problems = input_sets(case, device)
    row: dict = {"op": case.op, "case": case.name, "seconds": time_graph([p.run for p in problems])}
    row["tflops"] = case.flops / row["seconds"] / 1e12
    row["gbps"] = case.bytes / row["seconds"] / 1e9
    row["ceiling"] = case.ceiling
    amount = case.bytes if case.ceiling == "copy" else case.flops
    row["of_ceiling"] = amount / row["seconds"] / ceilings[case.ceiling]
    row["target"] = case.target
    for name in problems[0].peers:
        try:
            row["peer"], row["peer_seconds"] = name, time_graph([p.peers[name] for p in problems])
            row["ratio"] = row["peer_seconds"] / row["seconds"]
            ours, theirs = (tensors(f())[0] for f in (problems[0].run, problems[0].peers[name]))
            if case.op.startswith("grouped"):  # rows that nobody has to write differ
                ours, theirs = problems[0].select(ours), problems[0].select(theirs)
            row["difference"] = relative_error(ours, theirs)
        except Exception as error:
            row["peer_error"] = f"{type(error).__name__}: {error}"
    return row


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--only", default="", help="only rows whose operation or shape contains one of these, by |")
    parser.add_argument("--warm", default="", help="I/N: only compile the I-th of N parts of the rows, without timing")
    parser.add_argument("--table", default="", help="no run: print a saved --json output as a Markdown table")
    options = parser.parse_args(arguments)
    if options.table:
        with open(options.table) as lines:
            print("\n".join(table([json.loads(line) for line in lines])))
        return 0
    if not torch.cuda.is_available():
        print("headrace.kernels.bench needs a CUDA device: none is visible", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    wanted = options.only.split("|")
    rows = [c for c in all_cases() if c.timed and any(w in f"{c.op}: {c.name}" for w in wanted)]
    if options.warm:
        part, parts = map(int, options.warm.split("/"))
        for case in rows[part::parts]:
            warm(case, device)
        return 0
    ceilings = measure_ceilings(device)
    head = environment() | {"ceilings": ceilings}
    print(json.dumps(head) if options.json else head, flush=True)
    for case in rows:
        try:
            row = bench(case, device, ceilings)
        except Exception as error:
            row = {"op": case.op, "case": case.name, "error": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
        print(json.dumps(row) if options.json else text(row), flush=True)
    if peers.problems:
        print(json.dumps({"peers not loaded": peers.problems}), flush=True)
    return 0


def warm(case: Case, device: torch.device) -> None:
    """Compile what a case needs, ours and the peers', into their caches on disk."""
    try:
        problem = case.build(device, 0)
        for call in (problem.run, *problem.peers.values()):
            call()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"warm {case.op}: {case.name}: {type(error).__name__}: {error}", file=sys.stderr)


def environment() -> dict:
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def table(rows: list[dict]) -> list[str]:
    """Saved rows as Markdown: a race has the ratio to its peer, the others the fraction of the ceiling."""
    lines = ["| operation | shape | us | TFLOP/s | GB/s | of ceiling | peer us | ratio | target |", "|---" * 9 + "|"]
    for row in rows:
        if "seconds" not in row:
            continue
        ceiling = f"{row['of_ceiling'] * 100:.0f} % {row['ceiling']}"
        race = f"{row['peer_seconds'] * 1e6:.1f} | {row['ratio']:.2f}" if "ratio" in row else "| "
        reached = row.get("ratio", row["of_ceiling"] if "peer" not in row else 0.0)
        target = "" if row["target"] is None else f"{row['target']} {'met' if reached >= row['target'] else 'missed'}"
        if row["op"] == "sparse_attention" and "ratio" not in row:
            target = ""  # no peer reads this layout on this card
        numbers = f"{row['seconds'] * 1e6:.1f} | {row['tflops']:.0f} | {row['gbps']:.0f}"
        lines.append(f"| {row['op']} | {row['case']} | {numbers} | {ceiling} | {race} | {target} |")
    return lines


def text(row: dict) -> str:
    if "error" in row:
        return f"{row['op']}: {row['case']}: {row['error']}"
    line = f"{row['op']}: {row['case']}: {row['seconds'] * 1e6:.1f} us {row['tflops']:.0f} TF {row['gbps']:.0f} GB/s"
    line += f" {row['of_ceiling'] * 100:.0f}% of {row['ceiling']}"
    if "ratio" in row:
        line += f" | {row['peer']} {row['peer_seconds'] * 1e6:.1f} us ratio {row['ratio']:.2f} diff {row['difference']:.1e}"
        if row["target"] and row["ratio"] < row["target"]:
            line += f" MISS {row['target']}"
    return line + (f" | {row['peer_error']}" if "peer_error" in row else "")


if __name__ == "__main__":
    sys.exit(main())
