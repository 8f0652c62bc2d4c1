"""Bodies of OpenAI's API: what is read, what is refused and how, what is dropped."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from engine.protocol import LogitBias
from gateway.errors import ApiError
from gateway.openai_requests import Limits, parse_chat, parse_completion
from gateway.values import Message

LIMITS = Limits(max_n=16, max_stop=16, vocab_size=49152)


def chat(**fields: Any):
    return parse_chat({"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}, LIMITS)


def completion(**fields: Any):
    return parse_completion({"model": "demo", "prompt": "Hi", **fields}, LIMITS)


def problem_of(parse: Any, **fields: Any):
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    return caught.value.problem


def test_the_defaults_are_those_of_openai() -> None:
    request = chat()

    assert request.options.max_tokens is None
    assert (request.options.sampling.temperature, request.options.sampling.top_p) == (1.0, 1.0)
    assert request.options.sampling.seed is None
    assert (request.options.n, request.options.stops, request.options.subject) == (1, (), None)
    assert not request.delivery.stream
    assert completion().options.max_tokens == 16


def test_null_is_the_same_as_absent_for_every_optional_field() -> None:
    names = [
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop",
        "n",
        "ignore_eos",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "logprobs",
        "top_logprobs",
        "stream",
        "stream_options",
        "user",
        "cache_salt",
        "kv_cache_retention_config",
        "tools",
        "tool_choice",
        "response_format",
        "functions",
        "modalities",
        "audio",
    ]

    assert chat(**dict.fromkeys(names)) == chat()


def test_every_field_of_the_contract_is_read() -> None:
    options = chat(
        max_completion_tokens=7,
        max_tokens=9,
        temperature=0,
        top_p=0.5,
        top_k=40,
        min_p=0.1,
        seed=-5,
        stop=["a", "b", "a"],
        n=3,
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias={"0": -100, "49151": 100},
        logprobs=True,
        top_logprobs=20,
        user="someone",
        cache_salt="mine",
        kv_cache_retention_config={"token_ranges": [{"start": 0, "priority": 80, "duration": 30}]},
    ).options

    sampling = options.sampling
    assert (options.max_tokens, options.n, options.stops, options.subject) == (7, 3, ("a", "b"), "mine")
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.0, 0.5, 40, 0.1)
    assert (sampling.seed, sampling.min_tokens, sampling.ignore_eos, sampling.logprobs) == (-5, 2, True, 20)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1.0, -1.0, 1.5)
    assert sampling.logit_bias == (LogitBias(0, -100.0), LogitBias(49151, 100.0))
    assert options.retention.config.ranges[0].retention.priority == 80


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("temperature", -0.1, "0 to 2"),
        ("temperature", 2.1, "0 to 2"),
        ("temperature", "hot", "0 to 2"),
        ("temperature", True, "0 to 2"),
        ("temperature", [1], "an array"),
        ("top_p", 1.01, "0 to 1"),
        ("top_p", -1, "0 to 1"),
        ("min_p", 2, "0 to 1"),
        ("top_k", -2, "-1 to 49152"),
        ("top_k", 1.5, "-1 to 49152"),
        ("seed", 2**63, "an integer"),
        ("seed", 1e300, "an integer"),
        ("seed", False, "an integer"),
        # orjson reads -2**63 - 1 as a float, which had become the lowest legal seed.
        ("seed", float(-(2**63)), "an integer"),
        # At 1e-38 every logit overflowed: the engine found no token to choose from, and the answer was 502.
        ("repetition_penalty", 1e-38, "from 0.01 to 100"),
        ("repetition_penalty", 100.5, "from 0.01 to 100"),
        ("n", 0, "1 to 16"),
        ("n", 1000, "1 to 16"),
        ("n", "2", "1 to 16"),
        ("max_tokens", 0, "1 to"),
        ("max_tokens", -1, "1 to"),
        ("max_completion_tokens", 1.5, "1 to"),
        ("max_tokens", True, "1 to"),
        ("min_tokens", -1, "0 to"),
        ("presence_penalty", 2.5, "-2 to 2"),
        ("frequency_penalty", -3, "-2 to 2"),
        ("repetition_penalty", 0, "from 0.01 to 100"),
        ("ignore_eos", 1, "true or false"),
        ("stream", "yes", "true or false"),
        ("stop", 5, "at most 16 strings"),
        ("stop", [""], "1 to 1024"),
        ("stop", "", "1 to 1024"),
        ("stop", ["a", 5], "stop[1]"),
        ("stop", ["x"] * 17, "17 entries"),
        ("stop", [str(i) for i in range(10_000)], "10000 entries"),
        ("stop", {"a": 1}, "an object"),
        ("stop", "x" * 1025, "1 to 1024"),
        ("logit_bias", [], "an object"),
        ("logit_bias", {"-1": 1}, "0 to 49151"),
        ("logit_bias", {"49152": 1}, "0 to 49151"),
        ("logit_bias", {"abc": 1}, "0 to 49151"),
        ("logit_bias", {"1.0": 1}, "0 to 49151"),
        ("logit_bias", {"²": 1}, "0 to 49151"),
        ("logit_bias", {"9" * 5000: 1}, "0 to 49151"),
        ("logit_bias", {"1": 101}, "-100 to 100"),
        ("logit_bias", {"1": True}, "-100 to 100"),
        ("logit_bias", {"1": None}, "-100 to 100"),
        ("logit_bias", {str(i): 0 for i in range(2000)}, "2000 entries"),
        ("top_logprobs", 3, "logprobs"),
        ("logprobs", 3, "true or false"),
        ("user", 5, "a string"),
        ("user", "u" * 2000, "1024"),
        ("cache_salt", "", "1 to 1024"),
        ("cache_salt", "s" * 1025, "1 to 1024"),
        ("cache_salt", ["s"], "an array"),
        ("stream_options", {"include_usage": True}, "stream is true"),
        ("messages", [], "1 to"),
        ("messages", "Hi", "an array"),
        ("messages", [5], "messages[0]"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [{"role": "wizard", "content": "x"}], "wizard"),
        ("messages", [{"role": ["user"], "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": None}], "messages[0].content"),
        ("messages", [{"role": "user", "content": []}], "messages[0].content"),
        ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ("model", 5, "model"),
        ("kv_cache_retention_config", {"token_ranges": [{"start": 5, "end": 2, "priority": 1}]}, "token_ranges[0]"),
        ("kv_cache_retention_config", "high", "object"),
    ],
)
def test_an_illegal_value_is_refused_with_field_value_and_range(field: str, value: Any, says: str) -> None:
    problem = problem_of(chat, **{field: value})

    assert problem.status == 400
    assert problem.type == "invalid_request_error"
    assert says in problem.message
    assert field in problem.message
    assert problem.param is not None
    assert problem.param.startswith(field)
    assert len(problem.message) < 400


@pytest.mark.parametrize(
    ("parse", "field", "value"),
    [
        (chat, "kv_cache_retention_config", {"token_ranges": [{"start": "x" * 10**6, "priority": 1}]}),
        (chat, "kv_cache_retention_config", {"x" * 10**6: 1}),
        (chat, "messages", [{"role": "x" * 10**6, "content": "x"}]),
        (chat, "temperature", "9" * 10**6),
        (chat, "temperature", 10**5000),
        (chat, "n", -(10**5000)),
        (completion, "prompt", [1, "x" * 10**6]),
    ],
    ids=range(7),
)
def test_a_long_value_is_not_sent_back(parse: Any, field: str, value: Any) -> None:
    problem = problem_of(parse, **{field: value})

    assert len(problem.message) < 600


@pytest.mark.parametrize(
    ("parse", "field", "value"),
    [
        (chat, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (chat, "tool_choice", "required"),
        (chat, "response_format", {"type": "json_object"}),
        (chat, "response_format", {"type": "json_schema", "json_schema": {}}),
        (chat, "functions", [{"name": "f"}]),
        (chat, "audio", {"voice": "x"}),
        (chat, "modalities", ["text", "audio"]),
        (chat, "messages", [{"role": "tool", "content": "x", "tool_call_id": "1"}]),
        (chat, "messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}]),
        (chat, "messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        (completion, "suffix", "x"),
        (completion, "best_of", 4),
    ],
)
def test_what_cannot_be_done_is_refused_and_not_ignored(parse: Any, field: str, value: Any) -> None:
    problem = problem_of(parse, **{field: value})

    assert (problem.status, problem.code) == (400, "unsupported_parameter")


def test_harmless_forms_of_unsupported_fields_are_taken() -> None:
    plain = chat()

    assert chat(tools=[], tool_choice="auto", response_format={"type": "text"}, modalities=["text"]) == plain


def test_unknown_fields_and_every_other_form_of_a_salt_are_dropped() -> None:
    odd = {
        "extra_key": "victim",
        "nvext": {"cache_salt": "victim"},
        "kv_transfer_params": {"cache_salt": "victim"},
        "vllm_xargs": {"cache_salt": "victim"},
        "priority": -100,
        "chat_template": "{{ evil }}",
        "prompt_embeds": "x",
        "metadata": {"cache_salt": "victim"},
        "prompt_cache_key": "victim",
        "safety_identifier": "victim",
        "user": "victim",
        "X-Cache-Salt": "victim",
        "Cache_Salt": "victim",
        "best_of": "nonsense",
    }

    assert chat(**odd) == chat()


def test_an_escaped_key_is_the_same_key_and_the_last_of_two_counts() -> None:
    body = orjson.loads(
        rb'{"model":"demo","messages":[{"role":"user","content":"Hi"}],"cache\u005fsalt":"a","cache_salt":"b"}'
    )

    assert parse_chat(body, LIMITS).options.subject == "b"


def test_text_parts_are_joined_by_a_line_break_and_developers_speak_as_the_system() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = chat(messages=[{"role": "developer", "content": parts}, {"role": "user", "content": "", "name": "bob"}])

    assert request.messages == (Message("system", "one\ntwo"), Message("user", ""))


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("text", ("text",)),
        (["a", "b"], ("a", "b")),
        ([1, 2, 49151], ((1, 2, 49151),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
        ("", ("",)),
    ],
)
def test_a_prompt_has_four_forms(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "required"),
        ([], "not empty"),
        ([[]], "prompt[0] is empty"),
        ([1, 49152], "prompt[1] is 49152"),
        ([1, -1], "prompt[1] is -1"),
        ([1, True], "prompt[1] is true"),
        ([1, 2.5], "prompt[1] is 2.5"),
        ([1, "a"], "prompt[1] is 'a'"),
        ([1, 1e300], "prompt[1]"),
        ([[1, 2], [3, 2**70]], "prompt[1][1]"),
        (["a", 1], "all of one kind"),
        ([["a"]], "prompt[0][0]"),
        ({"a": 1}, "an object"),
        (5, "prompt is 5"),
        (["x"] * 129, "at most 128"),
    ],
)
def test_a_prompt_in_no_legal_form_is_refused_with_the_place(prompt: Any, says: str) -> None:
    problem = problem_of(completion, prompt=prompt)

    assert problem.status == 400
    assert says in problem.message
    assert problem.param == "prompt"


def test_completions_take_up_to_five_log_probabilities_and_echo_without_them() -> None:
    assert completion(logprobs=5).options.sampling.logprobs == 5
    assert completion(logprobs=0).options.sampling.logprobs == 0
    assert completion(echo=True, best_of=1).echo
    assert problem_of(completion, logprobs=6).param == "logprobs"
    assert problem_of(completion, logprobs=True).param == "logprobs"
    assert problem_of(completion, echo=True, logprobs=1).code == "unsupported_parameter"


def test_prompts_times_choices_are_limited() -> None:
    assert problem_of(completion, prompt=["x"] * 20, n=10).param == "prompt"


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    assert problem_of(chat, min_tokens=5, max_tokens=4).param == "min_tokens"
    assert chat(min_tokens=4, max_tokens=4).options.sampling.min_tokens == 4


def test_a_salt_is_not_shown_by_the_values_it_travels_in() -> None:
    assert "mysalt" not in repr(chat(cache_salt="mysalt"))
