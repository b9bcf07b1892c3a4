"""One prompt on its way through the gateway, as data: where its output goes, what has come, what the next attempt needs.

Knows choices, output, attempts, and how what was output already is replayed: a request that lost its worker goes on elsewhere
with its prompt and what was output of it. Does not know workers' answers, waiting or the bus: `dispatch.py` acts.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.bus import messages as m
from headrace.kv.hashing import BlockHasher

from .errors import GatewayError
from .images import Seen
from .routing import Group, Worker


class Sink(Protocol):
    """Where a request's output goes. Called synchronously, in order; must not block."""

    def tokens(self, choice: int, ids: array, logprobs: list[m.TokenLogprob] | None) -> int:
        """New tokens of a choice. -> -1, or how many tokens of the choice count, because a text stop ended it here."""

    def finish(self, choice: int, reason: str, last: bool) -> None:
        """A choice is over. `last`: all are; `end` follows, with the usage that belongs to the last one."""

    def end(self, usage: m.Usage) -> None:
        """Every choice is over, and this is what the request took."""

    def tick(self, now: float, silence: float) -> None:
        """Called now and then; a stream that was silent for so many seconds may say that it lives."""

    def flush(self) -> None:
        """Nothing more for now: what came since the last flush goes out in one write. `end` and `fail` flush too."""

    def fail(self, error: GatewayError) -> None:
        """Nothing more comes. A request ends with exactly one `end` or `fail`, unless it was shed or its task cancelled."""


class Choice:
    """One of n outputs. `ids`: its tokens so far, from whichever attempts. `kept`: tokens that count, once a text stop ended it
    here; decode goes on until it is told. `finished`: decode says that it is over, after `sampled` tokens that count.
    `resuming`: lost output is being asked for; `behind`: more of it is missing than that question was about."""

    __slots__ = ("behind", "finished", "ids", "kept", "resuming", "sampled")

    def __init__(self, ids: array | None = None) -> None:
        self.ids = array("I") if ids is None else ids
        self.kept = -1
        self.finished = False
        self.sampled = 0
        self.resuming = self.behind = False

    @property
    def next(self) -> int:
        """Index of the next token that is wanted."""
        return len(self.ids)

    @property
    def over(self) -> bool:
        """Nothing more of it is for the client."""
        return self.finished or self.kept >= 0

    @property
    def counted(self) -> int:
        """Tokens that count, as far as is known here."""
        return self.kept if self.kept >= 0 else max(self.sampled, len(self.ids))

    def carried(self) -> Choice:
        """The same for the next attempt; questions of the last one are nobody's now."""
        other = Choice(self.ids)
        other.kept, other.finished, other.sampled = self.kept, self.finished, self.sampled
        return other


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one attempt is given: the client's ids and, behind them, `output` tokens that came of them already."""

    ids: array
    hashes: list[bytes]  # of full blocks
    output: int


