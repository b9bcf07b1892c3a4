"""What block identity and bookkeeping cost: `python -m headrace.kv.bench [--json]`. One thread, no I/O."""

from __future__ import annotations

import argparse
import json
import random
import time
import tracemalloc
from collections.abc import Callable

from headrace.kv.hashing import ROOT, BlockHasher, namespace_key, pack_ids
from headrace.kv.pool import BlockPool
from headrace.kv.prefix import PrefixIndex

PROMPT = 77_056  # tokens: 602 blocks


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    rows = {**_hashing(), **_pool(), **_prefix()}
    if args.json:
        print(json.dumps({"bench": "kv", **{name: round(value, 3) for name, value in rows.items()}}))
        return
    for name, value in rows.items():
        print(f"{name:44}{value:>14,.3f}")


def _hashing() -> dict[str, float]:
    hasher = BlockHasher("layout", namespace_key(b"tenant", None))
    ids = [random.randrange(129_280) for _ in range(1024)]
    packed = pack_ids(ids)
    return {
        "hash_1k_tokens_list_us": _best(lambda: hasher.hashes(ids)),
        "hash_1k_tokens_packed_us": _best(lambda: hasher.hashes(packed)),
    }


def _pool() -> dict[str, float]:
    """A prompt's whole life in a pool that is always full of cached blocks."""
    count = PROMPT // 128
    pool = BlockPool(20 * count)
    prompts = [[random.randbytes(16) for _ in range(count)] for _ in range(40)]

    def life(hashes: list[bytes]) -> None:
        table = pool.match(hashes)
        fresh = pool.allocate(count - len(table))
        for index, block in enumerate(fresh, start=len(table)):
            pool.announce(block, hashes[index], hashes[index - 1] if index else ROOT)
        pool.release(reversed(table + fresh))
        pool.take_events()

    for hashes in prompts:
        life(hashes)
    turn = iter(prompts * 1000)
    return {
        "pool_block_cold_us": _best(lambda: life(next(turn)), 40) / count,
        "pool_block_hit_us": _best(lambda: life(prompts[-1]), 40) / count,
    }


def _prefix() -> dict[str, float]:
    blocks, workers = 200_000, 16
    tracemalloc.start()
    index = PrefixIndex()
    for worker in range(workers):
        index.add(f"prefill-{worker}", (random.randbytes(16) for _ in range(blocks // workers)))
    size = tracemalloc.get_traced_memory()[0] / len(index)
    tracemalloc.stop()
    prompt = [random.randbytes(16) for _ in range(PROMPT // 128)]
    for worker in range(workers):
        index.add(f"prefill-{worker}", prompt[: (worker + 1) * 37])
    return {"prefix_bytes_per_block": size, "prefix_match_602_blocks_16_workers_us": _best(lambda: index.match(prompt))}


def _best(call: Callable[[], object], times: int = 400) -> float:
    """Least microseconds of one call."""
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best * 1e6


if __name__ == "__main__":
    main()
