"""Conversation to prompt, V4 and V4.1. Knows the templates; knows no token ids and no client protocol.

A prompt is written as pieces, some of them special tokens. Special pieces are always the template's own: text of a
caller that spells a token stays text, which is what `special_ranges` records and what encoding relies on.
"""

import json
from bisect import bisect_left
from importlib import resources
from itertools import accumulate

import msgspec

from .conversation import Conversation, ImageSource, Message, ToolCall, ToolDefinition
from .jsontext import JSONError, dumps, loads
from .tokens import SpecialTokens

PROMPTS: dict[str, str] = json.loads(resources.files(__package__).joinpath("data/prompts.json").read_text("utf-8"))
_SCHEMA_HEAD = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_UPDATED_TOOLS = "\n\n### Updated Tool Schemas\n\n"


class Rendered(msgspec.Struct):
    """A prompt: its pieces, which of them are special tokens, and the images that the placeholders stand for."""

    pieces: list[str]
    special_indexes: list[int]  # ascending, into `pieces`
    image_sources: list[ImageSource]
    turns: list["CallTurn"] = []

    @property
    def prompt(self) -> str:
        """The prompt as text."""
        return "".join(self.pieces)

    @property
    def special_ranges(self) -> list[tuple[int, int]]:
        """Code point ranges of `prompt` that are special tokens."""
        ends = list(accumulate(map(len, self.pieces)))
        return [(ends[i] - len(self.pieces[i]), ends[i]) for i in self.special_indexes]

    def slice(self, start: int, end: int | None = None) -> "Rendered":
        """Pieces `start` to `end` as a prompt of their own."""
        first = bisect_left(self.special_indexes, start)
        last = None if end is None else bisect_left(self.special_indexes, end, first)
        return Rendered(self.pieces[start:end], [i - start for i in self.special_indexes[first:last]], [])

    def gaps(self) -> list[str]:
        """The plain text before, between and after the special tokens: one entry more than there are specials."""
        pieces, start, result = self.pieces, 0, []
        for index in self.special_indexes:
            result.append(pieces[start] if index == start + 1 else "".join(pieces[start:index]))
            start = index + 1
        result.append("".join(pieces[start:]))
        return result

    def specials(self) -> list[str]:
        """The special tokens in order."""
        return [self.pieces[i] for i in self.special_indexes]


class CallTurn(msgspec.Struct):
    """An assistant turn with calls: pieces `start` (the token that opens or closes thinking) to `end` (its EOS)."""

    message: Message
    start: int
    end: int


