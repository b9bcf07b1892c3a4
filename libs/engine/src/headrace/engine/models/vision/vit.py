"""DeepSeek-ViT and its aligner: patches of images in, one vector of the text model's width per cell of patches out.

Knows the arithmetic, on the rows of several images at once. Does not know files, pixels or where the vectors go. Modules are
named as the released tensors are. Source: DeepSeek-V4.1's released configuration and tensor layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn
from torch.nn import functional as F

from ..v41.config import VisionConfig

Phases = tuple[torch.Tensor, torch.Tensor]  # cos and sin, [N, 1, D / 2]
Groups = Sequence[tuple[int, int]]  # (images, patches of each)

NORM_EPS = 1e-6  # the text model's is another


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of one image: `rows` x `columns`, row-major."""

    rows: int
    columns: int

    @property
    def patches(self) -> int:
        return self.rows * self.columns


class RMSNorm(nn.Module):
    """fp32 inside, cast once."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float()
        return (self.weight.float() * (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS))).to(x.dtype)


class PatchEmbed(nn.Module):
    """A patch's 3 x P x P values, channel-major, to the tower's width."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(3 * config.patch_size**2, config.hidden_size)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        return self.proj(patches)


class Attention(nn.Module):
    """Every patch of an image sees every other one of it."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor, phases: Phases, groups: Groups) -> torch.Tensor:
        """x [N, d]; groups in the order of the rows, which may be followed by padding."""
        qkv = self.wqkv(x).unflatten(-1, (3, self.heads, self.head_dim))  # [N, 3, H, D]
        queries, keys, values = rotate(qkv[:, 0], *phases), rotate(qkv[:, 1], *phases), qkv[:, 2]
        out, begin = torch.zeros_like(values), 0
        for images, patches in groups:
            rows = slice(begin, begin + images * patches)
            parts = (t[rows].unflatten(0, (images, patches)).transpose(1, 2) for t in (queries, keys, values))
            out[rows] = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(0, 1)
            begin = rows.stop
        return self.wo(out.flatten(1))


class FeedForward(nn.Module):
    """SwiGLU; `w1` holds the gate's rows, then the others."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.hidden_size), RMSNorm(config.hidden_size)
        self.attn, self.mlp = Attention(config), FeedForward(config)

    def forward(self, x: torch.Tensor, phases: Phases, groups: Groups) -> torch.Tensor:
        x = x + self.attn(self.norm1(x), phases, groups)
        return x + self.mlp(self.norm2(x))


class Tower(nn.Module):
    """Patches of any number of images, each attending to itself only."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.steps = 0  # blocks computed so far: that it moves is how one knows that it lives

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid], row_multiple: int = 1) -> torch.Tensor:
        """patches [N, 3 P P], N the patches of all `grids` in order -> [N, d]. Equal grids that stand together share a product.
        Rows are padded to a multiple of `row_multiple`, so that a matrix library treats few like many."""
        count = patches.shape[0]
        assert count == sum(grid.patches for grid in grids), f"{count} patches for {grids}"
        missing = -count % row_multiple
        x = self.patch_embed(F.pad(patches, (0, 0, 0, missing)))
        phases = tuple(F.pad(t, (0, 0, 0, 0, 0, missing)) for t in self._phases(grids, x.device))
        groups = [(len(list(same)), grid.patches) for grid, same in groupby(grids)]
        for block in self.blocks:
            x = block(x, phases, groups)
            self.steps += 1
        return self.norm(x[:count])

    def _phases(self, grids: Sequence[Grid], device: torch.device) -> Phases:
        """cos and sin [N, 1, D / 2]: a quarter of a head's channels turns with the row, a quarter with the column."""
        dim = self.config.hidden_size // self.config.num_attention_heads // 2
        inverse = 1.0 / self.config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
        angles = []
        for grid, same in groupby(grids):
            row = torch.arange(grid.rows, device=device)[:, None].expand(-1, grid.columns).flatten()
            column = torch.arange(grid.columns, device=device).repeat(grid.rows)
            angles.append(torch.cat([row[:, None] * inverse, column[:, None] * inverse], dim=-1).repeat(len(list(same)), 1))
        angle = torch.cat(angles).unsqueeze(1)
        return angle.cos(), angle.sin()


class Aligner(nn.Module):
    """Joins cells of R x R patches and projects them to the text model's width."""

    def __init__(self, config: VisionConfig, width: int) -> None:
        super().__init__()
        self.ratio = config.downsample_ratio
        self.w1 = nn.Linear(config.hidden_size * self.ratio**2, width)
        self.w2 = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, grids: Sequence[Grid], row_multiple: int = 1) -> list[torch.Tensor]:
        """x [N, d] of all grids in order -> per image [cells, width], row-major. Cells that jut out have zeros there."""
        groups = [(grid, len(list(same))) for grid, same in groupby(grids)]
        parts = x.split([grid.patches * count for grid, count in groups])
        cells = [self._cells(part, grid) for part, (grid, _) in zip(parts, groups, strict=True)]
        joined = torch.cat([part.flatten(0, 1) for part in cells])
        padded = F.pad(joined, (0, 0, 0, -joined.shape[0] % row_multiple))
        out = self.w2(F.gelu(self.w1(padded)))[: joined.shape[0]]
        return list(out.split([part.shape[1] for part in cells for _ in part]))

    def _cells(self, x: torch.Tensor, grid: Grid) -> torch.Tensor:
        """Images of one grid [images * patches, d] -> [images, cells, d R R], channel-major."""
        r = self.ratio
        images = x.view(-1, grid.rows, grid.columns, x.shape[-1]).permute(0, 3, 1, 2)
        images = F.pad(images, (0, -grid.columns % r, 0, -grid.rows % r))
        return F.unfold(images, r, stride=r).transpose(1, 2)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotation [N, H, D] by [N, 1, D / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
