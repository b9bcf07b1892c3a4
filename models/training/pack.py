"""Generate the data mix and pack it into token shards, on every core; a run that was stopped goes on with what is missing."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from headrace.recipe import Tokenizer

from . import mix
from .sample import Renderer
from .shards import Packer, write_part

PART_TOKENS = 500_000


def make_part(folder: Path, tokenizer: Path, shares: dict[str, float], contexts: list[int], tokens: int, part: int, seed: str,
              held_out: bool) -> int:  # fmt: skip
    """Write one part: every kind with its share of `tokens`. Returns the tokens of its documents."""
    renderer = Renderer(Tokenizer.from_file(tokenizer))
    documents, total = [], 0
    for kind, share in shares.items():
        made, number = 0, 0
        while made < share * tokens:
            sample = mix.draw(kind, f"{seed}/{part}", number, held_out=held_out)
            ids, weights = renderer.ids(sample)
            number += 1
            if len(ids) > contexts[-1]:
                if weights[0] < 1.0:  # a conversation loses its answer when it is cut
                    if number > 10_000:
                        raise ValueError(f"{kind}: samples are longer than {contexts[-1]} tokens; give a longer --context")
                    continue
                ids, weights = ids[: contexts[-1]], weights[: contexts[-1]]
            documents.append((ids, weights, sample.pictures))
            made += len(ids)
        total += made
    packer = Packer(contexts)
    for number in _shuffled(len(documents), f"{seed}/{part}"):
        packer.add(*documents[number])
    write_part(folder, part, packer.arrays())
    return total


def _shuffled(count: int, seed: str) -> list[int]:
    import random

    order = list(range(count))
    random.Random(seed).shuffle(order)
    return order


def pack(folder: Path, tokenizer: Path, shares: dict[str, float], contexts: list[int], tokens: int, *, seed: str = "0",
         workers: int = 0, held_out: bool = False, report=print) -> dict:  # fmt: skip
    """Fill `folder`. The same arguments give the same shards, whatever the number of workers."""
    folder.mkdir(parents=True, exist_ok=True)
    shares, contexts = mix.available(shares), sorted(contexts)
    parts = max(1, -(-tokens // PART_TOKENS))
    index = {
        "tokenizer": hashlib.sha256(tokenizer.read_bytes()).hexdigest(), "contexts": contexts, "tokens": tokens, "parts": parts,
        "seed": seed, "held_out": held_out, "shares": shares,
    }  # fmt: skip
    known = folder / "index.json"
    if known.exists() and json.loads(known.read_text()) != index:
        raise ValueError(f"{folder} holds data made with other arguments; give another folder or delete it")
    known.write_text(json.dumps(index, indent=1))
    missing = [p for p in range(parts) if not list(folder.glob(f"c*-{p:04}.npz"))]
    start, made = time.monotonic(), 0
    arguments = (folder, tokenizer, shares, contexts, -(-tokens // parts))
    workers = min(workers or len(os.sched_getaffinity(0)), len(missing) or 1)
    if workers == 1:
        for done, part in enumerate(missing, 1):
            made += make_part(*arguments, part, seed, held_out)
            report(f"part {done}/{len(missing)}: {made / 1e6:.1f} M tokens, {made / (time.monotonic() - start):,.0f} a second")
        return index
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(make_part, *arguments, part, seed, held_out) for part in missing]
        for done, future in enumerate(as_completed(futures), 1):
            made += future.result()
            report(f"part {done}/{len(missing)}: {made / 1e6:.1f} M tokens, {made / (time.monotonic() - start):,.0f} a second")
    return index


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, help="data folder to fill")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
    parser.add_argument("--mix", choices=mix.MIXES, default="pretrain", help="data mix (default: pretrain)")
    parser.add_argument("--tokens", type=float, default=10e6, help="tokens of documents in all (default: 1e7)")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[2048], help="row lengths; a document takes the shortest that holds it"
    )
    parser.add_argument("--seed", default="0")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one a core)")
    parser.add_argument("--held-out", action="store_true", help="the evaluation side of the split, to measure losses on")


def main(args: argparse.Namespace) -> None:
    """Generate the data mix and pack it into token shards. Stopped and started again, it makes what is missing."""
    shares = mix.MIXES[args.mix]
    left_out = sorted(set(shares) - set(mix.available(shares)))
    if left_out:
        print(f"without {', '.join(left_out)}: not in {mix.corpora.FOLDER} (see `corpora`)")
    pack(args.out, args.tokenizer, shares, args.context, int(args.tokens), seed=args.seed, workers=args.workers,
         held_out=args.held_out)  # fmt: skip
