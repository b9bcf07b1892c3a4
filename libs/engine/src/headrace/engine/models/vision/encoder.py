"""From the pixels of an image to the embeddings of its span: START, rows of IMAGE tokens each ended by NEWLINE, END.

Knows patches, spans and batches of images of different sizes. Does not know files, requests or how an image got its size
(`headrace.recipe.images`). Every token of a span has the same id; what tells them apart is their embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import nn

from ..v41.config import VisionConfig
from .vit import Aligner, Grid, Tower

ROW_MULTIPLE = 16  # rows of a product; see headrace.engine.device


class ImageEncoder(nn.Module):
    """Tower, aligner and the three learned rows. Weights are set by the loader."""

    def __init__(self, config: VisionConfig, width: int) -> None:
        super().__init__()
        self.config, self.width = config, width
        self.vision, self.aligner = Tower(config), Aligner(config, width)
        self.image_start, self.image_newline, self.image_end = (nn.Parameter(torch.zeros(width)) for _ in range(3))
        self.checkpoint_digest = ""
        self.image_token_id = -1

    @property
    def dtype(self) -> torch.dtype:
        return self.image_start.dtype

    @property
    def device(self) -> torch.device:
        return self.image_start.device

    def grid(self, width: int, height: int) -> Grid:
        """Patches of an image of this size in pixels. ValueError: not whole patches."""
        size = self.config.patch_size
        if width < size or height < size or width % size or height % size:
            raise ValueError(f"an image is resized to multiples of {size} pixels before it is encoded; got {width} x {height}")
        return Grid(height // size, width // size)

    def tokens(self, grid: Grid) -> int:
        """Length of the span: one a cell, one a row of cells for its end, two around."""
        rows, columns = (-(-n // self.config.downsample_ratio) for n in (grid.rows, grid.columns))
        return rows * (columns + 1) + 2

    @torch.inference_mode()
    def encode(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """uint8 [height, width, 3] each, sides in whole patches -> spans [tokens, width] in the compute dtype, in order.

        An image's bits do not depend on what else is in the batch where `device.row_rule` finds that rows of 16 don't."""
        return self(images)

    def forward(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`encode` with gradients."""
        grids = [self.grid(image.shape[1], image.shape[0]) for image in images]
        order = sorted(range(len(images)), key=lambda i: (grids[i].rows, grids[i].columns))
        placed = [grids[i] for i in order]
        pixels = iter(order)
        patches = torch.cat(
            [self._patches([images[next(pixels)] for _ in same], grid) for grid, same in groupby(placed)]
        )  # equal sizes in one go
        cells = self.aligner(self.vision(patches, placed, ROW_MULTIPLE), placed, ROW_MULTIPLE)
        spans: list[torch.Tensor] = [torch.empty(0)] * len(images)
        for i, part in zip(order, cells, strict=True):
            spans[i] = self._span(part, grids[i])
        return spans

    def _patches(self, images: Sequence[torch.Tensor], grid: Grid) -> torch.Tensor:
        """[height, width, 3] each -> [patches, 3 P P] in -1..1, patches row-major, values channel-major."""
        size = self.config.patch_size
        pixels = torch.stack([image.to(self.device) for image in images])
        values = pixels.view(-1, grid.rows, size, grid.columns, size, 3).permute(0, 1, 3, 5, 2, 4)
        return ((values.float() / 255 - 0.5) / 0.5).reshape(len(images) * grid.patches, -1).to(self.dtype)

    def _span(self, cells: torch.Tensor, grid: Grid) -> torch.Tensor:
        rows = -(-grid.rows // self.config.downsample_ratio)
        lines = torch.cat([cells.view(rows, -1, self.width), self.image_newline.expand(rows, 1, -1)], dim=1)
        return torch.cat([self.image_start[None], lines.flatten(0, 1), self.image_end[None]])
