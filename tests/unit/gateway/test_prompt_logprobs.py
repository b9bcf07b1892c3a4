"""Log-probabilities of prompts on their way from prefill to the client: two shapes, lost messages, limits."""

import asyncio

import pytest
from gateway_cluster import TEXT, chat
from test_dispatch import counters

from headrace.bus.testing import eventually

IDS = [35, 36, 40, 41, 42, 43, 44]


def completion(**more) -> dict:
    return {"model": "fake", "prompt": IDS, "max_tokens": 4} | more


async def test_chat_has_them_at_the_top_and_completions_in_each_choice(cluster, tokenizer):
    status, _, body = await cluster.post(chat(prompt_logprobs=2))
    assert status == 200 and body["choices"][0]["message"]["content"] == TEXT
    first, *rest = body["prompt_logprobs"]
    assert first is None and len(rest) == body["usage"]["prompt_tokens"] - 1
    for place, entry in enumerate(rest, 1):
        own, *others = entry.items()
        assert own[1] | {"rank": None} == {
            "logprob": -place / 100, "rank": None, "decoded_token": tokenizer.token_bytes(int(own[0])).decode()
        }  # fmt: skip
        assert [(token, told["logprob"], told["rank"]) for token, told in others] == [("7", 0.0, 1), ("8", -0.1, 2)]
    status, _, body = await cluster.post(completion(n=2, prompt_logprobs=0, prompt=[IDS, IDS[:1]]), "/v1/completions")
    told = [choice["prompt_logprobs"] for choice in body["choices"]]
    assert told[0] == told[1] and told[2] == told[3] == [None]
    assert [list(entry) for entry in told[0][1:]] == [[str(token)] for token in IDS[1:]]
    status, _, body = await cluster.post(chat())
    assert "prompt_logprobs" not in body and not cluster.prefills[0].runs[-1].prompt_logprobs >= 0


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_tells_those_of_the_prompt_before_those_of_the_output(cluster, tokenizer, stream):
    asked = completion(echo=True, logprobs=1)
    if stream:
        choices = [chunk["choices"][0] for chunk in await cluster.stream(asked, "/v1/completions") if isinstance(chunk, dict)]
    else:
        choices = (await cluster.post(asked, "/v1/completions"))[2]["choices"]
    text = "".join(choice["text"] for choice in choices)
    told: dict = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            told.setdefault(name, []).extend(values)
    prompt = tokenizer.decode(IDS)
    assert text.startswith(prompt + "the water") and all(len(values) == len(IDS) + 4 for values in told.values())
    assert told["token_logprobs"] == [None, *(-place / 100 for place in range(1, len(IDS))), -0.5, -0.5, -0.5, -0.5]
    assert told["top_logprobs"][0] is None and all(len(top) == 1 for top in told["top_logprobs"][1 : len(IDS)])
    for token, at in zip(told["tokens"], told["text_offset"], strict=True):
        assert text[at : at + len(token)] == token


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [IDS, [IDS, IDS[:3]]])
async def test_echo_of_a_prompt_alone(cluster, tokenizer, stream, prompts):
    """`max_tokens` 0: a prompt is scored, and no output is told or counted."""
    asked = completion(echo=True, logprobs=1, max_tokens=0, prompt=prompts)
    if stream:
        asked["stream_options"] = {"include_usage": True}
        chunks = [chunk for chunk in await cluster.stream(asked, "/v1/completions") if isinstance(chunk, dict)]
        choices, usage = [chunk["choices"][0] for chunk in chunks[:-1]], chunks[-1]["usage"]
        assert all(choice["text"] == "" and choice["logprobs"] is None for choice in choices if choice["finish_reason"])
    else:
        body = (await cluster.post(asked, "/v1/completions"))[2]
        choices, usage = body["choices"], body["usage"]
    told = {choice["index"]: choice for choice in choices if choice["text"]}
    for number, prompt in enumerate([prompts] if prompts is IDS else prompts):
        assert told[number]["text"] == tokenizer.decode(prompt)
        scores = told[number]["logprobs"]["token_logprobs"]
        assert scores == [None, *(-place / 100 for place in range(1, len(prompt)))]
    assert {choice["finish_reason"] for choice in choices} - {None} == {"length"}
    assert usage["completion_tokens"] == 0 and usage["total_tokens"] == usage["prompt_tokens"]
    assert {admit.sampling.max_tokens for admit in cluster.decodes[0].admits} == {1}


async def test_a_prompt_alone_without_its_echo_is_nothing(cluster):
    status, _, body = await cluster.post(completion(max_tokens=0), "/v1/completions")
    assert status == 400 and body["error"]["message"].endswith("[1, 4096]; 0 needs echo, for the prompt alone")