class Record:
    """One prompt on its way. `Dispatcher.run` takes it."""

    __slots__ = (
        "arrival", "attempt", "blind", "choices", "client_id", "deadline", "decode", "emitted", "ended", "first_choice",
        "group", "hashes", "ids", "left", "look_again", "losses", "migrations", "namespace", "open", "origin", "outcome",
        "parts", "prefill", "priority", "prompt", "prompt_usage", "queued", "received", "request", "sampling", "seconds",
        "seen", "settled", "shunned", "sink", "traceparent", "turn", "usage", "watching",
    )  # fmt: skip

    def __init__(
        self, request: str, *, sink: Sink, group: Group, ids: array, hashes: list[bytes], namespace: bytes,
        sampling: m.Sampling, seconds: float, received: float, priority: int = 0, client_id: str = "", traceparent: str = "",
    ):  # fmt: skip
        """`seconds`: until the deadline, from `received` (monotonic) on. The ids are for the bus and traces."""
        self.request, self.received = request, received
        self.sink, self.group, self.ids, self.hashes, self.namespace = sink, group, ids, hashes, namespace
        self.sampling, self.priority, self.client_id, self.traceparent = sampling, priority, client_id, traceparent
        self.seconds = seconds
        self.deadline = self.received + seconds
        self.arrival = 0  # in order of arrival here
        self.attempt = 0  # numbers every try, also refused ones
        self.losses = 0  # attempts that were accepted and then lost, since the last one that gave output
        self.migrations = 0  # attempts that went on with output
        self.first_choice = 0  # number of choice 0 in the client's request
        self.parts: list[Record] = []  # one per open choice, once several of them had to go on elsewhere
        self.shunned: frozenset[str] = frozenset()  # workers that lost it: others first
        self.origin: tuple[str, str] | None = None  # layout and checkpoint that the output is of
        self.prompt_usage: m.Usage | None = None  # the prompt's part, from the attempt that gave the first token
        self.queued = 0.0  # since when it waits in line; 0: it does not
        self.ended = False
        self.outcome: asyncio.Future[str] | None = None  # of the running attempt: "done" or "retry"
        self.prefill: Worker | None = None
        self.decode: Worker | None = None
        self.watching: tuple[str, ...] = ()
        self.turn: asyncio.Future[None] | None = None  # in the line
        self.settled = 0.0  # all text is out; decode's last word with the usage is awaited until then

        self.seen: Seen | None = None  # its images; they go with every attempt
        self.look_again: Callable[[Seen], Awaitable[None]] | None = None  # have them identified once more
        self.blind = False  # that must be done before the next attempt

        # Of the running attempt; set by `expect`.
        self.choices = [Choice() for _ in range(sampling.n)]
        self.left = self.open = sampling.n  # choices that still have output to come; that decode has not finished
        self.usage: m.Usage | None = None
        self.emitted = False  # it has given output
        self.prompt = Prompt(ids, hashes, 0)

    @property
    def place(self) -> tuple[int, int, int]:
        """In the line, lower first: by priority, then by arrival; what lost its worker comes before what came later."""
        return self.priority, self.arrival, self.first_choice

    @property
    def images(self) -> list[m.ImageSpan]:
        return self.seen.spans if self.seen else []

    @property
    def begun(self) -> bool:
        """Some attempt has given output: the next one must go on with it."""
        return self.origin is not None

    def expect(self) -> None:
        """Another attempt: from the first token on, or from behind what was output."""
        self.emitted, self.usage = False, None
        self.choices = [choice.carried() for choice in self.choices]
        if self.sampling.n == 1 and self.choices[0].ids:
            self.prompt = self._continued(self.choices[0].ids)

    def _continued(self, output: array) -> Prompt:
        """The client's prompt and what came of it, with hashes of its full blocks."""
        ids, group = self.ids + output, self.group
        hasher = BlockHasher(group.layout_id, self.namespace, group.block_tokens)
        return Prompt(ids, hasher.hashes(ids, m.image_starts(self.images)), len(output))

    def split(self, sink: Sink, number: int) -> Record:
        """The part of one choice, which goes on by itself. Its output is told to `sink`, as that of choice 0."""
        part = Record(
            f"{self.request}-{number}", sink=sink, group=self.group, ids=self.ids, hashes=self.hashes,
            namespace=self.namespace, sampling=msgspec.structs.replace(self.sampling, n=1), seconds=self.seconds,
            received=self.received, priority=self.priority, client_id=self.client_id, traceparent=self.traceparent,
        )  # fmt: skip
        part.arrival, part.first_choice, part.migrations = self.arrival, self.first_choice + number, self.migrations
        part.losses, part.shunned, part.origin = self.losses, self.shunned, self.origin
        part.seen, part.look_again, part.blind = self.seen, self.look_again, self.blind
        part.choices = [self.choices[number]]
        part.expect()
        return part

    def total_usage(self) -> m.Usage:
        """Of all attempts together, each token once: the prompt as its first attempt found it, and all that was output. After
        a text stop only what is kept counts, also where decode was quicker than the word that it should stop."""
        prompt = self.prompt_usage or self.usage or m.Usage(len(self.ids))
        told = self.usage is not None and all(choice.kept < 0 for choice in self.choices)
        output = self.usage.completion_tokens if told else sum(choice.counted for choice in self.choices)
        return msgspec.structs.replace(prompt, completion_tokens=output)

    def remaining(self) -> float:
        return self.deadline - time.monotonic()
