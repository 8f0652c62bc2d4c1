"""The sampler against a naive one in numpy, and what must hold whatever the company, the temperature or the logits."""

from __future__ import annotations

import engine.environment  # noqa: F401  isort: skip

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.plan import SampleRequest
from engine.protocol import LogitBias, Sampling
from engine.row_scan import scan_compiled
from engine.sampler import Broken, Choice, Scan, sample, scan, uniform

EOS = (2,)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[float], SampleRequest]:
    """One row of logits, with ties, and any parameters."""
    vocabulary = 40
    level = st.one_of(st.floats(-30, 30, width=32), st.sampled_from((0.0, 1.0, 5.0)))
    token = st.integers(0, vocabulary - 1)
    sampling = Sampling(
        temperature=draw(st.sampled_from((0.0, 1e-5, 0.3, 1.0, 2.0, 1e6))),
        top_p=draw(st.sampled_from((1.0, 0.999, 0.9, 0.5, 0.01, 1e-9))),
        top_k=draw(st.sampled_from((0, 1, 2, 7, 39, 40, 100))),
        min_p=draw(st.sampled_from((0.0, 0.01, 0.3, 1.0))),
        presence_penalty=draw(st.sampled_from((0.0, 2.0, -2.0))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.7, -2.0))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.3, 0.5))),
        logit_bias=tuple(
            LogitBias(token_id, bias)
            for token_id, bias in draw(
                st.dictionaries(token, st.sampled_from((-100.0, 100.0, 1.5)), max_size=3)
            ).items()
        ),
    )
    request = SampleRequest(
        sampling=sampling,
        seed=draw(st.integers(-(2**70), 2**70)),
        output_index=draw(st.integers(0, 2**32)),
        prompt=tuple(draw(st.lists(token, max_size=6))),
        output=tuple(draw(st.lists(token, max_size=6))),
        eos_allowed=draw(st.booleans()),
    )
    return draw(st.lists(level, min_size=vocabulary, max_size=vocabulary)), request


@pytest.mark.parametrize("path", [scan, scan_compiled])
@settings(max_examples=60, deadline=None)
@given(
    vocabulary=st.sampled_from((1, 7, 2047, 2048, 2049, 10_000)),
    spoilt=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9999), st.sampled_from((math.nan, math.inf, -math.inf)))
    ),
    level=st.sampled_from((1.0, 1e30, 0.0)),
    seed=st.integers(0, 2**31),
)
def test_the_highest_of_each_row_is_found_and_what_is_not_finite_is_seen(
    path: Scan, vocabulary: int, spoilt: list[tuple[int, int, float]], level: float, seed: int
) -> None:
    logits = np.random.default_rng(seed).integers(-50, 50, (4, vocabulary)).astype(np.float32) * np.float32(level)
    for row, place, value in spoilt:
        logits[row, place % vocabulary] = value

    highest, finite = path(torch.from_numpy(logits))

    assert finite == np.isfinite(logits).all(axis=1).tolist()
    for row in np.flatnonzero(finite):
        assert highest[row] == int(logits[row].argmax())


@settings(max_examples=150, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=5))
def test_every_row_gets_what_the_naive_sampler_gives_it_alone(batch: list[tuple[list[float], SampleRequest]]) -> None:
    logits = torch.tensor([row for row, _ in batch], dtype=torch.float32)

    together = sample(logits.clone(), [request for _, request in batch], EOS)

    for index, (_, request) in enumerate(batch):
        alone = sample(logits[index : index + 1].clone(), [request], EOS)[0]
        assert isinstance(alone, Choice)
        assert together[index] == alone
        assert alone.token in _naive(logits[index].numpy(), request)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert _tokens([[0.0, 3.0, 1.0]], temperature=0.0) == [1]


def test_draws_follow_the_probabilities() -> None:
    weights = np.array([0.5, 0.3, 0.15, 0.05])
    logits = torch.tensor(np.log(weights), dtype=torch.float32).repeat(4000, 1)

    outcomes = sample(logits, [_request(seed=seed, temperature=1.0) for seed in range(4000)], EOS)

    counts = np.bincount([_token(outcome) for outcome in outcomes], minlength=4)
    assert np.abs(counts / 4000 - weights).max() < 0.03


