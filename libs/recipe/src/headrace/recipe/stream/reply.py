"""What the writers of the three protocols share: usage, logprobs, the collected reply and server-sent-event framing."""

import math
import struct
from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal

import msgspec

from ..jsontext import compact, quote
from ..tokenizer import Tokenizer
from .parser import Event, FinishReason, Logprob, StreamParser, TokenLogprob

Dialect = Literal["open", "official"]


class Usage(msgspec.Struct):
    """Token counts of one request. None: the writer takes what its parser counted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None


class ToolCallReply(msgspec.Struct):
    """A call as the reply holds it; `arguments` are the parts of its JSON."""

    id: str
    name: str
    arguments: list[str] = []

    @property
    def text(self) -> str:
        """The arguments as one text."""
        return "".join(self.arguments)


class ReplyStream:
    """Base of the writers: turns one output into the bytes of its event stream and collects the whole reply.

    `first` opens the stream, `push` takes sampled ids, `finish` ends it; each answers with bytes ready for the socket.
    `accumulate` is the body of a reply that is not streamed. `error` is the last event of a stream that failed.
    """

    protocol: ClassVar[str] = ""
    wants_logprobs: bool = False  # of the output: then an output without a token has empty lists, not null
    prompt_only: bool = False  # nothing of the output is told, nor counted

    def __init__(
        self,
        parser: StreamParser,
        id: str,
        model: str,
        created: int = 0,
        dialect: Dialect = "open",
        include_usage: bool = False,
    ):
        self.parser = parser
        self.id = id
        self.model = model
        self.created = created
        self.dialect = dialect
        self.include_usage = include_usage
        self.thinking = parser.parsing.thinking
        self.usage = Usage()
        self.finish_reason: str | None = None
        self.content: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[ToolCallReply] = []
        self.prompt_scores: list[Logprob] = []  # of the prompt's tokens; the first has none (NaN)
        self._opened = False

    def first(self, usage: Usage | None = None) -> bytes:
        """The events that open the stream; `usage` with the prompt's counts when they are known."""
        if usage is not None:
            self.usage = usage
        if self._opened:
            return b""
        self._opened = True
        return self._open()

    def push(self, ids: list[int], logprobs: list[TokenLogprob] | None = None) -> bytes:
        """The events that `ids` decide."""
        if logprobs is None and self._opened:
            plain = self.parser.push_plain(ids)
            if plain is not None:
                kind, escaped, text = plain
                if kind == "content":
                    self.content.append(text)
                    return self._plain_content(escaped)
                self.reasoning.append(text)
                return self._plain_reasoning(escaped)
        return self._opening() + self._write(self.parser.push(ids, logprobs))

    def push_text(self, text: str, tokens: int = 0) -> bytes:
        """The events that `text` decides."""
        return self._opening() + self._write(self.parser.push_text(text, tokens))

    def finish(self, reason: FinishReason = "stop", usage: Usage | None = None, done: bool = True) -> bytes:
        """The events that end the stream. `done`: also what ends the connection, where the protocol has it."""
        if usage is not None:
            self.usage = usage
        opening = self._opening()
        body = self._write(self.parser.finish(reason))
        return opening + body + self._close("stop" if self.parser.stopped is not None else reason, done)

    def accumulate(self) -> dict[str, Any]:
        """The reply as one object, after `finish`."""
        raise NotImplementedError

    def error(self, error: Exception) -> bytes:
        """A failure in mid-stream, told in the protocol's words; nothing follows it."""
        raise NotImplementedError

    def completion_tokens(self) -> int:
        """Tokens of the output."""
        counted = self.usage.completion_tokens
        return self.parser.completion_tokens if counted is None else counted

    def reasoning_tokens(self) -> int:
        """Tokens of the reasoning; the referee's figure is the reasoning text encoded again."""
        if self.usage.reasoning_tokens is not None:
            return self.usage.reasoning_tokens
        parser = self.parser
        if self.dialect == "official":
            if not (self.thinking and parser.saw_ids and parser.tokenizer):
                return 0
            return len(parser.tokenizer.encode("".join(self.reasoning)))
        return parser.reasoning_tokens

    def _opening(self) -> bytes:
        return b"" if self._opened else self.first()

    def _write(self, events: list[Event]) -> bytes:
        return b"".join([self._event(event) for event in events])

    def _event(self, event: Event) -> bytes:
        kind = event.kind
        if kind == "content":
            self.content.append(event.text)
            return self._content(event)
        if kind == "reasoning":
            self.reasoning.append(event.text)
            return self._reasoning(event)
        if kind == "tool_arguments":
            self.calls[event.index].arguments.append(event.text)
            return self._tool_arguments(event)
        if kind == "tool_start":
            self.calls.append(ToolCallReply(event.id, event.name))
            return self._tool_start(event)
        return self._tool_end(event) if kind == "tool_end" else b""

    def _tool_end(self, event: Event) -> bytes:
        return b""

    # What a protocol writes. `escaped` is the inside of a JSON string.
    def _plain_content(self, escaped: bytes) -> bytes:
        raise NotImplementedError

    def _plain_reasoning(self, escaped: bytes) -> bytes:
        raise NotImplementedError

    def _open(self) -> bytes:
        raise NotImplementedError

    def _content(self, event: Event) -> bytes:
        raise NotImplementedError

    def _reasoning(self, event: Event) -> bytes:
        raise NotImplementedError

    def _tool_start(self, event: Event) -> bytes:
        raise NotImplementedError

    def _tool_arguments(self, event: Event) -> bytes:
        raise NotImplementedError

    def _close(self, reason: FinishReason, done: bool) -> bytes:
        raise NotImplementedError


