"""What the service manager hears of an engine that lives, and of one whose step thread does not."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from engine.main import keep_watchdog, watchdog_s
from engine.protocol import Sampling
from tests.support.fake_runner import FakeRunner
from tests.support.shell import WAIT_S, Shell


def listen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """The service manager's end, of which nothing is read until a test wants to."""
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(directory / "notify"))
    manager.setblocking(False)
    monkeypatch.setenv("NOTIFY_SOCKET", str(directory / "notify"))
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    return manager


async def test_a_living_engine_says_so_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Shell() as shell:
        with listen(shell.directory, monkeypatch) as manager:
            watch = asyncio.ensure_future(keep_watchdog(shell.server))

            async with asyncio.timeout(WAIT_S):
                heard = [await asyncio.get_running_loop().sock_recv(manager, 100) for _ in range(3)]

            watch.cancel()
            assert heard == [b"WATCHDOG=1"] * 3


async def test_an_engine_whose_step_hangs_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Shell(FakeRunner(gate=threading.Event())) as shell:
        client = await shell.client()
        client.submit([1, 2, 3], 3, Sampling(temperature=0.0))
        await asyncio.to_thread(shell.runner.executing.wait, WAIT_S)
        with listen(shell.directory, monkeypatch) as manager:
            watch = asyncio.ensure_future(keep_watchdog(shell.server))
            await asyncio.sleep(0.2)

            watch.cancel()
            with pytest.raises(BlockingIOError):
                manager.recv(100)


def test_a_watchdog_of_another_process_or_none_at_all_is_not_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert watchdog_s() == 0.0

    monkeypatch.setenv("WATCHDOG_USEC", "5000000")
    assert watchdog_s() == 5.0

    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_s() == 0.0
