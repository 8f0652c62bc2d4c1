"""Chooses how many tokens the next step may have, and who sits it out, from what steps were measured to cost.

A running stream's pause between two tokens is one step, so a long prompt beside it comes in chunks; the smaller they are,
the more of each step goes into reading the weights. `decode_pace` is the trade: a step may take that many times as long
as it would without prefill. Of the time that prefill gets it keeps (decode_pace − 1) ÷ decode_pace. Where nobody
decodes, chunks are as large as pays; where several prompts wait, not so large that those who could have had their first
token wait for the others'. Measuring steps is for the loop, filling them for the planner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from engine.plan import StepPlan

YOUNG_TOKENS: Final = 8
"""Tokens of an answer during which it is young: the prompts that came together with its own still wait for theirs."""
_YOUNG_PACE: Final = 4.0
"""Beside none but young answers a step may take so many times as long as `decode_pace` says: a burst is over sooner, and
each of its answers pays for it at its very beginning."""
_NEW_PACE: Final = 8.0
"""So many times as long an answer may wait for its second token, sitting steps out in which others have their first."""
_NEW_PAUSE_S: Final = 0.5
"""But no longer than this: whoever reads the first token should not think that it is the last."""
SHARE_OF_OTHERS: Final = 4
"""One part in so many of what prompts get in a step goes to those whose turn it is not; the planner says when not."""
LEAST_PREFILL: Final = 8
"""Tokens that prompts get in a step, whatever the pace: none of them stands still."""
_LARGE_ENOUGH: Final = 16
"""A chunk that costs so many times what any step costs: twice as large a one would win three per cent."""
_LEAST_ALONE: Final = 256
"""Tokens of a chunk from which products are about as quick as they get: a prompt that has the engine to itself, which can
be cancelled between two layers, gets no less."""
_TILE, _PART_OF_TILE = 12, 4
"""Rows that products on the CPU take at once, and in what is left of them; single ones take twice as long for each."""
_LEAVEABLE: Final = 4
"""One part in so many of a chunk may be left out beside decodes, where what is left then goes at a better rate."""
_TRIED: Final = 16
"""Sizes that are looked at for it."""
_PRIOR: Final = (16.0, 1.2, 1 / 1200, 1.0, 1 / 2400, 1 / 100)
"""What to begin with, in units of a prefilled token: a small model on a CPU. Measurements put it right."""
_GAIN: Final = 0.2
"""How much of a step's surprise is believed."""
_COMMON: Final = 0.1
"""How much of it is taken for news of the machine, which makes everything slower or quicker, rather than of one cost."""
_ENOUGH: Final = 4
"""Steps of a kind after which one that took very long, or hardly any time, is an accident rather than news."""
_ACCIDENT: Final = math.log(1.5)
_TOLD: Final = 100
_CROWD: Final = 32
"""Prompts that are looked at to choose a chunk: what is best for so many is for more."""
_UNSURE_AFTER: Final = 32
"""Steps with prefill beside decodes, after which what the decodes take alone is measured once more: of steps that never
come without the other, nobody can say what each costs."""
_GAIN_ALONE: Final = 0.5
"""How much of that measurement's surprise is believed: for long it is the only one."""
_OF_ALL: Final = (1.0,) * 6
_OF_PREFILL: Final = (0.0, 0.0, 0.0, 1.0, 1.0, 1.0)
_SHORTEST_S, _LONGEST_S = 1e-7, 1e4
_LEAST_COST, _MOST_COST = 1e-15, 1e5


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step's time depends on. A context is the number of tokens attended to, summed over the tokens that attend;
    `prefill_read` is the number of tokens before each chunk, which are read once for all of it."""

    num_decodes: int = 0
    decode_context: int = 0
    num_prefill: int = 0
    prefill_context: int = 0
    prefill_read: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the next step could hold: those that decode; from which position on the next prompt's chunk would go, and how
    many tokens prompts have left to compute, in the order of their turns; how many of those that decode are young, and how
    many new, with their first token and no other; and how long ago it is, at the most, that one of these had it."""

    num_decodes: int = 0
    decode_context: int = 0
    prefill_start: int = 0
    left: Sequence[int] = ()
    num_young: int = 0
    num_new: int = 0
    new_context: int = 0
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSize:
    """What the next step may have: tokens, those of decodes included, and whether new answers sit it out."""

    num_tokens: int
    sits_out: bool = False


