"""An engine compares the host tier with its own pool when it connects."""

from __future__ import annotations

import queue

import pytest
from structlog.testing import capture_logs

from engine.tier import TierAnswer, TierIs, TierWorker
from engine.transfer import HostTransfer
from tests.support.fake_runner import FakeInfo, FakeKv
from tests.support.fake_tier import FakeTier, FakeTierClient

INFO = FakeInfo(num_blocks=16)


@pytest.mark.parametrize(("num_slots", "is_warned"), [(15, True), (16, False)])
def test_a_host_tier_smaller_than_the_devices_pool_is_warned_about(num_slots: int, is_warned: bool) -> None:
    """An inclusive tier (kv-semantics 5.4) that is smaller holds less than what is on the device already."""
    answers: queue.Queue[TierAnswer] = queue.Queue()
    tier = FakeTier(num_slots, INFO.block_bytes)
    worker = TierWorker(
        lambda: FakeTierClient(tier),  # type: ignore[arg-type, return-value]
        HostTransfer(FakeKv(INFO), INFO.block_bytes),
        block_bytes=INFO.block_bytes,
        tokens_per_block=INFO.tokens_per_block,
        verify_loads=True,
        num_device_blocks=INFO.num_blocks,
        answer=answers.put,
    )

    with capture_logs() as said:
        worker.start()
        assert answers.get(timeout=10) == TierIs("ready")
        worker.stop(0.0)

    warnings = [line for line in said if "smaller than the device" in line["event"]]
    assert [(line["host_blocks"], line["device_blocks"]) for line in warnings] == ([(15, 16)] if is_warned else [])
