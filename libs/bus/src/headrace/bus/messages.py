"""Every message that travels on the bus, and nothing else.

Knows: field names, types, tags and who sends what to whom. Does not know: how messages are sent, retried or acted upon.

Rules that keep old and new services compatible:
  * each message is a tagged msgspec Struct in msgpack (array form: fields are positional);
  * fields are only ever appended, always with a default; a field is never renamed, retyped or removed;
  * tensors, token KV and state never appear here, only *where* they are (Ticket, Location);
  * token ids travel as little-endian u32 bytes (`pack_ids`), block hashes as concatenated 16-byte digests.

Subjects are `headrace.<role>.<instance>.<verb>`; see `subjects.py`. Names in subjects are made by Headrace itself (nuid);
what a client sent (`client_id`) is an attribute and never part of a subject.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

HASH_BYTES = 16


def pack_ids(ids) -> bytes:
    """Token ids -> little-endian u32 bytes."""
    return (ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)).tobytes()


def unpack_ids(data: bytes) -> array:
    """Little-endian u32 bytes -> array('I') of token ids."""
    out = array("I")
    out.frombytes(data)
    return out


class Message(msgspec.Struct, tag=True, array_like=True, kw_only=False, gc=False):
    """Base of everything that is sent by itself. The tag is the class name."""


class Part(msgspec.Struct, array_like=True, gc=False):
    """Base of what travels only inside a Message."""


# ---------------------------------------------------------------- shared parts


class Grammar(Part):
    """What an output has to be. Same fields and meaning as `headrace.engine.api.Grammar`."""

    kind: str  # json_schema | regex | lark
    text: str
    after: int = -1  # it begins after this token of the output; -1: with the first one
    optional: bool = False  # the output may end before it begins


class Sampling(Part):
    """How to choose tokens. Same fields and meaning as `headrace.engine.SamplingParams` (a test holds them equal)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0  # the gateway draws one when the client gave none
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int = -1  # -1: none; 0: the sampled token's; k: also the k most likely
    n: int = 1
    logit_bias: dict[int, float] = {}
    grammar: Grammar | None = None
    prompt_logprobs: int = -1  # the same as logprobs, of the prompt's tokens; whoever computes the prompt sends them (`Scores`)


class Load(Part):
    """What a worker is doing; carried in presence and in every reply that refuses, so that routing sees fresh numbers."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0  # prompt tokens still to compute
    free_blocks: int = 0
    total_blocks: int = 0
    credits: int = 0  # admissions that would be accepted now
    tokens_per_second: float = 0.0  # prefill speed, measured
    step_seconds: float = 0.0  # decode step, measured


class Problem(Part):
    """An error that a client may see. `status` is the HTTP status that fits it."""

    status: int
    code: str
    message: str


class Usage(Part):
    """Counted once, by the attempt that finished the request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt rows not recomputed, replay excluded: cached + computed = prompt
    computed_rows: int = 0  # prompt rows really computed beyond the cached prefix
    replay_rows: int = 0  # rows recomputed only to rebuild window state
    hit_source: str = ""  # "", "worker", "kvstore", "worker+snapshot", "kvstore+snapshot"


class Timing(Part):
    """Seconds spent by one leg, for the timeline."""

    queue: float = 0.0
    lookup: float = 0.0
    compute: float = 0.0
    write: float = 0.0


class ImageSpan(Part):
    """Where an image lies in a prompt, and which one it is: `digest` is of its resized pixels."""

    start: int
    tokens: int
    digest: bytes


def image_starts(images: list[ImageSpan]) -> list[tuple[int, bytes]]:
    """What hashes of blocks and the content binding of a prompt cover of its images (`headrace.kv.hashing`)."""
    return [(image.start, image.digest) for image in images]


# ---------------------------------------------------------------- refusals


class Refused(Message):
    """Any verb may be answered with this. `code`: busy | draining | mismatch | unknown | stale | invalid | full | closed."""

    code: str
    message: str
    load: Load | None = None
    retry_after: float = 0.0  # seconds


class Done(Message):
    """Plain acknowledgement."""

    state: str = ""


# ---------------------------------------------------------------- gateway -> decode


class Admit(Message):
    """`decode.<id>.admit`: take a credit for one request. Idempotent by (request, attempt). -> Admitted | Refused"""

    request: str
    attempt: int
    gateway: str
    gateway_epoch: int
    prompt_tokens: int  # ids that prefill will hand over
    block_hashes: bytes  # of the prompt's full blocks
    namespace: bytes
    sampling: Sampling
    deadline: float  # seconds left
    priority: int = 0
    client_id: str = ""
    traceparent: str = ""
    images: list[ImageSpan] = []
    output_tokens: int = 0  # of those ids, the last are output already: an earlier attempt gave them, this one goes on
    first_choice: int = 0  # number of choice 0 in the client's request, which keys its noise