def work_of(plan: StepPlan) -> StepWork:
    """A plan as what it costs; a chunk of one token counts as a decode."""
    num_decodes = decode_context = num_prefill = prefill_context = prefill_read = 0
    for chunk in plan.chunks:
        count = len(chunk.tokens)
        if count == 1:
            num_decodes += 1
            decode_context += chunk.start + 1
        else:
            num_prefill += count
            prefill_context += count * chunk.start + count * (count + 1) // 2
            prefill_read += chunk.start
    return StepWork(num_decodes, decode_context, num_prefill, prefill_context, prefill_read)


class StepRates:
    """What a step costs, as learnt: so much for reading the weights, for each decode and each prefilled token, for each
    token that either attends to, and for each that is read for a chunk.

    Weights are read while their products are computed, so of the two it is the longer that counts, and a little of the
    other: `√(weights² + products²)`, about what decodes of 1, 4 and 16 streams and chunks of 20 to 500 tokens were seen to
    take. What attention takes comes on top of it. After each step costs are scaled by the surprise: part of it is taken for the machine's, which others may use, and
    scales all costs alike; the rest goes to each by its part in the step. So costs stay positive, nothing has to be
    remembered of single steps, and what work costs that has not been seen for long keeps its proportion to the rest.

    `attended_at_once` is how many tokens of a chunk the device attends at once: it takes as long for some of them as for all.
    """

    def __init__(self, attended_at_once: float = 1.0) -> None:
        self._attended_at_once = attended_at_once
        self._costs = list(_PRIOR)
        self._num_seen = {True: 0, False: 0}
        self._num_mixed = 0

    def begin_with(self, measured: Sequence[tuple[StepWork, float]]) -> None:
        """Steps that were run in order to learn from them: told again and again, until each is what is expected."""
        usable = [(work, seconds) for work, seconds in measured if _is_measurement(work, seconds)]
        for work, seconds in usable:
            self.note(work, seconds)
        for work, seconds in usable * _TOLD:
            self._believe(work, self._surprise(work, seconds) / 2, common=0.0)

    def note(self, work: StepWork, seconds: float) -> None:
        """One step that ran to its end."""
        if not _is_measurement(work, seconds):
            return
        has_prefill = work.num_prefill > 0
        is_mixed = has_prefill and work.num_decodes > 0
        gain = _GAIN_ALONE if self.is_unsure and not has_prefill else _GAIN
        if is_mixed:
            self._num_mixed += 1
        elif not has_prefill:
            self._num_mixed = 0
        seen = self._num_seen[has_prefill]
        surprise = self._surprise(work, seconds)
        if not self.is_known:
            self._scale([surprise] * len(_PRIOR))
        elif seen < _ENOUGH:
            self._believe(work, surprise / (1 + seen), common=0.0)
        else:
            surprise = gain * max(-_ACCIDENT, min(_ACCIDENT, surprise))
            # What decodes cost is learnt of steps without prefill, or what prefill costs would in part be taken for theirs.
            shares = _OF_PREFILL if is_mixed and self._num_seen[False] else _OF_ALL
            self._believe(work, surprise, common=_COMMON, shares=shares)
        self._num_seen[has_prefill] += 1

    @property
    def is_known(self) -> bool:
        """Whether any step has been seen."""
        return any(self._num_seen.values())

    def seconds(self, work: StepWork) -> float:
        """How long a step with this work is expected to take."""
        return sum(self._parts(work))

    def uneven_seconds(self, work: StepWork) -> float:
        """As `seconds`, where what is too few for a tile takes as long as it does, and not what it does in the mean."""
        weights, decodes, decode_context, prefill, prefill_context, read = self._parts(work)
        rows = work.num_decodes + work.num_prefill
        products = (decodes + prefill) * _rows_of_tiles(rows) / max(1, rows)
        at_once = math.ceil(work.num_prefill / self._attended_at_once) * self._attended_at_once
        attention = decode_context + prefill_context * at_once / max(1, work.num_prefill)
        return weights + products + attention + read

    @property
    def is_unsure(self) -> bool:
        """Whether it is long ago that decodes ran alone."""
        return self._num_mixed >= _UNSURE_AFTER

    @property
    def fixed_s(self) -> float:
        """What a step costs whatever is in it."""
        return self._costs[0]

    def decode_s(self, context: float) -> float:
        """What one more decode costs that attends to so many tokens, where weights are not what is waited for."""
        return self._costs[1] + self._costs[2] * context

    def prefill_s(self, start: int) -> float:
        """What one more token of a prompt costs at this position, likewise."""
        return self._costs[3] + self._costs[4] * start

    def _surprise(self, work: StepWork, seconds: float) -> float:
        return math.log(min(max(seconds, _SHORTEST_S), _LONGEST_S) / self.seconds(work))

    def _believe(self, work: StepWork, surprise: float, common: float, shares: Sequence[float] = _OF_ALL) -> None:
        """Expect so much more of this work from now on, to first order, by costs that have a share in it."""
        parts = self._parts(work)  # Each is also what the step's time changes by, where its cost changes.
        expected = sum(parts)
        own = (1 - common) * surprise * expected / sum(part * part for part in parts)
        moves = [own * part * share for part, share in zip(parts, shares, strict=True)]
        self._scale([common * surprise + move for move in moves])

    def _scale(self, moves: Sequence[float]) -> None:
        self._costs = [
            min(max(cost * math.exp(max(-9.0, min(9.0, move))), _LEAST_COST), _MOST_COST)
            for cost, move in zip(self._costs, moves, strict=True)
        ]

    def _parts(self, work: StepWork) -> list[float]:
        amounts = (
            1,
            work.num_decodes,
            work.decode_context,
            work.num_prefill,
            work.prefill_context,
            work.prefill_read,
        )
        parts = [cost * amount for cost, amount in zip(self._costs, amounts, strict=True)]
        weights, products = parts[0], parts[1] + parts[3]
        longest = math.hypot(weights, products)
        parts[0] *= weights / longest
        parts[1] *= products / longest
        parts[3] *= products / longest
        return parts