async def test_an_output_that_stops_at_once_has_empty_lists(cluster):
    _, _, body = await cluster.post(completion(stop="the", logprobs=1), "/v1/completions")
    lists = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    assert body["choices"][0]["text"] == "" and body["choices"][0]["logprobs"] == {name: [] for name in lists}
    _, _, body = await cluster.post(chat(stop="the", logprobs=True))
    assert body["choices"][0]["message"]["content"] == "" and body["choices"][0]["logprobs"] == {"content": []}
    _, _, body = await cluster.post(chat(stop="the"))
    assert body["choices"][0]["logprobs"] is None


async def test_a_text_prompt_has_its_bos_among_the_tokens_and_not_in_the_text(cluster):
    _, _, body = await cluster.post(completion(prompt="the water runs", echo=True, logprobs=0), "/v1/completions")
    told = body["choices"][0]["logprobs"]
    assert told["text_offset"][:3] == [0, 0, 3] and told["tokens"][1] == "the" and told["token_logprobs"][0] is None


async def test_characters_that_several_tokens_spell_count_once(cluster):
    prompt = "h\u00e9llo \U0001f30a water"
    _, _, body = await cluster.post(completion(prompt=prompt, echo=True, logprobs=0), "/v1/completions")
    choice = body["choices"][0]
    told, text = choice["logprobs"], choice["text"]
    assert told["text_offset"] == sorted(told["text_offset"]) and text.startswith(prompt)
    for token, at in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or "\\x" in token or token not in text or text[at : at + len(token)] == token
    assert text[told["text_offset"][-4] :].startswith("the"), "the output begins where the prompt ends"


async def test_an_empty_prompt_is_its_bos(cluster):
    _, _, body = await cluster.post(completion(prompt="", echo=True, logprobs=0), "/v1/completions")
    told = body["choices"][0]["logprobs"]
    assert len(told["tokens"]) == body["usage"]["prompt_tokens"] + 4 and told["token_logprobs"][0] is None


async def test_what_was_lost_is_computed_once_more(cluster):
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.lose = {2}  # its second part
    status, _, body = await cluster.post(completion(prompt_logprobs=1), "/v1/completions")
    assert status == 200 and len(body["choices"][0]["prompt_logprobs"]) == len(IDS)
    assert counters(cluster)["retries"] == 1 and len(prefill.runs) == 2
    assert body["usage"]["completion_tokens"] == 4 and prefill.runs[1].attempt > 1
    assert [admit.sampling.prompt_logprobs for admit in decode.admits] == [1, 1]


async def test_output_that_goes_on_elsewhere_needs_none(cluster):
    await cluster.add_decode()
    await cluster.ready(decodes=2)
    for one in cluster.decodes:
        one.hold_at = 2
    task = asyncio.create_task(cluster.post(chat(prompt_logprobs=0)))
    await eventually(lambda: any(c.next == 2 for r in cluster.gateway.dispatcher.records.values() for c in r.choices))
    first = next(one for one in cluster.decodes if one.admits)
    other = next(one for one in cluster.decodes if one is not first)
    other.hold_at = -1
    first.vanish()
    status, _, body = await task
    assert status == 200 and body["choices"][0]["message"]["content"] == TEXT
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert first.admits[0].sampling.prompt_logprobs == 0 and other.admits[0].sampling.prompt_logprobs == -1
    assert [run.prompt_logprobs for run in cluster.prefills[0].runs] == [0, -1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"prompt_logprobs": 21}, "from 0 to 20; got 21"),
        ({"prompt_logprobs": True}, "from 0 to 20"),
        ({"prompt_logprobs": 1, "stream": True}, "leave out `stream`"),
        (
            {"prompt_logprobs": 20, "prompt": [5] * 2000},
            "2000 prompt tokens (of all prompts, in every choice) with 20 others each are 42000; an answer has at most",
        ),
        ({"prompt_logprobs": 0, "prompt": [[5] * 3000] * 2, "n": 8}, "48000 prompt tokens (of all prompts, in every choice)"),
    ],
)
async def test_what_is_too_much_is_refused(cluster, more, says):
    status, _, body = await cluster.post(completion(**more), "/v1/completions")
    assert status == 400 and says in body["error"]["message"] and body["error"]["param"] == "prompt_logprobs"


async def test_protocols_without_them_refuse_them(cluster):
    for path, asked in (
        ("/v1/messages", {"model": "fake", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"model": "fake", "input": "hi"}),
    ):
        status, _, body = await cluster.post(asked | {"prompt_logprobs": 1}, path)
        assert status == 400 and "`prompt_logprobs` is not served" in body["error"]["message"]
