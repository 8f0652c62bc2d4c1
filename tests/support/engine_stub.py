"""An engine without a model: speaks engine/protocol.py on a real unix socket and emits the tokens it was told to.

A `Script` says how a sequence goes: which tokens, how fast, how it ends or breaks. The stub keeps everything that the
gateway sent, so that a test can look at it, and can be killed and started again on the same path.

    async with EngineStub(path) as stub:
        stub.script = Script(tokens=(504, 282), finish="stop")
        …
        assert stub.submits[0].cache_salt
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cached.wire import FrameReader
from engine.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    TO_ENGINE,
    TO_GATEWAY,
    Cancel,
    Confirm,
    FinishReason,
    FirstToken,
    Hello,
    OwnerTable,
    Rejected,
    Stats,
    StatsRequest,
    Step,
    Stop,
    Submit,
    TierChanged,
    TierState,
    TokenEvent,
    TokenLogprob,
    TopLogprob,
    Welcome,
)

WELCOME = Welcome(
    version=PROTOCOL_VERSION,
    incarnation="stub-1",
    model_id="demo",
    model_dir="",
    vocab_size=49152,
    max_context_tokens=8192,
    max_prompt_tokens=8191,
    eos_token_ids=(2,),
    tokens_per_block=16,
    num_blocks=4096,
    layout_fingerprint=bytes(32),
    credits=1024,
    tier="none",
)


@dataclass(frozen=True, slots=True)
class Script:
    """How one sequence goes.

    `tokens` are emitted in order and, with `repeat`, over again until `max_tokens`; then comes `finish` ("length" when
    `max_tokens` ended it). `tokens_per_step` in one event, `step_s` between events, `first_s` before the first.
    `reject` refuses at once; `error_after` ends with an error event, `crash_after` drops every connection, `hang_after`
    says nothing more, each after that many tokens. `blocks` were reused in full, in part, and missed.
    """

    tokens: tuple[int, ...] = (504, 282, 260)
    finish: FinishReason = "stop"
    repeat: bool = False
    tokens_per_step: int = 1
    first_s: float = 0.0
    step_s: float = 0.0
    device_tokens: int = 0
    host_tokens: int = 0
    queue_ms: float = 1.5
    ttft_ms: float = 12.5
    blocks: tuple[int, int, int] = (0, 0, 1)
    reject: Rejected | None = None
    error_after: int | None = None
    crash_after: int | None = None
    hang_after: int | None = None

    def token(self, position: int, max_tokens: int) -> int | None:
        """The token at `position`, or None when the sequence is at its end."""
        if position >= max_tokens or (not self.repeat and position >= len(self.tokens)):
            return None
        return self.tokens[position % len(self.tokens)]


@dataclass(slots=True)
class Seen:
    """Everything received, in order, over all connections."""

    hellos: list[Hello] = field(default_factory=list)
    submits: list[Submit] = field(default_factory=list)
    cancels: list[Cancel] = field(default_factory=list)
    confirms: list[Confirm] = field(default_factory=list)
    stops: list[Stop] = field(default_factory=list)
    owner_tables: list[OwnerTable] = field(default_factory=list)


class EngineStub:
    """The server. `script` is used for every submit, or `script_for(submit, n)` when it is set (n counts from 0)."""

    def __init__(self, socket_path: str | Path, script: Script | None = None, welcome: Welcome = WELCOME) -> None:
        self.socket_path = str(socket_path)
        self.script = script or Script()
        self.script_for: Callable[[Submit, int], Script] | None = None
        self.welcome = welcome
        self.stats: dict[str, Any] = {"blocks_used": 0}
        self.seen = Seen()
        self._is_stopped = False
        self._kept: list[tuple[_StubLink, bytes]] = []
        self._server: asyncio.AbstractServer | None = None
        self._links: set[_StubLink] = set()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"EngineStub({self.socket_path}, {len(self._links)} links, {self.num_running} running)"

    @property
    def submits(self) -> list[Submit]:
        return self.seen.submits

    @property
    def cancels(self) -> list[Cancel]:
        return self.seen.cancels

    @property
    def num_running(self) -> int:
        """Sequences that are neither finished nor cancelled: what a leak would leave behind."""
        return sum(len(link.running) for link in self._links)

    async def start(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            Path(self.socket_path).unlink()
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: _StubLink(self), self.socket_path)

    async def stop(self) -> None:
        """Close everything, as an engine that ends in order does."""
        self.crash()
        await asyncio.sleep(0)

    def crash(self) -> None:
        """Drop the listener and every connection at once, as `kill -9` does. `start` brings the next incarnation."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for link in list(self._links):
            link.abort()
        self.welcome = replace(self.welcome, incarnation=f"{self.welcome.incarnation}+")

    def freeze(self) -> None:
        """Neither read nor say anything, and keep every connection, as a process under SIGSTOP does."""
        self._is_stopped = True

    def thaw(self) -> None:
        """Go on with what has arrived in the meantime."""
        self._is_stopped = False
        kept, self._kept = self._kept, []
        for link, data in kept:
            link.data_received(data)

    def set_tier(self, tier: TierState) -> None:
        """Tell every gateway that the host tier came or went."""
        self.welcome = replace(self.welcome, tier=tier)
        for link in list(self._links):
            link.send(TierChanged(tier))

    async def wait_until(self, condition: Callable[[Seen], bool], timeout_s: float = 5.0) -> None:
        """Wait until what was received satisfies `condition`; raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not condition(self.seen):
                self._changed.clear()
                await self._changed.wait()

    async def __aenter__(self) -> EngineStub:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    def note_change(self) -> None:
        self._changed.set()

    def script_of(self, submit: Submit) -> Script:
        return self.script if self.script_for is None else self.script_for(submit, len(self.seen.submits) - 1)


class _StubLink(asyncio.Protocol):
    """One gateway's connection."""

    def __init__(self, stub: EngineStub) -> None:
        self.running: dict[int, asyncio.Task[None]] = {}
        self._stub = stub
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._stub._links.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stub._links.discard(self)
        self._stop_all()

    def abort(self) -> None:
        self._stop_all()
        self._transport.abort()

    def send(self, message: Any) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(TO_GATEWAY.encode(message))

    def data_received(self, data: bytes) -> None:
        if self._stub._is_stopped:
            self._stub._kept.append((self, data))
            return
        for frame in self._reader.receive(data):
            self._handle(TO_ENGINE.decode(frame))
        self._stub.note_change()

    def _handle(self, message: Any) -> None:
        stub, seen = self._stub, self._stub.seen
        match message:
            case Hello():
                seen.hellos.append(message)
                self.send(stub.welcome)
            case Submit():
                seen.submits.append(message)
                self._begin(message, stub.script_of(message))
            case Cancel(request_id):
                seen.cancels.append(message)
                self._drop(request_id)
            case Stop(request_id):
                seen.stops.append(message)
                self._drop(request_id)
            case Confirm():
                seen.confirms.append(message)
            case OwnerTable():
                seen.owner_tables.append(message)
            case StatsRequest(token):
                self.send(Stats(token, stub.welcome.tier, json.dumps(stub.stats)))

    def _begin(self, submit: Submit, script: Script) -> None:
        if script.reject is not None:
            self.send(replace(script.reject, request_id=submit.request_id))
        elif script.first_s == 0 and script.step_s == 0 and not script.repeat and script.hang_after is None:
            # Without waits no task is needed: the whole sequence goes out at once, one frame a step.
            for event, _ in _events(submit, script):
                if not self._emit(event, script):
                    return
        else:
            task = asyncio.get_running_loop().create_task(self._run(submit, script))
            self.running[submit.request_id] = task

    async def _run(self, submit: Submit, script: Script) -> None:
        try:
            for event, wait_s in _events(submit, script):
                await asyncio.sleep(wait_s)
                if not self._emit(event, script):
                    return
            if script.hang_after is not None:
                await asyncio.Event().wait()
        finally:
            self.running.pop(submit.request_id, None)
            self._stub.note_change()

    def _emit(self, event: TokenEvent | None, script: Script) -> bool:
        if event is None:
            self._stub.crash()
            return False
        self.send(Step((event,)))
        return True

    def _drop(self, request_id: int) -> None:
        task = self.running.pop(request_id, None)
        if task is not None:
            task.cancel()

    def _stop_all(self) -> None:
        for request_id in list(self.running):
            self._drop(request_id)


