"""Rules that the protocols share: thinking, sampling, tools, formats, images and tool results."""

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

import msgspec

from ..conversation import Conversation, ImageDetail, ImageSource, Message, ToolDefinition
from ..errors import RecipeError, ShapeError
from ..jsontext import JSONError, compact, loads
from ..stream.options import ParsingOptions
from .request import OPEN, ConversionOptions, OutputConstraint, Sampling
from .schema import SchemaError, check, close, strict

EFFORTS = {"minimal": "low", "low": "low", "medium": "high", "high": "high", "xhigh": "xhigh", "ultra": "max", "max": "max"}
MAX_STOPS = 16
MAX_URL = 20 * 1024 * 1024  # characters of a data URL or link
UNSUPPORTED_IMAGE = "[Unsupported Image]"
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")
_IMAGE_DATA_URL = re.compile(r"data:image/[^;,]+;", re.IGNORECASE)


Parse = Callable[..., Any]


def dialectal(parse: Parse) -> Parse:
    """`parse(body, options)`, its errors as the dialect of `options` tells them: the official one as the referee does, byte for
    byte, the open one with the values and the way out."""

    @wraps(parse)
    def told(body: bytes | str | dict[str, Any], options: ConversionOptions = OPEN) -> Any:
        try:
            return parse(body, options)
        except RecipeError as error:
            raise error.open() if options.dialect == "open" else error from None

    return told


def shown(value: float) -> str:
    """A number as it was sent, or, where it was read as binary32, most likely was."""
    return str(value) if isinstance(value, int) else f"{value:.7g}"


def parse_body(body: bytes | str | dict[str, Any]) -> Any:
    """The JSON value of a request body. Raises ShapeError."""
    if isinstance(body, dict):
        return body
    try:
        return loads(body)
    except JSONError as error:
        raise ShapeError(f"invalid JSON request: {error}") from None


