"""`begin`: a run from a checkpoint that `export` wrote, to go on training where an earlier run ended.

The stored values (FP8, FP4, BF16) become the fp32 parameters; what rounding took away is lost, and the optimiser starts anew.
The draft's weights come along, for the draft stage to begin with. The card beside the weights says what earlier stages were;
`earlier.json` keeps that for the next card. Knows the card's lines; does not know the stages.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from headrace.engine.loader import load_model
from headrace.engine.models.v41.training import TrainingModel
from headrace.engine.models.vision.loader import load_encoder

from .runs import EARLIER, STAGES, Run

_ROW = re.compile(rf"^\| (?:continued: )?(?:{'|'.join(STAGES)}) \|.*\|$", re.M)
_DATA = re.compile(r"^Data(?: of .*)?, shares of tokens: (.*)\.$", re.M)


def earlier_of(card: str) -> dict[str, Any]:
    """What a card tells about training: its rows of stages, and every kind of data with its share in percent."""
    data = [(kind, int(share)) for line in _DATA.findall(card) for kind, share in re.findall(r"(\w+) (\d+)%", line)]
    shares: dict[str, int] = {}
    for kind, share in data:
        shares[kind] = max(share, shares.get(kind, 0))
    return {"rows": _ROW.findall(card), "shares": shares}


def begin(checkpoint: Path, folder: Path) -> Run:
    """A new run's folder whose first stage is over, with these weights. ValueError: the folder holds states of a run."""
    if old := sorted(folder.glob("*.pt")):
        raise ValueError(f"{folder} is a run already ({old[0].name}); give another folder")
    root = json.loads((checkpoint / "config.json").read_text())
    encoder = load_encoder(checkpoint) if root.get("vision_config") else None
    model = TrainingModel.of(load_model(checkpoint), encoder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copyfile(checkpoint / name, folder / name)
    card = checkpoint / "README.md"
    earlier = earlier_of(card.read_text("utf-8") if card.exists() else "")
    (folder / EARLIER).write_text(json.dumps(earlier, indent=1))
    run = Run(folder)
    run.save(STAGES[0], {"model": model.state_dict(), "carried": True})
    return run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of the new run")
    parser.add_argument("checkpoint", type=Path, help="an exported checkpoint, for example models/headrace-tiny")


def main(args: argparse.Namespace) -> None:
    """Begin a run from an exported checkpoint's weights; `train --stage anneal` goes on from them."""
    begin(args.checkpoint, args.run)
    print(f"{args.run}: weights of {args.checkpoint}; the anneal stage goes on from them")