def _events(submit: Submit, script: Script) -> Iterator[tuple[TokenEvent | None, float]]:
    """The events of a sequence with the wait before each; None stands for a crash."""
    num_prompt_tokens = len(submit.prompt) // 4
    first: FirstToken | None = FirstToken(
        num_prompt_tokens,
        script.device_tokens,
        script.host_tokens,
        num_prompt_tokens - script.device_tokens - script.host_tokens,
        script.queue_ms,
        script.ttft_ms,
        *script.blocks,
    )
    wait_s = script.first_s
    position = 0
    while True:
        tokens: list[int] = []
        broken = _break(script, position)
        if broken is not None:
            if broken == "hang":
                return
            error = TokenEvent(submit.request_id, (), first=first, finish="error", error="The stub failed as told.")
            yield (None if broken == "crash" else error), wait_s
            return
        for _ in range(script.tokens_per_step):
            token = script.token(position, submit.max_tokens)
            if token is None or (tokens and _break(script, position) is not None):
                break
            tokens.append(token)
            position += 1
        ended = script.token(position, submit.max_tokens) is None and _break(script, position) is None
        finish: FinishReason | None = None
        if ended:
            finish = "length" if position >= submit.max_tokens else script.finish
        yield TokenEvent(submit.request_id, tuple(tokens), _logprobs(submit, tokens), first, finish), wait_s
        if ended:
            return
        first, wait_s = None, script.step_s


def _break(script: Script, position: int) -> str | None:
    for kind, after in (("error", script.error_after), ("crash", script.crash_after), ("hang", script.hang_after)):
        if after is not None and position >= after:
            return kind
    return None


def _logprobs(submit: Submit, tokens: list[int]) -> tuple[TokenLogprob, ...]:
    num_top = submit.sampling.logprobs
    if num_top is None:
        return ()
    return tuple(
        TokenLogprob(-0.25, tuple(TopLogprob(token + rank, -0.25 - rank) for rank in range(num_top)))
        for token in tokens
    )


def prompt_tokens(submit: Submit) -> list[int]:
    """The prompt of a submit as ids."""
    return [value for (value,) in struct.iter_unpack("<I", submit.prompt)]
