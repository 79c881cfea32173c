"""The HTTP face of a simulated engine: vLLM's routes on aiohttp, plus `/sim/*` for hand-offs and planted faults."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import msgspec
from aiohttp import web

from simulator import handoff
from simulator.completions import Completions
from simulator.kv_events import KvEvent
from simulator.live_engine import LiveEngine
from simulator.metrics import EngineMetrics, Observed
from simulator.openai_answer import Kind
from simulator.openai_request import ApiError, parse_options
from simulator.publisher import Addresses, Publisher
from simulator.refusals import Refusals
from simulator.replay_buffer import ReplayBuffer
from simulator.reply import ReplyWriter
from simulator.sequence import Submission
from simulator.settings import ServerSettings
from simulator.wire import encode_batch
from tokenization.local import LocalTokenizer

log = logging.getLogger(__name__)

_MAX_BODY = 64 * 1024 * 1024
_RENDER = {"/v1/completions/render": "completion", "/v1/chat/completions/render": "chat"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EngineServer:
    """One simulated engine. `app()` is the aiohttp application; its startup opens the event sockets."""

    def __init__(self, settings: ServerSettings, tokenizer: LocalTokenizer, writer: ReplyWriter | None = None) -> None:
        """`writer` may be shared between servers of one process: it takes a moment to build."""
        self.settings = settings
        self._tokenizer = tokenizer
        self._publisher: Publisher | None = None
        self.live = LiveEngine(settings.engine(), self._publish, self._pull, recompute=settings.load_failure_recompute)
        self._leases = handoff.Leases(settings.lease_s, lambda request_id: self.live.engine.release(request_id))
        self.completions = Completions(
            settings, self.live, tokenizer, writer or ReplyWriter(tokenizer, settings.reply_tokens), self._leases
        )
        self._metrics = EngineMetrics(
            Observed(
                settings.model,
                settings.rank,
                settings.cache_config(),
                lambda: self.live.engine,
                lambda: self._leases.expired,
            )
        )
        self.live.finished = self._metrics.observe
        self._client: aiohttp.ClientSession | None = None
        self._refusals = Refusals()

    @property
    def publisher(self) -> Publisher | None:
        """The event sockets while the application runs; None when events are off."""
        return self._publisher

    def app(self) -> web.Application:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[self._shape_errors])
        app.cleanup_ctx.append(self._running)
        app.add_routes(
            [
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
                web.post("/v1/completions/render", self._render),
                web.post("/v1/chat/completions/render", self._render),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ping", self._health),
                web.get("/version", self._version),
                web.get("/load", self._load),
                web.get("/metrics", self._metrics_page),
                web.get("/kv_event_sources", self._event_sources),
                web.post("/reset_prefix_cache", self._reset),
                web.get("/sim/cached", self._cached),
                web.post("/sim/kv/read", self._kv_read),
                web.post("/sim/kv/free", self._kv_free),
                web.post("/sim/faults", self._faults),
                web.post("/sim/restart", self._restart),
                web.post("/sim/refuse", self._refusals.plan),
            ]
        )
        return app

    # -- life ---------------------------------------------------------------------------------------------------------

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        settings = self.settings
        if settings.events is not None:
            addresses = Addresses(endpoint=settings.events, replay=settings.replay, bind=settings.bind_events)
            self._publisher = Publisher(addresses, ReplayBuffer(settings.topic, settings.buffer_steps))
        self._client = aiohttp.ClientSession()
        tasks = [asyncio.create_task(self.live.run()), asyncio.create_task(self._watch_leases())]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()
        if self._publisher is not None:
            self._publisher.close()

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.settings.lease_s / 6))
            self._leases.expire(time.monotonic())

    def _publish(self, events: Sequence[KvEvent]) -> None:
        if self._publisher is not None:
            self._publisher.publish(encode_batch(events, time.time(), self.settings.rank, self.settings.wire))

    async def _pull(self, submission: Submission) -> bool:
        origin = submission.source
        if not isinstance(origin, handoff.Source) or self._client is None:
            return False
        engine = self.live.settings
        transfer_s = engine.cost.transfer_ms(origin.tokens) / 1e3 / engine.speed
        return await handoff.pull(self._client, origin, transfer_s)

    @web.middleware
    async def _shape_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors in OpenAI's shape, and the engine's name on every answer."""
        try:
            response = await handler(request)
        except ApiError as error:
            response = web.json_response(error.body, status=error.status)
        except web.HTTPException as error:
            body = {"message": error.reason, "type": "HTTPException", "param": None, "code": error.status}
            response = web.json_response({"error": body}, status=error.status)
        if not response.prepared:
            response.headers["x-sim-engine"] = self.settings.name
        return response

    # -- completions --------------------------------------------------------------------------------------------------

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        self._refusals.check()
        kind: Kind = "chat" if request.path.startswith("/v1/chat") else "completion"
        body = await _json_object(request)
        options = parse_options(body, chat=kind == "chat", session_header=request.headers.get("X-Session-ID"))
        prompts = await self.completions.prompts(request.path, body, options)
        answer = self.completions.answer(kind, options, prompts)
        if options.stream:
            return await self._stream(request, answer.chunks())
        whole = await answer.whole()
        if len(prompts) == 1:
            whole["kv_transfer_params"] = self.completions.offer(answer.sequences[0])
        return web.json_response(whole)

    async def _stream(self, request: web.Request, chunks: AsyncIterator[dict[str, Any]]) -> web.StreamResponse:
        headers = {"content-type": "text/event-stream; charset=utf-8", "x-sim-engine": self.settings.name}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        try:
            async for chunk in chunks:
                await response.write(b"data: " + msgspec.json.encode(chunk) + b"\n\n")
        except ApiError as error:  # too late for a status: as vLLM, the error is the last chunk
            await response.write(b"data: " + json.dumps(error.body).encode() + b"\n\n")
        except ConnectionResetError:
            log.info("client_gone path=%s", request.path)
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def _render(self, request: web.Request) -> web.Response:
        chat = _RENDER[request.path] == "chat"
        body = await _json_object(request)
        options = parse_options(body, chat=chat)
        self.completions.require_model(options.model)
        tokens = await self.completions.tokenize(request.path, body)
        rendered = [
            {
                "request_id": f"{'chatcmpl' if chat else 'cmpl'}-{time.monotonic_ns():x}",
                "token_ids": [int(token) for token in ids],
                "token_offsets": None,
                "features": None,
                "content_parts": None,
                "sampling_params": {"max_tokens": options.max_tokens, "stop": options.stop},
                "model": options.model,
                "stream": options.stream,
                "cache_salt": tokens.salt,
                "priority": body.get("priority", 0),
                "kv_transfer_params": None,
            }
            for ids in (tokens.token_ids, *tokens.batch)
        ]
        return web.json_response(rendered[0] if chat else rendered)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        if "model" in body:
            self.completions.require_model(str(body["model"]))
        ids = (await self.completions.tokenize(path, body)).token_ids
        answer = {"count": len(ids), "max_model_len": self.settings.context_tokens, "tokens": [int(i) for i in ids]}
        return web.json_response({**answer, "token_strs": None})

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await _json_object(request)).get("tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) and token >= 0 for token in tokens):
            raise ApiError(400, "tokens must be an array of token ids", param="tokens")
        return web.json_response({"prompt": self._tokenizer.decode(tokens)})

    # -- information --------------------------------------------------------------------------------------------------

    async def _models(self, request: web.Request) -> web.Response:
        models = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "vllm",
                "root": root,
                "parent": None if name == self.settings.model else self.settings.model,
                "max_model_len": self.settings.context_tokens if name == self.settings.model else None,
            }
            for name, root in self.completions.models.items()
        ]
        return web.json_response({"object": "list", "data": models})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+simulated"})

    async def _load(self, request: web.Request) -> web.Response:
        engine = self.live.engine
        return web.json_response({"server_load": len(engine.running) + len(engine.waiting)})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"content-type": "text/plain; version=0.0.4"})

    async def _event_sources(self, request: web.Request) -> web.Response:
        publisher = self._publisher
        endpoint, replay = (publisher.endpoint, publisher.replay_endpoint) if publisher else (None, None)
        told = [_told(self.settings.events, endpoint), _told(self.settings.replay, replay)]
        return web.json_response(self.settings.event_sources(*told))

    async def _reset(self, request: web.Request) -> web.Response:
        return web.json_response({"success": self.live.engine.reset_prefix_cache()})

    async def _cached(self, request: web.Request) -> web.Response:
        """What the cache holds, for comparison with what a router believes: different blocks, whatever their copies."""
        return web.json_response({"digests": len(self.live.engine.pool.cached_digests)})

    # -- hand-offs and faults -----------------------------------------------------------------------------------------

    async def _kv_read(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        held = None
        if body.get("engine_id") == self.completions.engine_id:
            held = self._leases.renew(str(body.get("request_id")), time.monotonic())
        if held is None:
            raise ApiError(404, "no blocks are held for this request", "NotFoundError", "request_id")
        if held != body.get("blocks"):
            raise ApiError(
                409, f"{held} blocks are held, {body.get('blocks')} were asked for", "ConflictError", "blocks"
            )
        return web.json_response({"blocks": held})

    async def _kv_free(self, request: web.Request) -> web.Response:
        body = await _json_object(request)
        return web.json_response({"freed": self._leases.free(str(body.get("request_id")))})

    async def _faults(self, request: web.Request) -> web.Response:
        """Plant faults in the event stream: a JSON object with fields of `simulator.publisher.Faults`; answers them all."""
        if self._publisher is None:
            raise ApiError(409, "this engine publishes no events", "ConflictError")
        try:
            changes = msgspec.convert(await _json_object(request), dict[str, bool | int])
            for name, value in changes.items():
                setattr(self._publisher.faults, name, value)
        except (msgspec.ValidationError, AttributeError) as error:
            raise ApiError(400, f"not a fault: {error}") from error
        return web.json_response(msgspec.to_builtins(self._publisher.faults))

    async def _restart(self, request: web.Request) -> web.Response:
        """Act as if the process had been killed and started again: empty cache, sequence numbers from 0."""
        self.live.restart()
        self._leases.clear()
        if self._publisher is not None:
            self._publisher.restart()
        return web.json_response({"restarted": True})


def _told(configured: str | None, resolved: str | None) -> str | None:
    """An address as vLLM lists it: as it was configured, unless its port was chosen by the system."""
    return resolved if resolved is None or configured is None or configured.endswith((":0", ":*")) else configured


async def _json_object(request: web.Request) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(await request.read())
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body
