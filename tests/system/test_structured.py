"""Structured output over HTTP, from every protocol to the sampler, with a random checkpoint that has the real vocabulary.

At temperature 1 this model says nothing but noise: whatever is well formed, the grammar has made so.
"""

from __future__ import annotations

import asyncio
import json

import aiohttp
import jsonschema
import openai
import pytest
import pytest_asyncio

from headrace.cli.make_checkpoint import deepseek_tokenizer
from headrace.engine.make_checkpoint import make_checkpoint
from headrace.recipe import Tokenizer
from headrace.worker.testing import Cluster

from ..unit.engine.grammars import HOSTILE, SCHEMAS, closed

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow, pytest.mark.timeout(400)]

ENGINE = ("--threads", "1", "--num-blocks", "96", "--max-num-seqs", "12", "--no-kvstore")
AGE = {"type": "integer", "minimum": 0, "maximum": 99}
PERSON = closed({"name": {"type": "string", "maxLength": 9}, "kind": {"enum": ["ä", "b"]}, "age": AGE})  # it ends
OFF = {"thinking": {"type": "disabled"}}


class System:
    def __init__(self, url: str, session: aiohttp.ClientSession, tokenizer: Tokenizer, model: str):
        self.url, self.session, self.tokenizer, self.model = url, session, tokenizer, model
        self.sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=100)

    async def post(self, path: str, body: dict | bytes) -> tuple[int, dict]:
        data = body if isinstance(body, bytes) else json.dumps({"model": self.model, **body}).encode()
        async with self.session.post(self.url + path, data=data, headers={"Content-Type": "application/json"}) as answer:
            return answer.status, json.loads(await answer.read())

    async def chat(self, prompt: str = "Hello.", **body) -> dict:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 160, **OFF, **body}
        status, answer = await self.post("/v1/chat/completions", body)
        assert status == 200, answer
        return answer

    def id(self, token: str) -> int:
        return self.tokenizer.added_token_id(token)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory):
    definition = deepseek_tokenizer()
    path = make_checkpoint("w16", 11, tmp_path_factory.mktemp("w16") / "random", tokenizer_json=definition)
    async with Cluster() as cluster:
        flags = ("--model", str(path), *ENGINE)
        *_, gateway = await asyncio.gather(
            cluster.start("decode", *flags, timeout=200),
            cluster.start("prefill", *flags, timeout=200),
            cluster.start("gateway", "--port", "0"),
        )
        url = cluster.find(gateway).http
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(110)) as session:
            system = System(url, session, Tokenizer(definition), path.name)
            yield system
            await system.sdk.close()


def form(schema) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


async def test_schemas_side_by_side_and_with_free_outputs(system):
    names = ["closed", "enum", "array of objects", "integer range", "pattern", "date-time", "unicode", "tuple", "any of"]
    jobs = [system.chat(n=2, temperature=1.0, seed=i, **form(SCHEMAS[name])) for i, name in enumerate(names)]
    jobs += [system.chat(max_tokens=30) for _ in range(3)]
    answers, ended = await asyncio.gather(*jobs), 0
    for name, answer in zip(names, answers, strict=False):
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMAS[name])
                ended += 1
    assert ended >= 6


async def test_streamed_and_seeded_through_the_sdk(system):
    async def ask(seed: int) -> str:
        stream = await system.sdk.chat.completions.create(
            model=system.model, messages=[{"role": "user", "content": "Who?"}], max_tokens=600, seed=seed, stream=True,
            extra_body=OFF, **form(PERSON),
        )  # fmt: skip
        text, finish = "", None
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        assert finish == "stop"
        jsonschema.validate(json.loads(text), PERSON)
        return text

    first, *others = await asyncio.gather(*(ask(seed) for seed in (1, 1, 2)))
    assert first == others[0] and first != others[1]


async def test_thinking_is_free_and_the_answer_is_not(system):
    """The end of thinking is made likely, and so is EOS, which would end the output inside the thinking if it could."""
    bias = {str(system.id("</think>")): 17, str(system.id("<｜end▁of▁sentence｜>")): 40}
    body = {"thinking": {"type": "enabled"}, "logit_bias": bias, "max_tokens": 800, **form(PERSON)}
    for answer in await asyncio.gather(*(system.chat(seed=seed, **body) for seed in range(4))):
        message = answer["choices"][0]["message"]
        assert answer["choices"][0]["finish_reason"] == "stop", answer
        jsonschema.validate(json.loads(message["content"]), PERSON)
        assert message["reasoning_content"] is not None


async def test_tools(system):
    """A call that must come, and a strict tool that the model chooses to call: its first token is the one that opens calls."""
    tool = {"type": "function", "function": {"name": "find", "parameters": PERSON}}
    strict = {"type": "function", "function": {**tool["function"], "strict": True}}
    strict["function"]["parameters"] = closed({"name": {"type": "string", "maxLength": 12}, "ok": {"type": "boolean"}})
    required = system.chat(max_tokens=800, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    opens = {str(system.id("｜DSML｜")): 100}
    chosen = system.chat(max_tokens=800, tools=[strict], logit_bias=opens, parallel_tool_calls=False)
    for answer, schema in zip(
        await asyncio.gather(required, chosen), (PERSON, strict["function"]["parameters"]), strict=True
    ):
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)


