"""Streams whose worker dies go on elsewhere: no token twice, none missing, one usage, one end."""

import asyncio
import json
import time

import pytest
from gateway_cluster import TEXT, chat, text_of
from test_dispatch import SOON, counters, quiet

from headrace.bus import messages as m
from headrace.bus.testing import eventually


async def running(cluster, **more):
    """A stream on the first decode worker that is held before its fifth token."""
    decode = cluster.decodes[0]
    decode.hold_at = 4
    task = asyncio.create_task(cluster.stream(chat(**more)))
    await eventually(lambda: decode.done and all(len(ids) == 4 for ids in decode.done.values()))
    await eventually(lambda: any(c.next == 4 for r in cluster.gateway.dispatcher.records.values() for c in r.choices))
    return task


def by_choice(chunks) -> dict[int, str]:
    out: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()) if isinstance(chunk, dict) else ():
            out[choice["index"]] = out.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return out


@pytest.mark.parametrize("how", ["vanish", "mute", "problem"])
async def test_a_stream_survives_the_death_of_its_decode_worker(cluster, how):
    task = await running(cluster, stream_options={"include_usage": True})
    first, second = cluster.decodes[0], await cluster.add_decode()
    await cluster.ready(1, 2)
    second.cached = 64  # what the replay found cached is not the client's
    if how == "vanish":
        first.vanish()
    elif how == "mute":
        first.mute = True
    else:
        first.problem = m.Problem(503, "draining", "it stops")
        first.go.set()
    chunks = await asyncio.wait_for(task, SOON)
    assert text_of(chunks) == TEXT and chunks[-1] == "[DONE]"
    usage = next(c["usage"] for c in chunks if isinstance(c, dict) and c.get("usage"))
    assert usage["completion_tokens"] == len(cluster.script) and usage["prompt_tokens_details"]["cached_tokens"] == 3
    admit, run = second.admits[0], cluster.prefills[0].runs[-1]
    assert admit.output_tokens == 4 and m.unpack_ids(run.ids)[-4:].tolist() == cluster.script[:4]
    assert admit.prompt_tokens == len(m.unpack_ids(run.ids)) == first.admits[0].prompt_tokens + 4
    assert admit.sampling == first.admits[0].sampling, "the seed and the limits are the request's"
    assert admit.attempt > first.admits[0].attempt and counters(cluster)["migrations"] == 1
    (told,) = [e for e in cluster.gateway.trace.remembered(admit.request) if e["event"] == "gateway.migrate"]
    assert told["tokens"] == 4 and told["lost"] == first.instance
    await quiet(cluster)


async def test_several_choices_go_on_one_by_one(cluster):
    task = await running(cluster, n=3, logprobs=True, top_logprobs=1, stream_options={"include_usage": True})
    second = await cluster.add_decode()
    await cluster.ready(1, 2)
    cluster.decodes[0].vanish()
    chunks = await asyncio.wait_for(task, SOON)
    assert by_choice(chunks) == dict.fromkeys(range(3), TEXT)
    deltas = [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk.get("choices", ())]
    given = [t["token"] for d in deltas if d["index"] == 1 and d["logprobs"] for t in d["logprobs"]["content"]]
    assert "".join(given) == TEXT
    assert sum(d["finish_reason"] is not None for d in deltas) == 3
    usage = next(c["usage"] for c in chunks if isinstance(c, dict) and c.get("usage"))
    assert usage["completion_tokens"] == 3 * len(cluster.script)
    assert {(a.first_choice, a.output_tokens, a.sampling.n) for a in second.admits} == {(0, 4, 1), (1, 4, 1), (2, 4, 1)}
    await quiet(cluster)


async def test_an_answer_that_is_not_streamed_goes_on_too(cluster):
    decode = cluster.decodes[0]
    decode.hold_at = 4
    task = asyncio.create_task(cluster.post(chat(n=2)))
    await eventually(lambda: decode.done and all(len(ids) == 4 for ids in decode.done.values()))
    await cluster.add_decode()
    await cluster.ready(1, 2)
    decode.vanish()
    status, _, reply = await task
    assert status == 200 and [c["message"]["content"] for c in reply["choices"]] == [TEXT, TEXT]
    assert reply["usage"]["completion_tokens"] == 2 * len(cluster.script)
    await quiet(cluster)


