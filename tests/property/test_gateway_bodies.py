"""Any JSON at all is either a request or a refusal; never a failure of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import ApiError, Problem
from gateway.openai_requests import Limits, parse_chat, parse_completion
from gateway.openai_responses import error_body

LIMITS = Limits(max_n=16, max_stop=16, vocab_size=49152)
FIELDS = [
    "audio", "best_of", "cache_salt", "echo", "frequency_penalty", "function_call", "functions", "ignore_eos",
    "kv_cache_retention_config", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_p",
    "min_tokens", "modalities", "model", "n", "prediction", "presence_penalty", "prompt", "repetition_penalty",
    "response_format", "seed", "stop", "stream", "stream_options", "suffix", "temperature", "tool_choice", "tools",
    "top_k", "top_logprobs", "top_p", "user", "unknown",
]  # fmt: skip
numbers = st.one_of(st.integers(-(2**64), 2**64), st.floats(allow_nan=False, allow_infinity=False), st.integers(-2, 20))
keys = st.sampled_from(["role", "content", "type", "text", "token_ranges", "start", "end", "priority", "0", "-1", "x"])
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=8), st.sampled_from(["user", "text", "auto"])),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=400, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), values, max_size=6))
def test_any_json_is_a_request_or_a_refusal(odd: dict[str, Any]) -> None:
    chat = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}
    completion = {"model": "demo", "prompt": "Hi"}

    for parse, base in ((parse_chat, chat), (parse_completion, completion)):
        problem = refusal(parse, {**base, **odd})
        assert problem is None or problem.status == 400
        assert problem is None or len(error_body(problem)["error"]["message"]) < 1000


def refusal(parse: Callable[[dict[str, Any], Limits], object], body: dict[str, Any]) -> Problem | None:
    try:
        parse(body, LIMITS)
    except ApiError as error:
        return error.problem
    return None
