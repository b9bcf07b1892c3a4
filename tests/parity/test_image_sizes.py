"""How large images become and what they look like, against the official wheel."""

import io
import random

import numpy as np
import pytest
from PIL import Image

from headrace.recipe.images import encoder_pixels, encoder_size, image_size

official = pytest.importorskip("deepseek_recipe")

COUNT = 20_000
WEBP_RATIO = 350  # beyond it the referee's own output format is the limit


def sizes(seed: int, count: int) -> list[tuple[int, int]]:
    """Ordinary ones, thin ones, small ones."""
    draw = random.Random(seed)
    tops = [(8192, 8192), (8192, 60), (60, 8192), (700, 700), (40, 40)]
    return [(draw.randint(1, w), draw.randint(1, h)) for w, h in (tops[i % len(tops)] for i in range(count))]


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def referee(data: bytes, detail: str = "high") -> tuple[np.ndarray, tuple[int, int]]:
    image = official.OpenCvImagePreprocessor().preprocess(data, official.PreprocessOptions(detail, 8192, 512))
    with Image.open(io.BytesIO(image.data)) as picture:
        return np.asarray(picture.convert("RGB"), np.int16), (image.width, image.height)


def test_tokens_of_20_000_sizes():
    for width, height in sizes(1, COUNT):
        adjusted = official.MultiModalData([official.ImageInfo(b"", width, height)]).image_token_adjustment()
        assert encoder_size(width, height).tokens == adjusted + 1, (width, height)


@pytest.mark.parametrize("detail", ["high", "low", "auto", "original"])
def test_sizes_after_resizing(detail):
    for width, height in sizes(2, 60):
        if max(width, height) / min(width, height) <= WEBP_RATIO and width * height < 4_000_000:
            ours = image_size(width, height, detail)
            assert (ours.width, ours.height) == referee(encoded(Image.new("1", (width, height))), detail)[1], (width, height)


def test_resizing_what_was_resized_changes_nothing():
    for width, height in sizes(3, 2000):
        once = encoder_size(width, height)
        assert encoder_size(once.width, once.height) == once, (width, height)


def ramp(width: int, height: int) -> Image.Image:
    x, y = np.linspace(0, 255, width), np.linspace(0, 255, height)[:, None]
    return Image.fromarray(np.stack(np.broadcast_arrays(x, y, (x + y) / 2), -1).astype(np.uint8))


FADING = ramp(90, 60).convert("RGBA")
FADING.putalpha(Image.linear_gradient("L").resize((90, 60)))
PICTURES = {
    "rgb": encoded(ramp(120, 80)),
    "wide": encoded(ramp(100, 30)),
    "jpeg": encoded(ramp(300, 200), "JPEG", quality=95),
    "webp": encoded(ramp(300, 200), "WEBP", lossless=True),
    "transparent": encoded(Image.new("RGBA", (60, 60), (10, 20, 30, 0))),
    "fading": encoded(FADING),
    "grey and alpha": encoded(Image.new("LA", (60, 60), (100, 128))),
    "16 bit": encoded(Image.fromarray(np.linspace(0, 65535, 2500).reshape(50, 50).astype(np.uint16))),
    "1 bit": encoded(Image.new("1", (50, 50), 1)),
    "palette": encoded(ramp(64, 64).quantize(16)),
    "cmyk": encoded(Image.new("CMYK", (50, 50), (255, 0, 0, 0)), "JPEG"),
    "gif": encoded(ramp(64, 64), "GIF", save_all=True, append_images=[Image.new("RGB", (64, 64), "red")]),
    "animated webp": encoded(ramp(64, 64), "WEBP", save_all=True, lossless=True, append_images=[Image.new("RGB", (64, 64))]),
    "animated png": encoded(ramp(64, 64), "PNG", save_all=True, append_images=[Image.new("RGB", (64, 64))]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_the_referees(name):
    """Up to its lossy format and another interpolation."""
    want, _ = referee(PICTURES[name])
    data, size = encoder_pixels(PICTURES[name])
    got = np.frombuffer(data, np.uint8).reshape(size.height, size.width, 3).astype(np.int16)
    assert got.shape == want.shape
    difference = np.abs(got - want)
    assert difference.mean() < 2.5 and np.quantile(difference, 0.99) < 24, (difference.mean(), difference.max())
