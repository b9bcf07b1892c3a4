"""Block identity: chained, keyed, framed, and the same in every process."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.kv import hashing
from headrace.kv.hashing import ROOT, BlockHasher, content_binding, namespace_key, pack_ids

NAMESPACE = namespace_key(b"tenant", None)
HASHER = BlockHasher("layout", NAMESPACE)
IDS = list(range(1000, 1000 + 300))


def test_known_vector_holds_here_and_in_another_process():
    hashing.self_test()
    code = (
        "from headrace.kv.hashing import *; "
        "print(BlockHasher('layout', namespace_key(b'tenant', None)).hashes(range(1000, 1300))[-1].hex())"
    )
    env = {"PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert other.stdout.strip() == HASHER.hashes(IDS)[-1].hex()


def test_only_full_blocks_have_a_hash():
    assert HASHER.hashes(IDS[:127]) == []
    assert len(HASHER.hashes(IDS[:128])) == 1
    assert len(HASHER.hashes(IDS)) == 2
    assert all(len(block_hash) == 16 for block_hash in HASHER.hashes(IDS))


def test_packed_ids_and_lists_agree():
    assert HASHER.hashes(pack_ids(IDS)) == HASHER.hashes(IDS) == HASHER.hashes(tuple(IDS))


def test_next_continues_the_chain():
    first, second = HASHER.hashes(IDS)
    assert HASHER.next(ROOT, IDS[:128]) == first
    assert HASHER.next(first, IDS[128:256]) == second
    images = [(5, b"a" * 32), (130, b"b" * 32)]
    first, second = HASHER.hashes(IDS, images)
    assert HASHER.next(ROOT, IDS[:128], images=[(5, b"a" * 32)]) == first
    assert HASHER.next(first, IDS[128:256], images=[(2, b"b" * 32)]) == second


@given(st.integers(0, 255), st.integers(0, 2**32 - 1))
def test_one_other_token_changes_its_block_and_all_after(position, token):
    changed = list(IDS)
    changed[position] = token
    before, after = HASHER.hashes(IDS), HASHER.hashes(changed)
    same = changed == IDS
    assert (before[1] == after[1]) == same
    assert (before[0] == after[0]) == (same or position >= 128)


def test_layout_namespace_and_block_size_are_part_of_the_key():
    others = [
        BlockHasher("layout2", NAMESPACE),
        BlockHasher("layout", namespace_key(b"tenant2", None)),
        BlockHasher("layout", namespace_key(b"tenant", "")),
        BlockHasher("layout", namespace_key(b"tenant", "salt")),
        BlockHasher("layout", namespace_key(b"tenant", None, secret=b"deployment")),
    ]
    firsts = {hasher.hashes(IDS)[0] for hasher in [HASHER, *others]}
    assert len(firsts) == 6


@given(st.binary(max_size=6), st.text(max_size=6), st.binary(max_size=6), st.text(max_size=6))
def test_namespaces_are_framed(tenant, salt, other_tenant, other_salt):
    equal = (tenant, salt) == (other_tenant, other_salt)
    assert (namespace_key(tenant, salt) == namespace_key(other_tenant, other_salt)) == equal
    assert namespace_key(tenant, None) != namespace_key(tenant, salt)


def test_a_client_cannot_name_another_tenant():
    assert namespace_key(b"ab", "c") != namespace_key(b"a", "bc")
    assert namespace_key(b"a", "b") != namespace_key(b"ab", None)


def test_images_with_the_same_token_id_differ_by_digest_and_start():
    image_tokens = [129264] * 256
    variants = [
        [],
        [(0, b"x" * 32)],
        [(0, b"y" * 32)],
        [(1, b"x" * 32)],
        [(128, b"x" * 32)],
        [(0, b"x" * 32), (64, b"x" * 32)],
        [(0, b"x" * 16), (64, b"x" * 16)],
    ]
    lasts = {HASHER.hashes(image_tokens, images)[-1] for images in variants}
    assert len(lasts) == len(variants)
    # an image of the partial last block changes nothing before it
    assert HASHER.hashes(IDS, [(256, b"x" * 32)]) == HASHER.hashes(IDS)


def test_binding_covers_the_partial_block_and_everything_else():
    base = content_binding("layout", NAMESPACE, IDS)
    others = [
        content_binding("layout", NAMESPACE, IDS[:-1]),
        content_binding("layout", NAMESPACE, [*IDS[:-1], 7]),
        content_binding("layout", NAMESPACE, IDS, images=[(299, b"x")]),
        content_binding("layout2", NAMESPACE, IDS),
        content_binding("layout", namespace_key(b"b", None), IDS),
        content_binding("layout", NAMESPACE, IDS, checkpoint="c"),
    ]
    assert len({base, *others}) == 7 and base == content_binding("layout", NAMESPACE, pack_ids(IDS))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: HASHER.hashes([1, -1, 2] * 60), "-1"),
        (lambda: HASHER.hashes([1, 2**32] * 64), "4294967296"),
        (lambda: HASHER.hashes([1.5] * 128), "1.5"),
        (lambda: HASHER.hashes(b"123"), "3 bytes"),
        (lambda: HASHER.next(ROOT, IDS[:127]), "127 tokens"),
        (lambda: HASHER.next(b"short", IDS[:128]), "parent of 5 bytes"),
        (lambda: HASHER.next(ROOT, IDS[:128], images=[(128, b"x")]), "0 to 127"),
        (lambda: HASHER.hashes(IDS, images=[(-1, b"x")]), "start -1"),
        (lambda: HASHER.hashes(IDS, images=[(0, b"")]), "digest"),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(ValueError, match=words):
        call()
