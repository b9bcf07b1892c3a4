"""Who may touch which memory until when: the four hand-off machines as pure functions.

    step(state, event, now) -> (new state, [effects])

No I/O, no clock, no memory of their own: `now` is the caller's monotonic clock in seconds, effects are plain values that
the caller carries out in order. Every (phase, event) pair is defined; an event that says nothing new changes nothing and
has no effect, so duplicates and reordering need no thought at the call site. `docs/handoff.md` is the normative table; its
rows are run as tests.

| machine  | run by                          | memory at stake                                      |
|----------|---------------------------------|------------------------------------------------------|
| `owner`  | decode, one per ticket          | blocks, slab and mailbox slot that prefill writes    |
| `writer` | prefill, one per ticket         | own blocks, pinned while they are sent               |
| `store`  | kvstore, one per write grant    | room in the arena that a worker writes               |
| `pins`   | kvstore (`held`), worker (`reading`), one per lookup | stored objects that a worker reads |

How to use one, here decode's side:

    tickets = Ledger(owner.step, owner.tick, owner.over, keep=30.0)
    effects = tickets.add(ticket_id, *owner.bind(...))
    effects = tickets.feed(ticket_id, events.Committed(...), now)       # Unknown() when nobody knows the ticket
    for ticket_id, effect in tickets.tick(now): ...                     # every turn of the loop, also when nothing is scheduled

    for effect in effects:
        match effect:
            case fx.Admit(): engine.admit(...)
            case fx.Quarantine(blocks): pool.quarantine(blocks, ticket_id)
            ...

The rule under all of it: memory that left the node has two owners, the request and the writer, and is free when both let go.
Time alone frees nothing: what expires is quarantined until the writer says that it is done, or is proven unable to write
(`events.Fenced`, from `headrace.transfer.Memory.fenced`).
"""

from headrace.kv.grants import effects, events, owner, pins, store, writer
from headrace.kv.grants.ledger import Ledger, Tombstones, Writing

__all__ = ["Ledger", "Tombstones", "Writing", "effects", "events", "owner", "pins", "store", "writer"]
