"""Who else is there must not matter: requests in random arrivals through whole systems, each against itself alone.

    python benchmarks/batch_invariance.py [--requests 200] [--model models/headrace-nano]

A request alone: the offline API, one at a time, cold, one chunk, without drafts. Then the same requests arrive at random
times, in another order each time, at systems of real services with small pools, odd chunks and warm caches: one process or
two, shared memory or tcp, with drafts and without, states restored or replayed. Numerics class `exact` with
`batch_invariant`: ids must be equal, and log-probabilities bit for bit. The status is 1 if one differs, or if a system did
not do what its row is there for (no hit, no draft). Prints one row per system. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bus import log
from headrace.bus import messages as m
from headrace.engine import LLM, SamplingParams
from headrace.worker.testing import Cluster, Result

ROOT = Path(__file__).resolve().parents[1]
PATIENCE, DEADLINE = 240.0, 300.0  # seconds: a request may wait long here, but not for ever
EXACT = ("--numerics", "exact", "--batch-invariant", "--threads", "1")


@dataclass(frozen=True)
class Way:
    """A system. `both`: one process for prompts and outputs. `needs`: columns that must not be zero."""

    name: str
    both: bool
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    kvstore: bool = False


WAYS = (
    Way("one process, small pool", True, ("--speculative", "off", "--num-blocks", "24", "--chunk-tokens", "37,128,201"),
        ("hits",)),
    Way("one process, drafts", True, ("--speculative", "dspark", "--num-blocks", "256", "--chunk-tokens", "128,5,300"),
        ("hits", "drafts verified")),
    Way("two, shared memory, drafts, kvstore", False, ("--speculative", "dspark", "--transports", "shm", "--num-blocks", "128"),
        ("hits", "of the kvstore", "drafts verified"), ("--chunk-tokens", "64,201,37"), kvstore=True),
    Way("two, tcp, states replayed", False, ("--speculative", "off", "--transports", "tcp", "--num-blocks", "128"),
        ("hits", "replayed"), ("--chunk-tokens", "300,77", "--snapshot-bytes", "0")),
)  # fmt: skip
COLUMNS = ("requests", "most at once", "hits", "of the kvstore", "replayed", "drafts verified", "drafts accepted",
           "ids differ", "log-probabilities differ")  # fmt: skip


@dataclass(slots=True)
class Case:
    """A request and what it answers alone: (ids, log-probabilities, finish) of each choice."""

    ids: list[int]
    sampling: dict[str, Any]
    alone: list[tuple] = field(default_factory=list)


def draw(requests: int, vocabulary: int, seed: int) -> list[Case]:
    """Prompts of 1 to 900 tokens, a third of which share a prefix; greedy and seeded; up to two choices of up to 24 tokens."""
    rng = random.Random(seed)
    shared = [rng.choices(range(3, vocabulary), k=k) for k in (129, 256, 390, 640)]
    cases = []
    for number in range(requests):
        ids = rng.choices(range(3, vocabulary), k=rng.choice([1, 2, 127, 128, 129, *(rng.randint(1, 600) for _ in range(5))]))
        if number % 3 == 0:
            ids = rng.choice(shared) + ids[:260]
        sampling = {
            "max_tokens": rng.randint(1, 24),
            "seed": rng.randrange(1 << 40),
            "logprobs": rng.choice([0, 2]),
            "n": 1 + (number % 9 == 4),
        }
        drawn = {"temperature": rng.choice([0.7, 1.0]), "top_p": rng.choice([1.0, 0.9]), "top_k": rng.choice([0, 20])}
        cases.append(Case(ids, sampling | (drawn if number % 2 else {"temperature": 0.0})))
    return cases


def answered_alone(model: Path, requests: int, seed: int) -> list[Case]:
    llm = LLM(
        model, numerics="exact", batch_invariant=True, prefix_caching=False, speculative="off", num_blocks=64,
        max_num_batched_tokens=2048,
    )  # fmt: skip
    cases = draw(requests, min(llm.engine.info.vocab_size, 4000), seed)
    for case in cases:
        (answer,) = llm.generate([case.ids], [SamplingParams(**case.sampling)])
        assert not answer.error and answer.cached_tokens == 0, answer.error
        case.alone = [(c.ids, [(t, p, list(top)) for t, p, top in c.logprobs], c.finish) for c in answer.choices]
    return cases


async def serve(way: Way, model: Path, cases: list[Case], rate: float, seed: int) -> dict[str, Any]:
    """All requests twice through a system, so that the second time caches are warm; its row.

    Where there is a kvstore, prefill is replaced in between, so that only the store is warm.
    """
    common = ("--model", str(model), *EXACT, *way.flags)
    async with Cluster() as cluster:
        if way.kvstore:
            await cluster.start("kvstore")
        decode = await cluster.start("decode", *common, "--max-num-seqs", "16", *(("--both",) if way.both else ()))
        prefill = None if way.both else await cluster.start("prefill", *common, *way.prefill)
        rng = random.Random(f"{seed}/{way.name}")
        results = await arrive(cluster, cases, rate, rng)
        if way.kvstore:
            await cluster.stored(prefill)
            prefill.terminate()
            await cluster.start("prefill", *common, *way.prefill)
        results += await arrive(cluster, cases, rate, rng)
        return row(way, cases, results, await cluster.metrics(decode))


async def arrive(cluster: Cluster, cases: list[Case], rate: float, rng: random.Random) -> list[tuple[Result, int]]:
    """Every request once, `rate` a second in Poisson arrivals, in a random order; with how many were there when it came."""
    running: dict[int, asyncio.Task[Result]] = {}
    there: dict[int, int] = {}
    for index in rng.sample(range(len(cases)), len(cases)):
        there[index] = 1 + sum(not task.done() for task in running.values())
        running[index] = asyncio.create_task(
            cluster.gateway.generate(
                cases[index].ids, m.Sampling(**cases[index].sampling), patience=PATIENCE, deadline=DEADLINE
            )
        )
        await asyncio.sleep(rng.expovariate(rate))
    return [(await running[index], there[index]) for index in range(len(cases))]


def row(way: Way, cases: list[Case], results: list[tuple[Result, int]], metrics: dict[str, float]) -> dict[str, Any]:
    """What happened, as counts of requests; drafts are the decode worker's own figures."""
    count: Counter[str] = Counter({name: 0 for name in COLUMNS})
    for case, (result, there) in zip(cases * 2, results, strict=True):
        if not result.ok:
            raise SystemExit(
                f"{way.name}: a request ended without an answer: {result.problem or result.refused or result.died}"
            )
        said = list(zip(result.ids, result.logprobs, result.finish, strict=True))
        count["most at once"] = max(count["most at once"], there)
        count["hits"] += result.usage.cached_tokens > 0
        count["of the kvstore"] += result.usage.hit_source.startswith("kvstore")
        count["replayed"] += result.usage.replay_rows > 0
        count["ids differ"] += [ids for ids, *_ in said] != [ids for ids, *_ in case.alone]
        count["log-probabilities differ"] += said != case.alone
    for name, metric in (
        ("drafts verified", "drafts_verified"),
        ("drafts accepted", "drafts_accepted"),
    ):
        count[name] = int(sum(value for key, value in metrics.items() if key.split("{")[0] == f"headrace_engine_{metric}"))
    return {"system": way.name, **count, "requests": len(results), "missing": [name for name in way.needs if not count[name]]}


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| system | " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * len(COLUMNS)]
    return "\n".join(
        [*lines, *(f"| {row['system']} | " + " | ".join(f"{row[name]:,}" for name in COLUMNS) + " |" for row in rows)]
    )


