"""Anthropic Messages requests."""

import base64
import binascii
import re
from typing import Annotated, Any, Literal

import msgspec

from ..conversation import Conversation, ImageSource, Message, ToolCall, ToolDefinition
from ..errors import RecipeError
from ..jsontext import compact, dumps
from . import common, demands
from .chat import Effort, OpenFields, apply_open, open_extras, read_open_fields
from .request import OPEN, ConversionOptions, ParsedRequest, Sampling
from .shape import F32, U32, U64, Check, Misfit, Tagged, naming, reader

_BILLING = "x-anthropic-billing-header:"


class Base64Source(msgspec.Struct):
    media_type: Literal["image/jpeg", "image/jpg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(msgspec.Struct):
    url: str


class FileSource(msgspec.Struct):
    file_id: str


class TextBlock(msgspec.Struct):
    text: str


class ImageBlock(msgspec.Struct):
    source: Annotated[
        Any, Tagged("MessagesImageSource", "type", {"base64": Base64Source, "url": UrlSource, "file": FileSource})
    ]


class DocumentSource(msgspec.Struct):
    shape_name = "MessagesDocumentSource"
    media_type: str | None = None


class DocumentBlock(msgspec.Struct):
    source: DocumentSource


class ThinkingBlock(msgspec.Struct):
    thinking: str
    signature: str | None = None


class ToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: Any


class ServerToolUseBlock(msgspec.Struct):
    id: str
    name: str
    input: Any


class SearchResultBlock(msgspec.Struct):
    tool_use_id: str
    content: Any


class ReferenceBlock(msgspec.Struct):
    tool_name: str


_read_result = reader(
    list[
        Annotated[
            Any,
            Tagged(
                "MessagesToolResultBlock",
                "type",
                {
                    "text": TextBlock,
                    "image": ImageBlock,
                    "document": DocumentBlock,
                    "tool_reference": ReferenceBlock,
                },
            ),
        ]
    ]
)


def _string_or(read: Any) -> Any:
    def check(value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            return read(value)
        raise Misfit("expected a string or a list")

    return Check(check)


class ToolResultBlock(msgspec.Struct):
    tool_use_id: str
    content: Annotated[Any, _string_or(_read_result)] | None = None
    is_error: bool | None = None


class AddedTool(msgspec.Struct):
    name: str


class ToolAdditionBlock(msgspec.Struct):
    tool: Annotated[Any, Tagged("MessagesToolReference", "type", {"tool_reference": AddedTool})]


_read_blocks = reader(
    list[
        Annotated[
            Any,
            Tagged(
                "MessagesContentBlock",
                "type",
                {
                    "text": TextBlock,
                    "image": ImageBlock,
                    "document": DocumentBlock,
                    "thinking": ThinkingBlock,
                    "server_tool_use": ServerToolUseBlock,
                    "tool_use": ToolUseBlock,
                    "tool_result": ToolResultBlock,
                    "web_search_tool_result": SearchResultBlock,
                    "tool_addition": ToolAdditionBlock,
                },
            ),
        ]
    ]
)
_read_system = reader(list[Annotated[Any, Tagged("MessagesSystemBlock", "type", {"text": TextBlock})]])


class RequestMessage(msgspec.Struct):
    shape_kind = "adjacently tagged enum"
    shape_name = "MessagesMessage"
    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, _string_or(_read_blocks)]


class ClientTool(msgspec.Struct):
    name: str
    description: str | None = None
    input_schema: Any = None
    defer_loading: bool | None = None


class ServerTool(msgspec.Struct):
    type: str
    name: str | None = None


_read_server_tool = reader(ServerTool)


def _tool(value: Any) -> Any:
    """A server tool when it has a type, a client tool otherwise."""
    if not isinstance(value, dict):
        raise Misfit("missing field `name`")
    if "type" in value:
        return _read_server_tool(value)
    if "name" not in value:
        raise Misfit("missing field `name`")
    found = {}
    for field, read in _TOOL_FIELDS.items():
        if field in value:
            try:
                found[field] = read(value[field])
            except Misfit as error:
                raise Misfit(f"field `{field}`: {error.reason}") from None
    return ClientTool(**found)


_TOOL_FIELDS = {
    "name": reader(str),
    "description": reader(str | None),
    "input_schema": reader(Any),
    "defer_loading": reader(bool | None),
}


class AutoChoice(msgspec.Struct):
    disable_parallel_tool_use: bool | None = None


class AnyChoice(AutoChoice):
    pass


class NoneChoice(msgspec.Struct):
    pass


class ToolChoice(msgspec.Struct):
    name: str
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    shape_name = "MessagesThinking"
    type: Literal["adaptive", "enabled", "disabled"]
    budget_tokens: U64 | None = None


class Metadata(msgspec.Struct):
    shape_name = "MessagesMetadata"
    user_id: str | None = None


class OutputConfig(msgspec.Struct):
    shape_name = "MessagesOutputConfig"
    effort: Effort | None = None


class MessagesRequest(msgspec.Struct):
    """A Messages request."""

    shape_name = "MessagesRequest"
    model: str
    messages: list[RequestMessage]
    max_tokens: U32 | None = None
    system: Annotated[Any, _string_or(_read_system)] | None = None
    tools: list[Annotated[Any, Check(_tool)]] | None = None
    tool_choice: (
        Annotated[
            Any,
            Tagged(
                "MessagesToolChoice",
                "type",
                {
                    "auto": AutoChoice,
                    "any": AnyChoice,
                    "tool": ToolChoice,
                    "none": NoneChoice,
                },
            ),
        ]
        | None
    ) = None
    temperature: F32 | None = None
    top_p: F32 | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None


_read = reader(MessagesRequest)
_read_open = naming(_read)


@common.dialectal
def parse(body: bytes | str | dict[str, Any], options: ConversionOptions = OPEN) -> ParsedRequest:
    """A request body as a conversation and its settings. Raises RecipeError."""
    value = common.parse_body(body)
    if options.dialect == "official":
        return _convert(_read(value), options, None)
    demands.check_served(value, 1, demands.MESSAGES_NOT_SERVED)
    request = _read_open(_client_tools(value))
    parsed = _convert(request, options, read_open_fields(value))
    _bind_tools(parsed, value, request.tool_choice)
    demands.apply(parsed, demands.messages_format(value) or demands.structured(value))
    parsed.sampling.logit_bias = demands.logit_bias(value)
    return parsed


def _bind_tools(parsed: ParsedRequest, body: dict[str, Any], choice: Any) -> None:
    """What the open dialect takes at its word: strict tools, one call at most, and a call that must come (without thinking)."""
    conversation = parsed.conversation
    strict = {tool.get("name") for tool in body.get("tools") or () if isinstance(tool, dict) and tool.get("strict") is True}
    conversation.tools = [
        msgspec.structs.replace(tool, strict=True, enforced=tool.parameters) if tool.name in strict else tool
        for tool in conversation.tools
    ]
    if isinstance(choice, AnyChoice) and conversation.tools and not conversation.thinking_mode:
        conversation.tool_choice = "required"
        parsed.parsing.starts_in_tool_calls = True
    parsed.parallel_tool_calls = not getattr(choice, "disable_parallel_tool_use", False)
    parsed.output_constraint = common.output_constraint(conversation, None)


def _client_tools(value: Any) -> Any:
    """The body without the type `custom` (or null) of tools, which says that they are the client's own."""
    tools = value.get("tools") if isinstance(value, dict) else None
    if not isinstance(tools, list):
        return value
    own = [isinstance(tool, dict) and tool.get("type", "") in (None, "custom") for tool in tools]
    return value | {"tools": [{k: v for k, v in t.items() if k != "type"} if o else t for t, o in zip(tools, own, strict=True)]}


def _convert(request: MessagesRequest, options: ConversionOptions, fields: OpenFields | None) -> ParsedRequest:
    version = common.model_version(request.model, options)
    effort = None if request.output_config is None else request.output_config.effort
    kind = None if request.thinking is None else request.thinking.type
    thinking, effort = common.thinking_mode(kind, effort, options.default_thinking_mode)
    conversation = Conversation(thinking_mode=thinking, reasoning_effort=effort)
    tools, dropped = _declared_tools(request, options, version)
    if not request.messages:
        raise RecipeError("messages: at least one message is required")
    messages = _Reader(version, options, tools).read(request.messages)
    absent = common.fill_reasoning(messages, thinking, options, "content[].thinking", bool(tools))
    _set_tools(conversation, request, tools, dropped)
    messages = _shown_additions(messages, {tool.name for tool in conversation.tools})
    system = _system(request.system)
    conversation.messages = messages if system is None else [Message("system", system), *messages]
    stops = request.stop_sequences or []
    sampling = _sampling(request, thinking, stops, options, fields)
    common.resolve_sampling(sampling, version, thinking, conversation.tools_active, options)
    return ParsedRequest(
        protocol="messages",
        model=request.model,
        version=version,
        conversation=conversation,
        sampling=sampling,
        parsing=common.parsing_options(conversation, stops, options),
        stream=bool(request.stream),
        include_usage=True,
        output_constraint=common.output_constraint(conversation, None),
        extras=open_extras(fields),
        reasoning_absent=common.positions(conversation.messages, absent),
    )


def _system(system: Any) -> str | None:
    if system is None or isinstance(system, str):
        return system
    return "\n\n".join(block.text for block in system if not block.text.startswith(_BILLING))


def _declared_tools(
    request: MessagesRequest, options: ConversionOptions, version: str
) -> tuple[list[ToolDefinition], set[str | None]]:
    """The client tools as declared, and the names of server tools that are dropped."""
    dropped: set[str | None] = set()
    tools: list[ToolDefinition] = []
    for index, tool in enumerate(request.tools or ()):
        if isinstance(tool, ServerTool):
            if options.messages_web_search == "reject" or not tool.type.startswith("web_search"):
                more = f"its type is {tool.type!r}; a tool of the client's own has none, or `custom`"
                raise RecipeError(f"tools[{index}]: server tools are not supported", more=more)
            dropped.add(tool.name)
            continue
        common.check_tool_name(tool.name, f"tools[{index}].name")
        # V4 cannot load a schema later, so it sees all from the start.
        deferred = bool(tool.defer_loading) and version != "v4"
        tools.append(ToolDefinition(tool.name, tool.description, tool.input_schema, None, deferred))
    if tools and all(tool.defer_loading for tool in tools):
        raise RecipeError("tools: at least one tool must have defer_loading=false. All tools cannot be deferred.")
    return tools, dropped


def _set_tools(
    conversation: Conversation, request: MessagesRequest, tools: list[ToolDefinition], dropped: set[str | None]
) -> None:
    """Check the tools and apply the choice."""
    choice, named = request.tool_choice, None
    if isinstance(choice, NoneChoice):
        conversation.tool_choice = "none"
        return
    names: set[str] = set()
    for tool in tools:
        common.check_unique(tool.name, names)
        common.check_tool_schema(tool.name, tool.parameters)
    if isinstance(choice, ToolChoice) and choice.name not in dropped:
        named = choice.name
    conversation.tools, conversation.tool_choice = common.choose_tools(tools, "auto", named, conversation.thinking_mode)


def _shown_additions(messages: list[Message], names: set[str]) -> list[Message]:
    """Schemas that arrive in the middle, those that the tool choice left; a message of nothing else goes with them."""
    result = []
    for message in messages:
        if message.tools is not None:
            message.tools = [tool for tool in message.tools if tool.name in names] or None
            if message.tools is None and not message.content:
                continue
        result.append(message)
    return result


def _join(texts: list[str]) -> str:
    """Texts with blank lines between, none before the first that is not empty."""
    result = ""
    for text in texts:
        result = f"{result}\n\n{text}" if result else text
    return result


class _Reader:
    """Reads the messages in order, with the calls that still wait for their results."""

    def __init__(self, version: str, options: ConversionOptions, tools: list[ToolDefinition]):
        self.version = version
        self.token = options.special_tokens.image
        self.drops_search = options.messages_web_search == "drop"
        self.tools = {tool.name: tool for tool in tools}
        self.waiting: list[str] = []
        self.known: set[str] = set()  # calls of the last assistant turn
        self.messages: list[Message] = []

    def read(self, source: list[RequestMessage]) -> list[Message]:
        """The conversation's messages."""
        asked = -1
        for index, item in enumerate(source):
            if isinstance(item.content, list) and not item.content and item.role != "system":
                raise RecipeError(f"messages.{index}: all messages must have non-empty content")
            self._check_roles(index, item)
            blocks = [TextBlock(item.content)] if isinstance(item.content, str) else item.content
            if item.role == "assistant":
                self._no_waiting(index)
                self._assistant(index, blocks)
                if self.waiting:
                    asked = index
            elif item.role == "system":
                self._no_waiting(index)
                self._system(index, blocks)
            else:
                self._user(index, blocks)
                if self.waiting:
                    raise RecipeError(_without_results(f"messages.{asked}:", self.waiting))
        if self.waiting:
            raise RecipeError(_without_results(f"messages.{asked}:", self.waiting))
        return self.messages

    def _check_roles(self, index: int, item: RequestMessage) -> None:
        if isinstance(item.content, str):
            return
        for block in item.content:
            if item.role != "assistant":
                if isinstance(block, ThinkingBlock):
                    raise RecipeError(f"messages.{index}.content: thinking blocks may only be in `assistant` messages")
                if isinstance(block, ToolUseBlock | ServerToolUseBlock | SearchResultBlock):
                    raise RecipeError(f"messages.{index}: `tool_use` blocks can only be in `assistant` messages")
            if item.role != "user" and isinstance(block, ToolResultBlock):
                raise RecipeError(f"messages.{index}: `tool_result` blocks can only be in `user` messages")
            if item.role != "system" and isinstance(block, ToolAdditionBlock):
                raise RecipeError(f"messages.{index}: `tool_addition` blocks can only be in `system` messages")

    def _no_waiting(self, index: int) -> None:
        if self.waiting:
            raise RecipeError(_without_results(f"messages.{index}: ", self.waiting))

    def _assistant(self, index: int, blocks: list[Any]) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        for position, block in enumerate(blocks):
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            elif isinstance(block, DocumentBlock):
                texts.append(_document(block))
            elif isinstance(block, ImageBlock):
                if self.version != "v4":
                    _image(block, f"messages.{index}.content[{position}]", "")  # a broken image is told first
                    raise RecipeError("Image in assistant message is unsupported", more=f"messages.{index}.content.{position}")
                texts.append(common.UNSUPPORTED_IMAGE)
            elif isinstance(block, ToolUseBlock):
                if any(call.id == block.id for call in calls):
                    raise RecipeError(f"messages.{index}.content.{position}: `tool_use` ids must be unique")
                calls.append(ToolCall(block.id, block.name, dumps(block.input, padded_exponents=False)))
            elif not self.drops_search:
                words = "Unsupported content block: server tools are not supported"
                raise RecipeError(words, more=f"messages.{index}.content.{position}")
        self.waiting = [call.id for call in calls]
        self.known = set(self.waiting)
        reasoning = "\n\n".join(thoughts) if thoughts else None
        self.messages.append(Message("assistant", _join(texts), reasoning, calls or None))

    def _system(self, index: int, blocks: list[Any]) -> None:
        content = common.Content(self.token)
        added: list[ToolDefinition] = []
        for position, block in enumerate(blocks):
            if isinstance(block, ToolAdditionBlock):
                tool = self.tools.get(block.tool.name)
                if tool is not None:
                    added.append(tool)
                else:
                    raise RecipeError(
                        f"messages.{index}.content.{position}: `tool_addition` references unknown tool '{block.tool.name}'"
                    )
            else:
                self._part(content, block, f"messages.{index}.content[{position}]", f"messages.{index}")
        message = content.fill(Message("system", tools=added or None))
        if self.version != "v4":
            self.messages.append(message)
        elif message.content:
            reminder = f"<system-reminder>\n{message.content}\n</system-reminder>"
            self.messages.append(Message("user", reminder))

    def _user(self, index: int, blocks: list[Any]) -> None:
        added: list[ToolDefinition] = []
        seen: set[str] = set()
        for position, block in enumerate(blocks):
            if isinstance(block, ToolResultBlock):
                self._result(index, position, block, seen, added)
                continue
            self._no_waiting(index)
            content = common.Content(self.token)
            place = f"messages.{index}.content[{position}]"
            self._part(content, block, place, place)
            self.messages.append(content.fill(Message("user")))
        self.known = set()
        if added and self.version != "v4":
            self.messages.append(Message("system", tools=added))

    def _result(self, index: int, position: int, block: ToolResultBlock, seen: set[str], added: list[ToolDefinition]) -> None:
        place = f"messages.{index}.content.{position}"
        tool_id = block.tool_use_id
        if tool_id in seen:
            raise RecipeError(
                f"{place}: each tool_use must have a single result. Found multiple `tool_result` blocks with id: {tool_id}"
            )
        if tool_id not in self.known:
            raise RecipeError(
                f"unexpected `{place}: tool_use_id` found in `tool_result` blocks: {tool_id}. "
                "Each `tool_result` block must have a corresponding `tool_use` block in the previous message."
            )
        seen.add(tool_id)
        self.waiting.remove(tool_id)
        content = common.Content(self.token)
        parts = [TextBlock(block.content)] if isinstance(block.content, str) else block.content or []
        for number, part in enumerate(parts):
            if isinstance(part, ReferenceBlock):
                tool = self.tools.get(part.tool_name)
                if tool is not None:
                    added.append(tool)
                else:
                    raise RecipeError(f"{place}: tool reference '{part.tool_name}' not found in available tools")
                content.text(part.tool_name)
            else:
                self._part(content, part, f"{place}.tool_result.content[{number}]", f"{place}.tool_result")
        self.messages.append(content.fill(Message("tool", tool_call_id=tool_id)))

    def _part(self, content: common.Content, block: Any, place: str, path: str) -> None:
        """Add a text, document or image; `place` names it in errors, `path` in its source."""
        if isinstance(block, TextBlock):
            content.text(block.text)
        elif isinstance(block, DocumentBlock):
            content.text(_document(block))
        elif self.version == "v4":
            content.text(common.UNSUPPORTED_IMAGE)
        else:
            content.image(_image(block, place, path))


def _document(block: DocumentBlock) -> str:
    media_type = block.source.media_type
    return f"[Unsupported document type: {'unknown' if media_type is None else media_type}]"


def _image(block: ImageBlock, place: str, path: str) -> ImageSource:
    source = block.source
    if isinstance(source, FileSource):
        raise RecipeError(f"{place}: file_id is not supported. Pass the image as a base64 data url instead.")
    if isinstance(source, UrlSource):
        if not source.url.lower().startswith(("http://", "https://")):
            raise RecipeError(f"{place}: invalid url: {compact(source.url)}")
        return ImageSource("url", source.url, "high", path, _json_place(place))
    if not _is_base64(source.data):
        raise RecipeError(f"{place}: base64 decode error")
    media_type = "image/jpeg" if source.media_type == "image/jpg" else source.media_type
    return ImageSource("data_url", f"data:{media_type};base64,{source.data}", "high", path, _json_place(place))


def _json_place(place: str) -> str:
    """`messages.2.content.0.tool_result.content[1]`, as the referee names it -> `messages[2].content[0].content[1].source`."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", place).replace(".tool_result", "") + ".source"


def _is_base64(data: str) -> bool:
    """Whether `data` is canonical base64 with its padding."""
    try:
        decoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return False
    return base64.b64encode(decoded).decode() == data


def _without_results(place: str, waiting: list[str]) -> str:
    return (
        f"{place}`tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(sorted(waiting))}. "
        "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )


def _sampling(
    request: MessagesRequest, thinking: bool, stops: list[str], options: ConversionOptions, fields: OpenFields | None
) -> Sampling:
    common.check_stops(stops, "stop")
    common.in_range("temperature", request.temperature, 0, 2, "[0, 2]")
    common.in_range("top_p", request.top_p, 0, 1, "(0, 1.0]", open_low=True)
    bound = options.max_tokens_bound(thinking)
    if request.max_tokens == 0:
        raise RecipeError(f"Invalid max_tokens value, the valid range of max_tokens is [1, {bound}]", more="got 0")
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=None if request.max_tokens is None else min(request.max_tokens, bound),
        stop=stops,
    )
    if fields is not None:
        apply_open(sampling, fields)
    return sampling
