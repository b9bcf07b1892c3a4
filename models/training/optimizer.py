"""Muon for matrices, AdamW for the rest, one learning rate for both; and the warm-up, stable, decay schedule.

Muon (Jordan et al. 2024): momentum, then five Newton-Schulz iterations that bring all singular values near 1; updates are
scaled to the size of AdamW's (0.2 * sqrt(larger side), Moonlight 2025), so that both take the same rate and decay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

_QUINTIC = (3.4445, -4.7750, 2.0315)


def orthogonal(x: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """Batched Newton-Schulz: [..., m, n] -> the same with singular values near 1."""
    a, b, c = _QUINTIC
    wide = x.shape[-2] <= x.shape[-1]
    y = (x if wide else x.mT).to(torch.bfloat16 if x.is_cuda else torch.float32)
    y = y / (y.flatten(-2).norm(dim=-1)[..., None, None] + 1e-7)
    for _ in range(iterations):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return (y if wide else y.mT).to(x.dtype)


def _is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Whether Muon should turn it: [..., out, in], or an expert's w_out [out, E, in]."""
    if parameter.dim() < 2 or "embed" in name or name.startswith("head.") or "markov" in name or "confidence" in name:
        return False
    return not (name.endswith(("q_weight", "k_weight")) or ".hc_" in name or ".gate." in name)


class Optimizer:
    """One step for all parameters that have gradients. State is a dict of tensors by parameter name.

    All parameters move in the same few operations (`torch._foreach_*`, one product for all matrices of a shape): hundreds of
    small tensors one by one would cost a device as much time as the model."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, decay: float = 0.05, betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
    ) -> None:  # fmt: skip
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.decay, self.betas, self.momentum = decay, betas, momentum
        self.steps = 0
        self.state: dict[str, dict[str, torch.Tensor | int]] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every parameter by its gradient and forget the gradient."""
        self.steps += 1
        there = [(name, p) for name, p in self.named if p.grad is not None]
        self._muon([pair for pair in there if _is_matrix(*pair)], rate)
        self._adam([pair for pair in there if not _is_matrix(*pair)], rate)
        for _, parameter in there:
            parameter.grad = None

    def clip(self, norm: float) -> torch.Tensor:
        """Scale all gradients so that their common norm is at most `norm`; returns the norm before."""
        return nn.utils.clip_grad_norm_([p for _, p in self.named if p.grad is not None], norm)

    def _state(self, name: str, parameter: torch.Tensor, *kinds: str) -> dict:
        if name not in self.state:
            self.state[name] = {kind: torch.zeros_like(parameter) for kind in kinds} | {"count": 0}
        self.state[name]["count"] += 1
        return self.state[name]

    def _muon(self, named: list[tuple[str, nn.Parameter]], rate: float) -> None:
        if not named:
            return
        parameters, gradients = [p for _, p in named], [p.grad for _, p in named]
        buffers = [self._state(name, p, "momentum")["momentum"] for name, p in named]
        torch._foreach_lerp_(buffers, gradients, 1 - self.momentum)
        ahead = torch._foreach_lerp(gradients, buffers, self.momentum)
        by_shape: dict[tuple[int, int], list[int]] = {}
        stacks = [a.transpose(0, 1) if n.endswith(".w_out") else a for (n, _), a in zip(named, ahead, strict=True)]
        for at, stack in enumerate(stacks):
            by_shape.setdefault((stack.shape[-2], stack.shape[-1]), []).append(at)
        updates = list(ahead)
        for shape, places in by_shape.items():
            flat = [stacks[at].reshape(-1, *shape) for at in places]
            turned = orthogonal(torch.cat(flat)) * (0.2 * math.sqrt(max(shape)))
            for at, part in zip(places, turned.split([f.shape[0] for f in flat]), strict=True):
                part = part.view(stacks[at].shape)
                updates[at] = part.transpose(0, 1).contiguous() if named[at][0].endswith(".w_out") else part
        torch._foreach_mul_(parameters, 1 - rate * self.decay)
        torch._foreach_add_(parameters, updates, alpha=-rate)

    def _adam(self, named: list[tuple[str, nn.Parameter]], rate: float) -> None:
        if not named:
            return
        first, second = self.betas
        parameters, gradients = [p for _, p in named], [p.grad for _, p in named]
        states = [self._state(name, p, "mean", "square") for name, p in named]
        means, squares = ([s[kind] for s in states] for kind in ("mean", "square"))
        torch._foreach_lerp_(means, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        sizes = torch._foreach_div(squares, [1 - second ** s["count"] for s in states])
        torch._foreach_sqrt_(sizes)
        torch._foreach_add_(sizes, 1e-8)
        updates = torch._foreach_div(means, [1 - first ** s["count"] for s in states])
        torch._foreach_div_(updates, sizes)
        decayed = [p for name, p in named if p.dim() >= 2 and "hc_" not in name]
        if decayed:
            torch._foreach_mul_(decayed, 1 - rate * self.decay)
        torch._foreach_add_(parameters, updates, alpha=-rate)

    def state_dict(self) -> dict:
        return {"steps": self.steps, "state": self.state}

    def load_state_dict(self, saved: dict, device: torch.device | str = "cpu") -> None:
        self.steps = saved["steps"]
        self.state = {
            name: {k: v if k == "count" else v.to(device) for k, v in values.items()} for name, values in saved["state"].items()
        }


def schedule(progress: float, *, warmup: float, decay: float, floor: float = 0.02) -> float:
    """Share of the peak rate at `progress` 0..1: linear up, flat, then down to `floor` along 1 - sqrt."""
    if progress < warmup:
        return (progress + 1e-3) / (warmup + 1e-3)
    if progress < 1 - decay:
        return 1.0
    return floor + (1 - floor) * (1 - math.sqrt(min(1.0, (progress - (1 - decay)) / decay)))