def test_a_token_depends_on_seed_and_index_only() -> None:
    logits = torch.zeros(1, 1000)

    drawn = [_token(sample(logits.clone(), [_request(seed=s, index=i)], EOS)[0]) for s in range(20) for i in range(20)]
    again = [_token(sample(logits.clone(), [_request(seed=s, index=i)], EOS)[0]) for s in range(20) for i in range(20)]

    assert drawn == again
    assert len(set(drawn)) > 250


def test_seeds_that_differ_in_one_bit_give_different_numbers() -> None:
    """numpy turned a list of a large and a small integer into floats, and neighbouring large seeds into one."""
    seeds = [2**63 + 1, 2**63 + 2, 2**64 - 1, 2**64 - 2, -3, 0, 1]

    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)


def test_the_random_numbers_are_pinned() -> None:
    """Text for a seed must survive every upgrade; these numbers come from numpy's Philox and may never change."""
    assert [uniform(0, 0), uniform(0, 1), uniform(12345, 7), uniform(-1, 0)] == pytest.approx(PINNED, abs=0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-5, 1e300])
def test_no_temperature_overflows(temperature: float) -> None:
    logits = torch.full((1, 50), -1e30)
    logits[0, 7], logits[0, 8] = 3e4, 2.9e4

    outcome = sample(logits, [_request(temperature=temperature)], EOS)[0]

    assert isinstance(outcome, Choice)
    assert temperature > 1 or outcome.token == 7


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_broken_row_fails_alone_and_says_why(poison: float, temperature: float) -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 50.0
    logits[1, 5] = poison

    outcomes = sample(logits, [_request(temperature=temperature, logprobs=2) for _ in range(3)], EOS)

    assert isinstance(outcomes[1], Broken)
    assert "not finite" in outcomes[1].reason
    assert [_token(outcomes[0]), _token(outcomes[2])] == [4, 4]


def test_a_bias_of_100_decides_and_of_minus_100_forbids() -> None:
    logits = [[9.0, 1.0, 0.0, 0.0]]

    assert _tokens(logits, logit_bias=(LogitBias(3, 100.0),)) == [3]
    assert _tokens(logits, logit_bias=(LogitBias(0, -100.0),), top_k=1) == [1]


def test_a_bias_outside_the_vocabulary_fails_its_sequence_only() -> None:
    requests = [_request(logit_bias=(LogitBias(10, 1.0),)), _request(logit_bias=(LogitBias(-1, 1.0),)), _request()]

    outcomes = sample(torch.zeros(3, 10), requests, EOS)

    assert isinstance(outcomes[0], Broken)
    assert isinstance(outcomes[1], Broken)
    assert isinstance(outcomes[2], Choice)


def test_end_of_sequence_is_never_chosen_while_it_is_not_allowed() -> None:
    logits = [[0.0, 1.0, 50.0, 0.5]]

    assert _tokens(logits, temperature=0.0) == [2]
    assert _tokens(logits, temperature=0.0, eos_allowed=False) == [1]
    assert _tokens(logits, eos_allowed=False, logit_bias=(LogitBias(2, 100.0),)) != [2]


def test_a_sequence_with_nothing_left_to_choose_fails() -> None:
    request = _request(eos_allowed=False)

    outcome = sample(torch.zeros(1, 3), [request], (0, 1, 2))[0]

    assert isinstance(outcome, Broken)


def test_penalties_count_what_they_say_they_count() -> None:
    logits = [[5.0, 4.9, -1.0, 0.0]]

    assert _tokens(logits, temperature=0.0, presence_penalty=0.2, output=(0,)) == [1]
    assert _tokens(logits, temperature=0.0, presence_penalty=0.2, prompt=(0,)) == [0]
    assert _tokens(logits, temperature=0.0, frequency_penalty=0.04, output=(0, 0)) == [0]
    assert _tokens(logits, temperature=0.0, frequency_penalty=0.04, output=(0, 0, 0)) == [1]
    assert _tokens(logits, temperature=0.0, repetition_penalty=1.1, prompt=(0,)) == [1]


def test_log_probabilities_are_those_before_temperature_and_after_penalties() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    request = _request(temperature=0.0, logprobs=2, logit_bias=(LogitBias(3, 2.5),))
    expected = torch.log_softmax(torch.tensor([2.0, 1.0, 0.0, 1.5]), 0).tolist()

    outcome = sample(logits, [request], EOS)[0]

    assert isinstance(outcome, Choice)
    assert outcome.logprob is not None
    assert outcome.token == 0
    assert outcome.logprob.logprob == pytest.approx(expected[0], abs=1e-6)
    assert [top.token for top in outcome.logprob.top] == [0, 3]
    assert [top.logprob for top in outcome.logprob.top] == pytest.approx([expected[0], expected[3]], abs=1e-6)


