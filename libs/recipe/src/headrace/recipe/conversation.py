"""What a model is asked: messages, tools and settings, free of any client protocol.

Protocol requests convert to these types, encodings render them. Nothing here is validated beyond its type: a caller
that builds a `Conversation` directly gets exactly what it wrote.
"""

from typing import Any, Literal

import msgspec

from .tokens import DEFAULT_TOKENS

Role = Literal["system", "user", "assistant", "tool", "latest_reminder"]
ToolChoice = Literal["auto", "none", "required"]
ReasoningEffort = Literal["low", "high", "xhigh", "max"]
ResponseFormat = Literal["text", "json_object", "json_schema", "regex"]
ImageDetail = Literal["low", "high", "original", "auto"]


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an assistant made earlier. `arguments` is the caller's text, normally a JSON object."""

    id: str
    name: str
    arguments: str


class ToolDefinition(msgspec.Struct, frozen=True):
    """A tool that the model may call; `parameters` is its JSON schema. Deferred tools are not shown in the prompt."""

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool | None = None
    defer_loading: bool = False
    enforced: Any = None  # of a strict tool: the schema that binds its calls, with every keyword that the client wrote


class ImageSource(msgspec.Struct, frozen=True):
    """An image as the client gave it. `path` is its message's place as the referee names it, `place` its own in the request's
    JSON; both are for error messages."""

    kind: Literal["data_url", "url", "bytes"]
    value: str | bytes
    detail: ImageDetail = "high"
    path: str = ""
    place: str = ""


class Message(msgspec.Struct):
    """One message. `content` includes the spelling of image placeholders.

    Images of a message stand where `image_token` occurs in `content` (the first `len(image_sources)` occurrences), or
    exactly between the texts of `parts` when those are given, which a caller's text cannot imitate.
    """

    role: Role
    content: str = ""
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    image_sources: list[ImageSource] = []
    prefix: bool = False
    tools: list[ToolDefinition] | None = None  # system messages only: schemas that take effect from here on
    parts: list[str] | None = None
    image_token: str = DEFAULT_TOKENS.image

    def texts(self) -> list[str]:
        """The texts around the image placeholders; one entry when there are none."""
        if self.parts is not None:
            return self.parts
        if not self.image_sources:
            return [self.content]
        return self.content.split(self.image_token, len(self.image_sources))


class Conversation(msgspec.Struct):
    """Messages and the settings that shape the prompt. The methods build one step by step."""

    messages: list[Message] = []
    thinking_mode: bool = True
    tools: list[ToolDefinition] = []
    tool_choice: ToolChoice = "auto"
    reasoning_effort: ReasoningEffort | None = None
    response_format: ResponseFormat = "text"
    response_schema: Any = None
    response_regex: str | None = None

    @property
    def tools_active(self) -> bool:
        """Whether tools are shown, parsed and keep the reasoning of earlier turns in the prompt."""
        return bool(self.tools) and self.tool_choice != "none"
