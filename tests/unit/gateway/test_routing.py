"""The choice of a pair: spread, affinity, load, freshness of what is known about residency."""

import asyncio
import random
from collections import Counter

import pytest

from headrace.bus import messages as m
from headrace.gateway.routing import Residency, Router


class NoBus:
    """Routing decides without a bus; only resynchronising asks."""

    def __init__(self):
        self.asked = []

    async def request(self, role, instance, verb, message, timeout=1.0, **_):
        self.asked.append((instance, message.start))
        return m.KvBlocks(1, 9, b"".join(block(n) for n in range(3)), -1)


class Peers:
    def watch(self, watcher):
        self.tell = watcher


def block(number: int) -> bytes:
    return number.to_bytes(16, "little")


def presence(role, name, **load):
    return m.Presence(role, name, name, 1, 1, "ready", m.Load(credits=64, **load), model="M", layout_id="L", checkpoint="C",
                      block_bytes=1_000_000, max_model_len=1000)  # fmt: skip


@pytest.fixture
def router():
    peers = Peers()
    made = Router(NoBus(), peers)
    made.tell = peers.tell
    for role in ("prefill", "decode"):
        for number in range(3):
            made.tell("join", presence(role, f"{role}-{number}"))
    return made


def choose(router, hashes=(), tokens=100, excluded=()):
    pair = router.choose(router.group("M"), list(hashes), tokens, set(excluded))
    return None if pair is None else (pair[0].instance, pair[1].instance)


@pytest.mark.parametrize("blocks", [0, 2])
def test_unique_prompts_spread_over_all_workers(router, blocks):
    got = Counter()
    rng = random.Random(1)
    for _ in range(1000):
        hashes = [rng.randbytes(16) for _ in range(blocks)]
        prefill, decode = router.choose(router.group("M"), hashes, 100 + 128 * blocks, set())
        router.sent(prefill, decode, hashes, 100)
        got[prefill.instance] += 1
        got[decode.instance] += 1
        router.loaded(prefill.instance, m.Load(credits=64))
        router.done(prefill)
        router.done(decode)
    assert len(got) == 6 and max(got.values()) / min(got.values()) <= 1.3


def test_equal_prefixes_meet_at_one_worker(router):
    hashes = [block(1), block(2)]
    first = choose(router, hashes, 300)
    assert all(choose(router, [block(1), block(n)], 300) == first for n in range(3, 30))


def test_what_a_worker_holds_draws_prompts_to_it(router):
    hashes = [block(n) for n in range(40)]
    router.residency.on_events(m.KvEvents("prefill-2", 1, 1, b"".join(hashes)), "")
    router.residency.on_events(m.KvEvents("decode-1", 1, 1, b"".join(hashes)), "")
    assert choose(router, hashes, 41 * 128)[1] == "decode-1", "nothing to compute or to move there"
    router.residency.on_events(m.KvEvents("decode-1", 1, 2, removed=b"".join(hashes)), "")
    assert choose(router, hashes, 41 * 128)[0] == "prefill-2"


def test_a_long_queue_outweighs_a_hit(router):
    hashes = [block(n) for n in range(40)]
    router.residency.on_events(m.KvEvents("prefill-2", 1, 1, b"".join(hashes)), "")
    router.loaded("prefill-2", m.Load(queued_tokens=100_000, tokens_per_second=20_000))
    assert choose(router, hashes, 41 * 128)[0] != "prefill-2"


def test_what_was_sent_counts_before_the_worker_says_so(router):
    group = router.group("M")
    for _ in range(3):
        prefill, decode = router.choose(group, [], 50_000, set())
        router.sent(prefill, decode, [], 50_000)
    assert {w.sent_tokens for w in group.prefills} == {50_000}


def test_own_history_holds_until_the_event_arrives(router):
    hashes = [block(n) for n in range(40)]
    group = router.group("M")
    prefill, decode = router.choose(group, hashes, 41 * 128, set())
    router.sent(prefill, decode, hashes, 0)
    assert router.residency.match([*hashes, block(99)]) == {prefill.instance: 40}