class Admitted(Message):
    have: int  # leading prompt blocks that decode holds and has pinned for this attempt
    load: Load


class Cancel(Message):
    """`decode|prefill.<id>.cancel`: stop an attempt; an unknown one leaves a tombstone that refuses a later run or admit.
    `keep`: per choice, tokens that count (a text stop matched after them); missing means all. -> Done"""

    request: str
    attempt: int
    reason: str = ""  # stop | client | deadline | failed
    keep: dict[int, int] = {}


class Resume(Message):
    """`decode.<id>.resume`: send again what a gap lost, from token index `start` of `choice`. -> Resumed | Refused"""

    request: str
    attempt: int
    choice: int
    start: int


class Resumed(Message):
    entries: list[OutEntry]


# ---------------------------------------------------------------- gateway -> prefill


class Run(Message):
    """`prefill.<id>.run`: compute a prompt and hand it to `decode`. `decode.<id>.run`, of one that does both: compute the
    prompt that was admitted. Answered at once. -> Accepted | Refused"""

    request: str
    attempt: int
    gateway: str
    decode: str
    have: int
    ids: bytes
    block_hashes: bytes
    namespace: bytes
    deadline: float
    priority: int = 0
    client_id: str = ""
    traceparent: str = ""
    images: list[ImageSpan] = []
    vision: str = ""  # the instance that identified them
    prompt_logprobs: int = -1  # of Sampling


class Accepted(Message):
    load: Load


# ---------------------------------------------------------------- prefill <-> decode


class Bind(Message):
    """`decode.<id>.bind`: compute starts; allocate the missing blocks, a state slot and a slab slot, all or nothing.
    Idempotent by (request, attempt). -> Bound | Refused"""

    request: str
    attempt: int
    prefill: str
    writer: str  # incarnation of the process that will write
    prompt_tokens: int
    content: bytes  # binding of the prompt: keyed hash of ids, layout and namespace
    layout_id: str
    checkpoint: str
    draft: bool = False


class Ticket(Part):
    """Permission to write, minted by the owner of the memory for one attempt; never minted twice."""

    ticket: str
    request: str
    attempt: int
    reader: str  # owner's incarnation
    writer: str
    generation: int  # u32, unique per ticket in this incarnation
    first_block: int  # logical index of blocks[0]: equals `have` as decode knows it at bind time
    blocks: bytes  # physical block numbers in region `kv`, u32, one per missing logical block (the partial last one too)
    block_bytes: int
    slab_offset: int  # byte offset in region `slab`
    slab_bytes: int
    mailbox: int  # byte offset in region `mailbox`
    ttl: float  # seconds
    content: bytes = b""


class Bound(Message):
    ticket: Ticket
    memory: bytes  # address of the owner's memory: made and read by headrace.transfer, opaque here


class Commit(Message):
    """`decode.<id>.commit`: everything named by the ticket is placed. Idempotent; retried until the deadline. -> Verdict"""

    ticket: str
    request: str
    attempt: int
    generation: int
    nbytes: int
    slab_bytes: int
    checksums: bytes = b""  # crc32 u32 per written block, then the slab's; empty: not checked
    usage: Usage | None = None
    timing: Timing | None = None


class Verdict(Message):
    """admitted: the reader took it. stale: another generation or attempt owns the memory. unknown: no such ticket."""

    verdict: str


class WriterDone(Message):
    """`decode.<id>.writer_done`: the writer will never touch this ticket's memory again; ends a quarantine. -> Done"""

    ticket: str
    generation: int


class Fail(Message):
    """`decode.<id>.fail`, at once when a leg fails: nothing more will come for this attempt. -> Done"""

    request: str
    attempt: int
    ticket: str
    problem: Problem


class TicketStatus(Message):
    """`prefill.<id>.status`: asked by decode when a flag came without its record. -> Commit | Done(state)"""

    ticket: str


# ---------------------------------------------------------------- decode, prefill -> gateway (subject out.<gateway>)


class TokenLogprob(Part):
    token: int
    logprob: float
    top: list[tuple[int, float]] = []


class Scores(Part):
    """Log-probabilities of prompt tokens, of the positions from `start` on. A prompt's come in order, in several parts."""

    start: int
    logprobs: list[TokenLogprob]


