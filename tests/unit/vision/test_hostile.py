"""Images that somebody sends to break something: each gives the right picture or the right error, and all of them at once leave
the identifier as it was. The files are made here; the web server is a real one on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import struct
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from headrace.recipe.images import ImageError, ImageFetcher, ImageRules, public_address
from headrace.vision.identity import Identifier, Identity

RED, BLUE, WHITE, GREY = (255, 0, 0), (0, 0, 255), (255, 255, 255), (127, 127, 127)
RULES = ImageRules(min_area=84 * 84, max_tokens=64)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def plain(color, size=(84, 84), mode="RGB") -> Image.Image:
    return Image.new(mode, size, color)


def halves(size=(168, 84)) -> Image.Image:
    """Red on the left, blue on the right."""
    image = plain(RED, size)
    image.paste(BLUE, (size[0] // 2, 0, *size))
    return image


def exif(orientation: int) -> bytes:
    tags = Image.Exif()
    tags[0x112] = orientation
    return tags.tobytes()


def noise(kind: str, **options) -> bytes:
    return encoded(Image.fromarray(np.random.default_rng(1).integers(0, 256, (200, 200, 3), np.uint8)), kind, **options)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_that_says(width: int, height: int, rows: bytes = b"") -> bytes:
    """A header of any size with whatever follows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def text_bomb() -> bytes:
    """A small picture with a comment of 256 MB when unpacked."""
    whole = encoded(plain(RED))
    at = whole.index(b"IDAT") - 4
    return whole[:at] + chunk(b"zTXt", b"c\0\0" + zlib.compress(b"\0" * (256 << 20), 9)) + whole[at:]


def gif_with_frames(count: int) -> bytes:
    frames = [plain(BLUE, (84, 84)) for _ in range(count)]
    return encoded(plain(RED), "GIF", save_all=True, append_images=frames)


Check = Callable[[np.ndarray], bool]


def shows(color, tolerance: int = 6) -> Check:
    """All of the picture is about this color."""
    return lambda pixels: bool(np.abs(pixels.astype(int) - color).max() <= tolerance)


