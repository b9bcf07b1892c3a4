"""One choice of one request, and the step that runs many of them, as data.

Knows positions, blocks and slots of a sequence. Does not know tensors, policy or the model. The rows of a sequence are its
prompt and the tokens sampled so far; row i holds the id at position i.

    0 ......... write_floor ......... computed ......... prompt_len ......... len(ids)
      resident    (cached tokens)       next row to run     first sampled token

A request that goes on with output of another node has that in its prompt: the output then begins at `output_start`, below
`prompt_len`.

A replay begins `computed` below `write_floor`: those rows run again, and leave the paged entries alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum, auto

from .api import EngineRequest
from .batch import Segment
from .grammar import Matcher


class Status(Enum):
    WAITING = auto()  # in the queue: new, or preempted with an image
    RUNNING = auto()  # owns a slot and blocks
    PINNED = auto()  # PREFILL: computed; its blocks stay until `release`
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Image:
    """A sequence in host memory: its packed state at `position` and the bytes of its blocks (empty: no row is computed)."""

    position: int
    state: bytes
    blocks: list[bytes]

    @property
    def nbytes(self) -> int:
        return len(self.state) + sum(map(len, self.blocks))


@dataclass(slots=True)
class Draft:
    """What is proposed for a sequence's next positions, and how its drafts have fared. `speculation.py` writes it."""

    tokens: list[int] = field(default_factory=list)  # for the positions from len(ids) on
    confidence: list[float] = field(default_factory=list)  # the logits that it comes from
    survival: list[float] = field(default_factory=list)  # of each: the probability that it and all before it are accepted
    older: list[float] = field(default_factory=list)  # the same of the block before: a budget is made from these
    hope: list[float] = field(default_factory=list)  # survival averaged over its newest blocks; none yet: empty
    blocks: int = 0  # that were proposed
    seen: int = 0  # the step that proposed the newest one
    promised: float = 0.0  # of drafts verified lately, how many its confidences let expect, and how many became output
    kept: float = 0.0
    bad_steps: int = 0  # in a row, with more rejections than the gate lets pass
    closed_until: int = 0  # the step in which the gate opens again


@dataclass(slots=True, eq=False)
class Sequence:
    request: EngineRequest
    ids: list[int]
    hashes: list[bytes]  # of its full blocks, as far as they are known
    arrival: int
    choice: int = 0
    prefill_only: bool = False  # ends with its prompt's last hidden vector
    status: Status = Status.WAITING
    prompt_len: int = 0
    max_len: int = 0  # ids at most, by max_tokens and by the model
    slot: int = -1
    block_table: list[int] = field(default_factory=list)
    computed: int = 0  # rows that are computed, or will be when the steps that are planned have run, without drafts of those
    pending: int = 0  # tokens that steps under way will append to `ids`, without drafts: 0 or 1 when a step is planned
    announced: int = 0  # leading blocks that have their identity
    reported: int = 0  # leading blocks that were resident, came from elsewhere, or were reported as filled
    write_floor: int = 0
    window_floor: int = 0
    decoder_floor: int = 0
    replay_rows: int = 0
    snapshot_hit: bool = False
    chunks: int = 0  # chunks of the prompt so far
    hidden: bytes = b""  # fp32, of the last prompt row: the first token is sampled from it without running a row
    state: bytes | None = None  # of a hand-off that no step has put into the slot yet
    image: Image | None = None
    snapshot: tuple[int, bytes] | None = None  # newest state at a block boundary of the output: (position, record)
    draft: Draft = field(default_factory=Draft)
    matcher: Matcher | None = None  # of its grammar; the model's thread moves it, and it follows `ids`
    in_steps: int = 0  # plans that name it and are neither applied nor failed
    dropped: bool = False  # ended while a step runs: its result is thrown away

    @property
    def key(self) -> tuple[int, int, int]:
        """Order of service: lower first."""
        return (self.request.priority, self.arrival, self.choice)

    @property
    def name(self) -> str:
        return self.request.request

    @property
    def scored(self) -> bool:
        """Every prompt token's log-probability is wanted: all rows are computed, through all layers, from the first on."""
        return self.request.sampling.prompt_logprobs >= 0

    @property
    def prefilling(self) -> bool:
        return self.computed < self.prompt_len

    @property
    def ending(self) -> bool:
        """The steps under way end it or its prompt, whatever they say: nothing of it is left to plan."""
        return len(self.ids) + self.pending >= self.max_len or (self.prefill_only and not self.prefilling)

    @property
    def output_start(self) -> int:
        """Where the client's prompt ends. The rest of `ids` is output; what is before `prompt_len` was sampled elsewhere."""
        return self.prompt_len - self.request.output_tokens

    @property
    def output_len(self) -> int:
        return len(self.ids) - self.output_start