async def run(args: argparse.Namespace) -> int:
    log.configure(level="warning")
    print(f"{args.requests} requests, each alone ...", file=sys.stderr, flush=True)
    cases = await asyncio.to_thread(answered_alone, args.model, args.requests, args.seed)
    rows = []
    for way in WAYS:
        print(f"{way.name} ...", file=sys.stderr, flush=True)
        rows.append(await serve(way, args.model, cases, args.rate, args.seed))
    print(json.dumps({"model": args.model.name, "rows": rows}) if args.json else table(rows))
    wrong = [row for row in rows if row["log-probabilities differ"] or row["missing"]]
    for row in wrong:
        print(
            f"{row['system']}: {row['log-probabilities differ']} answers differ; did not happen: {row['missing']}",
            file=sys.stderr,
        )
    return bool(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", type=Path, default=ROOT / "models/headrace-nano", help="checkpoint folder (default: %(default)s)"
    )
    parser.add_argument("--requests", type=int, default=200, help="how many (default: %(default)s); each system has each twice")
    parser.add_argument("--rate", type=float, default=40.0, help="arrivals a second, on average (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of prompts, sampling and arrivals (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.requests < 1 or args.rate <= 0:
        parser.error(f"--requests must be at least 1 and --rate above 0, not {args.requests} and {args.rate}")
    if not (args.model / "config.json").is_file():
        parser.error(f"there is no checkpoint in {args.model}")
    return asyncio.run(run(args))


if __name__ == "__main__":
    sys.exit(main())