def test_excluded_avoided_and_gone(router):
    assert choose(router, excluded={"prefill-0", "prefill-1"})[0] == "prefill-2"
    assert choose(router, excluded={f"prefill-{n}" for n in range(3)}) is None
    router.avoid("decode-0")
    router.avoid("decode-1")
    assert {choose(router)[1] for _ in range(20)} == {"decode-2"}
    router.avoid("decode-2")
    assert choose(router) is not None, "all in trouble is still better than none"
    router.tell("leave", presence("decode", "decode-2"))
    assert {w.instance for w in router.group("M").decodes} == {"decode-0", "decode-1"}


def test_workers_of_another_layout_are_not_mixed_in(router):
    other = presence("decode", "decode-9")
    other.layout_id = "other"
    router.tell("join", other)
    assert all(choose(router)[1] != "decode-9" for _ in range(50))


async def test_a_gap_or_a_new_epoch_voids_what_was_known():
    bus = NoBus()
    residency = Residency(bus, lambda instance: "prefill")
    residency.on_events(m.KvEvents("p", 1, 1, block(0) + block(1)), "")
    assert residency.match([block(0), block(1)]) == {"p": 2}
    residency.on_events(m.KvEvents("p", 1, 1, block(7)), "")
    assert residency.match([block(7)]) == {}, "an old event again"
    residency.on_events(m.KvEvents("p", 1, 3, block(5)), "")
    assert residency.match([block(0)]) == {}
    await next(iter(residency._syncing.values()))
    assert bus.asked == [("p", 0)] and residency.match([block(0), block(1), block(2)]) == {"p": 3}
    residency.on_events(m.KvEvents("p", 2, 1, block(8)), "")
    assert residency.match([block(0)]) == {} and residency.match([block(8)]) == {"p": 1}
    residency.on_events(m.KvEvents("p", 2, 2, cleared=True), "")
    assert residency.match([block(8)]) == {}
    await residency.stop()


async def test_what_an_event_removed_does_not_come_back_with_an_older_page():
    """The page of a snapshot may be overtaken by events that are newer than it; or by another gap, and then it is worthless."""
    pages: list[asyncio.Future] = []

    class SlowBus:
        async def request(self, role, instance, verb, message, timeout=1.0):
            pages.append(asyncio.get_running_loop().create_future())
            return await pages[-1]

    residency = Residency(SlowBus(), lambda instance: "prefill")
    residency.on_events(m.KvEvents("p", 1, 5, block(9)), "")
    await asyncio.sleep(0)
    residency.on_events(m.KvEvents("p", 1, 6, b"", block(0)), "")
    pages[0].set_result(m.KvBlocks(1, 5, block(0) + block(1) + block(9), -1))
    await next(iter(residency._syncing.values()))
    assert residency.match([block(0)]) == {} and residency.match([block(1)]) == residency.match([block(9)]) == {"p": 1}

    residency.on_events(m.KvEvents("p", 1, 8, block(3)), "")
    await asyncio.sleep(0)
    residency.on_events(m.KvEvents("p", 1, 10, block(4)), "")
    pages[1].set_result(m.KvBlocks(1, 8, block(1) + block(3), -1))
    await asyncio.sleep(0.01)
    assert len(pages) == 3 and residency.match([block(1)]) == {}, "what was removed in event 9 is not known"
    pages[2].set_result(m.KvBlocks(1, 10, block(3) + block(4), -1))
    await next(iter(residency._syncing.values()))
    assert residency.match([block(1)]) == {} and residency.match([block(3)]) == residency.match([block(4)]) == {"p": 1}
    await residency.stop()


def test_a_worker_that_does_both_computes_its_own_prompts_only(router):
    """Three of either role, and two that do both: the latter may take hand-offs, and give none."""
    both = [f"both-{number}" for number in range(2)]
    for name in both:
        told = presence("decode", name)
        told.both = True
        router.tell("join", told)
    got, rng = Counter(), random.Random(3)
    for _ in range(1000):
        prefill, decode = router.choose(router.group("M"), [rng.randbytes(16)], 228, set())
        assert prefill is decode or prefill.instance not in both
        got[prefill is decode] += 1
        router.sent(prefill, decode, [], 228)
    assert min(got[True], got[False]) > 100
    alone = choose(router, excluded=[f"prefill-{number}" for number in range(3)])
    assert alone in {(name, name) for name in both}
    assert choose(router, excluded=[*both, *(f"prefill-{number}" for number in range(3))]) is None
