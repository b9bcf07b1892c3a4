"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, keyed noise, and the raw model's log-probabilities.

    modified = logits after penalties and logit_bias, forbidden tokens (grammar, min_tokens) at -inf
    scores   = modified / temperature, cut to the top k, then to the smallest set with mass top_p, then to p >= min_p * p_max
    token    = argmax(scores + gumbel(seed, choice, position))          temperature 0: argmax(modified)

Each row is computed as if it were alone: nothing is reduced across rows, ties go to the lower id, and the noise is a function
of (seed, choice, position, purpose, id). On a CUDA device `headrace.kernels.sampling` draws, with the same keys and a noise of
its own (24 bits of it, sums in fp32; tokens equal to the k-th are all kept): a seed gives other tokens there than on a CPU.
Knows logits and `Draw`s. Does not know sequences, batches or stops.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch

from headrace.kernels import cpu

from . import rng
from .api import SamplingParams
from .sequence import Chosen

GREEDY_BELOW = 1e-5  # temperatures below this are 0
LEAST = 1e-30  # top_p of a kernel: its product with a mass must not be 0 in fp32, for then nobody would be chosen from
CACHE_ENTRIES = 1 << 17  # logits that a CPU works on at once: more would leave its cache (half the speed, measured)
CANDIDATES = 1024  # first look for top-p: nearly always enough, and rows that need more get the whole vocabulary


@dataclass(slots=True)
class Draw:
    """One token to choose: everything the choice depends on except the logits."""

    params: SamplingParams
    choice: int
    position: int  # absolute, of the token that is chosen
    ids: Sequence[int]  # all tokens before it, prompt first; what is in it from position - len(more) on is not looked at
    prompt_len: int  # of the client's prompt: all after it counts as output, whoever sampled it
    more: Sequence[int] = ()  # ... and behind `ids`: what is taken as given
    purpose: rng.Purpose = rng.Purpose.SAMPLE
    allowed: np.ndarray | None = None  # bits of the tokens that a grammar allows (`grammar.py`)
    held: Sequence[int] = ()  # tokens that must not come yet

    @property
    def greedy(self) -> bool:
        return self.params.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        return self.params.top_p < 1.0 or self.params.top_k > 0

    @property
    def free(self) -> bool:
        """The logits are drawn from as they are, whatever tokens came before."""
        p = self.params
        modified = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0 or p.logit_bias or p.min_tokens
        return not modified and self.allowed is None and not self.held

    def behind(self, more: Sequence[int], position: int) -> Draw:
        """The same of a later token; `more`: as above. No grammar has looked at it."""
        return Draw(self.params, self.choice, position, self.ids, self.prompt_len, more, self.purpose)


def sample(
    logits: torch.Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int], drawn: Sequence[int] | None = None
) -> list[Chosen]:
    """logits [R, V] fp32, one row per draw. They are left unchanged. `drawn`: the tokens, if they were chosen before."""
    chosen = [Chosen(token) for token in drawn or choose(logits, draws, eos_token_ids)]
    report(logits, draws, chosen)
    return chosen


