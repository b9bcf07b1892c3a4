"""What can go wrong between two services, as one tree.

A `Refused` message is not an error: it is an answer, and `Bus.request` returns it like any other.
"""

from __future__ import annotations


class BusError(Exception):
    """Base of all errors of the bus."""


class NoResponder(BusError):
    """Nobody listens at that subject: the instance is gone. Try another one."""


class BusTimeout(BusError):
    """No answer in time. The command may or may not have been carried out: repeat it, it is idempotent."""


class Disconnected(BusError):
    """There is no connection to NATS now. Commands are refused, never kept for later."""


class Overflow(BusError):
    """Too much is waiting to be written to the socket."""


class TooLarge(BusError):
    """A message that the bus can't carry even in chunks."""

    def __init__(self, what: str, size: int, limit: int):
        self.size, self.limit = size, limit
        super().__init__(f"{what} is {size:,} bytes; the bus carries at most {limit:,}")


class StartError(Exception):
    """A service can't start. The text is one sentence for whoever started it: what is wrong, and the way out."""
