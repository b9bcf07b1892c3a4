"""Race forms of the indexer's scores: `python -m headrace.kernels.tune_indexer [--only TEXT] [--jobs N] [--seconds N]`.

Compiles every form first, in so many processes; checks each on every shape, with rows that see everything, part or nothing,
against the reference in four rows and against the table's form in all; then times it with all entries visible. Prints a line a
shape, best first, and JSON of everything last. It changes no table. Needs a GPU; for example, in a minute:

    python -m headrace.kernels.tune_indexer --jobs 8 --seconds 58
"""

import argparse
import dataclasses
import json
import sys
import time

import torch

from headrace.kernels.bench import time_graph
from headrace.kernels.cases import generator, randn
from headrace.kernels.check import relative_error
from headrace.kernels.indexer import index_scores, index_scores_reference
from headrace.kernels.kv_layouts import PagedKV
from headrace.kernels.quantize import pack_index_record, unpack_index_record
from headrace.kernels.tune import compile_in_processes, grid, table_says, usable_cores

BOUND = 1e-4  # of the check cases
HEADS = 32
CHECKED = 4  # rows against the reference
L2_BYTES = 60e6
RUNS = (4, 8, 16, 32, 2, 1)  # tiles a program
FORMS = [*grid(BLOCK_N=(128,), REGISTERS=(None, 96, 128)), *grid(BLOCK_N=(64,), REGISTERS=(None, 96))]


@dataclasses.dataclass(frozen=True)
class Shape:
    """`blocks` candidate blocks of a row, 0: all entries are scored."""

    rows: int
    entries: int
    blocks: int = 0
    page: int = 128

    @property
    def name(self) -> str:
        kind = f" {self.blocks} blocks" if self.blocks else "" if self.page == 128 else f" page {self.page}"
        return f"{self.rows}x{self.entries}{kind}"

    @property
    def scored(self) -> int:
        return self.rows * (8 * self.blocks or self.entries)


SHAPES = [Shape(rows, entries) for rows in (1, 8, 64, 128, 256) for entries in (4096, 16384, 65536, 131072)]
SHAPES += [Shape(rows, entries, 2048) for rows, entries in ((64, 65536), (128, 65536), (256, 131072))]
SHAPES += [Shape(64, 65536, page=64), Shape(256, 65536, page=64)]


