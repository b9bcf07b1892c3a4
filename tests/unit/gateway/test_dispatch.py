"""Faults between the gateway and its workers: refusals, deaths, lost messages, silence, a bus that goes away, clients
that leave."""

import asyncio
import json
import signal
import subprocess
import sys
import time

import pytest
from gateway_cluster import TEXT, chat, events, text_of

from headrace.bus import connection, subjects
from headrace.bus import messages as m
from headrace.bus.testing import eventually
from headrace.gateway.request import Phase

SOON = 30.0  # seconds; far below the deadline of 600 s, and no matter how slow the machine is


def counters(cluster) -> dict:
    return cluster.gateway.dispatcher.counters


async def quiet(cluster):
    """Nothing is left in flight anywhere in the gateway."""
    dispatcher = cluster.gateway.dispatcher
    await eventually(lambda: not dispatcher.records and not dispatcher.queued and not dispatcher.legs.side)
    assert not dispatcher.line.waiting and dispatcher.line.trying == 0
    assert all(worker.in_flight == 0 for worker in cluster.gateway.router.workers.values())


# ---------------------------------------------------------------- refusals


async def test_a_busy_worker_is_passed_over(bare):
    full, free = await bare.add_decode(), await bare.add_decode()
    full.refuse = m.Refused("busy", "no credit", m.Load())
    await bare.add_prefill()
    await bare.start_gateway()
    await bare.ready(1, 2)
    for _ in range(6):
        assert (await bare.post(chat()))[0] == 200
    assert len(free.streams) == 6
    await quiet(bare)


async def test_a_refused_run_gives_the_admission_back_and_goes_elsewhere(bare):
    await bare.add_decode()
    bad, good = await bare.add_prefill(), await bare.add_prefill()
    bad.refuse = m.Refused("draining", "going")
    await bare.start_gateway()
    await bare.ready(2, 1)
    for _ in range(4):
        assert (await bare.post(chat()))[0] == 200
    assert len(good.runs) == 4
    given_back = [c for c in bare.decodes[0].cancels if c.reason == "failed"]
    assert len(given_back) == len(bad.runs) >= 1
    await quiet(bare)


async def test_when_all_are_busy_it_waits_in_line_and_then_goes(cluster):
    decode = cluster.decodes[0]
    decode.refuse = m.Refused("busy", "no credit", m.Load())
    waiting = [asyncio.create_task(cluster.post(chat())) for _ in range(5)]
    await eventually(lambda: cluster.gateway.dispatcher.queued == 5)
    decode.refuse = None
    decode.announce()
    assert [status for status, _, _ in await asyncio.gather(*waiting)] == [200] * 5
    await quiet(cluster)


async def test_the_line_empties_as_fast_as_there_is_room(bare):
    """Whoever comes while others wait joins the line, but a line must not make a queue of what fits at once."""
    decode = await bare.add_decode()
    await bare.add_prefill()
    decode.refuse = m.Refused("busy", "no credit", m.Load())
    await bare.start_gateway()
    await bare.ready()
    decode.hold_at = 0
    waiting = [asyncio.create_task(bare.post(chat())) for _ in range(40)]
    await eventually(lambda: bare.gateway.dispatcher.queued == 40)
    decode.refuse = None
    decode.announce()
    await eventually(lambda: len(decode.streams) == 40)
    decode.go.set()
    assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}
    await quiet(bare)


async def test_a_client_that_leaves_the_line(cluster):
    cluster.decodes[0].refuse = m.Refused("busy", "no credit", m.Load())
    tasks = [asyncio.create_task(cluster.post(chat())) for _ in range(3)]
    await eventually(lambda: cluster.gateway.dispatcher.queued == 3)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await quiet(cluster)


