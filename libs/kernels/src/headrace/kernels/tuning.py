"""Launch configurations per operation, as tables. Hopper's are measured on an H200; any other device gets the default.

A row is data for one source: no kernel is forked for a device. `headrace.kernels.tune` searches for better rows.
"""

from headrace.kernels._triton import INTERPRETED, cdiv, has_bf16_pairs


def sparse_attention(small: bool, heads: int) -> dict[str, int]:
    """`heads` of a program: 16, 32 or 64. SPREAD: see `attention_core.attend`. PAIRS, if both sources are `small` (FP8 window,
    FP4): see `decode_pairs`.

    The last row was the fastest for every other layout, and fits with any two of them. From 5 STAGES on the next tile's entries
    arrive while one is worked on; with fewer, a tile waits for its own. With 32 heads and small sources 5 do not fit.
    """
    if INTERPRETED:
        return {"BLOCK_N": 16, "STAGES": 1, "SPREAD": 1, "PAIRS": int(small), "num_warps": 4}
    if small and has_bf16_pairs():  # raced with 64 heads
        return {"BLOCK_N": 64, "STAGES": 3 if heads == 32 else 5, "SPREAD": 1, "PAIRS": 1, "num_warps": 8}
    return {"BLOCK_N": 64, "STAGES": 3, "SPREAD": 1, "PAIRS": 0, "num_warps": 8}


def mla_decode(layout: str, rows: int) -> dict[str, int]:
    """WAVES: programs per processor that the split of long sequences aims at. PAGES: whole tiles come through descriptors (bf16
    only). SPREAD: see `attention_core.attend`; with PAGES always 1.
    """
    pages = int(layout == "bf16" and rows > 32)
    if INTERPRETED:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "STAGES": 1, "SPREAD": 1, "PAGES": pages, "WAVES": 2, "num_warps": 4}
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        return {"BLOCK_M": block_m, "BLOCK_N": 64, "STAGES": 2, "SPREAD": 0, "PAGES": 0, "WAVES": 8, "num_warps": 4}
    shared = {"BLOCK_M": 64, "BLOCK_N": 64, "SPREAD": 1, "WAVES": 8, "num_warps": 8}
    return shared | {"STAGES": 2 if pages else 3, "PAGES": pages}


def mla_prefill() -> dict[str, int]:
    if INTERPRETED:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "STAGES": 1, "num_warps": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 64, "STAGES": 2, "num_warps": 8}


def gemm_fp8(kind: str, m: int, n: int, k: int, batch_invariant: bool) -> dict[str, int]:
    """Large products: measured at 4,096 dense rows, 8,064 to 34,944 contiguous and ~98 and ~202 masked ones.

    FORM: narrow, wide or tailed, see the module. Of narrow: ROWS_LEFT 0 puts the weight on the left, PAIR (with ROWS_LEFT)
    takes two steps of K a turn. TAIL: columns of a tailed tile's second part.
    """
    if INTERPRETED:
        return _small_gemm_fp8(m, batch_invariant)
    if m <= 64 and not batch_invariant:
        block_m = 16 if m <= 16 else 32 if m <= 32 else 64
        if kind == "masked":
            return narrow(block_m, 128)
        if kind == "dense" and m > 32:
            return _dense_64(n, k)
        waves = 1 if n * k < 1 << 23 or n >= 8192 or m <= 32 else 2
        return narrow(block_m, 64 if m > 32 else 128, WAVES=waves)
    if not batch_invariant:
        if kind == "dense" and k >= 7168 and n >= 2048 and m * n >= 1 << 23:
            return _pairs(16) if n >= 4096 else tailed(64)
        if kind == "contiguous" and k >= 5120 and m >= 4096:
            return _pairs(8) if m <= 16384 else tailed(64)
        if kind == "masked" and k >= 5120 and m <= 100:  # nearly every group is one tile
            return _pairs(2)
    return wide(64, 128, GROUP_M=4 if kind == "masked" else 16)