class Experiment:
    """Inputs of a shape over random keys: the least pool that the second cache cannot hold, several tables of it."""

    def __init__(self, shape: Shape, device: torch.device, cached: float = L2_BYTES):
        self.shape = shape
        pages = shape.entries // shape.page
        self.sets = max(2, int(2 * cached / (shape.scored * 68)) + 1)
        kv = PagedKV.allocate("index_fp4", self.sets * shape.rows * pages + 1, shape.page, device=device.type)
        pool = kv.pool.view(-1, kv.page_stride)
        pool.random_(0, 256, generator=generator(device, 1))
        pool[:, 64 * shape.page : 68 * shape.page].random_(118, 131, generator=generator(device, 2))
        numbers = torch.randperm(self.sets * shape.rows * pages, generator=generator(device, 3), device=device) + 1
        self.tables = numbers.int().view(self.sets, shape.rows, pages)
        q = unpack_index_record(pack_index_record(randn((shape.rows, HEADS, 128), device, 4)), torch.bfloat16)
        self.fixed = q, randn((shape.rows, HEADS), device, 5), kv
        self.sequence = torch.arange(shape.rows, device=device, dtype=torch.int32)
        self.all = torch.full((shape.rows,), shape.entries, dtype=torch.int32, device=device)
        self.some = torch.randint(0, shape.entries, (shape.rows,), generator=generator(device, 6), device=device).int()
        self.some[:3] = torch.tensor([shape.entries, 0, shape.entries - 13])
        self.blocks = None
        if shape.blocks:
            order = torch.rand((shape.rows, shape.entries // 8), generator=generator(device, 7), device=device)
            self.blocks = order.topk(shape.blocks).indices.sort().values.int()
            self.blocks[2:, -5:] = -1

    def run(self, number: int, visible: torch.Tensor, rows: slice = slice(None), call=index_scores) -> torch.Tensor:
        q, weights, kv = self.fixed
        blocks = None if self.blocks is None else self.blocks[rows]
        table = self.tables[number]
        return call(q[rows], weights[rows], kv, table, self.sequence[rows], visible[rows], self.shape.entries, blocks)

    def calls(self) -> list:
        return [lambda i=i: self.run(i, self.all) for i in range(self.sets)]

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores of the first rows by the reference, of all by the form that `tuning` has now."""
        return self.run(0, self.some, slice(CHECKED), index_scores_reference), self.run(0, self.some)


def difference(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error where there are scores; infinite where one has none and the other has."""
    hidden = expected == float("-inf")
    if not torch.equal(out == float("-inf"), hidden):
        return float("inf")
    return relative_error(out.masked_fill(hidden, 0.0), expected.masked_fill(hidden, 0.0))


def race(shape: Shape, device: torch.device, until: float) -> list[dict]:
    """Every form that fits into the time: microseconds and error, or why it has none; best first."""
    experiment = Experiment(shape, device)
    reference, all_rows = experiment.expected()
    found = []
    for compiled in FORMS:
        for runs in RUNS:
            form = compiled | {"TILES": runs}
            if time.monotonic() > until:
                return sorted(found, key=lambda row: row["us"])
            try:
                with table_says("indexer", form):
                    out = experiment.run(0, experiment.some)
                    error = max(difference(out[:CHECKED], reference), difference(out, all_rows))
                    if not error <= BOUND:
                        raise ValueError(f"relative error {error}")
                    found.append({"us": time_graph(experiment.calls()) * 1e6, "error": error, "form": form})
            except Exception as failure:  # a form may not fit the device
                found.append({"us": float("inf"), "form": form, "why": f"{type(failure).__name__}: {failure}"[:160]})
                break
    return sorted(found, key=lambda row: row["us"])


def compile_part(part: int, parts: int, device: torch.device) -> None:
    """One launch of each of the part's forms in each of the ways in which keys are found, on a few rows."""
    ways = [Shape(4, 4096), Shape(4, 4096, page=64), Shape(4, 4096, 64)]
    for shape, form in [(shape, form) for form in FORMS for shape in ways][part::parts]:
        experiment = Experiment(shape, device, cached=0)
        try:
            with table_says("indexer", {"TILES": RUNS[0]} | form):
                experiment.run(0, experiment.all)
        except Exception as failure:
            print(f"{shape.name}: {form}: {type(failure).__name__}: {failure}"[:200], file=sys.stderr)


def show(shape: Shape, found: list[dict], copy: float) -> str:
    line = f"{shape.name:24}"
    for row in [r for r in found if r["us"] < float("inf")][:3]:
        form = row["form"]
        short = f"n{form['BLOCK_N']} r{form['REGISTERS'] or 0} t{form['TILES']}"
        line += f" | {row['us']:7.1f} us {shape.scored * 72 / row['us'] / copy * 1e8:3.0f} % {short}"
    bad = [row for row in found if "why" in row]
    return line + (f" | {len(bad)} failed: {bad[0]['form']}: {bad[0]['why']}" if bad else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.tune_indexer", description=__doc__)
    parser.add_argument("--only", default="", help="only shapes whose name contains one of these, by |")
    parser.add_argument("--jobs", type=int, default=min(8, usable_cores()), help="compiling processes")
    parser.add_argument("--seconds", type=float, default=58.0, help="stop after about so long, compilation included")
    parser.add_argument("--copy", type=float, default=4.2e12, help="bytes/s of a device copy, for the share of it")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("headrace.kernels.tune_indexer needs a CUDA device: none is visible", file=sys.stderr)
        return 2
    device, begin = torch.device("cuda"), time.monotonic()
    if options.part:
        compile_part(*map(int, options.part.split("/")), device)
        return 0
    compile_in_processes(options.jobs, 0.6 * options.seconds, "headrace.kernels.tune_indexer", "--part")
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    results, failed = {}, 0
    for shape in SHAPES:
        if not any(w in shape.name for w in options.only.split("|")):
            continue
        if time.monotonic() > begin + options.seconds:
            print(f"{shape.name}: out of time")
            continue
        found = race(shape, device, begin + options.seconds)
        torch.cuda.empty_cache()
        failed += sum("why" in row for row in found)
        results[shape.name] = found
        print(show(shape, found, options.copy), flush=True)
    print(json.dumps({"card": torch.cuda.get_device_name(), "results": results}))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