async def test_the_line_is_bounded_in_length_and_time(bare):
    decode = await bare.add_decode()
    await bare.add_prefill()
    decode.refuse = m.Refused("busy", "no credit", m.Load())
    await bare.start_gateway(max_queue=2, queue_seconds=0.6)
    await bare.ready()
    started = time.monotonic()
    replies = await asyncio.gather(*(bare.post(chat()) for _ in range(4)))
    assert [status for status, _, _ in replies] == [429] * 4
    assert all(int(headers["Retry-After"]) >= 1 for _, headers, _ in replies)
    texts = sorted(reply["error"]["message"] for _, _, reply in replies)
    assert sum("wait already" in t for t in texts) == 2 and sum("0.6 s" in t for t in texts) == 2
    assert time.monotonic() - started < 20, "the default is 60 s"
    await quiet(bare)


async def test_a_queued_stream_gets_keep_alive_comments(bare):
    decode = await bare.add_decode()
    await bare.add_prefill()
    decode.refuse = m.Refused("busy", "no credit", m.Load())
    await bare.start_gateway(keepalive_seconds=0.1)
    await bare.ready()
    task = asyncio.create_task(bare.stream(chat()))
    await asyncio.sleep(0.5)
    decode.refuse = None
    decode.announce()
    got = await task
    assert got[0] == ": keep-alive" and text_of(got) == TEXT


async def test_an_invalid_request_is_told_not_retried(cluster):
    cluster.decodes[0].refuse = m.Refused("invalid", "blocks do not fit the prompt")
    status, _, reply = await cluster.post(chat())
    assert status == 400 and "blocks do not fit" in reply["error"]["message"]
    assert len(cluster.decodes[0].admits) == 1


# ---------------------------------------------------------------- nobody there


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_what_comes_while_a_worker_restarts_waits_for_it(cluster, role):
    """Killed, and its successor not there yet: neither an error at once nor a queue that burns away."""
    gone = cluster.decodes[0] if role == "decode" else cluster.prefills[0]
    gone.vanish()
    tasks = [asyncio.create_task(cluster.post(chat())) for _ in range(5)]
    await eventually(lambda: cluster.gateway.dispatcher.queued == 5)
    await cluster.add_decode() if role == "decode" else await cluster.add_prefill()
    assert [status for status, _, _ in await asyncio.gather(*tasks)] == [200] * 5
    await quiet(cluster)


async def test_it_waits_for_the_last_workers_of_a_model_too(cluster):
    for worker in (cluster.decodes[0], cluster.prefills[0]):
        worker.set_state("stopped")
    await eventually(lambda: not cluster.gateway.router.workers)
    task = asyncio.create_task(cluster.post(chat()))
    await eventually(lambda: cluster.gateway.dispatcher.queued == 1)
    await cluster.add_decode()
    await cluster.add_prefill()
    assert (await task)[0] == 200
    await quiet(cluster)


@pytest.mark.parametrize("how", ["vanish", "draining"])
async def test_when_no_worker_comes_it_is_a_503_with_retry_after(bare, how):
    decode = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(worker_seconds=0.5)
    await bare.ready()
    if how == "vanish":
        decode.vanish()
    else:
        decode.set_state("draining")
        await eventually(lambda: not bare.gateway.router.groups["fake"].decodes)
    status, headers, reply = await asyncio.wait_for(bare.post(chat()), SOON)
    assert status == 503 and int(headers["Retry-After"]) >= 1 and reply["error"]["code"] == "no_workers"
    assert "within 0.5 s" in reply["error"]["message"]
    await quiet(bare)


# ---------------------------------------------------------------- deaths


async def test_death_before_output_goes_elsewhere_unnoticed(bare):
    first = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway()
    await bare.ready()
    first.hold_at = 0
    task = asyncio.create_task(bare.post(chat()))
    await eventually(lambda: first.streams)
    await bare.add_decode()
    await bare.ready(1, 2)
    started = time.monotonic()
    first.vanish()
    status, _, reply = await task
    assert status == 200 and reply["choices"][0]["message"]["content"] == TEXT
    assert time.monotonic() - started < SOON
    assert counters(bare)["retries"] == 1
    assert bare.prefills[0].cancels[0].attempt == first.admits[0].attempt, "the other leg was told"
    await quiet(bare)


