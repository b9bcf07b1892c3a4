"""Registered memory and how others write into it: `shm` on one host, `tcp` between any two, behind one interface.

Knows regions, ranges, generations, connections, deadlines. Does not know blocks, tickets, requests or the bus: an address
is opaque bytes that the caller sends to whom it wants to be written by.

    memory = Memory("decode-x", kinds=("shm", "tcp"))      # the owner
    view = memory.register("kv", nbytes)                   # space is really taken now, or OutOfSpace says how to get it
    await memory.start()
    memory.arm(generation, {"kv": [(offset, nbytes)]})     # who names this generation may write there, until disarm

    peer = await connect(address, memory.incarnation, timeout=2)         # the writer
    await peer.write("kv", [(offset, buffer)], generation, deadline)
    await peer.commit("mailbox", offset, value, generation, deadline)    # flushes first

A write or read that returned or raised has let go of the caller's buffers, also when it was cancelled. Deadlines are
`time.monotonic()` seconds and never optional. All of it runs on one event loop's thread; large copies leave it.
"""

from headrace.transfer.address import Address
from headrace.transfer.errors import (
    BadRange,
    DeadlineExceeded,
    GenerationRefused,
    NoCommonKind,
    OutOfSpace,
    PeerLost,
    ShmUnavailable,
    TransferError,
)
from headrace.transfer.incarnation import is_dead
from headrace.transfer.memory import Memory
from headrace.transfer.peer import Links, Peer, connect

__all__ = [
    "Address",
    "BadRange",
    "DeadlineExceeded",
    "GenerationRefused",
    "Links",
    "Memory",
    "NoCommonKind",
    "OutOfSpace",
    "Peer",
    "PeerLost",
    "ShmUnavailable",
    "TransferError",
    "connect",
    "is_dead",
]
