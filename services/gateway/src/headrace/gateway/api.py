"""The HTTP API: routes, bodies, limits, and the way of a request from bytes to the dispatcher.

Reads top-down as a request lives: `generate` authenticates, parses and renders (`headrace.recipe`), makes a record and
hands it to the dispatcher with a reply that writes to the connection. What clients may send and what they see is
recipe's knowledge; where it runs is the dispatcher's.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from array import array
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from aiohttp import ClientPayloadError, web
from aiohttp.http_exceptions import HttpProcessingError

from headrace.bus import messages as m
from headrace.bus import nuid
from headrace.kv.hashing import BlockHasher
from headrace.recipe.errors import RecipeError
from headrace.recipe.grammar import constraint
from headrace.recipe.jsontext import JSONError, compact, count_values, loads
from headrace.recipe.protocol import ConversionOptions, ParsedRequest
from headrace.recipe.protocol.shape import naming, reader
from headrace.recipe.stream import ReplyStream, Usage

from . import errors
from .auth import Auth
from .endpoints import CHAT, ENDPOINTS, LONG_TEXT, MESSAGES, RESPONSES, Context, Endpoint
from .exchange import KEEPALIVE, PING, Exchange, Turn, Written
from .images import Seen, expand
from .record import Record
from .reply import Part, Reply
from .responses import Kept, input_items
from .routing import Group

if TYPE_CHECKING:
    from .service import Gateway

HASHERS = 1024  # block hashers kept, one per layout and namespace
TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

LARGE_BODY = 1 << 20  # bytes; larger ones are counted, and read in a thread
BODY_VALUES = (1 << 20) + (1 << 16)  # JSON keys and values of a body: the interpreter stands still while they are decoded
BODY_ITEMS = 1 << 15  # messages and their parts, or tools
LONG_IDS = 8192  # ids above which text is made of them in a thread
PROMPT_LOGPROBS = 1 << 15  # in one answer: the loop stands still while they are written, a quarter of a second at most
UNKNOWN_LIMIT = 1 << 20  # tokens, where no worker says how much it takes
log = structlog.get_logger("headrace.gateway")


@dataclass(slots=True, kw_only=True)
class Held:
    """What a request holds of the bytes that large bodies share, while it lives: images stay for a second attempt."""

    body: int = 0


@dataclass(slots=True)
class Call(Held):
    """One generation request while it is handled."""

    endpoint: Endpoint
    exchange: Exchange
    received: float  # monotonic seconds
    traceparent: str
    reply: Reply | None = None
    status: int = 200
    kept: bool = False  # a response with an id under which it can be fetched and cancelled


class Fields(msgspec.Struct):
    """What the endpoints that only count and translate take beside their text."""

    model: str = ""
    return_token_strs: bool | None = None


_read_fields = naming(reader(Fields))


class Api:
    """Handlers of one gateway."""

    auth: Auth
    _turn: Turn

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._settings = gateway.settings
        self._hashers: dict[tuple[str, bytes], BlockHasher] = {}
        self._large = 0  # bytes of large bodies that are held
        self._random = random.Random()  # seeds of requests that bring none: unpredictable enough, and no system call

    def runner(self, side_door: list[web.RouteDef]) -> web.AppRunner:
        app = web.Application(client_max_size=self._settings.max_body_bytes)
        app.add_routes(side_door)
        self._turn = Turn()
        for path, endpoint in ENDPOINTS.items():
            app.router.add_post(path, self._handler(endpoint))
        for path in ("/v1/models", "/models", "/v1/models/{name:.+}"):
            app.router.add_get(path, self._models)
        for path in ("/tokenize", "/v1/tokenize"):
            app.router.add_post(path, self._tokenize)
        for path in ("/detokenize", "/v1/detokenize"):
            app.router.add_post(path, self._detokenize)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/v1/responses/{id}", self._kept("get"))
        app.router.add_delete("/v1/responses/{id}", self._kept("delete"))
        app.router.add_post("/v1/responses/{id}/cancel", self._kept("cancel"))
        app.router.add_get("/version", self._version)
        app.router.add_route("*", "/{path:.*}", self._not_found)
        # A client that goes away cancels its handler, and that cancels the request.
        # Bodies are never unpacked: a few kilobytes may hold gigabytes (see `_json`).
        return web.AppRunner(app, access_log=None, handler_cancellation=True, keepalive_timeout=75.0, auto_decompress=False)

    # ------------------------------------------------------------ generation

    def _handler(self, endpoint: Endpoint) -> Any:
        async def handle(request: web.Request) -> Written:
            return await self.generate(request, endpoint)

        return handle

    async def generate(self, request: web.Request, endpoint: Endpoint) -> Written:
        """One generation request, from headers to the last byte."""
        call = Call(endpoint, self._exchange(request), time.monotonic(), request.headers.get("traceparent", ""))
        exchange, dispatcher = call.exchange, self._gateway.dispatcher
        try:
            records = await self._prepare(request, call)
            if len(records) == 1:
                await dispatcher.run(records[0])
            else:
                await asyncio.gather(*map(dispatcher.run, records))
        except RecipeError as error:
            call.status = error.status
            exchange.fail(error, endpoint.protocol, self._settings.dialect)
        except Exception:  # a defect of ours: the client is told, and the log has the details
            log.exception("request failed", request_id=exchange.request_id)
            call.status = 500
            if exchange.opened:
                exchange.abort()
            else:
                exchange.fail(errors.internal(), endpoint.protocol, self._settings.dialect)
        finally:
            if call.kept:
                self._keep_reply(call)
            self._large -= call.body
            exchange.settle()
        if self._gateway.state != "starting":
            self._count(call)
        return exchange.result()

    async def _prepare(self, request: web.Request, call: Call) -> list[Record]:
        """Everything before the first word to a worker. Raises RecipeError."""
        self._refuse_early()
        gateway, models, endpoint, exchange = self._gateway, self._gateway.models, call.endpoint, call.exchange
        if gateway.state == "draining":
            raise errors.draining()
        tenant = self.auth.tenant(request.headers)
        self._count_body(call, request.content_length or 0)
        body = await self._json(request, call)
        if not gateway.dispatcher.on_the_bus:
            raise errors.bus_down()
        options = models.options
        if not options.models:
            raise errors.no_workers("worker")
        if "model" not in body and options.dialect == "open":
            body["model"] = models.names[0]
        keeps = endpoint is RESPONSES and options.dialect == "open"
        if keeps:
            await gateway.responses.continued(body, self.auth.namespace(tenant, None))
        parsed = await self._parse(endpoint, body, options, call)
        group = models.group(parsed.model)
        assert group is not None, "recipe refuses names that are not in options.models"
        namespace = self.auth.namespace(tenant, parsed.extras.get("cache_salt"))

        trace, request_id = gateway.trace, exchange.request_id
        trace.event(request_id, "gateway.received", client_id=exchange.shown_id, endpoint=endpoint.name, model=parsed.model)
        started = time.monotonic()
        bound = constraint(parsed, models.encoding.tokenizer.added_token_id)
        grammar = bound and m.Grammar(bound.kind, bound.text, bound.after, bound.optional)
        self._refuse_hopeless(parsed, models.limit(group))
        prompts = await endpoint.encode(models.encoding, parsed, namespace, models.replay)
        seen, prompts = await self._look(exchange, endpoint, parsed, group, namespace, prompts)
        trace.event(request_id, "gateway.rendered", (time.monotonic() - started) * 1e3, prompt_tokens=sum(map(len, prompts)))
        call.reply = reply = self._reply(call, parsed, namespace, prompts)
        records = [self._record(call, parsed, group, namespace, ids, reply.part(n), seen) for n, ids in enumerate(prompts)]
        self._refuse_many_logprobs(records)
        for record in records:
            record.sampling.grammar = grammar

        def drop() -> None:
            for record in records:
                gateway.dispatcher.shed(record)

        reply.on_failure = drop  # of one prompt: the others are in vain
        if parsed.stream:
            exchange.streams(drop, PING if endpoint is MESSAGES else KEEPALIVE)
        if keeps:
            call.kept = True
            gateway.kept.begin(reply.streams[0].id, Kept(
                self.auth.namespace(tenant, None), compact(input_items(body)).encode() if parsed.echo["store"] else b"",
                lambda: reply.streams[0].progress(), reply.cancel,
            ))  # fmt: skip
        return records

    async def _look(
        self, exchange: Exchange, endpoint: Endpoint, parsed: ParsedRequest, group: Group | None, namespace: bytes,
        prompts: list[array],
    ) -> tuple[Seen | None, list[array]]:  # fmt: skip
        """Placeholders of images become their tokens; vision is asked what the images are."""
        if not any(message.image_sources for message in parsed.conversation.messages):
            return None, prompts
        gateway, encoding = self._gateway, self._gateway.models.encoding
        sources = encoding.render(parsed.conversation).image_sources  # in the prompt's order
        if not sources:
            return None, prompts
        if group is None:
            raise errors.no_workers("worker that takes images")
        deadline = time.monotonic() + self._settings.request_seconds
        seen = await gateway.images.look(exchange.request_id, sources, namespace, group, deadline, exchange.shown_id)
        if prompts[0].count(encoding.image_token) != len(sources):  # a turn that is replayed as it was sampled may hold the id
            prompts = await endpoint.encode(encoding, parsed, namespace, None)
        ids, seen.spans = expand(prompts[0], encoding.image_token, seen.found)
        return seen, [ids]

    async def _prompt_of(self, request: web.Request, endpoint: Endpoint, parsed: ParsedRequest) -> array:
        """The prompt of a conversation that is only counted, images included."""
        models = self._gateway.models
        self._refuse_hopeless(parsed, UNKNOWN_LIMIT)
        namespace = self.auth.namespace(self.auth.tenant(request.headers), None)
        groups = [group for name in models.names if (group := models.group(name)) is not None]
        group = next((group for group in groups if group.sees), next(iter(groups), None))
        prompts = await endpoint.encode(models.encoding, parsed, b"", None)
        return (await self._look(self._exchange(request), endpoint, parsed, group, namespace, prompts))[1][0]

    def _refuse_early(self) -> None:
        """The port is open before the gateway knows models and peers, so that /health answers."""
        if self._gateway.state == "starting":
            raise errors.starting()

    def _refuse_hopeless(self, parsed: ParsedRequest, limit: int) -> None:
        """Tokenising some megabytes of text takes seconds and hundreds of megabytes: not for a prompt that can't fit."""
        texts = [message.content for message in parsed.conversation.messages]
        for prompt in parsed.prompts:
            if isinstance(prompt, str):
                texts.append(prompt)
            else:
                parsed.resolve_max_tokens(len(prompt), limit)
        beside = sum(size for size, _ in parsed.beside_messages())
        self._refuse_long(sum(map(len, texts)) + beside, limit, parsed)

    def _refuse_long(self, characters: int, limit: int, parsed: ParsedRequest | None = None) -> None:
        per_token = self._settings.characters_per_token
        if characters > limit * per_token:
            raise errors.too_much_text(characters, limit, per_token, parsed.told_beside() if parsed else "")

    def _keep_reply(self, call: Call) -> None:
        """The response is over: keep it if the client asked for that and has seen its id."""
        reply = call.reply
        assert reply is not None
        stream = reply.streams[0]
        body = stream.progress()
        if body["status"] == "in_progress" and reply.collect is None and call.exchange.opened:  # the client went away
            stream.cancel()
            body = stream.progress()
        told = body["store"] and body["status"] != "in_progress"
        self._gateway.kept.end(stream.id, body if told else None)

    def _reply(self, call: Call, parsed: ParsedRequest, namespace: bytes, prompts: list[array]) -> Reply:
        settings, endpoint, exchange = self._settings, call.endpoint, call.exchange
        gateway = self._gateway
        context = Context(gateway.models.tokenizer, exchange.request_id, gateway.instance, int(time.time()), prompts, settings)

        def make() -> list[ReplyStream]:
            streams = endpoint.streams(parsed, context)
            for number, stream in enumerate(streams):  # protocols that open with usage show what is known by then
                stream.usage = Usage(len(prompts[number // parsed.sampling.n]))
            return streams

        collect = None if parsed.stream else endpoint.collect
        reply = Reply(exchange, make(), endpoint.protocol, settings.dialect, collect, len(prompts))
        if parsed.conversation.tools_active and (gateway.models.replay is not None or parsed.parsing.repair):
            reply.over = partial(self._turn_over, exchange.request_id, namespace, parsed.sampling.ignore_eos)
        return reply

    def _turn_over(self, request_id: str, namespace: bytes, ignored_eos: bool, stream: ReplyStream, ids: array) -> None:
        """A turn that may have called tools is complete."""
        replay, repairs = self._gateway.models.replay, stream.parser.repairs
        if replay is not None and not ignored_eos:
            replay.remember(namespace, stream, ids)
        if repairs:
            self._gateway.trace.event(request_id, "gateway.repaired", repairs=repairs)
            for kind in repairs:
                self._gateway.meters.repairs.labels(kind).inc()

    def _record(
        self, call: Call, parsed: ParsedRequest, group: Group, namespace: bytes, ids: array, sink: Part, seen: Seen | None
    ) -> Record:  # fmt: skip
        """One prompt. Raises RecipeError: empty, too long (both numbers)."""
        if not ids:
            raise errors.empty_prompt()
        sampling = self._sampling(parsed)
        sampling.max_tokens = parsed.resolve_max_tokens(len(ids), self._gateway.models.limit(group))
        record = Record(
            # One HTTP request is one request on the bus, save for the further prompts of a batch.
            call.exchange.request_id if sink.first else nuid(),
            sink=sink,
            group=group,
            ids=ids,
            hashes=self._hasher(group, namespace).hashes(ids, m.image_starts(seen.spans) if seen else ()),
            namespace=namespace,
            sampling=sampling,
            seconds=self._settings.request_seconds,
            received=call.received,
            priority=parsed.extras.get("priority", 0),
            client_id=call.exchange.shown_id,
            traceparent=call.traceparent if TRACEPARENT.fullmatch(call.traceparent) else "",
        )
        record.seen, record.look_again = seen, self._gateway.images.again
        return record

    def _refuse_many_logprobs(self, records: list[Record]) -> None:
        """Those of all prompts are written in every choice of one answer. Raises RecipeError (both numbers)."""
        sampling = records[0].sampling
        tokens = sum(len(record.ids) for record in records) * sampling.n
        if tokens * (sampling.prompt_logprobs + 1) > PROMPT_LOGPROBS:
            raise errors.too_many_logprobs(tokens, sampling.prompt_logprobs, PROMPT_LOGPROBS)

    def _sampling(self, parsed: ParsedRequest) -> m.Sampling:
        """Recipe's resolved sampling as workers read it; what was not said is as the checkpoint recommends, else the wire's
        default, and a seed is drawn."""
        said = parsed.sampling
        asked = [most for most in (said.prompt_logprobs, parsed.extras.get("echo_logprobs")) if most is not None]
        wire = m.Sampling(
            seed=self._random.getrandbits(63) if said.seed is None else said.seed,
            stop_token_ids=said.stop_token_ids,
            ignore_eos=said.ignore_eos,
            logprobs=(said.top_logprobs or 0) if said.logprobs else -1,
            n=said.n,
            logit_bias=said.logit_bias,
            prompt_logprobs=-1 if not asked else max(asked),
        )
        for name in _OPTIONAL:
            value = getattr(said, name)
            value = self._gateway.models.recommended.get(name) if value is None else value
            if value is not None:
                setattr(wire, name, value)
        return wire

    def _hasher(self, group: Group, namespace: bytes) -> BlockHasher:
        key = (group.layout_id, namespace)
        hasher = self._hashers.get(key)
        if hasher is None:
            if len(self._hashers) >= HASHERS:
                self._hashers.clear()
            hasher = self._hashers[key] = BlockHasher(group.layout_id, namespace, group.block_tokens)
        return hasher

    # ------------------------------------------------------------ bodies

    def _count_body(self, held: Held, size: int) -> None:
        """Large bodies are bounded together. Raises RecipeError."""
        if not LARGE_BODY < size <= self._settings.max_body_bytes:  # a larger one is refused with both sizes
            return
        limit, more = self._settings.large_body_bytes, size - held.body
        if self._large + more > limit:
            raise errors.busy(f"{self._large:,} bytes of large requests are held here; {limit:,} may be (--large-body-bytes)")
        self._large += more
        held.body = size

    async def _read(self, request: web.Request, held: Held) -> bytes:
        """The body; one that comes in chunks, of a size that nobody told, is counted as it grows."""
        if request.content_length is not None:
            return await request.read()
        parts, size, limit = [], 0, self._settings.max_body_bytes
        async for part in request.content.iter_any():
            size += len(part)
            if size > limit:
                raise errors.body_too_large(None, limit)
            self._count_body(held, size)
            parts.append(part)
        return b"".join(parts)

    async def _json(self, request: web.Request, held: Held) -> dict[str, Any]:
        """The body as a JSON object. Raises RecipeError: too large (both sizes), not JSON, not an object."""
        limit, size = self._settings.max_body_bytes, request.content_length
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.strip().lower() not in ("", "identity"):
            raise errors.encoded_body(encoding, limit)
        if size is not None and size > limit:
            raise errors.body_too_large(size, limit)
        try:
            if request.content.is_eof():  # it came with the headers
                body = await self._read(request, held)
            else:
                async with asyncio.timeout(self._settings.body_seconds):
                    body = await self._read(request, held)
        except web.HTTPRequestEntityTooLarge:
            raise errors.body_too_large(None, limit) from None
        except TimeoutError:
            raise errors.body_too_slow(self._settings.body_seconds) from None
        except (HttpProcessingError, ClientPayloadError, web.RequestPayloadError) as error:
            raise errors.invalid(f"the request body can't be read: {error}") from None
        try:
            value = await asyncio.to_thread(_loads, body) if len(body) > LARGE_BODY else _loads(body)
        except JSONError as error:
            raise errors.invalid(f"invalid JSON request: {error}") from None
        if not isinstance(value, dict):
            raise errors.invalid(f"the request body must be a JSON object, not {_kind(value)}")
        return value

    async def _parse(self, endpoint: Endpoint, body: dict[str, Any], options: ConversionOptions, held: Held) -> ParsedRequest:
        """The typed request; lists are counted before they are walked. Raises RecipeError."""
        _refuse_many_items(body)
        if held.body:  # a large one
            return await asyncio.to_thread(endpoint.parse, body, options)
        return endpoint.parse(body, options)

    def _exchange(self, request: web.Request) -> Exchange:
        return Exchange(request, nuid(), self._turn, self._settings.client_buffer_bytes)

    def _count(self, call: Call) -> None:
        meters, reply = self._gateway.meters, call.reply
        seconds = time.monotonic() - call.received
        if reply is not None and reply.failed is not None:
            call.status = reply.failed.status
        meters.status(call.endpoint.name, call.status)
        if reply is not None and reply.usage is not None:
            meters.finished(seconds, reply.first_token - call.received, reply.usage)
        if self._settings.access_log:
            log.info(
                "request", request_id=call.exchange.request_id, client_id=call.exchange.shown_id, endpoint=call.endpoint.name,
                status=call.status, ms=round(seconds * 1e3, 3),
            )  # fmt: skip

    # ------------------------------------------------------------ kept responses

    def _kept(self, what: str) -> Any:
        async def handle(request: web.Request) -> Written:
            exchange = self._exchange(request)
            try:
                self._refuse_early()
                tenant = self.auth.namespace(self.auth.tenant(request.headers), None)
                if request.query.get("stream", "false") != "false":
                    raise errors.invalid("a kept response comes as one object; leave `stream` out", "stream")
                kept = await self._gateway.responses.ask(request.match_info["id"], tenant, what)
                exchange.answer(200, kept.body)
            except RecipeError as error:
                exchange.fail(error, "responses", self._settings.dialect)
            return exchange.result()

        return handle

    # ------------------------------------------------------------ small endpoints

    async def _small(self, request: web.Request, answer: Any, protocol: str = "chat") -> Written:
        """An endpoint that answers from what is here: `answer(body, held)` -> JSON value. Raises nothing."""
        exchange, held = self._exchange(request), Held()
        try:
            self._refuse_early()
            self.auth.tenant(request.headers)
            self._count_body(held, request.content_length or 0)
            body = await self._json(request, held) if request.method == "POST" else {}
            exchange.answer(200, compact(await answer(body, held)).encode())
        except RecipeError as error:
            exchange.fail(error, protocol, self._settings.dialect)
        except Exception:  # a defect of ours: the client is told, and the log has the details
            log.exception("request failed", request_id=exchange.request_id)
            exchange.fail(errors.internal(), protocol, self._settings.dialect)
        finally:
            self._large -= held.body
        return exchange.result()

    async def _models(self, request: web.Request) -> Written:
        """All models, or the one that the path names."""
        wanted = request.match_info.get("name")

        async def answer(_: dict[str, Any], held: Held) -> dict[str, Any]:
            models = self._gateway.models
            data = []
            for name in models.names:
                group = models.group(name)
                if group is not None and wanted in (None, name):
                    data.append({
                        "id": name, "object": "model", "created": self._gateway.epoch // 10**9, "owned_by": "headrace",
                        "root": group.model, "engine": group.engine, "max_model_len": models.limit(group),
                        "checkpoint": group.checkpoint,
                    })  # fmt: skip
            if wanted is None:
                return {"object": "list", "data": data}
            if not data:
                raise errors.unknown_model(wanted, models.names)
            return data[0]

        return await self._small(request, answer)

    def _named(self, fields: Fields) -> int | None:
        """Tokens that the model takes which a request names, or the default one; None while none is served. Raises
        RecipeError: unknown (with the known names)."""
        models = self._gateway.models
        name = fields.model or next(iter(models.names), "")
        group = models.group(name)
        if group is None and models.names:
            raise errors.unknown_model(name, models.names)
        return models.limit(group) if group else None

    async def _tokenize(self, request: web.Request) -> Written:
        async def answer(body: dict[str, Any], held: Held) -> dict[str, Any]:
            models, fields = self._gateway.models, _read_fields(body)
            limit = self._named(fields)

            def strings(ids: list[int]) -> list[str]:
                return [models.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in ids]

            if "prompt" in body and "messages" in body:
                raise errors.invalid("`prompt` and `messages` exclude each other; give one", "prompt")
            if isinstance(text := body.get("prompt"), str):
                self._refuse_long(len(text), limit or UNKNOWN_LIMIT)
                ids = await asyncio.to_thread(models.tokenizer.encode_long, text) if len(text) > LONG_TEXT else (
                    models.tokenizer.encode_plain(text)
                )  # fmt: skip
            elif "messages" in body:
                parsed = await self._parse(CHAT, {**body, "model": "model"}, models.any_name, held)
                ids = list(await self._prompt_of(request, CHAT, parsed))
            else:
                got = f"; `prompt` is {_short(body['prompt'])}" if "prompt" in body else ""
                raise errors.invalid(f"give `prompt` (a string) or `messages` (as in a chat){got}", "prompt")
            out: dict[str, Any] = {"count": len(ids), "max_model_len": limit, "tokens": ids}
            if fields.return_token_strs:
                out["token_strs"] = await asyncio.to_thread(strings, ids) if len(ids) > LONG_IDS else strings(ids)
            return out

        return await self._small(request, answer)

    async def _count_tokens(self, request: web.Request) -> Written:
        async def answer(body: dict[str, Any], held: Held) -> dict[str, Any]:
            self._named(_read_fields(body))
            models = self._gateway.models
            parsed = await self._parse(MESSAGES, {"max_tokens": 1, **body, "model": "model"}, models.any_name, held)
            return {"input_tokens": len(await self._prompt_of(request, MESSAGES, parsed))}

        return await self._small(request, answer, "messages")

    async def _detokenize(self, request: web.Request) -> Written:
        async def answer(body: dict[str, Any], held: Held) -> dict[str, Any]:
            tokens, tokenizer = body.get("tokens"), self._gateway.models.tokenizer
            limit = self._named(_read_fields(body)) or UNKNOWN_LIMIT
            size = tokenizer.vocab_size

            def text() -> str:
                for place, token in enumerate(tokens):
                    if type(token) is not int or not 0 <= token < size:
                        words = f"`tokens[{place}]` must be a token id from 0 to {size - 1:,}; it is {_short(token)}"
                        raise errors.invalid(words, f"tokens[{place}]")
                return tokenizer.decode(tokens)

            if not isinstance(tokens, list):
                words = f"`tokens` must be an array of token ids from 0 to {size - 1:,}; it is {_short(tokens)}"
                raise errors.invalid(words, "tokens")
            if len(tokens) > limit:
                raise errors.too_many_tokens(len(tokens), limit)
            return {"prompt": await asyncio.to_thread(text) if len(tokens) > LONG_IDS else text()}

        return await self._small(request, answer)

    async def _version(self, request: web.Request) -> Written:
        exchange = self._exchange(request)
        exchange.answer(200, compact({"version": self._gateway.version, "name": "headrace"}).encode())
        return exchange.result()

    async def _not_found(self, request: web.Request) -> Written:
        exchange = self._exchange(request)
        resources = request.app.router.resources()
        fits = {method for resource in resources for method in (await resource.resolve(request))[1]} - {"*"}
        if fits:  # with Allow, as RFC 9110 wants of a 405
            error = errors.wrong_method(request.method, request.path, sorted(fits - {"HEAD"}))
            headers = f"Allow: {', '.join(sorted(fits))}\r\n".encode()
        else:
            error, headers = errors.no_route(request.method, request.path, _routes(request.app)), b""
        exchange.fail(error, "chat", self._settings.dialect, headers)
        return exchange.result()


def _loads(data: bytes) -> Any:
    """A body's JSON value. Raises JSONError; RecipeError (both numbers) where decoding it would hold up everybody."""
    if len(data) > LARGE_BODY and (values := count_values(data, BODY_VALUES)) > BODY_VALUES:
        raise errors.too_many_values(values, BODY_VALUES)
    return loads(data)


def _refuse_many_items(body: dict[str, Any]) -> None:
    """Raises RecipeError (both numbers)."""
    for name in ("messages", "input", "system", "tools"):
        items = body.get(name)
        if not isinstance(items, list):
            continue
        parts = 0 if len(items) > BODY_ITEMS else sum(_parts(item) for item in items)
        if len(items) + parts > BODY_ITEMS:
            what = f"`{name}`, content parts included" if parts else f"`{name}`"
            raise errors.too_many_items(f"entries in {what}", len(items) + parts, BODY_ITEMS, name)


def _parts(message: Any) -> int:
    """Entries of a message's lists, whatever the protocol calls them; those of tool results too."""
    if not isinstance(message, dict):
        return 0
    lists = [value for value in message.values() if isinstance(value, list)]
    return sum(len(items) + sum(_parts(item) for item in items) for items in lists)


def _kind(value: Any) -> str:
    """A value's type as JSON names it."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    return {str: "a string", list: "an array", dict: "an object"}.get(type(value), "a number")


def _short(value: Any) -> str:
    """A value's beginning as JSON, or the type of what has many."""
    if value is None or isinstance(value, list | dict | bool):
        return _kind(value)
    return compact(value[:80] if isinstance(value, str) else value)


def _routes(app: web.Application) -> dict[str, str]:
    """Path -> its methods ("GET or DELETE"), of all that this gateway serves."""
    methods: dict[str, list[str]] = {}
    for route in app.router.routes():
        if route.method not in ("*", "HEAD"):
            methods.setdefault(route.resource.canonical, []).append(route.method)
    return {path: " or ".join(names) for path, names in methods.items()}


_OPTIONAL = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens",
)  # fmt: skip
