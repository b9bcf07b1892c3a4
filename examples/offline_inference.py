"""Offline inference: no services, no network. `.venv/bin/python examples/offline_inference.py CHECKPOINT [--prompt TEXT ...]`

Without a checkpoint it makes a random one first (its words are random too): what it shows is the interface, the speed and the
prefix cache, whose second run computes fewer rows and gives the same tokens. Prompts are texts as they are, without a chat's
template: a model that was taught to chat goes on with them as best it can.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time

from headrace.engine import LLM, SamplingParams
from headrace.engine.make_checkpoint import make_checkpoint

PROMPTS = [
    "A head race is the channel that leads water to the wheel. " * 24 + "Where does the water go?",
    "List three things that turn: ",
    "def fibonacci(n):",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", nargs="?", help="directory with config.json and safetensors; default: a random one")
    parser.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--numerics", choices=("bounded", "exact"), default="exact")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = args.checkpoint or make_random(scratch)
        llm = LLM(path, numerics=args.numerics, batch_invariant=args.numerics == "exact")
        params = SamplingParams(temperature=args.temperature, seed=args.seed, max_tokens=args.max_tokens, logprobs=0)
        for run in ("cold", "again"):
            began = time.perf_counter()
            answers = llm.generate(args.prompt or PROMPTS, params, progress=True)
            print(f"--- {run}: {time.perf_counter() - began:.2f} s")
            for answer in answers:
                show(answer)


def make_random(folder: str) -> str:
    print("no checkpoint given: making a random one (preset nano)", file=sys.stderr)
    return str(make_checkpoint("nano", 0, folder))


def show(answer) -> None:
    if answer.error:
        print(f"{answer.request}: {answer.error}")
        return
    choice = answer.choices[0]
    mean = sum(logprob for _, logprob, _ in choice.logprobs) / max(len(choice.logprobs), 1)
    rows = f"{answer.cached_tokens} cached, {answer.computed_rows} computed, {answer.replay_rows} replayed"
    print(f"{answer.request}: {len(answer.prompt_ids)} prompt tokens ({rows}), {len(choice.ids)} new, mean logprob {mean:.2f}")
    print(f"    {choice.text!r} [{choice.finish}]")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted: the answers that were not shown are lost")
