"""Renders values as OpenAI's response bodies and stream chunks, as plain objects; the wire is somebody else's.

Streamed and unstreamed answers are made from the same deltas, so they cannot say different things.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from gateway.errors import Problem
from gateway.values import Choice, Delta, Envelope, ScoredToken, TokenText, Usage

_COMPLETION_DETAILS: Final = {
    "reasoning_tokens": 0,
    "audio_tokens": 0,
    "accepted_prediction_tokens": 0,
    "rejected_prediction_tokens": 0,
}


def error_body(problem: Problem) -> dict[str, Any]:
    """The error envelope: always these four keys."""
    return {"error": {"message": problem.message, "type": problem.type, "param": problem.param, "code": problem.code}}


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage (`cached_tokens` is part of `prompt_tokens`), and ours beside it under `halocline`."""
    cached_tokens = usage.device_tokens + usage.host_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "cache_write_tokens": usage.prompt_tokens - cached_tokens,
            "audio_tokens": 0,
        },
        "completion_tokens_details": dict(_COMPLETION_DETAILS),
        "halocline": {
            "device_tokens": usage.device_tokens,
            "host_tokens": usage.host_tokens,
            "computed_tokens": usage.computed_tokens,
            "queue_ms": round(usage.queue_ms, 3),
            "ttft_ms": round(usage.ttft_ms, 3),
            "blocks_full": usage.blocks_full,
            "blocks_partial": usage.blocks_partial,
            "blocks_missed": usage.blocks_missed,
        },
    }


def models_body(model_id: str, created: int) -> dict[str, Any]:
    """`GET /v1/models`."""
    return {"object": "list", "data": [model_body(model_id, created)]}


def model_body(model_id: str, created: int) -> dict[str, Any]:
    """`GET /v1/models/{id}`."""
    return {"id": model_id, "object": "model", "created": created, "owned_by": "halocline"}


class ChatRenderer:
    """Bodies and chunks of one chat completion."""

    def __init__(self, envelope: Envelope, *, include_usage: bool, want_logprobs: bool) -> None:
        self._chunk = {
            "id": envelope.id,
            "object": "chat.completion.chunk",
            "created": envelope.created,
            "model": envelope.model,
            "system_fingerprint": envelope.fingerprint,
            "service_tier": "default",
        }
        self._include_usage = include_usage
        self._want_logprobs = want_logprobs

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """One chunk per choice that names the role."""
        return [
            self._with_choice(index, {"role": "assistant", "content": ""}, None, None) for index in range(num_choices)
        ]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The delta's text, then its finish, each in a chunk of its own; nothing for a delta that says nothing."""
        made = []
        if delta.text or delta.scored:
            made.append(self._with_choice(delta.index, {"content": delta.text}, None, _chat_logprobs(delta.scored)))
        if delta.finish is not None:
            made.append(self._with_choice(delta.index, {}, delta.finish, ()))
        return made

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The last chunk, which has the usage and no choices, if it was asked for."""
        return [{**self._chunk, "choices": [], "usage": usage_body(usage)}] if self._include_usage else []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one body."""
        return {
            **self._chunk,
            "object": "chat.completion",
            "choices": [
                {
                    "index": choice.index,
                    "message": {
                        "role": "assistant",
                        "content": choice.text,
                        "refusal": None,
                        "annotations": [],
                    },
                    "logprobs": self._logprobs(_chat_logprobs(choice.scored)),
                    "finish_reason": choice.finish,
                }
                for choice in choices
            ],
            "usage": usage_body(usage),
        }

    def _with_choice(
        self, index: int, delta: dict[str, Any], finish: str | None, logprobs: Sequence[dict[str, Any]] | None
    ) -> dict[str, Any]:
        rendered = self._logprobs(logprobs) if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": rendered, "finish_reason": finish}
        chunk = {**self._chunk, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, content: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": list(content), "refusal": None} if self._want_logprobs else None


class CompletionRenderer:
    """Bodies and chunks of one text completion. `echoes` has the prompt's text per choice, or "" without echo."""

    def __init__(
        self, envelope: Envelope, *, include_usage: bool, want_logprobs: bool, echoes: Sequence[str] = ()
    ) -> None:
        self._chunk = {
            "id": envelope.id,
            "object": "text_completion",
            "created": envelope.created,
            "model": envelope.model,
            "system_fingerprint": envelope.fingerprint,
        }
        self._include_usage = include_usage
        self._want_logprobs = want_logprobs
        self._echoes = echoes

    def opening(self, num_choices: int) -> list[dict[str, Any]]:
        """With echo, one chunk per choice that repeats the prompt."""
        return [
            self._with_choice(index, self._echoes[index], None, ())
            for index in range(num_choices)
            if self._echoes and self._echoes[index]
        ]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """The delta in one chunk; nothing for a delta that says nothing."""
        if not delta.text and not delta.scored and delta.finish is None:
            return []
        return [self._with_choice(delta.index, delta.text, delta.finish, delta.scored)]

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The last chunk, which has the usage and no choices, if it was asked for."""
        return [{**self._chunk, "choices": [], "usage": usage_body(usage)}] if self._include_usage else []

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The answer in one body."""
        rendered = [
            self._choice(choice.index, self._echo(choice.index) + choice.text, choice.finish, choice.scored)
            for choice in choices
        ]
        return {**self._chunk, "choices": rendered, "usage": usage_body(usage)}

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""

    def _with_choice(self, index: int, text: str, finish: str | None, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        chunk = {**self._chunk, "choices": [self._choice(index, text, finish, scored)]}
        if self._include_usage:
            chunk["usage"] = None
        return chunk

    def _choice(self, index: int, text: str, finish: str | None, scored: Sequence[ScoredToken]) -> dict[str, Any]:
        logprobs = _completion_logprobs(scored) if self._want_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _chat_logprobs(scored: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    return [
        {**_chat_token(token.chosen), "top_logprobs": [_chat_token(each) for each in token.top]} for token in scored
    ]


def _chat_token(token: TokenText) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _completion_logprobs(scored: Sequence[ScoredToken]) -> dict[str, Any]:
    return {
        "tokens": [token.chosen.text for token in scored],
        "token_logprobs": [token.chosen.logprob for token in scored],
        "top_logprobs": [{each.text: each.logprob for each in token.top} for token in scored],
        "text_offset": [token.text_offset for token in scored],
    }