def _is_measurement(work: StepWork, seconds: float) -> bool:
    return seconds > 0 and (work.num_decodes > 0 or work.num_prefill > 0)


def step_size(rates: StepRates, outlook: Outlook, decode_pace: float, most: int) -> StepSize:
    """Tokens that the next step may have: at least one, at most `most`. Prompts get a chunk in every step but those in
    which decodes are measured alone."""
    if not rates.is_known:
        return StepSize(most)
    if outlook.num_decodes and rates.is_unsure:
        return StepSize(min(most, outlook.num_decodes))
    if outlook.num_decodes and not outlook.left:
        # For a prompt that comes before the step is planned.
        return StepSize(min(most, outlook.num_decodes + LEAST_PREFILL))
    chunk = _large_enough(rates, outlook, most)
    if outlook.num_decodes:
        are_young = outlook.num_young == outlook.num_decodes
        pause_s = decode_pace * rates.seconds(StepWork(outlook.num_decodes, outlook.decode_context))
        others = _without_new(outlook)
        new_pause_s = min(_NEW_PACE * pause_s, _NEW_PAUSE_S)
        if are_young and _may_sit_out(rates, outlook, others, chunk, new_pause_s):
            # Room for all, should nobody have a place after all.
            chunk = max(chunk, LEAST_PREFILL, outlook.num_new)
            return StepSize(min(most, others.num_decodes + chunk), sits_out=True)
        chunk = _most_within(pause_s * (_YOUNG_PACE if are_young else 1), rates, outlook, chunk)
    chunk = max(chunk, LEAST_PREFILL)
    if outlook.num_decodes and chunk < outlook.left[0]:
        chunk = _least_wasteful(rates, outlook, min(chunk, max(1, most - outlook.num_decodes)))
    return StepSize(min(most, outlook.num_decodes + chunk))


