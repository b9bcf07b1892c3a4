"""For system tests: a client of the completions endpoint, and a real gateway in front of a cluster's workers.

Knows chunks of a stream, how they add up to an answer. Does not know what the answer should be.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from headrace.worker.testing import Cluster, Process

PATIENCE = ("--worker-seconds", "120")  # a worker that starts may take long on a busy machine


@dataclass
class Answer:
    """What a client saw of one request. `events`: (choice, text, tokens, logprobs) of each chunk, in order."""

    text: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[tuple]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    done: bool = False

    def take(self, data: str) -> None:
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        self.error = chunk.get("error", self.error)
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk.get("choices", ()):
            index = choice["index"]
            self.text[index] = self.text.get(index, "") + choice["text"]
            told = choice.get("logprobs")
            if told:
                rows = zip(told["tokens"], told["token_logprobs"], map(str, told["top_logprobs"]), strict=True)
                self.logprobs.setdefault(index, []).extend(rows)
            if choice["finish_reason"]:
                assert index not in self.finish, "a choice that ends twice"
                self.finish[index] = choice["finish_reason"]


async def ask(url: str, body: dict[str, Any], answer: Answer) -> Answer:
    async with aiohttp.ClientSession() as session, session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: "):
                answer.take(line[6:].decode().strip())
    return answer


async def start_gateway(cluster: Cluster, *flags: str) -> tuple[Process, str]:
    gateway = await cluster.start("gateway", "--port", "0", *PATIENCE, *flags)
    url = cluster.find(gateway).http

    async def ready() -> bool:
        async with aiohttp.ClientSession() as session, session.get(url + "/ready") as response:
            return response.status == 200

    await cluster.until(ready, bool, 30.0)
    return gateway, url
