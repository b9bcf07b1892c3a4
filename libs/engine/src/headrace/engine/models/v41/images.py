"""Rows of images in a pass: their embeddings come with the batch, n-grams and routing treat them apart.

An image's rows neither hash nor are hashed over, receive nothing from Engram, and are routed with `bias_vl`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...batch import ImageRows, Segment
from .engram import DEAD
from .rows import Rows

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def place_images(h: torch.Tensor, rows: Rows, segments: Sequence[Segment]) -> torch.Tensor:
    """Overwrite the rows of `h` [T, d] that lie in images. -> bool [T], true for these rows."""
    inside = torch.zeros(h.shape[0], dtype=torch.bool, device=h.device)
    row_of = rows.row_zero()
    for index, segment in enumerate(segments):
        for part in segment.images:
            where = slice(row_of[index] + part.start, row_of[index] + part.stop)
            h[where] = image_values(part).to(device=h.device, dtype=h.dtype)
            inside[where] = True
    return inside


def image_values(part: ImageRows) -> torch.Tensor:
    """The given embeddings, [stop - start, d]. A copy: torch warns of buffers that it may not write to."""
    return torch.frombuffer(bytearray(part.embeddings), dtype=DTYPES[part.dtype]).view(part.stop - part.start, -1)


def hashed_ids(segment: Segment) -> Sequence[int]:
    """The segment's ids as n-grams see them."""
    if not segment.images:
        return segment.ids
    ids = list(segment.ids)
    for part in segment.images:
        for position in range(part.start, part.stop):
            ids[position - segment.start] = DEAD
    return ids
