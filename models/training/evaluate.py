"""`evaluate`: every claim of the model card, asked of a running system over HTTP.

Questions come from the held-out side of the generators' slots, so none was trained on. Answers are checked against what the
generator knows. Shares carry 95 % Wilson intervals. Speculation is read from the workers' /metrics, if they are given.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import re
import statistics
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import mix
from .generators import recall
from .sample import Sample, to_request

TIMEOUT = 300.0  # seconds of one request
READY = 60.0  # seconds that a system may take until it serves a model
MOST_TOKENS = 400
TAGS = "think tags well-formed"  # over all tasks
NEEDLE_CHARACTERS = 5800  # 1,500 tokens of headrace-tiny's tokenizer


@dataclass(slots=True)
class Reply:
    """One answer. seconds: from the first token on, `tokens` of usage; retry_after: seconds until a refusal may be over, 0: it
    is none of that kind."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = ""
    tokens: int = 0
    seconds: float = 0.0
    error: str = ""
    retry_after: float = 0.0


class Client:
    """Streams Chat Completions; one connection a request."""

    def __init__(self, url: str, temperature: float) -> None:
        self.url, self.temperature = urllib.parse.urlsplit(url), temperature
        self.model = self._served()

    def _served(self) -> str:
        """The model's name, once workers are there."""
        deadline = time.monotonic() + READY
        while not (models := self._get("/v1/models")["data"]):
            if time.monotonic() > deadline:
                raise ValueError(f"{self.url.geturl()} answers, but serves no model after {READY:.0f} s; are its workers up?")
            time.sleep(0.5)
        return models[0]["id"]

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url.geturl().rstrip("/") + path, timeout=TIMEOUT) as reply:
            return json.load(reply)

    def ask(self, request: dict[str, Any], most: int = MOST_TOKENS) -> Reply:
        """Never raises: an error is part of the reply. A system that is too busy (429, 503) is asked again when it says, for
        `TIMEOUT` seconds in all: that says nothing about the model."""
        deadline = time.monotonic() + TIMEOUT
        while True:
            reply = self._ask(request, most)
            if not reply.retry_after or time.monotonic() + reply.retry_after > deadline:
                return reply
            time.sleep(reply.retry_after)

    def _ask(self, request: dict[str, Any], most: int) -> Reply:
        body = {"model": self.model, "max_tokens": most, "temperature": self.temperature, "stream": True,
                "stream_options": {"include_usage": True}, **request}  # fmt: skip
        reply, begun, calls = Reply(), 0.0, {}
        connection = http.client.HTTPConnection(self.url.netloc, timeout=TIMEOUT)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                reply.error = f"HTTP {answer.status}: {answer.read()[:300].decode('utf-8', 'replace')}"
                if answer.status in (429, 503):
                    reply.retry_after = float(answer.headers.get("Retry-After") or 1.0)
                return reply
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                data = json.loads(line[6:])
                if data.get("error"):  # after the status line, a refusal too can only be said here
                    reply.error = f"in the stream: {json.dumps(data['error'])[:300]}"
                if data.get("usage"):
                    reply.tokens = data["usage"]["completion_tokens"]
                for choice in data.get("choices", ()):
                    delta = choice.get("delta") or {}
                    begun = begun or (time.monotonic() if len(delta) > 1 or delta.get("content") else 0.0)
                    reply.content += delta.get("content") or ""
                    reply.reasoning += delta.get("reasoning_content") or ""
                    for part in delta.get("tool_calls") or ():
                        function = part.get("function") or {}
                        made = calls.setdefault(part["index"], ["", ""])
                        made[0] += function.get("name") or ""
                        made[1] += function.get("arguments") or ""
                    reply.finish = choice.get("finish_reason") or reply.finish
        except (OSError, http.client.HTTPException, ValueError) as error:
            reply.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        reply.calls = [tuple(c) for _, c in sorted(calls.items())]
        reply.seconds = time.monotonic() - begun if begun else 0.0
        return reply


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """95 % interval of a share."""
    if n == 0:
        return 0.0, 1.0
    share, square = hits / n, z * z
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = z * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return max(0.0, middle - half), min(1.0, middle + half)


# ------------------------------------------------------------------ checks

Check = Callable[[Sample, Reply], bool]


def valid_calls(sample: Sample, reply: Reply) -> bool:
    """At least one call; every one names a declared tool and has JSON arguments that its schema knows and requires."""
    schemas = {tool.name: tool.parameters for tool in sample.conversation.tools}
    for name, arguments in reply.calls:
        value = _json(arguments)
        if name not in schemas or not isinstance(value, dict):
            return False
        if not set(schemas[name]["required"]) <= set(value) <= set(schemas[name]["properties"]):
            return False
    return bool(reply.calls) and reply.finish == "tool_calls"


def right_tools(sample: Sample, reply: Reply) -> bool:
    return [name for name, _ in reply.calls] == [name for name, _ in sample.check["calls"]]


def exact_calls(sample: Sample, reply: Reply) -> bool:
    return [[name, _json(arguments)] for name, arguments in reply.calls] == sample.check["calls"]


