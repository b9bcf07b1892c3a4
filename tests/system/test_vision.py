"""Images through real processes: gateway, vision, prefill and decode, with a random checkpoint that sees.

What is asked: the same answer again without the encoder, order and identity of images, all three protocols, tool results,
errors that name their image, a vision worker that dies, and nothing left behind.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import random
import signal
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from PIL import Image, ImageDraw

from headrace.bus import messages as m
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.worker.testing import Cluster, Process

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

ENGINE = ("--numerics", "exact", "--batch-invariant", "--threads", "1", "--num-blocks", "256", "--max-num-seqs", "8")


def picture(seed: int, size: tuple[int, int] = (160, 120), kind: str = "PNG") -> bytes:
    draw, image = random.Random(seed), Image.new("RGB", size)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y = draw.randrange(size[0]), draw.randrange(size[1])
        pen.ellipse((x, y, x + 30, y + 20), fill=tuple(draw.randrange(256) for _ in range(3)))
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def chat(*parts: str | bytes, **fields: Any) -> dict:
    """A chat request: str is text, bytes an image."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return {
        "messages": [{"role": "user", "content": content}], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
        "thinking": {"type": "disabled"}, **fields,
    }  # fmt: skip


class System:
    """A cluster and its gateway."""

    def __init__(self, cluster: Cluster, session: aiohttp.ClientSession, processes: dict[str, Process]):
        self.cluster, self.session, self.processes = cluster, session, processes
        self.url = cluster.find(processes["gateway"]).http

    async def post(self, path: str, body: dict) -> tuple[int, dict]:
        data, kind = io.BytesIO(json.dumps(body).encode()), {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=data, headers=kind, timeout=aiohttp.ClientTimeout(90)) as response:
            return response.status, await response.json()

    async def ask(self, *parts: str | bytes, **fields: Any) -> tuple[str, dict]:
        """(text, usage)."""
        status, body = await self.post("/v1/chat/completions", chat(*parts, **fields))
        assert status == 200, body
        return body["choices"][0]["message"]["content"], body["usage"]

    async def metric(self, role: str, name: str) -> float:
        return (await self.cluster.metrics(self.processes[role])).get(name, 0.0)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory):
    model = str(make_checkpoint("nano-vision", 5, tmp_path_factory.mktemp("vision") / "model"))
    async with Cluster() as cluster, aiohttp.ClientSession() as session:
        started = await asyncio.gather(
            cluster.start("decode", "--model", model, *ENGINE),
            cluster.start("prefill", "--model", model, *ENGINE),
            cluster.start("vision", "--model", model, "--threads", "1"),
            cluster.start("gateway", "--model", model, "--port", "0", "--worker-seconds", "2"),
        )
        system = System(cluster, session, {process.role: process for process in started})
        async with asyncio.timeout(30):
            while (await session.get(f"{system.url}/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield system


async def test_the_same_request_again_runs_no_encoder_and_hits_the_cache(system):
    parts = ("What is on the left?" * 8, picture(1), "and what on the right?" * 4, picture(2, (90, 200)))
    first, cold = await system.ask(*parts)
    patches = await system.metric("vision", "headrace_vision_patches_total")
    assert patches > 0
    again, warm = await system.ask(*parts)
    assert again == first
    assert warm["prompt_tokens"] == cold["prompt_tokens"]
    assert await system.metric("vision", "headrace_vision_patches_total") == patches
    assert cold["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm["prompt_tokens_details"]["cached_tokens"] == (cold["prompt_tokens"] - 1) // 128 * 128


async def test_swapped_images_are_another_prompt(system):
    left, right = picture(11), picture(12)
    one, cold = await system.ask("First" * 30, left, "then", right)
    two, swapped = await system.ask("First" * 30, right, "then", left)
    assert one != two and swapped["prompt_tokens"] == cold["prompt_tokens"]
    assert swapped["prompt_tokens_details"]["cached_tokens"] == 128  # the text before the images
    once_more, _ = await system.ask("First" * 30, left, "then", right)
    assert once_more == one


async def test_the_next_turn_hits_what_the_last_one_left(system):
    image = picture(21)
    said, cold = await system.ask("Look. " * 20, image, max_tokens=150)
    body = chat("Look. " * 20, image)
    body["messages"] += [{"role": "assistant", "content": said}, {"role": "user", "content": "And now?"}]
    _, answer = await system.post("/v1/chat/completions", body)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= cold["prompt_tokens"] // 128 * 128


async def test_all_protocols_see_the_same_image(system):
    image = picture(31, kind="JPEG")
    url, raw = data_url(image, "jpeg"), base64.b64encode(image).decode()
    source = {"type": "base64", "media_type": "image/jpeg", "data": raw}
    requests = {
        "/v1/chat/completions": chat("See", image) | {"messages": [
            {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}]}
        ]},
        "/v1/messages": {"max_tokens": 8, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image", "source": source}]}
        ]},
        "/v1/responses": {"max_output_tokens": 8, "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "See"}, {"type": "input_image", "image_url": url}]}
        ]},
    }  # fmt: skip
    before = await system.metric("vision", "headrace_vision_encoded_total")
    for path, body in requests.items():
        status, answer = await system.post(path, body)
        assert status == 200, (path, answer)
    assert await system.metric("vision", "headrace_vision_encoded_total") == before + 1


