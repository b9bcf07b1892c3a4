"""OpenAI Responses requests."""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec

from ..conversation import Conversation, Message, ToolCall, ToolDefinition
from ..errors import RecipeError
from ..jsontext import compact, loads
from ..render import PROMPTS
from ..stream.reply import float32
from . import common, demands
from .chat import Detail, Effort, OpenFields, apply_open, open_extras, read_open_fields
from .request import OPEN, ConversionOptions, ParsedRequest, Sampling
from .schema import closed
from .shape import F32, U8, U32, Check, Misfit, Tagged, misfit, naming, reader, sequence

APPLY_PATCH = "apply_patch"
TOOL_SEARCH = "tool_search"
_DOCUMENT = "[Unsupported Document]"
_WEB_SEARCH = ("web_search", "web_search_2025_08_26")
_EXTRAS = ("previous_response_id", "store", "background", "metadata", "include", "truncation", "prompt_cache_key")


class TextPart(msgspec.Struct):
    text: str


class ImagePart(msgspec.Struct):
    image_url: str | None = None
    detail: Detail | None = None
    file_id: str | None = None


class FilePart(msgspec.Struct):
    pass


_read_content = reader(
    list[
        Annotated[
            Any,
            Tagged(
                "ResponsesContentBlock",
                "type",
                {
                    "input_text": TextPart,
                    "output_text": TextPart,
                    "input_image": ImagePart,
                    "input_file": FilePart,
                },
            ),
        ]
    ]
)
_read_output = reader(
    list[
        Annotated[
            Any,
            Tagged(
                "ResponsesToolCallOutputItem",
                "type",
                {
                    "input_text": TextPart,
                    "input_image": ImagePart,
                    "input_file": FilePart,
                },
            ),
        ]
    ]
)


def _content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _read_content(value)
    raise Misfit("content should be a string or a list of content blocks")


def _output(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _read_output(value)
    raise Misfit("output should be a string or a list of output content parts")


class InputMessage(msgspec.Struct):
    shape_name = "ResponsesInputMessage"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Any, Check(_content)]


class FunctionCall(msgspec.Struct):
    shape_name = "ResponsesFunctionCall"
    arguments: str
    call_id: str
    name: str
    namespace: str | None = None


class FunctionCallOutput(msgspec.Struct):
    shape_name = "ResponsesFunctionCallOutput"
    output: Annotated[Any, Check(_output)]
    call_id: str | None = None


class ReasoningText(msgspec.Struct):
    shape_name = "ResponsesReasoningContent"
    text: str


class Reasoning(msgspec.Struct):
    shape_name = "ResponsesReasoningItem"
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


class CustomToolCall(msgspec.Struct):
    shape_name = "ResponsesCustomToolCall"
    call_id: str
    input: str
    name: str


class CustomToolCallOutput(msgspec.Struct):
    shape_name = "ResponsesCustomToolCallOutput"
    call_id: str
    output: Annotated[Any, Check(_output)] | None = None


class FunctionTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None


class CustomTool(msgspec.Struct):
    name: str


class NamespaceTool(msgspec.Struct):
    name: str
    tools: list[Annotated[Any, Tagged("ResponsesNamespaceTool", "type", {"function": FunctionTool, "custom": CustomTool})]]
    description: str | None = None


class UserLocation(msgspec.Struct):
    shape_name = "ResponsesUserLocation"
    city: str | None = None
    country: str | None = None
    region: str | None = None
    timezone: str | None = None


class WebSearch(msgspec.Struct):
    search_context_size: Literal["low", "medium", "high"] | None = None
    user_location: UserLocation | None = None


class DatedWebSearch(WebSearch):
    pass


class ToolSearch(msgspec.Struct):
    execution: Literal["client", "server"] | None = None
    description: str | None = None
    parameters: Any = None


class OtherTool(msgspec.Struct):
    pass


Tool = Annotated[
    Any,
    Tagged(
        "ResponsesTool",
        "type",
        {
            "function": FunctionTool,
            "custom": CustomTool,
            "namespace": NamespaceTool,
            "web_search": WebSearch,
            "web_search_2025_08_26": DatedWebSearch,
            "tool_search": ToolSearch,
        },
        other=OtherTool,
    ),
]


