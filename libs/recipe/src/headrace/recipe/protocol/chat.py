"""OpenAI Chat Completions requests."""

from typing import Annotated, Any, Literal

import msgspec

from ..conversation import Conversation, Message, ToolCall, ToolDefinition
from ..errors import RecipeError
from . import common, demands
from .request import OPEN, ConversionOptions, ParsedRequest, Sampling
from .schema import closed
from .shape import F32, U8, U32, U64, Check, Misfit, Tagged, describe, misfit, naming, reader, text

Detail = Literal["low", "high", "original", "auto"]


class ImageUrl(msgspec.Struct):
    shape_name = "ChatCompletionImageUrl"
    url: str
    detail: Detail | None = None


class TextPart(msgspec.Struct):
    text: str


class ImagePart(msgspec.Struct):
    image_url: ImageUrl


class FilePart(msgspec.Struct):
    file_id: str | None = None
    file_data: str | None = None
    filename: str | None = None


Part = Annotated[
    Any,
    Tagged("ChatCompletionRequestContentBlock", "type", {"text": TextPart, "image_url": ImagePart, "file": FilePart}),
]
_parts = reader(list[Part])


def _content(value: Any) -> str | list[Any]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _parts(value)
    raise Misfit("content should be a string or a list")


Content = Annotated[Any, Check(_content)]


class FunctionCall(msgspec.Struct):
    shape_name = "ChatCompletionRequestFunctionCall"
    name: str
    arguments: str


class RequestToolCall(msgspec.Struct):
    shape_name = "ChatCompletionRequestToolCall"
    id: str
    type: Literal["function"]
    function: FunctionCall


class SystemMessage(msgspec.Struct):
    content: Content
    name: str | None = None


class UserMessage(msgspec.Struct):
    content: Content
    name: str | None = None


class AssistantMessage(msgspec.Struct):
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: list[RequestToolCall] | None = None
    prefix: bool | None = None


class OpenAssistantMessage(AssistantMessage):
    reasoning: str | None = None


class ToolMessage(msgspec.Struct):
    content: Content
    tool_call_id: str


class ReminderMessage(msgspec.Struct):
    content: str


_ROLES: dict[str, type] = {
    "system": SystemMessage,
    "user": UserMessage,
    "assistant": AssistantMessage,
    "tool": ToolMessage,
    "latest_reminder": ReminderMessage,
}
_OPEN_ROLES = _ROLES | {"assistant": OpenAssistantMessage, "developer": SystemMessage}


class FunctionDefinition(msgspec.Struct):
    shape_name = "ChatCompletionFunctionDefinition"
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    shape_name = "ChatCompletionTool"
    type: Literal["function"]
    function: FunctionDefinition


class ChoiceFunction(msgspec.Struct):
    shape_name = "ChatCompletionToolChoiceFunction"
    name: str


_choice_type, _choice_function = reader(Literal["function"]), reader(ChoiceFunction)


def _tool_choice(value: Any) -> str | ChoiceFunction:
    """ "none", "auto", "required" or a named function."""
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict) or "type" not in value:
        raise Misfit("expected one of `none`, `auto`, `required` or a tool")
    for field, read in (("type", _choice_type), ("function", _choice_function)):
        try:
            result = read(value.get(field))
        except Misfit as error:
            raise Misfit(f"field `{field}`: {error.reason}") from None
    return result


class TextFormat(msgspec.Struct):
    pass


class JsonObjectFormat(msgspec.Struct):
    pass


class JsonSchema(msgspec.Struct):
    shape_name = "ChatCompletionResponseFormatJsonSchema"
    schema: Any
    name: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct):
    json_schema: JsonSchema


class RegexFormat(msgspec.Struct):
    regex: str


ResponseFormat = Annotated[
    Any,
    Tagged(
        "ChatCompletionResponseFormat",
        "type",
        {
            "json_object": JsonObjectFormat,
            "json_schema": JsonSchemaFormat,
            "regex": RegexFormat,
            "text": TextFormat,
        },
    ),
]


class Thinking(msgspec.Struct):
    shape_name = "ChatCompletionThinking"
    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: U64 | None = None


class StreamOptions(msgspec.Struct):
    shape_name = "ChatCompletionStreamOptions"
    include_usage: bool | None = None


def _stop(value: Any) -> str | list[str]:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [text(item) for item in value]
    raise Misfit("expected a string or a list")


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"]
_MESSAGES = "ChatCompletionRequestMessage"


