"""Everything that can go wrong when bytes move. One tree; each message names both values and the way out."""


class TransferError(Exception):
    """Base of all."""


class OutOfSpace(TransferError):
    """A region's bytes are not to be had. Raised by `register`, at start."""


class ShmUnavailable(TransferError):
    """The shared-memory directory can't be used."""


class BadRange(TransferError, ValueError):
    """A region does not exist, or a range does not lie in it."""


class GenerationRefused(TransferError):
    """The owner has not armed this generation for this range, or has disarmed it: the ticket is over."""


class PeerLost(TransferError, ConnectionError):
    """The owner is dead, closed, another incarnation, or its connection stalled and was closed."""


class NoCommonKind(TransferError):
    """The two ends share no transport."""


class DeadlineExceeded(TransferError, TimeoutError):
    """The deadline passed first. Nothing of the caller's buffers is in flight any more."""