class OtherItem(msgspec.Struct):
    """An item of a kind that prompts have no place for."""

    type: str = ""


def _map(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise misfit(value, "a map")
    return value


class ToolSearchCall(msgspec.Struct):
    shape_name = "ResponsesToolSearchCall"
    call_id: str
    arguments: Annotated[dict, Check(_map)]
    execution: Literal["client", "server"] | None = None


class ToolSearchOutput(msgspec.Struct):
    shape_name = "ResponsesToolSearchOutput"
    call_id: str
    tools: list[Tool]
    execution: Literal["client", "server"] | None = None


_ITEMS: dict[str, type] = {
    "message": InputMessage,
    "function_call": FunctionCall,
    "function_call_output": FunctionCallOutput,
    "reasoning": Reasoning,
    "custom_tool_call": CustomToolCall,
    "custom_tool_call_output": CustomToolCallOutput,
    "tool_search_call": ToolSearchCall,
    "tool_search_output": ToolSearchOutput,
}
_read_items = {kind: reader(cls) for kind, cls in _ITEMS.items()}


def _input(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _read_list(value)
    raise Misfit("input should be a string or a list of input items")


def _item(value: Any) -> Any:
    if not isinstance(value, dict):
        raise Misfit("invalid input item")
    if "type" not in value:
        if "role" not in value:
            raise Misfit("invalid input item")
        return _read_items["message"](value)
    kind = value["type"]
    if not isinstance(kind, str):
        raise misfit(kind, "variant identifier")
    read = _read_items.get(kind)
    return OtherItem(kind) if read is None else read(value)


_read_list = sequence(_item)


class NamedFunction(msgspec.Struct):
    name: str


class NamedCustom(NamedFunction):
    pass


class SearchChoice(msgspec.Struct):
    pass


class DatedSearchChoice(SearchChoice):
    pass


_read_choice = reader(
    Annotated[
        Any,
        Tagged(
            "ResponsesNamedToolChoice",
            "type",
            {
                "function": NamedFunction,
                "web_search": SearchChoice,
                "web_search_2025_08_26": DatedSearchChoice,
                "custom": NamedCustom,
            },
        ),
    ]
)


def _tool_choice(value: Any) -> Any:
    if isinstance(value, str) and value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict) or "type" not in value:
        raise Misfit("expected one of `none`, `auto`, `required` or a tool choice object")
    return _read_choice(value)


class ReasoningConfig(msgspec.Struct):
    shape_name = "ResponsesReasoningConfig"
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(msgspec.Struct):
    pass


class JsonObjectFormat(msgspec.Struct):
    pass


class JsonSchemaFormat(msgspec.Struct):
    name: str
    schema: Any
    description: str | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct):
    shape_name = "ResponsesTextConfig"
    format: Annotated[
        Any,
        Tagged(
            "ResponsesTextFormat",
            "type",
            {
                "text": TextFormat,
                "json_schema": JsonSchemaFormat,
                "json_object": JsonObjectFormat,
            },
        ),
    ] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesRequest(msgspec.Struct):
    """A Responses request."""

    shape_name = "ResponsesRequest"
    model: str
    input: Annotated[Any, Check(_input)] | None = None
    instructions: str | None = None
    max_output_tokens: U32 | None = None
    reasoning: ReasoningConfig | None = None
    stream: bool | None = None
    temperature: F32 | None = None
    text: TextConfig | None = None
    tool_choice: Annotated[Any, Check(_tool_choice)] | None = None
    tools: list[Tool] | None = None
    top_logprobs: U8 | None = None
    top_p: F32 | None = None
    user: str | None = None


_read = reader(ResponsesRequest)
_read_open = naming(_read)


@common.dialectal
def parse(body: bytes | str | dict[str, Any], options: ConversionOptions = OPEN) -> ParsedRequest:
    """A request body as a conversation and its settings. Raises RecipeError."""
    value = common.parse_body(body)
    if options.dialect == "official":
        return _convert(_read(value), options, None)
    demands.check_served(value, 1, demands.RESPONSES_NOT_SERVED)
    parsed = _convert(_read_open(value), options, read_open_fields(value))
    demands.apply(parsed, demands.structured(value))
    parsed.sampling.logit_bias = demands.logit_bias(value)
    parsed.parallel_tool_calls = value.get("parallel_tool_calls") is not False
    parsed.extras |= {name: value[name] for name in _EXTRAS if value.get(name) is not None}
    return parsed