@pytest.mark.parametrize("how", ["death", "silence"])
@pytest.mark.parametrize("held", [0, 1])
async def test_what_an_attempt_left_in_the_cache_is_not_told_as_cached(cluster, how, held):
    """The second attempt finds two blocks; when the request came some worker held `held` of them."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    body = {"model": "fake", "prompt": list(range(1000, 1300)), "max_tokens": 4}
    if held:
        await cluster.post(body, "/v1/completions")
        first_block = decode.admits[0].block_hashes[: m.HASH_BYTES]
        residency = cluster.gateway.router.residency
        residency._recent.clear()
        residency.on_events(m.KvEvents(decode.instance, decode.epoch, 1, first_block), "")
    prefill.silent, prefill.deaf = True, how == "silence"
    runs = len(prefill.runs)
    task = asyncio.create_task(cluster.post(body, "/v1/completions"))
    await eventually(lambda: len(prefill.runs) > runs)
    decode.cached = 256
    await cluster.add_prefill()
    await cluster.ready(2, 1)
    if how == "death":
        prefill.vanish()
    status, _, reply = await asyncio.wait_for(task, SOON)
    assert status == 200 and len(cluster.prefills[1].runs) == 1
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 128 * held
    decode.cached = 256
    _, _, reply = await cluster.post(body, "/v1/completions")  # of one attempt: as its workers say
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    await quiet(cluster)


async def test_prefills_death_after_the_first_token_harms_nothing(cluster):
    decode, prefill = cluster.decodes[0], cluster.prefills[0]
    decode.hold_at = 4
    task = asyncio.create_task(cluster.stream(chat()))
    await eventually(lambda: decode.done and len(next(iter(decode.done.values()))) == 4)
    prefill.vanish()
    await asyncio.sleep(0.6)
    decode.go.set()
    assert text_of(await task) == TEXT


async def test_prefills_death_before_the_first_token_cancels_decode(cluster):
    cluster.prefills[0].silent = True
    task = asyncio.create_task(cluster.post(chat()))
    await eventually(lambda: cluster.prefills[0].runs)
    cluster.prefills[0].vanish()
    status, _, reply = await asyncio.wait_for(task, SOON)
    assert status == 503 and "prefill" in reply["error"]["message"]
    await eventually(lambda: cluster.decodes[0].cancels)
    await quiet(cluster)


async def test_a_workers_problem_reaches_the_client_when_it_comes_again_and_again(cluster):
    """Each attempt goes on with what there is, and ends with the same problem."""
    cluster.decodes[0].problem = m.Problem(500, "corrupt", "checksum of block 3 differs")
    chunks = await cluster.stream(chat())
    assert chunks[-1]["error"]["message"] == "checksum of block 3 differs" and chunks[-1]["error"]["code"] == "corrupt"
    assert counters(cluster)["migrations"] + counters(cluster)["retries"] < len(cluster.decodes[0].admits) < 12
    await quiet(cluster)


async def test_a_workers_problem_reaches_the_client_and_the_other_leg(cluster):
    """One that no other worker would not have: the request is at fault."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    prefill.silent = True
    task = asyncio.create_task(cluster.post(chat()))
    await eventually(lambda: prefill.runs)
    run = prefill.runs[0]
    entry = m.OutEntry(run.request, run.attempt, 0, 0, b"", finish="abort", problem=m.Problem(400, "invalid", "not like this"))
    prefill.bus.publish(subjects.out(run.gateway), m.Out(prefill.instance, prefill.epoch, 1, [entry]))
    status, _, reply = await task
    assert status == 400 and reply["error"]["message"] == "not like this"
    await eventually(lambda: decode.cancels)
    await quiet(cluster)


