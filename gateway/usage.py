"""Adds up what a request used, from what the engine said of its sequences; never from an estimate of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import FirstToken
from gateway.values import Usage


@dataclass(frozen=True, slots=True)
class SequenceUsage:
    """One sequence: which prompt it continued, what its first token told, how many of its tokens count."""

    prompt_index: int
    prompt_tokens: int
    first: FirstToken | None
    completion_tokens: int


def total(sequences: Sequence[SequenceUsage]) -> Usage:
    """The usage of a request.

    A prompt counts once however many answers it got, with the tiers of the sequence that had to compute most of it: the
    others found what that one had just computed, which is no saving of earlier work. Waits are the longest ones.
    """
    by_prompt: dict[int, SequenceUsage] = {}
    for sequence in sequences:
        known = by_prompt.get(sequence.prompt_index)
        if known is None or _computed(sequence) > _computed(known):
            by_prompt[sequence.prompt_index] = sequence
    firsts = [sequence.first for sequence in sequences if sequence.first is not None]
    prompts = list(by_prompt.values())
    served = [each.first for each in prompts if each.first is not None]
    device_tokens = sum(first.device_tokens for first in served)
    host_tokens = sum(first.host_tokens for first in served)
    prompt_tokens = sum(each.prompt_tokens for each in prompts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=sum(sequence.completion_tokens for sequence in sequences),
        device_tokens=device_tokens,
        host_tokens=host_tokens,
        computed_tokens=prompt_tokens - device_tokens - host_tokens,
        queue_ms=max((first.queue_ms for first in firsts), default=0.0),
        ttft_ms=max((first.ttft_ms for first in firsts), default=0.0),
        blocks_full=sum(first.blocks_full for first in served),
        blocks_partial=sum(first.blocks_partial for first in served),
        blocks_missed=sum(first.blocks_missed for first in served),
    )


def _computed(sequence: SequenceUsage) -> int:
    return sequence.first.computed_tokens if sequence.first is not None else -1
