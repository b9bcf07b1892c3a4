"""OpenAI Responses: stream events and the whole response."""

import json
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..jsontext import JSONError, loads, quote
from .parser import Event, FinishReason, StreamParser
from .reply import Dialect, ReplyStream, json_string, logprob_entries, named_event

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
TOOL_SEARCH_CALL = "tool_search_call"
_INPUT_PREFIX = ("{", '"input"', ":", '"')  # white space between is allowed


class _Item(msgspec.Struct):
    """An output item in the making. `text` is what its deltas add up to."""

    kind: str
    id: str
    index: int
    fields: dict[str, Any]
    text: list[str] = []
    logprobs: list[dict[str, Any]] = []


class ResponsesStream(ReplyStream):
    """Writes response.created to response.completed: items one after the other, every event numbered.

    `echo`: the request's settings that the response repeats (`ParsedRequest.echo`); who keeps responses adds `store`,
    `previous_response_id` and `metadata` to it. `namespaces`: function names that
    stand for (namespace, name). `custom_tools`: functions that are custom tools to the client, their input raw text, and
    `tool_search` when the client searches (`ParsedRequest.custom_tools`).
    """

    protocol = "responses"

    def __init__(
        self,
        parser: StreamParser,
        id: str,
        model: str,
        created: int = 0,
        dialect: Dialect = "open",
        include_usage: bool = False,
        *,
        echo: dict[str, Any] | None = None,
        namespaces: dict[str, tuple[str, str]] | None = None,
        custom_tools: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.time,
    ):
        super().__init__(parser, id, model, created, dialect, include_usage)
        self.echo = default_echo() if echo is None else echo
        self.namespaces = namespaces or {}
        self.custom_tools = custom_tools
        self._clock = clock
        self._sequence = 0
        self._item: _Item | None = None
        self._done: list[dict[str, Any]] = []
        self._input: _CustomInput | None = None
        self._response: dict[str, Any] = {}
        self._delta_head = b""

    def accumulate(self) -> dict[str, Any]:
        return self._response

    def error(self, error: Exception) -> bytes:
        from ..errors import as_recipe_error

        failure = as_recipe_error(error)
        response = self._response = self._object("failed", None)
        response["error"] = {"code": failure.code or failure.type, "message": failure.message}
        return self._event_bytes("response.failed", {"response": response})

    def progress(self) -> dict[str, Any]:
        """The response as it stands before it is over: items that are complete."""
        return self._response or self._object("in_progress", None)

    def cancel(self) -> bytes:
        """The events that end a stream which somebody cancelled: the open item is incomplete, the response `cancelled`.
        The protocol has no event of that name; `response.incomplete` carries it."""
        closing = self._opening() + self._end("incomplete")
        self._response = self._object("cancelled", self.usage_object())
        return closing + self._event_bytes("response.incomplete", {"response": self._response})

    def _object(self, status: str, usage: dict[str, Any] | None, reason: str | None = None) -> dict[str, Any]:
        """The response object as it stands."""
        echo = self.echo
        finished = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": int(self._clock()) if finished else None,
            "content_filters": None,
            "error": None,
            "frequency_penalty": echo.get("frequency_penalty", 0.0),
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": echo["instructions"],
            "max_output_tokens": echo["max_output_tokens"],
            "max_tool_calls": None,
            "model": self.model,
            "moderation": None,
            "output": list(self._done),
            "parallel_tool_calls": True,
            "presence_penalty": echo.get("presence_penalty", 0.0),
            "previous_response_id": echo.get("previous_response_id"),
            "prompt_cache_key": None,
            "prompt_cache_retention": None,
            "reasoning": echo["reasoning"],
            "safety_identifier": None,
            "service_tier": "default",
            "store": echo.get("store", False),
            "temperature": echo["temperature"],
            "text": echo["text"],
            "tool_choice": echo["tool_choice"],
            "tools": echo["tools"],
            "top_logprobs": echo["top_logprobs"],
            "top_p": echo["top_p"],
            "truncation": "disabled",
            "usage": usage,
            "user": echo["user"],
            "metadata": echo.get("metadata", {}),
        }

    def usage_object(self) -> dict[str, Any]:
        """Usage in the words of the Responses API."""
        prompt, completion = self.usage.prompt_tokens, self.completion_tokens()
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.usage.cached_tokens},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens()},
            "total_tokens": prompt + completion,
        }

    def _event_bytes(self, name: str, fields: dict[str, Any]) -> bytes:
        """A numbered event; fields go in the order of their names where the referee has it so."""
        event = {"type": name, **fields, "sequence_number": self._sequence}
        if "text" in event:
            event["text"] = event.pop("text")
        self._sequence += 1
        return named_event(name, event)

    def _open(self) -> bytes:
        response = self._object("in_progress", None)
        created = self._event_bytes("response.created", {"response": response})
        return created + self._event_bytes("response.in_progress", {"response": response})

    # Items.

    def _begin(self, kind: str, prefix: str, fields: dict[str, Any]) -> bytes:
        """Finish the open item and add another."""
        follows_call = kind in ("function_call", "custom_tool_call", TOOL_SEARCH_CALL)
        closing = self._end("completed", follows_call)
        index = len(self._done)
        self._item = item = _Item(kind, f"{prefix}_{self.id}_{index}", index, fields)
        if kind == "reasoning":
            fields["encrypted_content"] = f"{self.id}-{index}"
        added = self._event_bytes(
            "response.output_item.added", {"item": self._item_object(item, "in_progress"), "output_index": index}
        )
        if kind in ("reasoning", "message"):
            added += self._event_bytes(
                "response.content_part.added",
                {
                    "content_index": 0,
                    "item_id": item.id,
                    "output_index": index,
                    "part": self._part(item),
                },
            )
        return closing + added

    def _item_object(self, item: _Item, status: str) -> dict[str, Any]:
        """An item as its added and done events show it."""
        text, done = "".join(item.text), status != "in_progress"
        base = {"type": item.kind, "id": item.id, "status": status}
        if item.kind == "reasoning":
            return base | {"content": [self._part(item)] if done else [], "summary": [], **item.fields}
        if item.kind == "message":
            return base | {**item.fields, "content": [self._part(item)] if done else []}
        if item.kind == TOOL_SEARCH_CALL:
            return base | {**item.fields, "arguments": (status == "completed" and _found_arguments(text)) or {}}
        return base | {**item.fields, "input" if item.kind == "custom_tool_call" else "arguments": text}

    def _part(self, item: _Item) -> dict[str, Any]:
        text = "".join(item.text)
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "annotations": [], "logprobs": list(item.logprobs), "text": text}

    def _end(self, status: str, follows_call: bool = False) -> bytes:
        """The closing events of the open item."""
        item = self._item
        if item is None:
            return b""
        events = b""
        if item.kind == "custom_tool_call":
            rest = self._input.finish()
            if rest:
                events += self._input_delta(item, rest)
        text = "".join(item.text)
        place = {"item_id": item.id, "output_index": item.index}
        if item.kind == "message" and follows_call:
            item.fields["phase"] = "commentary"
        if item.kind == "reasoning":
            events += self._event_bytes("response.reasoning_text.done", {"content_index": 0, **place, "text": text})
        elif item.kind == "message":
            events += self._event_bytes(
                "response.output_text.done",
                {
                    "content_index": 0,
                    "item_id": item.id,
                    "logprobs": list(item.logprobs),
                    "output_index": item.index,
                    "text": text,
                },
            )
        elif item.kind == "custom_tool_call":
            events += self._event_bytes("response.custom_tool_call_input.done", {"input": text, **place})
        elif item.kind == TOOL_SEARCH_CALL:
            status = "incomplete" if _found_arguments(text) is None else status
        else:
            events += self._event_bytes("response.function_call_arguments.done", {"arguments": text, **place})
        if item.kind in ("reasoning", "message"):
            events += self._event_bytes(
                "response.content_part.done",
                {
                    "content_index": 0,
                    **place,
                    "part": self._part(item),
                },
            )
        finished = self._item_object(item, status)
        self._done.append(finished)
        self._item = None
        return events + self._event_bytes("response.output_item.done", {"item": finished, "output_index": item.index})

    # Events of the parser.

    def _delta(self, kind: str, item: _Item, text: str, logprobs: list[Any] | None = None) -> bytes:
        """A text delta of the open item, written without a JSON encoder."""
        item.text.append(text)
        return self._delta_bytes(kind, item, json_string(text), logprobs)

    def _delta_bytes(self, kind: str, item: _Item, string: bytes, logprobs: list[Any] | None) -> bytes:
        content = b"" if kind in ("function_call_arguments", "custom_tool_call_input") else b'"content_index":0,'
        entries = b""
        if kind == "output_text":
            item.logprobs += logprobs or []
            entries = b'"logprobs":' + json.dumps(logprobs or [], ensure_ascii=False, separators=(",", ":")).encode() + b","
        name = f"response.{kind}.delta".encode()
        sequence, self._sequence = self._sequence, self._sequence + 1
        return b"".join(
            (
                b"event: ",
                name,
                b'\ndata: {"type":"',
                name,
                b'",',
                content,
                b'"delta":',
                string,
                b',"item_id":',
                quote(item.id).encode(),
                b",",
                entries,
                b'"output_index":%d,"sequence_number":%d}\n\n' % (item.index, sequence),
            )
        )

    def _plain_content(self, escaped: bytes) -> bytes:
        opening = b""
        if self._item is None or self._item.kind != "message":
            opening = self._begin("message", "msg", {"role": "assistant", "phase": "final_answer"})
        self._item.text.append(self.content[-1])
        return opening + self._delta_bytes("output_text", self._item, b'"' + escaped + b'"', None)

    def _plain_reasoning(self, escaped: bytes) -> bytes:
        opening = b""
        if self._item is None or self._item.kind != "reasoning":
            opening = self._begin("reasoning", "rs", {})
        self._item.text.append(self.reasoning[-1])
        return opening + self._delta_bytes("reasoning_text", self._item, b'"' + escaped + b'"', None)

    def _content(self, event: Event) -> bytes:
        opening = b""
        if self._item is None or self._item.kind != "message":
            opening = self._begin("message", "msg", {"role": "assistant", "phase": "final_answer"})
        entries = None if event.logprobs is None else logprob_entries(event.logprobs, self.parser.tokenizer)
        return opening + self._delta("output_text", self._item, event.text, entries)

    def _reasoning(self, event: Event) -> bytes:
        opening = b""
        if self._item is None or self._item.kind != "reasoning":
            opening = self._begin("reasoning", "rs", {})
        return opening + self._delta("reasoning_text", self._item, event.text)

    def _tool_start(self, event: Event) -> bytes:
        if event.name == "tool_search" and event.name in self.custom_tools:
            return self._begin(TOOL_SEARCH_CALL, "tsc", {"call_id": event.id, "execution": "client"})
        if event.name in self.custom_tools:
            self._input = _CustomInput()
            return self._begin("custom_tool_call", "ctc", {"call_id": event.id, "name": event.name})
        fields = {"call_id": event.id, "name": event.name}
        if event.name in self.namespaces:
            namespace, name = self.namespaces[event.name]
            fields |= {"name": name, "namespace": namespace}
        return self._begin("function_call", "fc", fields)

    def _tool_arguments(self, event: Event) -> bytes:
        item = self._item
        if item.kind == "function_call":
            return self._delta("function_call_arguments", item, event.text)
        if item.kind == TOOL_SEARCH_CALL:  # told whole, when it ends
            item.text.append(event.text)
            return b""
        text = self._input.push(event.text)
        return self._input_delta(item, text) if text else b""

    def _input_delta(self, item: _Item, text: str) -> bytes:
        return self._delta("custom_tool_call_input", item, text)

    def _close(self, reason: FinishReason, done: bool) -> bytes:
        incomplete = _INCOMPLETE.get(reason)
        status = "completed" if incomplete is None else "incomplete"
        self.finish_reason = reason
        closing = self._end(status)
        self._response = self._object(status, self.usage_object(), incomplete)
        return closing + self._event_bytes(f"response.{status}", {"response": self._response})