async def test_a_worker_that_lost_it_is_not_asked_again_because_another_is_busy(bare, monkeypatch):
    """Every attempt at one prefill fails late, and the other has no room for a moment: three losses in a row were an error."""
    await bare.add_decode()
    bad, good = await bare.add_prefill(), await bare.add_prefill()
    problem = m.Problem(502, "prefill_transfer", "every write comes too late")

    def fails(message):
        bad.runs.append(message)
        good.refuse = m.Refused("busy", "tokens wait", m.Load())
        entry = m.OutEntry(message.request, message.attempt, 0, 0, b"", finish="abort", problem=problem)
        bad.bus.publish(subjects.out(message.gateway), m.Out(bad.instance, bad.epoch, len(bad.runs), [entry]))
        return m.Accepted(bad.load())

    monkeypatch.setitem(bad._handlers, "run", fails)
    good.refuse = m.Refused("draining", "not now")  # so that the bad one is tried at all
    await bare.start_gateway()
    await bare.ready(2, 1)
    task = asyncio.create_task(bare.post(chat()))
    await eventually(lambda: bad.runs and bare.gateway.dispatcher.queued)
    await asyncio.sleep(1.0)  # called up again and again meanwhile
    good.refuse = None
    good.announce()
    assert (await task)[0] == 200 and len(bad.runs) == 1
    await quiet(bare)


async def test_a_worker_that_is_starting_is_waited_for_longer_than_nobody(bare):
    """As when the only one restarts and takes long to load: its presence says so."""
    await bare.start_gateway(worker_seconds=0.3, queue_seconds=3.0)
    await bare.add_prefill()
    began = time.monotonic()
    status, _, reply = await bare.post(chat())
    assert status == 503 and "came within 0.3 s" in reply["error"]["message"] and time.monotonic() - began < 2.5
    decode = await bare.add_decode()
    await bare.gateway.peers.wait_for("decode")
    decode.set_state("starting")
    await eventually(lambda: not any(group.decodes for group in bare.gateway.router.groups.values()))
    task = asyncio.create_task(bare.post(chat()))
    await asyncio.sleep(1.0)
    assert not task.done()
    decode.set_state("ready")
    assert (await task)[0] == 200
    decode.set_state("starting")
    await eventually(lambda: not any(group.decodes for group in bare.gateway.router.groups.values()))
    status, _, reply = await bare.post(chat())
    assert status == 503 and "came within 3 s" in reply["error"]["message"]
    await quiet(bare)


def start_process(role, *flags) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", f"headrace.{role}", *flags])


async def test_killed_process_in_mid_stream(nats, bare):
    """The only one of its kind: the client has an error that says so."""
    await bare.start_gateway(worker_seconds=0.5)
    command = ["--nats-url", nats.url, "--engine", "sim", "--log-level", "error", "--kvstore"]
    workers = [start_process("decode", *command, "--sim-step-seconds", "0.03"), start_process("prefill", *command)]
    try:
        await bare.gateway.peers.wait_for("prefill", timeout=30)
        await bare.gateway.peers.wait_for("decode", timeout=30)
        async with bare.streaming(chat(model="sim", max_tokens=500, ignore_eos=True)) as response:
            raw = await response.content.readany()
            while raw.count(b"data:") < 5:
                raw += await response.content.readany()
            workers[0].send_signal(signal.SIGKILL)
            started = time.monotonic()
            raw += await response.content.read()
        assert time.monotonic() - started < SOON
        assert events(raw)[-1]["error"]["code"] == "worker_died"
        await quiet(bare)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


# ---------------------------------------------------------------- lost and strange messages


@pytest.mark.parametrize("lose", [{1}, {3}, {3, 4, 5}, {1, 9}])
async def test_lost_output_is_asked_for_again(cluster, lose):
    cluster.decodes[0].lose = lose
    cluster.decodes[0].delay = 0.005
    assert text_of(await cluster.stream(chat())) == TEXT
    assert counters(cluster)["resumes"] >= 1
    await quiet(cluster)