class Template:
    """What V4 and V4.1 share. `render` of a subclass writes one conversation."""

    version = ""
    dsml_gap = ""  # between the DSML token and a tag name
    calls_tag = ""
    padded_exponents = True
    ends_empty_list = True
    empty_call = ""

    def __init__(self, tokens: SpecialTokens):
        self.tokens = tokens
        self._tools_head = self._split(PROMPTS[f"{self.version}.tools.head"])
        self._tools_tail = PROMPTS[f"{self.version}.tools.tail"]
        gap = self.dsml_gap
        self._invoke = f'{gap}invoke name="'
        self._close_parameter = f"{gap}parameter>"
        self._close_invoke = f"{gap}invoke>\n"

    def render(self, conversation: Conversation) -> Rendered:
        """Write `conversation` as this model's prompt."""
        writer = _Writer()
        self._render(writer, conversation)
        return Rendered(writer.pieces, writer.specials, writer.images, writer.turns)

    def _render(self, w: "_Writer", conversation: Conversation) -> None:
        raise NotImplementedError

    def schema_line(self, tool: ToolDefinition) -> str:
        """One tool as the prompt shows it."""
        schema = {"name": tool.name, "description": tool.description or "", "parameters": tool.parameters}
        return dumps(schema, padded_exponents=self.padded_exponents)

    def _split(self, text: str) -> list[tuple[str, str]]:
        """Cut a fixed text of the template into (text, special token after it); the last token is ""."""
        known = {"｜DSML｜": self.tokens.dsml, "<think>": self.tokens.thinking_start, "</think>": self.tokens.thinking_end}
        result = []
        while text:
            found = [(text.find(name), name) for name in known if name in text]
            if not found:
                result.append((text, ""))
                break
            at, name = min(found)
            result.append((text[:at], known[name]))
            text = text[at + len(name) :]
        return result

    def _tools_section(self, w: "_Writer", conversation: Conversation) -> None:
        if not conversation.tools_active:
            return
        for text, token in self._tools_head:
            w.text(text)
            if token:
                w.special(token)
        lines = [self.schema_line(tool) for tool in conversation.tools if not tool.defer_loading]
        w.text("\n".join(lines))
        # With every tool deferred V4 has no line to end, V4.1 leaves it empty.
        w.text(self._tools_tail if lines or self.ends_empty_list else self._tools_tail[1:])

    def _format_section(self, conversation: Conversation) -> str:
        if conversation.response_format == "json_object":
            return PROMPTS[f"{self.version}.json_object"]
        if conversation.response_format == "json_schema":
            return _SCHEMA_HEAD + dumps(conversation.response_schema, padded_exponents=self.padded_exponents)
        return ""

    def _content(self, w: "_Writer", message: Message) -> None:
        if not message.image_sources:
            w.text(message.content)
            return
        first, *rest = message.texts()
        w.text(first)
        for text in rest:
            w.special(self.tokens.image)
            w.text(text)
        w.images.extend(message.image_sources)

    def _tool_calls(self, w: "_Writer", calls: list[ToolCall]) -> None:
        """A historical block of calls."""
        dsml = self.tokens.dsml
        w.text("\n\n<")
        w.special(dsml)
        w.text(self.calls_tag + ">\n")
        for call in calls:
            w.text("<")
            w.special(dsml)
            w.text(f'{self._invoke}{call.name}">\n')
            self._parameters(w, call.arguments)
            w.text("</")
            w.special(dsml)
            w.text(self._close_invoke)
        w.text("</")
        w.special(dsml)
        w.text(self.calls_tag + ">")

    def _parameters(self, w: "_Writer", arguments: str) -> None:
        items = parse_arguments(arguments)
        if not items:
            w.text(self.empty_call)
        dsml = self.tokens.dsml
        for name, value in items.items():
            is_string = isinstance(value, str)
            text = value if is_string else dumps(value, padded_exponents=self.padded_exponents)
            w.text("<")
            w.special(dsml)
            w.text(f'{self.dsml_gap}parameter name="{name}" string="{"true" if is_string else "false"}">{text}</')
            w.special(dsml)
            w.text(self._close_parameter + "\n")

    def _generation_prompt(self, w: "_Writer", conversation: Conversation, messages: list[Message]) -> None:
        if not (messages and messages[-1].prefix):
            w.special(self.tokens.assistant)
            w.special(self.tokens.thinking_start if conversation.thinking_mode else self.tokens.thinking_end)
        if conversation.tools and conversation.tool_choice == "required":
            w.text("\n\n<")
            w.special(self.tokens.dsml)
            w.text(self.calls_tag + ">\n")