async def test_a_choice_that_was_over_stays_so(cluster, tokenizer):
    """Choice 0 had met its text stop, choice 1 could not: only one has to go on."""
    decode = cluster.decodes[0]
    admitted = asyncio.create_task(cluster.stream(chat(n=2, stop=["mill"], stream_options={"include_usage": True})))
    decode.hold_at = 0
    await eventually(lambda: decode.streams)
    admit, script = decode.admits[0], cluster.script
    ended = next(i for i in range(len(script)) if "mill" in tokenizer.decode(script[: i + 1])) + 1
    decode.publish(admit.gateway, [
        m.OutEntry(admit.request, admit.attempt, 0, 0, m.pack_ids(script[:ended]), prompt=m.Usage(admit.prompt_tokens)),
        m.OutEntry(admit.request, admit.attempt, 1, 0, m.pack_ids(script[:3])),
    ])  # fmt: skip
    second = await cluster.add_decode()
    await cluster.ready(1, 2)
    await eventually(lambda: any(r.state.left == 1 for r in cluster.gateway.dispatcher.records.values()))
    decode.vanish()
    chunks = await asyncio.wait_for(admitted, SOON)
    assert by_choice(chunks) == dict.fromkeys(range(2), TEXT[: TEXT.index("mill")])
    assert [(a.first_choice, a.output_tokens) for a in second.admits] == [(1, 3)]
    usage = next(c["usage"] for c in chunks if isinstance(c, dict) and c.get("usage"))
    assert usage["completion_tokens"] == 2 * ended
    await quiet(cluster)


@pytest.mark.parametrize("held", [1, 2, 3, 8])
async def test_a_text_stop_may_lie_over_the_seam(cluster, held):
    """"water runs down": begun before the death, complete after it, and nothing of it reaches the client."""
    decode = cluster.decodes[0]
    decode.hold_at = held
    task = asyncio.create_task(cluster.stream(chat(stop=["water runs down from"])))
    await eventually(lambda: decode.done and all(len(ids) == held for ids in decode.done.values()))
    await cluster.add_decode()
    await cluster.ready(1, 2)
    decode.vanish()
    chunks = await asyncio.wait_for(task, SOON)
    assert text_of(chunks) == "the " and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    await quiet(cluster)


@pytest.mark.parametrize("delay", [0.0, 0.05])
async def test_a_text_stop_counts_what_is_kept_also_where_decode_was_quicker(cluster, delay):
    """It may have said everything, and counted it, before it could be told to stop."""
    cluster.decodes[0].delay = delay
    chunks = await cluster.stream(chat(stop=["runs"], stream_options={"include_usage": True}))
    assert text_of(chunks) == "the water " and chunks[-3]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["usage"]["completion_tokens"] == 3
    await quiet(cluster)


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/chat/completions", chat(stop=["runs"])), ("/v1/messages", chat(stop_sequences=["runs"])),
    ("/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 64, "stop": ["runs"]}),
])  # fmt: skip
async def test_a_text_stop_within_min_tokens_is_text(cluster, path, body):
    """`the water runs` are three tokens."""
    for least, text in ((2, "the water "), (3, TEXT)):
        status, _, reply = await cluster.post(body | {"min_tokens": least}, path)
        assert status == 200 and json.dumps(text) in json.dumps(reply), reply
    await quiet(cluster)


