"""What can happen to a grant. Plain values; each says who tells it to the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Renewed:
    """Owner: the bind came again (it is idempotent and renews). Writer: the renewal was answered; `expires` counts from when
    the request was *sent*, less a guard."""

    expires: float


@dataclass(frozen=True, slots=True)
class FlagSeen:
    """Owner: the mailbox scan found `value`."""

    value: int


@dataclass(frozen=True, slots=True)
class Committed:
    """Owner and store: the commit message. `record` is whatever the host wants back in `Admit` or `Verify`."""

    generation: int
    nbytes: int = 0
    record: Any = None


@dataclass(frozen=True, slots=True)
class Verified:
    """Owner: the checksums were compared, off the loop."""

    good: bool


@dataclass(frozen=True, slots=True)
class Checked:
    """Store: per object, whether its checksum fits."""

    good: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class WriterDone:
    """Owner and store: the writer said that it will never touch this memory again."""

    generation: int


@dataclass(frozen=True, slots=True)
class WriterStatus:
    """Owner and store: the writer answered a status question: "writing", or "done" (it will not write; also when it knows no
    such ticket)."""

    state: str


@dataclass(frozen=True, slots=True)
class WriterFailed:
    """Owner: the fail message."""

    code: str = "failed"
    message: str = ""


@dataclass(frozen=True, slots=True)
class WriterLost:
    """Owner: probes say that the writer's process is gone. That is no proof: it may be stopped."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """Owner and store: proof that no byte of this writer can land under a disarmed generation. Never to be told before the
    machine has asked with `CheckFence`: before the disarm it proves nothing."""


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Owner, writer, reader: the request does not want it any more (client gone, deadline, the other leg failed)."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class SlabTaken:
    """Owner, after `Admit`: the engine needs the slab slot no more (unpacked, failed or cancelled)."""


@dataclass(frozen=True, slots=True)
class WriteBegins:
    """Writer: the host wants to start one transfer operation. The answer is the effect `Go` or `No`."""


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """Writer: that operation has returned or raised, so nothing of it is in flight. `error`: "" when all is well."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class Placed:
    """Writer: everything is written and flushed and the flag is set (all operations have ended)."""


@dataclass(frozen=True, slots=True)
class LegFailed:
    """Writer: the engine or something else on this side failed."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class CommitAnswered:
    """Writer: the owner's verdict: admitted | stale | unknown | mismatch | pending."""

    verdict: str


@dataclass(frozen=True, slots=True)
class DoneAnswered:
    """Writer: the owner acknowledged `WriterDone`."""


@dataclass(frozen=True, slots=True)
class OwnerLost:
    """Writer, reader: the owner's process is gone for good (its incarnation is dead or has left)."""


@dataclass(frozen=True, slots=True)
class Released:
    """Store: the worker gives the grant up, or the reader its pins."""


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """Pins: the reader's process is proven dead or has left."""


@dataclass(frozen=True, slots=True)
class ReadBegins:
    """Reader: wants to copy. The answer is `Go` or `No`."""


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """Reader: the copy has ended; `good`: it succeeded and every checksum fits."""

    good: bool


@dataclass(frozen=True, slots=True)
class ReleaseAnswered:
    """Reader: the store says whether the pins held until now."""

    valid: bool
