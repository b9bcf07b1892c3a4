"""Anthropic Messages: stream events and the whole message."""

from typing import Any

from ..jsontext import JSONError, compact, loads
from .parser import Event, FinishReason, StreamParser
from .reply import Dialect, ReplyStream, json_string, named_event

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


class MessagesStream(ReplyStream):
    """Writes message_start to message_stop: one block at a time, each opened and closed once.

    A thinking block opens with the stream and is signed with the reply's id.
    """

    protocol = "messages"

    def __init__(
        self,
        parser: StreamParser,
        id: str,
        model: str,
        created: int = 0,
        dialect: Dialect = "open",
        include_usage: bool = False,
        *,
        signature: str | None = None,
        thinking: bool | None = None,
    ):
        super().__init__(parser, id, model, created, dialect, include_usage)
        if thinking is not None:
            self.thinking = thinking
        self.signature = id if signature is None else signature
        self._block = -1  # index of the open or last block
        self._kind = ""  # of the open block
        self._pinged = False
        self._head = b""  # constant bytes of the open block's deltas

    def accumulate(self) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if self.thinking:
            content.append({"type": "thinking", "thinking": "".join(self.reasoning), "signature": self.signature})
        if self.content:
            content.append({"type": "text", "text": "".join(self.content)})
        for call in self.calls:
            content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.text)})
        return self._message(content, self.finish_reason, self.parser.stopped, self.completion_tokens())

    def error(self, error: Exception) -> bytes:
        from ..errors import as_recipe_error

        return b"event: error\ndata: " + as_recipe_error(error).body("messages") + b"\n\n"

    def usage_object(self, output_tokens: int) -> dict[str, Any]:
        """Usage in Anthropic's words: input without what the cache served."""
        prompt, cached = self.usage.prompt_tokens, self.usage.cached_tokens
        return {
            "input_tokens": max(prompt - cached, 0),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output_tokens,
            "service_tier": "standard",
        }

    def _message(self, content: list[Any], reason: str | None, stop: str | None, output_tokens: int) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": self.usage_object(output_tokens),
        }

    def _open(self) -> bytes:
        start = named_event("message_start", {"type": "message_start", "message": self._message([], None, None, 0)})
        if self.thinking:
            start += self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return start

    def _start(self, kind: str, block: dict[str, Any]) -> bytes:
        """Close the open block and open another."""
        closing = self._stop()
        self._block += 1
        self._kind = kind
        delta = {
            "thinking": b'"thinking_delta","thinking":',
            "text": b'"text_delta","text":',
            "tool_use": b'"input_json_delta","partial_json":',
        }[kind]
        self._head = (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":' % self._block
        ) + delta
        event = {"type": "content_block_start", "index": self._block, "content_block": block}
        ping = b"" if self._pinged else _PING
        self._pinged = True
        return closing + named_event("content_block_start", event) + ping

    def _stop(self) -> bytes:
        if not self._kind:
            return b""
        closing = b""
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": self.signature}
            event = {"type": "content_block_delta", "index": self._block, "delta": delta}
            closing = named_event("content_block_delta", event)
        self._kind = ""
        return closing + named_event("content_block_stop", {"type": "content_block_stop", "index": self._block})

    def _delta(self, text: str) -> bytes:
        return self._head + json_string(text) + b"}}\n\n"

    def _plain_content(self, escaped: bytes) -> bytes:
        opening = b"" if self._kind == "text" else self._start("text", {"type": "text", "text": ""})
        return b"".join((opening, self._head, b'"', escaped, b'"}}\n\n'))

    def _plain_reasoning(self, escaped: bytes) -> bytes:
        opening = b""
        if self._kind != "thinking":
            opening = self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return b"".join((opening, self._head, b'"', escaped, b'"}}\n\n'))

    def _content(self, event: Event) -> bytes:
        opening = b"" if self._kind == "text" else self._start("text", {"type": "text", "text": ""})
        return opening + self._delta(event.text)

    def _reasoning(self, event: Event) -> bytes:
        opening = b""
        if self._kind != "thinking":
            opening = self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        return opening + self._delta(event.text)

    def _tool_start(self, event: Event) -> bytes:
        return self._start("tool_use", {"type": "tool_use", "id": event.id, "name": event.name, "input": {}})

    def _tool_arguments(self, event: Event) -> bytes:
        return self._delta(event.text)

    def _close(self, reason: FinishReason, done: bool) -> bytes:
        stop = self.parser.stopped
        if stop is not None:
            self.finish_reason = "stop_sequence"
        elif reason == "stop" and self.calls:
            self.finish_reason = "tool_use"
        else:
            self.finish_reason = _STOP_REASONS[reason]
        delta = {"stop_reason": self.finish_reason, "stop_sequence": stop}
        event = {"type": "message_delta", "delta": delta, "usage": self.usage_object(self.completion_tokens())}
        return self._stop() + named_event("message_delta", event) + _STOP


def _input(text: str) -> Any:
    """The arguments of a call as JSON; what the model cut short or broke is an empty object."""
    try:
        value = loads(text)
    except JSONError:
        return {}
    return value if isinstance(value, dict) else {}


__all__ = ["MessagesStream", "compact"]