def _dense_64(n: int, k: int) -> dict[str, int]:
    """Measured at 64 rows."""
    if n * k < 1 << 24 or n <= 4096:
        return narrow(64, 32, PAIR=1, ROWS_LEFT=1, WAVES=2 if k >= 7168 else 1)
    if n >= 1 << 15:
        return narrow(64, 128, PAIR=1, ROWS_LEFT=1, STAGES=2, num_warps=8)
    if n >= 8192:
        return narrow(64, 64, ROWS_LEFT=1)
    return narrow(64, 64, PAIR=1, ROWS_LEFT=1, WAVES=2, STAGES=3)


def _pairs(group_m: int) -> dict[str, int]:
    return narrow(128, 128, WAVES=0, PAIR=1, ROWS_LEFT=1, GROUP_M=group_m, STAGES=3, num_warps=8)


def _small_gemm_fp8(m: int, batch_invariant: bool) -> dict[str, int]:
    """For the interpreter: small tiles, every form at some m."""
    if m <= 16 and not batch_invariant:
        return narrow(16, 64, WAVES=2, STAGES=1, PAIR=int(m % 3 == 2), ROWS_LEFT=min(m % 3, 1))
    return tailed(32, STAGES=1, GROUP_M=2) if m % 4 == 0 else wide(32, 64, STAGES=1, GROUP_M=2)


def narrow(block_m: int, block_n: int, **others: int) -> dict[str, int]:
    shared = {"FORM": "narrow", "BLOCK_M": block_m, "BLOCK_N": block_n, "WAVES": 1, "PAIR": 0, "ROWS_LEFT": 0, "GROUP_M": 1}
    return shared | {"STAGES": 4, "num_warps": 4} | others


def wide(block_m: int, block_n: int, **others: int) -> dict[str, int]:
    shared = {"FORM": "wide", "BLOCK_M": block_m, "BLOCK_N": block_n, "GROUP_M": 16}
    return shared | {"STAGES": 3, "num_warps": 4} | others


def tailed(block_m: int, **others: int) -> dict[str, int]:
    shared = {"FORM": "tailed", "BLOCK_M": block_m, "BLOCK_N": 128, "TAIL": 64, "GROUP_M": 16}
    return shared | {"STAGES": 3, "num_warps": 4} | others


def gemm_upcast(name: str, m: int, n: int, k: int, batch_invariant: bool) -> dict[str, int]:
    """ATOMS: times 128 columns of K in a step, PAIRS: how two values are scaled, both of packed formats."""
    if INTERPRETED:
        tile = {"BLOCK_M": 16, "BLOCK_N": 32 if n < 128 else 64, "ATOMS": 1 + m % 2, "PAIRS": 0}
        return tile | {"WAVES": 2, "STAGES": 1, "num_warps": 4}
    if name.endswith("_words"):
        return _gemm_words(name, m, n, k, batch_invariant)
    if batch_invariant:
        return {"BLOCK_M": 64, "BLOCK_N": 128, "WAVES": 1, "STAGES": 3, "num_warps": 4}
    if m <= 32:
        return {"BLOCK_M": 16 if m <= 16 else 32, "BLOCK_N": 64, "WAVES": 3, "STAGES": 3, "num_warps": 4}
    if name == "bf16" and n <= 2048 and m <= 512:  # gates, compressors: one program adds a tile's parts. Measured at 64 to 256
        if n <= 128:
            return {"BLOCK_M": 16, "BLOCK_N": 32, "WAVES": 1, "STAGES": 4, "num_warps": 4}
        return {"BLOCK_M": 32 if m <= 64 else 64, "BLOCK_N": 64, "WAVES": 1, "STAGES": 3, "num_warps": 4}
    if m <= 64:
        if name == "mxfp4":
            return {"BLOCK_M": 64, "BLOCK_N": 64, "WAVES": 3, "STAGES": 3, "num_warps": 4}
        return {"BLOCK_M": 64, "BLOCK_N": 128, "WAVES": 1, "STAGES": 3, "num_warps": 8}
    if m < 160 or name == "bf16" or (name == "mxfp4" and m >= 1024):
        return {"BLOCK_M": 128, "BLOCK_N": 64, "WAVES": 1, "STAGES": 3, "num_warps": 4}
    return {"BLOCK_M": 256, "BLOCK_N": 128, "WAVES": 1, "STAGES": 3, "num_warps": 8}


