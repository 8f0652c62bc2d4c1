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


def test_no_salt_and_a_salt_are_in_order_and_an_empty_one_is_not() -> None:
    assert fault_of(dataclasses.replace(SUBMIT, cache_salt="a"), 100) is None
    assert fault_of(dataclasses.replace(SUBMIT, cache_salt=""), 100) is not None


def test_tokens_are_little_endian_words() -> None:
    assert unpacked(b"\x01\x00\x00\x00\x00\x01\x00\x00") == (1, 256)


def test_a_seed_that_was_asked_for_is_kept_and_fits_64_bits() -> None:
    assert chosen_seed(7, b"\xff" * 8) == 7
    assert chosen_seed(-1, b"") == chosen_seed(2**64 - 1, b"") == 2**64 - 1
    assert chosen_seed(None, b"\xff" * 8) == 2**64 - 1