class V41Template(Template):
    """V4.1: messages stay in order, a System token before each system message, numeric effort."""

    version = "v41"
    dsml_gap = " "
    calls_tag = " calls"
    empty_call = "\n"
    efforts = {"low": 50, "high": 75, "xhigh": 75, None: 75, "max": 100}

    def _render(self, w: "_Writer", conversation: Conversation) -> None:
        tokens, messages = self.tokens, conversation.messages
        keep = conversation.tools_active
        thinking = conversation.thinking_mode
        response_format = self._format_section(conversation)
        w.special(tokens.bos)
        first_is_system = bool(messages) and messages[0].role == "system"
        if first_is_system or (thinking and messages) or keep or response_format:
            w.special(tokens.system)
            if thinking:
                w.text(self._effort_line(conversation))
            if first_is_system:
                self._content(w, messages[0])
            self._tools_section(w, conversation)
            w.text(response_format)
            if first_is_system:
                self._updated_tools(w, messages[0])
        call_index: dict[str, int] = {}  # of the last assistant message that called tools
        index, count, previous = int(first_is_system), len(messages), ""
        while index < count:
            message = messages[index]
            role = message.role
            index += 1
            if role == "user" or role == "tool":
                start = index - 1
                while index < count and messages[index].role in ("user", "tool"):
                    index += 1
                self._user_turn(w, messages[start:index], call_index)
            elif role == "assistant":
                # The referee drops the reasoning of a prefix that opens the whole prompt.
                opens = index == 1 and not (keep or response_format)
                self._assistant(w, message, thinking, keep, opens)
                if message.tool_calls:
                    call_index = {}
                    for position, call in enumerate(message.tool_calls):
                        call_index.setdefault(call.id, position)
            elif role == "system":
                w.special(tokens.system)
                self._content(w, message)
                self._updated_tools(w, message)
            elif previous != "latest_reminder":
                w.special(tokens.latest_reminder)
                w.text(message.content)
            previous = role
        self._generation_prompt(w, conversation, messages)

    def _effort_line(self, conversation: Conversation) -> str:
        effort = self.efforts[conversation.reasoning_effort]
        return f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"

    def _updated_tools(self, w: "_Writer", message: Message) -> None:
        if message.tools:
            w.text(_UPDATED_TOOLS + "\n".join(map(self.schema_line, message.tools)))

    def _user_turn(self, w: "_Writer", run: list[Message], call_index: dict[str, int]) -> None:
        """Users and tool results up to the next other role, results in the order of the calls they answer."""
        if len(run) > 1 and call_index:
            slots = [i for i, m in enumerate(run) if m.role == "tool" and m.tool_call_id is not None]
            results = sorted((run[i] for i in slots), key=lambda m: call_index.get(m.tool_call_id, 0))
            for slot, message in zip(slots, results, strict=True):
                run[slot] = message
        w.special(self.tokens.user)
        for position, message in enumerate(run):
            if position:
                w.text("\n\n")
            if message.role == "tool":
                w.text("<tool_result>")
                self._content(w, message)
                w.text("</tool_result>")
            else:
                self._content(w, message)

    def _assistant(self, w: "_Writer", message: Message, thinking: bool, keep: bool, opens: bool) -> None:
        tokens, prefix = self.tokens, message.prefix
        w.special(tokens.assistant)
        start = len(w.pieces)
        shown = thinking and (keep or (prefix and not opens))
        if shown:
            w.special(tokens.thinking_start)
            w.text(message.reasoning_content or "")
        if not (shown and prefix and not message.content and not message.tool_calls):
            w.special(tokens.thinking_end)
        w.text(message.content)
        if message.tool_calls:
            self._tool_calls(w, message.tool_calls)
        if not prefix:
            if message.tool_calls:
                w.turns.append(CallTurn(message, start, len(w.pieces)))
            w.special(tokens.eos)


