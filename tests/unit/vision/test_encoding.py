"""The encoder's queue and what is kept: one image is computed once, whoever asks; nobody waits for what nobody wants."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.make_checkpoint import make_checkpoint
from headrace.engine.models.vision.loader import load_encoder
from headrace.vision.cache import ENTRY_BYTES, ByteCache
from headrace.vision.encoding import Encoding, PixelsGone, rows_of
from headrace.vision.identity import Pixels


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return load_encoder(make_checkpoint("nano-vision", 3, tmp_path_factory.mktemp("checkpoint")))


class Bench:
    """An encoding over known pixels, whose thread can be held."""

    def __init__(self, encoder, cache_bytes=1 << 20, batch_patches=4096):
        self.free = threading.Event()
        self.free.set()
        self.pool = ThreadPoolExecutor(1)
        self.known: dict[tuple[bytes, bytes], Pixels] = {}
        self.encoding = Encoding(encoder, self.pool, self.known.get, lambda key: None, cache_bytes, batch_patches)

    def add(self, name: bytes, side: int = 84, tenant: bytes = b"t") -> tuple[bytes, bytes]:
        data = torch.randint(0, 256, (side, side, 3), generator=torch.Generator().manual_seed(name[0])).to(torch.uint8)
        self.known[tenant, name] = Pixels(data.numpy().tobytes(), side, side)
        return tenant, name

    def hold(self) -> None:
        """The thread does nothing until `free` is set."""
        self.free.clear()
        self.pool.submit(self.free.wait, 30)


@pytest.fixture
def bench(encoder):
    bench = Bench(encoder)
    yield bench
    bench.free.set()
    bench.pool.shutdown()


async def test_an_image_is_computed_once(bench):
    a, b = bench.add(b"a"), bench.add(b"b", 42)
    bench.hold()
    both = [asyncio.ensure_future(bench.encoding.spans(keys)) for keys in ([a, b], [b, a], [a])]
    await asyncio.sleep(0.05)
    bench.free.set()
    (one, patches, _), (other, _, _), (third, _, _) = await asyncio.gather(*both)
    assert torch.equal(one[0], other[1]) and torch.equal(one[1], other[0]) and torch.equal(third[0], one[0])
    assert bench.encoding.counters["encoded"] == 2 and patches == 36 + 9
    again, patches, cached = await bench.encoding.spans([a, b])
    assert torch.equal(again[0], one[0]) and (patches, cached) == (0, 2)
    assert bench.encoding.counters["encoded"] == 2


async def test_tenants_do_not_share(bench):
    mine, theirs = bench.add(b"a"), bench.add(b"a", tenant=b"u")
    await bench.encoding.spans([mine])
    _, patches, cached = await bench.encoding.spans([theirs])
    assert patches == 36 and cached == 0


async def test_what_nobody_waits_for_is_left_out(bench):
    bench.hold()
    first = asyncio.ensure_future(bench.encoding.spans([bench.add(b"a")]))
    await asyncio.sleep(0.02)  # it is the batch that waits for the thread
    late = asyncio.ensure_future(bench.encoding.spans([bench.add(b"b")]))
    await asyncio.sleep(0.02)
    late.cancel()
    await asyncio.gather(late, return_exceptions=True)
    bench.free.set()
    await first
    await bench.encoding.spans([bench.add(b"c")])
    assert bench.encoding.counters["left_out"] == 1 and bench.encoding.counters["encoded"] == 2
    assert bench.encoding.pending == 0


async def test_pixels_that_are_gone_are_said_and_others_go_on(bench):
    with pytest.raises(PixelsGone):
        await bench.encoding.spans([bench.add(b"a"), (b"t", b"never seen")])
    spans, _, _ = await bench.encoding.spans([(b"t", b"a")])
    assert spans[0].shape[1] == 128


async def test_a_batch_that_breaks_is_an_error_for_its_images_only(bench):
    broken = bench.add(b"x", 80)  # not whole patches: identify never makes such pixels
    with pytest.raises(ValueError, match="multiples of 14"):
        await bench.encoding.spans([broken])
    bench.known[b"t", b"x"] = Pixels(b"too short", 84, 84)
    with pytest.raises(RuntimeError, match="the encoder failed"):
        await bench.encoding.spans([broken])
    assert (await bench.encoding.spans([bench.add(b"a")]))[1] == 36
    assert bench.encoding.pending == 0


async def test_large_batches_are_cut(encoder):
    bench = Bench(encoder, batch_patches=80)
    bench.hold()
    waiting = [asyncio.ensure_future(bench.encoding.spans([bench.add(bytes([n]))])) for n in range(5)]
    await asyncio.sleep(0.05)
    bench.free.set()
    await asyncio.gather(*waiting)
    assert bench.encoding.counters["batches"] == 3  # 2 + 2 + 1 images of 36 patches
    bench.pool.shutdown()


def test_rows_travel_as_they_are():
    span = torch.randn(5, 8)
    assert bytes(rows_of(span, "float32")) == span.numpy().tobytes()
    narrow = torch.frombuffer(bytearray(rows_of(span, "bfloat16")), dtype=torch.bfloat16).view(5, 8)
    assert torch.equal(narrow, span.bfloat16())


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 400), st.booleans()), max_size=80))
def test_the_cache_keeps_its_bound(steps):
    cache: ByteCache[int] = ByteCache(4 * ENTRY_BYTES)
    for name, nbytes, ask in steps:
        key = (b"t", bytes([name]))
        if ask:
            assert (cache.get(key) is not None) == (key in cache)
        else:
            cache.put(key, name, nbytes)
        assert cache.bytes <= cache.capacity
        assert cache.bytes == sum(size for _, size in cache._entries.values())


async def test_images_beside_one_whose_pixels_are_gone_leave_the_queue(bench):
    here = bench.add(b"a")
    with pytest.raises(PixelsGone):
        await bench.encoding.spans([here, (b"t", b"gone")])
    await asyncio.sleep(0)
    assert bench.encoding.pending == 0
    assert (await bench.encoding.spans([here]))[1] == 36
