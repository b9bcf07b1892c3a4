"""What a machine wants done. The host carries effects out in the order given. Plain values without behaviour."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# ---------------------------------------------------------------- memory


@dataclass(frozen=True, slots=True)
class Arm:
    """Let the generation write its ranges (`Memory.arm`). Comes before the ticket leaves the node."""

    generation: int


@dataclass(frozen=True, slots=True)
class Disarm:
    """`Memory.disarm`: tcp places nothing more, shm writers stop at their next slice."""

    generation: int


@dataclass(frozen=True, slots=True)
class Abandon:
    """The request lets go of what was its own from the start (`Engine.abandon`: state slot, resident blocks)."""


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Both owners let go of the written blocks: `pool.release(blocks)`."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quarantine:
    """The request let go, the writer did not: `pool.quarantine(blocks, key=ticket)`."""

    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unquarantine:
    """The writer let go too: `pool.unquarantine(ticket)`."""


@dataclass(frozen=True, slots=True)
class FreeSlots:
    """Slab and mailbox slot may be given to another ticket."""


@dataclass(frozen=True, slots=True)
class FreeRoom:
    """Store: these objects (indices in the grant) are given up; their room is free."""

    objects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Store: these objects (indices in the grant) are whole; make them visible."""

    objects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Unpin:
    """Store: drop the handle's pins."""


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """Writer: nothing reads this node's copy any more (`Engine.release`)."""


# ---------------------------------------------------------------- work


@dataclass(frozen=True, slots=True)
class Admit:
    """Both halves of the gate are there: give the sequence to the engine, then feed `SlabTaken` when the slab was read."""

    record: Any


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare checksums off the loop, then feed `Verified` (owner) or `Checked` (store)."""

    record: Any


@dataclass(frozen=True, slots=True)
class CheckFence:
    """Ask `Memory.fenced(writer)`; if it says so, feed `Fenced`. Comes after `Disarm`, and again while quarantined; always the
    last of its step, so that it may be fed while effects are being carried out."""

    writer: str


@dataclass(frozen=True, slots=True)
class AskStatus:
    """Ask the writer for this ticket's status; feed its commit record as `Committed`, else `WriterStatus`."""


@dataclass(frozen=True, slots=True)
class Go:
    """The operation asked for may start."""


@dataclass(frozen=True, slots=True)
class No:
    """It may not."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopTransfers:
    """Cancel this ticket's operations that are running; each still ends with its own `WriteEnded`."""


@dataclass(frozen=True, slots=True)
class UseData:
    """Reader: what was read is what was stored: announce it."""


@dataclass(frozen=True, slots=True)
class DiscardData:
    """Reader: recompute instead; nothing that was read may be used. Nothing is in flight any more when this comes."""


# ---------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Answer:
    """Owner: verdict on a commit: admitted | stale | mismatch | pending (ask again). Ledger: unknown."""

    verdict: str


@dataclass(frozen=True, slots=True)
class Stored:
    """Store: answer all commits of this grant that wait."""

    stored: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Stale:
    """Store: refuse the commit: the grant is over."""

    message: str


@dataclass(frozen=True, slots=True)
class Valid:
    """Store: answer to a release: did the pins hold until now?"""

    valid: bool


@dataclass(frozen=True, slots=True)
class FailRequest:
    """Owner: the request can't be served by this attempt; tell its actor (who tells the gateway)."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Report:
    """Writer: tell the gateway of this problem."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SendCommit:
    """Writer: send (again) the commit; feed `CommitAnswered`."""


@dataclass(frozen=True, slots=True)
class SendFail:
    """Writer: tell the owner at once that nothing will come."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SendDone:
    """Writer: send (again) `WriterDone`; feed `DoneAnswered` when it is acknowledged."""


@dataclass(frozen=True, slots=True)
class SendRelease:
    """Reader: send (again) the release of the handle; feed `ReleaseAnswered`."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """Ledger: nobody knows this id. The host answers "unknown"."""


Effect = Any  # one of the above
