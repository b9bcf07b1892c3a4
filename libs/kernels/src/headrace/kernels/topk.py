"""Exact top-k of long rows: the k largest scores, ties to the lower position, positions in ascending order.

Selection on order-preserving keys, in the forms of `tuning.topk`: a bound from group maxima leaves few scores among which the
k-th is found bit by bit, or all of a part compete; a longer row is cut into parts, whose winners compete once more. A very
long row, or a large k, is walked by one program instead, four histograms of eight bits finding the key. Positions ascend
in every step, so ties are always settled alike, and a result never depends on other rows. NaN is not a score.
"""

import torch

from headrace.kernels import tuning
from headrace.kernels._triton import INTERPRETED, cdiv, next_power_of_2, processor_count, tl, triton

PART = 16384 if not INTERPRETED else 256  # scores that one program holds


def topk_reference(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """scores fp32 [T, N]; lengths int32 [T] scores in use (default N) -> int32 [T, k] ascending, -1 behind the last.

    A score of -inf is never taken.
    """
    rows, n = scores.shape
    out = torch.full((rows, k), -1, dtype=torch.int32, device=scores.device)
    for t in range(rows):
        row = scores[t, : n if lengths is None else int(lengths[t])]
        best = row.sort(descending=True, stable=True)
        chosen = best.indices[:k][best.values[:k] > float("-inf")].sort().values
        out[t, : len(chosen)] = chosen
    return out


def topk(scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """As `topk_reference`; columns contiguous. One or two launches."""
    rows, n = scores.shape
    out = torch.empty(rows, k, dtype=torch.int32, device=scores.device)
    if not rows:
        return out
    config = tuning.topk(rows, n, k)
    if config["FORM"] == 1:
        return _topk_by_bound(scores, k, lengths, out, config)
    if n > PART * 32 or k > PART // 2:
        _walk_kernel[(rows,)](
            scores, lengths if lengths is not None else out, out, n, scores.stride(0), k,
            HAS_LENGTHS=lengths is not None, BLOCK=8192, num_warps=8,
        )  # fmt: skip
        return out
    parts = cdiv(n, PART)
    chosen = out if parts <= 1 else torch.empty(rows, parts * k, dtype=torch.int32, device=scores.device)
    _select(scores, lengths, None, chosen, min(n, PART), n, k, (rows, max(parts, 1)))
    if parts > 1:
        _select(scores, None, chosen, out, parts * k, parts * k, k, (rows, 1))
    return out


def _topk_by_bound(scores: torch.Tensor, k: int, lengths: torch.Tensor | None, out: torch.Tensor, config: dict[str, int]):
    rows, n = scores.shape
    groups = max(256, next_power_of_2(2 * k))
    parts = max(1, min(cdiv(n, max(4 * groups, 8192)), config["WAVES"] * processor_count() // rows))
    part = cdiv(cdiv(n, parts), groups) * groups  # parts begin at a multiple of the groups
    fours = scores.stride(0) % 4 == 0 and scores.stride(0) >= n
    shared = {"GROUPS": groups, "ROOM": groups, "TILE": max(1, 4096 // groups), "BLOCK": 4096, "FOURS": fours}
    shared |= {"BITS": config["BITS"] if groups <= 1024 else 2, "num_warps": config["num_warps"]}
    shared |= {"maxnreg": config["REGISTERS"] if groups <= 1024 else None}
    room = torch.empty(rows, parts, groups, dtype=torch.int32, device=scores.device)
    chosen = out if parts == 1 else torch.empty(rows, parts, k, dtype=torch.int32, device=scores.device)
    first = lengths if lengths is not None else out
    _bound_kernel[(rows, parts)](
        scores, first, out, chosen, room, n, part, scores.stride(0), k, HAS_LENGTHS=lengths is not None, CANDIDATES=False,
        **shared,
    )  # fmt: skip
    if parts > 1:
        width = parts * k
        _bound_kernel[(rows, 1)](
            scores, out, chosen, out, room, width, width, scores.stride(0), k, HAS_LENGTHS=False, CANDIDATES=True, **shared,
        )  # fmt: skip
    return out


@triton.jit
def _bound_kernel(
    score_ptr, length_ptr, candidate_ptr, out_ptr, room_ptr, n, part, stride, k,
    HAS_LENGTHS: tl.constexpr, CANDIDATES: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr, BITS: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, FOURS: tl.constexpr,
):  # fmt: skip
    """The best k of one part of a row (or of the positions in its candidate list), in ascending order.

    The k-th largest maximum of 2 k interleaved groups bounds the k-th largest score from below, and few other scores reach
    it: those that do are listed, and only among them the k-th is found bit by bit. Where many do (ties), the whole part
    is searched by histograms.
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1)
    parts = tl.num_programs(1)
    score_ptr += row * stride
    out_ptr += (row * parts + index) * k
    room_ptr += (row * parts + index) * ROOM
    candidate_ptr += row * n
    if HAS_LENGTHS:
        n = tl.minimum(tl.load(length_ptr + row), n)
    begin = index * part
    end = tl.minimum(n, begin + part)
    group = tl.arange(0, GROUPS)
    best = tl.full([GROUPS], float("-inf"), tl.float32)
    inside = tl.arange(0, TILE)[:, None] * GROUPS + group[None, :]
    for tile in tl.range(begin, end, TILE * GROUPS, num_stages=2):
        score, _ = _scores(score_ptr, candidate_ptr, tile + inside, end, CANDIDATES, FOURS)
        best = tl.maximum(best, tl.max(score, 0))
    low = kth_of(tl.where(best > float("-inf"), sort_key(best), 0), k, 16, BITS)
    low = score_of(tl.maximum(low, 0x00800000))  # no score: -inf lies below
    count = tl.zeros([], tl.int32)
    # Four neighbours are one thread's, so that threads are counted through, not scores.
    spread = tl.arange(0, BLOCK // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for tile in tl.range(begin, end, BLOCK, num_stages=2):
        score, at = _scores(score_ptr, candidate_ptr, tile + spread, end, CANDIDATES, FOURS)
        kept = (score >= low).to(tl.int32)
        four = tl.sum(kept, 1)
        until = count + tl.cumsum(four, 0)
        place = (until - four)[:, None] + tl.cumsum(kept, 1) - 1
        tl.store(room_ptr + place, at, mask=(kept == 1) & (place < ROOM))
        count += tl.sum(four, 0)
    taken = tl.zeros([], tl.int32)
    if count <= ROOM:
        tl.debug_barrier()
        slot = tl.arange(0, ROOM)
        at = tl.load(room_ptr + slot, mask=slot < count, other=0)
        key = sort_key(tl.load(score_ptr + at, mask=slot < count, other=float("-inf")))
        key = tl.where(slot < count, key, 0)
        limit = kth_of(key, k, 0, BITS)
        taken = _keep_best(key, at, limit, k, out_ptr)
    else:
        taken = _walk(score_ptr, candidate_ptr, out_ptr, begin, end, k, CANDIDATES, 1024)
    _nothing_behind(out_ptr, taken, k)


@triton.jit
def _keep_best(key, at, limit, k, out_ptr):
    """Of keys in the order of their places `at`, store the places of the k best and return how many these are. `limit` is the
    k-th largest key; a key of 0 is never taken; of equal ones the first are."""
    need = k - tl.sum((key > limit).to(tl.int32), 0)
    equal = (key == limit).to(tl.int32)
    chosen = (key > 0) & ((key > limit) | ((equal == 1) & (tl.cumsum(equal, 0) <= need)))
    order = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(out_ptr + order - 1, at, mask=chosen)
    return tl.max(order, 0)


@triton.jit
def _nothing_behind(out_ptr, taken, k):
    for first in range(0, k, 256):
        behind = first + tl.arange(0, 256)
        tl.store(out_ptr + behind, tl.full([256], -1, tl.int32), mask=(behind >= taken) & (behind < k))


@triton.jit
def _scores(score_ptr, candidate_ptr, at, end, CANDIDATES: tl.constexpr, FOURS: tl.constexpr):
    """Scores at places below end (else -inf) and their positions. FOURS: rows begin at multiples of four, so that the four
    places of which the last lies below end can be read whole, as all others are: in one load."""
    live = at < end
    if CANDIDATES:
        at = tl.load(candidate_ptr + at, mask=live, other=-1)
        live = at >= 0
    if FOURS and not CANDIDATES:
        score = tl.load(score_ptr + at, mask=at // 4 < (end + 3) // 4, other=float("-inf"))
        return tl.where(live, score, float("-inf")), at
    else:
        return tl.load(score_ptr + at, mask=live, other=float("-inf")), at


@triton.jit
def kth_of(key, k, LOW: tl.constexpr, BITS: tl.constexpr):
    """The largest limit that at least k of the keys reach, BITS bits a turn; its bits below LOW are zero. Fewer keys than
    k: 0."""
    limit = tl.zeros([], tl.uint32)
    digit = tl.arange(0, 1 << BITS)
    for turn in tl.static_range((32 - LOW) // BITS):
        shift = 32 - BITS * (turn + 1)
        trial = limit | (digit.to(tl.uint32) << shift)
        reached = tl.sum((key[:, None] >= trial[None, :]).to(tl.int32), 0)
        highest = tl.max(tl.where(reached >= k, digit, 0), 0)
        limit = limit | (highest.to(tl.uint32) << shift)
    return limit


@triton.jit
def _walk(score_ptr, candidate_ptr, out_ptr, begin, end, k, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """The best k of places begin..end by histograms of the whole; returns how many there are."""
    limit, need = _kth_by_histogram(score_ptr, candidate_ptr, begin, end, k, CANDIDATES, BLOCK)
    taken = tl.zeros([], tl.int32)
    equal_taken = tl.zeros([], tl.int32)
    for tile in range(begin, end, BLOCK):
        score, at = _scores(score_ptr, candidate_ptr, tile + tl.arange(0, BLOCK), end, CANDIDATES, False)
        key = sort_key(score)
        finite = score > float("-inf")
        equal = ((key == limit) & finite).to(tl.int32)
        rank = tl.cumsum(equal, 0) + equal_taken
        chosen = finite & ((key > limit) | ((equal == 1) & (rank <= need)))
        order = tl.cumsum(chosen.to(tl.int32), 0) + taken
        tl.store(out_ptr + order - 1, at, mask=chosen)
        taken = tl.max(order, 0)
        equal_taken = tl.max(rank, 0)
    return taken


@triton.jit
def _kth_by_histogram(score_ptr, candidate_ptr, begin, end, k, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr):
    """As `kth_key` for places begin..end."""
    prefix = tl.zeros([], tl.uint32)
    need = tl.zeros([], tl.int32) + k
    bucket = tl.arange(0, 256)
    shift = tl.full([], 24, tl.uint32)  # of the digit in turn
    above = tl.zeros([], tl.uint32)  # the bits that are known
    for _ in range(4):
        counts = tl.zeros([256], tl.int32)
        for tile in range(begin, end, BLOCK):
            score, at = _scores(score_ptr, candidate_ptr, tile + tl.arange(0, BLOCK), end, CANDIDATES, False)
            key = sort_key(score)
            match = (score > float("-inf")) & ((key & above) == prefix)
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=match)
        greater = tl.sum(counts, 0) - tl.cumsum(counts, 0)
        here = (greater < need) & (need <= greater + counts)
        digit = tl.sum(tl.where(here, bucket, 0), 0)
        need -= tl.sum(tl.where(here, greater, 0), 0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
        above = above | (tl.full([], 255, tl.uint32) << shift)
        shift = (shift - 8).to(tl.uint32)
    return prefix, need


def _select(scores, lengths, candidates, out, width, n, k, grid) -> None:
    block = max(256, 1 << max(width - 1, 0).bit_length())
    _select_kernel[grid](
        scores, lengths if lengths is not None else out, candidates if candidates is not None else out, out, n,
        scores.stride(0), k, PART=PART, HAS_LENGTHS=lengths is not None, CANDIDATES=candidates is not None, BLOCK=block,
        num_warps=max(4, min(16, block // 1024)),
    )  # fmt: skip


@triton.jit
def sort_key(x):
    """fp32 -> uint32 of the same order (-0 below +0 is folded: both are +0)."""
    raw = (x + 0.0).to(tl.uint32, bitcast=True)
    return tl.where(raw >> 31 == 1, ~raw, raw | 0x80000000)


@triton.jit
def score_of(key):
    """The fp32 score of a key of `sort_key`."""
    return tl.where(key >> 31 == 1, key & 0x7FFFFFFF, ~key).to(tl.float32, bitcast=True)


@triton.jit
def kth_key(pointer, n, k, BLOCK: tl.constexpr):
    """The key of the k-th largest of n fp32 scores at pointer, and how many equal to it belong to the top k."""
    prefix = tl.zeros([], tl.uint32)
    need = tl.zeros([], tl.int32) + k
    bucket = tl.arange(0, 256)
    for level in tl.static_range(4):
        shift = 24 - 8 * level
        counts = tl.zeros([256], tl.int32)
        for begin in tl.range(0, n, BLOCK, num_stages=3):
            at = begin + tl.arange(0, BLOCK)
            key = sort_key(tl.load(pointer + at, mask=at < n, other=float("-inf")))
            match = at < n
            if level > 0:
                match = match & ((key >> (shift + 8)) == (prefix >> (shift + 8)))
            counts += tl.histogram(((key >> shift) & 255).to(tl.int32), 256, mask=match)
        greater = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # with a larger digit
        here = (greater < need) & (need <= greater + counts)
        digit = tl.sum(tl.where(here, bucket, 0), 0)
        need -= tl.sum(tl.where(here, greater, 0), 0)
        prefix = prefix | (digit.to(tl.uint32) << shift)
    return prefix, need


@triton.jit
def _select_kernel(
    score_ptr, length_ptr, candidate_ptr, out_ptr, n, stride, k,
    PART: tl.constexpr, HAS_LENGTHS: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best k of one part of a row, or of the candidate positions that the parts left, in registers."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    score_ptr += row * stride
    out_ptr += (row * tl.num_programs(1) + part) * k
    if HAS_LENGTHS:
        n = tl.load(length_ptr + row)
    at = tl.arange(0, BLOCK)
    if CANDIDATES:
        at = tl.load(candidate_ptr + row * n + at, mask=at < n, other=-1)
        score = tl.load(score_ptr + at, mask=at >= 0, other=float("-inf"))
    else:
        at += part * PART
        score = tl.load(score_ptr + at, mask=at < tl.minimum(n, (part + 1) * PART), other=float("-inf"))
    key = tl.where(score > float("-inf"), sort_key(score), 0)  # 0: not to be taken
    limit = tl.zeros([], tl.uint32)
    bit = tl.full([], 0x80000000, tl.uint32)
    for _ in range(32):  # the largest limit that at least k keys reach
        trial = limit | bit
        if tl.sum((key >= trial).to(tl.int32), 0) >= k:
            limit = trial
        bit = bit >> 1
    taken = _keep_best(key, at, limit, k, out_ptr)
    _nothing_behind(out_ptr, taken, k)


@triton.jit
def _walk_kernel(
    score_ptr, length_ptr, out_ptr, n, stride, k, HAS_LENGTHS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    score_ptr += row * stride
    out_ptr += row * k
    if HAS_LENGTHS:
        n = tl.load(length_ptr + row)
    limit = tl.zeros([], tl.uint32)
    need = tl.zeros([], tl.int32) + n  # no more scores than k: every one is equal or greater than key 0
    if n > k:
        limit, need = kth_key(score_ptr, n, k, BLOCK)
    taken = 0
    equal_taken = 0
    for begin in range(0, n, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        score = tl.load(score_ptr + at, mask=at < n, other=float("-inf"))
        key = sort_key(score)
        equal = ((key == limit) & (at < n)).to(tl.int32)
        rank = tl.cumsum(equal, 0) + equal_taken
        chosen = (at < n) & (score > float("-inf")) & ((key > limit) | ((equal == 1) & (rank <= need)))
        order = tl.cumsum(chosen.to(tl.int32), 0) + taken
        tl.store(out_ptr + order - 1, at, mask=chosen)
        taken = tl.max(order, 0)
        equal_taken = tl.max(rank, 0)
    for begin in range(0, k, 256):
        at = begin + tl.arange(0, 256)
        tl.store(out_ptr + at, tl.full([256], -1, tl.int32), mask=(at >= taken) & (at < k))
