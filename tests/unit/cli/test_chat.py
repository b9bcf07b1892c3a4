"""What `headrace chat` refuses by itself, and how a picture goes along; whole conversations are in tests/system."""

import asyncio
import base64
import contextlib
import io
import json
import threading
from argparse import Namespace
from collections.abc import Iterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from headrace.cli import chat
from headrace.cli.errors import CommandError


def test_a_file_becomes_a_data_url_and_a_url_stays(tmp_path):
    file = tmp_path / "a b.png"
    file.write_bytes(b"\x89PNG\x00")
    kind, _, data = chat.image_url(str(file)).partition(",")
    assert (kind, base64.b64decode(data)) == ("data:image/png;base64", b"\x89PNG\x00")
    file.write_bytes(b"RIFF\n\0\0\0WEBPVP8 ")
    assert chat.image_url(str(file)).startswith("data:image/webp;"), "by what it is, not by its name"
    assert chat.image_url("https://x.example/a.png") == "https://x.example/a.png"
    with pytest.raises(CommandError, match="the picture /dev/null is empty"):
        chat.image_url("/dev/null")
    with pytest.raises(CommandError, match="can't read the picture /nowhere.png: No such file"):
        chat.image_url("/nowhere.png")


def test_a_file_that_is_no_picture_is_named_before_anything_is_asked(tmp_path):
    file = tmp_path / "README.png"
    file.write_bytes(b"# Headrace\n")
    with pytest.raises(CommandError, match=r"README.png is no picture .* PNG, JPEG, GIF or WebP, and begins with b'# Headra'"):
        chat.run(Namespace(message="x", url="http://127.0.0.1:9", image=[str(file)], system=None))


@pytest.mark.parametrize(
    ("content", "reasoning", "finish", "asked", "shown", "lines"),
    [
        ("yes", "hm", "stop", False, False, []),
        ("", "", "stop", True, True, ["(the answer is empty)"]),
        ("", "hm", "stop", False, False, ["(the model only thought, and said nothing; --thinking shows its thoughts)"]),
        ("", "hm", "stop", True, False, ["hm", "(the model only thought, and said nothing)"]),
        (
            "",
            "hm",
            "length",
            True,
            True,
            ["(the model only thought, and said nothing; a larger --max-tokens gives it room to answer)"],
        ),
    ],
)
def test_an_answer_without_text_is_explained(content, reasoning, finish, asked, shown, lines):
    answer = chat.Answer(content=content, reasoning=reasoning, finish_reason=finish)
    assert chat.without_content(answer, asked, shown) == lines


def test_an_empty_message_is_refused(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    with pytest.raises(CommandError, match="the message is empty"):
        chat.run(Namespace(message="-", url="http://127.0.0.1:9", image=[]))


async def test_a_stream_that_ends_early_is_told():
    async def half(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["messages"] == [{"role": "user", "content": "hi"}]
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        chunk = {"id": "r", "choices": [{"index": 0, "delta": {"content": "wat"}}]}
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        return reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", half)
    async with TestServer(app) as server:
        answer, seen = chat.Answer(), []
        with pytest.raises(CommandError, match="ended without"):
            async for part in chat.stream(str(server.make_url("/")), {"messages": [{"role": "user", "content": "hi"}]}, answer):
                seen.append(part)
        assert seen == [("content", "wat")] and answer.request_id == "r"


def test_thoughts_alone_are_no_blank_line(capsys):
    """The command itself against a server that only thinks: asked for thoughts, they come on stderr."""

    async def thinks(request: web.Request) -> web.StreamResponse:
        chunk = {"id": "r", "choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}, "finish_reason": "length"}]}
        return web.Response(text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    with serving(thinks) as url:
        options = {"url": url, "image": [], "system": None, "max_tokens": 4, "temperature": 0, "seed": None}
        assert chat.run(Namespace(message="x", thinking=True, **options)) == 0
    out, said = capsys.readouterr()
    assert out == "" and said.startswith("Hm.\n(the model only thought, and said nothing; a larger --max-tokens")


@contextlib.contextmanager
def serving(handler) -> Iterator[str]:
    """`handler` behind /v1/chat/completions in a thread of its own, since the command has its own loop; -> the server's URL."""
    app = web.Application()
    app.router.add_post("/v1/chat/completions", handler)
    loop = asyncio.new_event_loop()
    server = TestServer(app)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start_server(), loop).result(10)
        yield f"http://{server.host}:{server.port}"
        asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