async def test_a_lost_first_message_is_noticed_by_the_second_whoever_it_is_for(cluster, monkeypatch):
    """The only message of one request is lost, and it is the first that this worker ever sent; presence tells nothing."""
    decode = cluster.decodes[0]
    monkeypatch.setattr(decode, "describe", lambda: type(decode).describe(decode) | {"out_seq": {}})
    decode.lose = {1}
    first = asyncio.create_task(cluster.post(chat(max_tokens=1)))
    await eventually(lambda: decode.sent.get(cluster.gateway.instance) == 1)
    assert (await cluster.post(chat(max_tokens=1)))[0] == 200
    assert (await asyncio.wait_for(first, SOON))[0] == 200
    await quiet(cluster)


async def test_output_that_came_while_lost_output_was_asked_for_is_asked_for_too(cluster, monkeypatch):
    """The answer is older than the last messages, which were dropped because it was awaited: nothing else tells of them."""
    decode = cluster.decodes[0]
    decode.lose, decode.delay = {3}, 0.005

    async def late(message, resume=decode.resume):
        answer = resume(message)
        await asyncio.sleep(0.3)  # the stream has ended by then
        return answer

    monkeypatch.setitem(decode._handlers, "resume", late)
    assert text_of(await cluster.stream(chat())) == TEXT
    await quiet(cluster)


async def test_a_question_for_lost_output_that_is_lost_too_is_repeated(cluster, monkeypatch):
    decode = cluster.decodes[0]
    decode.lose, decode.delay, asked = {3}, 0.005, []

    async def lost_once(message, resume=decode.resume):
        asked.append(message)
        if len(asked) == 1:
            await asyncio.sleep(5)
        return resume(message)

    monkeypatch.setitem(decode._handlers, "resume", lost_once)
    started = time.monotonic()
    assert text_of(await cluster.stream(chat())) == TEXT
    assert len(asked) > 1 and time.monotonic() - started < SOON
    await quiet(cluster)


async def test_what_was_lost_before_a_workers_first_message_is_asked_for(cluster):
    """All that one request gets is in the very first message, which is lost; the next one, about another request, tells."""
    decode = cluster.decodes[0]
    decode.lose = {1}
    lost = asyncio.create_task(cluster.stream(chat(max_tokens=1)))
    while not decode.sent:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert text_of(await cluster.stream(chat())) == TEXT
    assert text_of(await asyncio.wait_for(lost, SOON)) in TEXT
    await quiet(cluster)


async def test_a_lost_last_message_is_noticed_by_presence(cluster):
    decode = cluster.decodes[0]
    decode.lose = {len(cluster.script)}
    started = time.monotonic()
    assert text_of(await cluster.stream(chat())) == TEXT
    assert time.monotonic() - started < SOON
    await quiet(cluster)


async def test_output_that_is_lost_for_good_is_computed_again(cluster):
    decode = cluster.decodes[0]
    decode.lose, decode.keep, decode.delay = {3}, False, 0.02
    assert text_of(await cluster.stream(chat())) == TEXT
    await eventually(lambda: [c.reason for c in decode.cancels] == ["failed"])
    assert [a.output_tokens for a in decode.admits] == [0, 2]
    await quiet(cluster)


async def test_streams_that_nobody_knows_are_cancelled_once(cluster):
    decode = cluster.decodes[0]
    for index in range(3):
        decode.publish(cluster.gateway.instance, [m.OutEntry("ghost", 1, 0, index, m.pack_ids([5]))])
    await eventually(lambda: decode.cancels)
    await asyncio.sleep(0.1)
    assert [(c.request, c.attempt) for c in decode.cancels] == [("ghost", 1)]


async def test_another_attempts_output_is_dropped(cluster):
    decode = cluster.decodes[0]
    decode.hold_at = 2
    task = asyncio.create_task(cluster.stream(chat()))
    await eventually(lambda: decode.done and len(next(iter(decode.done.values()))) == 2)
    admit = decode.admits[0]
    decode.publish(cluster.gateway.instance, [m.OutEntry(admit.request, admit.attempt + 7, 0, 2, m.pack_ids([99, 98, 97]))])
    decode.publish(cluster.gateway.instance, [m.OutEntry(admit.request, admit.attempt, 0, 0, m.pack_ids(cluster.script[:2]))])
    decode.go.set()
    assert text_of(await task) == TEXT
    assert counters(cluster)["stale_outputs"] == 1
    await eventually(lambda: decode.cancels)
    assert [(c.request, c.attempt) for c in decode.cancels] == [(admit.request, admit.attempt + 7)], "and it is told to stop"


