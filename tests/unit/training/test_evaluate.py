"""The client of `evaluate` against a peer that refuses: what a busy system says is not the model's answer."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from models.training import evaluate


class Peer(BaseHTTPRequestHandler):
    """Refuses so often with the given status, then answers; `asked` counts."""

    status, refusals, wait, asked, late = 429, 2, "0.01", 0, False

    def do_GET(self):
        self.say(200, json.dumps({"data": [{"id": "model"}]}))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked += 1
        if self.asked <= self.refusals:
            return self.say(self.status, '{"error": {"message": "no room"}}', {"Retry-After": self.wait})
        if self.late:
            return self.say(200, 'data: {"error": {"message": "no worker is left"}}\n\n')
        deltas = [{"choices": [{"delta": {"content": "yes"}, "finish_reason": "stop"}]}, {"usage": {"completion_tokens": 1}}]
        return self.say(200, "".join(f"data: {json.dumps(delta)}\n\n" for delta in deltas))

    def say(self, status, text, headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def client():
    """(client, the class of its peer)"""
    peer = type("ThisPeer", (Peer,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), peer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield evaluate.Client(f"http://127.0.0.1:{server.server_port}", 0.0), peer
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_system_is_asked_again(client, status):
    asker, peer = client
    peer.status = status
    reply = asker.ask({"messages": []})
    assert (reply.content, reply.finish, reply.tokens, reply.error, peer.asked) == ("yes", "stop", 1, "", 3)


def test_another_refusal_is_the_answer(client):
    asker, peer = client
    peer.status = 400
    reply = asker.ask({"messages": []})
    assert peer.asked == 1 and reply.error.startswith("HTTP 400: ") and "no room" in reply.error and not reply.content


def test_a_system_that_stays_busy_is_left(client, monkeypatch):
    monkeypatch.setattr(evaluate, "TIMEOUT", 5.0)
    asker, peer = client
    peer.wait = "6"  # longer than a request may take
    assert asker.ask({"messages": []}).error.startswith("HTTP 429: ") and peer.asked == 1


def test_an_error_in_the_stream_is_said(client):
    asker, peer = client
    peer.refusals, peer.late = 0, True
    assert asker.ask({"messages": []}).error == 'in the stream: {"message": "no worker is left"}'
