"""One attempt at a request on the decode side: what it holds, what it has said.

Knows its memory, its output and its usage. Does not know the bus. Its actor is `DecodeService`: all its events (admit,
bind, commit, cancel, tokens, expiry) are handled on one loop, each to its end, so they are in order without a queue or a
task per request.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from headrace.bus import messages as m
from headrace.engine import api

from .attempt import Phase
from .landing import Landed


@dataclass(slots=True, eq=False)
class Choice:
    """Output of one choice, kept so that a gap can be repaired. `base`: tokens that an earlier attempt gave, elsewhere."""

    base: int = 0
    ids: array = field(default_factory=lambda: array("I"))  # from token `base` on
    logprobs: list[m.TokenLogprob] | None = None
    sampled: int = 0  # tokens, those of `base` and the EOS that is not part of `ids` included
    finish: str = ""

    @property
    def end(self) -> int:
        """Index of the next token."""
        return self.base + len(self.ids)


@dataclass(slots=True, eq=False)
class Request:
    """One attempt. `key` is its name in the engine: unique per attempt."""

    key: str
    admit: m.Admit
    hashes: list[bytes]
    sampling: api.SamplingParams
    deadline: float  # time.monotonic seconds
    began: float
    promised: int  # blocks that binding will take
    phase: Phase = Phase.CREDIT
    pins: list[int] = field(default_factory=list)
    computing: bool = False  # `run` came: the prompt is computed here (`prompts.py`)
    fetched: int = 0  # of the pins, blocks that came from the kvstore
    landed: Landed | None = None  # BOUND
    choices: list[Choice] = field(default_factory=list)
    usage: m.Usage | None = None  # the prompt's part, from prefill
    keep: dict[int, int] = field(default_factory=dict)  # a text stop: tokens that count, by choice
    problem: m.Problem | None = None
    admitted: float = 0.0
    first_token: float = 0.0
    forget_at: float = 0.0

    @property
    def open_choices(self) -> int:
        return sum(not choice.finish for choice in self.choices)

    def counted(self, choice: int) -> int:
        """Tokens of a choice that count."""
        sampled = self.choices[choice].sampled
        return min(self.keep.get(choice, sampled), sampled)

    def prompt_usage(self) -> m.Usage:
        """The client's prompt, without the output that came with it."""
        usage = self.usage or m.Usage()
        prompt = self.admit.prompt_tokens - self.admit.output_tokens
        cached = min(usage.cached_tokens, prompt)
        return m.Usage(prompt, 0, cached, prompt - cached, usage.replay_rows, usage.hit_source)

    def total_usage(self) -> m.Usage:
        """Prompt part plus the tokens that count."""
        usage = self.prompt_usage()
        usage.completion_tokens = sum(map(self.counted, range(len(self.choices))))
        return usage

    def nbytes(self) -> int:
        """About what a finished request takes."""
        output = sum(4 * len(c.ids) + 100 * len(c.logprobs or ()) for c in self.choices)
        return 2048 + len(self.admit.block_hashes) + output


def sampling_params(wire: m.Sampling) -> api.SamplingParams:
    return api.SamplingParams(
        temperature=wire.temperature,
        top_p=wire.top_p,
        top_k=wire.top_k,
        min_p=wire.min_p,
        presence_penalty=wire.presence_penalty,
        frequency_penalty=wire.frequency_penalty,
        repetition_penalty=wire.repetition_penalty,
        seed=wire.seed,
        max_tokens=wire.max_tokens,
        min_tokens=wire.min_tokens,
        stop_token_ids=wire.stop_token_ids,
        ignore_eos=wire.ignore_eos,
        logprobs=wire.logprobs,
        n=wire.n,
        logit_bias=wire.logit_bias,
        prompt_logprobs=wire.prompt_logprobs,
        grammar=None if (g := wire.grammar) is None else api.Grammar(g.kind, g.text, g.after, g.optional),
    )
