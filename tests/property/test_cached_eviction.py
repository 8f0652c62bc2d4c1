"""The eviction order against a list that is sorted anew for every question."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cached.eviction import EvictionOrder, device_victim
from cached.givers import Givers

BLOCKS = 12
OWNERS = 3

operations = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"),
            st.integers(0, BLOCKS - 1),
            st.integers(0, OWNERS - 1),
            st.integers(0, 100),
            st.integers(0, 5),
            st.integers(0, 9),
        ),
        st.tuples(st.just("discard"), st.integers(0, BLOCKS - 1)),
    ),
    max_size=300,
)


Model = dict[int, tuple[int, int, int, int]]


def apply(
    steps: list[tuple], order: EvictionOrder | None = None, model: Model | None = None
) -> tuple[EvictionOrder, Model]:
    order = EvictionOrder(BLOCKS) if order is None else order
    model = {} if model is None else model
    for step in steps:
        if step[0] == "add":
            _, block, owner, priority, tick, depth = step
            order.add(block, owner, priority, tick, depth)
            model[block] = (owner, priority, tick, -depth)
        else:
            order.discard(step[1])
            model.pop(step[1], None)
        order.check_invariants()
    return order, model


@given(operations, st.integers(0, 100))
def test_the_order_answers_as_a_sorted_list_would(steps: list[tuple], limit: int) -> None:
    order, model = apply(steps)

    assert len(order) == len(model)
    assert {block for block in range(BLOCKS) if block in order} == set(model)
    for owner in [None, *range(OWNERS)]:
        rows = sorted((row[1:], block) for block, row in model.items() if owner is None or row[0] == owner)
        first = order.least_valuable(owner)
        assert (first is None) == (not rows)
        if first is not None:
            assert order.key_of(first) == rows[0][0]
        limited = order.least_valuable(owner, limit)
        assert (limited is None) == (not rows or rows[0][0][0] > limit)
    for owner in range(OWNERS):
        assert order.count_of(owner) == sum(row[0] == owner for row in model.values())


@given(operations, st.lists(st.floats(0, 8), min_size=OWNERS, max_size=OWNERS))
def test_the_owner_furthest_above_its_share_gives_first_on_the_device(steps: list[tuple], shares: list[float]) -> None:
    order, model = apply(steps)
    held = [sum(row[0] == owner for row in model.values()) for owner in range(OWNERS)]

    victim = device_victim(order, held.__getitem__, shares.__getitem__)

    above = {owner: held[owner] - shares[owner] for owner in range(OWNERS) if held[owner] > shares[owner]}
    if not model:
        assert victim is None
        return
    assert victim is not None
    if above:
        most = max(above.values())
        givers = {owner for owner, excess in above.items() if excess == most}
    else:
        givers = set(range(OWNERS))
    assert order.key_of(victim) == min(row[1:] for row in model.values() if row[0] in givers)


@given(
    st.lists(st.tuples(operations, st.integers(0, OWNERS - 1), st.integers(0, 100)), max_size=6),
    st.lists(st.integers(0, 6), min_size=OWNERS, max_size=OWNERS),
    st.booleans(),
)
def test_whoever_is_furthest_above_its_floor_gives_on_the_host(
    rounds: list[tuple], floors: list[int], at_ceiling: bool
) -> None:
    """kv-semantics 4.3, 5.3 and 5.9, asked again and again while blocks come and go."""
    order, model, held = EvictionOrder(BLOCKS), {}, [0] * OWNERS
    givers = Givers(order, held, floors, order.changed)
    for steps, newcomer, priority in rounds:
        apply(steps, order, model)
        held[:] = [sum(row[0] == owner for row in model.values()) for owner in range(OWNERS)]
        held[newcomer] += 1  # It counts already.
        order.changed.update(range(OWNERS))
        may_go = {
            block: row
            for block, row in model.items()
            if row[1] <= priority or (row[0] != newcomer and held[newcomer] <= floors[newcomer])
        }
        excess = {row[0]: held[row[0]] - floors[row[0]] for row in may_go.values()}
        most = max(excess.values(), default=0)
        giving = {owner for owner in excess if excess[owner] == most} if most > 0 and not at_ceiling else {newcomer}
        rows = [(row[1:], block) for block, row in may_go.items() if row[0] in giving]
        rows = [row for row in rows if model[row[1]][0] != newcomer or row[0][0] <= priority]

        victim = givers.victim(newcomer, priority, at_ceiling)

        assert (victim is None) == (not rows)
        if victim is not None:
            assert order.key_of(victim) == min(rows)[0]
        if victim is None and not at_ceiling:
            assert givers.are_others_guarded(newcomer, priority) == any(r[0] != newcomer for r in may_go.values())
        givers.check_invariants()


def make_givers(order: EvictionOrder, held: list[int]) -> Givers:
    return Givers(order, held, [0] * len(held), order.changed | set(range(len(held))))


def test_a_full_tier_does_not_give_up_a_90_for_a_35() -> None:
    """kv-semantics §9 case 9."""
    order = EvictionOrder(1)
    order.add(0, 0, 90, 1, 0)

    assert make_givers(order, [2]).victim(0, 35) is None
    assert make_givers(order, [2]).victim(0, 90) == 0


def test_an_owner_at_its_ceiling_evicts_only_its_own() -> None:
    order = EvictionOrder(2)
    order.add(0, 1, 0, 1, 0)
    order.add(1, 0, 35, 2, 0)

    assert make_givers(order, [1, 1]).victim(0, 35, at_ceiling=True) == 1