def test_log_probabilities_come_only_where_they_were_asked_for_and_are_always_numbers() -> None:
    requests = [_request(), _request(logprobs=0), _request(logprobs=20, eos_allowed=False)]

    outcomes = sample(torch.zeros(3, 4), requests, EOS)

    logprobs = [outcome.logprob for outcome in outcomes if isinstance(outcome, Choice)]
    assert logprobs[0] is None
    assert logprobs[1] is not None
    assert logprobs[1].top == ()
    assert logprobs[2] is not None
    assert {top.token for top in logprobs[2].top} == {0, 1, 3}
    assert all(math.isfinite(top.logprob) for top in logprobs[2].top)


@pytest.mark.parametrize("top_k", [0, 15000])
def test_a_nucleus_larger_than_the_first_candidates_is_found(top_k: int) -> None:
    """With 20,000 equal tokens, 0.9 of the mass is 18,000 of them, or 13,500 of 15,000: more than the candidates that
    are looked at first, and than those looked at then. The last row has its nucleus at once."""
    logits = torch.zeros(200, 20000)
    logits[-1, 5] = 50.0
    together = [_request(seed=seed, top_p=0.9, top_k=top_k) for seed in range(200)]

    outcomes = sample(logits.clone(), together, EOS)

    assert len({_token(outcome) for outcome in outcomes}) > 180
    assert _token(outcomes[-1]) == 5
    assert outcomes[:3] == [sample(logits[:1].clone(), [request], EOS)[0] for request in together[:3]]


def _naive(logits: np.ndarray, request: SampleRequest) -> set[int]:
    """The tokens that the documented rules allow for this row and number: one, or a few where ties at the edge of a
    cut leave open which of equal tokens stay."""
    sampling = request.sampling
    values = logits.astype(np.float32).copy()
    seen = {*request.prompt, *request.output}
    for token in seen:
        values[token] = (
            values[token] / np.float32(sampling.repetition_penalty)
            if values[token] > 0
            else values[token] * np.float32(sampling.repetition_penalty)
        )
    for token in set(request.output):
        count = request.output.count(token)
        values[token] -= np.float32(sampling.frequency_penalty * count + sampling.presence_penalty)
    for bias in sampling.logit_bias:
        values[bias.token] += np.float32(bias.bias)
    if not request.eos_allowed:
        values[list(EOS)] = -np.inf
    if sampling.temperature == 0:
        return set(np.flatnonzero(values >= values.max() - 1e-5).tolist())

    wide = values.astype(np.float64)
    weights = np.exp((wide - wide.max()) / sampling.temperature)
    if sampling.min_p:
        weights[weights < sampling.min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    keep = sampling.top_k if 0 < sampling.top_k < len(weights) else len(weights)
    limited = order[:keep]
    if sampling.top_p < 1:
        before = np.cumsum(weights[limited]) - weights[limited]
        keep = max(1, int((before < sampling.top_p * weights[limited].sum()).sum()))
    edge = weights[order[keep - 1]]
    tied = np.flatnonzero(np.isclose(weights, edge, rtol=1e-5))
    kept = np.where(weights >= edge, weights, 0.0)
    if (
        len(tied) > 1
        or np.isclose(np.cumsum(kept) / kept.sum(), uniform(request.seed, request.output_index), rtol=1e-5).any()
    ):
        return set(np.flatnonzero(weights >= edge * (1 - 1e-5)).tolist())
    cumulated = np.cumsum(kept)
    number = uniform(request.seed, request.output_index)
    return {int(np.searchsorted(cumulated, number * cumulated[-1], side="right"))}


def _request(
    seed: int = 1, index: int = 0, eos_allowed: bool = True, prompt: tuple = (), output: tuple = (), **sampling: Any
) -> SampleRequest:
    return SampleRequest(Sampling(**sampling), seed, index, prompt, output, eos_allowed)


def _tokens(logits: list[list[float]], **fields: Any) -> list[int]:
    return [_token(outcome) for outcome in sample(torch.tensor(logits), [_request(**fields) for _ in logits], EOS)]


def _token(outcome: Choice | Broken) -> int:
    assert isinstance(outcome, Choice)
    return outcome.token


PINNED = [0.637848253043111, 0.10346427758436905, 0.46284980836468714, 0.7407058975628007]
