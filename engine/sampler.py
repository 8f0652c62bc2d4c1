"""Chooses one token for each sequence of a step, from its logits and its own parameters alone.

What a sequence gets does not depend on its company: every row is computed by the same operations whatever the batch,
and the only randomness is one number per token, from a counter-based generator keyed by seed and output index.

The order is fixed: repetition penalty (over prompt and output; positive logits are divided, negative ones multiplied,
as in CTRL and transformers), frequency and presence penalties (over the output, as in the OpenAI API), logit bias,
end-of-sequence tokens forbidden below `min_tokens`; log-probabilities are of these logits at temperature 1. Then
temperature, min_p, top_k, top_p (the smallest set of most likely tokens whose share of what is left reaches top_p)
and the draw: the first token, by id, at which the cumulated probability passes the random number. By id rather than by
rank, because two tokens that are nearly equal then keep their places when logits differ in the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.plan import SampleRequest, has_penalties
from engine.protocol import TokenLogprob, TopLogprob

_STREAM = 0x68616C6F636C696E  # Sets this use of a seed apart from any other.
# How many of the most likely tokens are looked at before the whole vocabulary is sorted: 0.1 ms for the first size (up
# to a 64th of the vocabulary torch keeps a heap), 0.6 for the second, 4 for all of 49,152. A row's own parameters and
# logits choose, never its company.
_CANDIDATES = (512, 8192)


@dataclass(frozen=True, slots=True)
class Choice:
    """One token, and its log-probabilities where they were asked for."""

    token: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Broken:
    """Nothing can be chosen for this sequence; the sentence says why."""

    reason: str


Scan = Callable[[torch.Tensor], tuple[list[int], list[bool]]]
"""Of each row, the first of its highest logits, and whether all of it is finite; where not, the first is anything."""


def scan(logits: torch.Tensor) -> tuple[list[int], list[bool]]:
    """The plain `Scan`, for every device."""
    # Both extremes of a row are finite only if all of it is; NaN wins over any number.
    low, high = torch.aminmax(logits, dim=-1)
    return logits.argmax(dim=-1).tolist(), (low.isfinite() & high.isfinite()).tolist()


def sample(
    logits: torch.Tensor, requests: Sequence[SampleRequest], eos_token_ids: Sequence[int], scan: Scan = scan
) -> list[Choice | Broken]:
    """One outcome per row of `logits` (float32, `[row, vocabulary]`, changed in place)."""
    highest, finite = scan(logits)
    reasons = [None if good else "the model's logits are not finite numbers" for good in finite]
    for row, request in enumerate(requests):
        if reasons[row] is None and not _is_plain(request):
            reasons[row] = _adjust(logits[row], request, eos_token_ids)
            if reasons[row] is None and request.sampling.temperature == 0:
                highest[row] = int(logits[row].argmax())

    whole = [row for row, reason in enumerate(reasons) if reason is None]
    tokens = {row: highest[row] for row in whole if requests[row].sampling.temperature == 0}
    drawn = [row for row in whole if requests[row].sampling.temperature != 0]
    if drawn:
        tokens.update(_draw(logits, requests, drawn))
    logprobs = _logprobs(logits, requests, tokens)

    outcomes: list[Choice | Broken] = []
    for row, reason in enumerate(reasons):
        outcomes.append(Broken(reason) if reason is not None else Choice(tokens[row], logprobs.get(row)))
    return outcomes


def uniform(seed: int, output_index: int) -> float:
    """The random number in [0, 1) of one token: the same on every machine and in every version."""
    # As uint64 from the start: numpy makes floats of a list that mixes large and small integers.
    key = np.array([seed % 2**64, _STREAM], np.uint64)
    counter = np.array([output_index, 0, 0, 0], np.uint64)
    raw = int(np.random.Philox(key=key, counter=counter).random_raw())
    return (raw >> 11) * 2.0**-53


def _is_plain(request: SampleRequest) -> bool:
    """Whether the logits stay as they are."""
    return not has_penalties(request.sampling) and not request.sampling.logit_bias and request.eos_allowed


def _adjust(logits: torch.Tensor, request: SampleRequest, eos_token_ids: Sequence[int]) -> str | None:
    """Applies penalties, bias and forbidden tokens to one row in place; says why where it cannot."""
    sampling, vocabulary = request.sampling, logits.shape[-1]
    device = logits.device
    if sampling.repetition_penalty != 1.0:
        seen, _ = _counted((*request.prompt, *request.output), vocabulary, device)
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0:
        seen, counts = _counted(request.output, vocabulary, device)
        logits[seen] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for bias in sampling.logit_bias:
        if not 0 <= bias.token < vocabulary:
            return f"logit_bias names token {bias.token}; the vocabulary has {vocabulary}"
        logits[bias.token] += bias.bias
    if not request.eos_allowed:
        logits[[token for token in eos_token_ids if 0 <= token < vocabulary]] = -torch.inf
    if not bool(logits.amax().isfinite()):
        return "no token is left to choose from after penalties and bias"
    return None


def _counted(tokens: Sequence[int], vocabulary: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The different tokens and how often each occurs."""
    ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
    known = ids < vocabulary
    return torch.from_numpy(ids[known]).to(device), torch.from_numpy(counts[known].astype(np.float32)).to(device)


def _draw(logits: torch.Tensor, requests: Sequence[SampleRequest], rows: Sequence[int]) -> dict[int, int]:
    """Draws for `rows`, those that need the same treatment together."""
    weights = _weights(logits, requests, rows)
    numbers = torch.tensor(
        [uniform(requests[row].seed, requests[row].output_index) for row in rows],
        dtype=torch.float64,
        device=logits.device,
    )
    kinds: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        kinds.setdefault(_candidates_of(requests[row], logits.shape[-1]), []).append(place)

    tokens: dict[int, int] = {}
    for num_candidates, places in kinds.items():
        picked = _pick(weights[places], numbers[places], [requests[rows[place]] for place in places], num_candidates)
        tokens.update(zip((rows[place] for place in places), picked, strict=True))
    return tokens