async def test_every_protocol(system):
    schema = PERSON
    wanted = {"type": "json_schema", "name": "x", "schema": schema}
    bodies = {
        "/v1/completions": {"prompt": "x", "max_tokens": 600, **form(schema)},
        "/v1/responses": {"input": "x", "reasoning": {"effort": "none"}, "text": {"format": wanted}, "max_output_tokens": 600},
        "/v1/messages": {
            "messages": [{"role": "user", "content": "x"}], "max_tokens": 600, **OFF,
            "output_config": {"format": {"type": "json_schema", "schema": schema}},
        },
    }  # fmt: skip
    answers = await asyncio.gather(*(system.post(path, body) for path, body in bodies.items()))
    assert [status for status, _ in answers] == [200] * 3, answers
    (_, plain), (_, response), (_, message) = answers
    texts = [plain["choices"][0]["text"], response["output"][-1]["content"][0]["text"], message["content"][-1]["text"]]
    ends = [plain["choices"][0]["finish_reason"], response["status"], message["stop_reason"]]
    assert ends == ["stop", "completed", "end_turn"]
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


async def test_other_kinds_and_an_empty_schema(system):
    regex, choice, lark, free = await asyncio.gather(
        system.chat(response_format={"type": "regex", "regex": "[a-c]{2}/x"}),
        system.chat(structured_outputs={"choice": ["yes", "no"]}, logprobs=True, top_logprobs=1),
        system.chat(structured_outputs={"grammar": 'start: "<" /[0-9]{2}/ ">"'}),
        system.chat(n=6, logit_bias={str(system.id("<｜end▁of▁sentence｜>")): 30}, **form({})),
    )
    text = [answer["choices"][0]["message"]["content"] for answer in (regex, choice, lark)]
    assert text[0][2:] == "/x" and text[1] in ("yes", "no") and text[2][0] + text[2][-1] == "<>"
    assert {answer["choices"][0]["finish_reason"] for answer in (regex, choice, lark)} == {"stop"}
    logprob = choice["choices"][0]["logprobs"]["content"][0]
    assert logprob["logprob"] < logprob["top_logprobs"][0]["logprob"], "the model's own, not those of what is allowed"
    ended = [c for c in free["choices"] if c["finish_reason"] == "stop"]
    assert ended, "nothing came to an end"
    for one in ended:
        json.loads(one["message"]["content"])


async def test_what_can_not_be_followed_is_refused_by_place(system):
    bad = {"type": "object", "properties": {"p": {"items": {"not": {}}}}}
    status, answer = await system.post("/v1/completions", {"prompt": "x", **form(bad)})
    assert status == 400 and "#/properties/p/items: Unimplemented keys" in answer["error"]["message"], answer
    status, answer = await system.post("/v1/messages", {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 9, **OFF,
        "output_config": {"format": {"type": "json_schema", "schema": bad}},
    })  # fmt: skip
    assert status == 400 and answer["type"] == "error" and "#/properties/p/items" in answer["error"]["message"]
    stream = {"messages": [{"role": "user", "content": "x"}], "stream": True, **OFF, "structured_outputs": {"regex": "("}}
    status, answer = await system.post("/v1/chat/completions", stream)
    assert status == 400 and "regular expression" in answer["error"]["message"]
    wide = closed({"p": {"type": "object", "properties": {f"n{i}": {} for i in range(700)}}})
    answers = await asyncio.gather(
        system.post("/v1/completions", {"prompt": "x", "structured_outputs": {"json": wide}}),
        system.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **OFF, "tools": [
            {"type": "function", "function": {"name": "f", "parameters": closed({"q": wide})}}], "tool_choice": "required"}),
    )  # fmt: skip
    for status, answer in answers:
        named = "#/properties/p/properties: 700 properties in a row that may be left out are 2,100 ways to go on at once"
        assert status == 400 and named in answer["error"]["message"], answer


async def test_text_like_a_control_token_is_answered_as_text(system):
    texts = ["</think>", "<｜end▁of▁sentence｜>", "a｜DSML｜b"]
    schema = closed({f"n{i} {text}": {"const": text} for i, text in enumerate(texts)})
    constant, listed = await asyncio.gather(
        system.chat(max_tokens=200, **form(schema)), system.chat(n=4, structured_outputs={"choice": texts})
    )
    assert json.loads(constant["choices"][0]["message"]["content"]) == {f"n{i} {text}": text for i, text in enumerate(texts)}
    for choice in (*constant["choices"], *listed["choices"]):
        assert choice["finish_reason"] == "stop"
    assert {choice["message"]["content"] for choice in listed["choices"]} <= set(texts)


async def test_hostile_schemas_never_hang(system):
    """All at once, and an honest request in their midst."""
    body = b'{"model":"%b","prompt":"x","max_tokens":4,"structured_outputs":{"json":%b}}'
    bodies = {name: body % (system.model.encode(), text.encode()) for name, text in HOSTILE.items()}
    jobs = [system.post("/v1/completions", body) for body in bodies.values()]
    *answers, honest = await asyncio.gather(*jobs, system.chat(max_tokens=600, **form(PERSON)))
    for name, (status, answer) in zip(bodies, answers, strict=True):
        assert status in (200, 400), (name, status, answer)
        assert status == 200 or 10 < len(answer["error"]["message"]) < 1200, (name, answer)
    assert sum(status == 400 for status, _ in answers) > len(bodies) / 3
    jsonschema.validate(json.loads(honest["choices"][0]["message"]["content"]), PERSON)


async def test_logit_bias(system):
    token = system.tokenizer.encode("hello")[0]
    answer = await system.chat(logit_bias={str(token): 100}, max_tokens=3)
    assert answer["choices"][0]["message"]["content"] == "hello" * 3
    status, answer = await system.post("/v1/completions", {"prompt": "x", "logit_bias": {"200000": 1}})
    assert status == 400 and "token ids are from 0 to 129279; got 200000" in answer["error"]["message"]
