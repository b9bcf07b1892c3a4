"""Guards taken away, one at a time: the simulation must then find a violation, or it proves nothing.

A mutation is an edit of a function's source: the text to be replaced must be there exactly once, so an edit of the code that
makes a mutation meaningless is noticed.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from memory import SimShmPeer

from headrace.bus import messages
from headrace.decode.landing import Landing
from headrace.decode.service import DecodeService
from headrace.gateway import choice, request
from headrace.gateway.legs import Legs
from headrace.gateway.output import Output
from headrace.gateway.record import Record
from headrace.gateway.routing import Residency
from headrace.kv.grants import ledger, owner, store, writer
from headrace.kvstore.objects import Objects
from headrace.prefill.service import PrefillService
from headrace.transfer.memory import Memory
from headrace.worker.kvclient import KvStoreClient
from headrace.worker.staging import Staging


@dataclass(frozen=True)
class Mutation:
    """`where.name`'s source with `old` replaced by `new`. `beside`: another guard that would hide the missing one; a violation
    counts only if there is none with that one away alone."""

    what: str
    where: Any
    name: str
    old: str
    new: str
    beside: bool = False


NO_FENCE = Mutation(
    "a writer over shm does not look whether its generation is armed", SimShmPeer, "_stale",
    "return self._fence[generation % memories.FENCE_SLOTS] != generation", "return False", beside=True,
)  # fmt: skip
NO_READ_CHECKSUMS = Mutation(
    "what was read is used whatever its checksums say", KvStoreClient, "_import", "crc32(data) == w.checksum", "True",
    beside=True,
)  # fmt: skip

MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "generation": (
        Mutation("bytes of a disarmed generation are placed (tcp)", Memory, "allows",
                 "if not armed or nbytes < 0:\n            return False", "if not armed:\n            return True"),
        Mutation("and while they arrive", Memory, "is_armed", "return generation in self._armed", "return True"),
    ),
    "tombstone": (
        Mutation("a cancel that came first is forgotten", ledger.Tombstones, "__contains__", "return key in self._until",
                 "return False"),
    ),
    "quarantine": (
        Mutation("what a writer may still write into is free at once", owner, "_let_go", "if ticket.phase == COMMITTED:",
                 "if True:"),
    ),
    "duplicate-commit": (
        Mutation("a commit that comes again is taken again", owner, "step",
                 "return ticket, [fx.Answer(_verdict(ticket))] if isinstance(event, ev.Committed) else []",
                 "return _admit(ticket) if isinstance(event, ev.Committed) else (ticket, [])"),
    ),
    "attempt": (
        Mutation("output of another attempt is taken", Output, "on_out", "elif entry.attempt != record.state.attempt:",
                 "elif False:"),
    ),
    "all-or-nothing": (
        Mutation("a bind that finds no slot keeps its blocks", DecodeService, "_take_memory",
                 "self.engine.abandon(reservation)\n            self.engine.pool.release(reservation.blocks)\n", "pass\n"),
    ),
    "writer-done": (
        Mutation("the writer says that it is done while a copy runs", writer, "_stop", "if after.in_flight:", "if False:"),
    ),
    "flag": (
        Mutation("a commit is enough, whether or not the flag was seen", owner, "_gate", "if not ticket.flag:", "if False:"),
    ),
    "record": (
        Mutation("the flag is enough, without the commit's record", owner, "_bound",
                 "return replace(ticket, flag=True, poll=now + RECORD_GRACE), []", "return _admit(replace(ticket, flag=True))"),
    ),
    "all-placed": (
        Mutation("the flag is sent before everything is placed", PrefillService, "_write_rest",
                 'await peer.write("slab", [(ticket.slab_offset, data)], ticket.generation, until)',
                 'asyncio.ensure_future(peer.write("slab", [(ticket.slab_offset, data)], ticket.generation, until))'),
    ),
    "checksums": (
        Mutation("the hand-off's checksums are not compared", owner, "_committed", "if good:", "if True:"),
    ),
    "incarnation-lock": (
        Mutation("a silent writer is taken for dead", Landing, "_carry", "if self.memory.fenced(writer):", "if True:"),
    ),
    "denied-ticket": (
        Mutation("prefill said that it would never write for a ticket, and does when its bind is answered late (where no fence "
                 "stops it)", PrefillService, "_bound", "if ticket.ticket in self.denied:", "if False:"),
        NO_FENCE,
    ),
    "index": (
        Mutation("output that came already is taken again", choice, "_came", "skip = end - index", "skip = 0"),
        Mutation("", choice, "_came", "index > end", "False"),
    ),
    "gap": (
        Mutation("lost output is not asked for", choice, "_missing", "replace(choice, asking=True), (Ask(choice.next),)",
                 "choice, ()"),
    ),
    "tail": (
        Mutation("nor is what was lost last", Output, "_check_tail", "if known == epoch and seq < sent:", "if False:"),
    ),
    "looked-at-again": (
        Mutation("an attempt that ended while its admission was awaited is run", request, "_admitted",
                 "if r.phase is not Phase.ADMITTING or event.attempt != r.attempt:", "if False:"),
    ),
    "cancel-repeated": (
        Mutation("a cancel is sent once", Legs, "_tell_cancel",
                 "if tries >= CANCEL_TRIES and time.monotonic() > until:", "if True:"),
    ),
    "older-attempt": (
        Mutation("an older attempt is admitted beside a newer one", DecodeService, "_stale",
                 "self.attempts.get(message.request, -1) > message.attempt", "False"),
    ),
    "store-quarantine": (
        Mutation("room of an expired grant is free at once", store, "tick",
                 'after = replace(grant, phase=EXPIRED, outcome="expired", poll=now + POLL)',
                 'return _free(replace(grant, outcome="expired"), [fx.Disarm(grant.generation)])'),
    ),
    "store-checksums": (
        Mutation("objects are published whatever their checksums say", store, "step",
                 "whole = tuple(index for index, fits in enumerate(good) if fits)", "whole = tuple(range(len(good)))"),
        Mutation("", store, "step", "broken = tuple(index for index, fits in enumerate(good) if not fits)", "broken = ()"),
    ),
    "denied-grant": (
        Mutation("a worker said that it would never write under a grant, and does when its reserve is answered late (where no "
                 "fence stops it)", KvStoreClient, "_write", "if answer.grant in self._denied:", "if False:"),
        NO_FENCE,
    ),
    "valid": (
        Mutation("what was read under expired pins is used (without checksums, which find it too)", KvStoreClient, "_import",
                 "valid = isinstance(released, m.KvReleased) and released.valid", "valid = True"),
        NO_READ_CHECKSUMS,
    ),
    "pins": (
        Mutation("what is being read is evicted", Objects, "_peek", "is stored and not stored.pins and not",
                 "is stored and not"),
        Mutation("", Objects, "_offer", "not stored.queued and not stored.pins and", "not stored.queued and"),
    ),
    "read-checksums": (
        Mutation("what was read is used whatever its checksums say", KvStoreClient, "_import", "crc32(data) == w.checksum",
                 "True"),
    ),
    "output-offset": (
        Mutation("what was output already is replayed as if it were the client's prompt", Legs, "admit",
                 "record.images, prompt.output, record.first_choice", "record.images, 0, record.first_choice"),
    ),
    "output-carried": (
        Mutation("the next attempt begins with the first token again", Record, "expect",
                 "[choice.carried() for choice in self.choices]", "[Choice() for choice in self.choices]"),
    ),
    "first-choice": (
        Mutation("a choice that goes on by itself is taken for the first", Record, "split", "self.first_choice + number",
                 "self.first_choice"),
    ),
    "events-gap": (
        Mutation("a gap in a worker's block events voids nothing", Residency, "on_events",
                 "if events.epoch != epoch or events.seq != seq + 1:", "if events.epoch != epoch:"),
    ),
    "image-content": (
        Mutation("hashes of blocks and the content binding say nothing of images", messages, "image_starts",
                 "(image.start, image.digest) for image in images", "(image.start, bytes(16)) for image in images"),
    ),
    "image-checksums": (
        Mutation("images and embeddings are taken whatever their checksums say", Staging, "take", "crc32(part) == sums[i]",
                 "True"),
    ),
    "image-quarantine": (
        Mutation("room of a delivery that was given up is free at once, though it may still be written", store, "step",
                 'return replace(grant, phase=EXPIRED, outcome="abandoned", poll=now + POLL), _expiry(grant)',
                 'return _free(replace(grant, outcome="abandoned"), [fx.Disarm(grant.generation)])'),
    ),
}  # fmt: skip


NO_FLIPS = ("valid",)  # the checksums are away too: looked for without wrong bytes on the way


@contextlib.contextmanager
def without(name: str, itself: bool = True) -> Iterator[None]:
    """The guard called `name` is missing while this holds; without `itself` only those beside it."""
    saved: list[tuple[Any, str, Any]] = []
    edited: dict[tuple[Any, str], str] = {}
    for mutation in [one for one in MUTATIONS[name] if itself or one.beside]:
        key = (mutation.where, mutation.name)
        source = edited.get(key) or textwrap.dedent(inspect.getsource(getattr(*key)))
        text = mutation.old
        if text not in source:  # a method's text, which is indented less here
            text = text.replace("\n            ", "\n        ")
        if (times := source.count(text)) != 1:
            raise LookupError(f"mutation {name}: {mutation.name} has {mutation.old!r} {times} times; it must be once")
        edited[key] = source.replace(text, mutation.new)
    for (where, attribute), source in edited.items():
        original = getattr(where, attribute)
        module = sys.modules[original.__module__]
        scope: dict[str, Any] = {}
        exec(compile(source, f"<{name}>", "exec"), module.__dict__ | {"__name__": module.__name__}, scope)
        saved.append((where, attribute, original))
        setattr(where, attribute, scope[attribute])
    try:
        yield
    finally:
        for where, attribute, original in saved:
            setattr(where, attribute, original)
