"""The 409 recorded pairs of the referee, through our official dialect. Needs no wheel."""

import json
import lzma
import re
from pathlib import Path

import pytest

from headrace.recipe import DEFAULT_TOKENS, Conversation, Encoding, ImageSource, Message, Tokenizer, ToolCall, ToolDefinition
from headrace.recipe.errors import RecipeError, ShapeError
from headrace.recipe.images import image_tokens
from headrace.recipe.protocol import OFFICIAL, ParsedRequest, chat, messages, responses
from headrace.recipe.render import template
from headrace.recipe.stream import ChatStream, MessagesStream, ResponsesStream, StreamParser, Usage

PARSERS = {"chat": chat.parse, "responses": responses.parse, "messages": messages.parse}
STAGES = {
    "ReasoningStart": "reasoning_start",
    "ReasoningContinuation": "reasoning_continuation",
    "ContentContinuation": "content_continuation",
    None: None,
}
STAGE_NAMES = {ours: theirs for theirs, ours in STAGES.items()}
REASONS = {"Stop": "stop", "Length": "length", "ContentFilter": "content_filter", None: "stop"}
COUNTS = {
    "render": 100,
    "convert_chat": 50,
    "convert_responses": 11,
    "convert_messages": 11,
    "stream_chat": 192,
    "stream_responses": 12,
    "stream_messages": 13,
    "encode": 4,
    "image_tokens": 16,
}


def load(data: Path, kind: str) -> list[dict]:
    with lzma.open(data / "vectors.jsonl.xz", "rt", encoding="utf-8") as lines:
        found = [vector for line in lines if (vector := json.loads(line))["kind"] == kind]
    assert len(found) == COUNTS[kind]
    return found


def conversation(spec: dict) -> Conversation:
    """A conversation written as data."""
    formats = {k: spec[k] for k in ("response_format", "response_schema", "response_regex") if spec.get(k) is not None}
    if "response_schema" in formats:
        formats["response_format"] = "json_schema"
    settings = {k: spec[k] for k in ("thinking_mode", "tool_choice", "reasoning_effort") if k in spec}
    return Conversation(
        [message(m) for m in spec["messages"]],
        tools=[ToolDefinition(**t) for t in spec.get("tools") or []],
        **settings,
        **formats,
    )


def message(m: dict) -> Message:
    calls, tools = m.get("tool_calls"), m.get("tools")
    return Message(
        m["role"],
        m["content"],
        m.get("reasoning_content"),
        calls and [ToolCall(**c) for c in calls] if calls else calls,
        m.get("tool_call_id"),
        [ImageSource("url", i["url"]) for i in m.get("images") or []],
        m.get("prefix") or False,
        None if tools is None else [ToolDefinition(**t) for t in tools],
    )


def test_renders(data):
    for vector in load(data, "render"):
        rendered = template(vector["input"]["encoding"], DEFAULT_TOKENS).render(conversation(vector["input"]["conversation"]))
        output = vector["output"]
        assert rendered.prompt == output["prompt"]
        assert [list(r) for r in rendered.special_ranges] == output["special_ranges"]
        assert [s.value for s in rendered.image_sources] == output["image_urls"]


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_conversions(data, protocol):
    for vector in load(data, f"convert_{protocol}"):
        body = json.dumps(vector["input"]["body"]).encode()
        assert converted(protocol, body) == vector["output"]