async def test_a_worker_that_was_only_thought_dead_is_told_to_stop(bare):
    """A stopped process is not dead: when it goes on, so does its stream, which runs elsewhere by then."""
    decode = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway()
    await bare.ready()
    decode.hold_at = 4
    task = asyncio.create_task(bare.stream(chat()))
    await eventually(lambda: decode.done and len(next(iter(decode.done.values()))) == 4)
    await bare.add_decode()
    await bare.ready(1, 2)
    decode.mute = True
    assert text_of(await task) == TEXT
    decode.mute = False
    decode.go.set()
    await eventually(lambda: decode.cancels)
    assert {(c.request, c.attempt) for c in decode.cancels} == {(decode.admits[0].request, decode.admits[0].attempt)}
    await quiet(bare)


# ---------------------------------------------------------------- clients


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_both_legs(cluster, stream):
    decode, prefill = cluster.decodes[0], cluster.prefills[0]
    prefill.silent = True
    task = asyncio.create_task(cluster.post(chat(stream=stream)))
    await eventually(lambda: prefill.runs)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: decode.cancels and prefill.cancels)
    assert decode.cancels[0].reason == prefill.cancels[0].reason == "client"
    assert decode.cancels[0].request == decode.admits[0].request
    await quiet(cluster)


async def test_a_client_that_leaves_during_admission_leaves_no_credit_behind(cluster):
    decode = cluster.decodes[0]
    never = asyncio.get_running_loop().create_future()
    decode._handlers["admit"] = lambda message: decode.admits.append(message) or never
    task = asyncio.create_task(cluster.post(chat()))
    await eventually(lambda: decode.admits)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await eventually(lambda: decode.cancels)
    assert (decode.cancels[0].request, decode.cancels[0].reason) == (decode.admits[0].request, "client")
    await quiet(cluster)


async def test_a_client_that_leaves_in_mid_stream_cancels_decode_and_harms_no_other(cluster):
    decode = cluster.decodes[0]
    decode.hold_at = 3
    other = asyncio.create_task(cluster.stream(chat()))
    await eventually(lambda: decode.admits)
    async with cluster.streaming(chat()) as response:
        await response.content.readany()
        response.close()
    await eventually(lambda: decode.cancels)
    decode.go.set()
    assert text_of(await other) == TEXT
    assert [c.request for c in decode.cancels] == [decode.admits[1].request]
    await quiet(cluster)