def _without_new(outlook: Outlook) -> Outlook:
    num_others = outlook.num_decodes - outlook.num_new
    return replace(outlook, num_decodes=num_others, decode_context=outlook.decode_context - outlook.new_context)


def _may_sit_out(rates: StepRates, outlook: Outlook, others: Outlook, chunk: int, pause_s: float) -> bool:
    """Whether new answers make room for a first token, and none of them waits longer than this if the step after is
    theirs."""
    if not outlook.num_new or not outlook.left or chunk - chunk // SHARE_OF_OTHERS < outlook.left[0]:
        return False
    chunk = min(chunk, sum(outlook.left))
    return outlook.waited_s + _step_s(rates, others, chunk) + _step_s(rates, outlook, chunk) <= pause_s


def _most_within(seconds: float, rates: StepRates, outlook: Outlook, most: int) -> int:
    """The tokens of a prompt, at most `most`, with which the step beside these decodes comes nearest to this time."""
    within, beyond = 0, most + 1
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if _step_s(rates, outlook, middle) <= seconds:
            within = middle
        else:
            beyond = middle
    if within < most and _step_s(rates, outlook, beyond) - seconds < seconds - _step_s(rates, outlook, within):
        return beyond
    return within


def _least_wasteful(rates: StepRates, outlook: Outlook, chunk: int) -> int:
    """Of this chunk and those a little smaller the one of which a token costs least, decodes included."""
    fewest = max(min(chunk, LEAST_PREFILL), chunk - chunk // _LEAVEABLE, chunk - _TRIED + 1)
    sizes = range(chunk, fewest - 1, -1)
    return min(sizes, key=lambda size: rates.uneven_seconds(_work_with(outlook, size)) / size)


def _rows_of_tiles(rows: int) -> int:
    """As how many rows of whole tiles so many take."""
    whole, rest = rows - rows % _TILE, rows % _TILE
    return whole + rest + rest % _PART_OF_TILE


def _step_s(rates: StepRates, outlook: Outlook, chunk: int) -> float:
    """What a step takes with a chunk of so many tokens beside those that decode."""
    return rates.seconds(_work_with(outlook, chunk))


def _work_with(outlook: Outlook, chunk: int) -> StepWork:
    start = outlook.prefill_start
    attended = chunk * start + chunk * (chunk + 1) // 2
    return StepWork(outlook.num_decodes, outlook.decode_context, chunk, attended, start if chunk else 0)


def _large_enough(rates: StepRates, outlook: Outlook, most: int) -> int:
    """Tokens of a chunk beside no settled decodes, at most `most`.

    Several prompts have their first tokens one after another: small steps let the first of them go early, and large ones
    pay what any step costs less often. Of the chunks that end with one of them it is that with the least mean of times
    until the first token, were those that have it to sit out the rest.
    """
    fixed = rates.fixed_s / rates.prefill_s(outlook.prefill_start)
    # Nobody waits but one prompt: what a step costs anyhow may be believed too small, and its chunks with it.
    enough = min(most, round(max(_LARGE_ENOUGH * fixed, _LEAST_ALONE)))
    if outlook.left and outlook.left[0] > enough:
        enough = _even(outlook.left[0], enough, most)
    count = min(len(outlook.left), _CROWD)
    if count < 2:
        return enough
    ends = list(accumulate(max(1, left) for left in outlook.left[:count]))

    def mean_wait(chunk: int) -> float:
        return _step_s(rates, outlook, chunk) * sum(-(-end // chunk) for end in ends)

    return min({min(end, enough) for end in ends}, key=mean_wait)


def _even(left: int, enough: int, most: int) -> int:
    """A chunk of about `enough` tokens such that all of a prompt are of one size: a short one at the end costs nearly as
    much as the others."""
    num_chunks = max(min(round(left / enough), left // _LEAST_ALONE), -(-left // most))
    chunk = -(-left // num_chunks)
    sizes = (-(-chunk // rows) * rows for rows in (_TILE, _PART_OF_TILE))
    return next((size for size in sizes if size <= most), chunk)
