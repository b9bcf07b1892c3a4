"""Rooms for deliveries: all or nothing, fenced, checked, and free again only when both sides let go. Over real memory."""

from __future__ import annotations

import asyncio
import random
import time
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kv.grants import Writing
from headrace.transfer import GenerationRefused, Links, Memory
from headrace.worker.staging import Staging, StagingError

SIZE = 1 << 16


@pytest.fixture(params=["shm", "tcp"])
async def pair(request, tmp_path):
    """(owner's memory, its staging, grants that it asked about, links of a writer, the writer's memory)."""
    owner = Memory("prefill-x", tmp_path, [request.param])
    asked: list[tuple[str, str]] = []
    staging = Staging(owner, "images", SIZE, lambda sender, grant: asked.append((sender, grant)))
    await owner.start()
    writer = Memory("vision-y", tmp_path, [request.param])
    links = Links(writer.incarnation, [request.param], str(tmp_path))
    yield owner, staging, asked, links, writer
    await links.close()
    await writer.close()
    await owner.close()


async def deliver(owner, room, links, parts):
    peer = await links.get(owner.address(), 2.0)
    deadline = time.monotonic() + 5
    await peer.write("images", list(zip(room.offsets, parts, strict=True)), room.generation, deadline)
    await peer.flush(deadline, room.generation)


async def test_a_delivery_is_checked_copied_and_gone(pair):
    owner, staging, _, links, writer = pair
    parts = [random.Random(i).randbytes(n) for i, n in enumerate((1000, 1, 30_000))]
    room = staging.grant(writer.incarnation, "vision-y", [len(p) for p in parts], 5.0, time.monotonic())
    await deliver(owner, room, links, parts)
    assert await staging.take(room, [crc32(p) for p in parts], time.monotonic) == parts
    assert len(staging) == 0 and staging.bytes_by_place() == {"used": 0, "quarantined": 0, "free": SIZE}
    with pytest.raises(StagingError, match="is over"):
        await staging.take(room, [crc32(p) for p in parts], time.monotonic)
    with pytest.raises(GenerationRefused):
        await deliver(owner, room, links, parts)


async def test_a_wrong_checksum_gives_nothing(pair):
    owner, staging, _, links, writer = pair
    room = staging.grant(writer.incarnation, "vision-y", [100], 5.0, time.monotonic())
    await deliver(owner, room, links, [bytes(100)])
    with pytest.raises(StagingError) as error:
        await staging.take(room, [crc32(b"other")], time.monotonic)
    assert error.value.code == "corrupt" and len(staging) == 0


async def test_what_is_given_up_stays_until_its_writer_lets_go(pair):
    owner, staging, asked, links, writer = pair
    now = time.monotonic()
    room = staging.grant(writer.incarnation, "vision-y", [SIZE], 5.0, now)
    assert staging.grant(writer.incarnation, "vision-y", [1], 5.0, now) is None  # all or nothing, and nothing is left
    staging.abandon(room, now)
    with pytest.raises(GenerationRefused):
        await deliver(owner, room, links, [bytes(SIZE)])
    if owner.kinds == ("shm",):  # over tcp the owner's own disarm is the proof
        assert staging.bytes_by_place()["quarantined"] == SIZE
        staging.tick(now + 3600)  # time alone frees nothing
        assert staging.grant(writer.incarnation, "vision-y", [1], 5.0, now) is None
        assert asked == [("vision-y", room.grant)]
        staging.writer_says(room.grant, "writing", now)
        assert staging.bytes_by_place()["quarantined"] == SIZE
        staging.writer_says(room.grant, "done", now)
    assert len(staging) == 0
    assert staging.grant(writer.incarnation, "vision-y", [SIZE], 5.0, now) is not None


async def test_a_dead_writer_lets_go(pair):
    _, staging, _, _, writer = pair
    now = time.monotonic()
    staging.grant(writer.incarnation, "vision-y", [SIZE], 0.5, now)
    await writer.close()
    staging.tick(now + 1.0)
    staging.tick(now + 2.0)
    assert len(staging) == 0 and staging.counters["expired"] == 1


async def test_what_can_never_fit_is_said_with_both_numbers(pair):
    _, staging, _, _, writer = pair
    with pytest.raises(ValueError, match=r"65,537 bytes are to land in 'images', which has 65,536"):
        staging.grant(writer.incarnation, "vision-y", [SIZE + 1], 5.0, 0.0)


STEPS = st.tuples(st.sampled_from(["grant", "done", "abandon", "expire", "writing"]), st.integers(1, SIZE // 3))


@settings(deadline=None, max_examples=60)
@given(st.lists(STEPS, max_size=60))
def test_no_two_grants_ever_share_a_byte(tmp_path_factory, steps):
    """Any order of grants, ends and expiries: the books hold, and everything is free when all writers are done."""
    memory = Memory("prefill-x", tmp_path_factory.mktemp("s"), ["shm"])
    staging, rooms, now = Staging(memory, "images", SIZE, lambda sender, grant: None), [], 0.0
    other = Memory("vision-y", memory._shm_dir, ["shm"])
    for what, size in steps:
        now += 0.3
        room = rooms[size % len(rooms)] if rooms else None
        if what == "grant":
            made = staging.grant(other.incarnation, "v", [size, size // 2 + 1], 2.0, now)
            rooms += [made] if made else []
        elif what == "expire":
            staging.tick(now)
        elif room is not None and what == "abandon":
            staging.abandon(room, now)
        elif room is not None:
            staging.writer_says(room.grant, what, now)
        staging.check()
    for room in rooms:
        staging.abandon(room, now)
        staging.writer_says(room.grant, "done", now)
    assert len(staging) == 0 and staging.bytes_by_place()["free"] == SIZE
    asyncio.run(memory.close())
    asyncio.run(other.close())


def test_done_is_a_promise():
    writing = Writing()
    assert writing.begin("a") and writing.status("a", 0.0) == "writing"
    writing.end("a", 0.0)
    assert writing.status("a", 0.0) == "done" and not writing.begin("a")
    assert writing.status("b", 0.0) == "done" and not writing.begin("b")  # who is asked before the grant came refuses it
    assert len(writing) == 0
