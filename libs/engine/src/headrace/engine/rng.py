"""Random numbers that depend on what they are for, not on when they are drawn.

A noise value is a pure function of (seed, choice, position, purpose, token id): the same whether a request runs alone or in a
batch, before or after a preemption, on the node that began it or on another one. Generator: SplitMix64 as a counter-based
hash (Steele, Lea, Flood 2014: state = key + (i + 1) * golden gamma, then the finalizer); 53 bits make a uniform in (0, 1).

Knows integers and uniforms. Does not know logits or distributions.
"""

from __future__ import annotations

from enum import IntEnum

import torch

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB
BELOW_ONE = 1.0 - 2.0**-53


class Purpose(IntEnum):
    """What a number is drawn for. One position may need several independent ones (speculative decoding does)."""

    SAMPLE = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def _signed(value: int) -> int:
    """The same 64 bits as torch's int64."""
    return value - (1 << 64) if value >> 63 else value


def mix(value: int) -> int:
    """SplitMix64's finalizer on one u64."""
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, choice: int, position: int, purpose: Purpose) -> int:
    """u64 key of one stream. Every part passes through the finalizer, so neighbours share nothing."""
    out = mix((seed + _GAMMA) & _MASK)
    for part in (choice, position, purpose):
        out = mix((out + (part + 1) * _GAMMA) & _MASK)
    return out


def keys(parts: list[int], device: torch.device | str = "cpu") -> torch.Tensor:
    """u64 keys -> [R] int64 with the same bits."""
    return torch.tensor([_signed(part) for part in parts], dtype=torch.int64, device=device)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def uniform(stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Uniforms of counter `index` in streams `stream` (int64, broadcast together) -> float64 in (0, 1), 53 bits."""
    value = index * _signed(_GAMMA)
    value = value + (stream + _signed(_GAMMA))
    value = value.bitwise_xor_(_shift(value, 30)).mul_(_signed(_MIX1))
    value = value.bitwise_xor_(_shift(value, 27)).mul_(_signed(_MIX2))
    value = value.bitwise_xor_(_shift(value, 31))
    # The highest of 2^53 values plus a half rounds to 2^53: 1 has no Gumbel noise, so it is the next lower double.
    return _shift(value, 11).double().add_(0.5).mul_(2.0**-53).clamp_max_(BELOW_ONE)


def gumbel(stream: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64: argmax(log p + gumbel) is a draw from p (Gumbel-max)."""
    return uniform(stream, index).log_().neg_().log_().neg_()