class _CustomInput:
    """The raw text inside the arguments `{"input": "..."}` as they stream; arguments of another form pass as they are."""

    def __init__(self) -> None:
        self._held = ""  # undecided prefix, or an escape that is not whole yet
        self._state = "prefix"  # then "string" and "done", or "verbatim"

    def push(self, text: str) -> str:
        """The part of the input that `text` decides."""
        if self._state == "verbatim":
            return text
        if self._state == "done":
            return ""
        self._held += text
        if self._state == "prefix":
            start = self._match_prefix()
            if start is None:
                return ""
            if start < 0:
                self._state, text, self._held = "verbatim", self._held, ""
                return text
            self._state, self._held = "string", self._held[start:]
        return self._string()

    def finish(self) -> str:
        """What was held back when the call ends."""
        held, self._held = self._held, ""
        return held if self._state == "prefix" else ""

    def _match_prefix(self) -> int | None:
        """Where the string begins; -1: these arguments have another form; None: not decided."""
        rest = self._held
        for word in _INPUT_PREFIX:
            rest = rest.lstrip(" \t\n\r")
            if not rest.startswith(word):
                return None if word.startswith(rest) else -1
            rest = rest[len(word) :]
        return len(self._held) - len(rest)

    def _string(self) -> str:
        """Decode the held JSON string up to its end or to an escape that is not whole."""
        held, at, end = self._held, 0, len(self._held)
        while at < end:
            char = held[at]
            if char == '"':
                self._state, self._held = "done", ""
                return _unescape(held[:at])
            if char == "\\":
                size = 6 if held[at + 1 : at + 2] == "u" else 2
                if at + size > end:
                    break
                if size == 6 and held[at + 2 : at + 4].lower() in ("d8", "d9", "da", "db"):
                    size = 12
                    if at + size > end:
                        break
                at += size
            else:
                at += 1
        text, self._held = held[:at], held[at:]
        return _unescape(text)


def _found_arguments(text: str) -> dict[str, Any] | None:
    """The arguments of a search; None when they are not an object."""
    try:
        value = loads(text)
    except JSONError:
        return None
    return value if isinstance(value, dict) else None


def _unescape(text: str) -> str:
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text


def default_echo() -> dict[str, Any]:
    """The echo of a request that specified nothing."""
    return {
        "instructions": None,
        "max_output_tokens": None,
        "reasoning": {"effort": None, "summary": None},
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": None},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "user": None,
    }