class ChatRequest(msgspec.Struct):
    """A Chat Completions request, the referee's fields."""

    shape_name = "ChatCompletionRequest"
    messages: list[Annotated[Any, Tagged(_MESSAGES, "role", _ROLES)]]
    model: str
    thinking: Thinking | None = None
    reasoning_effort: Effort | None = None
    frequency_penalty: F32 | None = None
    presence_penalty: F32 | None = None
    logprobs: bool | None = None
    top_logprobs: U8 | None = None
    max_tokens: U32 | None = None
    n: U8 | None = None
    seed: U64 | None = None
    stop: Annotated[Any, Check(_stop)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: F32 | None = None
    top_p: F32 | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[Any, Check(_tool_choice)] | None = None
    parallel_tool_calls: bool | None = None


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise misfit(value, "a number")
    return float(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 2**32:
        raise Misfit(f"invalid value: {describe(value)}, expected an integer from -1")
    return value


def _priority(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise Misfit(f"invalid value: {describe(value)}, expected an integer of 64 bits")
    return value


class OpenStreamOptions(StreamOptions):
    continuous_usage_stats: bool | None = None


class OpenFields(msgspec.Struct):
    """What serving clients send beyond the referee's fields; every text protocol of the open dialect takes these."""

    seed: U64 | None = None  # where the referee has it too, the same
    min_tokens: U32 | None = None
    stop_token_ids: Annotated[list[int], Check(demands.stop_token_ids)] | None = None
    ignore_eos: bool | None = None
    top_k: Annotated[int, Check(_whole)] | None = None
    min_p: Annotated[float, Check(_number)] | None = None
    repetition_penalty: Annotated[float, Check(_number)] | None = None
    cache_salt: str | None = None
    priority: Annotated[int, Check(_priority)] | None = None
    request_id: str | None = None
    rid: str | None = None
    session_id: str | None = None
    user: Any = None
    kv_transfer_params: Any = None
    return_token_ids: bool | None = None
    reasoning_alias: bool | None = None


class OpenChatRequest(ChatRequest, kw_only=True):
    """A Chat Completions request in the open dialect."""

    messages: list[Annotated[Any, Tagged(_MESSAGES, "role", _OPEN_ROLES)]]
    stream_options: OpenStreamOptions | None = None
    max_completion_tokens: U32 | None = None
    chat_template_kwargs: Any = None


_read_official = reader(ChatRequest)
_read_open = naming(reader(OpenChatRequest))
read_open_fields = naming(reader(OpenFields))
_EXTRAS = (
    "cache_salt",
    "priority",
    "request_id",
    "rid",
    "session_id",
    "user",
    "kv_transfer_params",
    "return_token_ids",
    "reasoning_alias",
)


@common.dialectal
def parse(body: bytes | str | dict[str, Any], options: ConversionOptions = OPEN) -> ParsedRequest:
    """A request body as a conversation and its settings. Raises RecipeError."""
    value = common.parse_body(body)
    if options.dialect == "official":
        return _convert(_read_official(value), options, None)
    request = _read_open(value)
    _apply_aliases(request)
    demands.check_served(value, request.n or 1)
    parsed = _convert(request, options, read_open_fields(value))
    demands.apply(parsed, demands.structured(value))
    parsed.sampling.logit_bias = demands.logit_bias(value)
    parsed.sampling.prompt_logprobs = demands.prompt_logprobs(value, request.stream)
    parsed.parallel_tool_calls = request.parallel_tool_calls is not False
    return parsed


def _apply_aliases(request: OpenChatRequest) -> None:
    """Other spellings that serving clients use for the same settings."""
    if request.max_completion_tokens is not None:
        request.max_tokens = request.max_completion_tokens
    kwargs = request.chat_template_kwargs
    if isinstance(kwargs, dict) and request.thinking is None:
        wish = kwargs.get("thinking", kwargs.get("enable_thinking"))
        if isinstance(wish, bool):
            request.thinking = Thinking("enabled" if wish else "disabled")


def _convert(request: ChatRequest, options: ConversionOptions, fields: OpenFields | None) -> ParsedRequest:
    version = common.model_version(request.model, options)
    kind = None if request.thinking is None else request.thinking.type
    thinking, effort = common.thinking_mode(kind, request.reasoning_effort, options.default_thinking_mode)
    conversation = Conversation(thinking_mode=thinking, reasoning_effort=effort)
    for index, tool in enumerate(request.tools or ()):
        common.check_tool_name(tool.function.name, f"tools[{index}].function.name")
    messages = _messages(request, version, options)
    absent = common.fill_reasoning(messages, thinking, options, "reasoning_content", bool(request.tools))
    conversation.messages = [m for m in messages if m.role != "system" or m.content]
    _check_prefix_place(conversation.messages)
    _check_json_word(request)
    _set_tools(conversation, request)
    _check_prefix_use(conversation.messages, request)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    common.check_stops(stops, "stop", single=isinstance(request.stop, str))
    if request.stream_options is not None and not request.stream:
        raise RecipeError("stream_options should be set along with stream = true", place="stream_options")
    schema = _set_format(conversation, request)
    common.check_strict(conversation, request.response_format is not None)
    sampling = _sampling(request, thinking, stops, options, fields)
    common.resolve_sampling(sampling, version, thinking, conversation.tools_active, options)
    extras = open_extras(fields)
    if getattr(request.stream_options, "continuous_usage_stats", None):
        extras["continuous_usage_stats"] = True
    return ParsedRequest(
        protocol="chat",
        model=request.model,
        version=version,
        conversation=conversation,
        sampling=sampling,
        parsing=common.parsing_options(conversation, stops, options),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        output_constraint=common.output_constraint(conversation, schema, _is_strict(request.response_format)),
        extras=extras,
        reasoning_absent=common.positions(conversation.messages, absent),
    )


def _set_tools(conversation: Conversation, request: ChatRequest) -> None:
    """Tools and choice. Tools that are never shown (choice "none") are not checked either."""
    choice = request.tool_choice
    tools: list[ToolDefinition] = []
    names: set[str] = set()
    for tool in request.tools or ():
        function = tool.function
        parameters = function.parameters
        if choice != "none":
            common.check_unique(function.name, names)
            parameters = common.tool_parameters(function.name, parameters, function.strict)
        enforced = closed(function.parameters) if function.strict else None
        tools.append(ToolDefinition(function.name, function.description, parameters, function.strict, enforced=enforced))
    named = choice.name if isinstance(choice, ChoiceFunction) else None
    conversation.tools, conversation.tool_choice = common.choose_tools(
        tools, None if named else choice, named, conversation.thinking_mode
    )


def _messages(request: ChatRequest, version: str, options: ConversionOptions) -> list[Message]:
    source = request.messages
    if not source:
        raise RecipeError("Empty input messages", place="messages")
    messages: list[Message] = []
    index = 0
    while index < len(source):
        item = source[index]
        if isinstance(item, ToolMessage):
            words = "Messages with role 'tool' must be a response to a preceding message with 'tool_calls'"
            place = f"messages[{index}]"
            raise RecipeError(words, more=f"{place}, for tool_call_id {item.tool_call_id!r}", place=place)
        messages.append(_message(item, index, version, options))
        index += 1
        calls = item.tool_calls if isinstance(item, AssistantMessage) else None
        if calls:
            messages += _results(calls, source, index, version, options)
            index += len(calls)
    return messages


def _results(
    calls: list[RequestToolCall], source: list[Any], start: int, version: str, options: ConversionOptions
) -> list[Message]:
    """The results that follow `calls` directly: one for each, in any order."""
    wanted: set[str] = set()
    for call in calls:
        if call.id in wanted:
            place = f"messages[{start - 1}].tool_calls"
            raise RecipeError(f"Duplicate value for 'tool_call_id' of {call.id} in message[{start - 1}]", place=place)
        wanted.add(call.id)
    answered: set[str] = set()
    required = "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'"
    results = []
    for position in range(start, start + len(calls)):
        item = source[position] if position < len(source) else None
        if not isinstance(item, ToolMessage):
            missing = ", ".join(call.id for call in calls if call.id not in answered)
            words, place = f"{required}. (insufficient tool messages following tool_calls message)", f"messages[{start - 1}]"
            raise RecipeError(words, more=f"{place}; no result of {missing}", place=place)
        place = f"messages[{position}].tool_call_id"
        if item.tool_call_id in answered:
            raise RecipeError(f"Duplicate value for 'tool_call_id' of {item.tool_call_id} in message[{position}]", place=place)
        if item.tool_call_id not in wanted:
            words = f"{required}, The following tool_call_ids did not have response messages: {item.tool_call_id}"
            more = f"{place}; messages[{start - 1}] calls {', '.join(sorted(wanted))}"
            raise RecipeError(words, more=more, place=place)
        answered.add(item.tool_call_id)
        results.append(_message(item, position, version, options))
    return results


def _check_prefix_place(messages: list[Message]) -> None:
    """Only the last message may be a prefix."""
    if any(message.prefix for message in messages[:-1]):
        raise RecipeError(
            "Invalid completion message: prefix set true with message which is not final message or "
            "message role is not assistant",
            place="messages",
        )


def _check_prefix_use(messages: list[Message], request: ChatRequest) -> None:
    """A prefix goes neither with tools nor with JSON output."""
    if not (messages and messages[-1].prefix):
        return
    if isinstance(request.response_format, JsonObjectFormat):
        raise RecipeError("response_format json_object should not be used with prefix", place="response_format")
    if request.tools or any(getattr(item, "tool_calls", None) for item in request.messages):
        more = "leave out tools and tool_calls, or the last message's prefix"
        raise RecipeError("Function call should not be used with prefix", more=more, place="tools")


def _check_json_word(request: ChatRequest) -> None:
    """JSON output needs the word in the prompt, or the model may never stop."""
    if not isinstance(request.response_format, JsonObjectFormat):
        return
    if not any("json" in part.lower() for item in request.messages for part in _texts(item.content)):
        words = "Prompt must contain the word 'json' in some form to use 'response_format' of type 'json_object'."
        raise RecipeError(words, place="messages")


def _texts(content: str | list[Any] | None) -> list[str]:
    if isinstance(content, list):
        return [part.text for part in content if isinstance(part, TextPart)]
    return [] if content is None else [content]


def _message(item: Any, index: int, version: str, options: ConversionOptions) -> Message:
    path = f".messages[{index}]"
    token = options.special_tokens.image
    if isinstance(item, ReminderMessage):
        return Message("latest_reminder", item.content)
    if isinstance(item, AssistantMessage):
        return _assistant(item, index, version, path, token)
    content = _gather(item.content, version, path, token)
    if isinstance(item, ToolMessage):
        return content.fill(Message("tool", tool_call_id=item.tool_call_id))
    return content.fill(Message("system" if isinstance(item, SystemMessage) else "user"))


def _assistant(item: AssistantMessage, index: int, version: str, path: str, token: str) -> Message:
    calls = item.tool_calls
    if calls is not None and not calls:
        raise RecipeError(
            f"Invalid 'messages[{index}].tool_calls': empty array. "
            "Expected an array with minimum length 1, but got an empty array instead.",
            place=f"messages[{index}].tool_calls",
        )
    if item.content is None and calls is None:
        place = f"messages[{index}]"
        raise RecipeError("Invalid assistant message: content or tool_calls must be set", more=place, place=place)
    reasoning = item.reasoning_content
    if reasoning is None:
        reasoning = getattr(item, "reasoning", None)
    message = Message(
        "assistant",
        reasoning_content=reasoning,
        tool_calls=None if calls is None else [ToolCall(c.id, c.function.name, c.function.arguments) for c in calls],
        prefix=bool(item.prefix),
    )
    content = _gather(item.content or "", version, path, token, refuse_images=True)
    return content.fill(message)


def _gather(source: str | list[Any], version: str, path: str, token: str, refuse_images: bool = False) -> common.Content:
    content = common.Content(token, path)
    if isinstance(source, str):
        content.text(source)
        return content
    if version != "v4":
        for number, part in enumerate(source):
            if isinstance(part, FilePart):
                _check_file(part, path, f"{path[1:]}.content[{number}]")
        if refuse_images and any(not isinstance(part, TextPart) for part in source):
            raise RecipeError("Image in assistant message is not supported", more=path[1:], place=path[1:])
    for number, part in enumerate(source):
        place = f"{path[1:]}.content[{number}]"
        if isinstance(part, TextPart):
            content.text(part.text)
        elif version == "v4":
            content.text(common.UNSUPPORTED_IMAGE)  # V4 models cannot see: the image is not even looked at
        elif isinstance(part, ImagePart):
            content.image(common.image_source(part.image_url.url, part.image_url.detail, path, place=f"{place}.image_url"))
        else:
            content.image(common.image_source(part.file_data, None, path, place=f"{place}.file_data"))
    return content


def _check_file(part: FilePart, path: str, place: str) -> None:
    """`path`: of the message, as the referee names it; `place`: of the part."""
    named, more = part.file_id is not None, ""
    if not named and part.file_data is None:
        words = "file must have a file_id or file_data"
    elif named and part.file_data is not None:
        words = "file cannot have both file_id and file_data"
    elif named and part.filename is not None:
        words = "file cannot have filename when file_id is present"
    elif named:
        words = "file_id is not supported. Pass the image as a base64 data url instead."
    elif not part.file_data.startswith("data:image/"):
        words = "file_data is not a valid base64 data url"
        more = f" (it begins with {part.file_data[:40]!r}, not with 'data:image/')"
    else:
        return
    raise RecipeError(f"{path}: {words}", instead=f"{place}: {words}{more}", place=place)


def _is_strict(form: Any) -> bool:
    return isinstance(form, JsonSchemaFormat) and bool(form.json_schema.strict)


def _set_format(conversation: Conversation, request: ChatRequest) -> Any:
    """The response format; returns the schema that the constraint uses."""
    form = request.response_format
    if isinstance(form, JsonObjectFormat):
        conversation.response_format = "json_object"
    elif isinstance(form, JsonSchemaFormat):
        schema = common.schema_format(form.json_schema.schema, form.json_schema.strict, "response_format.json_schema.schema")
        if form.json_schema.strict:
            common.close_strict(schema, tool=False, whose="response_format.json_schema, which is strict")
        conversation.response_format, conversation.response_schema = "json_schema", form.json_schema.schema
        return schema
    elif isinstance(form, RegexFormat):
        conversation.response_format, conversation.response_regex = "regex", form.regex
    return None


def _sampling(
    request: ChatRequest, thinking: bool, stops: list[str], options: ConversionOptions, fields: OpenFields | None
) -> Sampling:
    n = 1 if request.n is None else request.n
    if fields is None and n != 1:
        raise RecipeError("Invalid n value (currently only n = 1 is supported)")
    if not 1 <= n <= 128:
        raise RecipeError(f"Invalid n value {n}, the valid range of n is [1, 128]", param="n")
    common.in_range("presence_penalty", request.presence_penalty, -2, 2, "[-2, 2]")
    common.in_range("frequency_penalty", request.frequency_penalty, -2, 2, "[-2, 2]")
    common.in_range("temperature", request.temperature, 0, 2, "[0, 2]")
    common.in_range("top_p", request.top_p, 0, 1, "(0, 1.0]", open_low=True)
    if request.top_logprobs is not None:
        if not request.logprobs:
            words = "Invalid top_logprobs and logprobs value, logprobs must be set to true if top_logprobs is used."
            raise RecipeError(words, place="top_logprobs")
        common.in_range("top_logprobs", request.top_logprobs, 0, 20, "[0, 20].")
    bound = options.max_tokens_bound(thinking)
    common.in_range("max_tokens", request.max_tokens, 1, bound, f"[1, {bound}]")
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=checked_seed(request.seed),
        max_tokens=request.max_tokens,
        stop=stops,
        logprobs=bool(request.logprobs),
        top_logprobs=request.top_logprobs,
        n=n,
    )
    if fields is not None:
        apply_open(sampling, fields)
    return sampling


def open_extras(fields: OpenFields | None) -> dict[str, Any]:
    """The fields that the gateway may act on, those that were sent."""
    if fields is None:
        return {}
    return {name: value for name in _EXTRAS if (value := getattr(fields, name)) is not None}


def checked_seed(seed: int | None) -> int | None:
    common.in_range("seed", seed, 0, 2**63 - 1, "[0, 2^63)")
    return seed


def apply_open(sampling: Sampling, fields: OpenFields) -> None:
    """Settings of the open dialect, checked."""
    common.in_range("min_p", fields.min_p, 0, 1, "[0, 1]")
    common.in_range("repetition_penalty", fields.repetition_penalty, 0, 2, "(0, 2]", open_low=True)
    if fields.min_tokens is not None and sampling.max_tokens is not None and fields.min_tokens > sampling.max_tokens:
        raise RecipeError(
            f"min_tokens ({fields.min_tokens}) must not exceed max_tokens ({sampling.max_tokens})", param="min_tokens"
        )
    sampling.seed = checked_seed(fields.seed)
    sampling.min_tokens = fields.min_tokens
    sampling.stop_token_ids = fields.stop_token_ids or []
    sampling.ignore_eos = bool(fields.ignore_eos)
    sampling.top_k = None if fields.top_k in (None, 0, -1) else fields.top_k
    sampling.min_p = fields.min_p
    sampling.repetition_penalty = fields.repetition_penalty