def model_version(model: str, options: ConversionOptions) -> str:
    """Template version of a model name."""
    version = options.models.get(model)
    if version is None:
        if options.dialect == "open":
            names = ", ".join(sorted(options.models))
            raise RecipeError(
                f"The model `{model}` does not exist; served models: {names}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        raise RecipeError(f"The supported API model names are {', '.join(sorted(options.models))}, but you passed {model}.")
    return version


def thinking_mode(kind: str | None, effort: str | None, default: bool) -> tuple[bool, str | None]:
    """(thinking, effort) from a thinking type and a requested effort; an effort alone turns thinking on."""
    if kind == "disabled" or (kind is None and effort == "none"):
        return False, None
    if kind is None and effort is None and not default:
        return False, None
    return True, EFFORTS.get(effort or "high", "high")


def in_range(
    name: str, value: float | None, low: float, high: float, limits: str, *, open_low: bool = False, field: str = ""
) -> None:
    """Raise when `value` is outside [low, high] or (low, high], as `limits` spells it. `field`: its name, if not `name`."""
    if value is not None and not (low < value <= high if open_low else low <= value <= high):
        words = f"Invalid {name} value, the valid range of {name} is {limits}"
        raise RecipeError(words, more=f"got {shown(value)}", place=field or name)


def check_stops(stops: list[str], name: str, single: bool = False) -> None:
    """At most 16 stop strings, none empty."""
    if len(stops) > MAX_STOPS:
        raise RecipeError(f"Stop string array too long: {len(stops)}", more=f"at most {MAX_STOPS} are taken", place=name)
    for index, stop in enumerate(stops):
        if not stop:
            place = name if single else f"{name}[{index}]"
            raise RecipeError(
                f"Invalid '{place}': empty string. Expected a string with minimum length 1, but got an empty string instead.",
                place=place,
            )


def resolve_sampling(sampling: Sampling, version: str, thinking: bool, tools_active: bool, options: ConversionOptions) -> None:
    """Apply the referee's forced values; the open dialect keeps what was sent."""
    if options.dialect == "open":
        return
    requested = 1.0 if sampling.top_p is None else sampling.top_p
    if thinking or sampling.temperature is None:
        sampling.temperature = 1.0
    if version == "v41":
        sampling.top_p = max(_F32_095, requested) if thinking else 1.0
        if thinking and sampling.top_p != requested:
            sampling.top_p = _F32_095
    elif thinking:
        sampling.top_p = _F32_095 if tools_active else 1.0
    else:
        sampling.top_p = requested
    sampling.presence_penalty = sampling.frequency_penalty = None


_F32_095 = 0.949999988079071  # 0.95 in binary32


# --- tools -----------------------------------------------------------------------------------------------------------


def check_tool_name(name: str, place: str) -> None:
    """Tool names are non-empty and of letters, digits, `_` and `-`."""
    if not name:
        raise RecipeError(
            f"Invalid '{place}': empty string. Expected a string with minimum length 1, but got an empty string instead.",
            place=place,
        )
    if not _TOOL_NAME.match(name):
        raise RecipeError(
            f"Invalid '{place}': string does not match pattern. Expected a string that matches the pattern '^[a-zA-Z0-9_-]+$'.",
            more=f"got {name!r}",
            place=place,
        )


def tool_parameters(name: str, parameters: Any, is_strict: bool | None) -> Any:
    """A tool's schema, checked, and rebuilt when strict."""
    if is_strict:
        try:
            rebuilt = strict({"type": "object"} if parameters is None else parameters)
        except SchemaError as error:
            raise RecipeError(f"Invalid tool parameters schema : {error}", more=f"tool '{name}'", place="tools") from None
        close_strict(rebuilt, tool=True, whose=f"tool '{name}', which is strict")
        return rebuilt
    if parameters is None:
        return {}
    check_tool_schema(name, parameters)
    return parameters


def check_tool_schema(name: str, parameters: Any) -> None:
    """A tool's schema is a JSON schema of an object."""
    try:
        check(parameters)
    except SchemaError as error:
        raise RecipeError(f"Invalid schema for function '{name}': {error}") from None
    kind = parameters.get("type") if isinstance(parameters, dict) else None
    if kind != "object":
        raise RecipeError(
            f"Invalid schema for function '{name}': "
            f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {compact(kind)}'."
        )


def check_unique(name: str, names: set[str]) -> None:
    """No two tools of one name; adds `name` to `names`."""
    if name in names:
        raise RecipeError("Tool names must be unique.", more=f"'{name}' is there twice", place="tools")
    names.add(name)


def check_strict(conversation: Conversation, has_format: bool) -> None:
    """Either all tools that the choice left are strict or none, and strict tools go with no response format."""
    flags = [bool(tool.strict) for tool in conversation.tools]
    if conversation.tool_choice == "none" or not any(flags):
        return
    if not all(flags):
        strict, other = (next(t.name for t in conversation.tools if bool(t.strict) is kind) for kind in (True, False))
        more = f"'{strict}' is strict and '{other}' is not: make all strict, or none"
        raise RecipeError("Cannot use strict tool with non-strict tool in the same request", more=more, place="tools")
    if has_format:
        more = f"tools that are strict, as '{conversation.tools[0].name}' is; leave out either"
        raise RecipeError("response_format should not be used with tools", more=more, place="response_format")


def choose_tools(
    tools: list[ToolDefinition], choice: str | None, named: str | None, thinking: bool
) -> tuple[list[ToolDefinition], str]:
    """The tools and the tool choice that the model sees. A named choice narrows the list and requires a call."""
    if not tools:
        return tools, "none" if choice == "none" else "auto"
    if named is not None:
        there = ", ".join(f"'{tool.name}'" for tool in tools)
        tools = [tool for tool in tools if tool.name == named]
        if not tools:
            raise RecipeError(
                f"Invalid value for 'tool_call': no function named '{named}' was specified in the 'tools' parameter.",
                more=f"there: {there}",
                place="tool_choice",
            )
        choice = "required"
    if choice == "required" and thinking:
        what = "required" if named is None else f"the function '{named}'"
        more = f'it is {what}: leave the choice to the model (auto), or send "thinking": {{"type": "disabled"}}'
        raise RecipeError("Thinking mode does not support this tool_choice", more=more, place="tool_choice")
    return tools, choice or "auto"


# --- formats and constraints -----------------------------------------------------------------------------------------


def schema_format(schema: Any, is_strict: bool | None, place: str) -> Any:
    """A response format's schema, which is at `place`, as the constraint uses it: checked, or rebuilt when strict."""
    try:
        if is_strict:
            return strict(schema)
        check(schema)
    except SchemaError as error:
        raise RecipeError(f"Invalid json schema: {error}", more=place, place=place) from None
    return schema


def close_strict(schema: Any, *, tool: bool, whose: str) -> None:
    """Close a rebuilt schema in place; errors say `whose` it is."""
    try:
        close(schema, tool=tool)
    except SchemaError as error:
        raise RecipeError(str(error), more=whose) from None


def output_constraint(conversation: Conversation, schema: Any, is_strict: bool | None = None) -> OutputConstraint | None:
    """What constrained decoding is to enforce; tools win over formats."""
    if conversation.tools_active:
        kind = "tool_call_required" if conversation.tool_choice == "required" else "tool_call"
        functions = [_function(tool) for tool in conversation.tools]
        return OutputConstraint(kind, compact(functions), conversation.tools)
    if conversation.response_format == "json_object":
        return OutputConstraint("json", "")
    if conversation.response_format == "json_schema":
        return OutputConstraint("json", compact(schema), conversation.response_schema, bool(is_strict))
    if conversation.response_format == "regex":
        return OutputConstraint("regex", conversation.response_regex or "")
    return None


def _function(tool: ToolDefinition) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": tool.strict}
    if tool.defer_loading:
        return {"type": "function", "function": function, "defer_loading": True}
    return {"type": "function", "function": function}


def parsing_options(conversation: Conversation, stops: list[str], options: ConversionOptions) -> ParsingOptions:
    """How the reply to `conversation` is to be read."""
    active = conversation.tools_active
    stage = None
    if conversation.thinking_mode:
        stage = "reasoning_start"
        last = conversation.messages[-1] if conversation.messages else None
        if last is not None and last.prefix:
            if last.content:
                stage = "content_continuation"
            elif last.reasoning_content:
                stage = "reasoning_continuation"
    return ParsingOptions(
        parse_tool_calls=active,
        starts_in_tool_calls=active and conversation.tool_choice == "required",
        parse_json_output=conversation.response_format == "json_object",
        thinking_initial_stage=stage,
        stop_sequences=stops,
        special_tokens=options.special_tokens,
        repair=options.repair,
        lenient_end=options.dialect == "open",
    )


# --- content ---------------------------------------------------------------------------------------------------------


class Content(msgspec.Struct):
    """Parts of one message, gathered: texts and images in order."""

    image_token: str
    path: str = ""
    parts: list[str | ImageSource] = []

    def text(self, text: str) -> None:
        """Add a text part."""
        self.parts.append(text)

    def image(self, source: ImageSource) -> None:
        """Add an image."""
        self.parts.append(source)

    def fill(self, message: Message, separator: str = "\n\n") -> Message:
        """Write the parts into `message`, joined by `separator`."""
        sources = [part for part in self.parts if isinstance(part, ImageSource)]
        spelled = [part if isinstance(part, str) else self.image_token for part in self.parts]
        message.content = separator.join(spelled)
        message.image_token = self.image_token
        if sources:
            message.image_sources = sources
            message.parts = self._texts(separator)
        return message

    def _texts(self, separator: str) -> list[str]:
        """The texts around the images."""
        texts = [""]
        for index, part in enumerate(self.parts):
            if index:
                texts[-1] += separator
            if isinstance(part, str):
                texts[-1] += part
            else:
                texts.append("")
        return texts


def image_source(
    url: str, detail: ImageDetail | None, path: str, field: str = "image_url", place: str = ""
) -> ImageSource:
    """An image from a client's URL: http(s) or an image data URL."""
    if url.startswith(("http://", "https://")):
        return ImageSource("url", url, detail or "high", path, place)
    if url.startswith("data:image/"):
        return ImageSource("data_url", url, detail or "high", path, place)
    words = f"Unsupported {field} format"
    taken = f"an http://, https:// or data:image/ URL is taken, and this begins with {url[:40]!r}"
    raise RecipeError(f"{path}: {words}", instead=f"{place}: {words}; {taken}", place=place)


# --- history ---------------------------------------------------------------------------------------------------------


def fill_reasoning(
    messages: list[Message], thinking: bool, options: ConversionOptions, field: str, has_tools: bool
) -> list[Message]:
    """Give assistant turns without reasoning an empty one in thinking mode, take it from all otherwise.

    Returns the turns that came without. With `reasoning_content="reject"`, refuse when a turn after the last user
    message lacks it where tools are declared or that turn calls some.
    """
    assistants = [(i, m) for i, m in enumerate(messages) if m.role == "assistant"]
    if not thinking:
        for _, message in assistants:
            message.reasoning_content = None
        return []
    absent = [(i, m) for i, m in assistants if m.reasoning_content is None]
    if options.reasoning_content == "reject":
        last_user = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
        if any(i > last_user and (has_tools or m.tool_calls) for i, m in absent):
            raise RecipeError(f"The `{field}` in the thinking mode must be passed back to the API.")
    for _, message in absent:
        message.reasoning_content = ""
    return [message for _, message in absent]


def positions(messages: list[Message], some: list[Message]) -> frozenset[int]:
    """Where `some` of the messages stand."""
    wanted = set(map(id, some))
    return frozenset(index for index, message in enumerate(messages) if id(message) in wanted)
