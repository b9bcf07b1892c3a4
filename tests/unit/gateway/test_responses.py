"""Responses that are kept: retrieval from any gateway, cancelling, continuing, tenants, bounds; and replay, repair, fuzz."""

import asyncio
import json
import random

import openai
import pytest
from gateway_cluster import TEXT, chat, events

from headrace.bus import messages as m
from headrace.gateway.responses import Kept, ResponseStore
from headrace.gateway.service import Gateway
from headrace.gateway.settings import GatewaySettings

CALL = (
    '</think>\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
    '<｜DSML｜ parameter name="days" string="false">[1,2]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
)
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def sdk(gateway, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key=more.pop("key", "none"), max_retries=0, **more)


def plain(**more):
    return {"model": "fake", "input": "hi", "reasoning": {"effort": "none"}} | more


@pytest.fixture
async def second(cluster):
    """Another gateway on the same bus."""
    gateway = Gateway(cluster.settings(GatewaySettings, port=0))
    await gateway.start()
    await gateway.peers.wait_for("decode")
    yield gateway
    await gateway.stop()


async def test_any_gateway_answers_for_the_one_that_keeps_it(cluster, second):
    async with sdk(cluster.gateway) as here, sdk(second) as there:
        made = await here.responses.create(**plain(metadata={"a": "b"}))
        assert made.output_text == TEXT and made.store is True and made.metadata == {"a": "b"}
        assert made.id.endswith(cluster.gateway.instance.removeprefix("gateway-"))
        for client in (here, there):
            assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
        with pytest.raises(openai.BadRequestError, match="over"):
            await there.responses.cancel(made.id)
        await there.responses.delete(made.id)
        for client in (here, there):
            with pytest.raises(openai.NotFoundError, match="no response"):
                await client.responses.retrieve(made.id)


@pytest.mark.parametrize("name", ["resp_x", "resp_" + "a" * 22 + "_" + "b" * 22, "a.b.>", "*", "%2a", "resp_" + "x" * 3000])
async def test_ids_that_nobody_keeps_are_404(cluster, name):
    async with cluster.session.get(f"/v1/responses/{name}") as response:
        reply = json.loads(await response.read())
        assert response.status == 404 and "no response" in reply["error"]["message"] and len(reply["error"]["message"]) < 300


async def test_not_stored_when_not_wanted(cluster):
    async with sdk(cluster.gateway) as client:
        made = await client.responses.create(**plain(store=False))
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="store"):
            await client.responses.create(**plain(), extra_body={"store": "yes"})
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.create(**plain(background=True))


async def test_a_conversation_goes_on_from_another_gateway(cluster, second):
    async with sdk(cluster.gateway) as here, sdk(second) as there:
        first = await here.responses.create(**plain())
        then = await there.responses.create(**plain(input="more", previous_response_id=first.id))
        assert then.previous_response_id == first.id
        third = await here.responses.create(**plain(input=[{"role": "user", "content": "end"}], previous_response_id=then.id))
        whole = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": TEXT}, {"role": "user", "content": "more"}]
        whole += [{"role": "assistant", "content": TEXT}, {"role": "user", "content": "end"}]
        await here.responses.create(**plain(input=whole))
        runs = [bytes(run.ids) for run in cluster.prefills[0].runs]
        assert runs[2] == runs[3], "the same prompt as with the whole conversation in the request"
        with pytest.raises(openai.NotFoundError):
            await here.responses.create(**plain(previous_response_id=third.id[:-3] + "xyz"))


async def test_a_stream_can_be_looked_at_and_cancelled_by_its_id(cluster, second):
    cluster.decodes[0].hold_at = 5
    async with sdk(second) as there, cluster.streaming(plain(), "/v1/responses") as response:
        seen = b""
        while b"runs" not in seen:
            seen += await asyncio.wait_for(response.content.readany(), 5)
        name = events(seen)[0]["response"]["id"]
        looked = await there.responses.retrieve(name)
        assert looked.status == "in_progress"
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            await there.responses.create(**plain(previous_response_id=name))
        stopped = await there.responses.cancel(name)
        assert stopped.status == "cancelled" and "the water" in stopped.output_text
        seen += await asyncio.wait_for(response.content.read(), 5)
        last = events(seen)[-1]["response"]
        assert last["status"] == "cancelled" and last["output"][0]["status"] == "incomplete"
        assert (await there.responses.retrieve(name)).to_dict() == stopped.to_dict()
        assert (await there.responses.cancel(name)).to_dict() == stopped.to_dict()
    assert [cancel.reason for cancel in cluster.decodes[0].cancels] == ["client"]
    assert cluster.gateway.dispatcher.records == {}


async def test_a_stream_whose_client_left_is_kept_as_far_as_it_came(cluster):
    cluster.decodes[0].hold_at = 5
    async with cluster.streaming(plain(), "/v1/responses") as response:
        seen = b""
        while b"runs" not in seen:
            seen += await asyncio.wait_for(response.content.readany(), 5)
        response.close()
    async with sdk(cluster.gateway) as client:
        name = events(seen)[0]["response"]["id"]
        while (kept := await client.responses.retrieve(name)).status == "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert kept.status == "cancelled" and "the water runs" in kept.output_text


