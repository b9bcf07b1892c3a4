"""`export`: a run's newest weights in the released layout, with a model card.

Weights are rounded by `make_checkpoint.save_checkpoint`, the same code that writes every checkpoint of this repository.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from headrace.engine.make_checkpoint import save_checkpoint
from headrace.engine.models.v41.training import released_values

from . import card
from .runs import Run

TEMPERATURE = 0.3  # small models talk better when they stay near the likeliest token


def export(run: Run, out: Path) -> dict[str, int]:
    """Write the checkpoint; returns the bytes of every file. Refuses a folder that holds anything but an earlier export."""
    known = {"config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "README.md", "LICENSE",
             "ATTRIBUTION.md", "evaluation.json", "losses.svg", "calibration.json", "measured.json"}  # fmt: skip
    others = [p.name for p in out.glob("*") if p.name not in known and not p.name.startswith("model")] if out.exists() else []
    if others:
        raise ValueError(f"{out} holds {others[0]}, which no export wrote; give an empty folder")
    newest = run.newest()
    if newest is None:
        raise ValueError(f"{run.folder} has no weights yet; train a stage first")
    model = run.model()
    model.load_state_dict(newest[1]["model"])
    partial = out.with_name(out.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    save_checkpoint(released_values(model), run.root, run.tokenizer.read_text("utf-8"), partial)
    sampling = json.loads((partial / "generation_config.json").read_text()) | {"temperature": TEMPERATURE}
    (partial / "generation_config.json").write_text(json.dumps(sampling, indent=1))
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("model*"):
        old.unlink()
    for file in sorted(partial.iterdir()):
        file.replace(out / file.name)
    partial.rmdir()
    return {file.name: file.stat().st_size for file in sorted(out.iterdir())}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("out", type=Path, help="checkpoint folder to write, for example models/headrace-tiny")
    parser.add_argument("--note", nargs="*", default=[], metavar="TEXT", help="sentences for the card's list of limits")


def main(args: argparse.Namespace) -> None:
    """Write a run's newest weights in the released layout (FP8, FP4), with model card, attributions and plot of losses."""
    run = Run(args.run)
    sizes = export(run, args.out)
    card.write(run, args.out, args.note)
    for name, size in sizes.items():
        print(f"{size / 1e6:8.3f} MB  {name}")
    print(f"{sum(sizes.values()) / 1e6:8.3f} MB  in all")