def converted(protocol: str, body: bytes) -> dict:
    try:
        parsed = PARSERS[protocol](body, OFFICIAL)
    except ShapeError as error:
        return {"error": {"exception": "ValueError", "message": error.message}}
    except RecipeError as error:
        return {"error": {"status_code": error.status, "body": error.body(protocol, "official").decode()}}
    rendered = template(parsed.version, DEFAULT_TOKENS).render(parsed.conversation)
    sampling, parsing, constraint = parsed.sampling, parsed.parsing, parsed.output_constraint
    return {
        "model_version": {"v4": "DeepseekV4Pro", "v41": "DeepseekV41Flash"}[parsed.version],
        "stream": parsed.stream,
        "prompt": rendered.prompt,
        "special_ranges": [list(r) for r in rendered.special_ranges],
        "image_sources": [source_object(s) for s in rendered.image_sources],
        "thinking_mode": parsed.conversation.thinking_mode,
        "reasoning_effort": parsed.conversation.reasoning_effort,
        "tool_choice": parsed.conversation.tool_choice,
        "response_format": parsed.conversation.response_format,
        "inference_options": {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": sampling.logprobs,
            "top_logprobs": sampling.top_logprobs,
            "seed": sampling.seed,
            "output_constraint": constraint and {"kind": constraint.kind, "schema": constraint.schema},
        },
        "parsing_options": {
            "parse_tool_calls": parsing.parse_tool_calls,
            "starts_in_tool_calls": parsing.starts_in_tool_calls,
            "parse_json_output": parsing.parse_json_output,
            "thinking_initial_stage": STAGE_NAMES[parsing.thinking_initial_stage],
            "stop_sequences": parsing.stop_sequences,
        },
    }


def source_object(source: ImageSource) -> dict:
    """An image source as the vectors write it."""
    return {
        "kind": source.kind,
        "url": source.value if source.kind == "url" else None,
        "data_url": source.value if source.kind == "data_url" else None,
        "detail": source.detail,
        "path": source.path,
    }


@pytest.mark.parametrize("protocol", ["chat", "responses", "messages"])
def test_streams(data, protocol):
    for vector in load(data, f"stream_{protocol}"):
        expected = [(e["event"], e["data"]) for step in vector["output"]["steps"] for e in step["events"]]
        events, reply = streamed(protocol, vector["input"])
        assert events == expected
        assert reply == vector["output"]["accumulated"]


def streamed(protocol: str, spec: dict) -> tuple[list, dict]:
    parsed = PARSERS[protocol](json.dumps(spec["request"]), OFFICIAL)
    for name, value in spec["parsing_overrides"].items():
        setattr(parsed.parsing, name, STAGES[value] if name == "thinking_initial_stage" else value)
    parser = StreamParser(parsed.parsing, call_id=lambda n: f"call_{n:02d}_RAND")
    stream = writer(protocol, parser, parsed, spec["response_id"])
    output = stream.first(Usage(*spec["prompt_usage"]))
    for text in spec["text_chunks"]:
        output += stream.push_text(text, 1)
        if parser.finished:
            break
    output += stream.finish(REASONS[spec["finish_reason"]], done=False)
    return frames(output), stream.accumulate()


def writer(protocol: str, parser: StreamParser, parsed: ParsedRequest, reply_id: str):
    if protocol == "chat":
        return ChatStream(parser, reply_id, parsed.model, 0, "official", parsed.include_usage)
    if protocol == "messages":
        return MessagesStream(parser, reply_id, parsed.model, 0, "official", thinking=parsed.thinking)
    return ResponsesStream(
        parser,
        reply_id,
        parsed.model,
        0,
        "official",
        echo=parsed.echo,
        namespaces=parsed.namespaces,
        custom_tools=parsed.custom_tools,
        clock=lambda: 0,
    )


def frames(output: bytes) -> list[tuple[str | None, dict]]:
    """Server-sent events as (name, data)."""
    result = []
    for block in output.decode().split("\n\n")[:-1]:
        fields = dict(re.split(": ", line, maxsplit=1) for line in block.split("\n"))
        result.append((fields.get("event"), json.loads(fields["data"])))
    return result


def test_encodes(data, tokenizer: Tokenizer):
    for vector in load(data, "encode"):
        encoding = Encoding(vector["input"]["encoding"], tokenizer)
        assert list(encoding.encode(conversation(vector["input"]["conversation"]))) == vector["output"]["ids"]


def test_image_tokens(data):
    for vector in load(data, "image_tokens"):
        size = vector["input"]
        assert image_tokens(size["width"], size["height"]) == vector["output"]["tokens"]