async def test_a_death_after_the_last_text_needs_no_other_worker(cluster):
    """A text stop ended it; all that is missing is decode's word on the usage."""
    decode = cluster.decodes[0]
    decode.hold_at, decode._handlers["cancel"] = 6, lambda message: asyncio.Event().wait()
    cluster.gateway.settings.command_seconds = 2.0
    task = asyncio.create_task(cluster.stream(chat(stop=["runs"], stream_options={"include_usage": True})))
    await eventually(lambda: any(not r.state.left for r in cluster.gateway.dispatcher.records.values()))
    decode.vanish()
    chunks = await asyncio.wait_for(task, SOON)
    assert text_of(chunks) == "the water " and next(c for c in chunks if c.get("usage"))["usage"]["completion_tokens"] == 3
    assert counters(cluster)["migrations"] == 0
    await quiet(cluster)


async def test_it_waits_for_the_only_worker_to_come_back(cluster):
    task = await running(cluster)
    cluster.decodes[0].vanish()
    await eventually(lambda: cluster.gateway.dispatcher.queued == 1)
    await cluster.add_decode()
    assert text_of(await asyncio.wait_for(task, SOON)) == TEXT
    await quiet(cluster)


@pytest.mark.parametrize("who", ["the prefill", "the decode", "both decodes"])
async def test_what_could_go_nowhere_else_waits_for_a_late_worker(cluster, who):
    """To begin it again would only add to the load."""
    if who == "both decodes":
        await cluster.add_decode()
        await cluster.ready(1, 2)
    for decode in cluster.decodes:
        decode.hold_at = 0 if who == "the prefill" else 4
    tasks = [asyncio.create_task(cluster.stream(chat())) for _ in cluster.decodes]
    await eventually(lambda: all(decode.streams for decode in cluster.decodes))
    for worker in cluster.prefills if who == "the prefill" else cluster.decodes:
        worker.late = 0.6  # more than the patience of a ping
    await asyncio.sleep(3.0)  # a lease, and more
    assert not any(task.done() for task in tasks) and cluster.gateway.dispatcher.prober.doubted
    for decode in cluster.decodes:
        decode.go.set()
    assert [text_of(chunks) for chunks in await asyncio.wait_for(asyncio.gather(*tasks), SOON)] == [TEXT] * len(tasks)
    assert [len(decode.admits) for decode in cluster.decodes] == [1] * len(tasks)
    assert [counters(cluster)[name] for name in ("late", "deaths", "retries", "migrations")] == [0, 0, 0, 0]
    await quiet(cluster)


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("attempts", [1, 3])
async def test_a_worker_that_does_not_answer_is_overloaded_not_dead(bare, begun, attempts):
    """Its error says so, whether it was the last attempt or no other worker came."""
    decode = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(worker_seconds=0.5, max_attempts=attempts)
    await bare.ready()
    decode.hold_at = 4 if begun else 0
    task = asyncio.create_task(bare.post(chat()))
    await eventually(lambda: decode.done and all(len(ids) == 4 * begun for ids in decode.done.values()))
    decode.mute = True
    await eventually(lambda: counters(bare)["late"])
    decode.set_state("draining")
    status, headers, reply = await asyncio.wait_for(task, SOON)
    error = reply["error"]
    assert status == 503 and int(headers["Retry-After"]) >= 1
    assert (error["code"], error["type"]) == ("overloaded", "overloaded_error") and "died" not in error["message"]
    assert counters(bare)["deaths"] == 0
    await quiet(bare)


@pytest.mark.parametrize("stream", [True, False])
async def test_when_no_worker_is_left_the_client_is_told(bare, stream):
    first = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(worker_seconds=0.5, keepalive_seconds=0.1)
    await bare.ready()
    first.hold_at = 4
    task = asyncio.create_task(bare.stream(chat()) if stream else bare.post(chat()))
    await eventually(lambda: first.done and all(len(ids) == 4 for ids in first.done.values()))
    first.vanish()
    got = await asyncio.wait_for(task, SOON)
    if stream:
        assert text_of(got[:-1]) == "the water runs down" and got[-1]["error"]["code"] == "worker_died"
        assert ": keep-alive" in got, "the pause is not silent"
    else:
        status, headers, reply = got
        assert status == 503 and int(headers["Retry-After"]) >= 1 and reply["error"]["code"] == "worker_died"
    await quiet(bare)


