"""What is refused at the door, because it would spoil a step that other requests share."""

from __future__ import annotations

import dataclasses

import pytest

from cached.retention import Retention, RetentionConfig, TokenRange
from engine.admission import chosen_seed, fault_of, unpacked
from engine.protocol import LogitBias, Sampling, Submit

SUBMIT = Submit(request_id=1, prompt=bytes(8), max_tokens=4)


def test_an_ordinary_request_is_in_order() -> None:
    assert fault_of(SUBMIT, vocab_size=100) is None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=float("nan")),
        Sampling(temperature=-0.5),
        Sampling(top_p=float("inf")),
        Sampling(min_p=-1.0),
        Sampling(top_k=-1),
        Sampling(repetition_penalty=0.0),
        Sampling(presence_penalty=float("-inf")),
        Sampling(logprobs=-1),
        Sampling(logprobs=21),
        Sampling(min_tokens=-1),
        Sampling(logit_bias=(LogitBias(100, 1.0),)),
        Sampling(logit_bias=(LogitBias(-1, 1.0),)),
        Sampling(logit_bias=(LogitBias(1, float("nan")),)),
        Sampling(logit_bias=(LogitBias(1, float("-inf")),)),
        Sampling(logit_bias=(LogitBias(1, 100.5),)),
        Sampling(logit_bias=(LogitBias(1, 0.5),) * 1025),
        Sampling(temperature=2.5),
        Sampling(temperature=float("inf")),
        Sampling(top_p=1.5),
        Sampling(top_p=float("nan")),
        Sampling(min_p=2.0),
        Sampling(min_p=float("nan")),
        Sampling(top_k=101),
        Sampling(presence_penalty=1e30),
        Sampling(frequency_penalty=-2.5),
        Sampling(repetition_penalty=1e300),
        Sampling(repetition_penalty=float("nan")),
        Sampling(min_tokens=2**40),
    ],
)
def test_sampling_that_no_step_can_carry_out_is_refused_for_good(sampling: Sampling) -> None:
    fault = fault_of(dataclasses.replace(SUBMIT, sampling=sampling), vocab_size=100)

    assert fault is not None
    assert not fault.retryable


@pytest.mark.parametrize(
    "retention",
    [
        RetentionConfig(decode=Retention(priority=101)),
        RetentionConfig(decode=Retention(duration_s=0.0)),
        RetentionConfig(ranges=(TokenRange(0, None, Retention(priority=-1)),)),
        RetentionConfig(ranges=(TokenRange(0, None, Retention(duration_s=float("nan"))),)),
    ],
)
def test_a_priority_or_duration_that_no_pool_can_hold_is_refused(retention: RetentionConfig) -> None:
    assert fault_of(dataclasses.replace(SUBMIT, retention=retention), vocab_size=100) is not None


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, top_p=0.0, min_p=0.0),
        Sampling(temperature=2.0, top_p=1.0, min_p=1.0, top_k=100, repetition_penalty=10.0),
        Sampling(presence_penalty=-2.0, frequency_penalty=2.0, repetition_penalty=0.01, logprobs=20),
        Sampling(logit_bias=(LogitBias(0, -100.0), LogitBias(99, 100.0))),
    ],
)
def test_the_ends_of_every_range_are_in_order(sampling: Sampling) -> None:
    assert fault_of(dataclasses.replace(SUBMIT, sampling=sampling), vocab_size=100) is None


@pytest.mark.parametrize("token_range", [(-1, 4), (4, 4), (0, 2**31), (2**31, None)])
def test_a_token_range_that_is_none_is_refused(token_range: tuple[int, int | None]) -> None:
    retention = RetentionConfig(ranges=(TokenRange(*token_range, Retention()),))

    assert fault_of(dataclasses.replace(SUBMIT, retention=retention), vocab_size=100) is not None


def test_more_token_ranges_than_a_client_may_send_are_refused() -> None:
    ranges = tuple(TokenRange(at, at + 1, Retention()) for at in range(65))

    assert fault_of(dataclasses.replace(SUBMIT, retention=RetentionConfig(ranges[:64])), vocab_size=100) is None
    assert fault_of(dataclasses.replace(SUBMIT, retention=RetentionConfig(ranges)), vocab_size=100) is not None


@pytest.mark.parametrize("max_tokens", [0, -1, 2**31])
def test_a_number_of_tokens_that_no_request_can_have_is_refused(max_tokens: int) -> None:
    assert fault_of(dataclasses.replace(SUBMIT, max_tokens=max_tokens), vocab_size=100) is not None


def test_a_salt_of_any_length_is_not_hashed_and_its_refusal_does_not_show_it() -> None:
    fault = fault_of(dataclasses.replace(SUBMIT, cache_salt="secret" * 1000), vocab_size=100)

    assert fault is not None
    assert "secret" not in fault.message


def test_no_salt_and_a_salt_are_in_order_and_an_empty_one_is_not() -> None:
    assert fault_of(dataclasses.replace(SUBMIT, cache_salt="a"), 100) is None
    assert fault_of(dataclasses.replace(SUBMIT, cache_salt=""), 100) is not None


def test_tokens_are_little_endian_words() -> None:
    assert unpacked(b"\x01\x00\x00\x00\x00\x01\x00\x00") == (1, 256)


def test_a_seed_that_was_asked_for_is_kept_and_fits_64_bits() -> None:
    assert chosen_seed(7, b"\xff" * 8) == 7
    assert chosen_seed(-1, b"") == chosen_seed(2**64 - 1, b"") == 2**64 - 1
    assert chosen_seed(None, b"\xff" * 8) == 2**64 - 1
