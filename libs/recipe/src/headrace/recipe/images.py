"""Images: how large the model sees them, how many tokens that is, and how they get here safely.

Sizes and limits are the referee's. Fetching is stricter: no private, loopback or link-local address unless the caller
allows it, the address that was checked is the one that is connected to, and every redirect is checked again. Decoding
needs Pillow, fetching aiohttp (`pip install headrace-recipe[images]`); sizes and token counts need neither.
"""

import asyncio
import base64
import binascii
import io
import ipaddress
import math
import socket
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import msgspec

from .conversation import ImageDetail, ImageSource
from .errors import RecipeError

IMAGE_TOKEN_ID = 129264  # V4.1's placeholder
MAX_SIDE = 8192  # pixels
LOW_SIDE = 512  # pixels, longest side of a low-detail image
MAX_IMAGE_BYTES = 32 << 20
MAX_REQUEST_BYTES = 64 << 20
MAX_IMAGES = 600
MAX_URL = 8192  # characters
MAX_REDIRECTS = 10

_BASE64_PIECE = 1 << 20  # characters, a multiple of 4
GREY = 127  # beside an image whose sides don't have the ratio of whole patches
_MAX_OUTPUT_SIDE = 16380  # WebP's limit, rounded to patches
_FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
_DATA_TYPES = {"image/png", "image/jpeg", "image/jpg", "image/gif", "image/webp"}
_UNSUPPORTED = (
    "You have uploaded an unsupported image. Please make sure your image is valid and has one of the "
    "following formats: webp, png, jpeg, and gif."
)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")

DestinationFilter = Callable[[str, str], bool]


class ImageError(RecipeError):
    """An image that cannot be used. `kind` names the cause; `retryable`: the same request may succeed later."""

    def __init__(self, kind: str, message: str, *, retryable: bool = False):
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable


class ImageInfo(msgspec.Struct):
    """An image as the vision encoder takes it: WebP bytes and its size in pixels."""

    data: bytes
    width: int
    height: int

    @property
    def tokens(self) -> int:
        """Tokens that it occupies in the prompt."""
        return image_tokens(self.width, self.height)


class ImageQuota(msgspec.Struct):
    """What the images of one request have used so far."""

    images: int = 0
    bytes: int = 0


class ImageRules(msgspec.Struct, frozen=True):
    """How a vision encoder wants images; defaults are V4.1's. Lengths in pixels, `merge` in patches a side of one token."""

    patch: int = 14
    merge: int = 3
    min_area: int = 544**2
    max_tokens: int = 1024
    max_ratio: float | None = None  # wider images are squeezed to this ratio of width to height


class ImageSize(msgspec.Struct):
    """Size after resizing, and the tokens of it."""

    width: int
    height: int
    tokens: int


# --- sizes -----------------------------------------------------------------------------------------------------------


V41_RULES = ImageRules()


def image_size(width: int, height: int, detail: ImageDetail = "high", low_side: int = LOW_SIDE) -> ImageSize:
    """The size to which the referee resizes an image of `width` x `height`: `encoder_size`, but no side above WebP's limit."""
    size = encoder_size(width, height, detail, V41_RULES, low_side)
    return ImageSize(min(size.width, _MAX_OUTPUT_SIDE), min(size.height, _MAX_OUTPUT_SIDE), size.tokens)


def encoder_size(
    width: int, height: int, detail: ImageDetail = "high", rules: ImageRules = V41_RULES, low_side: int = LOW_SIDE
) -> ImageSize:
    """The size at which an encoder sees an image of `width` x `height`: sides in whole patches, at most `rules.max_tokens`."""
    width, height = _logical(width, height, detail, rules, low_side)
    fitted = _grow(width, height, rules)
    tokens = _tokens(*fitted, rules)
    if tokens > rules.max_tokens:
        fitted = _shrink(width, height, rules)
        tokens = _tokens(*fitted, rules)
    return ImageSize(*fitted, tokens)


def image_tokens(width: int, height: int) -> int:
    """Prompt tokens of an image of this size."""
    return image_size(width, height).tokens


def _logical(width: int, height: int, detail: ImageDetail, rules: ImageRules, low_side: int) -> tuple[int, int]:
    """The size that counts: a low-detail image is small, one that is too wide is narrower."""
    if detail == "low" and max(width, height) > low_side:
        scale = low_side / max(width, height)
        width, height = max(1, round(width * scale)), max(1, round(height * scale))
    if rules.max_ratio is not None and width > height * rules.max_ratio:
        width = max(1, int(height * rules.max_ratio))
    return width, height