def _convert(request: ResponsesRequest, options: ConversionOptions, fields: OpenFields | None) -> ParsedRequest:
    version = common.model_version(request.model, options)
    effort = None if request.reasoning is None else request.reasoning.effort
    thinking, effort = common.thinking_mode(None, effort, options.default_thinking_mode)
    conversation = Conversation(thinking_mode=thinking, reasoning_effort=effort)
    _check_search(request, options)
    _check_tool_names(request.tools or (), "tools")
    for index, item in enumerate(request.input if isinstance(request.input, list) else ()):
        if isinstance(item, ToolSearchOutput) and version != "v4":
            _check_tool_names(item.tools, f"input[{index}].tools")
    namespaces: dict[str, tuple[str, str]] = {}
    tools = _definitions(request.tools or (), namespaces, version)
    declared = dict(namespaces)
    if request.input is None and not request.instructions:
        raise RecipeError("Either input or instructions must be provided", place="input")
    if request.input == []:
        raise RecipeError("Input items array must not be empty", place="input")
    reading = _Reader(version, options, namespaces)
    messages = reading.read(request.input)
    tools += reading.found
    if request.instructions:
        messages.insert(0, Message("system", request.instructions))
    absent = common.fill_reasoning(messages, thinking, options, "reasoning_text", bool(tools))
    _set_tools(conversation, request, tools)
    _check_json_word(request, messages)
    conversation.messages = _shown_additions(messages, conversation.tools)
    schema = _set_format(conversation, request)
    common.check_strict(conversation, conversation.response_format != "text")
    sampling = _sampling(request, thinking, options, fields)
    common.resolve_sampling(sampling, version, thinking, conversation.tools_active, options)
    return ParsedRequest(
        protocol="responses",
        model=request.model,
        version=version,
        conversation=conversation,
        sampling=sampling,
        parsing=common.parsing_options(conversation, [], options),
        stream=bool(request.stream),
        include_usage=True,
        output_constraint=common.output_constraint(conversation, schema, _is_strict(request.text)),
        extras=open_extras(fields),
        echo=echo(request),
        namespaces=declared if options.dialect == "official" else namespaces,
        custom_tools=_custom_tools(request.tools or ()),
        reasoning_absent=common.positions(conversation.messages, absent),
    )


