"""The output of one HTTP request on its way to the client: tokens in, bytes out.

Joins dispatchers' `Sink`s with an `Exchange`: recipe's streams turn ids into events, one stream per choice; `Reply`
keeps them in order and writes them, or collects them when the client wants one answer. A request with several prompts
has one `Part` per prompt.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable

import msgspec

from headrace.bus import messages as m
from headrace.recipe.jsontext import compact
from headrace.recipe.stream import ReplyStream, ResponsesStream, Usage

from .errors import GatewayError
from .exchange import Exchange


class Reply:
    """All parts of an answer. `collect(streams, usage)` makes the body of an answer that is not streamed; None: it is
    streamed."""

    __slots__ = (
        "buffer",
        "collect",
        "dialect",
        "exchange",
        "failed",
        "first_token",
        "on_failure",
        "open",
        "over",
        "parts",
        "protocol",
        "streams",
        "usage",
    )

    def __init__(self, exchange: Exchange, streams: list[ReplyStream], protocol: str, dialect: str,
                 collect: Callable[[list[ReplyStream], m.Usage], dict] | None, parts: int = 1):  # fmt: skip
        self.exchange, self.streams, self.protocol, self.dialect, self.collect = exchange, streams, protocol, dialect, collect
        self.failed: GatewayError | None = None
        self.usage: m.Usage | None = None  # of all parts, once everything is over
        self.first_token = 0.0
        self.on_failure: Callable[[], None] = lambda: None
        self.over: Callable[[ReplyStream, array], None] | None = None  # a choice went well: its writer and its ids
        self.buffer: list[bytes] = []
        self.open = self.parts = parts

    def part(self, number: int) -> Part:
        """The sink of one prompt."""
        width = len(self.streams) // self.parts
        return Part(self, number, self.streams[number * width : (number + 1) * width])

    def part_ended(self, usage: m.Usage, last: ReplyStream, reason: str) -> None:
        total = self.usage or m.Usage()
        self.usage = m.Usage(
            total.prompt_tokens + usage.prompt_tokens, total.completion_tokens + usage.completion_tokens,
            total.cached_tokens + usage.cached_tokens, total.computed_rows + usage.computed_rows,
            total.replay_rows + usage.replay_rows, usage.hit_source,
        )  # fmt: skip
        self.open -= 1
        counted = Usage(self.usage.prompt_tokens, self.usage.cached_tokens, self.usage.completion_tokens)
        self.buffer.append(last.finish(reason, counted, done=not self.open))
        if self.open:
            self.flush()
        elif self.collect is None:
            self.exchange.close(b"".join(self.buffer))
        elif not self.exchange.opened:
            if len(self.streams) > 1:  # each choice counts its own; the whole is the workers' figure
                for stream in self.streams:
                    stream.usage = Usage(self.usage.prompt_tokens, self.usage.cached_tokens)
            self.exchange.answer(200, compact(self.collect(self.streams, self.usage)).encode())

    def fail(self, error: GatewayError) -> None:
        """Before the status line: an error answer. After it: an error event, then the end of the stream."""
        if self.failed is not None:
            return
        self.failed = error
        self.on_failure()
        if not self.exchange.opened:
            self.exchange.fail(error, self.protocol, self.dialect)
        elif not self.exchange.closed:
            self.exchange.close(b"".join(self.buffer) + self.streams[0].error(error))

    def cancel(self) -> None:
        """Somebody who knows the response's id wants no more of it: it ends here, and the client is told what there was."""
        stream = self.streams[0]
        if self.exchange.closed or not isinstance(stream, ResponsesStream):
            return
        self.on_failure()
        last = stream.cancel()
        if self.collect is None:
            self.exchange.close(b"".join(self.buffer) + last)
        else:
            self.exchange.answer(200, compact(stream.accumulate()).encode())

    def flush(self) -> None:
        if self.collect is None:
            self.exchange.send(b"".join(self.buffer))
        self.buffer.clear()


class Part:
    """A `Sink`: the output of one prompt."""

    __slots__ = ("_ids", "_last", "_number", "_reply", "_streams", "first")

    def __init__(self, reply: Reply, number: int, streams: list[ReplyStream]):
        self._reply, self._number, self._streams = reply, number, streams
        self.first = number == 0
        self._last: tuple[int, str] = (0, "stop")
        self._ids = self._no_ids()

    def tokens(self, choice: int, ids: array, logprobs: list[m.TokenLogprob] | None) -> int:
        stream, reply = self._streams[choice], self._reply
        if not reply.first_token:
            reply.first_token = time.monotonic()
        if stream.prompt_only:
            reply.buffer.append(stream.first())
            return -1
        parser = stream.parser
        entries = None if logprobs is None else [(entry.logprob, entry.top) for entry in logprobs]
        if entries and parser.parsing.stop_sequences:
            # An event tells the log-probabilities of its whole chunk, and what a step gave behind the stop must not be told.
            for token_id, entry in zip(ids, entries, strict=True):
                reply.buffer.append(stream.push([token_id], [entry]))
                if parser.finished:
                    break
        else:
            reply.buffer.append(stream.push(ids, entries))
        if self._ids:
            self._ids[choice] += ids
            if parser.stopped is not None:
                del self._ids[choice][parser.kept_tokens :]
        return -1 if parser.stopped is None else parser.kept_tokens

    def scores(self, first: int, scores: list[m.TokenLogprob]) -> None:
        entries = [(first, math.nan, []), *((entry.token, entry.logprob, entry.top) for entry in scores)]
        for stream in self._streams:
            stream.prompt_scores = entries

    def finish(self, choice: int, reason: str, last: bool) -> None:
        reason = "length" if self._streams[choice].prompt_only else reason
        if last:
            self._last = (choice, reason)
        else:
            self._reply.buffer.append(self._streams[choice].finish(reason, done=False))
            self._over(choice)

    def end(self, usage: m.Usage) -> None:
        choice, reason = self._last
        if self._streams[choice].prompt_only:
            usage = msgspec.structs.replace(usage, completion_tokens=0)
        self._reply.part_ended(usage, self._streams[choice], reason)
        self._over(choice)

    def fail(self, error: GatewayError) -> None:
        self._reply.fail(error)

    def flush(self) -> None:
        self._reply.flush()

    def tick(self, now: float, silence: float) -> None:
        self._reply.exchange.comment(now, silence)

    def _no_ids(self) -> list[array]:
        """Per choice what was sampled, when somebody wants it."""
        return [array("I") for _ in self._streams] if self._reply.over is not None else []

    def _over(self, choice: int) -> None:
        if self._reply.over is not None:
            self._reply.over(self._streams[choice], self._ids[choice])
