"""Schedules that once failed, written out: they hold whatever `schedule.draw` makes of a seed later."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from runner import simulate
from schedule import PROBES, Config, Hurt, Message, Plan, Request, Span, When, shrunk
from simulated import installed, lenient


def config(**other) -> Config:
    usual = {
        "counts": {"gateway": 1, "prefill": 1, "decode": 1, "kvstore": 0}, "transports": ["shm"], "decode_blocks": 24,
        "prefill_blocks": 24, "max_num_seqs": 8, "slab_slots": 2, "chunk": 256, "checksums": False, "ticket_seconds": 1.0,
        "store_seconds": 1.0, "store_objects": 400, "queue_seconds": 20.0, "prefill_seconds": 0.0005, "step_seconds": 0.01,
        "tick_seconds": 0.05, "latency": 0.0005, "overtake": 0.0,
    }  # fmt: skip
    return Config(**usual | other)


FOUND = {
    "a flag that never comes fails its request and frees its slot": Plan(
        14, config(), (Request(0.05, 363, 1), Request(0.08, 143, 0)), (Message("Flag", 1, "drop"),), PROBES
    ),
    "a client that leaves while the bus is down gives its credit back": Plan(
        86, config(), (Request(0.635, 134, 1, cancel_after=0.368),),
        (Span("bus down", 0.782, 0.554), Hurt("cut mute", "decode", 0, 0.456, 0.442)),
    ),
    "a request that the bus was down for too long gives its credit back": Plan(
        87, config(), (Request(0.635, 134, 1),), (Span("bus down", 0.637, 12.0), When("Admitted", 1, "sender", "stop", 0.1)),
    ),
    "an admit that was refused holds nothing when it comes once more": Plan(
        9002236, config(decode_blocks=8, slab_slots=0, step_seconds=0.03, tick_seconds=0.02),
        (Request(0.515, 135, 0, max_tokens=8, stream=False, cancel_after=0.153),
         Request(0.163, 234, 0, max_tokens=8, stream=False), Request(0.393, 464, 1, max_tokens=8, stream=False),
         Request(0.266, 212, 0, max_tokens=8, stream=False)),
        (Message("Admit", 5, "double"),),
    ),
    "a delivery of embeddings that is cancelled before its first step is over": Plan(
        9005245, config(counts={"gateway": 1, "prefill": 1, "decode": 1, "kvstore": 0, "vision": 1}, transports=["shm", "tcp"],
                        slab_slots=0, chunk=128, ticket_seconds=0.5, prefill_seconds=0.001, tick_seconds=0.02,
                        queue_seconds=1.0),
        (Request(0.391, 158, 0, max_tokens=8, stream=False, cancel_after=0.257, images=(3, 3)),),
        (Message("Encode", 1, "delay", 0.258), When("Encode", 1, "receiver", "stop", 1.931)),
    ),
    "bytes of an image that are announced after their grant expired end its quarantine": Plan(
        12009808, config(counts={"gateway": 1, "prefill": 1, "decode": 2, "kvstore": 0, "vision": 1}, slab_slots=0,
                         ticket_seconds=2.0, store_seconds=0.5, queue_seconds=1.0),
        (Request(0.383, 444, 1, max_tokens=8, stream=False, images=(0,)),
         Request(1.388, 299, 1, max_tokens=8, stream=False, images=(3,)),
         Request(0.987, 374, 1, max_tokens=8, stream=False, images=(1,))),
        (Span("slow", 0.526, 2.676, 3.0), When("Deposited", 3, "sender", "stop", 2.841)),
    ),
    "a prompt that fails while the bus is down is told of when it is back": Plan(
        12003854, config(counts={"gateway": 2, "prefill": 2, "decode": 1, "kvstore": 0}, ticket_seconds=2.0, queue_seconds=1.0,
                         prefill_seconds=0.001, step_seconds=0.03, overtake=0.1),
        (Request(0.079, 277, 0, max_tokens=8, stream=False), Request(0.455, 53, 0, max_tokens=8, stream=False),
         Request(0.095, 86, 1, max_tokens=8, stream=False), Request(0.062, 356, 1, max_tokens=8, stream=False)),
        (Span("bus down", 0.361, 0.373), Hurt("break", "prefill", 0, 0.644, 0.108), Message("Flag", 1, "drop")),
    ),
    "the very first output is lost, and others follow": Plan(
        7154, config(), (Request(0.05, 183, 0, max_tokens=1), Request(0.4, 61, 0), Request(0.4, 61, 1)),
        (Message("Out", 1, "drop"),),
    ),
    "a lease that ends while its prompt is computed ends the job": Plan(
        100411, config(chunk=1024, prefill_seconds=0.001, ticket_seconds=0.5),
        (Request(0.157, 360, 1, stream=False), Request(0.198, 276, 1, deadline=2.0, stream=False)),
        (Span("bus down", 0.264, 2.774),),
    ),
    "a prompt that waits for memory holds none of its reader's, for which one that has memory waits": Plan(
        21, config(prefill_blocks=5, slab_slots=1, chunk=1024),
        (Request(0.05, 143, 1, max_tokens=8), Request(0.06, 399, 0, max_tokens=8), Request(0.07, 344, 1, max_tokens=8)),
        (Span("slow", 0.0, 0.5, 0.3),),
    ),
    "what waiting prompts pin of their prefixes does not keep the first of them waiting": Plan(
        1001283, config(counts={"gateway": 1, "prefill": 2, "decode": 1, "kvstore": 0}, transports=["shm", "tcp"], chunk=1024,
                        prefill_blocks=5, checksums=True, ticket_seconds=2.0, queue_seconds=1.0, step_seconds=0.03,
                        tick_seconds=0.02, slab_slots=0),
        (Request(1.527, 351, 0, max_tokens=8, stream=False), Request(0.61, 448, 1, max_tokens=8, stream=False)),
        (Message("Bytes", 2, "flip"), Hurt("stop", "prefill", 0, 0.474, 2.617)),
    ),
    "what a broken bus left unanswered is asked again when the bus is back, in whichever order the two are heard of": Plan(
        2003963, config(), (Request(0.05, 183, 0, max_tokens=2),),
        (Message("Out", 1, "drop"), Hurt("stop", "gateway", 0, 0.15, 1.0), Span("bus down", 0.5, 0.3)),
    ),
    "a question about an attempt that prefill never accepted does not keep the next one from asking": Plan(
        2026519, config(), (Request(0.05, 183, 0, max_tokens=2),),
        (Message("Accepted", 1, "drop"), Message("Out", 1, "drop"), Message("Resume", 1, "drop"), Message("Out", 3, "drop"),
         Span("slow", 0.0, 1.5, 0.001)),
    ),
    "an older attempt that was admitted late ends when a newer one asks for its room": Plan(
        5000237, config(transports=["shm", "tcp"], max_num_seqs=2, slab_slots=0, chunk=128, prefill_seconds=0.0001,
                        tick_seconds=0.02),
        (Request(0.195, 353, 0, max_tokens=8, stream=False), Request(0.596, 39, 1, max_tokens=8, stream=False),
         Request(0.657, 469, 0, n=2, max_tokens=8, stream=False)),
        (Message("Admit", 4, "double"),),
    ),
    "an image that came with a wrong byte is deposited once more": Plan(
        1106, config(counts={"gateway": 1, "prefill": 1, "decode": 1, "kvstore": 0, "vision": 1}),
        (Request(0.05, 188, 1, images=(0,)),), (Message("Bytes", 1, "flip"),),
    ),
    "a deadline that passes while an image's bytes are on their way ends the request": Plan(
        6000183, config(counts={"gateway": 1, "prefill": 1, "decode": 1, "kvstore": 0, "vision": 1}),
        (Request(0.05, 188, 1, deadline=2.0, images=(0,)),), (Message("Bytes", 1, "delay", 3.0),),
    ),
    "a deadline that passes while no worker is there ends the request": Plan(
        49, config(transports=["tcp"], queue_seconds=1.0, max_num_seqs=2), (Request(0.75, 170, 1, n=2, deadline=2.0),),
        (Hurt("cut mute", "prefill", 0, 0.199, 2.843),),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_is_mended(name):
    with installed():
        world = simulate(FOUND[name])
    assert world.violations == [] and world.asked


def test_a_decode_that_dies_before_it_answers_is_found_by_probes():
    """Half a second of probes and of the second attempt; patience with an answer would be a second alone."""
    counts = {"gateway": 1, "prefill": 1, "decode": 2, "kvstore": 0}
    plan = Plan(1, config(counts=counts), (Request(0.7, 36, 1, max_tokens=1, deadline=0.9),),
                (Message("Admitted", 1, "drop"), When("Admitted", 1, "sender", "kill", 5.0)))  # fmt: skip
    with installed():
        world = simulate(plan)
    assert world.violations == [] and [asked.ended for asked in world.asked] == ["answer"]


def test_they_are_told_when_they_are_not_mended():
    """The same, with a guard taken away: it is the check that makes the others worth something."""
    from mutations import without

    plan = Plan(1, config(), (Request(0.7, 36, 1), Request(0.05, 363, 1)), (Message("Out", 1, "double"),))
    with installed(), lenient(), without("index"):
        world = simulate(plan)
    assert "got token 0 of choice 0 after" in world.violations[0]


def test_what_fails_is_made_small_and_told_in_words():
    """Ten faults and requests around the one that matters."""
    from mutations import without
    from runner import kind

    noise = (Message("Bind", 2, "double"), Span("slow", 0.5, 0.2, 0.05), Message("KvFound", 1, "drop"))
    requests = tuple(Request(0.05 * number, 200, number % 2, n=2) for number in range(4))
    counts = {"gateway": 1, "prefill": 2, "decode": 1, "kvstore": 1}
    plan = Plan(1, config(counts=counts, checksums=True), requests, (*noise, Message("Out", 3, "double"), *noise))
    with installed(), lenient(), without("index"):
        wrong = kind(simulate(plan).violations)
        small = shrunk(plan, lambda less: kind(simulate(less).violations) == wrong)
        assert wrong and kind(simulate(small).violations) == wrong
    assert len(small.requests) <= 2 and small.faults == (Message("Out", 3, "double"),)
    assert small.config.counts["kvstore"] == 0 and not small.config.checksums
    assert "Out number 3 comes twice" in small.describe() and "200 tokens of group" in small.describe()
