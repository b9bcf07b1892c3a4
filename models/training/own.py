"""`own`: continuations that the trained target says itself, packed like other data, for its draft to learn from.

Prompts come from the training side of the mix; half of the answers are greedy, half drawn at temperature 0.7. The serving
engine makes them on the CPU, one process a core, so that they are what will be drafted for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from . import mix
from .sample import PROMPT_WEIGHT, Renderer
from .shards import Packer, write_part

BATCH = 64  # prompts of one round
MOST = 160  # tokens of an answer
CONTEXT = 2048  # of a row, as other data has it: one shape, one compiled graph


def make_part(folder: Path, checkpoint: Path, kinds: dict[str, float], part: int, seconds: float) -> int:
    """Rounds of prompts until the time is over; one round at least. Returns the tokens that were said."""
    import torch

    from headrace.engine import LLM, SamplingParams
    from headrace.recipe import Tokenizer

    torch.set_num_threads(1)
    llm, renderer = LLM(checkpoint, max_num_seqs=32), Renderer(Tokenizer.from_file(checkpoint / "tokenizer.json"))
    packer, begun, said, number = Packer([CONTEXT]), time.monotonic(), 0, 0
    while number == 0 or time.monotonic() - begun < seconds:
        prompts = []
        for kind, share in kinds.items():
            for _ in range(max(1, round(share * BATCH))):
                sample = mix.draw(kind, f"own/{part}", number)
                number += 1
                ids = renderer.prompt_ids(sample) if sample.conversation else renderer.ids(sample)[0][:32]
                if not sample.pictures and len(ids) + MOST <= CONTEXT:
                    prompts.append(list(ids))
        sampling = [SamplingParams(temperature=0.7 * (i % 2), max_tokens=MOST, seed=number + i) for i in range(len(prompts))]
        for prompt, answer in zip(prompts, llm.generate(prompts, sampling), strict=True):
            ids = list(answer.choices[0].ids)
            said += len(ids)
            packer.add(prompt + ids, [PROMPT_WEIGHT] * len(prompt) + [1.0] * len(ids))
    write_part(folder, part, packer.arrays())
    return said


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="an export of the target")
    parser.add_argument("out", type=Path, help="data folder to fill")
    parser.add_argument("--mix", choices=mix.MIXES, default="anneal")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long each process works (default: 120)")
    parser.add_argument("--workers", type=int, default=0, help="processes (default: one a core)")


def main(args: argparse.Namespace) -> None:
    """Let an exported target answer training prompts, and pack what it says."""
    args.out.mkdir(parents=True, exist_ok=True)
    kinds = mix.available(mix.MIXES[args.mix])
    workers = args.workers or len(os.sched_getaffinity(0))
    index = {"contexts": [CONTEXT], "shares": kinds, "own": True}
    (args.out / "index.json").write_text(json.dumps(index, indent=1))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        work = (args.out, args.checkpoint, kinds)
        futures = [pool.submit(make_part, *work, part, args.seconds) for part in range(workers)]
        said = sum(future.result() for future in as_completed(futures))
    print(f"{args.out}: {said:,} tokens said by {workers} processes")