def _gemm_words(name: str, m: int, n: int, k: int, batch_invariant: bool) -> dict[str, int]:
    """mxfp4: measured at 1 to 16 and 256 rows of an expert; fp8: at 64, 128 and 256 rows, otherwise only inside a whole step.

    At 64 rows a tile of 64 columns reads two bytes of rows, from the second cache, for each byte of weights; one of 128, one.
    With 8 warps the wider tile takes 127 registers, so that two programs share a processor; it wins where the sum is not split.
    """
    mxfp4 = name == "mxfp4_words"
    shared = {"ATOMS": 2 if mxfp4 and m <= 32 and not batch_invariant else 1, "PAIRS": int(has_bf16_pairs()), "STAGES": 3}
    if not batch_invariant and not mxfp4 and 32 < m <= 64 and n >= 8192:
        return shared | {"BLOCK_M": 64, "BLOCK_N": 128, "WAVES": 3, "num_warps": 8}
    if not batch_invariant and not mxfp4 and 32 < m <= 64:
        waves = 1 if n > 1024 and n * k < 10_000_000 else 2  # 1,024 columns: eight such products side by side
        return shared | {"BLOCK_M": 64, "BLOCK_N": 64, "WAVES": waves, "STAGES": 4, "num_warps": 4}
    if batch_invariant or 32 < m <= 64:
        return shared | {"BLOCK_M": 64, "BLOCK_N": 128, "WAVES": 1, "num_warps": 4}
    if m <= 32:
        block_m = 16 if m <= 16 else 32
        if mxfp4:
            tile = {"BLOCK_N": 64, "num_warps": 4} if m <= 16 else {"BLOCK_N": 128, "num_warps": 8}
            return shared | {"BLOCK_M": block_m, "WAVES": 3} | tile
        return shared | {"BLOCK_M": block_m, "BLOCK_N": 128, "WAVES": 3, "STAGES": 4, "num_warps": 8}
    if not mxfp4 and m <= 512:
        if n * k < 10_000_000 and not (m > 128 and n <= 1024):
            return shared | {"BLOCK_M": 128, "BLOCK_N": 64, "WAVES": 1, "STAGES": 4, "num_warps": 4}
        if m > 128 and n * k >= 1 << 24:
            return shared | {"BLOCK_M": 256, "BLOCK_N": 128, "WAVES": 1, "num_warps": 8}
    return shared | {"BLOCK_M": 128, "BLOCK_N": 128, "WAVES": 1, "num_warps": 8}


