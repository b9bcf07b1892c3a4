"""Tool calls: one, several at once, none needed, and turns after a result. Prompts and calls are written by libs/recipe."""

from __future__ import annotations

import random
import re
from typing import Any

from headrace.recipe import Conversation, Message, ToolDefinition

from ..sample import Sample, call
from . import chat, facts
from .tool_schemas import TOOLS, Tool, as_json, result_of, shown

_NAMED = re.compile(r"\{(\w+)\}")


def request_for(tool: Tool, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(what the user says, the arguments of the call)."""
    phrase = rng.choice(tool.phrases)
    named = set(_NAMED.findall(phrase))
    arguments = {p.name: p.draw(rng) for p in tool.parameters if p.name in named}
    return phrase.format(**{name: shown(value) for name, value in arguments.items()}), arguments


def definition(tool: Tool) -> ToolDefinition:
    return ToolDefinition(tool.name, tool.about, tool.schema())


def _declared(needed: list[Tool], rng: random.Random, most: int = 4) -> list[ToolDefinition]:
    count = rng.randint(len(needed), max(len(needed), most))
    others = [t for t in rng.sample(TOOLS, count) if t not in needed][: count - len(needed)]
    chosen = needed + others
    rng.shuffle(chosen)
    return [definition(tool) for tool in chosen]


def _thought(tools: list[Tool], rng: random.Random, thinking: bool) -> str:
    if not thinking:
        return ""
    return " ".join(rng.choice(("I call {n}.", "I need {n} for this.", "{n} can do that.")).format(n=t.name) for t in tools)


def _sample(kind: str, messages: list[Message], tools: list[ToolDefinition], thinking: bool, **rest: Any) -> Sample:
    conversation = Conversation(messages, thinking_mode=thinking, tools=tools)
    return Sample(kind, rest.pop("slots"), conversation=conversation, **rest)


def single(rng: random.Random) -> Sample:
    """One call."""
    tool = rng.choice(TOOLS)
    text, arguments = request_for(tool, rng)
    thinking = rng.random() < 0.4
    return _sample("tool", [Message("user", text)], _declared([tool], rng), thinking, slots=text,
                   reasoning=_thought([tool], rng, thinking), calls=[call(tool.name, arguments)],
                   check={"calls": [[tool.name, arguments]]})  # fmt: skip


SIMPLE = ("get_weather", "get_time", "set_timer", "call_person", "search_web", "order_food", "turn_light", "get_population")


def simple(rng: random.Random) -> Sample:
    """One call without thinking, one or two of a few tools declared: for models too small to learn them all."""
    tools = [tool for tool in TOOLS if tool.name in SIMPLE]
    chosen = rng.sample(tools, rng.randint(1, 2))
    tool = rng.choice(chosen)
    text, arguments = request_for(tool, rng)
    return _sample("tool_simple", [Message("user", text)], [definition(t) for t in chosen], False, slots=text,
                   calls=[call(tool.name, arguments)], check={"calls": [[tool.name, arguments]]})  # fmt: skip


def parallel(rng: random.Random) -> Sample:
    """Two or three calls in one block, also of the same tool."""
    tools = [rng.choice(TOOLS)] * 2 if rng.random() < 0.5 else rng.sample(TOOLS, rng.randint(2, 3))
    asked = [request_for(tool, rng) for tool in tools]
    text = " ".join(text for text, _ in asked)
    calls = [call(tool.name, arguments, n) for n, (tool, (_, arguments)) in enumerate(zip(tools, asked, strict=True))]
    thinking = rng.random() < 0.4
    different = list(dict.fromkeys(tools))
    return _sample("tool_parallel", [Message("user", text)], _declared(different, rng), thinking, slots=text,
                   reasoning=_thought(different, rng, thinking), calls=calls,
                   check={"calls": [[t.name, a] for t, (_, a) in zip(tools, asked, strict=True)]})  # fmt: skip


def none_needed(rng: random.Random) -> Sample:
    """Tools are declared, but the question is not one for them."""
    source = rng.choice((chat.small_talk, facts.capital, facts.table, chat.small_talk))
    plain = source(rng)
    thinking = rng.random() < 0.4
    last = plain.conversation.messages[-1]
    return _sample("tool_none", [last], _declared([], rng, 3) or _declared([rng.choice(TOOLS)], rng), thinking,
                   slots=f"{last.content}|{rng.randrange(64)}", reasoning="I need no tool for this." if thinking else "",
                   answer=plain.answer, check={"calls": []})  # fmt: skip


def after_result(rng: random.Random) -> Sample:
    """A call was made and answered; now the answer is said in words."""
    tool = rng.choice(TOOLS)
    text, arguments = request_for(tool, rng)
    result = result_of(tool, rng)
    values = {p.name: "" for p in tool.parameters} | arguments | result
    reply = tool.reply.format(**{name: shown(value) for name, value in values.items()})
    thinking = rng.random() < 0.4
    made = call(tool.name, arguments)
    messages = [
        Message("user", text),
        Message("assistant", "", reasoning_content=_thought([tool], rng, thinking), tool_calls=[made]),
        Message("tool", as_json(result), tool_call_id=made.id),
    ]
    return _sample("tool_result", messages, _declared([tool], rng, 3), thinking, slots=f"{text}|{as_json(result)}",
                   reasoning="The tool has answered." if thinking else "", answer=reply, check={"calls": []})  # fmt: skip


def second_call(rng: random.Random) -> Sample:
    """A second request after a first was answered."""
    first = after_result(rng)
    tool = rng.choice(TOOLS)
    text, arguments = request_for(tool, rng)
    thinking = first.conversation.thinking_mode
    messages = [*first.conversation.messages, Message("assistant", first.answer, reasoning_content=first.reasoning),
                Message("user", text)]  # fmt: skip
    known = [t.name for t in first.conversation.tools]
    tools = first.conversation.tools + ([] if tool.name in known else [definition(tool)])
    return _sample("tool_second", messages, tools, thinking, slots=f"{first.slots}|{text}",
                   reasoning=_thought([tool], rng, thinking), calls=[call(tool.name, arguments)],
                   check={"calls": [[tool.name, arguments]]})  # fmt: skip


KINDS = {
    "tool": single, "tool_simple": simple, "tool_parallel": parallel, "tool_none": none_needed, "tool_result": after_result,
    "tool_second": second_call,
}  # fmt: skip