async def test_output_of_one_checkpoint_is_not_continued_by_another(cluster):
    task = await running(cluster)
    cluster.prefills[0].set_state("draining")
    await cluster.add_decode("D")
    await cluster.add_prefill("D")
    await eventually(lambda: cluster.gateway.router.groups["fake"].checkpoint == "D")
    cluster.decodes[0].vanish()
    last = (await asyncio.wait_for(task, SOON))[-1]
    assert last["error"]["code"] == "worker_died" and "checkpoint" in last["error"]["message"]
    await quiet(cluster)


async def test_a_request_that_kills_its_workers_does_not_kill_all_of_them(bare):
    """Every attempt is lost before it gives a token."""
    for _ in range(6):
        (await bare.add_decode()).hold_at = 0
    await bare.add_prefill()
    await bare.start_gateway(max_attempts=3)
    await bare.ready(1, 6)
    task = asyncio.create_task(bare.post(chat()))
    for deaths in range(1, 4):
        await eventually(lambda deaths=deaths: sum(len(d.streams) for d in bare.decodes) == deaths)
        next(d for d in bare.decodes if d.streams and d.bus._client.is_connected).vanish()
    status, headers, reply = await asyncio.wait_for(task, SOON)
    assert status == 503 and reply["error"]["code"] == "worker_died" and headers["Retry-After"]
    assert sum(bool(d.admits) for d in bare.decodes) == 3
    await quiet(bare)


async def test_the_number_of_migrations_is_bounded(bare):
    for _ in range(4):
        (await bare.add_decode()).problem = m.Problem(503, "draining", "it stops")
    await bare.add_prefill()
    await bare.start_gateway(max_migrations=2)
    await bare.ready(1, 4)
    chunks = await asyncio.wait_for(bare.stream(chat()), SOON)
    assert chunks[-1]["error"]["code"] == "draining" and len([a for d in bare.decodes for a in d.admits]) == 3
    await quiet(bare)


async def test_a_client_that_leaves_in_the_pause_and_one_whose_deadline_passes(bare):
    first = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(request_seconds=1.5, worker_seconds=60.0)
    await bare.ready()
    first.hold_at = 4
    tasks = [asyncio.create_task(bare.stream(chat(n=n))) for n in (1, 2, 2)]
    await eventually(lambda: len(first.done) == 5 and all(len(ids) == 4 for ids in first.done.values()))
    first.vanish()
    await eventually(lambda: bare.gateway.dispatcher.queued == 5)
    tasks[1].cancel()
    await eventually(lambda: bare.gateway.dispatcher.queued == 3)
    started = time.monotonic()
    for task in (tasks[0], tasks[2]):
        assert (await asyncio.wait_for(task, SOON))[-1]["error"]["code"] == "deadline_exceeded"
    assert time.monotonic() - started < SOON
    await quiet(bare)


async def test_whoever_lost_its_worker_goes_before_those_who_came_later(cluster):
    """And among those who wait, priority decides."""
    task = await running(cluster)
    cluster.decodes[0].vanish()
    await eventually(lambda: cluster.gateway.dispatcher.queued == 1)
    others = []
    for priority in (5, 0, -3, 0):
        others.append(asyncio.create_task(cluster.post(chat(priority=priority, max_tokens=1))))
        await eventually(lambda: cluster.gateway.dispatcher.queued == 1 + len(others))
    decode = await cluster.add_decode()
    decode.credits = 0
    decode.refuse = m.Refused("full", "no credit", m.Load())
    await asyncio.sleep(0.3)
    decode.refuse, order = None, []
    decode.credits, decode.admits = 1, order  # one is let try at a time
    decode.announce()
    assert text_of(await asyncio.wait_for(task, SOON)) == TEXT
    assert [status for status, _, _ in await asyncio.gather(*others)] == [200] * 4
    assert [a.priority for a in order] == [-3, 0, 0, 0, 5] and order[1].output_tokens == 4
    await quiet(cluster)
