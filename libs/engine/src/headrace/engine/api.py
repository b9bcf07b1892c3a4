"""The engine as its users see it: requests in, events out.

Everything here is called from one thread (the owner's event loop, or the caller of `LLM.generate`), except `execute`, which
runs the model and may run in another thread; the two meet only at step boundaries:

    plan = engine.plan()            # owner: schedule; pure Python
    result = engine.execute(plan)   # model thread: tensors
    events = engine.apply(plan, result)   # owner: postprocess

The simulated engine (`headrace.worker.sim`) has the same methods without arithmetic and without torch, so this file imports
neither torch nor anything that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol


class Role(StrEnum):
    """PREFILL stops at a prompt's last hidden vector; DECODE and BOTH go on. One engine, so reservations work in each."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(slots=True)
class EngineConfig:
    """Sizes and policy of one engine. Checked once, by `check`."""

    role: Role | str = Role.BOTH
    num_blocks: int = 512  # of block_tokens tokens each
    max_num_seqs: int = 32  # state slots: sequences that run at the same time
    max_num_batched_tokens: int = 2048  # rows of one step
    max_model_len: int | None = None  # tokens; None: what the model and the pool can hold
    prefix_caching: bool = True
    snapshot_bytes: int = 256 << 20  # state snapshots kept in host memory
    decode_snapshots: bool = True  # also at block boundaries of an output
    swap_bytes: int = 4 << 30  # host memory for sequences that were preempted
    chunk_tokens: Sequence[int] = ()  # upper bounds of a prompt's first, second ... chunk, then from the start again: (512,)
    model_name: str = "headrace"
    # "dspark": the checkpoint's draft proposes tokens, which later steps verify; "auto": where the checkpoint has a draft.
    speculative: str = "off"
    acceptance: str = "exact"  # "exact": the same tokens as without drafts; "standard": the same distribution
    draft_budget: int | None = None  # drafts that a step verifies at most; None: as many as pay by the measured step times
    # File of the confidence head's temperatures, {"temperatures": [one a draft position]}; "none": all 1; "auto":
    # calibration.json in the checkpoint's folder, where it has one.
    draft_calibration: str = "auto"
    confidence_normed: bool | None = None  # the confidence head reads the normed hidden vector; None: as config.json says
    async_scheduling: bool = True  # a step may be planned while the one before it runs
    rollback_gate: float = 0.3  # with more drafts rejected in 3 steps running a sequence pauses, unless it pays; 1: never

    def check(self, keep_rows: int = 0) -> None:
        """ValueError names the field, its value and what it must be. keep_rows: of the model's cache (0 in class `exact`)."""
        self.role = Role(self.role)
        for name in ("num_blocks", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        least = self.max_num_seqs + max(keep_rows, 1)
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; one row of each of {self.max_num_seqs} sequences "
                f"and a prompt's last {max(keep_rows, 1)} rows need {least}: raise it, or lower max_num_seqs"
            )
        for name, choices in (("speculative", ("off", "auto", "dspark")), ("acceptance", ("exact", "standard"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose {' or '.join(map(repr, choices))}")
        if self.draft_budget is not None and self.draft_budget < 0:
            raise ValueError(f"draft_budget must be at least 0, or None; got {self.draft_budget}")
        if not 0.0 <= self.rollback_gate <= 1.0:
            raise ValueError(f"rollback_gate must be from 0 to 1; got {self.rollback_gate}")
        if any(size < 1 for size in self.chunk_tokens):
            raise ValueError(f"chunk_tokens must be at least 1 each; got {list(self.chunk_tokens)}")


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to be. The wire twin is `headrace.bus.messages.Grammar`.

    `after`: the output is free up to and with this token, and the grammar says what follows it (the end of thinking, the token
    that opens a tool call); -1: it begins with the first token. `optional`: the output may end without that token.
    """

    kind: str  # json_schema | regex | lark
    text: str  # the schema as JSON text, the regular expression, or the grammar in llguidance's Lark
    after: int = -1
    optional: bool = False


GRAMMAR_KINDS = ("json_schema", "regex", "lark")
MAX_BIASES = 1024  # tokens that one request may name in logit_bias


@dataclass(slots=True)
class SamplingParams:
    """How to choose tokens. The wire twin is `headrace.bus.messages.Sampling`."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1 none, 0 the sampled token's, k also the k most likely
    n: int = 1
    logit_bias: dict[int, float] = field(default_factory=dict)  # added to the logits of these tokens, -100 to 100
    grammar: Grammar | None = None
    prompt_logprobs: int = -1  # the same of every prompt token; told where the prompt is computed

    def check(self, vocab_size: int | None = None) -> None:
        """ValueError names the parameter, its value and its range."""
        for name, good, rule in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "at least 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0: off)"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "from 0 to 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "from -2 to 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "from -2 to 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < float("inf"), "above 0"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"from 0 to max_tokens ({self.max_tokens})"),
            ("logprobs", self.logprobs >= -1, "at least -1 (-1: none)"),
            ("n", self.n >= 1, "at least 1"),
            ("prompt_logprobs", self.prompt_logprobs >= -1, "at least -1 (-1: none)"),
        ):
            if not good:
                raise ValueError(f"{name} must be {rule}; got {getattr(self, name)}")
        if len(self.logit_bias) > MAX_BIASES:
            raise ValueError(f"logit_bias names {len(self.logit_bias)} tokens; at most {MAX_BIASES} may be named")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias of token {token} must be from -100 to 100; got {bias}")
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ValueError(f"logit_bias: token ids are from 0 to {(vocab_size or 1 << 32) - 1}; got {token}")
        if self.grammar is not None and self.grammar.kind not in GRAMMAR_KINDS:
            raise ValueError(f"a grammar's kind must be one of {', '.join(GRAMMAR_KINDS)}; got {self.grammar.kind!r}")


@dataclass(slots=True)
class ImageSpan:
    """An image in a prompt: its token at `start` and those after it all have the image id. `digest` is of the resized pixels.

    `embeddings`: little-endian rows [tokens, hidden_size] of `dtype` (float32 or bfloat16); None where no row of the span will
    be computed or replayed here."""

    start: int
    tokens: int
    digest: bytes
    embeddings: bytes | bytearray | memoryview | None = None
    dtype: str = "float32"

    @property
    def stop(self) -> int:
        return self.start + self.tokens


@dataclass(slots=True)
class EngineRequest:
    """One prompt. `hashes`: 16-byte chained hashes of its full blocks (`headrace.kv.hashing`); empty: the engine makes them."""

    request: str
    ids: Sequence[int]
    hashes: Sequence[bytes]
    sampling: SamplingParams
    namespace: bytes = b""
    priority: int = 0  # lower first
    deadline: float | None = None  # time.monotonic seconds
    prefill_only: bool = False  # role PREFILL: stop after the last row's hidden vector
    images: Sequence[ImageSpan] = ()  # in order; no other token of `ids` has the image id
    output_tokens: int = 0  # so many of the last ids are output already: an attempt elsewhere gave them, this one goes on
    first_choice: int = 0  # number of choice 0 among those of the whole request: the noise is keyed by it


def check_output(prompt_tokens: int, output_tokens: int, first_choice: int, sampling: SamplingParams) -> None:
    """ValueError names what is wrong with the output that a request begins with. `prompt_tokens`: ids in all."""
    given, most = output_tokens, sampling.max_tokens
    if given and not 0 < given < min(prompt_tokens, most):
        raise ValueError(
            f"output_tokens is {given}; of {prompt_tokens} ids and max_tokens {most} it must leave a prompt and a token to "
            "sample"
        )
    if given and sampling.n > 1:
        raise ValueError(f"output_tokens is {given} and n is {sampling.n}: each choice goes on by itself")
    if first_choice < 0:
        raise ValueError(f"first_choice must be at least 0; got {first_choice}")


@dataclass(slots=True)
class Reservation:
    """DECODE: memory taken for a hand-off, all or nothing."""

    request: str
    have: int  # leading logical blocks that were resident and are now pinned
    blocks: list[int]  # physical blocks for logical blocks have..
    slot: int


@dataclass(slots=True)
class Handoff:
    """What travels beside the paged blocks: everything decode needs to sample the first token and go on."""

    ids: Sequence[int]
    state: memoryview | bytes  # StatePool.pack(slot, len(ids))
    hidden: memoryview | bytes  # last row's normed hidden vector, fp32 little-endian
    decoder_floor: int = 0


# ------------------------------------------------------------------ events


@dataclass(slots=True)
class Tokens:
    """New tokens of one choice. `finish`: "" | "stop" | "length"."""

    request: str
    choice: int
    index: int  # position of the first id in this choice's output
    ids: list[int]
    logprobs: list[tuple[int, float, list[tuple[int, float]]]] | None = None  # (token, logprob, top)
    finish: str = ""
    stop_id: int = -1  # the id that stopped it (it is part of ids only if it is not EOS)


@dataclass(slots=True)
class BlocksFilled:
    """Full, committed blocks, now announced: (hash, physical block, parent hash)."""

    request: str
    blocks: list[tuple[bytes, int, bytes]]


@dataclass(slots=True)
class ChunkDone:
    """PREFILL: rows up to `position` are computed; blocks below position // block_tokens are final and may be sent."""

    request: str
    position: int
    block_table: list[int]


@dataclass(slots=True)
class PrefillDone:
    """PREFILL: the prompt is computed. The sequence's memory stays pinned until `release(request)`."""

    request: str
    block_table: list[int]
    handoff: Handoff
    cached_tokens: int  # prompt tokens not recomputed (replay excluded)
    computed_rows: int  # cached + computed = prompt tokens
    replay_rows: int
    snapshot_hit: bool


@dataclass(slots=True)
class PromptDone:
    """BOTH: the prompt is computed and sampling begins. The counters are those of `PrefillDone`."""

    request: str
    cached_tokens: int
    computed_rows: int
    replay_rows: int
    snapshot_hit: bool


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of prompt tokens, a chunk at a time: (token, logprob, top) of the positions from `start` on. The first
    token of a prompt has none."""

    request: str
    start: int
    logprobs: list[tuple[int, float, list[tuple[int, float]]]]


@dataclass(slots=True)
class SnapshotTaken:
    """A state snapshot at a block boundary: `key` is the chain hash of the prefix that ends there."""

    request: str
    key: bytes
    position: int
    state: bytes


@dataclass(slots=True)
class Failed:
    """This request ended by an error of the engine; its memory is already released."""

    request: str
    code: str
    message: str


Event = Tokens | BlocksFilled | ChunkDone | PrefillDone | PromptDone | PromptScores | SnapshotTaken | Failed


@dataclass(slots=True)
class EngineInfo:
    """What peers must agree on, and what routing wants to know."""

    kind: str  # "v41", "sim"
    layout_id: str
    checkpoint: str
    block_tokens: int
    block_bytes: int
    state_bytes: int
    hidden_bytes: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    model_name: str
    extra: dict[str, Any] = field(default_factory=dict)


class NoRoom(ValueError):
    """Memory is short now; the same call may work later."""


class Engine(Protocol):
    """Roles PREFILL, DECODE and BOTH are this one engine."""

    info: EngineInfo
    pool: Any  # headrace.kv.pool.BlockPool: blocks, references, hashes, quarantine
    grammars: Any | None  # headrace.engine.grammar.Grammars; None: no output here follows a grammar

    def submit(self, request: EngineRequest) -> None:
        """PREFILL/BOTH: queue a prompt. ValueError names what is wrong (too long: both numbers)."""

    def reserve(self, request: str, hashes: Sequence[bytes], prompt_tokens: int) -> Reservation | None:
        """DECODE: pin resident leading blocks, allocate the others and a state slot; None when they are not to be had now."""

    def admit(self, reservation: Reservation, handoff: Handoff, request: EngineRequest) -> None:
        """DECODE: all bytes are placed; the sequence samples its first token at the next step."""

    def abandon(self, reservation: Reservation) -> None:
        """DECODE: give the reservation's slot and resident blocks back. Its written blocks are the caller's to free or
        quarantine through `pool`, for the writer may still be writing."""

    def add_snapshot(self, key: bytes, position: int, state: bytes) -> None:
        """A snapshot fetched from elsewhere, so that a hit can restore it."""

    def release(self, request: str) -> None:
        """PREFILL: the hand-off is over; unpin. Unknown requests are ignored."""

    def cancel(self, request: str) -> bool:
        """Stop within one step and free; False if it is not here. Safe while a step is running."""

    def begun(self, request: str) -> bool:
        """PREFILL: the prompt has all the memory that it needs here; no other one can keep it from being computed."""

    def would_restore(self, hashes: Sequence[bytes], prompt_tokens: int) -> bool:
        """Whether a hit of all blocks that `hashes` names would find its state here, so that no snapshot need be fetched."""

    def first_row(self, resident: int, prompt_tokens: int) -> int:
        """The lowest row that a prompt may have to compute or replay when its `resident` leading blocks are pinned: images that
        end at or below it need no embeddings."""

    def has_work(self) -> bool:
        """Something is unfinished. It may still have to wait for memory that a peer holds: then `plan` returns None."""

    depth: int  # plans that may be unfinished at a time: 2 where a step can be planned while another runs, else 1

    def plan(self) -> Any | None:
        """The next step, or None when nothing can be planned now. Exactly one of `apply` and `fail` must follow each plan, in
        the order of the plans; they are executed in that order too, in one thread."""

    def execute(self, plan: Any) -> Any: ...

    def apply(self, plan: Any, result: Any) -> list[Event]: ...

    def fail(self, plan: Any | None, error: BaseException) -> list[Event]:
        """The step could not be executed: its requests (all, without a plan) end as Failed and their memory is free again."""

    def owners(self) -> dict[int, int]:
        """Physical block -> references, found by walking everything that holds blocks here; for `pool.check`."""

    def stats(self) -> dict[str, float]:
        """running, waiting, queued_tokens, steps, prefill_tokens_per_second, step_seconds, hit counters ..."""
