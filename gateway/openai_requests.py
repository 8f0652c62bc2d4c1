"""Turns the bodies of OpenAI's chat and text completions into values; what the contract does not name is dropped here.

Only what is read by name below goes any further: salts in any other spelling, priorities, templates and transfer
parameters of other engines never leave this module (architecture decision 13). What this server cannot do is refused
rather than ignored where ignoring it would change the answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from cached.errors import RetentionError
from cached.retention import ListedRetention, parse_listed
from engine.protocol import LogitBias, Sampling
from gateway import fields
from gateway.errors import bad_request, unsupported
from gateway.fields import Body, is_int, wrong
from gateway.values import ChatRequest, CompletionRequest, Delivery, Message, Options

MAX_SUBJECT_CHARS: Final = 1024
MAX_STOP_CHARS: Final = 1024
MAX_LOGIT_BIAS: Final = 1024
MAX_MESSAGES: Final = 100_000
MAX_SEQUENCES: Final = 128
MAX_TOKENS: Final = 2**31 - 1
DEFAULT_COMPLETION_TOKENS: Final = 16
"""What OpenAI's legacy endpoint generates when `max_tokens` is absent; a chat goes on to the end of the context."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""`developer` is OpenAI's new name for `system`; templates know only the old one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask of this server and this model."""

    max_n: int
    max_stop: int
    vocab_size: int


def parse_chat(body: Body, limits: Limits) -> ChatRequest:
    """A chat completion's body, checked; raises ApiError for the first field that is not legal."""
    _refuse_chat_features(body)
    model = fields.text(body, "model")
    messages = _messages(body)
    max_tokens = fields.integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    legacy_max_tokens = fields.integer(body, "max_tokens", 1, MAX_TOKENS)
    options = _options(body, limits, max_tokens or legacy_max_tokens, _chat_logprobs(body))
    return ChatRequest(model, messages, options, _delivery(body))


def parse_completion(body: Body, limits: Limits) -> CompletionRequest:
    """A text completion's body, checked; raises ApiError for the first field that is not legal."""
    model = fields.text(body, "model")
    prompts = _prompts(body, limits.vocab_size)
    max_tokens = fields.integer(body, "max_tokens", 1, MAX_TOKENS)
    if max_tokens is None:
        max_tokens = fields.integer(body, "max_completion_tokens", 1, MAX_TOKENS)
    logprobs = fields.integer(body, "logprobs", 0, 5)
    options = _options(body, limits, max_tokens or DEFAULT_COMPLETION_TOKENS, logprobs)
    echo = fields.flag(body, "echo")
    if echo and logprobs is not None:
        raise unsupported("echo", "log-probabilities of the prompt are not computed; leave out echo or logprobs")
    best_of = fields.integer(body, "best_of", 1, MAX_SEQUENCES)
    if best_of is not None and best_of != options.n:
        raise unsupported("best_of", "only best_of equal to n")
    if body.get("suffix") not in (None, ""):
        raise unsupported("suffix", "text is only continued at its end")
    if len(prompts) * options.n > MAX_SEQUENCES:
        raise bad_request(
            f"prompt has {len(prompts)} entries and n is {options.n}; together they may ask for at most "
            f"{MAX_SEQUENCES} answers.",
            "prompt",
        )
    return CompletionRequest(model, prompts, options, _delivery(body), echo)


def _refuse_chat_features(body: Body) -> None:
    for name in ("tools", "functions"):
        if body.get(name):
            raise unsupported(name, "tool calls are not available")
    if body.get("tool_choice") not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool calls are not available")
    if body.get("function_call") not in (None, "none", "auto"):
        raise unsupported("function_call", "tool calls are not available")
    response_format = fields.mapping(body, "response_format")
    if response_format is not None and response_format.get("type") != "text":
        raise unsupported("response_format", 'only {"type": "text"}')
    if body.get("modalities") not in (None, ["text"]):
        raise unsupported("modalities", 'only ["text"]')
    for name in ("audio", "prediction", "web_search_options"):
        if body.get(name) is not None:
            raise unsupported(name, "this server only answers with text of the model")


def _messages(body: Body) -> tuple[Message, ...]:
    listed = body.get("messages")
    if listed is None:
        raise bad_request("messages is required.", "messages", "missing_required_parameter")
    if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_MESSAGES:
        raise wrong("messages", listed, f"an array of 1 to {MAX_MESSAGES} messages")
    return tuple([_message(item, f"messages[{index}]") for index, item in enumerate(listed)])


