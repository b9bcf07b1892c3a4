"""Exact replay of assistant turns that called tools.

A client sends tool calls back as JSON of its own making: other spaces, other key order, other escapes. Rendered anew
they are other tokens, and the prefix cache misses from there on. This cache keeps the ids that were sampled, under the
ids of the calls, and gives them back only when the client's names and parsed arguments equal what was produced. It
never crosses a namespace and is bounded in memory.
"""

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from .conversation import Conversation, Message, ToolCall
from .jsontext import JSONError, loads
from .stream.reply import ReplyStream

_RECORD_BYTES = 512  # bookkeeping of one record, about


class Turn(msgspec.Struct):
    """One sampled assistant turn: its ids without EOS, and what they were parsed to."""

    ids: "array[int]"
    thinking: bool
    reasoning: str
    content: str
    calls: dict[str, tuple[str, str]]  # by call id: name, canonical arguments


class ReplayCache:
    """Sampled turns by (namespace, call id), least recently used dropped."""

    def __init__(self, max_bytes: int = 64 << 20):
        self.max_bytes = max_bytes
        self.bytes = 0
        self._turns: OrderedDict[tuple[bytes, str], Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, namespace: bytes, reply: ReplyStream, ids: Iterable[int]) -> bool:
        """Keep the turn that `reply` read from `ids` (EOS left out). False when it cannot be replayed exactly:
        no call, a stop sequence, a repair, or an output that was cut short."""
        if not reply.calls or reply.parser.stopped is not None or reply.parser.repairs or reply.finish_reason == "length":
            return False
        calls = {call.id: (call.name, canonical(call.text)) for call in reply.calls}
        turn = Turn(array("I", ids), reply.thinking, "".join(reply.reasoning), "".join(reply.content), calls)
        key = (namespace, reply.calls[0].id)
        size = _size(turn)
        if size > self.max_bytes or key in self._turns:
            return False
        self._turns[key] = turn
        self.bytes += size
        while self.bytes > self.max_bytes:
            _, old = self._turns.popitem(last=False)
            self.bytes -= _size(old)
        return True

    def find(self, namespace: bytes, message: Message) -> Turn | None:
        """The turn that `message` repeats; None unless calls, names, arguments and content are the same."""
        calls = message.tool_calls
        if not calls or message.prefix:
            return None
        turn = next((t for call in calls if (t := self._get((namespace, call.id))) is not None), None)
        if turn is None or message.content != turn.content or not _same_calls(calls, turn):
            return None
        return turn

    def restore(self, conversation: Conversation, namespace: bytes, absent: Iterable[int]) -> int:
        """Give the messages at `absent`, which came without the key, the reasoning they were produced with.

        Returns how many were restored. `absent`: `ParsedRequest.reasoning_absent`.
        """
        restored = 0
        for index in absent:
            message = conversation.messages[index]
            turn = self.find(namespace, message)
            if turn is not None and turn.thinking:
                message.reasoning_content = turn.reasoning
                restored += 1
        return restored

    def _get(self, key: tuple[bytes, str]) -> Turn | None:
        turn = self._turns.get(key)
        if turn is not None:
            self._turns.move_to_end(key)
        return turn


def canonical(arguments: str) -> str:
    """Arguments in one spelling: equal texts are equal values, 1 and 1.0 and true being different."""
    try:
        return json.dumps(loads(arguments), sort_keys=True, ensure_ascii=False)
    except JSONError:
        return arguments


def _same_calls(calls: list[ToolCall], turn: Turn) -> bool:
    if [call.id for call in calls] != list(turn.calls):  # results are rendered in the order of the calls
        return False
    return all(turn.calls.get(call.id) == (call.name, canonical(call.arguments)) for call in calls)


def _size(turn: Turn) -> int:
    text = len(turn.reasoning) + len(turn.content) + sum(len(name) + len(text) for name, text in turn.calls.values())
    return _RECORD_BYTES + len(turn.ids) * turn.ids.itemsize + 2 * text
