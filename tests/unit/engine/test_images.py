"""Images in prompts: the same answer on every path, never another image's memory, clear refusals. On the toy model, whose
answer depends on every byte of an embedding; tests/parity/test_vision.py has the real one."""

import random
import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine import api
from headrace.engine.core import EngineCore
from headrace.engine.images import check_image_ids, check_images, missing_embeddings
from headrace.engine.llm import collect
from headrace.engine.snapshots import SnapshotStore
from headrace.engine.toy import ToyModel

BLOCK, IMAGE, WIDTH = 8, 96, 4
EXACT = ToyModel("exact", block_tokens=BLOCK, image_token_id=IMAGE)
BOUNDED = ToyModel("bounded", block_tokens=BLOCK, image_token_id=IMAGE)


def engine(role="both", model=EXACT, **config) -> EngineCore:
    sizes = {"num_blocks": 96, "max_num_seqs": 4, "max_num_batched_tokens": 32} | config
    return EngineCore(model, api.EngineConfig(role=role, **sizes))


def embeddings(digest: bytes, tokens: int) -> bytes:
    """What an encoder would say of an image: it depends on the image alone."""
    draw = random.Random(digest)
    return struct.pack(f"<{tokens * WIDTH}f", *(draw.uniform(-1, 1) for _ in range(tokens * WIDTH)))


def prompt(*parts) -> tuple[list[int], list[api.ImageSpan]]:
    """int: so many text tokens; (digest, tokens): an image."""
    ids, images, draw = [], [], random.Random(7)
    for part in parts:
        if isinstance(part, int):
            ids += draw.choices(range(2, IMAGE), k=part)
        else:
            digest, tokens = part
            images.append(api.ImageSpan(len(ids), tokens, digest, embeddings(digest, tokens)))
            ids += [IMAGE] * tokens
    return ids, images


def request(name, ids, images, **sampling) -> api.EngineRequest:
    defaults = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    return api.EngineRequest(name, ids, [], api.SamplingParams(**defaults | sampling), images=images)


def answer(core, ids, images, name="r", **sampling):
    return collect(core, [request(name, ids, images, **sampling)])[0]