# --- input -----------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads input items in order; neighbouring items of the assistant become one message."""

    def __init__(self, version: str, options: ConversionOptions, namespaces: dict[str, tuple[str, str]]):
        self.version = version
        self.namespaces = namespaces
        self.found: list[ToolDefinition] = []  # tools that searches brought
        self.token = options.special_tokens.image
        self.rejects_search = options.responses_web_search == "reject"
        self.messages: list[Message] = []
        self.open: Message | None = None  # the assistant message in the making
        self.group: Message | None = None  # the assistant message whose calls want results
        self.wanted: list[str] = []  # those calls
        self.results: dict[str, Message] = {}
        self.additions: list[Message] = []  # schemas that the results bring
        self.call_ids: set[str] = set()
        self.answered: set[str] = set()

    def read(self, source: Any) -> list[Message]:
        """The conversation's messages."""
        if source is None:
            return []
        if isinstance(source, str):
            return [Message("user", source)]
        for index, item in enumerate(source):
            self._item(index, item)
        self._close()
        self._finish_results()
        return self.messages

    def _item(self, index: int, item: Any) -> None:
        if isinstance(item, OtherItem):
            if item.type == "web_search_call" and self.rejects_search:
                place = f"input[{index}]"
                raise RecipeError("Server tools are not supported", more=f"{place}, {item.type}", place=place)
            return
        if isinstance(item, ToolSearchCall | ToolSearchOutput) and self.version == "v4":
            return
        if isinstance(item, FunctionCallOutput | CustomToolCallOutput | ToolSearchOutput):
            self._result(index, item)
            return
        if isinstance(item, FunctionCall | CustomToolCall | ToolSearchCall):
            self._call(index, item)
            return
        self._finish_results()
        if isinstance(item, Reasoning):
            text = "\n".join(part.text for part in item.content or ())
            if self.open is not None and (self.open.tool_calls or (text and self.open.content)):
                self._close()
                self._finish_results()
            if not text:
                return
            message = self._assistant()
            previous = message.reasoning_content
            message.reasoning_content = text if previous is None else f"{previous}\n{text}"
        elif item.role == "assistant":
            self._say(index, item)
        else:
            self._close()
            self._finish_results()
            role = "system" if item.role == "system" or (item.role == "developer" and self.version != "v4") else "user"
            content = self._gather(item.content, index)
            self.messages.append(content.fill(Message(role)))

    def _assistant(self) -> Message:
        if self.open is None:
            self.open = Message("assistant")
            self.messages.append(self.open)
        return self.open

    def _say(self, index: int, item: InputMessage) -> None:
        if self.open is not None and self.open.tool_calls:
            self._close()
            self._finish_results()
        message = self._assistant()
        has_image = not isinstance(item.content, str) and any(isinstance(part, ImagePart) for part in item.content)
        if has_image and self.version != "v4":
            _check_images(item.content, f"input[{index}].content")
            raise RecipeError(f"input[{index}]: Image in assistant message is unsupported")
        text = self._gather(item.content, index).fill(Message("assistant")).content
        message.content = f"{message.content}\n\n{text}" if message.content and text else message.content or text

    def _call(self, index: int, item: FunctionCall | CustomToolCall | ToolSearchCall) -> None:
        self._check_id(index, item.call_id)
        if item.call_id in self.call_ids:
            raise RecipeError(f"Duplicate 'call_id': {item.call_id}.", more=f"input[{index}]", place=f"input[{index}].call_id")
        self.call_ids.add(item.call_id)
        if self.wanted and all(call_id in self.results for call_id in self.wanted):
            self._finish_results()
        message = self.group if self.wanted and self.open is None else self._assistant()
        calls = message.tool_calls or []
        if isinstance(item, CustomToolCall):
            calls.append(ToolCall(item.call_id, item.name, compact({"input": item.input})))
        elif isinstance(item, ToolSearchCall):
            calls.append(ToolCall(item.call_id, TOOL_SEARCH, compact(item.arguments)))
        else:
            name = item.name if item.namespace is None else _qualified(item.namespace, item.name, self.version)
            calls.append(ToolCall(item.call_id, name, item.arguments))
        message.tool_calls = calls
        if message is self.group:  # a call between the results of its neighbours
            self.wanted.append(item.call_id)
            calls.sort(key=lambda call: call.id)

    def _result(self, index: int, item: FunctionCallOutput | CustomToolCallOutput | ToolSearchOutput) -> None:
        content = self._gather(item.output, index, "output") if isinstance(item, FunctionCallOutput) else None
        self._close()
        if item.call_id is None:
            self._finish_results()
            self.messages.append(content.fill(Message("tool")))
            return
        self._check_id(index, item.call_id)
        if item.call_id in self.answered:
            words, place = f"Duplicate tool output for call_id: {item.call_id}.", f"input[{index}]"
            raise RecipeError(words, more=place, place=f"{place}.call_id")
        if item.call_id not in self.wanted:
            words, place = f"No tool call found for tool output with call_id {item.call_id}.", f"input[{index}]"
            raise RecipeError(words, more=place, place=f"{place}.call_id")
        self.answered.add(item.call_id)
        if isinstance(item, ToolSearchOutput):
            self.results[item.call_id] = Message("tool", _found_text(item.tools, index), tool_call_id=item.call_id)
            tools = _definitions(item.tools, self.namespaces, self.version, deferred=True)
            self.found += tools
            if tools:
                self.additions.append(Message("system", tools=tools))
            return
        if content is None:
            content = self._gather(item.output or "", index, "output")
        self.results[item.call_id] = content.fill(Message("tool", tool_call_id=item.call_id))

    def _close(self) -> None:
        """The assistant message is whole; its calls want results now."""
        if self.open is not None and self.open.tool_calls:
            self.group = self.open
            self.wanted = [call.id for call in self.open.tool_calls]
            self.open.tool_calls.sort(key=lambda call: call.id)
            self.results = {}
        self.open = None

    def _finish_results(self) -> None:
        """Results in the order of call ids, as the calls; every call must have one."""
        if self.open is not None or not self.wanted:
            return
        for call_id in self.wanted:
            if call_id not in self.results:
                raise RecipeError(f"No tool output found for tool call {call_id}.")
        self.messages += [self.results[call_id] for call_id in sorted(self.wanted)]
        self.messages += self.additions
        self.wanted, self.results, self.additions, self.group = [], {}, [], None

    def _check_id(self, index: int, call_id: str) -> None:
        if not call_id:
            raise RecipeError(
                f"Invalid 'input[{index}].call_id': empty string. "
                "Expected a string with minimum length 1, but got an empty string instead."
            )

    def _gather(self, source: Any, index: int, field: str = "content") -> common.Content:
        content = common.Content(self.token)
        if isinstance(source, str):
            content.text(source)
            return content
        if self.version != "v4":
            _check_images(source, f"input[{index}].{field}")
        for number, part in enumerate(source):
            if isinstance(part, TextPart):
                content.text(part.text)
            elif isinstance(part, FilePart):
                content.text(_DOCUMENT)
            elif self.version == "v4":
                content.text(common.UNSUPPORTED_IMAGE)
            else:
                place = f"input[{index}].{field}[{number}].image_url"
                content.image(common.image_source(part.image_url, part.detail, f"input[{index}]", place=place))
        return content


