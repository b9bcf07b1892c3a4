"""The small API of the seed article: build a conversation call by call, feed sampled tokens, read events.

A thin layer over `Conversation`, `Encoding` and `StreamParser`; use those for anything more.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from . import conversation as core
from .encoding import Encoding
from .jsontext import compact
from .stream.options import ParsingOptions
from .stream.parser import Event, StreamParser
from .tokenizer import Tokenizer


class TokenizerModel(msgspec.Struct):
    """A tokenizer and the prompt version of the model that it belongs to."""

    tokenizer: Tokenizer
    version: str = "v41"


class RenderedInput(msgspec.Struct):
    """A prompt for the engine."""

    token_ids: list[int]
    prompt: str
    image_sources: list[core.ImageSource]


class Conversation:
    """A conversation, built step by step."""

    def __init__(self) -> None:
        self._conversation = core.Conversation()

    def set_reasoning_mode(self, mode: str | None) -> "Conversation":
        """ "none" or None: answer at once; "low", "high", "xhigh" or "max": reason first. Raises ValueError."""
        if mode not in (None, "none", "low", "high", "xhigh", "max"):
            raise ValueError(f"reasoning mode {mode!r} is not one of none, low, high, xhigh, max")
        self._conversation.thinking_mode = mode not in (None, "none")
        self._conversation.reasoning_effort = mode if self._conversation.thinking_mode else None
        return self

    def register_tool(self, name: str, description: str = "", parameters: dict[str, Any] | None = None) -> "Conversation":
        """A tool that the model may call."""
        self._conversation.tools.append(core.ToolDefinition(name, description, parameters or {"type": "object"}))
        return self

    def add_system_message(self, content: str) -> "Conversation":
        """Instructions."""
        return self._add(core.Message("system", content))

    def add_user_message(self, content: str) -> "Conversation":
        """What the user says."""
        return self._add(core.Message("user", content))

    def add_assistant_message(
        self,
        content: str = "",
        reasoning_content: str | None = None,
        tool_calls: Iterable[core.ToolCall | dict[str, Any]] | None = None,
    ) -> "Conversation":
        """What the assistant said. Calls are `ToolCall`s or dicts of id, name and arguments."""
        calls = None if tool_calls is None else [_call(call) for call in tool_calls]
        return self._add(core.Message("assistant", content, reasoning_content, calls))

    def add_tool_result(self, tool_call_id: str, content: str) -> "Conversation":
        """What a tool answered."""
        return self._add(core.Message("tool", content, tool_call_id=tool_call_id))

    def render_for_engine(self, tokenizer_model: TokenizerModel, add_generation_prompt: bool = True) -> RenderedInput:
        """The prompt's token ids; without a generation prompt it ends with the last message."""
        encoding = Encoding(tokenizer_model.version, tokenizer_model.tokenizer)
        rendered = encoding.render(self._conversation)
        if not add_generation_prompt and not (self._conversation.messages and self._conversation.messages[-1].prefix):
            rendered = rendered.slice(0, rendered.special_indexes[-2])  # the assistant token and what opens its turn
        return RenderedInput(list(encoding.encode_rendered(rendered)), rendered.prompt, rendered.image_sources)

    def parsing(self) -> ParsingOptions:
        """How the reply to this conversation is to be read."""
        stage = "reasoning_start" if self._conversation.thinking_mode else None
        return ParsingOptions(parse_tool_calls=self._conversation.tools_active, thinking_initial_stage=stage, lenient_end=True)

    def _add(self, message: core.Message) -> "Conversation":
        self._conversation.messages.append(message)
        return self


class OutputEvent:
    """One thing that a sampled token told."""

    def __init__(self, kind: str, text: str = "", call: core.ToolCall | None = None):
        self._kind = kind
        self._text = text
        self._call = call

    def is_reasoning(self) -> bool:
        """Whether this is reasoning text."""
        return self._kind == "reasoning"

    def is_content(self) -> bool:
        """Whether this is text of the answer."""
        return self._kind == "content"

    def is_tool_call_completed(self) -> bool:
        """Whether a tool call is complete; `get_tool_call` has it."""
        return self._kind == "tool_call"

    def text(self) -> str:
        """The text of a reasoning or content event."""
        return self._text

    def get_tool_call(self) -> core.ToolCall:
        """The completed call. Raises ValueError for another kind of event."""
        if self._call is None:
            raise ValueError(f"a {self._kind} event holds no tool call")
        return self._call


class StreamOutputParser:
    """Reads an output token by token."""

    def __init__(self, tokenizer_model: TokenizerModel, parsing: ParsingOptions | None = None):
        """`parsing`: from `Conversation.parsing`; the default reads reasoning, content and tool calls."""
        if parsing is None:
            parsing = ParsingOptions(thinking_initial_stage="reasoning_start", lenient_end=True)
        self._parser = StreamParser(parsing, tokenizer_model.tokenizer)
        self._id = self._name = ""
        self._arguments: list[str] = []

    def step(self, token_id: int) -> list[OutputEvent]:
        """The events that one token decides."""
        return self._told(self._parser.push([token_id]))

    def finish(self) -> list[OutputEvent]:
        """The events of the text that was held back, after the last token (EOS is not fed)."""
        return self._told(self._parser.finish())

    def _told(self, events: list[Event]) -> list[OutputEvent]:
        result = []
        for event in events:
            if event.kind in ("reasoning", "content"):
                result.append(OutputEvent(event.kind, event.text))
            elif event.kind == "tool_start":
                self._id, self._name = event.id, event.name
                self._arguments.clear()
            elif event.kind == "tool_arguments":
                self._arguments.append(event.text)
            elif event.kind == "tool_end":
                call = core.ToolCall(self._id, self._name, "".join(self._arguments))
                result.append(OutputEvent("tool_call", call=call))
        return result


def _call(call: core.ToolCall | dict[str, Any]) -> core.ToolCall:
    if isinstance(call, core.ToolCall):
        return call
    arguments = call["arguments"]
    return core.ToolCall(call["id"], call["name"], arguments if isinstance(arguments, str) else compact(arguments))