def _message(item: Any, where: str) -> Message:
    if not isinstance(item, dict):
        raise wrong(where, item, "an object with role and content")
    role = item.get("role")
    if role in ("tool", "function") or item.get("tool_calls") or item.get("function_call"):
        raise unsupported(where, "tool calls are not available")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", role, "one of system, developer, user, assistant")
    return Message(_ROLES[role], _content(item.get("content"), f"{where}.content"))


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise wrong(where, content, "a string or an array of text parts")
    texts = []
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise wrong(at, part, 'an object like {"type": "text", "text": "…"}')
        if part.get("type") != "text":
            raise unsupported(f"{at}.type", "only parts of type text")
        if not isinstance(part.get("text"), str):
            raise wrong(f"{at}.text", part.get("text"), "a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _prompts(body: Body, vocab_size: int) -> tuple[str | tuple[int, ...], ...]:
    prompt = body.get("prompt")
    if prompt is None:
        raise bad_request("prompt is required.", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        return (prompt,)
    legal = "a string, an array of strings, an array of token ids, or an array of such arrays"
    if not isinstance(prompt, list) or not prompt:
        raise wrong("prompt", prompt, f"{legal}, and not empty")
    if is_int(prompt[0]):
        return (_token_ids(prompt, "prompt", vocab_size),)
    if len(prompt) > MAX_SEQUENCES:
        raise bad_request(f"prompt has {len(prompt)} entries; at most {MAX_SEQUENCES} are allowed.", "prompt")
    if all(isinstance(item, str) for item in prompt):
        return tuple(prompt)
    if all(isinstance(item, list) for item in prompt):
        return tuple([_token_ids(item, f"prompt[{index}]", vocab_size) for index, item in enumerate(prompt)])
    raise wrong("prompt", prompt, f"{legal}, all of one kind")


def _token_ids(listed: list[Any], where: str, vocab_size: int) -> tuple[int, ...]:
    # `type(…) is int` for the whole list first: a prompt of a million ids is checked in a few milliseconds.
    if not listed:
        raise bad_request(f"{where} is empty; it must have at least one token id.", "prompt")
    if set(map(type, listed)) == {int} and min(listed) >= 0 and max(listed) < vocab_size:
        return tuple(listed)
    for index, token in enumerate(listed):
        if not is_int(token) or not 0 <= token < vocab_size:
            raise bad_request(
                f"{where}[{index}] is {fields.shown(token)}; it must be a token id from 0 to {vocab_size - 1}.",
                "prompt",
            )
    raise AssertionError("a list that failed the fast check has a bad token")


def _options(body: Body, limits: Limits, max_tokens: int | None, logprobs: int | None) -> Options:
    fields.optional_text(body, "user", MAX_SUBJECT_CHARS)
    return Options(
        max_tokens=max_tokens,
        sampling=_sampling(body, limits, max_tokens, logprobs),
        stops=_stops(body, limits.max_stop),
        n=fields.integer(body, "n", 1, limits.max_n) or 1,
        retention=_retention(body),
        subject=fields.optional_text(body, "cache_salt", MAX_SUBJECT_CHARS),
    )


def _sampling(body: Body, limits: Limits, max_tokens: int | None, logprobs: int | None) -> Sampling:
    top_k = fields.integer(body, "top_k", -1, limits.vocab_size) or 0
    return Sampling(
        temperature=fields.number(body, "temperature", 0, 2, 1.0),
        # OpenAI allows 0, which can only mean the most likely token.
        top_p=max(fields.number(body, "top_p", 0, 1, 1.0), 1e-6),
        top_k=max(top_k, 0),
        min_p=fields.number(body, "min_p", 0, 1, 0.0),
        seed=fields.integer(body, "seed", -(2**63), 2**63 - 1),
        presence_penalty=fields.number(body, "presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number(body, "frequency_penalty", -2, 2, 0.0),
        # Nearer to 0 or further from it the numbers overflow, and no token is left to choose from.
        repetition_penalty=fields.number(body, "repetition_penalty", 0.01, 100, 1.0),
        logit_bias=_logit_bias(body, limits.vocab_size),
        min_tokens=fields.integer(body, "min_tokens", 0, max_tokens or MAX_TOKENS) or 0,
        ignore_eos=fields.flag(body, "ignore_eos"),
        logprobs=logprobs,
    )


def _chat_logprobs(body: Body) -> int | None:
    wanted = fields.flag(body, "logprobs")
    top = fields.integer(body, "top_logprobs", 0, 20)
    if top is not None and not wanted:
        raise bad_request(f"top_logprobs is {top}, which needs logprobs to be true.", "top_logprobs")
    return (top or 0) if wanted else None


def _stops(body: Body, max_stop: int) -> tuple[str, ...]:
    stop = body.get("stop")
    if stop is None:
        return ()
    listed = [stop] if isinstance(stop, str) else stop
    legal = f"a string or an array of at most {max_stop} strings"
    if not isinstance(listed, list):
        raise wrong("stop", stop, legal)
    if len(listed) > max_stop:
        raise bad_request(f"stop has {len(listed)} entries; it must be {legal}.", "stop")
    for index, item in enumerate(listed):
        if not isinstance(item, str) or not 1 <= len(item) <= MAX_STOP_CHARS:
            where = "stop" if isinstance(stop, str) else f"stop[{index}]"
            raise bad_request(
                f"{where} is {fields.shown(item)}; it must be a string of 1 to {MAX_STOP_CHARS} characters.", "stop"
            )
    return tuple(dict.fromkeys(listed))


def _logit_bias(body: Body, vocab_size: int) -> tuple[LogitBias, ...]:
    given = fields.mapping(body, "logit_bias")
    if not given:
        return ()
    if len(given) > MAX_LOGIT_BIAS:
        raise bad_request(f"logit_bias has {len(given)} entries; at most {MAX_LOGIT_BIAS} are allowed.", "logit_bias")
    biases: dict[int, float] = {}
    for key, value in given.items():
        token = int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else -1
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"logit_bias has the key {fields.shown(key)}; keys must be token ids from 0 to {vocab_size - 1}.",
                "logit_bias",
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise bad_request(
                f"logit_bias[{key}] is {fields.shown(value)}; it must be a number from -100 to 100.", "logit_bias"
            )
        biases[token] = float(value)
    return tuple([LogitBias(token, bias) for token, bias in biases.items()])


def _retention(body: Body) -> ListedRetention | None:
    raw = body.get("kv_cache_retention_config")
    if raw is None:
        return None
    try:
        return parse_listed(raw)
    except RetentionError as error:
        raise bad_request(f"{error}.", error.param) from None


def _delivery(body: Body) -> Delivery:
    stream = fields.flag(body, "stream")
    stream_options = fields.mapping(body, "stream_options")
    if stream_options is None:
        return Delivery(stream)
    if not stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    return Delivery(stream, fields.flag(stream_options, "include_usage"))