def _check_images(parts: list[Any], place: str) -> None:
    """Images must be given by URL; this is said of all of them before any URL is read."""
    for number, part in enumerate(parts):
        if not isinstance(part, ImagePart):
            continue
        at = f"{place}[{number}]"
        if part.image_url and part.file_id:
            raise RecipeError(f"{at}: input_image cannot have both image_url and file_id", place=at)
        if part.file_id:
            raise RecipeError(f"{at}: file_id is not supported. Pass the image as a base64 data url instead.", place=at)
        if not part.image_url:
            raise RecipeError(f"{at}: input_image must have image_url or file_id", place=at)


def _check_json_word(request: ResponsesRequest, messages: list[Message]) -> None:
    if request.text is None or not isinstance(request.text.format, JsonObjectFormat):
        return
    if not any("json" in message.content.lower() for message in messages):
        raise RecipeError(
            "Response input messages must contain the word 'json' in some form to use 'text.format' of type 'json_object'."
        )


# --- tools and format ------------------------------------------------------------------------------------------------


def _check_search(request: ResponsesRequest, options: ConversionOptions) -> None:
    if options.responses_web_search == "drop":
        return
    searches = [f"tools[{index}]" for index, tool in enumerate(request.tools or ()) if isinstance(tool, WebSearch)]
    if isinstance(request.tool_choice, SearchChoice):
        searches.append("tool_choice")
    if searches:
        raise RecipeError("Server tools are not supported", more=f"{searches[0]} is a web search", place=searches[0])


def _found_text(tools: list[Any], index: int) -> str:
    """What a search found, as the model reads it: functions of namespaces one by one."""
    shown = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            space = {"name": tool.name, "description": tool.description or ""}
            shown += [_echo_tool(function) | {"namespace": space} for function in tool.tools]
        elif isinstance(tool, OtherTool):
            raise RecipeError(f"input[{index}]: the enum variant ResponsesTool::Unsupported cannot be serialized")
        else:
            shown.append(_echo_tool(tool))
    return compact(shown)


def _shown_additions(messages: list[Message], tools: list[ToolDefinition]) -> list[Message]:
    """Without the schemas that the tool choice left out, and without messages of nothing else."""
    names = {tool.name: tool for tool in tools}
    result = []
    for message in messages:
        if message.tools is not None:
            message.tools = [names[tool.name] for tool in message.tools if tool.name in names]
            if not message.tools:
                continue
        result.append(message)
    return result