def _cells(side: int, rules: ImageRules) -> int:
    return math.ceil(math.ceil(side / rules.patch) / rules.merge)


def _tokens(width: int, height: int, rules: ImageRules) -> int:
    """Tokens: one a cell, one a row for its end, two around."""
    columns, rows = _cells(width, rules), _cells(height, rules)
    return columns * rows + rows + 2


def _grow(width: int, height: int, rules: ImageRules) -> tuple[int, int]:
    """Up to about the least area, sides rounded up to whole patches, until that changes nothing more."""
    while True:
        before = width, height
        if width * height < rules.min_area:
            scale = math.sqrt(rules.min_area / (width * height))
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        width, height = math.ceil(width / rules.patch) * rules.patch, math.ceil(height / rules.patch) * rules.patch
        if width * height >= rules.min_area or (width, height) == before:
            return width, height


def _shrink(width: int, height: int, rules: ImageRules) -> tuple[int, int]:
    """Down to the largest grid of cells that fits the tokens and keeps the ratio."""
    room = rules.max_tokens - 2
    ratio = width / height
    rows = (-1 + math.sqrt(1 + 4 * ratio * room)) / (2 * ratio)
    columns, rows = math.floor(ratio * rows), math.floor(rows)
    if columns < 1:
        columns, rows = 1, room // 2
    elif rows < 1:
        columns, rows = room - 1, 1
    cell = rules.patch * rules.merge
    scale = min(cell * columns / width, cell * rows / height)
    return _floor_patch(width * scale, rules), _floor_patch(height * scale, rules)


def _floor_patch(side: float, rules: ImageRules) -> int:
    return max(rules.patch, math.floor(side / rules.patch) * rules.patch)


# --- decoding --------------------------------------------------------------------------------------------------------


def preprocess(data: bytes, detail: ImageDetail = "high", max_side: int = MAX_SIDE, low_side: int = LOW_SIDE) -> ImageInfo:
    """Decode, resize and encode an image as WebP. Raises ImageError. CPU work: call it in a thread."""
    image = open_image(data, max_side)
    size = image_size(*image.size, detail, low_side)
    encoded = io.BytesIO()
    place(image, size.width, size.height).save(encoded, "WEBP", lossless=True, quality=0)
    return ImageInfo(encoded.getvalue(), size.width, size.height)


def open_image(data: bytes, max_side: int = MAX_SIDE) -> Any:
    """The picture that a person would see: a PIL image in RGB. Raises ImageError. CPU work: call it in a thread.

    The first frame of an animation, upright (EXIF), transparency on white, 16 bits a channel scaled to 8. A file that is cut
    off or promises more than `max_side` pixels a side is refused; the latter before anything is decoded."""
    from PIL import Image, ImageOps

    if not data:
        raise ImageError("EmptyImage", _UNSUPPORTED)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the size is checked here; an odd chunk is no reason to refuse a picture
            with Image.open(io.BytesIO(data), formats=list(_FORMATS)) as image:
                if max(image.size) > max_side:
                    raise ImageError("ImageDimensionsTooLarge", f"{_UNSUPPORTED} {_size_text(image.size, max_side)}")
                image.load()
                return _to_rgb(ImageOps.exif_transpose(image))
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError("UnsupportedMediaType", _UNSUPPORTED) from None
    except Image.DecompressionBombError:  # so large that even its header is not believed
        raise ImageError("ImageDimensionsTooLarge", f"{_UNSUPPORTED} (At most {max_side} pixels a side are read.)") from None
    except Exception:  # a decoder meets bytes that somebody made up: whatever it raises, they are no image
        raise ImageError("Decode", _UNSUPPORTED) from None


def _size_text(size: tuple[int, int], limit: int) -> str:
    return f"(The image is {size[0]} x {size[1]} pixels; at most {limit} a side are read.)"