async def test_prefills_problem_behind_the_first_token_costs_nothing(cluster):
    """Decode has the whole prompt then: no attempt more, no token twice."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    decode.hold_at = 3
    task = asyncio.create_task(cluster.stream(chat()))
    records = cluster.gateway.dispatcher.records
    await eventually(lambda: [record.state.phase for record in records.values()] == [Phase.STREAMING])
    run = prefill.runs[0]
    for number, status in enumerate((502, 400), 1):
        problem = m.Problem(status, "prefill_transfer", "the link broke behind the last byte")
        entry = m.OutEntry(run.request, run.attempt, 0, 0, b"", finish="abort", problem=problem)
        prefill.bus.publish(subjects.out(run.gateway), m.Out(prefill.instance, prefill.epoch, number, [entry]))
    await prefill.bus.flush()
    await asyncio.sleep(0.1)
    decode.go.set()
    assert text_of(await task) == TEXT and len(decode.admits) == 1 and not decode.cancels
    assert counters(cluster)["migrations"] + counters(cluster)["retries"] == 0
    await quiet(cluster)


async def test_a_client_that_does_not_read_is_dropped_and_harms_no_other(bare, tokenizer):
    decode = await bare.add_decode()
    decode.script = tokenizer.encode_plain("word " * 60_000)
    decode.max_model_len = 1 << 20
    prefill = await bare.add_prefill()
    prefill.max_model_len = 1 << 20
    await bare.start_gateway(client_buffer_bytes=100_000)
    await bare.ready()
    host, port = bare.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps(chat(stream=True, max_tokens=100_000)).encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    reader._transport.pause_reading()  # what asyncio has read ahead is bounded too
    await eventually(lambda: decode.cancels, 20)
    assert decode.cancels[0].reason == "client"
    decode.script = bare.script
    assert text_of(await bare.stream(chat())) == TEXT
    writer.transport.abort()
    await quiet(bare)


async def test_deadline(bare):
    decode = await bare.add_decode()
    await bare.add_prefill()
    decode.hold_at = 3
    await bare.start_gateway(request_seconds=0.4)
    await bare.ready()
    started = time.monotonic()
    chunks = await bare.stream(chat())
    assert chunks[-1]["error"]["code"] == "deadline_exceeded" and time.monotonic() - started < SOON
    status, _, reply = await bare.post(chat())
    assert status == 504 and "0.4 s" in reply["error"]["message"]
    assert {c.reason for c in decode.cancels} == {"deadline"} and 0 < decode.admits[0].deadline <= 0.4
    await quiet(bare)


# ---------------------------------------------------------------- the bus


async def test_nats_restarts_under_a_running_stream(cluster):
    decode = cluster.decodes[0]
    decode.hold_at = 5
    task = asyncio.create_task(cluster.stream(chat()))
    await eventually(lambda: decode.done and len(next(iter(decode.done.values()))) == 5)
    cluster.nats.stop(kill=True)
    await eventually(lambda: not cluster.gateway.bus.connected)
    status, headers, reply = await cluster.post(chat())
    assert status == 503 and reply["error"]["code"] == "bus_down" and headers["Retry-After"]
    cluster.nats.start()
    await eventually(lambda: cluster.gateway.bus.connected and decode.bus.connected)
    decode.go.set()
    assert text_of(await asyncio.wait_for(task, SOON)) == TEXT
    await cluster.gateway.peers.wait_for("decode")
    assert (await cluster.post(chat()))[0] == 200
    await quiet(cluster)


async def test_nats_that_stays_away_ends_streams_with_an_error(cluster):
    decode = cluster.decodes[0]
    cluster.gateway.settings.bus_grace_seconds = 0.5
    decode.hold_at = 5
    task = asyncio.create_task(cluster.stream(chat()))
    await eventually(lambda: decode.done and len(next(iter(decode.done.values()))) == 5)
    cluster.nats.stop(kill=True)
    chunks = await asyncio.wait_for(task, SOON)
    assert chunks[-1]["error"]["code"] == "bus_down"
    cluster.nats.start()
    await eventually(lambda: cluster.gateway.bus.connected)


async def test_a_bus_that_swallows_everything_is_told_to_clients(bare, monkeypatch):
    """Connected, and nothing comes back: not found by the client's own pings here, but by questions without an answer."""
    monkeypatch.setattr(connection, "PING_SECONDS", 600)
    decode = await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(bus_grace_seconds=0.5, command_seconds=0.3)
    await bare.ready()
    decode.hold_at = 5
    running = asyncio.create_task(bare.stream(chat()))
    await eventually(lambda: decode.done and len(next(iter(decode.done.values()))) == 5)
    bare.nats.process.send_signal(signal.SIGSTOP)
    try:
        chunks = await asyncio.wait_for(running, SOON)
        assert text_of(chunks[:-1]) == "the water runs down from" and chunks[-1]["error"]["code"] == "bus_down"
        assert bare.gateway.bus.connected and bare.gateway.dispatcher.pulse.silent
        assert bare.gateway.not_ready_because() == "NATS is connected and carries nothing"
        status, headers, reply = await bare.post(chat())
        assert status == 503 and reply["error"]["code"] == "bus_down" and headers["Retry-After"]
    finally:
        bare.nats.process.send_signal(signal.SIGCONT)
    await eventually(lambda: bare.gateway.dispatcher.on_the_bus)
    decode.hold_at = -1
    decode.go.set()
    assert (await bare.post(chat()))[0] == 200
    await quiet(bare)