class Detailed:
    """Mixin of the two OpenAI writers that have chunks, for what clients may ask beside text.

    `running_usage` (`continuous_usage_stats`): every chunk tells the usage so far, where `include_usage` writes null.
    `prompt_ids` (`return_token_ids`), when not None: told once, as `prompt_token_ids`; and every choice has `token_ids`,
    what was sampled, without EOS, up to the token that completed a text stop. Ids whose text is held back come with the next
    chunk.
    """

    running_usage: bool = False
    prompt_ids: Sequence[int] | None = None
    prompt_in_choice: ClassVar[bool] = False  # where the protocol has `prompt_token_ids`

    def push(self, ids: Sequence[int], logprobs: list[TokenLogprob] | None = None) -> bytes:
        body = super().push(ids, logprobs)  # type: ignore[misc]
        if self.prompt_ids is not None:
            self._sampled.extend(ids)
            parser: StreamParser = self.parser  # type: ignore[attr-defined]
            if parser.stopped is not None:  # in the midst of these, maybe
                del self._sampled[parser.kept_tokens :]
        return self._detail(body)

    def finish(self, reason: FinishReason = "stop", usage: Usage | None = None, done: bool = True) -> bytes:
        return self._detail(super().finish(reason, usage, done))  # type: ignore[misc]

    def choice(self) -> dict[str, Any]:
        choice = super().choice()  # type: ignore[misc]
        if self.prompt_ids is None:
            return choice
        prompt = {"prompt_token_ids": list(self.prompt_ids)} if self.prompt_in_choice else {}
        return choice | prompt | {"token_ids": self._sampled}

    def accumulate(self) -> dict[str, Any]:
        body = super().accumulate()  # type: ignore[misc]
        if self.prompt_ids is None or self.prompt_in_choice:
            return body
        return body | {"prompt_token_ids": list(self.prompt_ids)}

    @cached_property
    def _sampled(self) -> list[int]:
        return []

    _told = -1  # of the sampled ids; -1: not even the prompt's

    def _detail(self, data: bytes) -> bytes:
        # Quotes inside of JSON strings are escaped, so these bytes are found where they mean what they say.
        if self.running_usage:
            usage = compact(self.usage_object()).encode()  # type: ignore[attr-defined]
            data = data.replace(b',"usage":null}\n\n', b',"usage":' + usage + b"}\n\n")
        reason = data.rfind(b'"finish_reason":') if self.prompt_ids is not None else -1
        if reason < 0:
            return data
        fields: dict[str, Any] = {"token_ids": self._sampled[max(self._told, 0) :]}
        if self._told < 0:
            prompt = {"prompt_token_ids": list(self.prompt_ids)}  # type: ignore[arg-type]
            if self.prompt_in_choice:
                fields |= prompt
            else:
                data = data.replace(b"data: {", b"data: " + compact(prompt)[:-1].encode() + b",", 1)
                reason = data.rfind(b'"finish_reason":')
        self._told = len(self._sampled)
        end = data.index(b"}]", reason)
        return data[:end] + b"," + compact(fields)[1:-1].encode() + data[end:]


def data_event(value: Any) -> bytes:
    """An unnamed server-sent event."""
    return b"data: " + compact(value).encode() + b"\n\n"


def named_event(name: str, value: Any) -> bytes:
    """A named server-sent event."""
    return f"event: {name}\ndata: {compact(value)}\n\n".encode()


def logprob_entries(logprobs: list[Logprob], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Logprobs as the OpenAI protocols show them, rounded to binary32; bytes that are not UTF-8 are spelled \\xNN."""
    return [
        {
            **_token_entry(token_id, logprob, tokenizer),
            "top_logprobs": [_token_entry(other, value, tokenizer) for other, value in top],
        }
        for token_id, logprob, top in logprobs
    ]


def prompt_logprobs(scores: list[Logprob], most: int, tokenizer: Tokenizer) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: per prompt token an object of token ids, its own and the `most` likeliest; null for the first.
    `rank` is 1 for the likeliest, and null for a token that is not among those that were asked for."""
    out: list[dict[str, Any] | None] = [None]
    for token, logprob, top in scores[1:]:
        entries = {token: (logprob, None)} | {other: (value, rank) for rank, (other, value) in enumerate(top[:most], 1)}
        out.append(
            {
                str(other): {"logprob": float32(value), "rank": rank, "decoded_token": token_text(tokenizer.token_bytes(other))}
                for other, (value, rank) in entries.items()
            }
        )
    return out


def float32(value: float) -> float | None:
    """`value` rounded to binary32, as the shortest decimal that reads back to it; None when it is not finite."""
    if not math.isfinite(value):
        return None
    exact = struct.pack("f", value)
    for digits in (6, 7, 8):
        short = float(f"{value_of(exact):.{digits}g}")
        if struct.pack("f", short) == exact:
            return short
    return float(f"{value_of(exact):.9g}")


def value_of(packed: bytes) -> float:
    """The binary32 number in four bytes."""
    return struct.unpack("f", packed)[0]


def token_text(data: bytes) -> str:
    """The text of a token, or its bytes as \\xNN when they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{byte:02x}" for byte in data)


def _token_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {"token": token_text(data), "logprob": float32(logprob), "bytes": list(data)}


def json_string(text: str) -> bytes:
    """`text` as a JSON string."""
    return quote(text).encode()
