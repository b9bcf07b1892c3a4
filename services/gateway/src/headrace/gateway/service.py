"""The gateway service: joins the bus, routing, dispatch and the HTTP API."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

from aiohttp import web
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from headrace.bus import Peers, Service, Settings
from headrace.bus import messages as m

from .api import Api
from .auth import Auth
from .dispatch import Dispatcher
from .images import Images
from .models import Models, load_tokenizer
from .responses import Responses, ResponseStore
from .routing import Router
from .settings import GatewaySettings

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Gateway(Service):
    """One per process; `--workers N` starts N of them on one port."""

    role: ClassVar[str] = "gateway"
    description: ClassVar[str] = "HTTP in, server-sent events out: OpenAI's API over prefill and decode workers."
    Settings: ClassVar[type[Settings]] = GatewaySettings
    settings: GatewaySettings

    def __init__(self, settings: GatewaySettings):
        super().__init__(settings)
        self.http_reuse_port = settings.share_port
        self.api = Api(self)
        self.kept = ResponseStore(settings.response_bytes, settings.response_seconds)
        self.dispatcher: Dispatcher = None  # type: ignore[assignment]  # set by start()

    async def start(self) -> None:
        settings = self.settings
        # Long texts are tokenised in threads that can't be stopped when their client leaves; two bound what they take.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2, "tokenise"))
        tokenizer = load_tokenizer(settings)
        self.api.auth = Auth(settings.api_key, settings.api_key_file, settings.kv_secret)
        await super().start()
        self.responses = Responses(self.bus, self.instance, self.kept)
        self.peers = Peers(self.bus)
        self.router = Router(self.bus, self.peers, lambda: self.dispatcher.capacity(), settings.worker_seconds)
        self.dispatcher = Dispatcher(self.bus, self.peers, self.instance, self.epoch, self.router, self.trace, settings)
        self.images = Images(self.bus, self.peers, self.dispatcher.prober, self.instance, self.trace, settings)
        self.models = Models(settings, self.router, tokenizer)
        self.meters = Meters(self)
        self.peers.watch(self._on_presence)
        await self.dispatcher.start()
        await self.router.residency.start()
        await self.peers.start()
        self.set_state("ready")

    async def drain(self) -> None:
        await self.dispatcher.idle()

    async def stop(self) -> None:
        if self.dispatcher is not None:
            await self.dispatcher.stop()
            await self.router.residency.stop()
            await self.images.stop()
            await self.peers.stop()
        await super().stop()

    def verbs(self) -> dict[str, Any]:
        return {"response": self.kept.answer, "grant": lambda message: self.images.grant_status(message), "audit": self._audit}

    def _audit(self, message: m.Message) -> m.Done:
        """What must be 0 when no client waits. -> Done(JSON)"""
        ready = self.dispatcher is not None
        live, waiting = (len(self.dispatcher.records), self.dispatcher.queued) if ready else (0, 0)
        return m.Done(json.dumps({"ok": ready, "error": "" if ready else "starting", "live": live, "waiting": waiting}))

    def load(self) -> m.Load:
        if self.dispatcher is None:
            return m.Load()
        return m.Load(running=0, waiting=self.dispatcher.queued)

    def http_address(self) -> tuple[str, int, str]:
        return self.settings.host, self.settings.port, "--port"

    def http_runner(self) -> web.AppRunner:
        return self.api.runner(self.side_door())

    def not_ready_because(self) -> str:
        """Ready to serve: on the bus, and a prefill and a decode worker are there."""
        if why := super().not_ready_because():
            return why
        if self.dispatcher.pulse.silent:
            return "NATS is connected and carries nothing"
        whole = any(group.prefills and group.decodes for group in self.router.groups.values())
        return "" if whole else "no model has both a prefill and a decode worker"

    def _on_presence(self, kind: str, presence: m.Presence) -> None:
        if kind == "update" and presence.role in ("prefill", "decode"):
            self.dispatcher.output.sent_so_far(presence)
        elif kind == "leave":
            self.dispatcher.output.left(presence.instance)


class Meters:
    """Prometheus metrics of the gateway, and the vLLM names that dashboards and autoscalers look for."""

    def __init__(self, gateway: Gateway):
        registry = gateway.metrics
        self.requests = Counter("headrace_gateway_requests", "requests by outcome", ["endpoint", "status"], registry=registry)
        self.ttft = Histogram("headrace_time_to_first_token_seconds", "request received to first token", buckets=_SECONDS,
                              registry=registry)  # fmt: skip
        self.e2e = Histogram("headrace_e2e_request_latency_seconds", "request received to last byte written", buckets=_SECONDS,
                             registry=registry)  # fmt: skip
        self.prompt_tokens = Counter("headrace_prompt_tokens", "prompt tokens of finished requests", registry=registry)
        self.cached_tokens = Counter("headrace_cached_tokens", "prompt tokens that were not recomputed", registry=registry)
        self.generation_tokens = Counter("headrace_generation_tokens", "output tokens of finished requests", registry=registry)
        self.repairs = Counter("headrace_gateway_repairs", "malformed tool calls mended", ["kind"], registry=registry)
        registry.register(_Collector(gateway))
        self._statuses: dict[tuple[str, int], Counter] = {}

    def status(self, endpoint: str, status: int) -> None:
        counter = self._statuses.get((endpoint, status))
        if counter is None:
            counter = self._statuses[endpoint, status] = self.requests.labels(endpoint, str(status))
        counter.inc()

    def finished(self, seconds: float, ttft: float, usage: m.Usage) -> None:
        self.e2e.observe(seconds)
        self.ttft.observe(ttft)
        self.prompt_tokens.inc(usage.prompt_tokens)
        self.cached_tokens.inc(usage.cached_tokens)
        self.generation_tokens.inc(usage.completion_tokens)


class _Collector:
    """Read when somebody asks."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Any:
        dispatcher, router = self._gateway.dispatcher, self._gateway.router
        for name, value in {**dispatcher.counters, **self._gateway.images.counters}.items():
            yield CounterMetricFamily(f"headrace_gateway_{name}", f"gateway: {name.replace('_', ' ')}", value=value)
        yield GaugeMetricFamily("headrace_gateway_in_flight", "requests in flight", value=len(dispatcher.records))
        yield GaugeMetricFamily("headrace_gateway_waiting", "requests that wait for a worker", value=dispatcher.queued)
        replay, kept = self._gateway.models.replay, self._gateway.kept
        yield GaugeMetricFamily(
            "headrace_gateway_kept_responses_bytes", "responses that may be fetched again", value=kept.bytes
        )
        yield GaugeMetricFamily(
            "headrace_gateway_replay_bytes", "sampled turns that may be replayed", value=replay.bytes if replay else 0
        )
        yield CounterMetricFamily(
            "headrace_gateway_resyncs", "snapshots of KV events asked for", value=router.residency.resyncs
        )
        decodes = [w.load for w in router.workers.values() if w.presence.role == "decode"]
        running, waiting = sum(x.running for x in decodes), sum(x.waiting for x in decodes) + dispatcher.queued
        total, free = sum(x.total_blocks for x in decodes), sum(x.free_blocks for x in decodes)
        model = next(iter(router.groups), "")
        engine = router.groups[model].engine if model else ""
        for name, text, value in (
            ("vllm:num_requests_running", "sequences that decode runs", float(running)),
            ("vllm:num_requests_waiting", "requests that wait", float(waiting)),
            ("vllm:kv_cache_usage_perc", "share of KV blocks in use", 1 - free / total if total else 0.0),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name", "engine"])
            family.add_metric([model, engine], value)
            yield family
