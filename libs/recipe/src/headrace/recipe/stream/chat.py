"""OpenAI Chat Completions: chunks and the whole completion."""

from typing import Any

from ..jsontext import compact
from .parser import Event, FinishReason, StreamParser
from .reply import Detailed, Dialect, ReplyStream, data_event, json_string, logprob_entries, prompt_logprobs

_TAIL = b',"logprobs":null,"finish_reason":null}]'


class ChatStream(ReplyStream):
    """Writes chat.completion.chunk events.

    `official`: usage is part of the finish chunk. `open`: usage comes in a last chunk without choices when
    `include_usage` asked for it, and `reasoning_alias` adds `reasoning` beside `reasoning_content`.
    """

    protocol = "chat"

    def __init__(
        self,
        parser: StreamParser,
        id: str,
        model: str,
        created: int = 0,
        dialect: Dialect = "open",
        include_usage: bool = False,
        *,
        index: int = 0,
        reasoning_alias: bool = False,
        system_fingerprint: str | None = None,
        prompt_logprobs: int | None = None,
    ):
        super().__init__(parser, id, model, created, dialect, include_usage)
        self.index = index
        self.reasoning_alias = reasoning_alias
        self.system_fingerprint = system_fingerprint
        self.prompt_logprobs = prompt_logprobs  # None: not asked for
        self._logprobs: dict[str, list[dict[str, Any]]] = {}
        self._envelope()

    def accumulate(self) -> dict[str, Any]:
        body = {
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self.choice()],
            "usage": self.usage_object(),
            "system_fingerprint": self.system_fingerprint,
        }
        if self.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.prompt_scores, self.prompt_logprobs, self.parser.tokenizer)
        return body

    def choice(self) -> dict[str, Any]:
        """The one choice of this reply, for replies that gather several."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if self.thinking:
            message["reasoning_content"] = "".join(self.reasoning)
            if self.reasoning_alias:
                message["reasoning"] = message["reasoning_content"]
        if self.calls:
            message["tool_calls"] = [
                {"index": i, "id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.text}}
                for i, c in enumerate(self.calls)
            ]
        return {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs or ({"content": []} if self.wants_logprobs else None),
            "finish_reason": self.finish_reason,
        }

    def usage_object(self) -> dict[str, Any]:
        """Usage in OpenAI's words, with DeepSeek's cache counters."""
        prompt, cached = self.usage.prompt_tokens, self.usage.cached_tokens
        completion, reasoning = self.completion_tokens(), self.reasoning_tokens()
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        if reasoning or (self.dialect == "official" and self.thinking and self.parser.saw_ids):
            usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
        return usage | {"prompt_cache_hit_tokens": cached, "prompt_cache_miss_tokens": max(prompt - cached, 0)}

    def error(self, error: Exception) -> bytes:
        from ..errors import as_recipe_error

        return b"data: " + as_recipe_error(error).body("chat") + b"\n\n"

    def _envelope(self) -> None:
        """The constant bytes around every delta, written once."""
        head = {
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }
        self._base = b"data: " + compact(head)[:-1].encode()
        self._head = self._base + b',"choices":[{"index":%d,"delta":' % self.index
        self._end = (b',"usage":null' if self.include_usage else b"") + b"}\n\n"
        self._tail = _TAIL + self._end
        content = b'{"content":'
        self._content_head = self._head + content
        self._content_tail = (b',"reasoning_content":null}' if self.thinking else b"}") + self._tail
        self._reasoning_head = self._head + b'{"content":null,"reasoning_content":'
        self._reasoning_tail = b"}" + self._tail

    def _open(self) -> bytes:
        content = b"null" if self.thinking else b'""'
        reasoning = b',"reasoning_content":""' if self.thinking else b""
        return self._head + b'{"role":"assistant","content":' + content + reasoning + b"}" + self._tail

    def _plain_content(self, escaped: bytes) -> bytes:
        return b"".join((self._content_head, b'"', escaped, b'"', self._content_tail))

    def _plain_reasoning(self, escaped: bytes) -> bytes:
        if self.reasoning_alias:
            escaped = escaped + b'","reasoning":"' + escaped
        return b"".join((self._reasoning_head, b'"', escaped, b'"', self._reasoning_tail))

    def _content(self, event: Event) -> bytes:
        tail = self._content_tail if event.logprobs is None else self._with_logprobs(self._content_tail, "content", event)
        return self._content_head + json_string(event.text) + tail

    def _reasoning(self, event: Event) -> bytes:
        text, tail = json_string(event.text), self._reasoning_tail
        if self.reasoning_alias:
            text += b',"reasoning":' + text
        if event.logprobs is not None:
            tail = self._with_logprobs(tail, "reasoning_content", event)
        return self._reasoning_head + text + tail

    def _with_logprobs(self, tail: bytes, key: str, event: Event) -> bytes:
        entries = logprob_entries(event.logprobs, self.parser.tokenizer)
        self._logprobs.setdefault(key, []).extend(entries)
        return tail.replace(b'"logprobs":null', b'"logprobs":' + compact({key: entries}).encode(), 1)

    def _tool_start(self, event: Event) -> bytes:
        call = {"index": event.index, "id": event.id, "type": "function"}
        call["function"] = {"name": event.name, "arguments": ""}
        return self._head + compact({"tool_calls": [call]}).encode() + self._tail

    def _tool_arguments(self, event: Event) -> bytes:
        delta = b'{"tool_calls":[{"index":%d,"function":{"arguments":' % event.index
        return self._head + delta + json_string(event.text) + b"}}]}" + self._tail

    def _close(self, reason: FinishReason, done: bool) -> bytes:
        self.finish_reason = "tool_calls" if reason == "stop" and self.calls and self.parser.stopped is None else reason
        delta = b'{"content":"","reasoning_content":null}' if self.thinking else b'{"content":""}'
        head = self._head + delta + b',"logprobs":null,"finish_reason":"' + self.finish_reason.encode() + b'"}]'
        if self.dialect == "official":
            return (
                head + b',"usage":' + compact(self.usage_object()).encode() + b"}\n\n" + (b"data: [DONE]\n\n" if done else b"")
            )
        parts = [head + self._end]
        if done:
            if self.include_usage:
                parts.append(self._base + b',"choices":[],"usage":' + compact(self.usage_object()).encode() + b"}\n\n")
            parts.append(b"data: [DONE]\n\n")
        return b"".join(parts)


class DetailedChatStream(Detailed, ChatStream):
    """A ChatStream that tells more."""


def many(streams: list[ChatStream]) -> dict[str, Any]:
    """One completion from the streams of a request with n > 1; usage is the prompt once and all outputs."""
    body = streams[0].accumulate()
    body["choices"] = [stream.choice() for stream in streams]
    usages = [stream.usage_object() for stream in streams]
    total = sum(usage["completion_tokens"] for usage in usages)
    body["usage"]["completion_tokens"] = total
    body["usage"]["total_tokens"] = body["usage"]["prompt_tokens"] + total
    reasoning = sum(usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0) for usage in usages)
    if reasoning:
        body["usage"]["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return body


__all__ = ["ChatStream", "data_event", "many"]