async def test_one_that_waits_in_line_can_be_cancelled_too(bare):
    decode = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(keepalive_seconds=0.1, queue_seconds=20.0)
    await bare.ready()
    decode.refuse = m.Refused("busy", "full")
    task = asyncio.create_task(bare.stream(plain(), "/v1/responses"))
    while not bare.gateway.dispatcher.queued:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    name = next(iter(bare.gateway.kept._making))
    async with sdk(bare.gateway) as client:
        assert (await client.responses.cancel(name)).status == "cancelled"
    seen = await asyncio.wait_for(task, 3)
    assert seen[-1]["response"]["status"] == "cancelled"
    await asyncio.sleep(0.05)
    assert bare.gateway.dispatcher.records == {} and bare.gateway.dispatcher.queued == 0


async def test_never_across_tenants(bare):
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(api_key=["red:one", "blue:two"])
    await bare.ready()
    async with sdk(bare.gateway, key="one") as red, sdk(bare.gateway, key="two") as blue:
        made = await red.responses.create(**plain())
        for wish in (blue.responses.retrieve, blue.responses.cancel, blue.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await wish(made.id)
        with pytest.raises(openai.NotFoundError):
            await blue.responses.create(**plain(previous_response_id=made.id))
        assert (await red.responses.retrieve(made.id)).id == made.id
    async with sdk(bare.gateway) as nobody:
        with pytest.raises(openai.AuthenticationError):
            await nobody.responses.retrieve(made.id)


def test_the_store_is_bounded_in_bytes_and_time(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("headrace.gateway.responses.time.monotonic", lambda: now[0])
    store = ResponseStore(max_bytes=10_000, seconds=60)

    def put(name, size):
        store.begin(name, Kept(b"t", b"[]", lambda: {}, lambda: None))
        store.end(name, {"status": "completed", "x": "y" * size})

    def has(name):
        return isinstance(store.answer(m.ResponseAsk(name, b"t")), m.ResponseKept)

    for n in range(8):
        put(f"r{n}", 2000)
        assert store.bytes <= 10_000
    assert [has(f"r{n}") for n in range(8)] == [False] * 5 + [True] * 3
    put("huge", 20_000)
    assert not has("huge") and has("r7")
    now[0] = 61.0
    assert not has("r7") and store.bytes == 0 and len(store) == 0


@pytest.mark.parametrize("dialect", ["open", "official"])
async def test_a_turn_with_calls_is_replayed_as_it_was_sampled(bare, tokenizer, dialect):
    """The model wrote [1,2], the client sends [1, 2] and leaves out the reasoning."""
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(dialect=dialect)
    await bare.ready()
    bare.decodes[0].script = sampled = tokenizer.encode("Look it up." + CALL)
    body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL], "max_tokens": 200}
    _, _, reply = await bare.post(body)
    message = reply["choices"][0]["message"]
    call = message["tool_calls"][0]
    assert message["reasoning_content"] == "Look it up." and call["function"]["arguments"] == '{"days": [1,2]}'
    call["function"]["arguments"] = '{ "days" : [1, 2] }'
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    again = [{"role": "assistant", "content": "", "tool_calls": [call]}, result]
    for salt in (None, "other"):
        await bare.post(body | {"messages": body["messages"] + again} | ({"cache_salt": salt} if salt else {}))
    first, second, other = (list(m.unpack_ids(run.ids)) for run in bare.prefills[0].runs)
    replayed = second[: len(first) + len(sampled)] == first + list(sampled)
    assert replayed == (dialect == "open")
    assert other[: len(first) + len(sampled)] != first + list(sampled), "never in another namespace"


