"""One prompt on its way through the gateway, as data: where its output goes, what has come, what the next attempt needs.

Knows its prompt and output, and how what was output already is replayed: a request that lost its worker goes on elsewhere with
its prompt and what was output of it. Does not know what happens next: `state` and `choices` belong to the machines in
`request.py` and `choice.py`, and `dispatch.py` acts.
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

from .choice import Choice
from .errors import GatewayError
from .images import Seen
from .request import Phase, Request
from .routing import Group, Worker


class Sink(Protocol):
    """Where a request's output goes. Called synchronously, in order; must not block."""

    def tokens(self, choice: int, ids: array, logprobs: list[m.TokenLogprob] | None) -> int:
        """New tokens of a choice. -> -1, or how many tokens of the choice count, because a text stop ended it here."""

    def scores(self, first: int, scores: list[m.TokenLogprob]) -> None:
        """Log-probabilities of the prompt's tokens behind `first`, before any output, where they were asked for."""

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one attempt is given: the client's ids and, behind them, `output` tokens that came of them already."""

    ids: array
    hashes: list[bytes]  # of full blocks
    output: int


class Record:
    """One prompt on its way. `Dispatcher.run` takes it."""

    __slots__ = (
        "arrival", "asked", "choices", "client_id", "deadline", "done", "first_choice", "group", "hashes", "ids", "look",
        "look_again", "namespace", "origin", "outputs", "pair", "parts", "priority", "prompt", "prompt_usage", "received",
        "repeated", "request", "resident", "sampling", "scores", "scores_of", "seen", "sink", "slot", "state", "traceparent",
        "usage",
    )  # fmt: skip

    def __init__(
        self, request: str, *, sink: Sink, group: Group, ids: array, hashes: list[bytes], namespace: bytes,
        sampling: m.Sampling, seconds: float, received: float, priority: int = 0, client_id: str = "", traceparent: str = "",
    ):  # fmt: skip
        """`seconds`: until the deadline, from `received` (monotonic) on. The ids are for the bus and traces."""
        self.request, self.received = request, received
        self.sink, self.group, self.ids, self.hashes, self.namespace = sink, group, ids, hashes, namespace
        self.sampling, self.priority, self.client_id, self.traceparent = sampling, priority, client_id, traceparent
        self.deadline = received + seconds
        self.state = Request(self.deadline, seconds, sampling.n, sampling.n, sampling.n)
        self.done: asyncio.Future[None] | None = None  # set when it is over, while somebody waits for that
        self.arrival = 0  # in order of arrival here
        self.slot = ""  # in the line
        self.pair: tuple[Worker, Worker] | None = None  # prefill and decode of the attempt under way
        self.asked = 0.0  # when its last admission or run was sent
        self.first_choice = 0  # number of choice 0 in the client's request
        self.parts: list[Record] = []  # one per open choice, once several of them had to go on elsewhere
        self.origin: tuple[str, str] | None = None  # layout and checkpoint that the output is of
        self.prompt_usage: m.Usage | None = None  # the prompt's part, from the attempt that gave the first token
        self.usage: m.Usage | None = None  # of the attempt under way
        self.resident = -1  # tokens of the prompt that some worker held when it first went to any; -1: not yet
        self.repeated = False  # an attempt before this one may have computed some of the prompt

        self.seen: Seen | None = None  # its images; they go with every attempt
        self.look_again: Callable[[Seen], Awaitable[None]] | None = None  # have them identified once more
        self.look: asyncio.Task | None = None  # of that

        self.scores: list[m.TokenLogprob] = []  # of the prompt's tokens from the second on, as far as they came
        self.scores_of = 0  # the attempt that they are of
        self.choices = [Choice() for _ in range(sampling.n)]
        self.outputs = [array("I") for _ in range(sampling.n)]  # their tokens so far, from whichever attempts
        self.prompt = Prompt(ids, hashes, 0)

    @property
    def attempt(self) -> int:
        return self.state.attempt

    @property
    def over(self) -> bool:
        return self.state.phase is Phase.OVER

    @property
    def place(self) -> tuple[int, int, int]:
        """In the line, lower first: by priority, then by arrival; what lost its worker comes before what came later."""
        return self.priority, self.arrival, self.first_choice

    @property
    def images(self) -> list[m.ImageSpan]:
        return self.seen.spans if self.seen else []

    @property
    def wants_scores(self) -> bool:
        """The attempt that gives the first token gives the prompt's log-probabilities too."""
        return self.sampling.prompt_logprobs >= 0 and not self.state.begun

    @property
    def wanted(self) -> m.Sampling:
        """What the next attempt is asked for."""
        if self.sampling.prompt_logprobs < 0 or self.wants_scores:
            return self.sampling
        return msgspec.structs.replace(self.sampling, prompt_logprobs=-1)

    @property
    def lacks_scores(self) -> bool:
        come = len(self.scores) if self.scores_of == self.attempt else 0
        return self.wants_scores and come < len(self.ids) - 1

    def add_scores(self, part: m.Scores) -> None:
        """Of the attempt under way. What comes twice, or behind a part that was lost, is nothing."""
        if self.scores_of != self.attempt:
            self.scores_of, self.scores = self.attempt, []
        if part.start == len(self.scores) + 1:
            self.scores += part.logprobs

    def as_it_came(self, usage: m.Usage) -> m.Usage:
        """What the client is told of its prompt: what an earlier attempt of this request left behind was not cached when it
        came. Residency is what workers say that they hold: of a prefix that only the kvstore held it knows nothing."""
        if not self.repeated or usage.cached_tokens <= max(0, self.resident):
            return usage
        cached = max(0, self.resident)
        source = usage.hit_source if cached else ""
        return msgspec.structs.replace(
            usage, cached_tokens=cached, computed_rows=usage.prompt_tokens - cached, hit_source=source
        )

    def expect(self) -> None:
        """Output of another attempt: from the first token on, or from behind what was output."""
        self.usage = None
        self.choices = [choice.carried() for choice in self.choices]

    def replay(self) -> None:
        """What was output belongs to the prompt of the next attempt."""
        if self.sampling.n == 1 and self.outputs[0]:
            self.prompt = self._continued(self.outputs[0])

    def _continued(self, output: array) -> Prompt:
        """The client's prompt and what came of it, with hashes of its full blocks."""
        ids, group = self.ids + output, self.group
        hasher = BlockHasher(group.layout_id, self.namespace, group.block_tokens)
        return Prompt(ids, hasher.hashes(ids, m.image_starts(self.images)), len(output))

    def split(self, sink: Sink, number: int) -> Record:
        """The part of one choice, which goes on by itself. Its output is told to `sink`, as that of choice 0."""
        part = Record(
            f"{self.request}-{number}", sink=sink, group=self.group, ids=self.ids, hashes=self.hashes,
            namespace=self.namespace, sampling=msgspec.structs.replace(self.sampling, n=1), seconds=self.state.seconds,
            received=self.received, priority=self.priority, client_id=self.client_id, traceparent=self.traceparent,
        )  # fmt: skip
        part.arrival, part.first_choice, part.origin = self.arrival, self.first_choice + number, self.origin
        part.state, part.seen, part.look_again = self.state.part(), self.seen, self.look_again
        part.choices, part.outputs = [self.choices[number]], [self.outputs[number]]
        part.replay()
        return part

    def total_usage(self) -> m.Usage:
        """Of all attempts together, each token once: the prompt as its first attempt found it, and all that was output. After
        a text stop only what is kept counts, also where decode was quicker than the word that it should stop."""
        prompt = self.prompt_usage or self.as_it_came(self.usage or m.Usage(len(self.ids)))
        told = self.usage is not None and all(choice.kept < 0 for choice in self.choices)
        output = self.usage.completion_tokens if told else sum(choice.counted for choice in self.choices)
        return msgspec.structs.replace(prompt, completion_tokens=output)

    def remaining(self) -> float:
        return self.deadline - time.monotonic()