class OutEntry(Part):
    """Tokens of one choice of one attempt. `index` is the position of the first one in the choice's output. One with `scores`
    has nothing else; it comes before the first token, from whoever computes the prompt."""

    request: str
    attempt: int
    choice: int
    index: int
    ids: bytes
    logprobs: list[TokenLogprob] | None = None
    finish: str = ""  # "" | stop | length | abort ; "stop" covers EOS and stop ids
    usage: Usage | None = None  # with the last `finish`
    problem: Problem | None = None  # ends the attempt; no token follows
    sampled: int = 0  # with `finish`: tokens of this choice that count, an EOS that is not among `ids` included
    prompt: Usage | None = None  # with the first token of the request: its prompt's part
    scores: Scores | None = None


class Out(Message):
    """One message per engine step and gateway with that step's tokens of all its streams. Also used by prefill to report
    a problem. `seq` counts per (instance, gateway)."""

    instance: str
    epoch: int
    seq: int
    entries: list[OutEntry]


# ---------------------------------------------------------------- probes and presence


class Ping(Message):
    """`<role>.<id>.ping`: sent every 250 ms to instances with work in flight. -> Pong"""

    sender: str = ""


class Pong(Message):
    instance: str
    epoch: int
    progress: int  # engine steps so far
    state: str
    load: Load


class Presence(Message):
    """`presence.<role>.<instance>`, once a second and at every change of state."""

    role: str
    instance: str
    name: str
    epoch: int  # ns of process start: orders incarnations
    seq: int
    state: str  # starting | ready | draining | stalled | stopped
    load: Load
    model: str = ""
    engine: str = ""  # "v41", "sim" ...
    layout_id: str = ""
    checkpoint: str = ""
    block_tokens: int = 128
    block_bytes: int = 0
    max_model_len: int = 0
    memory: bytes = b""  # address of this instance's memory: made and read by headrace.transfer, opaque here
    out_seq: dict[str, int] = {}  # last Out.seq per gateway
    version: str = ""
    event_seq: int = 0  # last KvEvents.seq
    http: str = ""  # URL of /health, /ready and /metrics (of the gateway: of the API)
    both: bool = False  # of a decode worker: it takes `run` and computes prompts itself
    sees: bool = False  # this model takes images


class KvEvents(Message):
    """`kv.events.<instance>`: blocks that became available or went away here. A gap in `seq` or a new `epoch` voids all."""

    instance: str
    epoch: int
    seq: int
    stored: bytes = b""  # block hashes
    removed: bytes = b""
    cleared: bool = False


class KvSnapshot(Message):
    """`<role>.<id>.blocks`: resident block hashes from `start`, one page. -> KvBlocks"""

    start: int = 0


class KvBlocks(Message):
    epoch: int
    seq: int
    hashes: bytes
    next: int  # -1: that was all


# ---------------------------------------------------------------- worker <-> kvstore


class Location(Part):
    """Where one stored object lies in the store's `arena` region."""

    offset: int
    nbytes: int
    checksum: int  # crc32
    generation: int


class KvLookup(Message):
    """`kvstore.<id>.lookup`: longest prefix of `keys` (16-byte each) that the store holds, pinned for `ttl` seconds under a
    handle; `states`: keys of snapshots, any of which may be present. -> KvFound | Refused"""

    worker: str
    namespace: bytes
    keys: bytes
    states: bytes = b""
    ttl: float = 10.0
    request: str = ""  # for whom, for the trace


class KvFound(Message):
    handle: str  # "" when nothing was found
    blocks: list[Location]
    states: list[Location | None]
    memory: bytes = b""  # address of this instance's memory: made and read by headrace.transfer, opaque here


class KvReserve(Message):
    """`kvstore.<id>.reserve`: room for new objects. Keys that are stored already get offset -1. -> KvReserved | Refused"""

    worker: str
    writer: str
    namespace: bytes
    keys: bytes
    sizes: list[int]
    kind: str = "block"  # block | state
    ttl: float = 10.0
    parents: bytes = b""  # parent hash per key (zeros: root), for leaf-first eviction
    requests: list[str] = []  # whose objects these are, for the trace


class KvReserved(Message):
    grant: str
    generation: int
    offsets: list[int]
    memory: bytes = b""  # address of this instance's memory: made and read by headrace.transfer, opaque here


class KvCommit(Message):
    """`kvstore.<id>.commit`: the objects of a grant are written; the store checks every checksum before it publishes one.
    -> KvStored | Refused"""

    grant: str
    generation: int
    checksums: list[int]


class KvStored(Message):
    stored: int
    rejected: int = 0


class KvRelease(Message):
    """`kvstore.<id>.release`: drop a lookup's pins or abandon a grant. `valid` in the answer says that the pins held until
    now, i.e. what was read is what was stored. -> KvReleased"""

    handle: str


class KvReleased(Message):
    valid: bool


# ---------------------------------------------------------------- gateway, prefill -> vision


class Working(Message):
    """Not done yet: ask again. The answer of verbs that may take long, after a while without a result."""


