"""`show`: what a generator makes, as the model sees it."""

from __future__ import annotations

import argparse

from .sample import _TEMPLATE, target_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", nargs="?", help="a generator or corpus; without one, the list of all")
    parser.add_argument("--count", type=int, default=3, help="how many (default: 3)")
    parser.add_argument("--seed", default="0", help="another seed gives other samples (default: 0)")
    parser.add_argument("--held-out", action="store_true", help="from the side that evaluation uses")


def main(args: argparse.Namespace) -> None:
    """Print generated samples: prompt and target, exactly as trained on."""
    from . import mix

    if args.kind is None:
        print("\n".join(mix.all_kinds()))
        return
    for number in range(args.count):
        sample = mix.draw(args.kind, args.seed, number, held_out=args.held_out)
        if sample.conversation is None:
            print(sample.text)
        else:
            print(_TEMPLATE.render(sample.conversation).prompt + target_of(sample).prompt)
        print(f"--- {sample.check}\n" if sample.check else "---\n")
