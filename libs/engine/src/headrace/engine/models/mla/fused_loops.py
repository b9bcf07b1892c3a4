"""Single rows of many sequences through all layers in one compiled call (see `headrace.kernels.cpu`).

A decode step of a small model is thousands of torch operators that each do almost nothing; this is the same arithmetic as
loops. Activations stay fp32 from the embedding to the last norm, so it rounds less than the torch path; weights and cache
entries are bf16 in both. Each row reads and writes only its own sequence's blocks.

Knows arithmetic and where `fused.Packed` put things. Does not know segments, slots or checkpoints.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from headrace.kernels.cpu.rows import best, compiled, dot, narrow, product, rms_norm, rotate, silu_product, softmax, widen

from .cache import BLOCK_TOKENS
from .config import ModelConfig
from .layers import LATENT_EPS, attention_scale

# Places in a layer's line of offsets: into bf16 weights, then into fp32 ones. Absent: -1.
W_A, W_Q, W_UK, W_UV, W_O, W_IN, W_OUT, EXPERTS, NORM_IN, NORM_Q, NORM_KV, NORM_POST, GATE, BIAS = range(14)


class Dims(NamedTuple):
    """Sizes of a model. `inter`: of the dense layers; `shared`: of the shared experts as one, 0 without; `q_rank` 0: none."""

    hidden: int
    heads: int
    q_rank: int
    rank: int
    nope: int
    rope: int
    v: int
    inter: int
    shared: int
    expert: int
    experts: int
    top_k: int
    groups: int
    top_groups: int
    two_best: bool  # a group is as strong as its two best experts, not as its best one
    sigmoid: bool
    normalise: bool
    routed_scale: float
    scale: float
    eps: float
    latent_eps: float
    block_tokens: int


@lru_cache
def dims(c: ModelConfig) -> Dims:
    """Sizes of a model, as the loops want them."""
    return Dims(
        hidden=c.hidden_size, heads=c.num_attention_heads, q_rank=c.q_lora_rank or 0, rank=c.kv_lora_rank,
        nope=c.qk_nope_head_dim, rope=c.qk_rope_head_dim, v=c.v_head_dim, inter=c.intermediate_size,
        shared=c.moe_intermediate_size * (c.n_shared_experts or 0), expert=c.moe_intermediate_size,
        experts=c.n_routed_experts or 0, top_k=c.num_experts_per_tok or 0,
        groups=(c.n_group or 1) if c.topk_method != "greedy" else 1, top_groups=c.topk_group or 1,
        two_best=c.topk_method == "noaux_tc", sigmoid=c.scoring_func == "sigmoid", normalise=c.norm_topk_prob,
        routed_scale=float(c.routed_scaling_factor), scale=float(attention_scale(c)), eps=float(c.rms_norm_eps),
        latent_eps=LATENT_EPS, block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


@compiled
def matrix(flat, start, outs, width):
    """outs x width weights from `start` on."""
    return flat[start : start + outs * width].reshape(outs, width)


@compiled
def forward(x, positions, floors, tables, pool, groups, turns, at, w16, w32, d):
    """Rows x fp32 [R, hidden], in place: embeddings in, hidden vectors before the final norm out.

    positions, floors int64 [R]: a row's entry is written unless its position is below its floor. tables int64 [R, blocks].
    pool uint16 [blocks, block elements]; groups int64 [layers]: a layer's first element in a block. turns fp32 [positions,
    rope / 2, 2]. at int64 [layers, 14]: offsets into w16 (bf16 bits) and w32 (fp32).
    """
    rows = x.shape[0]
    normed = np.empty((rows, d.hidden), np.float32)
    update = np.empty((rows, d.hidden), np.float32)
    for layer in range(at.shape[0]):
        o = at[layer]
        for r in range(rows):
            rms_norm(x[r], w32[o[NORM_IN] : o[NORM_IN] + d.hidden], d.eps, normed[r])
        attention(normed, positions, floors, tables, pool, groups[layer], turns, o, w16, w32, d, update)
        for r in range(rows):
            for i in range(d.hidden):
                x[r, i] += update[r, i]
            rms_norm(x[r], w32[o[NORM_POST] : o[NORM_POST] + d.hidden], d.eps, normed[r])
        if o[EXPERTS] < 0:
            feed_forward(normed, w16, o[W_IN], o[W_OUT], d.inter, update)
        else:
            experts(normed, w16, w32, o, d, update)
        for r in range(rows):
            for i in range(d.hidden):
                x[r, i] += update[r, i]


# ------------------------------------------------------------------ attention


@compiled
def attention(x, positions, floors, tables, pool, group, turns, o, w16, w32, d, out):
    """Absorbed attention of normed rows [R, hidden] over their sequences' latents."""
    rows, heads, latent, head = x.shape[0], d.heads, d.rank + d.rope, d.nope + d.rope
    before = d.q_rank if d.q_rank else heads * head
    first = np.empty((rows, before + latent), np.float32)
    product(x, matrix(w16, o[W_A], before + latent, d.hidden), first)
    queries = np.empty((rows, heads * head), np.float32)
    if d.q_rank:
        compressed = np.empty((rows, d.q_rank), np.float32)
        for r in range(rows):
            rms_norm(first[r][: d.q_rank], w32[o[NORM_Q] : o[NORM_Q] + d.q_rank], d.latent_eps, compressed[r])
        product(compressed, matrix(w16, o[W_Q], heads * head, d.q_rank), queries)
    else:
        queries[:] = first[:, :before]
    entry = np.empty(latent, np.float32)
    for r in range(rows):
        turn, own = turns[positions[r]], first[r][before:]
        for h in range(heads):
            rotate(queries[r][h * head + d.nope : (h + 1) * head], turn)
        rms_norm(own[: d.rank], w32[o[NORM_KV] : o[NORM_KV] + d.rank], d.latent_eps, entry[: d.rank])
        rotate(own[d.rank :], turn)
        entry[d.rank :] = own[d.rank :]
        if positions[r] >= floors[r]:
            write(pool, group, tables[r], positions[r], d.block_tokens, entry)
    absorbed = absorb(queries, w16, o, d)
    context = np.empty((heads, rows, d.rank), np.float32)
    for r in range(rows):
        attend(absorbed[r], positions[r] + 1, tables[r], pool, group, d, context, r)
    attended, one = np.empty((rows, heads * d.v), np.float32), np.empty((rows, d.v), np.float32)
    for h in range(heads):
        product(context[h], matrix(w16, o[W_UV] + h * d.v * d.rank, d.v, d.rank), one)
        for r in range(rows):
            attended[r, h * d.v : (h + 1) * d.v] = one[r]
    product(attended, matrix(w16, o[W_O], d.hidden, heads * d.v), out)


