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

_PATCH = 14  # pixels
_MERGE = 3  # patches a side in one token
_MIN_AREA = 544**2
_MAX_TOKENS = 1024
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


class ImageSize(msgspec.Struct):
    """Size after resizing, and the tokens of it."""

    width: int
    height: int
    tokens: int


# --- sizes -----------------------------------------------------------------------------------------------------------


def image_size(width: int, height: int, detail: ImageDetail = "high", low_side: int = LOW_SIDE) -> ImageSize:
    """The size to which an image of `width` x `height` is resized, sides in multiples of 14 pixels."""
    if detail == "low" and max(width, height) > low_side:
        scale = low_side / max(width, height)
        width, height = max(1, round(width * scale)), max(1, round(height * scale))
    fitted = _grow(width, height)
    tokens = _tokens(*fitted)
    if tokens > _MAX_TOKENS:
        fitted, tokens = _shrink(width, height)
    return ImageSize(*_cap(*fitted), tokens)


def image_tokens(width: int, height: int) -> int:
    """Prompt tokens of an image of this size."""
    return image_size(width, height).tokens


def _cells(side: int) -> int:
    return math.ceil(math.ceil(side / _PATCH) / _MERGE)


def _tokens(width: int, height: int) -> int:
    """Tokens: one a cell, one a row for its end, two around."""
    columns, rows = _cells(width), _cells(height)
    return columns * rows + rows + 2


def _grow(width: int, height: int) -> tuple[int, int]:
    """Up to about 544 x 544 pixels of area, sides rounded up to whole patches, until that changes nothing more."""
    while True:
        before = width, height
        if width * height < _MIN_AREA:
            scale = math.sqrt(_MIN_AREA / (width * height))
            width, height = max(1, int(width * scale)), max(1, int(height * scale))
        width, height = math.ceil(width / _PATCH) * _PATCH, math.ceil(height / _PATCH) * _PATCH
        if width * height >= _MIN_AREA or (width, height) == before:
            return width, height


def _shrink(width: int, height: int) -> tuple[tuple[int, int], int]:
    """Down to the largest grid of cells that fits 1,024 tokens and keeps the ratio."""
    ratio = width / height
    rows = (-1 + math.sqrt(1 + 4 * ratio * (_MAX_TOKENS - 2))) / (2 * ratio)
    columns, rows = math.floor(ratio * rows), math.floor(rows)
    if columns < 1:
        columns, rows = 1, (_MAX_TOKENS - 2) // 2
    elif rows < 1:
        columns, rows = _MAX_TOKENS - 3, 1
    cell = _PATCH * _MERGE
    scale = min(cell * columns / width, cell * rows / height)
    fitted = (_floor_patch(width * scale), _floor_patch(height * scale))
    return fitted, _tokens(*fitted)


def _floor_patch(side: float) -> int:
    return max(_PATCH, math.floor(side / _PATCH) * _PATCH)


def _cap(width: int, height: int) -> tuple[int, int]:
    return min(width, _MAX_OUTPUT_SIDE), min(height, _MAX_OUTPUT_SIDE)


# --- decoding --------------------------------------------------------------------------------------------------------


def preprocess(data: bytes, detail: ImageDetail = "high", max_side: int = MAX_SIDE, low_side: int = LOW_SIDE) -> ImageInfo:
    """Decode, resize and encode an image as WebP. Raises ImageError. CPU work: call it in a thread."""
    from PIL import Image

    if not data:
        raise ImageError("EmptyImage", _UNSUPPORTED)
    try:
        with Image.open(io.BytesIO(data), formats=list(_FORMATS)) as image:
            if max(image.size) > max_side:
                raise ImageError("ImageDimensionsTooLarge", _UNSUPPORTED)
            size = image_size(*image.size, detail, low_side)
            pixels = image.convert("RGB").resize((size.width, size.height), Image.Resampling.BICUBIC)
    except ImageError:
        raise
    except Image.UnidentifiedImageError:
        raise ImageError("UnsupportedMediaType", _UNSUPPORTED) from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise ImageError("Decode", _UNSUPPORTED) from None
    encoded = io.BytesIO()
    pixels.save(encoded, "WEBP", lossless=True, quality=0)
    return ImageInfo(encoded.getvalue(), size.width, size.height)


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
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise ImageError("InvalidDataUrl", _UNSUPPORTED) from None


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