class V4Template(Template):
    """V4: system text is hoisted to the front, effort is a paragraph, calls and results are ordered by id."""

    version = "v4"
    calls_tag = "tool_calls"
    padded_exponents = False
    ends_empty_list = False

    def _render(self, w: "_Writer", conversation: Conversation) -> None:
        tokens, thinking, keep = self.tokens, conversation.thinking_mode, conversation.tools_active
        w.special(tokens.bos)
        effort = conversation.reasoning_effort
        if thinking and effort != "low":
            w.text(PROMPTS["v4.effort.max" if effort == "max" else "v4.effort.high"])
        separator = ""
        for message in conversation.messages:
            if message.role == "system" and message.content:
                w.text(separator)
                self._content(w, message)
                separator = "\n\n"
        self._tools_section(w, conversation)
        w.text(self._format_section(conversation))
        messages = _order_results(_merge_users([m for m in conversation.messages if m.role != "system"]))
        previous = ""
        for position, message in enumerate(messages):
            role = message.role
            if role == "assistant":
                self._assistant(w, message, thinking, keep, last=position == len(messages) - 1)
            elif role == "latest_reminder":
                w.special(tokens.latest_reminder)
                w.text(message.content)
            else:
                if previous == "tool" or (previous == "user" and role == "user"):
                    w.text("\n\n")
                else:
                    w.special(tokens.user)
                if role == "tool":
                    w.text("<tool_result>")
                    self._content(w, message)
                    w.text("</tool_result>")
                else:
                    self._content(w, message)
            previous = role
        self._generation_prompt(w, conversation, messages)

    def _assistant(self, w: "_Writer", message: Message, thinking: bool, keep: bool, last: bool) -> None:
        tokens = self.tokens
        w.special(tokens.assistant)
        start = len(w.pieces)
        reasoning = message.reasoning_content if keep or message.prefix else None
        continues_reasoning = message.prefix and thinking and not message.content
        if reasoning is not None:
            w.special(tokens.thinking_start)
            w.text(reasoning)
        if not continues_reasoning:
            w.special(tokens.thinking_end)
        w.text(message.content)
        if message.tool_calls is not None:
            self._tool_calls(w, sorted(message.tool_calls, key=lambda call: call.id))
        if not (message.prefix and last):
            if message.tool_calls:
                w.turns.append(CallTurn(message, start, len(w.pieces)))
            w.special(tokens.eos)


def parse_arguments(arguments: str) -> dict:
    """Arguments of a historical call by name; text that is not a JSON object becomes the one argument `arguments`."""
    try:
        value = loads(arguments)
    except JSONError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}


def template(version: str, tokens: SpecialTokens) -> Template:
    """The template of `version` ("v4" or "v41")."""
    for cls in (V4Template, V41Template):
        if cls.version == version:
            return cls(tokens)
    raise ValueError(f"no template {version!r}; known versions: 'v4', 'v41'")


class _Writer:
    """Pieces of a prompt, in order."""

    __slots__ = ("images", "pieces", "specials", "text", "turns")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.specials: list[int] = []
        self.images: list[ImageSource] = []
        self.turns: list[CallTurn] = []
        self.text = self.pieces.append

    def special(self, token: str) -> None:
        self.specials.append(len(self.pieces))
        self.pieces.append(token)


def _merge_users(messages: list[Message]) -> list[Message]:
    """Adjacent user messages become one, their non-empty texts joined by a blank line."""
    result: list[Message] = []
    for message in messages:
        if message.role == "user" and result and result[-1].role == "user":
            result[-1] = _join(result[-1], message)
        else:
            result.append(message)
    return result


def _join(left: Message, right: Message) -> Message:
    head, tail = left.texts(), right.texts()
    separator = "\n\n" if left.content and right.content else ""
    parts = [*head[:-1], f"{head[-1]}{separator}{tail[0]}", *tail[1:]]
    sources = [*left.image_sources, *right.image_sources]
    return Message("user", f"{left.content}{separator}{right.content}", image_sources=sources, parts=parts)


def _order_results(messages: list[Message]) -> list[Message]:
    """The n messages after an assistant with n >= 2 calls: results without id, results by id text, then the rest."""
    windows = [
        (i + 1, len(m.tool_calls))
        for i, m in enumerate(messages)
        if m.role == "assistant" and m.tool_calls and len(m.tool_calls) >= 2
    ]
    for start, count in windows:
        if start + count <= len(messages):
            messages[start : start + count] = sorted(messages[start : start + count], key=_result_key)
    return messages


def _result_key(message: Message) -> tuple[int, str]:
    if message.role != "tool":
        return 2, ""
    return (0, "") if message.tool_call_id is None else (1, message.tool_call_id)
