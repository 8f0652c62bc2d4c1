"""The heap of deadlines against a dict."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cached.deadlines import DeadlineHeap
from cached.protocol import NEVER

SLOTS = 12

steps = st.lists(st.one_of(st.tuples(st.integers(0, SLOTS - 1), st.integers(0, 20)), st.none()), max_size=80)


@given(steps)
def test_every_slot_has_one_deadline_and_the_earliest_comes_out_first(steps: list[tuple[int, int] | None]) -> None:
    heap, model = DeadlineHeap(SLOTS), dict[int, float]()
    for step in steps:
        if step is not None:
            heap.set(step[0], float(step[1]))
            model[step[0]] = float(step[1])
        elif model:
            deadline, slot = heap.pop()
            assert deadline == min(model.values()) == model.pop(slot)

        heap.check_invariants()
        assert heap.first == min(model.values(), default=NEVER)
        assert len(heap) == len(model)
        assert all(heap.deadline_of(slot) == model.get(slot, NEVER) for slot in range(SLOTS))
