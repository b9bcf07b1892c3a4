"""The connection, on a real nats-server: requests, order, chunks, refusal while disconnected, reconnecting."""

import asyncio
import os
import re
import signal
import time

import pytest

from headrace.bus import Bus, BusError, BusSettings, BusTimeout, Disconnected, NoResponder, TooLarge, nuid, subjects
from headrace.bus import messages as m
from headrace.bus.connection import MAX_MESSAGE, Joiner
from headrace.bus.testing import NatsServer, eventually


@pytest.fixture
def nats():
    with NatsServer() as server:
        yield server


@pytest.fixture
async def pair(nats):
    settings = BusSettings(nats_url=nats.url)
    one, two = await Bus.connect(settings, "one"), await Bus.connect(settings, "two")
    yield one, two
    await one.close()
    await two.close()


def run_message(tokens: int) -> m.Run:
    return m.Run("r", 1, "g", "d", 0, m.pack_ids(range(tokens)), b"", b"", 10.0)


async def serve_echo(bus: Bus, role: str, instance: str, got: list) -> None:
    def callback(message, subject, reply):
        got.append(message)
        bus.respond(reply, m.Done(subject.rsplit(".", 1)[1]))

    await bus.serve(subjects.command(role, instance, "*"), callback)


async def test_request_is_answered_and_headers_do_no_harm(pair):
    one, two = pair
    got = []
    await serve_echo(two, "decode", "d1", got)
    ping = m.Ping("me")
    assert await one.request("decode", "d1", "ping", ping, request_id="abc", traceparent="00-1-2-01") == m.Done("ping")
    assert got == [ping]


async def test_nobody_there_is_told_at_once(pair):
    with pytest.raises(NoResponder):
        await asyncio.wait_for(pair[0].request("decode", "nobody", "ping", m.Ping(), timeout=30), 1)


async def test_silence_times_out(pair):
    one, two = pair
    await two.serve(subjects.command("decode", "d1", "*"), lambda *_: None)
    with pytest.raises(BusTimeout, match="headrace.decode.d1.ping"):
        await one.request("decode", "d1", "ping", m.Ping(), timeout=0.05)
    assert one.counters.timeouts == 1 and not one._waiting


async def test_a_held_up_process_does_not_take_its_own_lag_for_silence(pair):
    one, two = pair
    await serve_echo(two, "decode", "d1", [])
    asking = asyncio.ensure_future(one.request("decode", "d1", "ping", m.Ping(), timeout=0.2))
    await asyncio.sleep(0.05)  # the answer is in our socket or on its way; we do not get to read it:
    asking2 = asyncio.ensure_future(one.request("decode", "d1", "ping", m.Ping(), timeout=0.2))
    await asyncio.sleep(0)
    time.sleep(0.5)  # noqa: ASYNC251  this is the lag
    assert await asking == m.Done("ping") == await asking2


async def test_commands_of_one_sender_keep_their_order(pair):
    one, two = pair
    got = []
    await serve_echo(two, "decode", "d1", got)
    for number in range(2000):
        verb = "cancel" if number % 2 else "run"
        one.publish(subjects.command("decode", "d1", verb), m.Ping(str(number)))
    await one.request("decode", "d1", "ping", m.Ping("last"), timeout=5)
    assert [p.sender for p in got[:-1]] == [str(n) for n in range(2000)]


async def test_larger_than_max_payload_goes_in_numbered_chunks(pair):
    one, two = pair
    got = []
    await serve_echo(two, "prefill", "p1", got)
    message = run_message(300_000)  # 1.2 MB; the server takes 1 MiB
    assert len(m.encode(message)) > one.max_payload
    await one.request("prefill", "p1", "run", message, timeout=5)
    assert got == [message]
    assert one.counters.chunks == 2 and one.counters.largest_out <= one.max_payload


async def test_a_large_answer_comes_back(pair):
    one, two = pair
    await two.serve(subjects.command("decode", "d1", "*"), lambda _, __, reply: two.respond(reply, run_message(600_000)))
    answer = await one.request("decode", "d1", "blocks", m.Ping(), timeout=5)
    assert len(answer.ids) == 2_400_000


