"""Images: sizes, limits, and fetching that cannot be turned against the network it runs in."""

import asyncio
import base64
import io
import socket

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from headrace.recipe import ImageSource, images
from headrace.recipe.images import ImageError, ImageFetcher, ImageQuota, decode_data_url, image_size, preprocess, resolve_images


def png(width: int = 40, height: int = 30) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), (10, 200, 30)).save(out, "PNG")
    return out.getvalue()


def anywhere(host: str, address: str) -> bool:
    return True


@pytest.fixture
async def server():
    """A web server on 127.0.0.1 with an image, redirects and trouble; yields its address and the paths asked for."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/image":
            return web.Response(body=png(), content_type="image/png")
        if request.path == "/redirect":
            raise web.HTTPFound(request.query["to"])
        if request.path == "/endless":
            response = web.StreamResponse()
            await response.prepare(request)
            while True:
                await response.write(b"x" * 65536)
        if request.path == "/slow":
            await asyncio.sleep(5)
        return web.Response(status=int(request.path[1:]) if request.path[1:].isdigit() else 404)

    runner = web.AppRunner(web.Application(), shutdown_timeout=0.1)
    runner.app.router.add_get("/{path:.*}", answer)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}", asked
    await runner.cleanup()


async def refused(fetcher: ImageFetcher, url: str) -> ImageError:
    with pytest.raises(ImageError) as error:
        await fetcher.fetch(url)
    assert error.value.status == 400
    return error.value


# --- sizes and decoding ----------------------------------------------------------------------------------------------


@given(st.integers(1, 8192), st.integers(1, 8192), st.sampled_from(["high", "low", "auto"]))
def test_sizes(width, height, detail):
    size = image_size(width, height, detail)
    assert size.width % 14 == 0 and size.height % 14 == 0
    assert 3 < size.tokens <= 1024


def test_preprocess():
    for detail in ("high", "low"):
        info = preprocess(png(700, 300), detail)
        with Image.open(io.BytesIO(info.data)) as image:
            assert image.format == "WEBP" and image.size == (info.width, info.height)
    assert info.width == 840 and info.tokens == image_size(700, 300, "low").tokens


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"", "EmptyImage"),
        (b"plain text", "UnsupportedMediaType"),
        (png()[:60], "Decode"),
        (png(8193, 1), "ImageDimensionsTooLarge"),
    ],
)
def test_bad_images(data, kind):
    with pytest.raises(ImageError) as error:
        preprocess(data)
    assert error.value.kind == kind


def test_data_urls():
    assert decode_data_url("data:image/png;base64," + base64.b64encode(b"abc").decode()) == b"abc"
    assert decode_data_url("data:image/gif,a%20b") == b"a b"
    for url, kind in (
        ("data:image/png;base64,@@", "InvalidDataUrl"),
        ("data:image/png;base64", "InvalidDataUrl"),
        ("data:text/html;base64,YWJj", "UnsupportedMediaType"),
    ):
        with pytest.raises(ImageError) as error:
            decode_data_url(url)
        assert error.value.kind == kind


# --- a request's images ----------------------------------------------------------------------------------------------


async def test_resolve_keeps_order_and_counts():
    quota = ImageQuota()
    sources = [ImageSource("bytes", png(600, 600), path="a"), ImageSource("bytes", png(1200, 300), path="a")]
    found = await resolve_images(sources, quota)
    assert [info.tokens for info in found] == [image_size(600, 600).tokens, image_size(1200, 300).tokens]
    assert quota.images == 2 and quota.bytes == len(png(600, 600)) + len(png(1200, 300))
    assert images.image_token_adjustment(found) == sum(info.tokens - 1 for info in found)


async def test_resolve_names_the_place_and_leaves_the_quota():
    quota = ImageQuota()
    sources = [ImageSource("bytes", png(), path="messages[0]"), ImageSource("bytes", b"no", path="messages[0]")]
    with pytest.raises(ImageError, match=r"messages\[0\]\.image\[1\]: "):
        await resolve_images(sources, quota)
    assert quota == ImageQuota()


async def test_limits(monkeypatch):
    source = ImageSource("bytes", png(), path="m")
    with pytest.raises(ImageError) as error:
        await resolve_images([source] * 2, ImageQuota(images=images.MAX_IMAGES - 1))
    assert error.value.kind == "TooManyImages"
    with pytest.raises(ImageError) as error:
        await resolve_images([source], ImageQuota(bytes=images.MAX_REQUEST_BYTES))
    assert error.value.kind == "TotalSizeTooLarge"
    monkeypatch.setattr(images, "MAX_IMAGE_BYTES", 10)
    with pytest.raises(ImageError) as error:
        await resolve_images([source], ImageQuota())
    assert error.value.kind == "ImageTooLarge"
    with pytest.raises(ImageError) as error:
        await resolve_images([ImageSource("url", "http://x/" + "a" * images.MAX_URL, path="m")], ImageQuota())
    assert error.value.kind == "UrlTooLong"
    with pytest.raises(ImageError, match="switched off"):
        await resolve_images([ImageSource("url", "http://x/", path="m")], ImageQuota())


# --- fetching --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "255.255.255.255",
        "::1",
        "::",
        "fe80::1%eth0",
        "fd00::1",
        "::ffff:127.0.0.1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
        "ff02::1",
    ],
)
def test_private_addresses(address):
    assert not images.public_address("host", address)


def test_public_addresses():
    assert images.public_address("host", "93.184.216.34")
    assert images.public_address("host", "2606:2800:220:1::1")


async def test_fetch(server):
    url, _ = server
    async with ImageFetcher(destination_filter=anywhere) as fetcher:
        assert await fetcher.fetch(url + "/image") == png()
        assert await fetcher.fetch(f"{url}/redirect?to=/image") == png()
        (info,) = await resolve_images([ImageSource("url", url + "/image", path="m")], ImageQuota(), fetcher)
        assert info.tokens == image_size(40, 30).tokens


async def test_private_destinations_are_never_asked(server):
    url, asked = server
    port = url.rsplit(":", 1)[1]
    async with ImageFetcher() as fetcher:
        for host in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0"):
            error = await refused(fetcher, f"http://{host}:{port}/image")
            assert error.kind in ("DestinationRejected", "Fetch")
        for host in ("2130706433", "0x7f000001", "127.1"):  # spellings of 127.0.0.1 that resolvers understand
            await refused(fetcher, f"http://{host}:{port}/image")
    assert asked == []


async def test_redirects_are_checked_again(server):
    url, asked = server
    private = url.replace("127.0.0.1", "127.0.0.2")
    async with ImageFetcher(destination_filter=lambda host, address: address == "127.0.0.1") as fetcher:
        assert (await refused(fetcher, f"{url}/redirect?to={private}/image")).kind == "DestinationRejected"
        assert (await refused(fetcher, f"{url}/redirect?to=file:///etc/passwd")).kind == "InvalidUrl"
        await refused(fetcher, f"{url}/redirect?to={url}/redirect?to={private}/image")
    assert "/image" not in asked


async def test_a_name_that_changes_its_address_is_pinned(server, monkeypatch):
    """DNS rebinding: the first answer is public, every later one is 127.0.0.1."""
    url, asked = server
    port = int(url.rsplit(":", 1)[1])
    answers = iter(["93.184.216.34"])

    async def getaddrinfo(host, port, **options):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (next(answers, "127.0.0.1"), port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    async with ImageFetcher() as fetcher:
        await refused(fetcher, f"http://rebind.example:{port}/image")
    assert asked == []


async def test_bodies_and_statuses(server):
    url, _ = server
    async with ImageFetcher(destination_filter=anywhere, max_bytes=100_000, timeout=0.5) as fetcher:
        assert (await refused(fetcher, url + "/endless")).kind == "ImageTooLarge"
        for status, retryable in ((404, False), (503, True)):
            error = await refused(fetcher, f"{url}/{status}")
            assert (error.kind, error.retryable) == ("FetchStatus", retryable)
        assert (await refused(fetcher, url + "/slow")).retryable
        assert (await refused(fetcher, "ftp://example.com/x")).kind == "InvalidUrl"
        for bad in ("http:///x", "http://[bad/x", "http://a:99999/x", "http://a b/"):
            await refused(fetcher, bad)
    async with ImageFetcher(destination_filter=anywhere, max_bytes=10) as fetcher:
        assert (await refused(fetcher, url + "/image")).kind == "ImageTooLarge"