@pytest.mark.parametrize("repair", [False, True])
async def test_repair_is_off_unless_set(bare, tokenizer, repair):
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(repair=repair)
    await bare.ready()
    bare.decodes[0].script = tokenizer.encode("x" + CALL.partition("</｜DSML｜ invoke>")[0])
    _, _, reply = await bare.post({"model": "fake", "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]})
    async with bare.session.get("/metrics") as response:
        told = 'headrace_gateway_repairs_total{kind="unterminated_invoke"} 1.0' in await response.text()
    assert told == repair
    assert ("tool_calls" in reply["choices"][0]["message"]) or not repair


async def test_usage_in_every_chunk_when_asked(cluster):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await cluster.stream(chat(max_tokens=4, stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in chunks if isinstance(c, dict)]
    assert sorted(counts) == counts and counts[-1] == 4 and set(counts) >= {1, 2, 3}
    body = {"model": "fake", "prompt": "x", "max_tokens": 4, "stream_options": options}
    chunks = await cluster.stream(body, "/v1/completions")
    assert [c["usage"]["completion_tokens"] for c in chunks if isinstance(c, dict)][0] == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_token_ids_when_asked(cluster, path):
    """Streamed and not, the same ids; "finish_reason" in the text misleads nobody."""
    cluster.decodes[0].script = sampled = cluster.gateway.models.tokenizer.encode_plain('a "finish_reason":null}] data: { 🎉 b')
    body = (chat() if "chat" in path else {"model": "fake", "prompt": "x"}) | {"return_token_ids": True, "n": 2}
    _, _, whole = await cluster.post(body, path)
    prompt = list(m.unpack_ids(cluster.prefills[0].runs[0].ids))
    holder = whole if "chat" in path else whole["choices"][0]
    assert holder["prompt_token_ids"] == prompt
    assert [choice["token_ids"] for choice in whole["choices"]] == [list(sampled)] * 2
    chunks = [c for c in await cluster.stream(body, path) if isinstance(c, dict)]
    for index in range(2):
        mine = [c for c in chunks if c["choices"][0]["index"] == index]
        assert sum((c["choices"][0].get("token_ids", []) for c in mine), []) == list(sampled)
        holders = [c if "chat" in path else c["choices"][0] for c in mine]
        assert [h["prompt_token_ids"] for h in holders if "prompt_token_ids" in h] == [prompt]
    _, _, without = await cluster.post(body | {"return_token_ids": False}, path)
    assert "prompt_token_ids" not in json.dumps(without) and "token_ids" not in without["choices"][0]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", chat(temperature="hot"), "temperature"),
        ("/v1/chat/completions", chat(messages=[USER, {"role": "user", "content": 5}]), "messages[1].content"),
        ("/v1/chat/completions", chat(min_tokens="x"), "min_tokens"),
        ("/v1/responses", plain(input=[USER, {"type": "function_call", "name": 5}]), "input[1].name"),
        ("/v1/completions", {"model": "fake", "prompt": 5}, "prompt"),
    ],
)  # fmt: skip
async def test_type_errors_name_the_field(cluster, path, body, field):
    status, _, reply = await cluster.post(body, path)
    assert status == 400 and reply["error"]["param"] == field and f": {field}: " in reply["error"]["message"]


async def test_a_waiting_message_stream_gets_pings(bare):
    decode = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(keepalive_seconds=0.1)
    await bare.ready()
    decode.refuse = m.Refused("busy", "full")
    body = {"model": "fake", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}], "thinking": {"type": "disabled"}}
    async with bare.streaming(body, "/v1/messages") as response:
        assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 5) == b'event: ping\ndata: {"type":"ping"}\n\n'
        decode.refuse = None
        rest = await asyncio.wait_for(response.content.read(), 5)
    assert b"message_start" in rest and rest.rstrip().endswith(b'{"type":"message_stop"}')


PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"]


async def test_fuzzed_bodies_get_a_clean_4xx_and_the_connection_lives(cluster):
    """Bodies that are near to valid ones: cut, bytes changed, values of other types in any place."""
    dice = random.Random(11)
    valid = [
        chat(tools=[TOOL], stop=["a"], logprobs=True, stream_options={"include_usage": True}, response_format={"type": "text"}),
        plain(tools=[{"type": "function", "name": "f", "parameters": {}}], text={"format": {"type": "text"}}, metadata={}),
        {"model": "fake", "max_tokens": 3, "system": [{"type": "text", "text": "s"}], "messages": [USER],
         "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        {"model": "fake", "prompt": ["a", [1, 2]], "max_tokens": 3, "stop": "b"},
    ]  # fmt: skip
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    statuses = set()
    for number in range(400):
        path = dice.choice(PATHS)
        body = mutated(dice, dice.choice(valid))
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
        status = int(head.split()[1])
        statuses.add(status)
        assert 200 <= status < 500, (number, path, body)
        if b"chunked" in head:
            while (size := int(await reader.readuntil(b"\r\n"), 16)) or await reader.readexactly(2) != b"\r\n":
                await reader.readexactly(size + 2)
        else:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            reply = json.loads(await reader.readexactly(length))
            assert status == 200 or reply["error"]["message"], (number, path, body)
        assert b"Connection: close" not in head, (number, path, body)
    writer.close()
    assert {200, 400} <= statuses
    assert (await cluster.post(chat()))[0] == 200


def mutated(dice: random.Random, body: dict) -> bytes:
    kind = dice.randrange(4)
    if kind == 0:
        data = json.dumps(body).encode()
        return data[: dice.randrange(len(data))]
    if kind == 1:
        data = bytearray(json.dumps(body).encode())
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] = dice.randrange(256)
        return bytes(data)
    odd = [None, True, -1, 1e300, 2**70, "", "\ud800", [], [[]], {}, {"type": "x"}, [None], "x" * 300, ["a", 1]]
    value = json.loads(json.dumps(body))
    for _ in range(kind - 1):
        place = value
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = dice.choice(keys)
            if isinstance(place[key], dict | list) and place[key] and dice.random() < 0.6:
                place = place[key]
                continue
            place[key] = json.loads(json.dumps(dice.choice(odd)))
            break
    return json.dumps(value).encode()
