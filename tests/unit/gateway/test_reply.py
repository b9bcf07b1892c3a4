"""Tokens of a worker into the bytes of a client: what a step gave together must not show in what is told."""

import json
from array import array

import pytest

from headrace.bus.messages import TokenLogprob
from headrace.gateway.reply import Reply
from headrace.recipe.stream import ChatStream, ParsingOptions, StreamParser
from headrace.recipe.stream.chat import DetailedChatStream

TEXT = "alpha beta END gamma delta"


def told(tokenizer, size: int) -> tuple[list[str], int]:
    """The entries of a stream that stops at END, and the number of tokens to keep, when every step gives `size` tokens."""
    ids = tokenizer.encode(TEXT)
    scored = [TokenLogprob(token_id, -i / 10, []) for i, token_id in enumerate(ids)]
    stream = ChatStream(StreamParser(ParsingOptions(stop_sequences=["END"]), tokenizer), "id", "m")
    reply = Reply(None, [stream], "chat", "open", None)  # nothing is written: what would be stands in its buffer
    kept = -1
    for at in range(0, len(ids), size):
        kept = reply.part(0).tokens(0, array("I", ids[at : at + size]), scored[at : at + size])
        if kept >= 0:
            break
    lines = [line.removeprefix("data: ") for line in b"".join(reply.buffer).decode().splitlines() if line]
    choices = [json.loads(line)["choices"][0] for line in lines]
    return [entry["token"] for choice in choices for entry in (choice["logprobs"] or {"content": []})["content"]], kept


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_log_probabilities_end_with_the_stop_however_many_tokens_a_step_gave(tokenizer, size):
    entries, kept = told(tokenizer, size)
    # The last token's space is still told, so its entry is; those of gamma and delta are not.
    assert "".join(entries) == "alpha beta END"
    assert tokenizer.decode(tokenizer.encode(TEXT)[:kept]) == "alpha beta END"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_token_ids_end_with_the_stop_however_many_tokens_a_step_gave(tokenizer, size):
    ids = tokenizer.encode(TEXT)
    stream = DetailedChatStream(StreamParser(ParsingOptions(stop_sequences=["END"]), tokenizer), "id", "m")
    stream.prompt_ids, remembered = [1, 2], []
    reply = Reply(None, [stream], "chat", "open", None)
    reply.over = lambda _, sampled: remembered.append(list(sampled))
    part = reply.part(0)
    for at in range(0, len(ids), size):
        if (kept := part.tokens(0, array("I", ids[at : at + size]), None)) >= 0:
            break
    part.finish(0, "stop", False)
    assert tokenizer.decode(ids[:kept]) == "alpha beta END"
    assert stream.choice()["token_ids"] == ids[:kept] and remembered == [ids[:kept]]
    lines = [json.loads(line[6:]) for line in b"".join(reply.buffer).decode().splitlines() if line.startswith("data: {")]
    assert [token for line in lines for token in line["choices"][0].get("token_ids", [])] == ids[:kept]
