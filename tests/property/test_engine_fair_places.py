"""Places in a queue against a list of who has one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cached.keys import OwnerId
from engine.fair_places import FairPlaces, Verdict

CAPACITY = 12
OWNERS = [OwnerId(bytes([number]) * 16) for number in range(5)]


class PlacesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.places = FairPlaces()
        self.inside: list[OwnerId] = []

    @rule(owner=st.sampled_from(OWNERS))
    def ask(self, owner: OwnerId) -> None:
        free, own = CAPACITY - len(self.inside), self.inside.count(owner)

        verdict = self.places.judge(owner, CAPACITY)

        if free <= 0:
            assert verdict is Verdict.ALL_TAKEN
        elif own < free:
            assert verdict is Verdict.MAY_TAKE
            self.places.take(owner)
            self.inside.append(owner)
        else:
            assert verdict is Verdict.OWN_SHARE_TAKEN

    @rule(owner=st.sampled_from(OWNERS))
    def come_back_unasked(self, owner: OwnerId) -> None:
        self.places.take(owner)
        self.inside.append(owner)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        owner = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.places.give_back(owner)

    @invariant()
    def agrees(self) -> None:
        self.places.check_invariants()
        assert len(self.places) == len(self.inside)
        assert self.places.num_owners == len(set(self.inside))
        assert all(self.places.count_of(owner) == self.inside.count(owner) for owner in OWNERS)


TestPlaces = PlacesMachine.TestCase
TestPlaces.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(capacity=st.integers(1, 2000), num_greedy=st.integers(1, 8))
def test_whoever_comes_after_greedy_owners_finds_a_place_until_these_have_halved_the_rest_to_nothing(
    capacity: int, num_greedy: int
) -> None:
    places = FairPlaces()
    for owner in range(num_greedy):
        fill(places, OwnerId(bytes([owner]) * 16), capacity)

    free = capacity - len(places)

    assert free >= capacity // 2**num_greedy - 1
    newcomer = places.judge(OwnerId(b"n" * 16), capacity)
    assert newcomer is (Verdict.MAY_TAKE if free else Verdict.ALL_TAKEN)


@pytest.mark.parametrize("capacity", [1, 2, 3, 1024])
def test_a_lone_owner_gets_half_of_the_places_and_never_none(capacity: int) -> None:
    places = FairPlaces()
    owner = OwnerId(b"1" * 16)

    fill(places, owner, capacity)

    assert places.count_of(owner) == -(-capacity // 2)


def test_as_places_come_and_go_owners_that_always_ask_end_with_as_many_each_as_are_free() -> None:
    places, capacity = FairPlaces(), 100
    owners = OWNERS[:4]
    for owner in owners:
        fill(places, owner, capacity)
    assert places.count_of(owners[0]) == 50  # The first of them took most.

    for _ in range(60):  # The one with most is served, and everybody asks again, the last comer last.
        places.give_back(max(owners, key=places.count_of))
        for owner in owners:
            fill(places, owner, capacity)

    assert {places.count_of(owner) for owner in owners} == {20}


def fill(places: FairPlaces, owner: OwnerId, capacity: int) -> None:
    """Take all that the owner is given."""
    while places.judge(owner, capacity) is Verdict.MAY_TAKE:
        places.take(owner)
