"""What an engine remembers of owners, salts and connections that are gone: nothing, however many there were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from cached.keys import OwnerId
from cached.retention import Retention, RetentionConfig, TokenRange
from engine.protocol import Sampling
from tests.support.engine_world import World, settings
from tests.support.shell import Shell, is_quiet

GREEDY = Sampling(temperature=0.0)
RETAINED = RetentionConfig((TokenRange(0, None, Retention(60, 5.0)),))


def lengths(root: object) -> Iterator[tuple[str, int]]:
    """Every container that can be reached from an object of ours, and how long it is."""
    seen: set[int] = set()
    waiting: list[tuple[str, object]] = [(type(root).__name__, root)]
    while waiting:
        path, value = waiting.pop()
        if id(value) in seen or path.count(".") > 8:
            continue
        seen.add(id(value))
        if isinstance(value, dict | set | list | deque):
            yield path, len(value)
            items: Any = value.values() if isinstance(value, dict) else value
            waiting.extend((f"{path}[]", each) for each in items)
        elif type(value).__module__.split(".")[0] == "engine":
            slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
            names = [*slots, *getattr(value, "__dict__", ())]
            waiting.extend((f"{path}.{name}", getattr(value, name, None)) for name in names)


def total_length(root: object) -> int:
    return sum(length for _, length in lengths(root))


def test_owners_and_salts_that_are_gone_leave_nothing_in_the_core() -> None:
    world = World(settings(4, 32, tier_enabled=True, max_queue=100), check=False)

    def serve(numbers: range) -> int:
        for number in numbers:
            owner = OwnerId(number.to_bytes(16, "big"))
            prompt = [number % 97, *range(10)]
            done = world.submit(prompt, 3, salt=f"s{number}", owner=owner, hold=number % 3 == 0, retention=RETAINED)
            gone = world.submit(prompt, 50, salt=f"t{number}", owner=owner)
            world.step()
            world.cancel(gone)
            world.confirm(done, 2)
            world.run()
            world.now += 1.0
            world.events.clear()
            world.touches.clear()
        world.now += 100.0
        world.step()
        world.core.check_invariants()
        return total_length(world.core)

    few = serve(range(1, 200))
    many = serve(range(200, 1200))

    assert many <= few + 200


def test_requests_that_come_and_go_behind_one_that_waits_are_not_kept() -> None:
    world = World(settings(4, 8, max_queue=100), check=False)
    world.submit(range(20), 10)
    world.step()
    blocked = world.submit(range(50, 80), 1)  # Its turn comes first, and it does not fit beside the other.
    world.step()

    for _ in range(2000):
        world.cancel(world.submit([1, 2, 3], 1))

    world.core.check_invariants()
    assert max(length for path, length in lengths(world.core) if "waiting" in path) < 200
    world.run()
    assert world.lives[blocked].finish == "length"


async def test_connections_that_are_gone_leave_nothing_in_the_server() -> None:
    async with Shell() as shell:

        async def connect_and_leave(times: int) -> int:
            for number in range(times):
                client = await shell.client(f"gateway {number}")
                owner = OwnerId(number.to_bytes(16, "big"))
                stream = client.submit([1, 2, 3, number], 100, GREEDY, f"s{number}", owner, hold_generated=True)
                await anext(stream)
                await client.close()
                shell.clients.clear()
            await shell.until(lambda figures: is_quiet(figures) and figures["server"]["gateways"] == 0)
            return total_length(shell.server) + total_length(shell.steps)

        few = await connect_and_leave(60)  # So many that every block of the pool has been used.
        many = await connect_and_leave(120)

        assert many <= few + 100
