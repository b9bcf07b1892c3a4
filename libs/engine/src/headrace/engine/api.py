"""The engine as its users see it: requests in, events out.

Everything here is called from one thread (the owner's event loop, or the caller of `LLM.generate`), except `execute`, which runs
the model and may run in another thread; the two meet only at step boundaries:

    plan = engine.plan()            # owner: schedule; pure Python
    result = engine.execute(plan)   # model thread: tensors
    events = engine.apply(plan, result)   # owner: postprocess

The simulated engine (`headrace.worker.sim`) has the same methods without arithmetic and without torch, so this file imports
neither torch nor anything that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


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


@dataclass(slots=True)
class EngineRequest:
    """One prompt. `hashes`: 16-byte chained hashes of its full blocks (see `headrace.kv.hashing`)."""

    request: str
    ids: Sequence[int]
    hashes: Sequence[bytes]
    sampling: SamplingParams
    namespace: bytes = b""
    priority: int = 0  # lower first
    deadline: float | None = None  # time.monotonic seconds
    prefill_only: bool = False  # role PREFILL: stop after the last row's hidden vector


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


Event = Tokens | BlocksFilled | ChunkDone | PrefillDone | SnapshotTaken | Failed


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


class Engine(Protocol):
    """Roles PREFILL, DECODE and BOTH are this one engine."""

    info: EngineInfo
    pool: Any  # headrace.kv.pool.BlockPool: blocks, references, hashes, quarantine

    def submit(self, request: EngineRequest) -> None:
        """PREFILL/BOTH: queue a prompt. ValueError names what is wrong (too long: both numbers)."""

    def reserve(self, request: str, hashes: Sequence[bytes], prompt_tokens: int) -> Reservation | None:
        """DECODE: pin resident leading blocks, allocate the others and a state slot; None when they are not to be had now."""

    def admit(self, reservation: Reservation, handoff: Handoff, request: EngineRequest) -> None:
        """DECODE: all bytes are placed; the sequence samples its first token at the next step."""

    def abandon(self, reservation: Reservation) -> None:
        """DECODE: give the reservation's slot and resident blocks back. Its written blocks are the caller's to free or quarantine
        through `pool`, for the writer may still be writing."""

    def add_snapshot(self, key: bytes, position: int, state: bytes) -> None:
        """A snapshot fetched from elsewhere, so that a hit can restore it."""

    def release(self, request: str) -> None:
        """PREFILL: the hand-off is over; unpin. Unknown requests are ignored."""

    def cancel(self, request: str) -> bool:
        """Stop within one step and free; False if it is not here. Safe while a step is running."""

    def has_work(self) -> bool: ...

    def plan(self) -> Any | None: ...

    def execute(self, plan: Any) -> Any: ...

    def apply(self, plan: Any, result: Any) -> list[Event]: ...

    def stats(self) -> dict[str, float]:
        """running, waiting, queued_tokens, steps, prefill_tokens_per_second, step_seconds, hit counters ..."""
