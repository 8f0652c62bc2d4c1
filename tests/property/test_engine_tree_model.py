"""The prefix tree's search, its buckets and the clock of deadlines against models that look at everything."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from engine import sorted_children
from engine.prefix_tree import PrefixTree, root_of
from engine.retention_clock import NEVER, RetentionClock
from engine.sorted_children import SortedChildren

SIZE = 4


def key_of(tokens: list[int]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in tokens)


def shared(left: list[int], right: list[int]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


@hypothesis_settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 2**31]), min_size=1, max_size=SIZE - 1), max_size=20),
    st.lists(st.sampled_from([0, 1, 255, 256, 2**31]), min_size=1, max_size=SIZE),
    st.sets(st.integers(0, 19), max_size=7),
)
def test_the_longest_usable_child_is_found(children: list[list[int]], asked: list[int], unusable: set[int]) -> None:
    """Rule 3.4, also where some children may not be used yet."""
    tree = PrefixTree(20, SIZE)
    for block, tokens in enumerate(children):
        tree.insert_partial(block, root_of(0), key_of(tokens))

    found = tree.longest_child(root_of(0), key_of(asked), lambda block: block not in unusable)

    usable = [tokens for block, tokens in enumerate(children) if block not in unusable]
    longest = max((shared(tokens, asked) for tokens in usable), default=0)
    assert (found.num_tokens if found else 0) == longest
    assert found is None or shared(children[found.block], asked) == longest
    assert found is None or found.block not in unusable
    tree.check_invariants()


@pytest.mark.parametrize("seed", range(5))
def test_buckets_keep_children_sorted_through_splits_and_removals(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_children, "_MAX_BUCKET", 4)
    rng = random.Random(seed)
    keys = {block: key_of([rng.randrange(30), rng.randrange(3)]) for block in range(200)}
    children = SortedChildren(keys.__getitem__)
    present: set[int] = set()
    for _ in range(600):
        block = rng.randrange(200)
        if block in present:
            present.remove(block)
            children.remove(block)
        else:
            present.add(block)
            children.add(block)

        assert [keys[each] for each in children] == sorted(keys[each] for each in present)
        assert set(children) == present
        before, after = children.around(keys[block])
        assert all(keys[each] <= keys[block] for each in before)
        assert all(keys[each] >= keys[block] for each in after)


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([NEVER, 1.0, 2.0, 3.0, 50.0])), max_size=200))
def test_deadlines_come_in_order_and_only_those_that_run(starts: list[tuple[int, float]]) -> None:
    clock = RetentionClock(6)
    running: dict[int, float] = {}
    for block, deadline in starts:
        clock.start(block, deadline)
        running[block] = deadline
    running = {block: deadline for block, deadline in running.items() if deadline != NEVER}
    assert clock.next_deadline() == min(running.values(), default=None)

    popped = []
    while (block := clock.pop_expired(3.0)) is not None:
        popped.append(running.pop(block))

    assert popped == sorted(popped)
    assert all(deadline > 3.0 for deadline in running.values())
    assert len(clock) == len(running)


def test_a_child_is_found_among_thousands_by_few_comparisons() -> None:
    """Rule 3.4: a hot parent has thousands of children."""
    reads = 0

    def key(block: int) -> bytes:
        nonlocal reads
        reads += 1
        return key_of([block * 2, 0])

    children = SortedChildren(key)
    for block in range(20_000):
        children.add(block)
    reads = 0

    before, after = children.around(key_of([20_001, 0]))

    assert (next(before), next(after)) == (10_000, 10_001)
    assert reads < 40