def _to_rgb(image: Any) -> Any:
    from PIL import Image

    if image.mode.startswith("I;16") or image.mode == "I":  # 16 bits of grey; a plain conversion would clip them
        image = image.convert("I").point(lambda value: value / 257).convert("L")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def place(image: Any, width: int, height: int, squeeze: bool = False) -> Any:
    """`image` (RGB) as large as fits into `width` x `height`, in the middle of grey; with `squeeze` it fills it."""
    from PIL import Image

    if squeeze:
        return image.resize((width, height), Image.Resampling.BICUBIC)
    scale = min(width / image.width, height / image.height)
    inner = (max(1, min(width, round(image.width * scale))), max(1, min(height, round(image.height * scale))))
    resized = image.resize(inner, Image.Resampling.BICUBIC)
    if inner == (width, height):
        return resized
    canvas = Image.new("RGB", (width, height), (GREY, GREY, GREY))
    canvas.paste(resized, ((width - inner[0]) // 2, (height - inner[1]) // 2))
    return canvas


def encoder_pixels(
    data: bytes, detail: ImageDetail = "high", rules: ImageRules = V41_RULES, max_side: int = MAX_SIDE
) -> tuple[bytes, ImageSize]:
    """What an encoder sees of an encoded image: RGB bytes [height, width, 3] and their size. Raises ImageError. CPU work."""
    image = open_image(data, max_side)
    size = encoder_size(*image.size, detail, rules)
    squeeze = rules.max_ratio is not None and image.width > image.height * rules.max_ratio
    return place(image, size.width, size.height, squeeze).tobytes(), size


def decode_data_url(url: str) -> bytes:
    """The bytes of a `data:` URL, base64 or percent-encoded. Raises ImageError."""
    head, comma, body = url.partition(",")
    if not head.startswith("data:") or not comma:
        raise ImageError("InvalidDataUrl", _UNSUPPORTED)
    media_type, *parameters = head[5:].split(";")
    if media_type.strip().lower() not in _DATA_TYPES:
        raise ImageError("UnsupportedMediaType", _UNSUPPORTED)
    if "base64" not in (parameter.strip().lower() for parameter in parameters):
        return unquote_to_bytes(body)
    try:
        return _decode_base64(body)
    except (binascii.Error, ValueError):
        raise ImageError("InvalidDataUrl", _UNSUPPORTED) from None


def _decode_base64(text: str) -> bytes:
    """Strict, and in pieces: one call for 40 MB would keep all other threads of the process waiting. Raises ValueError."""
    if len(text) <= _BASE64_PIECE:
        return base64.b64decode(text, validate=True)
    out = bytearray()
    for at in range(0, len(text), _BASE64_PIECE):
        piece = text[at : at + _BASE64_PIECE]
        if at + _BASE64_PIECE < len(text) and "=" in piece:
            raise ValueError("padding before the end")
        out += base64.b64decode(piece, validate=True)
    return bytes(out)


# --- fetching --------------------------------------------------------------------------------------------------------


def public_address(host: str, address: str) -> bool:
    """The default destination filter: only addresses of the public internet."""
    ip: Any = ipaddress.ip_address(address.split("%")[0])
    if ip.version == 6:
        if ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped
        elif ip.sixtofour is not None:
            ip = ip.sixtofour
        elif ip in _NAT64:
            ip = ipaddress.ip_address(int(ip) & 0xFFFFFFFF)
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


class ImageFetcher:
    """Downloads images over http(s). Use as an async context manager, or call `close`."""

    def __init__(
        self,
        max_bytes: int = MAX_IMAGE_BYTES,
        destination_filter: DestinationFilter = public_address,
        timeout: float = 20.0,
    ):
        """`destination_filter(host, address)`: whether to connect there. `timeout`: seconds for one image in all."""
        self.max_bytes = max_bytes
        self.timeout = timeout
        self._allows = destination_filter
        self._session: Any = None

    async def __aenter__(self) -> "ImageFetcher":
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def fetch(self, url: str) -> bytes:
        """The bytes at `url`. Raises ImageError."""
        try:
            async with asyncio.timeout(self.timeout):
                return await self._follow(url)
        except TimeoutError:
            raise _failed(url, retryable=True) from None

    async def _follow(self, url: str) -> bytes:
        import aiohttp

        place = url
        for _ in range(MAX_REDIRECTS + 1):
            host, port = _destination(place)
            try:
                await self._check(host, port, url)
                async with self._client().get(place, allow_redirects=False) as response:
                    location = response.headers.get("Location")
                    if response.status in (301, 302, 303, 307, 308) and location:
                        place = urljoin(place, location)
                        continue
                    if response.status != 200:
                        raise ImageError(
                            "FetchStatus",
                            f"Failed to download image from {url}: status {response.status}",
                            retryable=response.status >= 500,
                        )
                    return await self._body(response, url)
            except (aiohttp.ClientError, OSError, ValueError):
                raise _failed(url, retryable=True) from None
        raise _failed(url)

    async def _check(self, host: str, port: int, url: str) -> None:
        """Refuse a literal address that is not allowed; names are checked by the resolver as they are connected."""
        try:
            ipaddress.ip_address(host)
        except ValueError:
            await self._resolver().resolve(host, port)  # refuses here with a clear error; the answer is not cached
            return
        if not self._allows(host, host):
            raise ImageError("DestinationRejected", f"Failed to download image from {url}")

    async def _body(self, response: Any, url: str) -> bytes:
        if (response.content_length or 0) > self.max_bytes:
            raise _too_large(self.max_bytes)
        data = bytearray()
        async for chunk in response.content.iter_chunked(65536):
            data += chunk
            if len(data) > self.max_bytes:
                raise _too_large(self.max_bytes)
        return bytes(data)

    def _resolver(self) -> "_PinnedResolver":
        return _PinnedResolver(self._allows)

    def _client(self) -> Any:
        import aiohttp

        if self._session is None:
            connector = aiohttp.TCPConnector(resolver=_PinnedResolver(self._allows), use_dns_cache=False, limit=64)
            self._session = aiohttp.ClientSession(
                connector=connector,
                trust_env=False,
                auto_decompress=False,
                headers={"User-Agent": "headrace", "Accept": "image/*"},
            )
        return self._session


class _PinnedResolver:
    """Resolves a name to its allowed addresses only, so the connection goes to an address that was checked.

    Has the methods of aiohttp's AbstractResolver.
    """

    def __init__(self, allows: DestinationFilter):
        self._allows = allows

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_UNSPEC) -> list[dict[str, Any]]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)
        allowed = [(kind, address) for kind, _, _, _, address in found if self._allows(host, str(address[0]))]
        if not allowed:
            raise ImageError("DestinationRejected", f"Failed to download image: no allowed address for host {host}")
        return [
            {"hostname": host, "host": address[0], "port": port, "family": kind, "proto": 0, "flags": socket.AI_NUMERICHOST}
            for kind, address in allowed
        ]

    async def close(self) -> None:
        """Nothing is held."""


