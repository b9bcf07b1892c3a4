"""Which drafts stand, and which token comes behind them.

A window is the rows of one sequence in a batch of logits: the row before its first draft, then one row a draft. Row i is the
target's answer behind the drafts before it, so the longest accepted prefix is settled in one forward pass, and the row behind
it gives one token more.

    exact      each row draws the target's token with its own keyed noise; a draft stands if it is that token. What comes out
               is, bit for bit, what comes out without drafts, however many are verified. Drafts are drawn with the same noise
               from the draft's distribution: so they meet the target's token more often than independent draws would.
    standard   rejection sampling (Leviathan et al. 2023): accept draft x with probability min(1, p(x) / q(x)), else draw from
               max(p - q, 0). The same distribution, another sample; how many drafts were verified changes the sample.

Greedy sequences are exact in both. Temperature, top-k, top-p, min-p and penalties make p, and in the same way q.
Knows logits and draws. Does not know sequences, blocks or who chose how many rows to verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from . import rng
from .sampler import CACHE_ENTRIES, Draw, choose, probabilities, report, sample
from .sequence import Chosen


@dataclass(slots=True)
class Window:
    draws: list[Draw]  # one a row
    drafts: list[int] = field(default_factory=list)  # one fewer
    logits: torch.Tensor | None = None  # fp32 [len(drafts), V]: what the drafts were drawn from; mode `standard` only


def window_draws(first: Draw, drafts: list[int]) -> list[Draw]:
    """The draws of a window's rows: each takes the drafts before it as given."""
    more = (first.behind([*first.more, *drafts[:i]], first.position + i) for i in range(1, len(drafts) + 1))
    return [first, *more]


def drafting(mode: str, draw: Draw) -> rng.Purpose:
    """The noise that a draft is drawn with: the target's own where equality counts, else independent noise."""
    return rng.Purpose.SAMPLE if mode == "exact" or draw.greedy else rng.Purpose.DRAFT


def accept(
    mode: str,
    logits: torch.Tensor,
    windows: Sequence[Window],
    eos_token_ids: Sequence[int],
    drawn: torch.Tensor | None = None,
) -> list[list[Chosen]]:
    """logits fp32 [rows of all windows, V] -> per window its accepted drafts and one token more. `drawn` int64 [windows]: the
    tokens, where there are no drafts and they were drawn already."""
    if not any(window.drafts for window in windows):
        draws = [window.draws[0] for window in windows]
        return [[one] for one in sample(logits, draws, eos_token_ids, None if drawn is None else drawn.tolist())]
    starts = [0]
    for window in windows:
        starts.append(starts[-1] + len(window.draws))
    free = [i for i, w in enumerate(windows) if mode == "standard" and w.drafts and not w.draws[0].greedy]
    tied = [i for i in range(len(windows)) if i not in set(free)]
    tokens: dict[int, list[int]] = {}
    for some, rule in ((tied, _matches), (free, _rejection)):
        for part in _portions(some, windows, logits) if rule is _rejection else [some]:
            if part:
                rows = [row for i in part for row in range(starts[i], starts[i + 1])]
                few = logits if len(rows) == len(logits) else logits[rows]
                tokens |= zip(part, rule(few, [windows[i] for i in part], eos_token_ids), strict=True)
    out = [[Chosen(token) for token in tokens[i]] for i in range(len(windows))]
    rows = [starts[i] + at for i, some in enumerate(out) for at in range(len(some))]
    draws = [window.draws[at] for window, some in zip(windows, out, strict=True) for at in range(len(some))]
    report(logits[rows], draws, [one for some in out for one in some])
    return out


def _portions(some: list[int], windows: Sequence[Window], logits: torch.Tensor) -> list[list[int]]:
    """Windows whose fp64 images fit a CPU's cache, or at least each one alone; all of them at once on a device."""
    most = CACHE_ENTRIES // logits.shape[-1] if logits.device.type == "cpu" else sum(len(w.draws) for w in windows)
    parts: list[list[int]] = []
    rows = 0
    for i in some:
        if parts and rows + len(windows[i].draws) <= most:
            parts[-1].append(i)
        else:
            parts.append([i])
            rows = 0
        rows += len(windows[i].draws)
    return parts


def _matches(logits: torch.Tensor, windows: Sequence[Window], eos_token_ids: Sequence[int]) -> list[list[int]]:
    """Draw every row's token; drafts stand as long as they equal it."""
    drawn = choose(logits, [draw for window in windows for draw in window.draws], eos_token_ids)
    out, start = [], 0
    for window in windows:
        own = drawn[start : start + len(window.draws)]
        out.append(own[: 1 + _agreeing(own, window.drafts)])
        start += len(own)
    return out


def _agreeing(tokens: Sequence[int], drafts: Sequence[int]) -> int:
    return next((i for i, draft in enumerate(drafts) if tokens[i] != draft), len(drafts))


def _rejection(logits: torch.Tensor, windows: Sequence[Window], eos_token_ids: Sequence[int]) -> list[list[int]]:
    """Accept while u q(x) <= p(x); then one token from the residual, or from p when all drafts stand."""
    draws = [draw for window in windows for draw in window.draws]
    p = probabilities(logits, draws, eos_token_ids)  # [rows, V]
    tested, place = [], {}  # rows with a draft; where a row is among them
    start = 0
    for window in windows:
        for at in range(len(window.drafts)):
            place[start + at] = len(tested)
            tested.append(start + at)
        start += len(window.draws)
    q = probabilities(torch.cat([w.logits for w in windows]), [draws[row] for row in tested], eos_token_ids)
    x = torch.tensor([draft for w in windows for draft in w.drafts], device=p.device).unsqueeze(-1)
    u = rng.uniform(_streams([draws[row] for row in tested], rng.Purpose.ACCEPT, p.device), torch.zeros_like(x))
    stands = (u * q.gather(-1, x) <= p[tested].gather(-1, x)).squeeze(-1).tolist()
    last, rejected, accepted = [], [], []  # the row that each window's last token comes from
    start = 0
    for window in windows:
        own = stands[place[start] : place[start] + len(window.drafts)]
        accepted.append(own.index(False) if False in own else len(own))
        last.append(start + accepted[-1])
        rejected.append(accepted[-1] < len(own))
        start += len(window.draws)
    weights = p[last]
    if some := [i for i, no in enumerate(rejected) if no]:
        residual = (weights[some] - q[[place[last[i]] for i in some]]).clamp_(min=0.0)
        # p <= q everywhere only where they are equal but for rounding: then p is what is left
        weights[some] = torch.where(residual.sum(-1, keepdim=True) > 0, residual, weights[some])
    purposes = [rng.Purpose.RESIDUAL if no else rng.Purpose.SAMPLE for no in rejected]
    keys = [
        rng.key(d.params.seed, d.choice, d.position, purpose)
        for d, purpose in zip((draws[row] for row in last), purposes, strict=True)
    ]
    noise = rng.gumbel(rng.keys(keys, p.device).unsqueeze(-1), torch.arange(p.shape[-1], device=p.device))
    tokens = (weights.log() + noise).argmax(-1).tolist()
    return [[*window.drafts[:n], token] for window, n, token in zip(windows, accepted, tokens, strict=True)]


def _streams(draws: Sequence[Draw], purpose: rng.Purpose, device: torch.device) -> torch.Tensor:
    keys = [rng.key(draw.params.seed, draw.choice, draw.position, purpose) for draw in draws]
    return rng.keys(keys, device).unsqueeze(-1)  # [R, 1]
