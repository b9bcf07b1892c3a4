"""Images in a prompt, as positions: which rows they take, which of them a segment has, what contradicts itself.

Pure Python, no tensors. All tokens of an image have one id, so positions say what an id can't: where one image ends and the
next begins, and that a sampled token of that id is none.
"""

from __future__ import annotations

from collections.abc import Sequence

from .api import ImageSpan
from .batch import ImageRows

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
DEAD = -1  # stands for an image's token where ids are hashed


def starts(images: Sequence[ImageSpan]) -> list[tuple[int, bytes]]:
    """What a block's hash covers beside its ids."""
    return [(image.start, image.digest) for image in images]


def check_images(images: Sequence[ImageSpan], prompt_tokens: int) -> None:
    """ValueError: spans that are empty, overlap, are out of order or leave the prompt; an unknown dtype."""
    end = 0
    for image in images:
        if image.tokens < 1 or not image.digest:
            raise ValueError(f"an image needs at least one token and a digest; got {image.tokens} tokens at {image.start}")
        if image.start < end or image.stop > prompt_tokens:
            raise ValueError(
                f"images lie one after the other inside the prompt's {prompt_tokens} tokens; "
                f"got [{image.start}, {image.stop}) after {end}"
            )
        if image.dtype not in ITEM_BYTES:
            raise ValueError(f"embeddings are {' or '.join(ITEM_BYTES)}; got {image.dtype}")
        end = image.stop


def check_image_ids(ids: Sequence[int], images: Sequence[ImageSpan], image_token: int | None) -> None:
    """ValueError unless the tokens of `images` have the image id. `image_token` None: this model does not see.

    The id may stand elsewhere too, as a token like any other: a model can sample it, and a prompt that goes on after its output
    then holds it. That clients don't send it is the gateway's to see to."""
    if images and image_token is None:
        raise ValueError(f"this model reads text only; the prompt has {len(images)} images")
    for image in images:
        if ids[image.start : image.stop].count(image_token) != image.tokens:
            raise ValueError(f"the tokens of the image at {image.start} must all be {image_token}")


def missing_embeddings(images: Sequence[ImageSpan], first_row: int) -> str:
    """What is missing to run all rows from `first_row` on; empty when nothing is."""
    for image in images:
        if image.stop > first_row and image.embeddings is None:
            return f"the embeddings of the image at [{image.start}, {image.stop}) did not come"
    return ""


def without_images(ids: Sequence[int], stop: int, images: Sequence[ImageSpan]) -> list[int]:
    """The ids before position `stop`, with those of images DEAD."""
    first = stop - len(ids)
    out = list(ids)
    for image in images:
        for position in range(max(image.start, first), min(image.stop, stop)):
            out[position - first] = DEAD
    return out


def check_embeddings(images: Sequence[ImageSpan], hidden_size: int) -> None:
    """ValueError: the bytes given are not [tokens, hidden_size] rows of their dtype."""
    for image in images:
        want = image.tokens * hidden_size * ITEM_BYTES[image.dtype]
        if image.embeddings is not None and len(image.embeddings) != want:
            raise ValueError(
                f"the image at {image.start} has {image.tokens} tokens: {want} bytes of {image.dtype} at width {hidden_size}; "
                f"got {len(image.embeddings)}"
            )


def rows_of(images: Sequence[ImageSpan], start: int, stop: int) -> list[ImageRows]:
    """The parts of images that lie in rows [start, stop)."""
    out = []
    for image in images:
        first, last = max(image.start, start), min(image.stop, stop)
        if first < last:
            view = memoryview(image.embeddings)
            row = len(view) // image.tokens
            view = view[(first - image.start) * row : (last - image.start) * row]
            out.append(ImageRows(first, last, view, image.dtype))
    return out