class Deposit(Message):
    """`vision.<id>.deposit`: room for the encoded bytes of an image, which `writer` then places out of band. -> Deposited |
    Refused"""

    request: str
    writer: str  # incarnation of the process that will write
    sender: str  # instance that is asked (verb `grant`) when the room is quarantined
    nbytes: int
    ttl: float = 10.0


class Deposited(Message):
    grant: str
    generation: int
    offset: int  # in region `intake`
    memory: bytes  # address of this instance's memory: made and read by headrace.transfer, opaque here


class Identify(Message):
    """`vision.<id>.identify`: fetch (url) or take (grant) an image, decode and resize it. Idempotent by (request, round,
    image); asked again until it is answered with -> Identified | ImageRefused | Refused; Working before that."""

    request: str
    image: int  # its number in the request
    namespace: bytes
    deadline: float  # seconds left
    detail: str = "high"
    url: str = ""
    grant: str = ""
    generation: int = 0
    checksum: int = 0  # crc32 of the bytes that were placed
    max_bytes: int = 0  # a larger one is refused
    round: int = 0  # counted up when images must be identified again
    client_id: str = ""


class Identified(Message):
    digest: bytes  # of the resized pixels
    tokens: int
    width: int  # pixels, as the encoder sees it
    height: int
    nbytes: int  # encoded, as it came


class ImageRefused(Message):
    """This image can't be used. `kind`: as `headrace.recipe.images` names causes; `retryable`: it may work later."""

    kind: str
    message: str
    retryable: bool = False


class Encode(Message):
    """`vision.<id>.encode`: write the embeddings of images into prefill's memory, under a grant. Idempotent by grant; asked
    again until it is answered with -> Encoded | Refused (unknown: the pixels are gone); Working before that."""

    request: str
    prefill: str
    namespace: bytes
    digests: list[bytes]
    tokens: list[int]
    grant: str
    generation: int
    offsets: list[int]  # in region `images`, one per digest
    row_bytes: int
    dtype: str  # float32 | bfloat16
    memory: bytes  # address of prefill's memory
    ttl: float  # seconds: the grant's life
    deadline: float  # seconds left
    client_id: str = ""


class Encoded(Message):
    """Everything that the grant names is placed. -> nothing more is written under it."""

    checksums: list[int]  # crc32 of each image's rows
    computed: int  # patches that went through the tower for this answer; 0: all came from the cache
    cached: int  # images that did


class EncodeCancel(Message):
    """`vision.<id>.cancel`: stop writing under a grant; an unknown one leaves a tombstone. -> Done when nothing is in flight"""

    grant: str


# ---------------------------------------------------------------- trace


class TraceGet(Message):
    """`<role>.<id>.trace`: events that this instance remembers of one request (server's or client's id). -> TraceEvents"""

    request: str


class TraceEvents(Message):
    events: list[dict[str, Any]]


# ---------------------------------------------------------------- gateway -> gateway


class ResponseAsk(Message):
    """`gateway.<id>.response`: do something with a response that this gateway keeps. `tenant`: whose it must be.
    `what`: get | cancel | delete. -> ResponseKept | Refused (unknown, invalid)"""

    id: str
    tenant: bytes
    what: str = "get"


class ResponseKept(Message):
    """A response as it stands. `body`: its JSON; `input`: a JSON list of the items that led to it, earlier turns included."""

    status: str
    body: bytes
    input: bytes = b""


# ---------------------------------------------------------------- faults, in tests


class Arm(Message):
    """`<role>.<id>.arm`: replace the fault points of a process that was started with `--test-faults remote`.
    -> Done | Refused"""

    faults: str


# ---------------------------------------------------------------- transport of large messages


class Chunk(Message):
    """A numbered piece of an encoded message that is larger than the server's max_payload. Made and joined by `Bus`."""

    id: str
    number: int
    total: int
    data: bytes


ANY = (
    Refused | Done | Admit | Admitted | Cancel | Resume | Resumed | Run | Accepted | Bind | Bound | Commit | Verdict
    | WriterDone | Fail | TicketStatus | Out | Ping | Pong | Presence | KvEvents | KvSnapshot | KvBlocks | KvLookup
    | KvFound | KvReserve | KvReserved | KvCommit | KvStored | KvRelease | KvReleased | TraceGet | TraceEvents | ResponseAsk
    | ResponseKept | Chunk | Working | Deposit | Deposited | Identify | Identified | ImageRefused | Encode | Encoded
    | EncodeCancel | Arm
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ANY)

encode = _encoder.encode


def decode(data: bytes) -> Message:
    """Bytes -> the message they hold. Raises msgspec.ValidationError / DecodeError on anything else."""
    return _decoder.decode(data)
