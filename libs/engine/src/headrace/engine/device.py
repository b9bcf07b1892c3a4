"""The one place that knows which device runs the model and what its matrix library does to single rows.

Batch invariance on a CPU: MKL and its kin pick another kernel, with another order of summation, when a product has
few rows (under 8 where this was measured), so a row's bits depend on how many rows came with it. Padding to a
multiple of 16 rows is enough on the machines seen; `row_rule` checks that on this one, for the shapes of this model,
and otherwise multiplies 16 rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
from torch.nn import functional as F

ROW_MULTIPLE = 16
_PROBE_ROWS = (16, 32, 48, 64, 80, 128, 256, 512)


def check_device(device: str) -> str:
    """The device's name if this machine has it; ValueError with the reason otherwise."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device {device!r} is not one that the engine runs on; choose 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device!r}: torch {torch.__version__} sees no CUDA device here; choose 'cpu'")
    return device


def row_rule(shapes: Iterable[tuple[int, int]], dtype: torch.dtype = torch.float32) -> tuple[int, int]:
    """For batch invariance: (pad rows to a multiple of this, multiply at most this many rows at a time; 0: any number).

    shapes: (out, in) of the model's products.
    """
    together = all(rows_are_independent(out, width, dtype) for out, width in set(shapes))
    return ROW_MULTIPLE, 0 if together else ROW_MULTIPLE


@lru_cache
def rows_are_independent(out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> bool:
    """Whether [rows, in] x [in, out] gives each row the same bits for every multiple of 16 rows and every place among
    them."""
    x, weight = (
        _draw(rows, in_features).to(dtype) for rows in (max(_PROBE_ROWS), min(out_features, 4096))
    )
    with torch.inference_mode():
        order = torch.randperm(x.shape[0], generator=torch.Generator().manual_seed(1))
        whole = F.linear(x, weight)
        if not torch.equal(F.linear(x[order], weight), whole[order]):
            return False
        return all(torch.equal(F.linear(x[16 : 16 + rows], weight), whole[16 : 16 + rows]) for rows in _PROBE_ROWS[:-1])


@lru_cache
def keys_are_independent(heads: int, dim: int) -> bool:
    """The same for index scores: heads of any number of rows against any whole number of 64 keys."""
    queries, keys = _draw(16 * heads, dim).unsqueeze(0), _draw(1024, dim).unsqueeze(0)
    with torch.inference_mode():
        whole = torch.bmm(queries, keys.transpose(1, 2))
        return all(
            torch.equal(torch.bmm(queries[:, :rows], keys[:, :count].transpose(1, 2)), whole[:, :rows, :count])
            for rows in (heads, 2 * heads, 3 * heads, 16 * heads)
            for count in (64, 128, 320, 1024)
        )


def _draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))
