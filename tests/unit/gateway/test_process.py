"""The gateway as a process: settings, several workers on one port, the end."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time

import aiohttp
import pytest
from gateway_cluster import chat

from headrace.bus import Bus, BusSettings, Peers, SettingsError, StartError
from headrace.bus.testing import free_port
from headrace.gateway.service import Gateway
from headrace.gateway.settings import GatewaySettings
from headrace.recipe.tokenizer import _gpt2_alphabet


@pytest.fixture
def tiny(tmp_path):
    """A byte-level tokenizer that loads at once."""
    path = tmp_path / "tokenizer.json"
    vocab = {char: index for index, char in enumerate(_gpt2_alphabet())}
    path.write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}))
    return str(path)


def start(nats, *flags, stderr=None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.gateway", "--nats-url", nats.url, "--log-level", "error", *flags], stderr=stderr
    )


async def test_several_workers_share_a_port_and_end_together(nats, tiny):
    port = free_port()
    process = start(nats, "--port", str(port), "--workers", "3", "--tokenizer", tiny)
    bus = await Bus.connect(BusSettings(nats_url=nats.url))
    peers = Peers(bus)
    await peers.start()
    try:
        gateways = await peers.wait_for("gateway", 3, timeout=30)
        assert {p.http for p in gateways} == {f"http://127.0.0.1:{port}"}
        answered = set()
        deadline = time.monotonic() + 10
        while len(answered) < 3 and time.monotonic() < deadline:
            connection = http.client.HTTPConnection("127.0.0.1", port)
            connection.request("GET", "/version")
            answered.add(connection.getresponse().headers["X-Request-Id"][:12])  # a nuid begins with its process's part
            connection.close()
        assert len(answered) == 3, "the kernel spreads connections over all of them"
    finally:
        process.send_signal(signal.SIGTERM)
        await peers.stop()
        await bus.close()
    assert process.wait(10) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--port", "many"), "--port: port = 'many'"),
        (("--model", "/a", "--model-path", "/b"), "--model /a and --model-path /b differ"),
        (("--tokenizer", "/nowhere/tokenizer.json"), "/nowhere/tokenizer.json"),
        (("--api-key-file", "/nowhere/keys"), "/nowhere/keys"),
        (("--api-key", "tenant:"), "empty"),
    ],
)
async def test_what_is_wrong_with_settings_is_named(tiny, flags, words):
    with pytest.raises((SettingsError, StartError)) as caught:
        await Gateway(GatewaySettings.load(["--tokenizer", tiny, *flags], "gateway")).start()
    assert words in str(caught.value)


def test_a_taken_port_is_one_clear_line(nats, tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for workers in ("1", "2"):
            process = start(nats, "--port", str(port), "--workers", workers, "--tokenizer", tiny, stderr=subprocess.PIPE)
            _, err = process.communicate(timeout=20)
            assert process.returncode == 1 and f"127.0.0.1:{port}" in err.decode() and "--port" in err.decode()


async def test_sigterm_lets_a_running_stream_finish(nats, tokenizer, bare):
    """The whole way: signal, drain, exit 0. Workers are the test's."""
    await bare.start_gateway()  # only for its clean-up
    decode = await bare.add_decode()
    await bare.add_prefill()
    decode.hold_at = 3
    port = free_port()
    process = start(nats, "--port", str(port))
    await bare.gateway.peers.wait_for("gateway", 2, timeout=60)
    await bare.session.close()
    bare.session = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
    async with bare.streaming(chat()) as response:
        raw = await response.content.readany()
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        assert process.poll() is None
        decode.go.set()
        raw += await response.content.read()
    assert raw.endswith(b"data: [DONE]\n\n")
    assert process.wait(10) == 0