async def resolve_images(
    sources: Sequence[ImageSource], quota: ImageQuota, fetcher: ImageFetcher | None = None
) -> list[ImageInfo]:
    """Fetch, check and preprocess the images of a request, in order. A failure leaves `quota` as it was."""
    if quota.images + len(sources) > MAX_IMAGES:
        path = sources[MAX_IMAGES - quota.images].path
        raise ImageError(
            "TooManyImages", f"{path}: Too many images: max {MAX_IMAGES} images per request, got {quota.images + len(sources)}"
        )
    counts: dict[str, int] = {}
    images, total = [], quota.bytes
    loop = asyncio.get_running_loop()
    for source in sources:
        number = counts.get(source.path, 0)
        counts[source.path] = number + 1
        try:
            data = await _load(source, fetcher)
            total += len(data)
            if total > MAX_REQUEST_BYTES:
                raise ImageError("TotalSizeTooLarge", f"images of one request exceed {MAX_REQUEST_BYTES >> 20} MB")
            images.append(await loop.run_in_executor(None, preprocess, data, source.detail))
        except ImageError as error:
            if error.kind in ("InvalidUrl", "UrlTooLong"):
                raise ImageError(error.kind, f"{source.path}: {error.message}") from None
            place = f"{source.path}.image[{number}]" if source.path else f"image[{number}]"
            raise ImageError(error.kind, f"{place}: {error.message}", retryable=error.retryable) from None
    quota.images += len(sources)
    quota.bytes = total
    return images


def image_token_adjustment(images: Sequence[ImageInfo]) -> int:
    """Prompt tokens of images beyond the one placeholder of each."""
    return sum(image.tokens - 1 for image in images)


async def _load(source: ImageSource, fetcher: ImageFetcher | None) -> bytes:
    if source.kind == "bytes":
        data = bytes(source.value)
    elif source.kind == "data_url":
        data = decode_data_url(str(source.value))
    else:
        url = str(source.value)
        if len(url) > MAX_URL:
            raise ImageError("UrlTooLong", f"external link length {len(url)} too long, max link length {MAX_URL}")
        if fetcher is None:
            raise ImageError("Fetch", f"Failed to download image from {url[:200]}: images by URL are switched off")
        data = await fetcher.fetch(url)
    if len(data) > MAX_IMAGE_BYTES:
        raise _too_large(MAX_IMAGE_BYTES)
    return data


def _destination(url: str) -> tuple[str, int]:
    """Host and port of an http(s) URL. Raises ImageError."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError:
        pass
    raise ImageError("InvalidUrl", f'invalid url: "{url[:200]}"')


def _too_large(limit: int) -> ImageError:
    return ImageError("ImageTooLarge", f"image file size exceeds limit {limit >> 20} MB")


def _failed(url: str, *, retryable: bool = False) -> ImageError:
    return ImageError("Fetch", f"Failed to download image from {url[:200]}", retryable=retryable)
