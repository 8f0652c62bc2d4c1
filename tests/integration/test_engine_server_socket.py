"""A socket whose file is removed under a running engine."""

from __future__ import annotations

import asyncio
import shutil
import socket
import stat
from collections.abc import Callable

import pytest

from engine.protocol import Sampling
from tests.support.fake_runner import FakeRunner, expected_tokens
from tests.support.shell import WAIT_S, Shell

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.SOCKET_CHECK_S", 0.01)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await asyncio.sleep(0.005)


async def test_a_removed_socket_is_made_again_and_who_is_connected_notices_nothing() -> None:
    async with Shell(FakeRunner(step_s=0.005)) as shell:
        client = await shell.client()
        running = client.submit([1, 2, 3], 60, GREEDY)
        tokens = [token async for event in _first(running, 3) for token in event.tokens]
        shell.socket.unlink()
        await until(lambda: shell.server.counters["sockets_remade"] == 1)

        newcomer = await shell.client("newcomer")
        theirs = [token async for event in newcomer.submit([4, 5], 3, GREEDY) for token in event.tokens]
        tokens += [token async for event in running for token in event.tokens]

        assert theirs == expected_tokens([4, 5], 3)
        assert tokens == expected_tokens([1, 2, 3], 60)
        assert stat.S_IMODE(shell.socket.stat().st_mode) == 0o660
    assert shell.server.counters["connections"] == 2


async def test_a_removed_directory_is_made_again_with_its_mode() -> None:
    async with Shell() as shell:
        shell.directory.chmod(0o750)
        shell.server._directory_mode = 0o750  # As if it had been so when the engine began to listen.
        shutil.rmtree(shell.directory)
        await until(lambda: shell.server.counters["sockets_remade"] == 1)

        client = await shell.client()

        assert client.connected
        assert stat.S_IMODE(shell.directory.stat().st_mode) == 0o750


async def test_a_path_that_another_engine_has_taken_is_left_to_it_until_it_is_free() -> None:
    async with Shell() as shell:
        shell.socket.unlink()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(str(shell.socket))
            other.listen(128)
            other.setblocking(False)
            theirs = shell.socket.stat().st_ino
            await asyncio.sleep(0.1)
            assert shell.socket.stat().st_ino == theirs
            assert shell.server.counters["sockets_remade"] == 0

        await until(lambda: shell.server.counters["sockets_remade"] == 1)
        assert (await shell.client()).connected


async def test_a_socket_that_was_made_again_is_removed_at_the_end() -> None:
    async with Shell() as shell:
        shell.socket.unlink()
        await until(lambda: shell.server.counters["sockets_remade"] == 1)
        assert shell.socket.exists()
        await shell.server.close("The engine is stopping.")

        assert not shell.socket.exists()


async def _first(stream, count: int):  # type: ignore[no-untyped-def]
    for _ in range(count):
        yield await anext(stream)