def left_right(left, right) -> Check:
    def check(pixels: np.ndarray) -> bool:
        row = pixels[pixels.shape[0] // 2].astype(int)
        width = len(row)
        return bool(np.abs(row[width // 8] - left).max() < 12 and np.abs(row[-width // 8] - right).max() < 12)

    return check


def top_bottom(top, bottom) -> Check:
    def check(pixels: np.ndarray) -> bool:
        column = pixels[:, pixels.shape[1] // 2].astype(int)
        height = len(column)
        return bool(np.abs(column[height // 8] - top).max() < 12 and np.abs(column[-height // 8] - bottom).max() < 12)

    return check


PNG, JPEG, WEBP = noise("PNG"), noise("JPEG"), noise("WEBP")
GREY16 = Image.fromarray(np.full((84, 84), 40000, np.uint16))
FILES: dict[str, tuple[bytes, str | Check]] = {
    "nothing": (b"", "EmptyImage"),
    "one byte": (b"\x89", "UnsupportedMediaType"),
    "text": (b"hello, I am a picture", "UnsupportedMediaType"),
    "html": (b"<html><body>404</body></html>", "UnsupportedMediaType"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "UnsupportedMediaType"),
    "bmp": (encoded(plain(RED), "BMP"), "UnsupportedMediaType"),
    "tiff": (encoded(plain(RED), "TIFF"), "UnsupportedMediaType"),
    "pdf": (encoded(plain(RED), "PDF"), "UnsupportedMediaType"),
    "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", "UnsupportedMediaType"),
    "png magic only": (PNG[:8], "UnsupportedMediaType"),
    "png cut in its header": (PNG[:20], "Decode"),
    "png cut in half": (PNG[: len(PNG) // 2], "Decode"),
    "jpeg cut in half": (JPEG[: len(JPEG) // 2], "Decode"),
    "webp cut in half": (WEBP[: len(WEBP) // 2], "Decode"),
    "gif cut in half": (gif_with_frames(1)[:60], "Decode"),
    "png with a broken header": (PNG[:18] + b"\xff\xff" + PNG[20:], "UnsupportedMediaType"),
    "png with broken data": (PNG[:5000] + b"\xff\xff" + PNG[5002:], "Decode"),
    "jpeg of zeros behind its header": (JPEG[:200] + bytes(len(JPEG)), "Decode"),
    "png that says 100,000 x 100,000": (png_that_says(100_000, 100_000), "ImageDimensionsTooLarge"),
    "png that says 2^31 x 1": (png_that_says(2**31 - 1, 1), "ImageDimensionsTooLarge"),
    "png that says 0 x 0": (png_that_says(0, 0), "UnsupportedMediaType"),
    "png that says 8,192 x 8,192 and has nothing": (png_that_says(8192, 8192), "Decode"),
    "8,193 pixels wide": (encoded(plain(1, (8193, 1), "1")), "ImageDimensionsTooLarge"),
    "8,193 pixels high": (encoded(plain(1, (1, 8193), "1")), "ImageDimensionsTooLarge"),
    "a comment of 256 MB": (text_bomb(), "Decode"),
    "67 million pixels in 10 kB": (encoded(plain(1, (8192, 8192), "1")), shows(WHITE)),
    "1 x 1": (encoded(plain(RED, (1, 1))), shows(RED)),
    "8,192 x 1": (encoded(plain(RED, (8192, 1))), lambda pixels: pixels.shape[1] > 30 * pixels.shape[0]),
    "1 x 8,192": (encoded(plain(RED, (1, 8192))), lambda pixels: pixels.shape[0] > 15 * pixels.shape[1]),
    "animated gif": (gif_with_frames(3), shows(RED)),
    "gif of 500 frames": (gif_with_frames(500), shows(RED)),
    "animated webp": (encoded(plain(RED), "WEBP", save_all=True, lossless=True, append_images=[plain(BLUE)]), shows(RED)),
    "animated png": (encoded(plain(RED), "PNG", save_all=True, append_images=[plain(BLUE)]), shows(RED)),
    "cmyk jpeg": (encoded(plain((255, 0, 0, 0), mode="CMYK"), "JPEG"), shows((0, 255, 255))),
    "16 bit grey": (encoded(GREY16), shows((156, 156, 156))),
    "1 bit": (encoded(plain(1, mode="1")), shows(WHITE)),
    "palette": (encoded(halves().quantize(4)), left_right(RED, BLUE)),
    "palette with a transparent color": (encoded(plain(0, mode="P"), transparency=0), shows(WHITE)),
    "transparent": (encoded(plain((9, 9, 9, 0), mode="RGBA")), shows(WHITE)),
    "grey and alpha": (encoded(plain((0, 128), mode="LA")), shows(GREY)),
    "upright": (encoded(halves(), "JPEG", quality=95), left_right(RED, BLUE)),
    "rotated by exif, 180 degrees": (encoded(halves(), "JPEG", quality=95, exif=exif(3)), left_right(BLUE, RED)),
    "rotated by exif, 90 degrees": (encoded(halves(), "JPEG", quality=95, exif=exif(6)), top_bottom(RED, BLUE)),
    "mirrored by exif": (encoded(halves(), "JPEG", quality=95, exif=exif(2)), left_right(BLUE, RED)),
    "exif of rubbish": (encoded(halves(), "JPEG", quality=95, exif=b"Exif\0\0rubbish"), left_right(RED, BLUE)),
    "a png with a jpeg's name inside": (encoded(halves()) + JPEG, left_right(RED, BLUE)),
}
PLACES: dict[str, str | Check] = {
    "/image": shows(RED),
    "/wrong-type": shows(RED),  # what it is counts, not what it is called
    "/hop": shows(RED),
    "/hop-private": "DestinationRejected",
    "/hop-metadata": "DestinationRejected",
    "/hop-loopback6": "DestinationRejected",
    "/hop-file": "InvalidUrl",
    "/round": "Fetch",
    "/404": "FetchStatus",
    "/500": "FetchStatus",
    "/drip": "Fetch",
    "/silent": "Fetch",
    "/large": "ImageTooLarge",
    "/endless": "ImageTooLarge",
    "/cut": "Fetch",
    "/page": "UnsupportedMediaType",
}
HOPS = {
    "/hop": "/image", "/hop-private": "http://10.1.2.3/image", "/hop-metadata": "http://169.254.169.254/latest",
    "/hop-loopback6": "http://[::1]/image", "/hop-file": "file:///etc/passwd", "/round": "/round",
}  # fmt: skip


async def serve(request: web.Request) -> web.StreamResponse:
    if request.path in HOPS:
        raise web.HTTPFound(HOPS[request.path])
    if request.path in ("/image", "/wrong-type"):
        kind = "image/png" if request.path == "/image" else "text/plain"
        return web.Response(body=encoded(plain(RED)), content_type=kind)
    if request.path == "/page":
        return web.Response(text="<html></html>", content_type="image/png")
    if request.path == "/silent":
        await asyncio.sleep(30)
    response = web.StreamResponse()
    if request.path == "/large":
        response.content_length = 64 << 20
    elif request.path == "/cut":
        response.content_length = 1000
    elif request.path not in ("/drip", "/endless"):
        return web.Response(status=int(request.path[1:]))
    with contextlib.suppress(ConnectionError):  # the other side has seen enough
        await response.prepare(request)
        while request.path == "/drip":
            await response.write(b"x")
            await asyncio.sleep(0.05)
        if request.path == "/cut":
            await response.write(b"x" * 10)
            request.transport.abort()
        while request.path in ("/large", "/endless"):
            await response.write(bytes(1 << 18))
    return response


@pytest.fixture
async def site():
    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    runner.app.router.add_get("/{path:.*}", serve)
    await runner.setup()
    listening = web.TCPSite(runner, "127.0.0.1", 0)
    await listening.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


@pytest.fixture
async def identifier():
    """What the service has, save that the test's own server may be asked."""

    def allows(host: str, address: str) -> bool:
        return address == "127.0.0.1" or public_address(host, address)

    fetcher = ImageFetcher(2 << 20, destination_filter=allows, timeout=5.0)
    pool = ThreadPoolExecutor(2)
    yield Identifier(RULES, fetcher, pool, 64 << 20, lambda key: False)
    await fetcher.close()
    pool.shutdown()


def pixels_of(identifier: Identifier, identity: Identity) -> np.ndarray:
    found = identifier.pixels.get((b"t", identity.digest))
    assert (found.width, found.height) == (identity.width, identity.height)
    return np.frombuffer(found.data, np.uint8).reshape(found.height, found.width, 3)


async def outcome(identifier: Identifier, data: bytes | str) -> str | np.ndarray:
    """The kind of the error, or the picture. Any other exception is a failure."""
    try:
        if isinstance(data, str):
            data = await identifier.fetch(data, 0)
        return pixels_of(identifier, await identifier.identify(b"t", data, "high"))
    except ImageError as error:
        return error.kind


def judge(name: str, got: str | np.ndarray, want: str | Check) -> str:
    """What is wrong, if anything."""
    said = got if isinstance(got, str) else "a picture"
    if isinstance(want, str):
        return "" if said == want else f"{name}: {want} was expected, not {said}"
    if isinstance(got, str):
        return f"{name}: a picture was expected, not {got}"
    return "" if want(got) else f"{name}: the picture is wrong: {got.shape} {got[0, 0]} {got[got.shape[0] // 2, 0]}"


@pytest.mark.slow
async def test_all_of_them_at_once(identifier, site):
    cases = {name: (data, want) for name, (data, want) in FILES.items()}
    cases |= {path: (site + path, want) for path, want in PLACES.items()}
    cases["private address"] = ("http://192.168.0.1/image", "DestinationRejected")
    cases["not http"] = ("ftp://example.com/image", "InvalidUrl")
    assert len(cases) >= 40
    async with asyncio.timeout(60):
        got = await asyncio.gather(*(outcome(identifier, data) for data, _ in cases.values()))
    wrong = [judge(name, g, want) for (name, (_, want)), g in zip(cases.items(), got, strict=True)]
    assert not list(filter(None, wrong)), "\n".join(filter(None, wrong))
    assert identifier.decoding == 0 and identifier.pixels.bytes <= identifier.pixels.capacity
    assert isinstance(await outcome(identifier, encoded(plain(RED))), np.ndarray)


async def test_one_picture_is_one_image_in_whatever_file(identifier):
    one = await identifier.identify(b"t", encoded(halves()), "high")
    again = await identifier.identify(b"t", encoded(halves()), "auto")
    other_file = await identifier.identify(b"t", encoded(halves(), "WEBP", lossless=True), "high")
    other_picture = await identifier.identify(b"t", encoded(halves().rotate(180)), "high")
    assert one == again == other_file and one.digest != other_picture.digest
    assert identifier.counters["known"] == 1 and identifier.counters["decoded"] == 3
    tall = await identifier.identify(b"t", encoded(plain(RED, (84, 168))), "high")
    wide = await identifier.identify(b"t", encoded(plain(RED, (168, 84))), "high")
    assert tall.digest != wide.digest  # equal bytes, another grid