def _custom_tools(tools: Iterable[Any]) -> frozenset[str]:
    """Tools whose calls are items of their own kind in the reply."""
    names = set()
    for tool in tools:
        if isinstance(tool, CustomTool):
            names.add(APPLY_PATCH)
        elif isinstance(tool, ToolSearch) and tool.execution == "client":
            names.add(TOOL_SEARCH)
    return frozenset(names)


def _check_tool_names(tools: Iterable[Any], place: str) -> None:
    for index, tool in enumerate(tools):
        if isinstance(tool, FunctionTool | NamespaceTool):
            common.check_tool_name(tool.name, f"{place}[{index}].name")
        if isinstance(tool, NamespaceTool):
            names: set[str] = set()
            for number, inner in enumerate(tool.tools):
                if isinstance(inner, CustomTool):
                    raise RecipeError(
                        "Currently custom tools are not allowed inside a namespace. "
                        f"Found custom tool '{inner.name}' in {place}[{index}].tools[{number}]."
                    )
                common.check_tool_name(inner.name, f"{place}[{index}].tools[{number}].name")
                if inner.name in names:
                    words, inside = "Tool names within a namespace must be unique.", f"{place}[{index}]"
                    raise RecipeError(words, more=f"'{inner.name}' is twice in {inside}, '{tool.name}'", place=inside)
                names.add(inner.name)
        if isinstance(tool, CustomTool) and tool.name != APPLY_PATCH:
            words = f"Unsupported custom tool: '{tool.name}'. Only '{APPLY_PATCH}' is supported."
            raise RecipeError(words, place=f"{place}[{index}]")


def _set_tools(conversation: Conversation, request: ResponsesRequest, tools: list[ToolDefinition]) -> None:
    """Check the tools and apply the choice."""
    choice, named = request.tool_choice, None
    if choice == "none":
        conversation.tool_choice = "none"
        return
    names: set[str] = set()
    checked = []
    for tool in tools:
        common.check_unique(tool.name, names)
        parameters = common.tool_parameters(tool.name, tool.parameters, tool.strict)
        enforced = closed(tool.parameters) if tool.strict else None
        checked.append(msgspec.structs.replace(tool, parameters=parameters, enforced=enforced))
    if isinstance(choice, NamedFunction):
        named = choice.name
    simple = choice if isinstance(choice, str) else "auto"
    conversation.tools, conversation.tool_choice = common.choose_tools(checked, simple, named, conversation.thinking_mode)


def _definitions(
    declared: Iterable[Any], namespaces: dict[str, tuple[str, str]], version: str, deferred: bool = False
) -> list[ToolDefinition]:
    """Tools as prompts show them; those of namespaces get their qualified names and go into `namespaces`."""
    tools: list[ToolDefinition] = []
    for tool in declared:
        if isinstance(tool, FunctionTool):
            tools.append(ToolDefinition(tool.name, tool.description, tool.parameters, tool.strict, deferred))
        elif isinstance(tool, CustomTool):
            description = PROMPTS[f"{version}.responses.apply_patch.description"]
            parameters = loads(PROMPTS[f"{version}.responses.apply_patch.parameters"])
            tools.append(ToolDefinition(APPLY_PATCH, description, parameters, None, deferred))
        elif isinstance(tool, ToolSearch) and tool.execution == "client":
            tools.append(ToolDefinition(TOOL_SEARCH, tool.description, tool.parameters, None, deferred))
        elif isinstance(tool, NamespaceTool):
            tools += _namespace(tool, namespaces, version, deferred)
    return tools


def _qualified(namespace: str, name: str, version: str) -> str:
    """How a prompt names a tool of a namespace."""
    return f"{namespace}__{name}" if version == "v4" else f"{namespace}::{name}"


def _namespace(
    tool: NamespaceTool, namespaces: dict[str, tuple[str, str]], version: str, deferred: bool
) -> list[ToolDefinition]:
    """The functions of a namespace by qualified names, numbered when a name is taken."""
    tools = []
    for function in tool.tools:
        name = base = _qualified(tool.name, function.name, version)
        number = 0
        while name in namespaces:
            number += 1
            name = f"{base}_{number}"
        namespaces[name] = (tool.name, function.name)
        description = function.description
        if tool.description and version != "v4":
            description = f"{tool.description}\n{description or ''}"
        tools.append(ToolDefinition(name, description, function.parameters, function.strict, deferred))
    return tools


