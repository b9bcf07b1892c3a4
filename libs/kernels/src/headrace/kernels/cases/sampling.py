"""Sampling and draft verification."""

from collections.abc import Iterator

import torch

from headrace.kernels.cases import Case, Problem, generator, randn
from headrace.kernels.sampling import SamplingRows, noise_key, sample, sample_reference, verify_drafts, verify_drafts_reference

V = 129280


def cases() -> Iterator[Case]:
    yield draw(10, 300, True, "small")
    yield draw(10, 300, False, "small")
    yield draw(40, V, True, "full")
    for rows in (8, 128, 512):
        yield draw(rows, V, False, "full", timed="temperature")
    yield draw(128, V, False, "full", timed="top-k 40, top-p 0.95")
    yield verify(6, 3, 200, "small")
    yield verify(30, 5, V, "full")
    yield verify(64, 5, V, "full", timed=True)


def _rows(count: int, vocabulary: int, device: torch.device, seed: int, every: bool) -> SamplingRows:
    """A different mixture of settings in every row; with `every`, penalties and grammar masks too."""
    g = generator(device, seed)

    def pick(*values: float) -> torch.Tensor:
        return torch.tensor(values, device=device)[torch.randint(0, len(values), (count,), generator=g, device=device)]

    rows = SamplingRows(
        temperature=pick(0.0, 0.6, 1.0, 1.7), top_k=pick(0, 1, 7, 50).int(), top_p=pick(1.0, 0.9, 0.3),
        min_p=pick(0.0, 0.0, 0.05),
        key=torch.tensor([noise_key(seed, i, 7 * i) for i in range(count)], dtype=torch.int64, device=device),
    )  # fmt: skip
    if every:
        words = -(-vocabulary // 32)
        rows.mask = torch.randint(-(2**31), 2**31, (count, words), generator=g, device=device).int()
        rows.seen = torch.rand((count, vocabulary), generator=g, device=device).topk(20).indices.int()
        rows.seen[:, 15:] = -1
        rows.counts = torch.randint(0, 4, (count, 20), generator=g, device=device).int()
        rows.frequency, rows.presence, rows.repetition = pick(0.0, 0.5), pick(0.0, 0.3), pick(1.0, 1.3)
    return rows


def draw(count: int, vocabulary: int, every: bool, size: str, timed: str = "") -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        logits = randn((count, vocabulary), device, seed) * 3
        rows = _rows(count, vocabulary, device, seed, every)
        if timed:
            rows.temperature.fill_(0.6)
            rows.top_k.fill_(40 if "top" in timed else 0)
            rows.top_p.fill_(0.95 if "top" in timed else 1.0)
            rows.min_p.zero_()
            rows.filters = "top" in timed

        def comparable(outputs):
            token, logprob, threshold, lse, processed = outputs
            return token, logprob, threshold, lse, torch.where(processed == float("-inf"), 0.0, processed)

        return Problem(run=lambda: sample(logits, rows), reference=lambda: sample_reference(logits, rows), select=comparable)

    name = f"{count}x{vocabulary} " + (timed or ("all settings" if every else "no penalties"))
    bound = (0.0, 1e-5, 1e-6, 1e-5, 1e-6)
    return Case("sample", name, build, bound, size, bool(timed), bytes=4.0 * count * vocabulary, target=0.8)


def verify(count: int, steps: int, vocabulary: int, size: str, timed: bool = False) -> Case:
    def build(device: torch.device, seed: int) -> Problem:
        base = randn((count * steps, vocabulary), device, seed) * 2
        near = base.view(count, steps, vocabulary) + randn((count, steps, vocabulary), device, seed + 1) * 0.7
        target_logits = torch.cat([near, randn((count, 1, vocabulary), device, seed + 2)], 1).flatten(0, 1)
        temperature = _rows(count, vocabulary, device, seed, False).temperature
        draft_rows = _rows(count * steps, vocabulary, device, seed, False)
        target_rows = _rows(count * (steps + 1), vocabulary, device, seed + 1, False)
        draft_rows.temperature = temperature.repeat_interleave(steps)
        target_rows.temperature = temperature.repeat_interleave(steps + 1)
        draft_rows.top_k.fill_(0)
        target_rows.top_k.fill_(0)
        drafted, target = sample(base, draft_rows), sample(target_logits, target_rows)
        drafts = drafted[0].view(count, steps).clone()
        drafts[0, 1:] = -1
        keys = [torch.tensor([[noise_key(seed, b, i, p) for i in range(steps)] for b in range(count)], dtype=torch.int64,
                             device=device) for p in ("accept", "residual")]  # fmt: skip
        arguments = (drafts, (target[0], *target[2:]), drafted[2:], temperature, *keys)
        return Problem(run=lambda: verify_drafts(*arguments), reference=lambda: verify_drafts_reference(*arguments))

    return Case("verify_drafts", f"{count}x{steps}, {vocabulary}", build, 0.0, size, timed, bytes=8.0 * count * vocabulary)
