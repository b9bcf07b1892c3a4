"""Which form and configuration of the small-format products is fastest for a decode step of V4.1. Needs a GPU.

    python -m headrace.kernels.tune_decode --seconds 150 [--json FILE] [--only TEXT]

Shapes are those of the released model with 96 experts on the card (top 6, random routing) and its linears: FP8 ones at batch 1
to 256, bf16 ones with fp32 results at 64 to 256. Compiles every candidate in parallel processes, checks each result against the
reference, times it, and prints the best beside what `tuning` chooses for the stored formats. What is worth keeping goes by hand
into `tuning`.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time

import torch

from headrace.kernels import gemm_upcast
from headrace.kernels.bench import measure_ceilings, time_graph
from headrace.kernels.cases import generator, randn, random_fp8
from headrace.kernels.cases.gemm import BYTES
from headrace.kernels.check import relative_error
from headrace.kernels.mhc import whole_reference
from headrace.kernels.tune import compile_in_processes, table_says, usable_cores

EXPERTS, TOP_K = 96, 6
CHECKED = 4  # groups whose result is compared
BOUND = 6e-3
MOE = [("w_in", 4608, 5120), ("w_out", 5120, 2304)]
LINEAR = [
    ("wq_a+wkv", 1792, 5120), ("wq", 32768, 1280), ("wo_b", 5120, 8192), ("shared_in", 4608, 5120),
    ("shared_out", 5120, 2304), ("index wq", 4096, 1280), ("wo_a", 1024, 4096),
]  # fmt: skip
SMALL = [("gate", EXPERTS, 5120), ("index weights", 32, 5120), ("compressor", 512, 5120), ("compressor of pairs", 1024, 5120)]
BESIDE = {"wo_a": 8}  # linears that are as many products side by side
BATCHES = (64, 256, 128, 8, 1, 4096)  # the last: prefill reads the same packed weights


@dataclasses.dataclass
class Shape:
    name: str
    kind: str  # mxfp4, fp8, bf16: what is stored
    batch: int
    n: int
    k: int
    groups: int = 1

    @property
    def beside(self) -> int:
        return BESIDE.get(self.name, 1)

    @property
    def in_parts(self) -> bool:
        """As the model asks for it: what follows adds them."""
        return self.name == "wo_b" and self.batch <= 512

    @property
    def alignment(self) -> int:
        mean = self.batch * TOP_K / self.groups
        return 16 if mean <= 8 else 32 if mean <= 24 else 64 if mean <= 56 else 128


def shapes() -> list[Shape]:
    found = [Shape(name, "mxfp4", batch, n, k, EXPERTS) for batch in BATCHES for name, n, k in MOE]
    found += [Shape(name, "fp8", batch, n, k) for batch in BATCHES for name, n, k in LINEAR]
    return found + [Shape(name, "bf16", batch, n, k) for batch in (64, 128, 256) for name, n, k in SMALL]


def candidates(shape: Shape) -> list[dict]:
    """Best guesses first: time may run out."""
    if shape.batch == 4096:
        blocks = (128, 64) if shape.kind == "mxfp4" else (128, 256)
        return [_config(m, n, w, 3, 1, 1) for m, (n, w) in itertools.product(blocks, [(128, 8), (64, 4), (128, 4)])]
    if shape.kind == "mxfp4":
        tiles = [(128, 8, 3), (64, 4, 3), (128, 4, 3), (256, 16, 3), (128, 8, 4), (64, 4, 4), (128, 4, 4), (256, 8, 3)]
        found = [_config(shape.alignment, *tile, atoms, 1) for atoms in (2, 1) for tile in tiles]
        found += [_config(shape.alignment, *tile, 1, 1) for tile in [(64, 4, 6), (128, 8, 6), (256, 16, 5)]]
        found = [_config(shape.alignment, *tile, 2, 1) for tile in [(64, 4, 2), (128, 8, 2), (128, 4, 2)]] + found
        if shape.k % 512 == 0:  # an eighth fewer instructions, in three programs a processor instead of four
            found = [_config(shape.alignment, *tile, 4, 1) for tile in [(64, 4, 2), (64, 4, 3), (128, 8, 2)]] + found
        return found + [_config(shape.alignment, *tile, 2, 0) for tile in tiles[:4]]
    if shape.kind == "bf16":  # one or a few tiles of the result: sums are split as far as that pays
        tiles = [(16, 128, 3), (16, 64, 3), (32, 64, 3), (64, 32, 3), (32, 32, 3), (16, 32, 4), (64, 64, 3), (64, 128, 3)]
        return [_config(m, n, 4, stages, 1, 0, waves) for waves in (1, 2) for m, n, stages in tiles if n < 2 * shape.n]
    if shape.batch == 64:
        # Rows are read once a tile: with 64 columns twice the weight's bytes through the second cache, with 256 half.
        tiles = [(128, 8, 3), (64, 4, 4), (256, 16, 3), (128, 16, 3), (64, 4, 3), (256, 8, 3), (128, 8, 2)]
        return [_config(64, *tile, 1, 1, waves) for waves, tile in itertools.product((2, 1, 3), tiles)]
    if shape.batch >= 128:  # a tile of 256 rows decodes a weight once, and leaves a processor one program
        tiles = [(128, 128, 8, 3), (128, 64, 4, 4), (128, 128, 4, 3), (128, 256, 16, 3), (64, 128, 8, 3), (64, 256, 16, 3)]
        if shape.batch == 256:
            tiles = [(256, 128, 8, 3), (256, 64, 4, 3), (256, 64, 8, 3), (256, 128, 16, 3), *tiles]
        found = [_config(m, n, warps, stages, 1, 1, waves) for waves in (1, 2) for m, n, warps, stages in tiles]
        return found + [_config(*tiles[0], 1, 1, 3), _config(*tiles[0], 1, 0, 1)]
    blocks = (16,)
    tiles = [(128, 8, 3), (64, 4, 4), (128, 4, 3), (64, 4, 6)]
    found = [_config(m, *tile, 1, 1, waves) for waves, m, tile in itertools.product((2, 4, 1), blocks, tiles)]
    return found + [_config(blocks[0], *tile, 1, 0, 2) for tile in tiles[:2]]


def _config(block_m: int, block_n: int, warps: int, stages: int, atoms: int, pairs: int, waves: int = 1) -> dict:
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "ATOMS": atoms, "PAIRS": pairs, "WAVES": waves, "STAGES": stages,
            "num_warps": warps}  # fmt: skip


class Experiment:
    """One shape's inputs: `stored` and packed weights of the same values in the groups that are compared."""

    def __init__(self, shape: Shape, device: torch.device, groups: int | None = None) -> None:
        self.shape, self.device = shape, device
        self.groups = groups or shape.groups
        g = generator(device, 1)
        if shape.kind == "mxfp4":
            self._experts(g)
        else:
            self._linear(g)

    @property
    def out_dtype(self) -> torch.dtype:
        """As the model asks for it."""
        return torch.float32 if self.shape.kind == "bf16" else torch.bfloat16

    def _experts(self, g: torch.Generator) -> None:
        """Random bytes are weights in either layout; only the compared groups are packed from the stored ones."""
        s, device = self.shape, self.device
        chosen = torch.rand(s.batch, self.groups, generator=g, device=device).argsort(1)[:, :TOP_K]
        counts = torch.bincount(chosen.flatten(), minlength=self.groups).cpu()
        self.copies = 1 if int((counts > 0).sum()) > 16 else 4
        lead = (self.copies, self.groups)
        size = (*lead, s.n, s.k // 2)
        self.stored = torch.randint(0, 256, size, generator=g, device=device, dtype=torch.uint8)
        self.scale = torch.randint(118, 124, (*lead, s.n, s.k // 32), generator=g, device=device, dtype=torch.uint8)
        self.words = self.stored.view(torch.int32).clone()
        self.fields = gemm_upcast.pack_words(self.stored[0, :1], self.scale[0, :1], "mxfp4")[1].repeat(*lead, 1, 1)
        self.compared = counts.nonzero().flatten()[:CHECKED].tolist()
        for group in self.compared:
            packed = gemm_upcast.pack_words(self.stored[0, group], self.scale[0, group], "mxfp4")
            self.words[0, group], self.fields[0, group] = packed[:2]
        self.layouts = {alignment: _rows(counts, alignment, device) for alignment in {s.alignment, 128}}
        self.active = int((counts > 0).sum())
        x = randn((s.batch * TOP_K, s.k), device, 3, torch.bfloat16)
        self.x = {alignment: _spread(x, rows) for alignment, rows in self.layouts.items()}

    def _linear(self, g: torch.Generator) -> None:
        s, device = self.shape, self.device
        lead = (s.beside,) if s.beside > 1 else ()
        self.copies = min(8, int(1.3e8 / (s.beside * s.n * s.k)) + 2)
        self.rows, self.active = randn((s.batch, *lead, s.k), device, 3, torch.bfloat16), 1
        if s.kind == "bf16":
            self.stored = self.words = randn((self.copies, s.n, s.k), device, 5, torch.bfloat16)
            self.scale = self.fields = [None] * self.copies
            return
        self.stored = random_fp8((self.copies, *lead, s.n, s.k), device, 5)
        self.scale = torch.randint(
            118, 124, (self.copies, *lead, s.n // 32, s.k // 32), generator=g, device=device, dtype=torch.uint8
        )
        self.words, self.fields, _ = gemm_upcast.pack_words(self.stored, self.scale, "fp8")

    def calls(self, packed: bool) -> list:
        s = self.shape
        weight, scale = (self.words, self.fields) if packed else (self.stored, self.scale)
        name = gemm_upcast.PACKED.get(s.kind, s.kind) if packed else s.kind
        if s.kind != "mxfp4":
            return [
                lambda i=i: gemm_upcast.gemm_upcast(
                    self.rows, weight[i], scale[i], name, side_by_side=s.beside > 1, out_dtype=self.out_dtype,
                    in_parts=s.in_parts,
                )  # fmt: skip
                for i in range(self.copies)
            ]
        alignment = s.alignment if packed else 128  # as before packed formats
        rows = self.layouts[alignment]
        return [
            lambda i=i: gemm_upcast.gemm_upcast(
                self.x[alignment], weight[i], scale[i], name, group_of_row=rows, alignment=alignment,
                expected_rows=alignment if packed else None,
            )
            for i in range(self.copies)
        ]  # fmt: skip

    def error(self, out: torch.Tensor) -> float:
        """Of the compared groups' rows."""
        out = whole_reference(out) if self.shape.in_parts else out
        return max(relative_error(out[rows], expected) for rows, expected in self.expected)

    @functools.cached_property
    def expected(self) -> list:
        """(rows, what they should be) per compared group."""
        s, reference = self.shape, gemm_upcast.gemm_upcast_reference
        if s.kind != "mxfp4":
            return [(slice(None), reference(self.rows, self.stored[0], self.scale[0], s.kind))]
        x, group_of_row = self.x[s.alignment], self.layouts[s.alignment]
        where = [(group, group_of_row == group) for group in self.compared]
        return [(rows, reference(x[rows], self.stored[0, g], self.scale[0, g], "mxfp4")) for g, rows in where]

    @property
    def bytes(self) -> float:
        s = self.shape
        rows = s.batch * (TOP_K if s.kind == "mxfp4" else 1)
        return s.beside * (self.active * s.n * s.k * BYTES[s.kind] + 2 * rows * (s.k + s.n))


def _rows(counts: torch.Tensor, alignment: int, device: torch.device) -> torch.Tensor:
    """group_of_row as `routing.plan_rows` makes it, its fixed capacity included."""
    total = int(counts.sum())
    capacity = total + min(len(counts), total) * (alignment - 1)
    rows = torch.full((-(-capacity // alignment) * alignment,), -1, dtype=torch.int32)
    begin = 0
    for group, count in enumerate(counts.tolist()):
        rows[begin : begin + count] = group
        begin += -(-count // alignment) * alignment
    return rows.to(device)


def _spread(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(rows), x.shape[1]), float("nan"), dtype=x.dtype, device=x.device)
    out[rows >= 0] = x
    return out


def with_config(config: dict, call):
    """call() while `tuning` answers `config`."""
    with table_says("gemm_upcast", config):
        return call()


def compile_part(part: int, parts: int, wanted: list[Shape]) -> None:
    """Launch the part's candidates once on a few groups: what they compile stays in Triton's cache folder."""
    work = [(shape, config) for shape in wanted for config in candidates(shape)]
    distinct = {}
    for shape, config in work:  # experts' kernels do not depend on the batch, nor on n
        rest = [shape.batch, shape.n] if shape.kind != "mxfp4" else []
        distinct[json.dumps([shape.kind, shape.k, *rest, config])] = shape, config
    inputs: dict[str, list] = {}
    for shape, config in list(distinct.values())[part::parts]:
        key = f"{shape.kind} {shape.batch} {shape.n} {shape.k}"
        if key not in inputs:
            inputs[key] = Experiment(shape, torch.device("cuda"), groups=8 if shape.groups > 1 else None).calls(True)
        try:
            with_config(config, inputs[key][0])
        except Exception as error:  # a configuration may not fit the device
            print(f"{shape.name} {config}: {type(error).__name__}: {error}"[:200], file=sys.stderr)


def tune(shape: Shape, device: torch.device, copy: float, deadline: float) -> dict | None:
    if time.monotonic() > deadline:
        return None
    experiment = Experiment(shape, device)
    row: dict = dataclasses.asdict(shape) | {"bytes": experiment.bytes, "found": []}
    row["stored_us"] = time_graph(experiment.calls(False)) * 1e6
    calls = experiment.calls(True)
    for config in candidates(shape):
        if time.monotonic() > deadline:
            row["stopped"] = True
            break
        try:
            error = experiment.error(with_config(config, calls[0]))
            if not error <= BOUND:
                raise ValueError(f"relative error {error}")
            seconds = with_config(config, lambda: time_graph(calls))
        except Exception as error:
            row["found"].append({"config": config, "us": float("inf"), "why": f"{type(error).__name__}: {error}"[:120]})
            continue
        tbps = experiment.bytes / seconds / 1e12
        row["found"].append({"config": config, "us": seconds * 1e6, "tbps": tbps, "of_copy": tbps * 1e12 / copy})
    row["found"].sort(key=lambda f: f["us"])
    return row


def show(row: dict) -> str:
    good = [f for f in row["found"] if f["us"] < float("inf")]
    bad = len(row["found"]) - len(good)
    line = f"{row['kind']:5} {row['name']:10} batch {row['batch']:4}: stored {row['stored_us']:7.1f} us"
    for f in good[:3]:
        c = f["config"]
        short = "m{BLOCK_M} n{BLOCK_N} a{ATOMS} p{PAIRS} w{WAVES} s{STAGES} x{num_warps}".format(**c)
        line += f" | {f['us']:7.1f} us {f['tbps']:.2f} TB/s {f['of_copy'] * 100:3.0f} % {short}"
    plain = next((f for f in good if not f["config"]["PAIRS"]), None)
    line += f" | plain {plain['us']:.1f}" if plain else ""
    return line + (f" | {bad} failed: {row['found'][-1]['why'][:60]}" if bad else "")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="headrace.kernels.tune_decode", description=__doc__)
    parser.add_argument("--seconds", type=float, default=150.0, help="stop after about so long, compilation included")
    parser.add_argument("--json", default="", help="write every timing to this file")
    parser.add_argument("--only", default="", help="only shapes whose 'kind name batch' contains one of these, by |")
    parser.add_argument("--jobs", type=int, default=min(16, usable_cores()), help="compiling processes")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    wanted = [s for s in shapes() if any(w in f"{s.kind} {s.name} {s.batch}" for w in options.only.split("|"))]
    if options.part:
        compile_part(*map(int, options.part.split("/")), wanted)
        return 0
    if not torch.cuda.is_available():
        print("headrace.kernels.tune_decode needs a CUDA device: none is visible", file=sys.stderr)
        return 2
    module = "headrace.kernels.tune_decode", "--only", options.only, "--part"
    compile_in_processes(options.jobs, 0.6 * options.seconds, *module)
    device = torch.device("cuda")
    copy = measure_ceilings(device)["copy"]
    print(f"compiled after {time.monotonic() - begin:.0f} s; copy {copy / 1e12:.2f} TB/s", flush=True)
    rows = []
    for shape in wanted:
        row = tune(shape, device, copy, begin + options.seconds)
        torch.cuda.empty_cache()
        if row is None:
            print(f"no time left for {shape.kind} {shape.name} batch {shape.batch}")
            continue
        rows.append(row)
        print(show(row), flush=True)
    best = {f"{r['kind']} {r['name']} {r['batch']}": r["found"][0]["config"] for r in rows if r["found"]}
    print(json.dumps({"card": torch.cuda.get_device_name(), "copy": copy, "best": best}))
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"card": torch.cuda.get_device_name(), "copy": copy, "rows": rows}, file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
