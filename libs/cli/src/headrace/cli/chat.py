"""`headrace chat`: one question to a running system, its answer as it comes.

Speaks plain OpenAI chat completions, so it works with any server of that protocol (--url).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop

from headrace.cli import state
from headrace.cli.console import DIM, Console, paint
from headrace.cli.errors import CommandError
from headrace.cli.program import program, say

EPILOG = """\
Reasoning is shown dimmed on a terminal and left out elsewhere. The last line, on stderr, begins with the
request id for `{program} trace`.
"""
PICTURES = {  # how files begin that servers take, by the type that their URL names
    "image/png": re.compile(rb"\x89PNG"),
    "image/jpeg": re.compile(rb"\xff\xd8\xff"),
    "image/gif": re.compile(rb"GIF8"),
    "image/webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
}
SILENCE = 120.0  # seconds without a byte after which the server is given up


@dataclass
class Answer:
    """What a streamed completion amounted to."""

    request_id: str = ""
    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    usage: dict = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("message", nargs="?", default="-", help="what to ask (default, and -: read it from stdin)")
    parser.add_argument("--system", help="a system message before it")
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="FILE",
        help="show it a picture (PNG, JPEG, GIF, WebP or a URL); repeatable",
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="default: 256")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 always takes the likeliest token (default: the server's)"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    parser.add_argument("--thinking", action="store_true", help="let the model reason first")
    parser.add_argument("--url", help=say("another server (default: the one that `{program} up` started here)"))
    state.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    if args.message == "-" and sys.stdin.isatty():
        raise CommandError(say('what shall be asked? For example: {program} chat "Why is the sky blue?"'))
    url = args.url or state.running_soon(args.state_dir, Console()).url
    text = sys.stdin.read() if args.message == "-" else args.message
    if not text.strip():
        raise CommandError("the message is empty: give it as an argument or on stdin")
    messages = [{"role": "system", "content": args.system}] if args.system else []
    pictures = [{"type": "image_url", "image_url": {"url": image_url(name)}} for name in args.image]
    content = [*pictures, {"type": "text", "text": text}] if pictures else text
    body = {"messages": [*messages, {"role": "user", "content": content}], "max_tokens": args.max_tokens}
    body |= {key: value for key in ("temperature", "seed") if (value := getattr(args, key)) is not None}
    body |= {"thinking": {"type": "enabled" if args.thinking else "disabled"}}
    answer = uvloop.run(_show(url, body))
    for line in without_content(answer, args.thinking, sys.stdout.isatty()):
        print(line, file=sys.stderr)
    print(f"[{answer.request_id}] {answer.finish_reason}; {tokens(answer.usage)}", file=sys.stderr)
    return 0


def image_url(name: str) -> str:
    """A URL as it is; a file as a data URL. Raises CommandError: it can't be read, or is no picture."""
    if name.startswith(("http://", "https://", "data:")):
        return name
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise CommandError(f"can't read the picture {name}: {error.strerror}") from None
    if not data:
        raise CommandError(f"the picture {name} is empty")
    kind = next((kind for kind, begins in PICTURES.items() if begins.match(data)), "")
    if not kind:
        raise CommandError(
            f"{name} is no picture that can be shown: it must be PNG, JPEG, GIF or WebP, and begins with {data[:8]!r}"
        )
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def without_content(answer: Answer, asked: bool, shown: bool) -> list[str]:
    """What to say of an answer that has no text. `asked`: for its reasoning; `shown`: that was shown already."""
    if answer.content:
        return []
    if not answer.reasoning:
        return ["(the answer is empty)"]
    room = "; a larger --max-tokens gives it room to answer" if answer.finish_reason == "length" else ""
    if not asked and not shown:
        return [f"(the model only thought, and said nothing; --thinking shows its thoughts{room})"]
    return [*([] if shown else [answer.reasoning]), f"(the model only thought, and said nothing{room})"]


def tokens(usage: dict) -> str:
    """'312 prompt tokens (256 cached), 24 new'."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return f"{usage.get('prompt_tokens', 0)} prompt tokens ({cached} cached), {usage.get('completion_tokens', 0)} new"


async def _show(url: str, body: dict) -> Answer:
    answer = Answer()
    dim = sys.stdout.isatty()
    async for kind, text in stream(url, body, answer):
        if kind == "content":
            print(text, end="", flush=True)
        elif dim:
            print(paint(text, DIM, sys.stdout), end="", flush=True)
    if answer.content or (dim and answer.reasoning):
        print()
    return answer


async def stream(url: str, body: dict, answer: Answer, headers: dict[str, str] | None = None) -> AsyncIterator[tuple[str, str]]:
    """Send a chat request; yields ("content" | "reasoning", text) as it comes and fills `answer`.

    Raises CommandError for an error object, an unreachable server, or SILENCE."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    headers = dict(headers or {})
    if key := os.environ.get("HEADRACE_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=SILENCE)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(f"{url.rstrip('/')}/v1/chat/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                raise CommandError(f"{url} answered {response.status}: {message_of(await response.text())}")
            async for event in events(response):
                for part in apply(event, answer):
                    yield part
    except TimeoutError:
        raise CommandError(f"{url} was silent for {SILENCE:.0f} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise CommandError(f"cannot talk to {url}: {error}; is it running? `{program()} doctor` tells") from None


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict]:
    """The JSON objects of a server-sent event stream, until [DONE]. Raises CommandError when it ends without."""
    async for raw in response.content:
        line = raw.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise CommandError("the stream ended without [DONE]: the gateway went away")


def apply(event: dict, answer: Answer) -> list[tuple[str, str]]:
    """Add one chunk to `answer`; returns what is new in it."""
    if "error" in event:
        raise CommandError(f"the request failed: {message_of(json.dumps(event))}")
    answer.request_id = event.get("id", answer.request_id)
    answer.usage = event.get("usage") or answer.usage
    new = []
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if text := delta.get("reasoning_content"):
            answer.reasoning += text
            new.append(("reasoning", text))
        if text := delta.get("content"):
            answer.content += text
            new.append(("content", text))
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    return new


def message_of(body: str) -> str:
    """The sentence inside an error object, or the beginning of whatever else came."""
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return body[:300]