async def test_far_too_large_names_both_sizes(pair):
    with pytest.raises(TooLarge, match=rf"Run .* is 67,\d+,\d+ bytes; the bus carries at most {MAX_MESSAGE:,}") as caught:
        await pair[0].request("prefill", "p1", "run", run_message(MAX_MESSAGE // 4 + 1))
    assert caught.value.size > caught.value.limit == MAX_MESSAGE


async def test_malformed_bytes_are_counted_and_harm_nothing(pair):
    one, two = pair
    got = []
    await two.subscribe("headrace.test", lambda message, _: got.append(message))
    for data in (b"", b"\xff\xff", b"\x92\xa4Ping", m.encode(m.Ping("x"))[:-1], b'{"a": 1}'):
        one.publish_bytes("headrace.test", data)
    one.publish("headrace.test", m.Ping("good"))
    await one.flush()
    await two.flush()
    assert got == [m.Ping("good")] and two.counters.malformed == 5


async def test_a_failing_callback_does_not_stop_the_reader(pair):
    one, two = pair
    got = []

    def callback(message, subject):
        got.append(message)
        raise ValueError("bad")

    await two.subscribe("headrace.test", callback)
    one.publish("headrace.test", m.Ping("1"))
    one.publish("headrace.test", m.Ping("2"))
    await one.flush()
    await two.flush()
    assert len(got) == 2 and two.counters.callback_errors == 2


async def test_disconnected_refuses_and_later_everything_works_again(nats, pair):
    one, two = pair
    got, events = [], []
    await serve_echo(two, "decode", "d1", got)
    await two.serve(subjects.command("decode", "slow", "*"), lambda *_: None)
    one.on_disconnect.append(lambda: events.append("down"))
    one.on_reconnect.append(lambda: events.append("up"))
    waiting = asyncio.ensure_future(one.request("decode", "slow", "run", m.Ping(), timeout=30))
    await asyncio.sleep(0.05)

    nats.stop(kill=True)
    with pytest.raises(Disconnected):
        await asyncio.wait_for(waiting, 2)  # in flight: told at once, not after its 30 s
    await eventually(lambda: not one.connected and not two.connected)
    with pytest.raises(Disconnected):
        one.publish("headrace.decode.d1.cancel", m.Ping("late"))
    with pytest.raises(Disconnected):
        await one.request("decode", "d1", "run", m.Ping("late"))

    nats.start()
    await eventually(lambda: one.connected and two.connected)
    assert await one.request("decode", "d1", "run", m.Ping("now"), timeout=2) == m.Done("run")
    assert got == [m.Ping("now")], "what was refused must never arrive later"
    assert events == ["down", "up"]


async def test_a_server_that_is_not_there_is_one_clear_sentence():
    with pytest.raises(BusError, match=r"no NATS server at nats://127.0.0.1:1 after 0.2 s.*--nats-url"):
        await Bus.connect(BusSettings(nats_url="nats://127.0.0.1:1", nats_connect_seconds=0.2))


@pytest.mark.parametrize("url", ["nats://127.0.0.1:99999", "nats://127.0.0.1:port", "nats://[::1"])
async def test_what_is_no_address_is_named(url):
    with pytest.raises(BusError, match=rf"--nats-url {re.escape(url)} is no address .*write nats://HOST:PORT"):
        await Bus.connect(BusSettings(nats_url=url, nats_connect_seconds=0.2))


async def test_a_password_in_the_address_is_used_and_never_shown():
    with NatsServer(args=("--user", "u", "--pass", "right")) as server:
        with pytest.raises(BusError) as refused:
            await Bus.connect(BusSettings(server.url.replace("//", "//u:wrong@"), nats_connect_seconds=3))
        assert server.url in str(refused.value) and "wrong" not in str(refused.value)
        bus = await Bus.connect(BusSettings(server.url.replace("//", "//u:right@")))
        await bus.close()
    with pytest.raises(BusError) as absent:
        await Bus.connect(BusSettings("nats://u:wrong@127.0.0.1:1,nats://v:wrong@127.0.0.1:2", nats_connect_seconds=0.2))
    assert "nats://127.0.0.1:1, nats://127.0.0.1:2" in str(absent.value) and "wrong" not in str(absent.value)


async def test_wrong_password_is_refused_and_the_right_one_works():
    with NatsServer(args=("--user", "u", "--pass", "p")) as server:
        with pytest.raises(BusError, match="(?i)authorization"):
            await Bus.connect(BusSettings(nats_url=server.url, nats_user="u", nats_password="x", nats_connect_seconds=3))
        bus = await Bus.connect(BusSettings(nats_url=server.url, nats_user="u", nats_password="p"))
        await bus.close()


async def test_nkey(tmp_path):
    nkeys = pytest.importorskip("nkeys")
    seed = nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER)
    (tmp_path / "seed").write_bytes(bytes(seed))
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    (tmp_path / "nats.conf").write_text(f"authorization {{ users = [ {{ nkey: {public} }} ] }}")
    with NatsServer(args=("-c", str(tmp_path / "nats.conf"))) as server:
        with pytest.raises(BusError, match="(?i)authorization"):
            await Bus.connect(BusSettings(nats_url=server.url, nats_connect_seconds=3))
        with pytest.raises(BusError, match="no nkey seed at /nowhere"):
            await Bus.connect(BusSettings(nats_url=server.url, nats_nkey="/nowhere"))
        bus = await Bus.connect(BusSettings(nats_url=server.url, nats_nkey=str(tmp_path / "seed")))
        assert bus.connected
        await bus.close()


async def test_a_connection_is_closed_though_nobody_answers_any_more(nats):
    """A stopped server takes no flush; the client's tasks and its socket must not stay for it."""
    bus = await Bus.connect(BusSettings(nats_url=nats.url))
    os.kill(nats.process.pid, signal.SIGSTOP)
    try:
        await asyncio.wait_for(bus.close(), 10)
    finally:
        os.kill(nats.process.pid, signal.SIGCONT)
    assert not bus.connected and bus._client.is_closed


async def test_who_closes_a_connection_can_be_cancelled(nats):
    bus = await Bus.connect(BusSettings(nats_url=nats.url))
    os.kill(nats.process.pid, signal.SIGSTOP)
    closing = asyncio.create_task(bus.close())
    await asyncio.sleep(0.2)
    closing.cancel()
    await asyncio.wait({closing}, timeout=10)
    os.kill(nats.process.pid, signal.SIGCONT)
    assert closing.cancelled()
    await bus.close()


def test_joiner_is_bounded_and_ignores_nonsense():
    joiner = Joiner()
    assert joiner.push(m.Chunk("a", 5, 2, b"x"), 0) is None and not joiner.partial
    assert joiner.push(m.Chunk("a", 0, 2, b"x"), 0) is None
    assert joiner.push(m.Chunk("a", 0, 2, b"again"), 0) is None
    assert joiner.push(m.Chunk("a", 1, 3, b"other total"), 0) is None
    assert joiner.push(m.Chunk("a", 1, 2, b"y"), 1) == b"xy" and joiner.size == 0
    joiner.push(m.Chunk("b", 0, 2, b"x"), 2)
    joiner.push(m.Chunk("c", 0, 2, b"x"), 20)
    assert list(joiner.partial) == ["c"] and joiner.size == 1


def test_names_are_unique_ordered_and_safe_in_a_subject():
    names = [nuid() for _ in range(10_000)]
    assert len(set(names)) == 10_000 and names == sorted(names)
    assert all(len(name) == 22 and name.isalnum() and name.isascii() for name in names)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:  # a forked process makes its own
        os.write(writer, nuid().encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 100).decode()[:12] != nuid()[:12]
    os.close(reader)
    os.close(writer)
