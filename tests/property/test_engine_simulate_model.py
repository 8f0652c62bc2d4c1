"""The simulator against naive models of a cache on random traces, and against what must hold between its runs."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.simulate import Simulation, SimulationSettings
from engine.traces import MOONCAKE_TOKENS, TracedRequest

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
traces = st.lists(st.tuples(prompts, st.integers(0, 200), st.integers(0, 1)), min_size=1, max_size=40)


def requests_of(trace: list[tuple[list[int], int, int]]) -> list[TracedRequest]:
    """Ids that say the whole path, as the trace's own do; some prompts have a tail behind their last whole block."""
    numbers: dict[tuple[int, ...], int] = {}
    found, now = [], 0
    for path, pause, tail in trace:
        now += pause
        ids = [numbers.setdefault(tuple(path[: at + 1]), len(numbers)) for at in range(len(path))]
        tokens = MOONCAKE_TOKENS * len(path)
        known = array("I", [*ids, *([10**6 + now] if tail else [])])
        found.append(TracedRequest(float(now), tokens + 9 * tail, known))
    return found


def naive_lru(requests: list[TracedRequest], capacity: int) -> int:
    """Tokens served by blocks kept in a list, the least recently used first, deepest first among equals."""
    resident: list[int] = []
    served = 0
    for request in requests:
        num_full, tail = divmod(request.num_tokens, MOONCAKE_TOKENS)
        blocks = list(request.known[:num_full])
        if num_full + (tail > 0) > capacity:
            continue
        servable = (request.num_tokens - 1) // MOONCAKE_TOKENS
        found = 0
        while found < servable and blocks[found] in resident:
            found += 1
        served += found * MOONCAKE_TOKENS
        # A whole last block is computed again beside its twin, and takes a place for as long.
        wanted = num_full + (tail > 0) - found
        idle = [each for each in resident if each not in blocks[:found]]
        while capacity - len(resident) < wanted:
            resident.remove(idle.pop(0))
        for each in reversed(blocks):
            if each in resident:
                resident.remove(each)
            resident.append(each)
    return served


def simulated(requests: list[TracedRequest], **said: object) -> dict[tuple[str, int], int]:
    simulation = Simulation(SimulationSettings(**said), "mooncake")  # type: ignore[arg-type]
    for request in requests:
        simulation.take(request)
        simulation.check_invariants()
    return {(run.policy, run.blocks): run.tokens_device + run.tokens_host for run in simulation.result().runs}


@settings(max_examples=60, deadline=None)
@given(traces, st.integers(1, 12))
def test_plain_lru_serves_what_a_list_of_blocks_would(trace: list[tuple[list[int], int, int]], capacity: int) -> None:
    requests = requests_of(trace)

    served = simulated(requests, capacities=(capacity,), policies=("lru",))

    assert served["lru", capacity] == naive_lru(requests, capacity)


@settings(max_examples=40, deadline=None)
@given(traces, st.integers(1, 12))
def test_nothing_serves_more_than_the_ceiling_or_than_a_pool_without_end(
    trace: list[tuple[list[int], int, int]], capacity: int
) -> None:
    requests = requests_of(trace)
    endless = sum(len(each.known) for each in requests) + 1

    served = simulated(requests, capacities=(capacity, endless), policies=("lru", "priority", "adaptive", "belady"))

    everything = served["lru", endless]
    assert served["priority", endless] == served["adaptive", endless] == served["belady", endless] == everything
    for policy in ("lru", "priority", "adaptive"):
        assert served[policy, capacity] <= served["belady", capacity] <= everything


def test_the_ceiling_keeps_nothing_for_requests_that_will_be_refused() -> None:
    """It once kept, for ever, blocks whose next use was a prompt longer than the pool, and served less than LRU did."""
    long = [1, 1, 1, 1, 1, 1]
    requests = requests_of([([1, 1], 0, 1), (long, 1, 0), *[([0, 0], 1, 1), ([2, 2], 1, 1)] * 3])

    served = simulated(requests, capacities=(5,), policies=("lru", "belady"))

    assert served["belady", 5] == served["lru", 5] == 4 * 2 * MOONCAKE_TOKENS


@settings(max_examples=30, deadline=None)
@given(traces, st.integers(1, 8))
def test_an_endless_host_tier_makes_up_for_a_small_pool(trace: list[tuple[list[int], int, int]], capacity: int) -> None:
    requests = [each for each in requests_of(trace) if len(each.known) <= capacity]
    endless = sum(len(each.known) for each in requests) + 1

    small = simulated(requests, capacities=(capacity,), policies=("lru",), host_blocks=endless)
    large = simulated(requests, capacities=(endless,), policies=("lru",))

    assert small["lru", capacity] == large["lru", endless]
