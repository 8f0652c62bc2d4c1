"""The tenants' routes: from a checked body to an answer, streamed or whole.

The order is fixed: body, engine, fields, model, tokens, salt, engine again. Everything that decides is elsewhere; this
module awaits, and sees to it that leaving early releases what was taken.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from aiohttp import web

from cached.keys import owner_id
from gateway import errors, sse
from gateway.body import BodyMemory, Share, read_json_object
from gateway.config import GatewayConfig
from gateway.dispatch import Generation, Work
from gateway.drain import InFlight
from gateway.engines import Engines, ReadyEngine
from gateway.errors import ApiError
from gateway.middleware import RECORD
from gateway.openai_requests import Limits, parse_chat, parse_completion
from gateway.openai_responses import ChatRenderer, CompletionRenderer, error_body, model_body, models_body
from gateway.planning import TokenLimits, plan_sequences
from gateway.responses import json_response
from gateway.retention import decide
from gateway.stream import PING_INTERVAL_S, EventStream
from gateway.values import Choice, Delivery, Delta, Envelope, Options, Usage
from tenants.salts import derive_salt
from tenants.values import Identity

STALE_TENANTS_S: Final = 5.0
"""The store confirms the keys four times a second; so old, a revoked one may still open."""


class Renderer(Protocol):
    """How one API shows an answer."""

    def opening(self, num_choices: int) -> list[dict[str, Any]]: ...
    def chunks(self, delta: Delta) -> list[dict[str, Any]]: ...
    def closing(self, usage: Usage) -> list[dict[str, Any]]: ...
    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]: ...


class Handlers:
    """What the routes share. Owned by the event loop."""

    def __init__(
        self,
        config: GatewayConfig,
        engines: Engines,
        inflight: InFlight,
        bodies: BodyMemory,
        tenants_age_s: Callable[[], float],
        ping_interval_s: float = PING_INTERVAL_S,
    ) -> None:
        self._config = config
        self._engines = engines
        self._inflight = inflight
        self._bodies = bodies
        self._tenants_age_s = tenants_age_s
        self._ping_interval_s = ping_interval_s
        self._started_at = int(time.time())

    async def healthz(self, request: web.Request) -> web.StreamResponse:
        """The process is alive and its loop turns."""
        return json_response({"status": "ok"})

    async def readyz(self, request: web.Request) -> web.StreamResponse:
        """Whether a request would be served. A missing host tier and tenants of a while ago are states, not errors."""
        engine = self._engines.state
        # What an engine said before it went away, or fell silent, is old.
        tier = self._engines.tier if engine == "connected" else "unknown"
        tenants = "stale" if self._tenants_age_s() > STALE_TENANTS_S else "current"
        status = "ready" if engine == "connected" else "unavailable"
        if self._inflight.is_draining:
            status = "draining"
        shares = self._engines.shares if engine == "connected" else "unknown"
        body = {"status": status, "engine": engine, "tier": tier, "tenants": tenants, "shares": shares}
        return json_response(body, 200 if status == "ready" else 503)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return json_response(models_body(self._config.model_id, self._started_at))

    async def model(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["model"] != self._config.model_id:
            raise errors.unknown_model()
        return json_response(model_body(self._config.model_id, self._started_at))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        with self._bodies.holding() as share:
            body = await self._body(request, share)
            async with self._inflight.enter(_identity(request).tenant_id) as slot:
                engine = await self._engines.ready()
                chat = parse_chat(body, self._limits(engine))
                self._check_model(request, chat.model)
                tokens = await engine.text.encode_chat(chat.messages, engine.info.max_prompt_tokens)
                work = self._work(request, engine, [tokens], chat.options, "messages")
                slot.take_sequences(len(work.plans), engine.info.credits)
                renderer = ChatRenderer(
                    self._envelope("chatcmpl", engine),
                    include_usage=chat.delivery.include_usage,
                    want_logprobs=chat.options.sampling.logprobs is not None,
                )
                delivery = chat.delivery
                # An answer may take minutes; the conversation, as text or as ids, is not needed for it.
                del body, chat, tokens
                share.release()
                return await self._answer(request, engine, work, renderer, delivery)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        with self._bodies.holding() as share:
            body = await self._body(request, share)
            async with self._inflight.enter(_identity(request).tenant_id) as slot:
                engine = await self._engines.ready()
                completion = parse_completion(body, self._limits(engine))
                self._check_model(request, completion.model)
                tokens = await engine.text.encode_prompts(completion.prompts, engine.info.max_prompt_tokens)
                work = self._work(request, engine, tokens, completion.options, "prompt")
                slot.take_sequences(len(work.plans), engine.info.credits)
                echoes = [
                    prompt if isinstance(prompt, str) else engine.text.decode(prompt)
                    for prompt in (completion.prompts if completion.echo else ())
                    for _ in range(completion.options.n)
                ]
                renderer = CompletionRenderer(
                    self._envelope("cmpl", engine),
                    include_usage=completion.delivery.include_usage,
                    want_logprobs=completion.options.sampling.logprobs is not None,
                    echoes=echoes,
                )
                delivery = completion.delivery
                del body, completion, tokens
                share.release()
                return await self._answer(request, engine, work, renderer, delivery)

    async def _body(self, request: web.Request, share: Share) -> dict[str, Any]:
        if self._inflight.is_draining:
            raise errors.draining()
        return await read_json_object(request, share, self._config.max_body_bytes, self._config.body_timeout_s)

    def _limits(self, engine: ReadyEngine) -> Limits:
        return Limits(self._config.max_n, self._config.max_stop, engine.info.vocab_size)

    def _check_model(self, request: web.Request, model: str) -> None:
        if model != self._config.model_id:
            raise errors.unknown_model()
        request[RECORD].model = model

    def _work(
        self,
        request: web.Request,
        engine: ReadyEngine,
        prompts: Sequence[Sequence[int]],
        options: Options,
        param: str,
    ) -> Work:
        record = request[RECORD]
        identity = _identity(request)
        retention = decide(options.retention, identity.retention)
        record.clamped = retention.clamped
        record.is_default_retention_unreadable = retention.is_default_unreadable
        limits = TokenLimits(engine.info.max_prompt_tokens, engine.max_total_tokens)
        return Work(
            plans=plan_sequences(prompts, options, limits, param),
            stops=options.stops,
            retention=retention.config,
            owner=owner_id(identity.tenant_id),
            cache_salt=derive_salt(identity.salt_secret, identity.tenant_id, identity.salt_epoch, options.subject),
        )

    def _envelope(self, prefix: str, engine: ReadyEngine) -> Envelope:
        fingerprint = f"fp_{engine.info.layout_fingerprint.hex()[:12]}"
        return Envelope(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), self._config.model_id, fingerprint)

    async def _answer(
        self, request: web.Request, engine: ReadyEngine, work: Work, renderer: Renderer, delivery: Delivery
    ) -> web.StreamResponse:
        record = request[RECORD]
        record.streamed = delivery.stream
        generation = Generation(engine, work, self._config.first_token_timeout_s)
        try:
            if delivery.stream:
                return await self._stream(request, generation, len(work.plans), renderer)
            return await self._whole(request, generation, renderer)
        finally:
            record.first_token_s = generation.first_token_s
            if generation.has_begun:
                record.usage = generation.usage()

    async def _whole(self, request: web.Request, generation: Generation, renderer: Renderer) -> web.StreamResponse:
        async with generation:
            choices = await generation.choices()
        return json_response(renderer.whole(choices, generation.usage()))

    async def _stream(
        self, request: web.Request, generation: Generation, num_choices: int, renderer: Renderer
    ) -> web.StreamResponse:
        async with EventStream(request, self._ping_interval_s) as stream:
            try:
                with self._inflight.interruption():
                    await self._stream_deltas(request, generation, num_choices, renderer, stream)
                await stream.write(sse.data_frames(renderer.closing(generation.usage())) + sse.DONE)
            except ApiError as error:
                if not stream.is_open:
                    raise
                # The headers are out: the failure travels in-band, and nothing that looks like an end follows it.
                request[RECORD].error = error.problem.code
                await stream.write(sse.data_frame(error_body(error.problem)))
                return await stream.end(keep_connection=False)
            return await stream.end()

    async def _stream_deltas(
        self,
        request: web.Request,
        generation: Generation,
        num_choices: int,
        renderer: Renderer,
        stream: EventStream,
    ) -> None:
        opening = renderer.opening(num_choices)
        async with generation:
            async for delta in generation:
                await stream.write(sse.data_frames([*opening, *renderer.chunks(delta)]))
                opening = []


def _identity(request: web.Request) -> Identity:
    identity = request[RECORD].identity
    assert identity is not None, "no request without an identity reaches the engine"
    return identity
