"""`python -m models.training COMMAND`: one command for each stage; each takes --help."""

from __future__ import annotations

import argparse
import importlib
import sys

COMMANDS = {
    "corpora": "gather the texts of others, compressed",
    "show": "print some generated samples of a kind",
    "tokenizer": "train a tokenizer on the data mix",
    "pack": "generate data and pack it into token shards",
    "begin": "a run from an exported checkpoint, to go on training it",
    "train": "pre-train, anneal, or train the draft; resumes where it stopped",
    "probe": "held-out answers that a run would get right, in seconds",
    "measure": "what can be said about a checkpoint without a server",
    "own": "continuations of the target itself, for its draft",
    "carry": "weights in small pieces, to continue on another machine",
    "export": "write the released layout and the model card",
    "evaluate": "ask the running system everything that the card claims",
    "card": "put newer results of `evaluate` into a checkpoint's card",
}


def main(argv: list[str] | None = None) -> int:
    """Parse and run; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m models.training",
        description="Make a bundled model: corpora, tokenizer, pack, train, export, evaluate. README.md has the order.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    wanted = next((a for a in (sys.argv[1:] if argv is None else argv) if not a.startswith("-")), None)
    modules = {}
    for name, about in COMMANDS.items():
        sub = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".",
                                  formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        if name == wanted:  # torch is not imported to show a list
            modules[name] = importlib.import_module(f".{name}", __package__)
            sub.description = modules[name].main.__doc__ or sub.description
            modules[name].add_arguments(sub)
    args = parser.parse_args(argv)
    try:
        modules[args.command].main(args)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
