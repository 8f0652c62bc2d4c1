"""The tier worker against a tier in memory: order, misses, and one answer for every ticket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cached.keys import NO_OWNER, BlockHash
from cached.protocol import OwnerShare
from engine.tier import Loaded, LookedUp, Offered, TierAnswer, TierIs, TierWorker
from engine.tier_work import Load, Lookup, Offer, OfferedDeviceBlock, Touch, TouchedBlock
from engine.transfer import HostTransfer
from tests.support.cached_daemon import wait_until
from tests.support.fake_runner import FakeInfo, FakeKv
from tests.support.fake_tier import FakeTier, FakeTierClient

INFO = FakeInfo(num_blocks=16)
WAIT_S = 10.0


class Bench:
    """A worker, its tier, its memory and its answers."""

    def __init__(self, num_slots: int = 16) -> None:
        self.tier = FakeTier(num_slots, INFO.block_bytes)
        self.kv = FakeKv(INFO)
        self.clients: list[FakeTierClient] = []
        self.answers: queue.Queue[TierAnswer] = queue.Queue()
        self.states: list[str] = []
        self.transfer = HostTransfer(self.kv, INFO.block_bytes)
        self.worker = TierWorker(
            self._client,  # type: ignore[arg-type]
            self.transfer,
            block_bytes=INFO.block_bytes,
            tokens_per_block=INFO.tokens_per_block,
            verify_loads=True,
            answer=self.answers.put,
        )

    def _client(self) -> FakeTierClient:
        self.clients.append(FakeTierClient(self.tier))
        return self.clients[-1]

    def ask(self, *work: object) -> TierAnswer:
        """Hand work over and return the next answer that is no change of state."""
        self.worker.hand_over(work, None)  # type: ignore[arg-type]
        return self.next_answer()

    def next_answer(self) -> TierAnswer:
        while True:
            answer = self.answers.get(timeout=WAIT_S)
            if not isinstance(answer, TierIs):
                return answer
            self.states.append(answer.state)

    def wait_state(self, state: str) -> None:
        while not self.states or self.states[-1] != state:
            answer = self.answers.get(timeout=WAIT_S)
            assert isinstance(answer, TierIs)
            self.states.append(answer.state)

    def fill(self, block: int, token: int) -> bytes:
        for offset in range(INFO.tokens_per_block):
            self.kv.write_token(block, offset, token + offset)
        return self.kv.rows[block].tobytes()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    made.worker.start()
    made.wait_state("ready")
    yield made
    made.worker.stop(0.0)


def block_hash(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def offered(number: int, device_block: int, priority: int = 35) -> OfferedDeviceBlock:
    parent = block_hash(number - 1) if number > 1 else None
    return OfferedDeviceBlock(block_hash(number), parent, device_block, priority, None, "demote", NO_OWNER, "00000000")


def chain(num_blocks: int) -> tuple[OfferedDeviceBlock, ...]:
    return tuple(offered(number, number - 1) for number in range(1, num_blocks + 1))


def test_a_stored_chain_is_found_and_loaded_byte_for_byte(bench: Bench) -> None:
    contents = [bench.fill(block, 10 * block) for block in range(3)]

    stored = bench.ask(Offer(1, chain(3)))
    found = bench.ask(Lookup(2, tuple(block_hash(number) for number in (1, 2, 3, 4))))
    loaded = bench.ask(Load(3, ((block_hash(1), 8), (block_hash(2), 9), (block_hash(3), 10))))

    assert stored == Offered(1, (True, True, True))
    assert found == LookedUp(2, 3)
    assert isinstance(loaded, Loaded)
    assert loaded.num_blocks == 3
    assert [bench.kv.rows[block].tobytes() for block in (8, 9, 10)] == contents
    assert not bench.tier.leases


def test_a_long_chain_is_reserved_in_groups_and_stored_whole() -> None:
    bench = Bench(num_slots=200)
    bench.worker.start()
    blocks = tuple(offered(number, number % 16) for number in range(1, 101))

    answer = bench.ask(Offer(1, blocks))
    bench.worker.stop(1.0)

    assert answer == Offered(1, (True,) * 100)
    assert bench.tier.calls.count("reserve") == 2


def test_a_full_tier_takes_a_prefix_and_the_rest_is_not_asked_for() -> None:
    bench = Bench(num_slots=80)
    bench.worker.start()
    blocks = tuple(offered(number, number % 16) for number in range(1, 201))

    answer = bench.ask(Offer(1, blocks))
    bench.worker.stop(1.0)

    assert isinstance(answer, Offered)
    assert sum(answer.in_tier) == 80
    assert bench.tier.calls.count("reserve") == 2


def test_what_is_loaded_under_a_lost_lease_is_a_miss(bench: Bench) -> None:
    bench.ask(Offer(1, chain(2)))
    bench.tier.loses_leases = True

    answer = bench.ask(Load(2, ((block_hash(1), 8), (block_hash(2), 9))))

    assert answer == Loaded(2, 0, ())
    assert bench.worker.counters.leases_lost == 1


def test_a_block_with_a_wrong_checksum_ends_the_good_run_and_is_reported(bench: Bench) -> None:
    """kv-semantics 1.4 and 5.10."""
    bench.transfer.batch_blocks = 2
    bench.ask(Offer(1, chain(3)))
    bench.tier.corrupt(block_hash(2))
    untouched = bench.kv.rows[10].copy()

    answer = bench.ask(Load(2, ((block_hash(1), 8), (block_hash(2), 9), (block_hash(3), 10))))

    assert isinstance(answer, Loaded)
    assert answer.num_blocks == 1
    assert np.array_equal(bench.kv.rows[10], untouched)
    assert bench.tier.suspected == [block_hash(2)]
    assert bench.worker.counters.checksum_mismatches == 1


def test_an_absent_daemon_is_a_miss_for_every_ticket_and_comes_back_by_itself(bench: Bench) -> None:
    bench.ask(Offer(1, chain(1)))
    bench.tier.is_there = False

    assert bench.ask(Lookup(2, (block_hash(1),))) == LookedUp(2, 0)
    assert bench.ask(Load(3, ((block_hash(1), 8),))) == Loaded(3, 0, ())
    assert bench.ask(Offer(4, chain(1))) == Offered(4, (False,))
    bench.wait_state("absent")

    bench.tier.is_there = True
    bench.wait_state("ready")
    assert bench.ask(Lookup(5, (block_hash(1),))) == LookedUp(5, 1)


def test_a_daemon_that_was_replaced_is_told_as_gone_and_back(bench: Bench) -> None:
    bench.clients[0].restart()

    bench.wait_state("absent")
    bench.wait_state("ready")

    assert bench.states == ["ready", "absent", "ready"]


def test_a_defect_in_the_worker_answers_its_ticket_and_the_worker_comes_back(bench: Bench) -> None:
    bench.tier.fails_with = RuntimeError("injected")

    answer = bench.ask(Lookup(1, (block_hash(1),)))

    assert answer == LookedUp(1, 0)
    bench.wait_state("absent")
    bench.wait_state("ready")
    assert bench.ask(Lookup(2, (block_hash(1),))) == LookedUp(2, 0)
    assert len(bench.clients) == 2
    assert bench.clients[0].closed


def test_a_lookup_is_answered_between_two_batches_of_a_store(bench: Bench) -> None:
    first_copied, lookup_waits = threading.Event(), threading.Event()
    block_view = bench.kv.block_view
    bench.transfer.batch_blocks = 2

    def view_and_pause(block_id: int) -> memoryview:
        first_copied.set()
        lookup_waits.wait(WAIT_S)
        return block_view(block_id)

    bench.kv.block_view = view_and_pause  # type: ignore[method-assign]
    bench.worker.hand_over([Offer(1, chain(4))], None)
    first_copied.wait(WAIT_S)
    bench.worker.hand_over([Lookup(2, (block_hash(1),))], None)
    lookup_waits.set()

    assert bench.next_answer() == LookedUp(2, 0)
    assert bench.next_answer() == Offered(1, (True,) * 4)


def test_a_touch_reaches_the_tier_after_the_offer_before_it(bench: Bench) -> None:
    touch = Touch((TouchedBlock(block_hash(1), 80, 99.0, "drop"),))

    bench.ask(Offer(1, chain(1)), touch, Lookup(2, (block_hash(1),)))
    bench.next_answer()
    bench.ask(Offer(3, ()))

    assert bench.tier.touched == [(block_hash(1), 80, 99.0, "drop")]
    verbs = [verb for verb in bench.tier.calls if verb in ("commit", "touch")]
    assert verbs == ["commit", "touch"]


def test_a_block_that_the_tier_holds_already_hears_of_the_release_that_offers_it(bench: Bench) -> None:
    bench.ask(Offer(1, chain(2)))
    again = (offered(1, 0, priority=80), offered(2, 1, priority=90), offered(3, 2, priority=70))

    answer = bench.ask(Offer(2, again))

    assert answer == Offered(2, (True, True, True))
    assert bench.tier.touched == [(block_hash(1), 80, None, "demote"), (block_hash(2), 90, None, "demote")]
    assert bench.worker.counters.touches == 1  # One message, so one tick of recency.


def test_stopping_stores_what_waits_and_answers_everything() -> None:
    bench = Bench()
    bench.worker.hand_over([Offer(1, chain(2)), Lookup(2, (block_hash(1),))], None)
    bench.worker.start()

    bench.worker.stop(5.0)

    answers = {type(bench.next_answer()) for _ in range(2)}
    assert answers == {Offered, LookedUp}
    assert set(bench.tier.stored) == {block_hash(1), block_hash(2)}
    assert bench.clients[0].closed


def test_loading_is_left_out_where_computing_is_faster(bench: Bench) -> None:
    """kv-semantics 5.7."""
    bench.ask(Offer(1, chain(1)))
    bench.ask(Load(2, ((block_hash(1), 8),)))

    bench.worker.hand_over([Lookup(3, (block_hash(1),))], 1e15)

    assert bench.next_answer() == LookedUp(3, 0)
    assert bench.worker.counters.recomputed_by_choice == 1


def test_the_owners_shares_are_told_to_every_daemon_that_comes_and_only_once(bench: Bench) -> None:
    share = OwnerShare(NO_OWNER, 2.0, 3, None)

    bench.worker.set_owners(4, (share,))
    bench.worker.set_owners(3, ())
    wait_until(lambda: len(bench.tier.owners) == 1)
    bench.tier.is_there = False
    bench.wait_state("absent")
    bench.tier.is_there = True
    bench.wait_state("ready")
    wait_until(lambda: len(bench.tier.owners) == 2)

    assert bench.tier.owners == [(4, (share,)), (4, (share,))]
    assert (bench.worker.counters.owners_version, bench.worker.counters.owners_outcome) == (4, "taken")
