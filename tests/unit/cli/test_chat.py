"""What `headrace chat` refuses by itself, and how a picture goes along; whole conversations are in tests/system."""

import base64
import io
import json
from argparse import Namespace

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
    assert chat.image_url("https://x.example/a.png") == "https://x.example/a.png"
    with pytest.raises(CommandError, match="the picture /dev/null is empty"):
        chat.image_url("/dev/null")
    with pytest.raises(CommandError, match="can't read the picture /nowhere.png: No such file"):
        chat.image_url("/nowhere.png")


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