@dataclass(slots=True)
class Restore:
    """Give a slot its state before the rows run: a snapshot's, a hand-off's, an image's, or none."""

    sequence: Sequence
    position: int
    state: bytes | memoryview | None
    blocks: list[tuple[int, bytes]] = field(default_factory=list)  # (physical block, bytes): what a preemption had saved
    snapshot: bytes = b""  # its key, if that is what is restored


@dataclass(slots=True)
class Row:
    """A segment of one sequence and what is wanted after it."""

    sequence: Sequence
    segment: Segment
    pack: bool = False  # the packed state at segment.stop
    snapshot: bool = False  # ... is to be kept as a snapshot
    hidden: bool = False  # the last row's hidden vector as fp32 bytes
    drafts: int = 0  # so many of its last rows are drafts: they count only if they are accepted


@dataclass(slots=True)
class Sample:
    """Tokens to choose, from the outputs of `row` or, where that is None, from the sequence's handed hidden vector.

    One token, or with drafts as many as are accepted and one more: drafts[i] is proposed for position + i."""

    sequence: Sequence
    row: int | None
    position: int  # of the first token that is chosen
    drafts: list[int] = field(default_factory=list)
    late: Several[int] = ()  # the tokens before `position`, where the step before this one gives them: PENDING until it has
    most: int = 0  # drafts at most, where that step says which they are


PENDING = -1  # an id that the step before gives


@dataclass(slots=True)
class Plan:
    """One step. Carried out in this order: preempt, restore, rows, samples, propose."""

    preempt: list[Sequence] = field(default_factory=list)  # save to host memory; slot and blocks are free after the step
    fork: list[Sequence] = field(default_factory=list)  # save, but keep running: an image for the other choices
    restore: list[Restore] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    propose: list[Sequence] = field(default_factory=list)  # draft behind the token that is chosen; each is in `samples`
    rows_planned: int = 0
    draft_rows: int = 0  # of them
    budget: int = 0  # of them: drafts at most, where the step before says which they are
    unsure: dict[Sequence, int] = field(default_factory=dict)  # drafts that the step under way may accept, when this was made
    members: list[Sequence] = field(default_factory=list)  # `sequences()` when it was made
    after: Plan | None = None  # it was made while this one ran
    result: Result | None = None  # of its execution
    seconds: float = 0.0  # that it is expected to take; 0: not known
    host: float = 0.0  # seconds that it took to apply the step before, and to make this plan

    def sequences(self) -> list[Sequence]:
        """Everyone whose memory this step touches, once."""
        touched = [*self.preempt, *(r.sequence for r in self.restore), *(r.sequence for r in self.rows)]
        return list(dict.fromkeys([*touched, *(s.sequence for s in self.samples)]))


@dataclass(slots=True)
class Chosen:
    """A sampled token. logprobs: (its log-probability, the most likely (id, log-probability)), of the raw model."""

    token: int
    logprob: float = 0.0
    top: list[tuple[int, float]] | None = None
    ended: bool = False  # the grammar is complete with it: nothing may follow


@dataclass(slots=True)
class Proposal:
    """A block of drafts: confidence[i] is the logit that tokens[i] is accepted if all before it are."""

    tokens: list[int]
    confidence: list[float]


@dataclass(slots=True)
class Result:
    """What a step gave. Lists are parallel to the plan's; `failed` names sequences whose state could not be restored, `astray`
    those whose grammar can't be followed any further."""

    tokens: list[list[Chosen]] = field(default_factory=list)  # accepted drafts and one more each; empty: failed
    packed: dict[int, bytes] = field(default_factory=dict)  # index of a row -> state
    hidden: dict[int, bytes] = field(default_factory=dict)
    images: dict[Sequence, Image] = field(default_factory=dict)
    failed: dict[Sequence, str] = field(default_factory=dict)
    astray: dict[Sequence, str] = field(default_factory=dict)
    gone: set[Sequence] = field(default_factory=set)  # ended by the step before, when this one was planned: nothing was run
    scores: dict[int, list[tuple[int, float, list]]] = field(default_factory=dict)  # index of a row -> of the tokens after its
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # restore, forward, logits, sample, pack, draft; host: of its plan