def no_call(sample: Sample, reply: Reply) -> bool:
    return not reply.calls and bool(reply.content.strip()) and reply.finish == "stop"


def right_number(sample: Sample, reply: Reply) -> bool:
    """The last number of the answer."""
    numbers = re.findall(r"-?\d+", reply.content)
    return reply.finish == "stop" and bool(numbers) and numbers[-1] == str(sample.check["number"])


def has_text(sample: Sample, reply: Reply) -> bool:
    return str(sample.check["text"]).lower() in reply.content.lower()


def right_json(sample: Sample, reply: Reply) -> bool:
    return _json(reply.content) == sample.check["json"]


def valid_json(sample: Sample, reply: Reply) -> bool:
    return _json(reply.content) is not None and reply.finish == "stop"


def well_formed(sample: Sample, reply: Reply) -> bool:
    """The tags of thinking are closed where they must be, and never show in the text."""
    tags = any(tag in text for tag in ("<think>", "</think>") for text in (reply.content, reply.reasoning))
    answered = bool(reply.content.strip() or reply.calls)
    return not tags and answered and not reply.error and reply.finish in ("stop", "tool_calls")


def told(sample: Sample, reply: Reply) -> bool:
    """A story that comes to an end by itself, with the length of one."""
    return reply.finish == "stop" and len(reply.content.split()) >= 25


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Task:
    """Samples of a kind, and what is counted about their answers."""

    kind: str
    checks: dict[str, Check]
    thinking: bool | None = None  # force a mode


TASKS: dict[str, Task] = {
    "tools": Task("tool", {"tool calls valid": valid_calls, "right tool": right_tools, "right arguments": exact_calls}),
    "tools_simple": Task(
        "tool_simple",
        {"simple calls valid": valid_calls, "simple: right tool": right_tools, "simple: right arguments": exact_calls},
    ),
    "tools_none": Task("tool_none", {"no call where none is needed": no_call}),
    "sums": Task("three_digits", {"three-digit sums": right_number}, thinking=True),
    "small_sums": Task("add_subtract", {"sums of up to three digits": right_number}, thinking=True),
    "needles": Task("needle_1500", {"needle at 1,500 tokens": has_text}),
    "needles_alike": Task("needle_alike", {"needle at 1,500 tokens, all facts of one form": has_text}),
    "bindings": Task("bindings", {"one more question about many facts": has_text}),
    "json": Task("json", {"JSON valid": valid_json, "JSON right": right_json}),
    "stories": Task("story_chat", {"stories that end": told}),
    "facts": Task("table", {"facts of the tables": lambda s, r: r.content.strip() == s.answer}),
    "talk": Task("who_has", {"who has what": has_text}),
    "vision": Task("picture", {"questions about a picture": has_text}),
}


def draw(kind: str, seed: str, number: int) -> Sample:
    """A held-out sample; `needle_1500` has its needle outside every window of a prompt of about 1,500 tokens, `needle_alike`
    has it so among facts of its own form."""
    if kind not in ("needle_1500", "needle_alike"):
        return mix.draw(kind, seed, number, held_out=True)
    import random

    rng = random.Random(f"{seed}/needle/{number}")
    while True:
        sample = recall.needle(rng, NEEDLE_CHARACTERS, alike=float(kind == "needle_alike"))
        if sample.held_out:
            return sample


# ------------------------------------------------------------------ running


def share_of(hits: Iterable[bool]) -> dict[str, Any]:
    values = list(hits)
    return {
        "share": sum(values) / max(1, len(values)), "interval": wilson(sum(values), len(values)), "n": len(values)
    }  # fmt: skip


def run_task(
    client: Client, task: Task, count: int, threads: int, seed: str
) -> tuple[dict[str, Any], list[tuple[Sample, Reply]]]:
    """Results of every check, and the pairs."""
    samples = [draw(task.kind, seed, number) for number in range(count)]
    if task.thinking is not None:
        for sample in samples:
            sample.conversation.thinking_mode = task.thinking
    with ThreadPoolExecutor(threads) as pool:
        replies = list(pool.map(lambda sample: client.ask(to_request(sample)), samples))
    pairs = list(zip(samples, replies, strict=True))
    broken = [r.error for r in replies if r.error]
    if len(broken) == len(replies):
        raise ValueError(f"every request failed; the first with {broken[0]}")
    if broken:
        print(f"{task.kind}: {len(broken)} of {count} requests failed and count as wrong; the first: {broken[0]}", flush=True)
    return {name: share_of(check(*pair) for pair in pairs) for name, check in task.checks.items()}, pairs


def speed(client: Client, concurrency: int, seed: str, tokens: int = 128) -> float:
    """Decoded tokens a second of `concurrency` stories at once, over three rounds."""
    rates = []
    for round_ in range(3):
        samples = [mix.draw("story_chat", f"{seed}/speed{round_}", n, held_out=True) for n in range(concurrency)]
        begun = time.monotonic()
        with ThreadPoolExecutor(concurrency) as pool:
            replies = list(pool.map(lambda s: client.ask({**to_request(s), "ignore_eos": True}, tokens), samples))
        took = time.monotonic() - begun if concurrency > 1 else replies[0].seconds
        rates.append(sum(r.tokens for r in replies) / max(took, 1e-9))
    return statistics.median(rates)


