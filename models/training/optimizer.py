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


def _matrices(name: str, parameter: torch.Tensor) -> torch.Tensor | None:
    """The parameter as a stack of matrices [..., out, in], a view; None if it is not a matrix that Muon should turn."""
    if parameter.dim() < 2 or "embed" in name or name.startswith("head.") or "markov" in name or "confidence" in name:
        return None
    if name.endswith(("q_weight", "k_weight")) or ".hc_" in name or ".gate." in name:
        return None
    if name.endswith(".w_out"):
        return parameter.transpose(0, 1)
    return parameter


class Optimizer:
    """One step for all parameters that have gradients. State is a dict of tensors by parameter name."""

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, decay: float = 0.05, betas: tuple[float, float] = (0.9, 0.95),
        momentum: float = 0.95,
    ) -> None:  # fmt: skip
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.decay, self.betas, self.momentum = decay, betas, momentum
        self.steps = 0
        self.state: dict[str, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every parameter by its gradient and forget the gradient."""
        self.steps += 1
        for name, parameter in self.named:
            if parameter.grad is None:
                continue
            matrices = _matrices(name, parameter)
            if matrices is None:
                self._adam(name, parameter, rate)
            else:
                self._muon(name, parameter, matrices, rate)
            parameter.grad = None

    def clip(self, norm: float) -> torch.Tensor:
        """Scale all gradients so that their common norm is at most `norm`; returns the norm before."""
        return nn.utils.clip_grad_norm_([p for _, p in self.named if p.grad is not None], norm)

    def _muon(self, name: str, parameter: nn.Parameter, matrices: torch.Tensor, rate: float) -> None:
        state = self.state.setdefault(name, {})
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer = state["momentum"]
        buffer.lerp_(parameter.grad, 1 - self.momentum)
        ahead = torch.lerp(parameter.grad, buffer, self.momentum)
        stack = ahead.transpose(0, 1) if matrices.shape != parameter.shape or name.endswith(".w_out") else ahead
        update = orthogonal(stack) * (0.2 * math.sqrt(max(stack.shape[-2:])))
        matrices.mul_(1 - rate * self.decay).add_(update, alpha=-rate)

    def _adam(self, name: str, parameter: nn.Parameter, rate: float) -> None:
        state = self.state.setdefault(name, {})
        if not state:
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["count"] = torch.zeros((), dtype=torch.int64)
        state["count"] += 1
        first, second = self.betas
        count = int(state["count"])
        state["mean"].lerp_(parameter.grad, 1 - first)
        state["square"].lerp_(parameter.grad.square(), 1 - second)
        mean, square = state["mean"] / (1 - first**count), state["square"] / (1 - second**count)
        if parameter.dim() >= 2 and "hc_" not in name:
            parameter.mul_(1 - rate * self.decay)
        parameter.add_(mean / (square.sqrt() + 1e-8), alpha=-rate)

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