@compiled
def write(pool, group, table, position, block_tokens, entry):
    """Round one entry into its block. A block that is entered is cleared: whatever reads whole blocks masks what is behind
    the last entry, but 0 * NaN would not be 0."""
    width, block, place = entry.shape[0], table[position // block_tokens], position % block_tokens
    line = pool[block]
    if place == 0:
        line[group : group + block_tokens * width] = 0
    start = group + place * width
    for i in range(width):
        line[start + i] = narrow(entry[i])


@compiled
def absorb(queries, w16, o, d):
    """[R, heads * (nope + rope)] -> [R, heads, rank + rope]: queries against latents."""
    rows, head = queries.shape[0], d.nope + d.rope
    result = np.empty((rows, d.heads, d.rank + d.rope), np.float32)
    part, wide = np.empty((rows, d.nope), np.float32), np.empty((rows, d.rank), np.float32)
    for h in range(d.heads):
        for r in range(rows):
            part[r] = queries[r, h * head : h * head + d.nope]
            result[r, h, d.rank :] = queries[r, h * head + d.nope : (h + 1) * head]
        product(part, matrix(w16, o[W_UK] + h * d.rank * d.nope, d.rank, d.nope), wide)
        for r in range(rows):
            result[r, h, : d.rank] = wide[r]
    return result


@compiled
def attend(q, keys, table, pool, group, d, context, row):
    """One row: q [heads, latent] over `keys` entries -> context[:, row] [heads, rank]."""
    heads, latent, tokens = d.heads, d.rank + d.rope, d.block_tokens
    weights, part = np.empty((heads, keys), np.float32), np.empty((heads, tokens), np.float32)
    for begin in range(0, keys, tokens):
        count = min(tokens, keys - begin)
        product(q, matrix(pool[table[begin // tokens]], group, count, latent), part)
        for h in range(heads):
            for k in range(count):
                weights[h, begin + k] = part[h, k] * d.scale
    for h in range(heads):
        softmax(weights[h])
        context[h, row] = 0.0
    wide = np.empty((4, d.rank), np.float32)
    for begin in range(0, keys, tokens):
        count = min(tokens, keys - begin)
        entries = matrix(pool[table[begin // tokens]], group, count, latent)
        for k in range(0, count, 4):
            few = min(4, count - k)
            for j in range(4):
                for i in range(d.rank):
                    wide[j, i] = widen(entries[k + min(j, few - 1), i])
            for h in range(heads):
                add_values(weights[h], begin + k, few, wide, context[h, row])


@compiled
def add_values(weights, start, few, wide, out):
    """out += the next `few` (at most 4) weights times wide [4, rank]."""
    p0 = weights[start]
    p1 = weights[start + 1] if few > 1 else np.float32(0)
    p2 = weights[start + 2] if few > 2 else np.float32(0)
    p3 = weights[start + 3] if few > 3 else np.float32(0)
    w0, w1, w2, w3 = wide[0], wide[1], wide[2], wide[3]
    for i in range(out.shape[0]):
        out[i] += p0 * w0[i] + p1 * w1[i] + p2 * w2[i] + p3 * w3[i]


# ------------------------------------------------------------------ feed-forward


@compiled
def feed_forward(x, w16, w_in, w_out, inter, out):
    """One MLP on rows [R, hidden]; `w_in`, `w_out`: where its weights begin."""
    rows, hidden = x.shape
    wide, narrowed = np.empty((rows, 2 * inter), np.float32), np.empty((rows, inter), np.float32)
    product(x, matrix(w16, w_in, 2 * inter, hidden), wide)
    silu_product(wide, inter, narrowed)
    product(narrowed, matrix(w16, w_out, hidden, inter), out)


@compiled
def experts(x, w16, w32, o, d, out):
    """Routed experts and the shared ones on rows [R, hidden]."""
    rows, hidden = x.shape
    chosen, weights = np.empty((rows, d.top_k), np.int64), np.empty((rows, d.top_k), np.float32)
    gate = matrix(w32, o[GATE], d.experts, d.hidden)
    bias = w32[o[BIAS] : o[BIAS] + d.experts] if o[BIAS] >= 0 else w32[:0]
    for r in range(rows):
        route(x[r], gate, bias, d, chosen[r], weights[r])
    if d.shared:
        feed_forward(x, w16, o[W_IN], o[W_OUT], d.shared, out)
    else:
        out[:] = 0.0
    size = 3 * d.expert * hidden
    mine, share = np.empty(rows, np.int64), np.empty(rows, np.float32)
    gathered, result = np.empty((rows, hidden), np.float32), np.empty((rows, hidden), np.float32)
    for e in range(d.experts):
        count = 0
        for r in range(rows):
            for k in range(d.top_k):
                if chosen[r, k] == e:
                    mine[count], share[count] = r, weights[r, k]
                    gathered[count] = x[r]
                    count += 1
        if count:
            start = o[EXPERTS] + e * size
            feed_forward(gathered[:count], w16, start, start + 2 * d.expert * hidden, d.expert, result)
            for j in range(count):
                for i in range(hidden):
                    out[mine[j], i] += share[j] * result[j, i]


@compiled
def route(x, gate, bias, d, chosen, weights):
    """Expert ids [k] and weights [k] of one row; gate fp32 [experts, hidden]. The bias (or none) chooses but does not weigh."""
    scores, choice = np.empty(d.experts, np.float32), np.empty(d.experts, np.float32)
    for e in range(d.experts):
        scores[e] = dot(gate[e], x)
    if d.sigmoid:
        for e in range(d.experts):
            scores[e] = np.float32(1) / (np.float32(1) + np.exp(-scores[e]))
    else:
        softmax(scores)
    for e in range(d.experts):
        choice[e] = scores[e] + (bias[e] if bias.shape[0] else np.float32(0))
    if d.top_groups < d.groups:
        inside_groups(choice, d)
    best(choice, d.top_k, chosen)
    total = np.float32(1e-20)
    for k in range(d.top_k):
        weights[k] = scores[chosen[k]]
        total += weights[k]
    for k in range(d.top_k):
        weights[k] *= d.routed_scale / (total if d.normalise else np.float32(1))


@compiled
def inside_groups(choice, d):
    """-inf outside of the best groups."""
    size = d.experts // d.groups
    strength, order, two = np.empty(d.groups, np.float32), np.empty(d.groups, np.int64), np.empty(2, np.int64)
    for g in range(d.groups):
        part = choice[g * size : (g + 1) * size].copy()
        values = part.copy()
        best(part, min(2, size), two)
        strength[g] = values[two[0]] + (values[two[1]] if d.two_best and size > 1 else np.float32(0))
    best(strength, d.top_groups, order)
    for g in range(d.groups):
        kept = False
        for k in range(d.top_groups):
            kept = kept or order[k] == g
        if not kept:
            choice[g * size : (g + 1) * size] = -np.inf