def _weights(logits: torch.Tensor, requests: Sequence[SampleRequest], rows: Sequence[int]) -> torch.Tensor:
    """exp((logit − maximum) ÷ temperature) in float64, the most likely token 1, with min_p applied.

    The maximum is taken off first, so that no temperature, however small, can overflow.
    """
    chosen = logits[list(rows)].double()
    chosen -= chosen.amax(dim=-1, keepdim=True)
    temperatures = [requests[row].sampling.temperature for row in rows]
    chosen /= torch.tensor(temperatures, dtype=torch.float64, device=logits.device).unsqueeze(1)
    weights = chosen.exp_()
    min_p = [requests[row].sampling.min_p for row in rows]
    if any(min_p):
        floor = torch.tensor(min_p, dtype=torch.float64, device=logits.device).unsqueeze(1)
        weights.masked_fill_(weights < floor, 0.0)
    return weights


def _candidates_of(request: SampleRequest, vocabulary: int) -> int:
    """How many of the most likely tokens to look at first; 0: all, unsorted, where nothing is cut off by rank."""
    top_k, top_p = request.sampling.top_k, request.sampling.top_p
    cuts_by_rank = 0 < top_k < vocabulary
    if not cuts_by_rank and top_p >= 1.0:
        return 0
    return _more_candidates(top_k - 1 if cuts_by_rank else 0, vocabulary)


def _more_candidates(num_candidates: int, vocabulary: int) -> int:
    """The next larger number of candidates; at the end, all."""
    return next((size for size in _CANDIDATES if num_candidates < size < vocabulary), vocabulary)


def _pick(
    weights: torch.Tensor, numbers: torch.Tensor, requests: Sequence[SampleRequest], num_candidates: int
) -> list[int]:
    if num_candidates == 0:
        return _invert(weights, numbers).tolist()
    vocabulary = weights.shape[-1]
    ranked, ids = weights.topk(num_candidates, dim=-1)
    kept, complete = _keep(ranked, weights, requests)
    if num_candidates == vocabulary or complete.all():
        return _invert_by_id(kept, ids, numbers)
    # The nucleus of some rows is larger than the candidates: those rows, and only they, look at more.
    done, rest = complete.nonzero().flatten().tolist(), (~complete).nonzero().flatten().tolist()
    more = _more_candidates(num_candidates, vocabulary)
    tokens = dict(zip(done, _invert_by_id(kept[done], ids[done], numbers[done]), strict=True))
    tokens |= zip(rest, _pick(weights[rest], numbers[rest], [requests[row] for row in rest], more), strict=True)
    return [tokens[row] for row in range(len(requests))]


def _keep(
    ranked: torch.Tensor, weights: torch.Tensor, requests: Sequence[SampleRequest]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ranked weights with what top_k and top_p cut off set to 0, and which rows needed no further candidates."""
    device, vocabulary = weights.device, weights.shape[-1]
    top_k = torch.tensor(
        [r.sampling.top_k if 0 < r.sampling.top_k < vocabulary else vocabulary for r in requests], device=device
    ).unsqueeze(1)
    top_p = torch.tensor([r.sampling.top_p for r in requests], dtype=torch.float64, device=device).unsqueeze(1)
    by_rank = ranked.masked_fill(torch.arange(ranked.shape[-1], device=device) >= top_k, 0.0)
    cumulated = by_rank.cumsum(dim=-1)
    limited = top_k <= ranked.shape[-1]
    total = torch.where(limited, cumulated[:, -1:], weights.sum(dim=-1, keepdim=True))
    wanted = top_p * total
    # A token stays if what comes before it does not reach top_p yet; so the first always stays.
    before = cumulated - by_rank
    outside = (before >= wanted) & (top_p < 1.0)
    outside[:, 0] = False
    complete = (limited | (cumulated[:, -1:] >= wanted)).squeeze(1)
    return by_rank.masked_fill(outside, 0.0), complete


def _invert_by_id(kept: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor) -> list[int]:
    ordered, order = ids.sort(dim=-1)
    places = _invert(kept.gather(-1, order), numbers)
    return ordered.gather(-1, places.unsqueeze(1)).squeeze(1).tolist()


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The first place of each row at which the cumulated weight passes the number's share of the total; such a place
    has a weight of its own, so nothing that was cut off can be drawn."""
    cumulated = weights.cumsum(dim=-1)
    total = cumulated[:, -1]
    target = torch.minimum(numbers * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulated, target.unsqueeze(1), right=True).squeeze(1)


def _logprobs(
    logits: torch.Tensor, requests: Sequence[SampleRequest], tokens: dict[int, int]
) -> dict[int, TokenLogprob]:
    asked = [row for row in tokens if requests[row].sampling.logprobs is not None]
    found: dict[int, TokenLogprob] = {}
    for row in asked:
        values = logits[row].double()
        values = values - values.logsumexp(dim=-1)
        count = min(requests[row].sampling.logprobs or 0, len(values))
        top, ids = values.topk(count)
        found[row] = TokenLogprob(
            logprob=float(values[tokens[row]]),
            top=tuple(
                TopLogprob(token, logprob)
                for token, logprob in zip(ids.tolist(), top.tolist(), strict=True)
                if logprob != -float("inf")  # A forbidden token is not among the likely ones, however few are left.
            ),
        )
    return found
