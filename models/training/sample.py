"""One training or evaluation example, and how it becomes token ids.

Knows: prompts exactly as the gateway renders them, the target behind them, which examples are held out. Does not know
where examples come from or how they are packed.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass, field
from typing import Any

from headrace.recipe import V41_TOKENS, Conversation, Encoding, Message, Rendered, Tokenizer, ToolCall

HELD_OUT = 10  # one of so many slot combinations is kept for evaluation
PROMPT_WEIGHT = 0.1  # of the loss on what the user and the template say


@dataclass(slots=True)
class Sample:
    """A document (`text` alone), or a conversation whose next turn is the target.

    slots: what identifies the example for the held-out split; equal slots, equal side. check: what an evaluation
    compares the answer with. pictures: encoded images in the order of the conversation's placeholders. side: of a sample that
    is made of many slots, which all lie on this side of the split. taught: earlier answers count like the target."""

    kind: str
    slots: str
    text: str = ""
    conversation: Conversation | None = None
    reasoning: str = ""
    answer: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    check: dict[str, Any] = field(default_factory=dict)
    pictures: list[bytes] = field(default_factory=list)
    span: int = 0  # tokens of each picture
    side: bool | None = None
    taught: bool = False

    @property
    def held_out(self) -> bool:
        """Whether this example belongs to evaluation; decided by its slots alone."""
        return held_out(self.kind, self.slots) if self.side is None else self.side


def held_out(kind: str, slots: str) -> bool:
    """Which side of the split these slots of a kind are on."""
    digest = hashlib.blake2b(f"{kind}|{slots}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT == 0


class Renderer:
    """Samples to ids and loss weights with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.encoding = Encoding("v41", tokenizer, V41_TOKENS)
        self.eos = tokenizer.added_token_id(V41_TOKENS.eos)
        self.bos = tokenizer.added_token_id(V41_TOKENS.bos)
        self.thought = tokenizer.added_token_id(V41_TOKENS.thinking_end)
        self.image = tokenizer.added_token_id(V41_TOKENS.image)

    def ids(self, sample: Sample) -> tuple[array[int], array[float]]:
        """Token ids, and for each how much its prediction counts. A document begins with BOS and ends with EOS."""
        if sample.conversation is None:
            ids = array("I", [self.bos, *self.tokenizer.encode_plain(sample.text), self.eos])
            return ids, array("f", [1.0]) * len(ids)
        prompt = self.prompt_ids(sample)
        target = self.encoding.encode_rendered(target_of(sample))
        weights = array("f", [PROMPT_WEIGHT]) * len(prompt)
        if sample.taught:
            self._count_answers(prompt, weights)
        return prompt + target, weights + array("f", [1.0]) * len(target)

    def _count_answers(self, ids: array[int], weights: array[float]) -> None:
        """Weight 1 for what follows a </think>, up to its EOS: the answers that the prompt holds already."""
        said = False
        for at, token in enumerate(ids[:-1]):
            if said:
                weights[at] = 1.0
            said = token == self.thought or (said and token != self.eos)

    def prompt_ids(self, sample: Sample) -> array[int]:
        """What the gateway would send for the sample's conversation; an image's token is repeated for its span."""
        ids = self.encoding.encode_rendered(self.encoding.render(sample.conversation))
        if not sample.pictures:
            return ids
        return array("I", [i for token in ids for i in [token] * (sample.span if token == self.image else 1)])

    def texts(self, sample: Sample) -> list[str]:
        """The plain texts between special tokens, prompt and target, for tokenizer training."""
        if sample.conversation is None:
            return [sample.text]
        return self.encoding.render(sample.conversation).gaps() + target_of(sample).gaps()


_TEMPLATE = Encoding("v41", None, V41_TOKENS)


def target_of(sample: Sample) -> Rendered:
    """What the model should say behind the prompt, which ends in <think> or </think>, up to EOS.

    Calls are written by the recipe: the turn is rendered as history and cut out, because the recipe drops the reasoning of
    a finished turn when no tools are declared."""
    conversation = sample.conversation
    if sample.calls:
        turn = Message("assistant", sample.answer, reasoning_content=sample.reasoning, tool_calls=sample.calls)
        history = Conversation([*conversation.messages, turn], conversation.thinking_mode, conversation.tools)
        rendered = _TEMPLATE.render(history)
        last = rendered.turns[-1]
        return rendered.slice(last.start + 1, last.end + 1)  # with the EOS behind the turn
    tokens = V41_TOKENS
    if conversation.thinking_mode:
        return Rendered([sample.reasoning, tokens.thinking_end, sample.answer, tokens.eos], [1, 3], [])
    return Rendered([sample.answer, tokens.eos], [1], [])


def ask(text: str, *, system: str = "", thinking: bool = False) -> Conversation:
    """A conversation of one question."""
    first = [Message("system", system)] if system else []
    return Conversation([*first, Message("user", text)], thinking_mode=thinking)


def call(name: str, arguments: dict[str, Any], number: int = 0) -> ToolCall:
    """A tool call as a client would send it back."""
    return ToolCall(f"call_{number}", name, json.dumps(arguments, ensure_ascii=False))


def to_request(sample: Sample) -> dict[str, Any]:
    """The sample's conversation as a Chat Completions request, without model and sampling."""
    conversation = sample.conversation
    messages: list[dict[str, Any]] = []
    for message in conversation.messages:
        entry: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning_content is not None:
            entry["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            entry["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.tool_calls
            ]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = message.tool_call_id
        if message.image_sources:
            entry["content"] = [
                *({"type": "image_url", "image_url": {"url": source.value}} for source in message.image_sources),
                {"type": "text", "text": message.texts()[-1].removeprefix("\n\n")},
            ]
        messages.append(entry)
    request: dict[str, Any] = {
        "messages": messages,
        "thinking": {"type": "enabled" if conversation.thinking_mode else "disabled"},
    }
    if conversation.tools:
        request["tools"] = [
            {
                "type": "function",
                "function": {"name": t.name, "description": t.description, "parameters": t.parameters},
            }
            for t in conversation.tools
        ]
    if conversation.response_format == "json_object":
        request["response_format"] = {"type": "json_object"}
    return request