def choose(logits: torch.Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> list[int]:
    """The tokens alone."""
    modified = _modify(logits, draws, eos_token_ids)
    if _kernels_draw(modified, draws):
        return by_kernel(modified, draws).tolist()
    tokens = [0] * len(draws)
    greedy = [i for i, draw in enumerate(draws) if draw.greedy]
    plain = [i for i, draw in enumerate(draws) if not draw.greedy and not draw.filtered]
    filtered = [i for i, draw in enumerate(draws) if not draw.greedy and draw.filtered]
    portions = [(greedy, _argmax)] if greedy else []
    portions += [(plain, _draw)] if plain else []
    portions += [(few, _draw_filtered) for few in _portions(filtered, logits)]
    for rows, choose in portions:
        part = modified if len(rows) == len(draws) else modified[rows]
        for row, token in zip(rows, choose(part, [draws[i] for i in rows]), strict=True):
            tokens[row] = token
    return tokens


def choose_there(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Tokens of `free` draws, int64 [R] where the logits are: on a CUDA device nobody waits for them."""
    if _kernels_draw(logits, draws):
        return by_kernel(logits, draws)
    return torch.tensor(choose(logits, draws, ()), device=logits.device)


def probabilities(logits: torch.Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """The distributions that `choose` draws from: fp64 [R, V]. No draw may be greedy."""
    modified = _modify(logits, draws, eos_token_ids)
    plain = [i for i, draw in enumerate(draws) if not draw.filtered]
    filtered = [i for i, draw in enumerate(draws) if draw.filtered]
    if not filtered:
        return torch.softmax(_min_p(_scale(modified, draws), draws), dim=-1)
    out = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)
    if plain:
        few = [draws[i] for i in plain]
        out[plain] = torch.softmax(_min_p(_scale(modified[plain], few), few), dim=-1)
    for rows, index, scores in _cut(modified[filtered], [draws[i] for i in filtered]):
        at = torch.tensor([filtered[row] for row in rows], device=logits.device)
        out[at.unsqueeze(-1), index] = torch.softmax(scores, dim=-1)
    return out


def _loops(logits: torch.Tensor) -> ModuleType | None:
    """The compiled loops (`headrace.kernels.cpu.sampling`) where they can work on these logits."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or not cpu.available():
        return None
    from headrace.kernels.cpu import sampling

    return sampling


def _portions(rows: list[int], logits: torch.Tensor) -> Iterator[list[int]]:
    """Rows in portions whose float64 and int64 images stay in a CPU's cache."""
    most = max(1, CACHE_ENTRIES // logits.shape[-1]) if logits.device.type == "cpu" else max(1, len(rows))
    return (rows[i : i + most] for i in range(0, len(rows), most))


# ---------------------------------------------------------------- by kernels


def _kernels_draw(logits: torch.Tensor, draws: Sequence[Draw]) -> bool:
    """Not what rejection weighs in fp64 against `probabilities`: that must be drawn from the very same numbers."""
    return logits.device.type == "cuda" and all(draw.purpose is rng.Purpose.SAMPLE for draw in draws)


def by_kernel(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Modified logits fp32 [R, V] -> tokens int64 [R], still on their way."""
    if all(draw.greedy for draw in draws):
        return logits.argmax(-1)
    from headrace.kernels.sampling import SamplingRows, sample  # needs triton

    count, params = len(draws), [draw.params for draw in draws]
    host = torch.empty(6, count, dtype=torch.int32, pin_memory=logits.device.type == "cuda")  # one copy for all
    table = host.numpy()
    table[:2].reshape(-1).view(np.int64)[:] = rng.keys(_keys(draws)).numpy()
    temperatures = [0.0 if draw.greedy else draw.params.temperature for draw in draws]
    table[2:5].view(np.float32)[:] = temperatures, [max(p.top_p, LEAST) for p in params], [p.min_p for p in params]
    table[5] = [min(p.top_k, logits.shape[-1]) for p in params]  # a client may ask for any number
    there = host.to(logits.device, non_blocking=True)
    keys, (temperature, top_p, min_p), top_k = there[:2].view(-1).view(torch.int64), there[2:5].view(torch.float32), there[5]
    filters = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0 for p in params)
    return sample(logits, SamplingRows(temperature, top_k, top_p, min_p, keys, filters=filters))[0].long()


# ---------------------------------------------------------------- what may be chosen


def _modify(logits: torch.Tensor, draws: Sequence[Draw], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """Penalties, biases and forbidden tokens. Returns `logits` itself when no row asks for any."""
    if all(draw.free for draw in draws):
        return logits
    rows, columns, values = [], [], []
    for row, draw in enumerate(draws):
        params = draw.params
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            seen, value = _penalise(logits[row], draw)
            rows += [row] * len(seen)
            columns.append(seen)
            values.append(value)
    vocab = logits.shape[-1]
    biased = [(row, t, b) for row, draw in enumerate(draws) for t, b in draw.params.logit_bias.items() if 0 <= t < vocab]
    ruled = [row for row, draw in enumerate(draws) if draw.allowed is not None]
    forbidden = [(row, t) for row, draw in enumerate(draws) for t in _forbidden(draw, eos_token_ids) if 0 <= t < vocab]
    if not (rows or biased or ruled or forbidden):
        return logits
    out = logits.clone()
    if rows:
        at = torch.tensor(rows, device=out.device), torch.cat(columns)
        out[at] = torch.cat(values)
    if biased:
        row, token, bias = zip(*biased, strict=True)
        out[torch.tensor(row, device=out.device), torch.tensor(token, device=out.device)] += torch.tensor(bias).to(out)
    if ruled:
        _rule_out(out, ruled, np.stack([draws[row].allowed for row in ruled]))
    if forbidden:
        at = torch.tensor(forbidden, device=out.device)
        out[at[:, 0], at[:, 1]] = -math.inf
    return out


def _rule_out(logits: torch.Tensor, rows: list[int], allowed: np.ndarray) -> None:
    """Tokens outside `allowed` (packed bits, one line for each of `rows`) to -inf, in place."""
    packed = torch.from_numpy(allowed.view(np.uint8)).to(logits.device)
    shut = _shut(logits.device).index_select(0, packed.view(-1).int()).view(len(rows), -1)[:, : logits.shape[-1]]
    if len(rows) == len(logits):
        logits += shut
    else:
        logits[torch.tensor(rows, device=logits.device)] += shut


@lru_cache(maxsize=8)
def _shut(device: torch.device) -> torch.Tensor:
    """Byte -> what is added to the logits of its eight tokens: [256, 8], -inf where the bit is 0. Single bits cost far more."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return torch.from_numpy(np.where(bits, np.float32(0), np.float32(-np.inf))).to(device)


def _penalise(logits: torch.Tensor, draw: Draw) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids seen so far, their new logits). Repetition counts prompt and output (Keskar et al. 2019: divide positive logits,
    multiply negative ones), presence and frequency only the output."""
    params = draw.params
    ids = np.asarray([*draw.ids[: draw.position - len(draw.more)], *draw.more], dtype=np.int64)
    seen, counts = np.unique(ids, return_counts=True)
    inside = seen < logits.shape[0]
    seen, counts = seen[inside], counts[inside]
    prompt, prompt_counts = np.unique(ids[: draw.prompt_len], return_counts=True)
    shared = np.isin(seen, prompt, assume_unique=True)
    counts[shared] -= prompt_counts[np.isin(prompt, seen, assume_unique=True)]
    seen_t = torch.from_numpy(seen).to(logits.device)
    output = torch.from_numpy(counts).to(logits)
    value = logits[seen_t]
    value = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    value -= params.frequency_penalty * output + params.presence_penalty * (output > 0)
    return seen_t, value


def _forbidden(draw: Draw, eos_token_ids: Sequence[int]) -> Sequence[int]:
    """Tokens that would stop an output shorter than min_tokens, or end one whose grammar has not begun. Where a grammar allows
    no others it has the last word."""
    params, tokens = draw.params, set(draw.held)
    if params.min_tokens > draw.position - draw.prompt_len:
        tokens.update(params.stop_token_ids, () if params.ignore_eos else eos_token_ids)
    if draw.allowed is not None:
        if params.ignore_eos:  # of the ways to go on, those that are not the end
            tokens.update(eos_token_ids)
        if tokens and _count(draw.allowed) <= sum(_allows(draw.allowed, token) for token in tokens):
            return ()
    return sorted(tokens)


def _count(allowed: np.ndarray) -> int:
    return int(np.bitwise_count(allowed.view(np.uint32)).sum())


def _allows(allowed: np.ndarray, token: int) -> bool:
    return 0 <= token < 32 * len(allowed) and bool(int(allowed[token // 32]) >> token % 32 & 1)


# ---------------------------------------------------------------- how it is chosen


def _argmax(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    if logits.device.type == "cpu":
        return logits.numpy().argmax(-1).tolist()  # ten times as fast as torch's on one thread
    return logits.argmax(-1).tolist()


def _draw(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Temperature, perhaps min-p, over the whole vocabulary."""
    loops = _loops(logits)
    if loops is not None:
        return _draw_from_few(loops, logits.contiguous(), draws)
    portions = _portions([*range(len(draws))], logits)
    return [token for few in portions for token in _draw_all(logits[few], [draws[i] for i in few])]


def _draw_from_few(loops: ModuleType, logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """The same tokens: only the ids that can win at all get their exact score and noise."""
    temperatures = np.array([draw.params.temperature for draw in draws])
    floors = np.array([math.log(draw.params.min_p) if draw.params.min_p > 0 else -math.inf for draw in draws])
    keys = _streams(draws, logits.device).numpy().view(np.uint64)[:, 0]
    index = np.empty((len(draws), loops.MOST), np.int64)
    counts = loops.candidates(logits.numpy(), logits.numpy().argmax(-1), temperatures, floors, keys, index)
    few = torch.from_numpy(index[:, : max(1, counts.max())])
    tokens = _pick(few, _min_p(_scale(logits.gather(-1, few), draws), draws), draws)
    for row in np.flatnonzero(counts < 0):  # nearly flat: more ids than a first look takes
        tokens[row : row + 1] = _draw_all(logits[row : row + 1], [draws[row]])
    return tokens


def _draw_all(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    scores = _scale(logits, draws)
    index = torch.arange(logits.shape[-1], device=logits.device)
    return (_min_p(scores, draws) + rng.gumbel(_streams(draws, logits.device), index)).argmax(-1).tolist()


def _draw_filtered(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Top-k and top-p."""
    tokens = [0] * len(draws)
    for rows, index, scores in _cut(logits, draws):
        for row, token in zip(rows, _pick(index, scores, [draws[i] for i in rows]), strict=True):
            tokens[row] = token
    return tokens


def _cut(logits: torch.Tensor, draws: Sequence[Draw]) -> Iterator[tuple[Sequence[int], torch.Tensor, torch.Tensor]]:
    """(rows, candidates' ids [R, W], their scores [R, W]): the most likely ones; a row whose mass top_p is not among them
    gets the whole vocabulary."""
    vocab = logits.shape[-1]
    # for top-k alone k is enough
    few = 1 if all(draw.params.top_p >= 1.0 for draw in draws) else CANDIDATES
    width = min(vocab, max([few, *(draw.params.top_k for draw in draws)]))
    index, kept, whole = _candidates(logits, draws, width)
    if width == vocab or all(whole):
        yield range(len(draws)), index, kept
        return
    fits = [i for i, done in enumerate(whole) if done]
    if fits:
        yield fits, index[fits], kept[fits]
    short = [i for i, done in enumerate(whole) if not done]
    index, kept, _ = _candidates(logits[short], [draws[i] for i in short], vocab)
    yield short, index, kept


def _candidates(logits: torch.Tensor, draws: Sequence[Draw], width: int) -> tuple[torch.Tensor, torch.Tensor, list[bool]]:
    """The `width` best of each row, best first, those cut away at -inf: (ids [R, W], scores [R, W], whether that is enough)."""
    index = _best(logits, width)
    best = _scale(logits.gather(-1, index), draws)
    params = [draw.params for draw in draws]
    vocab = logits.shape[-1]
    top_k = _column([min(p.top_k or vocab, vocab) for p in params], best.device, torch.int64)
    top_p = _column([p.top_p for p in params], best.device)
    rank = torch.arange(width, device=best.device)
    best = best.masked_fill(rank >= top_k, -math.inf)
    if all(0 < p.top_k <= width and p.top_p >= 1.0 for p in params):
        return index, _min_p(best, draws), [True] * len(draws)
    # softmax works row by row whatever their number; sum and logsumexp split a single row between threads
    p = torch.softmax(_scale(logits, draws), dim=-1).gather(-1, index).masked_fill(rank >= top_k, 0.0)
    mass = p.cumsum(-1)
    total = torch.where(top_k <= width, mass[:, -1:], 1.0)  # of what top-k left; where it is off, the rest of the row counts
    enough = (top_k <= width) | (mass[:, -1:] >= top_p)
    best = best.masked_fill((mass - p >= top_p * total) & (rank > 0), -math.inf)
    return index, _min_p(best, draws), enough.squeeze(-1).tolist()


def _best(values: torch.Tensor, width: int) -> torch.Tensor:
    """Ids of the `width` highest of values [R, V] fp32, highest first, the lower id first among equals: [R, width].

    Ranked as integers made of (value, id), so that no tie is left to the implementation of topk."""
    loops = _loops(values)
    if loops is not None:
        out = np.empty((values.shape[0], width), np.int64)
        loops.best_ids(values.contiguous().numpy(), out)
        return torch.from_numpy(out)
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0: a negative zero equals zero
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # a signed integer that sorts like the float
    vocab = values.shape[-1]
    ranked = (ordered << 32) + (vocab - 1 - torch.arange(vocab, device=values.device))
    return vocab - 1 - (torch.topk(ranked, width, sorted=True).values & 0xFFFFFFFF)


def _pick(index: torch.Tensor, scores: torch.Tensor, draws: Sequence[Draw]) -> list[int]:
    """Gumbel-max over candidates `index` [R, W]."""
    best = (scores + rng.gumbel(_streams(draws, scores.device), index)).argmax(-1, keepdim=True)
    return index.gather(-1, best).squeeze(-1).tolist()


def _scale(logits: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    return logits.double() / _column([draw.params.temperature for draw in draws], logits.device)


def _min_p(scores: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    if not any(draw.params.min_p > 0 for draw in draws):
        return scores
    floor = _column([math.log(p) if (p := draw.params.min_p) > 0 else -math.inf for draw in draws], scores.device)
    return scores.masked_fill(scores < scores.amax(-1, keepdim=True) + floor, -math.inf)


def _streams(draws: Sequence[Draw], device: torch.device) -> torch.Tensor:
    return rng.keys(_keys(draws), device).unsqueeze(-1)


def _keys(draws: Sequence[Draw]) -> list[int]:
    """Of each draw's noise, u64."""
    return [rng.key(draw.params.seed, draw.choice, draw.position, draw.purpose) for draw in draws]


def _column(values: Sequence[float], device: torch.device, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(-1)


# ---------------------------------------------------------------- what is told about it


def report(logits: torch.Tensor, draws: Sequence[Draw], chosen: Sequence[Chosen]) -> None:
    """Fill in the log-probabilities that the draws ask for. logits [R, V], one row per draw."""
    for few in _portions([i for i, draw in enumerate(draws) if draw.params.logprobs >= 0], logits):
        _report(logits[few], [draws[i] for i in few], [chosen[i] for i in few])


def score(logits: torch.Tensor, tokens: Sequence[int], most: int) -> list[tuple[int, float, list[tuple[int, float]]]]:
    """Log-probabilities of given tokens, one a row of logits [R, V]: (token, its own, those of the `most` likeliest)."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    own = logprobs.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    width = min(most, logits.shape[-1])
    if not width:
        return [(token, value, []) for token, value in zip(tokens, own, strict=True)]
    index = _best(logprobs, width)
    top = [list(zip(*row, strict=True)) for row in zip(index.tolist(), logprobs.gather(-1, index).tolist(), strict=True)]
    return list(zip(tokens, own, top, strict=True))


def _report(logits: torch.Tensor, draws: Sequence[Draw], chosen: Sequence[Chosen]) -> None:
    """Log-probabilities of the unmodified logits: of the chosen token, and of as many likely ones as each row wants."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    index = torch.tensor([[one.token] for one in chosen], device=logits.device)
    for one, own in zip(chosen, logprobs.gather(-1, index).squeeze(-1).tolist(), strict=True):
        one.logprob, one.top = own, []
    width = min(max(draw.params.logprobs for draw in draws), logits.shape[-1])
    if width:
        index = _best(logprobs, width)
        for draw, one, ids, values in zip(draws, chosen, index.tolist(), logprobs.gather(-1, index).tolist(), strict=True):
            one.top = list(zip(ids, values, strict=True))[: draw.params.logprobs]
