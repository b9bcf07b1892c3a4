"""Identity of KV: keyed, chained 128-bit hashes of full blocks.

    h_0 = ROOT,  h_i = blake2b(h_{i-1} | ids of block i as little-endian u32 | extra keys, key = K(layout id,
    namespace))

Knows what makes two blocks the same: every token from the start of the prompt, the images in it, the layout of the
bytes (numerics class included) and the namespace. Does not know tensors, tenants' names or where blocks lie.

The hash is cryptographic (blake2b, 16-byte digests), so a tenant can't make a block that answers for another prompt.
Its seed is a constant with a version, so all processes of a cluster agree; `self_test` holds a known vector and is
called at start. Variable-length inputs are framed with their length: no two different inputs have the same bytes.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence
from hashlib import blake2b

VERSION = 1  # part of every key: raise it when the meaning of a hash changes
DIGEST_BYTES = 16
BLOCK_TOKENS = 128
ROOT = bytes(DIGEST_BYTES)  # parent of a prompt's first block

_PERSON = b"headrace-kv-%03d" % VERSION  # at most 16 bytes
SELF_TEST = bytes.fromhex("24fba706c7577350fa0572998400813e")

Images = Sequence[tuple[int, bytes]]


def _frame(*parts: bytes) -> bytes:
    """Parts, each behind its length (u32), so that no two sequences of parts have the same bytes."""
    return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def _digest(purpose: bytes, data: bytes, size: int = DIGEST_BYTES) -> bytes:
    return blake2b(data, digest_size=size, person=_PERSON, salt=purpose).digest()


def pack_ids(ids: Sequence[int] | bytes | memoryview) -> bytes:
    """Token ids -> little-endian u32 bytes (packed bytes pass through). ValueError names an id that is not a u32."""
    if isinstance(ids, (bytes, bytearray, memoryview)):
        if len(ids) % 4:
            raise ValueError(f"packed token ids are 4 bytes each; got {len(ids)} bytes")
        return bytes(ids)
    try:
        packed = ids if isinstance(ids, array) and ids.typecode == "I" else array("I", ids)
    except (OverflowError, TypeError) as error:
        bad = next((i for i in ids if not isinstance(i, int) or not 0 <= i < 1 << 32), None)
        raise ValueError(f"token ids are integers from 0 to 4294967295; got {bad!r}") from error
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def namespace_key(tenant: bytes, salt: str | None, secret: bytes = b"") -> bytes:
    """16-byte namespace of an authenticated tenant. `salt` is what the client sent (`cache_salt`): it only divides
    the tenant's own namespace, for the tenant stands in its own frame. `secret` is the deployment's: hashes on disk
    leak nothing without it.
    """
    given = b"" if salt is None else b"\1" + salt.encode()
    return _digest(b"namespace", _frame(secret, tenant, given))


def content_binding(
    layout_id: str, namespace: bytes, ids: Sequence[int] | bytes, images: Images = (), checkpoint: str = ""
) -> bytes:
    """16 bytes that bind a ticket to one prompt: all its ids (the partial last block too), images, layout and
    namespace."""
    extra = b"".join(_frame(struct.pack("<I", start), digest) for start, digest in sorted(images))
    return _digest(b"content", _frame(layout_id.encode(), checkpoint.encode(), namespace, pack_ids(ids), extra))


class BlockHasher:
    """Hashes of one layout and namespace. Stateless after construction; cheap to build (two compressions)."""

    def __init__(self, layout_id: str, namespace: bytes, block_tokens: int = BLOCK_TOKENS) -> None:
        key = _digest(b"blockkey", _frame(layout_id.encode(), namespace, struct.pack("<I", block_tokens)), size=32)
        self.block_tokens = block_tokens
        self._seeded = blake2b(digest_size=DIGEST_BYTES, key=key, person=_PERSON)  # copied per block: the key is absorbed once

    def hashes(self, ids: Sequence[int] | bytes, images: Images = ()) -> list[bytes]:
        """Hashes of the full blocks of `ids`, in order; the partial last block has none.

        images: (position of the image's first token, digest of its pixels), absolute. An image counts in the block
        where it starts; later blocks inherit it through their parent.
        """
        packed = memoryview(pack_ids(ids))
        step = 4 * self.block_tokens
        blocks = range(0, len(packed) - step + 1, step)
        extras = self._extras(images)
        seeded, parent, out = self._seeded, ROOT, []
        for start in blocks:
            hasher = seeded.copy()
            hasher.update(parent)
            hasher.update(packed[start : start + step])
            if extras and (extra := extras.get(start // step)):
                hasher.update(extra)
            parent = hasher.digest()
            out.append(parent)
        return out

    def next(self, parent: bytes, ids: Sequence[int] | bytes, images: Images = ()) -> bytes:
        """Hash of the one full block `ids` after `parent` (ROOT for the first). images: starts within this block."""
        packed = pack_ids(ids)
        if len(packed) != 4 * self.block_tokens or len(parent) != DIGEST_BYTES:
            raise ValueError(
                f"a block is {self.block_tokens} tokens after a {DIGEST_BYTES}-byte parent; got {len(packed) // 4} tokens and "
                f"a parent of {len(parent)} bytes"
            )
        extras = self._extras(images)
        if extras and extras.keys() != {0}:
            raise ValueError(f"image starts must lie in the block (0 to {self.block_tokens - 1}); got {sorted(images)}")
        hasher = self._seeded.copy()
        hasher.update(parent)
        hasher.update(packed)
        hasher.update(extras.get(0, b""))
        return hasher.digest()

    def _extras(self, images: Images) -> dict[int, bytes]:
        """Block index -> framed (offset in block, digest) of the images that start in it. Frames follow fixed-size
        input, so a block without images can't equal one with."""
        out: dict[int, bytes] = {}
        for start, digest in sorted(images):
            if start < 0 or not digest:
                raise ValueError(f"an image needs a start >= 0 and a digest; got start {start}, digest {digest!r}")
            block, offset = divmod(start, self.block_tokens)
            out[block] = out.get(block, b"") + _frame(struct.pack("<I", offset), digest)
        return out


def self_test() -> None:
    """Raises RuntimeError when this process would hash differently from the others (another VERSION, a broken
    hashlib)."""
    got = BlockHasher("self-test", namespace_key(b"tenant", "salt")).hashes(range(256), images=[(7, b"pixels")])[-1]
    if got != SELF_TEST:
        raise RuntimeError(f"block hashes differ from the known vector: got {got.hex()}, want {SELF_TEST.hex()}")