def scrape(urls: Iterable[str]) -> dict[str, float]:
    """Sums of all engine numbers of the workers."""
    found: dict[str, float] = {}
    for url in urls:
        try:
            with urllib.request.urlopen(url, timeout=30) as reply:
                lines = reply.read().decode().splitlines()
        except OSError as error:
            raise ValueError(f"no metrics at {url} ({error}); each worker's log says its HTTP address") from None
        for line in lines:
            if match := re.match(r"headrace_engine_(draft\S*) (\S+)$", line):
                name = re.sub(r'[{}"]|/', " ", match.group(1)).strip()
                found[name] = found.get(name, 0.0) + float(match.group(2))
    return found


def accepted_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    """Tokens a verified window gave, the target's own included."""
    windows, tokens = (after.get(k, 0) - before.get(k, 0) for k in ("draft_windows", "draft_window_tokens"))
    return tokens / windows if windows else None


def samples_to_show(client: Client, count: int = 10) -> list[dict[str, str]]:
    """The first held-out questions of ten kinds, whatever is answered."""
    kinds = (
        "story_chat",
        "small_talk",
        "three_digits",
        "why",
        "table",
        "story_chat",
        "tool_simple",
        "remembered",
        "declined",
        "capital",
    )
    shown = []
    for number, kind in enumerate(kinds[:count]):
        sample = mix.draw(kind, "shown", number, held_out=True)
        reply = client.ask(to_request(sample))
        answer = reply.content or "; ".join(f"{name}({arguments})" for name, arguments in reply.calls) or reply.error
        answer = f"[thinks: {reply.reasoning.strip()}] {answer}" if reply.reasoning.strip() else answer
        shown.append({"asked": sample.conversation.messages[-1].content, "answer": answer})
    return shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the system (default: http://127.0.0.1:8000)")
    parser.add_argument(
        "--metrics", nargs="*", default=[], metavar="URL", help="/metrics of the decode workers, for acceptance"
    )
    parser.add_argument(
        "--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="default: all; vision needs a model that sees"
    )
    parser.add_argument("--count", type=int, default=500, help="questions of each task (default: 500)")
    parser.add_argument("--threads", type=int, default=16, help="requests at a time (default: 16)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    parser.add_argument("--seed", default="evaluation")
    parser.add_argument("--no-speed", action="store_true", help="skip the measurement of tokens a second")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="results for the model card; those of other tasks, if there already, stay"
    )


def main(args: argparse.Namespace) -> None:
    """Ask a running system (`./headrace up`) held-out questions and print shares with 95 % intervals."""
    try:
        client = Client(args.url, args.temperature)
    except OSError as error:
        raise ValueError(
            f"nobody answers at {args.url} ({error}); start a system with `./headrace up`, or give --url"
        ) from None
    report = begun(args.json, client.model, args.temperature, args.seed)
    for name in args.tasks:
        before = scrape(args.metrics)
        results, pairs = run_task(client, TASKS[name], args.count, args.threads, args.seed)
        report["results"] |= results
        report["tags"][name] = [sum(well_formed(*pair) for pair in pairs), len(pairs)]
        for check in results:
            _print_share(check, results[check])
        length = accepted_length(before, scrape(args.metrics))
        if length is not None:
            report["numbers"][f"tokens a verified window, {name}"] = length
            print(f"{'':32} {length:.2f} tokens a verified window", flush=True)
        _save(args.json, report)
    hits, asked = (sum(pair[i] for pair in report["tags"].values()) for i in (0, 1))
    report["results"].pop(TAGS, None)  # the last row
    report["results"][TAGS] = {"share": hits / max(1, asked), "interval": wilson(hits, asked), "n": asked}
    _print_share(TAGS, report["results"][TAGS])
    if not args.no_speed:
        for concurrency in (1, 16):
            rate = speed(client, concurrency, args.seed)
            report["numbers"][f"decoded tokens a second at concurrency {concurrency}"] = rate
            print(f"{rate:8.1f} tokens a second at concurrency {concurrency}")
    report["samples"] = samples_to_show(client)
    _save(args.json, report)


def begun(path: Path | None, model: str, temperature: float, seed: str) -> dict[str, Any]:
    """The report in `path`, if it is of the same model and sampling, for this run to add to; else an empty one."""
    asked = {"model": model, "temperature": temperature, "seed": seed}
    found = json.loads(path.read_text()) if path and path.exists() else {}
    if "tags" in found and all(found.get(key) == value for key, value in asked.items()):
        return found
    return {**asked, "results": {}, "numbers": {}, "tags": {}}


def _save(path: Path | None, report: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(report, indent=1, ensure_ascii=False))


def _print_share(name: str, result: dict[str, Any]) -> None:
    low, high = result["interval"]
    print(f"{name:32} {result['share']:7.1%}  {low:.1%} to {high:.1%}  n {result['n']}", flush=True)
