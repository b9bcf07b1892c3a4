"""Tickets of a decode instance, with its real memory and engine: what is told must be told of the right request."""

import time

import pytest

from headrace.bus import messages as m
from headrace.decode.landing import Landing
from headrace.kv.grants import effects, events
from headrace.transfer import Memory
from headrace.worker.sim import SimConfig, SimEngine

TTL = 1.0


@pytest.fixture
def landing():
    memory = Memory("decode-1", kinds=("tcp",))
    config = SimConfig(num_blocks=8, block_bytes=64, state_bytes=32, hidden_bytes=16)
    engine = SimEngine(config, memory.register("kv", config.num_blocks * config.block_bytes))
    told = []
    made = Landing(memory, memory.view("kv"), engine, 2, TTL, lambda landed, effect: told.append((landed, effect)))
    made.told = told
    return made


def bound(landing: Landing, now: float):
    reservation = landing.engine.reserve("r/1", [], 100)
    bind = m.Bind("r", 1, "prefill-1", "prefill-1~none~1", 100, bytes(16), "layout", "checkpoint", False)
    return landing.mint(bind, reservation, "the request", False, now)


def test_a_lease_that_ends_after_the_commit_frees_everything_and_fails_its_own_request(landing):
    """The flag never came. The slot is given back before the request is told, which must still be the right one."""
    now = time.monotonic()
    landed = bound(landing, now)
    nbytes = len(landed.reservation.blocks) * landing.block_bytes
    commit = events.Committed(landed.wire.generation, nbytes, "record")
    assert landing.feed(landed.wire.ticket, commit, now) == "pending"
    landing.tick(now + TTL)
    told = [(who.request, type(effect)) for who, effect in landing.told]
    assert told == [("the request", effects.FailRequest)]
    assert len(landing.free_slots) == 2 and landing.pool.used == landing.pool.quarantined == 0
    assert not landing.landed and not len(landing.ledger)


def test_a_lease_that_ends_before_the_commit_leaves_a_quarantine_and_fails_the_request(landing):
    """Over tcp the disarmed generation is the proof that nothing lands any more: the quarantine is over at once."""
    now = time.monotonic()
    landed = bound(landing, now)
    landing.tick(now + TTL)
    assert [type(effect) for who, effect in landing.told if who is landed] == [effects.FailRequest]
    assert landing.quarantines == 1 and landing.pool.quarantined == 0 and len(landing.free_slots) == 2