def _is_strict(config: TextConfig | None) -> bool:
    return config is not None and isinstance(config.format, JsonSchemaFormat) and bool(config.format.strict)


def _set_format(conversation: Conversation, request: ResponsesRequest) -> Any:
    form = None if request.text is None else request.text.format
    if isinstance(form, JsonObjectFormat):
        conversation.response_format = "json_object"
    elif isinstance(form, JsonSchemaFormat):
        schema = common.schema_format(form.schema, form.strict, "text.format.schema")
        if form.strict:
            common.close_strict(schema, tool=False, whose="text.format, which is strict")
        conversation.response_format, conversation.response_schema = "json_schema", form.schema
        return schema
    return None


def _sampling(request: ResponsesRequest, thinking: bool, options: ConversionOptions, fields: OpenFields | None) -> Sampling:
    common.in_range("temperature", request.temperature, 0, 2, "[0, 2]")
    common.in_range("top_p", request.top_p, 0, 1, "(0, 1.0]", open_low=True)
    common.in_range("top_logprobs", request.top_logprobs, 0, 20, "[0, 20].")
    bound = options.max_tokens_bound(thinking)
    common.in_range("max_tokens", request.max_output_tokens, 1, bound, f"[1, {bound}]", field="max_output_tokens")
    sampling = Sampling(
        temperature=request.temperature,
        top_p=request.top_p,
        max_tokens=request.max_output_tokens,
        logprobs=request.top_logprobs is not None,
        top_logprobs=request.top_logprobs,
    )
    if fields is not None:
        apply_open(sampling, fields)
    return sampling


# --- echo ------------------------------------------------------------------------------------------------------------


def echo(request: ResponsesRequest) -> dict[str, Any]:
    """The request's settings as the response object repeats them."""
    reasoning = request.reasoning or ReasoningConfig()
    config = request.text or TextConfig()
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "temperature": 1.0 if request.temperature is None else float32(request.temperature),
        "text": {"format": _echo_format(config.format), "verbosity": config.verbosity},
        "tool_choice": _echo_choice(request.tool_choice),
        "tools": [shown for tool in request.tools or () if (shown := _echo_tool(tool)) is not None],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": 1.0 if request.top_p is None else float32(request.top_p),
        "user": request.user,
    }


def _echo_format(form: Any) -> dict[str, Any]:
    if isinstance(form, JsonSchemaFormat):
        return {
            "type": "json_schema",
            "name": form.name,
            "schema": form.schema,
            "description": form.description,
            "strict": form.strict,
        }
    return {"type": "json_object" if isinstance(form, JsonObjectFormat) else "text"}


def _echo_choice(choice: Any) -> Any:
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if isinstance(choice, SearchChoice):
        return {"type": _WEB_SEARCH[isinstance(choice, DatedSearchChoice)]}
    return {"type": "custom" if isinstance(choice, NamedCustom) else "function", "name": choice.name}


def _echo_tool(tool: Any) -> dict[str, Any] | None:
    if isinstance(tool, FunctionTool):
        return {"type": "function", **msgspec.structs.asdict(tool)}
    if isinstance(tool, CustomTool):
        return {"type": "custom", "name": tool.name}
    if isinstance(tool, NamespaceTool):
        inner = [_echo_tool(item) for item in tool.tools]
        return {"type": "namespace", "name": tool.name, "description": tool.description, "tools": inner}
    if isinstance(tool, WebSearch):
        location = None if tool.user_location is None else msgspec.structs.asdict(tool.user_location)
        return {
            "type": _WEB_SEARCH[isinstance(tool, DatedWebSearch)],
            "search_context_size": tool.search_context_size,
            "user_location": location,
        }
    if isinstance(tool, ToolSearch):
        return {
            "type": "tool_search",
            "execution": tool.execution,
            "description": tool.description,
            "parameters": tool.parameters,
        }
    return None