async def test_what_waits_for_an_answer_when_the_bus_falls_silent_goes_on_with_it(bare, monkeypatch):
    monkeypatch.setattr(connection, "PING_SECONDS", 600)
    await bare.add_decode()
    await bare.add_prefill()
    await bare.start_gateway(bus_grace_seconds=60.0, command_seconds=0.3, queue_seconds=0.5)
    await bare.ready()
    bare.nats.process.send_signal(signal.SIGSTOP)
    try:
        task = asyncio.create_task(bare.post(chat()))
        await eventually(lambda: any(r.state.phase is Phase.OFFLINE for r in bare.gateway.dispatcher.records.values()))
        await asyncio.sleep(1.0)  # longer than it would wait in line
    finally:
        bare.nats.process.send_signal(signal.SIGCONT)
    assert (await task)[0] == 200
    await quiet(bare)


async def test_no_tensor_rides_on_the_bus(cluster):
    """Bytes counted at the gateway: a request costs ids and envelopes, whatever its KV weighs."""
    bus = cluster.gateway.bus
    await cluster.post(chat())
    before = bus.counters.bytes_out + bus.counters.bytes_in
    prompt = "word " * 2000
    await cluster.post(chat(messages=[{"role": "user", "content": prompt}], max_tokens=8))
    tokens = cluster.decodes[0].admits[-1].prompt_tokens
    moved = bus.counters.bytes_out + bus.counters.bytes_in - before
    assert tokens > 2000 and moved < 4 * tokens + 2 * 16 * (tokens // 128) + 8_000
    assert bus.counters.largest_out <= bus.max_payload


async def test_a_prompt_larger_than_max_payload_goes_in_chunks(cluster):
    for worker in cluster.decodes + cluster.prefills:
        worker.max_model_len = 1 << 20
        worker.announce()
    await eventually(lambda: cluster.gateway.router.groups["fake"].max_model_len == 1 << 20)
    ids = [5] * 300_000
    status, _, _ = await cluster.post({"prompt": ids, "max_tokens": 2}, "/v1/completions")
    assert status == 200 and cluster.prefills[0].runs[0].ids == m.pack_ids(ids)
    assert cluster.gateway.bus.counters.chunks == 2 and cluster.gateway.bus.counters.largest_out <= 1 << 20


async def test_trace_tells_the_life_in_order(cluster):
    got = []
    cluster.decodes[0].delay = 0.01
    await cluster.gateway.bus.subscribe_bytes("headrace.trace.>", lambda data, *_: got.append(json.loads(data)))
    await cluster.stream(chat(), **{"X-Request-Id": "mine"})
    await eventually(lambda: any(e["event"] == "gateway.finished" for e in got))
    names = [e["event"].removeprefix("gateway.") for e in sorted(got, key=lambda e: e["ts"])]
    assert names[:3] == ["received", "rendered", "admitted"] and names[-1] == "finished"
    assert sorted(names[3:-1]) == ["accepted", "first_token"]  # the first token may overtake prefill's answer
    assert all(e["ms"] >= 0 for e in got if e["event"] != "gateway.received")
    assert cluster.gateway.trace.remembered("mine")[-1]["tokens"] == len(cluster.script)


async def test_drain_finishes_what_runs_and_refuses_what_comes(cluster):
    decode = cluster.decodes[0]
    decode.hold_at = 3
    task = asyncio.create_task(cluster.stream(chat()))
    await eventually(lambda: decode.admits)
    cluster.gateway.set_state("draining")
    draining = asyncio.create_task(cluster.gateway.drain())
    status, headers, _ = await cluster.post(chat())
    assert status == 503 and headers["Retry-After"]
    await asyncio.sleep(0.05)
    assert not draining.done()
    decode.go.set()
    assert text_of(await task) == TEXT
    await asyncio.wait_for(draining, SOON)