def indexer(rows: int, width: int, candidates: bool) -> dict[str, int | None]:
    """TILES tiles of BLOCK_N keys a program: at 64 to 256 rows of 4 k to 128 k about 512 programs were the best, and no more
    than 16 tiles. REGISTERS a thread at most: that pays where blocks are looked up.
    """
    if INTERPRETED:
        return {"BLOCK_N": 128 - 64 * (rows % 2), "TILES": 2, "REGISTERS": None}
    tiles = max(1, rows * cdiv(width, 128) // 512)
    return {"BLOCK_N": 128, "TILES": min(16, 1 << tiles.bit_length() - 1), "REGISTERS": 128 if candidates else None}


def topk(rows: int, n: int, k: int) -> dict[str, int]:
    """FORM 1: by a bound from group maxima, BITS bits of a key a turn, rows cut into WAVES programs a processor; 0: one bit a
    turn over all scores.

    The bound wins 1.9 to 5 times where n is 16 k and more, and loses at 8 k of which 2,048 are taken. With 4 bits a program
    takes 206 registers, so that a processor holds one of 8 warps; REGISTERS 128 lets it hold two.
    """
    if n < 16 * k or k > 2048:
        return {"FORM": 0}
    if INTERPRETED:
        return {"FORM": 1, "BITS": 4, "WAVES": 2, "REGISTERS": None, "num_warps": 4}
    if rows > 512 or n >= 1 << 17:
        return {"FORM": 1, "BITS": 2, "WAVES": 1 if rows > 512 else 2, "REGISTERS": None, "num_warps": 8}
    return {"FORM": 1, "BITS": 4, "WAVES": 1, "REGISTERS": 128, "num_warps": 8}


def sample() -> dict[str, int]:
    """See `sampling_split.sample_split`. The same for any number of rows: sums differ by PART. Measured at 8 to 512 rows."""
    return sample_parts(64, GROUPS=16, DENSE=64, JOIN_WARPS=4) if INTERPRETED else sample_parts(4096)


def sample_parts(part: int, **others: int) -> dict[str, int]:
    """Of 4,096 tokens, 4 warps won over 8, and over parts of 8,192, in all of five shapes. BITS 4 spills."""
    return {"PART": part, "GROUPS": 32, "DENSE": 2048, "BITS": 2, "num_warps": 4, "JOIN_WARPS": 16} | others


def verify_drafts() -> dict[str, int]:
    """PART: tokens of the residual's vocabulary that one program draws among."""
    return {"PART": 64 if INTERPRETED else 4096, "num_warps": 8}


def mhc(tokens: int, batch_invariant: bool) -> dict[str, int]:
    """SPLITS: parts of the projection's sum; 0: as many as make WAVES programs a processor.

    Few tokens: one wave was measured as fastest with the coefficients behind it (18.7 us at 64). In a decode step these run
    beside what follows, so the pass alone counts: with three waves it took 0.13 ms of a step of 64 tokens and 8 layers, with
    one 0.36.
    """
    splits = 16 if batch_invariant else 0
    if INTERPRETED:
        return {"BLOCK_T": 16, "BLOCK_D": 32, "STAGES": 1, "WAVES": 2, "SPLITS": splits // 4, "num_warps": 4}
    if tokens <= 512 and not batch_invariant:
        return {"BLOCK_T": 16, "BLOCK_D": 64, "STAGES": 1, "WAVES": 3, "SPLITS": 0, "num_warps": 4}
    return {"BLOCK_T": 32, "BLOCK_D": 32, "STAGES": 3, "WAVES": 2, "SPLITS": splits, "num_warps": 4}


def quantise(name: str) -> dict[str, int]:
    """ELEMENTS a program. FORM 1: quotients by corrected reciprocals, FP4 codes in few operations.

    fp4_e4m3 keeps form 0: form 1 was wrong on the card with 32 elements a thread, by a fault of ptxas that `_triton.round_e4m3`
    now avoids, and has not run there since.
    """
    return {"FORM": int(INTERPRETED or name != "fp4_e4m3"), "ELEMENTS": 4096, "num_warps": 4}


def rope(heads: int) -> dict[str, int]:
    return {"BLOCK_H": 64 if heads >= 64 else 16, "num_warps": 4}


def engram_gather() -> dict[str, int]:
    return {"BLOCK": 32, "num_warps": 4}


def engram_gate(dim: int) -> dict[str, int]:
    return {"num_warps": 8 if dim > 2048 else 4}


def plan_few() -> dict[str, int]:
    """The plan of few choices in one launch. It has not run on a card yet."""
    return {"BLOCK": 32 if INTERPRETED else 512, "num_warps": 4}


def plan_rows() -> dict[str, int]:
    return {"BLOCK": 1024, "num_warps": 4}


def route() -> dict[str, int]:
    """A warp a token. Two were measured as slower (44.2 us against 27.2 at 16,384 tokens); a few tokens are not measured."""
    return {"num_warps": 1}
