"""Clients of tests/system/compose.sh: one chat, or many at once. Not a pytest file.

    compose_clients.py chat URL     the same request twice; the texts must be equal
    compose_clients.py load URL     streams for SECONDS; every client must end with an answer or with an error object
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter

from headrace.cli.chat import Answer, stream
from headrace.cli.errors import CommandError

CLIENTS = 24
SECONDS = 12.0
PATIENCE = 30.0  # seconds for one request
PASSAGE = "The water of the head race is quiet, and the wheel turns evenly. " * 12


async def ask(url: str, text: str, max_tokens: int) -> Answer:
    answer = Answer()
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    async with asyncio.timeout(PATIENCE):
        async for _ in stream(url, body, answer):
            pass
    return answer


async def chat(url: str) -> int:
    first, second = await ask(url, PASSAGE, 16), await ask(url, PASSAGE, 16)
    same = first.content + first.reasoning == second.content + second.reasoning
    cached = second.usage["prompt_tokens_details"]["cached_tokens"]
    print(f"chat: {first.usage['prompt_tokens']} prompt tokens, then {cached} of them cached; texts equal: {same}")
    print(second.request_id)
    return 0 if same and first.finish_reason and cached > 0 else 1


async def load(url: str) -> int:
    """Prints counts by outcome and latencies; exit status 1 when a client was left without an answer or an error object."""
    outcomes: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    seconds: list[float] = []
    end = time.monotonic() + SECONDS

    async def client(number: int) -> None:
        turn = 0
        while time.monotonic() < end:
            began = time.monotonic()
            turn += 1
            try:
                answer = await ask(url, f"{number} {turn}: {PASSAGE}", 48)
                complete = answer.finish_reason and answer.usage.get("completion_tokens") == 48
                outcomes["answer" if complete else "incomplete"] += 1
            except CommandError as error:  # an error object, or a stream that broke off
                text = str(error)
                broken = "without [DONE]" in text or "cannot talk to" in text or "was silent" in text
                outcomes["broken" if broken else "error object"] += 1
                errors[text] += 1
            except TimeoutError:
                outcomes["no end within patience"] += 1
            seconds.append(time.monotonic() - began)

    await asyncio.gather(*(client(number) for number in range(CLIENTS)))
    seconds.sort()
    result = {
        "clients": CLIENTS,
        "requests": len(seconds),
        **outcomes,
        "p50_s": round(seconds[len(seconds) // 2], 2),
        "p99_s": round(seconds[int(len(seconds) * 0.99)], 2),
        "max_s": round(seconds[-1], 2),
    }
    print(json.dumps(result))
    for text, times in errors.most_common():
        print(f"  {times} x {text}")
    return 0 if set(outcomes) <= {"answer", "error object"} and outcomes["answer"] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run({"chat": chat, "load": load}[sys.argv[1]](sys.argv[2])))