picture = st.tuples(st.sampled_from([b"cat", b"dog", b"owl"]), st.integers(4, 20))
parts = st.lists(st.one_of(st.integers(1, 30), picture), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(parts, st.sampled_from([(), (3,), (7, 1), (16,)]), st.integers(0, 3), st.booleans())
def test_chunks_hits_and_earlier_prompts_do_not_change_an_answer(parts, chunks, shared, snapshots):
    ids, images = prompt(*parts)
    want = answer(engine(), ids, images).choices[0].ids
    core = engine(chunk_tokens=chunks, snapshot_bytes=1 << 20 if snapshots else 0)
    first_ids, first_images = prompt(*parts[:shared], 5)
    answer(core, first_ids, first_images, "earlier")
    assert answer(core, ids, images, "cold").choices[0].ids == want
    again = answer(core, ids, images, "again")
    assert again.choices[0].ids == want
    assert again.cached_tokens == (len(ids) - 1) // BLOCK * BLOCK
    core.pool.check(core.owners())


def test_two_images_of_one_size_share_nothing_from_the_first_on():
    core = engine()
    parts = (9, (b"cat", 12), 20)
    ids, cat = prompt(*parts)
    dog_ids, dog = prompt(9, (b"dog", 12), 20)
    assert ids == dog_ids and cat[0].start == dog[0].start  # to whoever looks at ids they are one prompt
    a, b = answer(core, ids, cat, "cat"), answer(core, ids, dog, "dog")
    assert a.choices[0].ids != b.choices[0].ids
    assert b.cached_tokens == BLOCK  # the text before the block in which the image begins
    assert answer(core, ids, cat, "again").cached_tokens == (len(ids) - 1) // BLOCK * BLOCK


def test_swapped_images_are_another_prompt_with_another_answer():
    ids, images = prompt(5, (b"cat", 10), 6, (b"dog", 10), 6)
    swapped = [replace(i, digest=o.digest, embeddings=o.embeddings) for i, o in zip(images, images[::-1], strict=True)]
    hasher = engine().ledger.hasher(b"")
    one, two = (hasher.hashes(ids, [(i.start, i.digest) for i in spans]) for spans in (images, swapped))
    assert all(a != b for a, b in zip(one, two, strict=True))
    core = engine()
    a, b = answer(core, ids, images, "a"), answer(core, ids, swapped, "b")
    assert a.choices[0].ids != b.choices[0].ids and b.cached_tokens == 0


def test_a_block_that_decode_fills_is_hashed_with_the_image_that_begins_in_it():
    """The next turn's prompt has the image's answer behind it: it hits. With another image of the size it must not."""
    core = engine()
    ids, cat = prompt(6, (b"cat", 5))  # the second block begins with an image and is filled by the output
    said = answer(core, ids, cat, max_tokens=20).choices[0].ids
    _, dog = prompt(6, (b"dog", 5))
    longer = [*ids, *said, 3, 4, 5]
    assert answer(core, longer, cat, "next").cached_tokens == 3 * BLOCK
    assert answer(core, longer, dog, "other").cached_tokens == 0


@pytest.mark.parametrize("model", [EXACT, BOUNDED])
@pytest.mark.parametrize("snapshot_bytes", [0, 1 << 20])
def test_embeddings_are_needed_from_the_first_row_that_may_run(model, snapshot_bytes):
    """`first_row` is what a caller has to go by: with these embeddings the prompt runs, whatever became of snapshots."""
    core = engine(model=model, snapshot_bytes=snapshot_bytes)
    ids, images = prompt(20, (b"cat", 12), 40, (b"dog", 20), 10)
    want = answer(core, ids, images, "cold").choices[0].ids
    pins = core.pool.match(core.ledger.hasher(b"").hashes(ids, [(i.start, i.digest) for i in images]))
    first = core.first_row(len(pins), len(ids))
    assert (len(ids) - 1) // BLOCK * BLOCK - 20 < first <= len(ids)
    for image in images:
        if image.stop <= first:
            image.embeddings = None
    assert images[0].embeddings is None
    core.ledger.snapshots = SnapshotStore(snapshot_bytes)  # all of them are evicted meanwhile
    assert answer(core, ids, images, "again").choices[0].ids == want
    core.pool.release(pins)


def test_missing_embeddings_end_the_request_and_nothing_else():
    core = engine()
    ids, images = prompt(5, (b"cat", 10), 6)
    images[0].embeddings = None
    core.submit(request("blind", ids, images))
    core.submit(request("text", ids[:5], []))
    events = []
    while core.has_work():
        events += core.step() or []
    failed = [e for e in events if isinstance(e, api.Failed)]
    assert [e.request for e in failed] == ["blind"] and "embeddings of the image at [5, 15) did not come" in failed[0].message
    assert sum(len(e.ids) for e in events if isinstance(e, api.Tokens) and e.request == "text") == 12
    assert core.pool.used == 0


def test_split_over_two_engines():
    prefill, decode = engine("prefill"), engine("decode")
    ids, images = prompt(9, (b"cat", 11), 3, (b"dog", 6))
    want = answer(engine(), ids, images).choices[0].ids
    prefill.submit(request("r", ids, images))
    done = next(e for e in iter(lambda: prefill.step() or [], None) for e in e if isinstance(e, api.PrefillDone))
    blind = [replace(image, embeddings=None) for image in images]  # decode never sees pixels
    r = request("r", ids, blind)
    r.hashes = decode.ledger.hasher(b"").hashes(ids, [(i.start, i.digest) for i in images])
    reservation = decode.reserve("r", r.hashes, len(ids))
    for block, source in zip(reservation.blocks, done.block_table[reservation.have :], strict=True):
        decode.runner.kv.data[block] = prefill.runner.kv.data[source]
    decode.admit(reservation, done.handoff, r)
    got = []
    while decode.has_work():
        got += [token for e in decode.step() if isinstance(e, api.Tokens) for token in e.ids]
    assert got == want


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([(3, 4), (6, 2)], r"one after the other inside the prompt's 20 tokens; got \[6, 8\) after 7"),
        ([(18, 4)], r"inside the prompt's 20 tokens; got \[18, 22\)"),
        ([(3, 0)], "at least one token"),
    ],
)
def test_spans_that_cannot_be(spans, message):
    with pytest.raises(ValueError, match=message):
        check_images([api.ImageSpan(start, tokens, b"x") for start, tokens in spans], 20)


def test_ids_and_spans_must_agree():
    ids, images = prompt(5, (b"cat", 4), 3)
    check_image_ids(ids, images, IMAGE)
    as_text = answer(engine(), ids, [], "r").choices[0].ids  # a sampled image id is a token like any other
    assert as_text and as_text != answer(engine(), ids, images, "r").choices[0].ids
    with pytest.raises(ValueError, match="must all be 96"):
        check_image_ids([*ids[:6], 5, *ids[7:]], images, IMAGE)
    with pytest.raises(ValueError, match="reads text only"):
        check_image_ids(ids, images, None)
    images[0].embeddings = images[0].embeddings[:-4]
    with pytest.raises(ValueError, match="4 tokens: 64 bytes of float32 at width 4; got 60"):
        engine().submit(request("r", ids, images))
    assert missing_embeddings(images, 0) == ""