async def test_tool_results_carry_images(system):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(41)).decode()}
    body = {
        "max_tokens": 8,
        "tools": [{"name": "camera", "input_schema": {"type": "object", "properties": {}}}],
        "messages": [
            {"role": "user", "content": "Take one."},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "camera", "input": {}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "image", "source": source}]}
            ]},
        ],
    }  # fmt: skip
    before = await system.metric("vision", "headrace_vision_encoded_total")
    status, answer = await system.post("/v1/messages", body)
    assert status == 200, answer
    assert await system.metric("vision", "headrace_vision_encoded_total") == before + 1
    source["data"] = base64.b64encode(b"no picture").decode()
    status, answer = await system.post("/v1/messages", body)
    assert status == 400 and "messages[2].content[0].content[0].source" in answer["error"]["message"]


async def test_errors_name_the_image(system):
    body = chat("a", picture(51), "b", b"\x89PNG\r\n\x1a\nbroken", "c")
    status, answer = await system.post("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "messages[0].content[3].image_url"
    assert answer["error"]["message"].startswith("messages[0].content[3].image_url: ")


async def test_images_by_url_and_the_addresses_that_are_not_asked(system):
    """The first vision worker asks nobody on this machine; another one may, and sees the same picture as inline."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path)
        if request.path == "/hop":
            raise web.HTTPFound("/cat.png")
        return web.Response(body=picture(55), content_type="image/png")

    runner = web.AppRunner(web.Application())
    runner.app.router.add_get("/{path:.*}", answer)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site = f"http://127.0.0.1:{runner.addresses[0][1]}"
    body = chat("Look")
    body["messages"][0]["content"].append({"type": "image_url", "image_url": {"url": f"{site}/hop", "detail": "low"}})
    status, refused = await system.post("/v1/chat/completions", body)
    assert status == 400 and refused["error"]["param"] == "messages[0].content[1].image_url" and not asked
    inline, _ = await system.ask("Look", picture(55))
    careful = system.processes["vision"]
    careful.terminate()
    system.processes["vision"] = await system.cluster.start(
        "vision", "--model", _model_of(system), "--threads", "1", "--allow-private-addresses"
    )
    try:
        status, seen = await system.post("/v1/chat/completions", body)
        assert status == 200, seen
        assert seen["choices"][0]["message"]["content"] == inline and asked == ["/hop", "/cat.png"]
    finally:
        await runner.cleanup()


async def test_too_many_and_too_large(system):
    small = picture(1, (20, 20))
    status, answer = await system.post("/v1/chat/completions", chat(*[small] * 601))
    assert status == 400 and answer["error"]["param"] == "messages[0].content[600].image_url"
    assert "600" in answer["error"]["message"]
    padded = small + bytes(23 << 20)  # a PNG with rubbish behind it is a picture still
    status, answer = await system.post("/v1/chat/completions", chat("a", padded, padded, padded))
    assert status == 400 and "exceed 64 MB" in answer["error"]["message"], answer
    status, answer = await system.post("/v1/chat/completions", chat("a", small + bytes(33 << 20)))
    assert status == 400 and "exceeds limit 32 MB" in answer["error"]["message"], answer
    text, _ = await system.ask("still there", padded)
    assert text


async def test_ids_may_not_hold_the_image_id(system):
    _, words = await system.post("/tokenize", {"prompt": "hello"})
    status, answer = await system.post("/v1/completions", {"prompt": [*words["tokens"], 272], "max_tokens": 2})
    assert status == 400 and "token id 272 stands for images" in answer["error"]["message"], answer


async def test_tokens_are_counted_with_images(system):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(picture(61)).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "?"}]
    body = {"max_tokens": 8, "messages": [{"role": "user", "content": content}]}
    _, counted = await system.post("/v1/messages/count_tokens", body)
    _, answer = await system.post("/v1/messages", body)
    assert counted["input_tokens"] == answer["usage"]["input_tokens"]


async def test_cancelled_requests_leave_nothing(system):
    async def impatient(seed: int) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02 + 0.03 * (seed % 5)):
                await system.ask("Stop", *(picture(seed * 10 + i, (150, 150)) for i in range(3)), max_tokens=2000)

    await asyncio.gather(*(impatient(seed) for seed in range(100, 115)))
    for role in ("prefill", "decode"):
        await system.cluster.quiet(system.processes[role])
    owed = ("live", "deposits", "writing", "queue", "used", "quarantined")
    await system.cluster.until(
        lambda: system.cluster.audit(system.processes["vision"]), lambda a: a["ok"] and not any(a[k] for k in owed), 20.0
    )
    deliveries = await system.cluster.audit(system.processes["prefill"])
    assert deliveries["deliveries"] == 0


async def test_a_vision_worker_that_stops_in_the_middle_of_deliveries(system):
    """Stopped, not dead: its requests end; room that it may still write to is in quarantine until it says that it won't."""
    vision = system.processes["vision"]
    running = [
        asyncio.ensure_future(system.post("/v1/chat/completions", chat("y", picture(400 + i, (600, 600))))) for i in range(4)
    ]
    await asyncio.sleep(0.1)
    vision.signal(signal.SIGSTOP)
    try:
        text, _ = await system.ask("No image here either")
        assert text
        for status, body in await asyncio.gather(*running):
            assert status == 200 or (status == 503 and body["error"]["code"] in ("no_vision", "prefill_vision_lost")), body
    finally:
        vision.signal(signal.SIGCONT)
    prefill = system.processes["prefill"]
    await system.cluster.until(lambda: system.cluster.audit(prefill), lambda a: a["deliveries"] == 0, 20.0)
    await system.cluster.until(lambda: asyncio.sleep(0, system.cluster.find(vision)), lambda found: found is not None, 20.0)
    text, _ = await system.ask("Awake again", picture(410))
    assert text


async def test_a_dead_vision_worker_fails_only_who_needs_it(system):
    """Killed in the middle; then absent; then another one is there and the pixels are asked for again."""
    known = ("Known" * 40, picture(71))
    first, _ = await system.ask(*known)
    running = asyncio.gather(*(system.post("/v1/chat/completions", chat("x", picture(200 + i, (400, 400)))) for i in range(4)))
    await asyncio.sleep(0.05)
    system.processes["vision"].kill(notice=False)
    text, _ = await system.ask("No image here")
    assert text
    for status, body in await running:
        assert status == 200 or (status == 503 and body["error"]["code"] in ("no_vision", "prefill_vision_lost")), body
    status, body = await system.post("/v1/chat/completions", chat("x", picture(300)))
    assert status == 503 and body["error"]["code"] == "no_vision" and "none came within 2 s" in body["error"]["message"]
    assert "requests without images are served" in body["error"]["message"]
    system.processes["vision"] = await system.cluster.start("vision", "--model", _model_of(system), "--threads", "1")
    again, usage = await system.ask(*known)
    assert again == first and usage["prompt_tokens_details"]["cached_tokens"] > 0
    await system.cluster.quiet(system.processes["prefill"])


def _model_of(system: System) -> str:
    args = system.processes["gateway"].popen.args
    return args[args.index("--model") + 1]


async def test_a_stream_with_an_image_goes_on_when_its_decode_worker_dies(system):
    """The attempt that goes on has the image's span and, where its rows must be computed again, its embeddings."""
    parts = ("Tell me all of it" * 10, picture(95), "slowly")
    want, _ = await system.ask(*parts, max_tokens=300)
    first = system.processes["decode"]
    second = await system.cluster.start("decode", "--model", _model_of(system), *ENGINE)
    running = asyncio.ensure_future(system.post("/v1/chat/completions", chat(*parts, max_tokens=300)))

    async def busy() -> Process | None:
        for process in (first, second):
            if (await system.cluster.audit(process))["live"]:
                return process
        return None

    victim = await system.cluster.until(busy, lambda process: process is not None or running.done(), 20.0)
    interrupted = victim is not None and not running.done()
    if victim is not None:
        victim.kill(notice=False)
    status, body = await running
    assert status == 200, body
    assert body["choices"][0]["message"]["content"] == want
    counted = await system.cluster.metrics(system.processes["gateway"])
    if interrupted:
        assert counted["headrace_gateway_migrations_total"] + counted["headrace_gateway_retries_total"] > 0
    system.processes["decode"] = second if victim is first else first
    if victim is not first:
        second.popen.poll() is None and second.terminate()


async def test_a_stream_with_an_image_outlives_every_worker_that_had_a_part_in_it(system):
    """Decode, prefill and vision die together in the middle of it: nobody has its blocks, its prompt's or the image's pixels.
    It waits for others, one after the other."""
    model, parts = _model_of(system), ("Tell me all of it" * 10, picture(96), "slowly")
    want, _ = await system.ask(*parts, max_tokens=400)
    gateway = await system.cluster.start("gateway", "--model", model, "--port", "0", "--worker-seconds", "60")
    url = system.cluster.find(gateway).http
    body = chat(*parts, max_tokens=400, stream=True)
    async with system.session.post(f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(150)) as response:
        assert response.status == 200
        raw = b""
        while raw.count(b"data:") < 5:
            raw += await response.content.readany()
        for role in ("decode", "prefill", "vision"):
            system.processes[role].kill(notice=False)
        for role in ("prefill", "decode"):
            system.processes[role] = await system.cluster.start(role, "--model", model, *ENGINE)
        waits = asyncio.ensure_future(response.content.read())
        system.processes["vision"] = await system.cluster.start("vision", "--model", model, "--threads", "1")
        raw += await waits
    chunks = [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: {")]
    assert not any("error" in chunk for chunk in chunks), chunks[-1]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]) == want
    assert (await system.cluster.metrics(gateway))["headrace_gateway_migrations_total"] >= 1
    gateway.terminate()


async def test_one_process_for_prompts_and_output_says_the_same(system):
    """`--both`: a second system on the same bus would mix with the first, so this one is alone."""
    parts = ("One process" * 20, picture(91), "and", picture(92, (300, 60)))
    want, _ = await system.ask(*parts)
    model = _model_of(system)
    async with Cluster() as cluster:
        started = await asyncio.gather(
            cluster.start("decode", "--model", model, "--both", *ENGINE),
            cluster.start("vision", "--model", model, "--threads", "1"),
            cluster.start("gateway", "--model", model, "--port", "0", "--worker-seconds", "2"),
        )
        other = System(cluster, system.session, {process.role: process for process in started})
        async with asyncio.timeout(30):
            while (await system.session.get(f"{other.url}/ready")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        got, cold = await other.ask(*parts)
        again, warm = await other.ask(*parts)
        assert got == again == want and cold["prompt_tokens_details"]["cached_tokens"] == 0
        assert warm["prompt_tokens_details"]["cached_tokens"] == (cold["prompt_tokens"] - 1) // 128 * 128
        await cluster.quiet(other.processes["decode"])


async def test_what_the_trace_tells(system):
    body = chat("Trace me", picture(81))
    async with system.session.post(system.url + "/v1/chat/completions", json=body) as response:
        request = response.headers["X-Request-Id"]
        assert response.status == 200, await response.text()
    events: set[str] = set()
    for role in ("gateway", "vision", "prefill"):
        found = system.cluster.find(system.processes[role])
        answer = await system.cluster.gateway.bus.request(role, found.instance, "trace", m.TraceGet(request), timeout=5.0)
        events |= {event["event"] for event in answer.events}
    assert {"gateway.identified", "vision.identified", "vision.encoded", "prefill.images"} <= events
