"""The block pool against a model that scans everything: who goes, when, and what is left (kv-semantics §2, §4)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cached.keys import BlockHash, OwnerId
from cached.retention import Retention
from engine.block_pool import BlockPool
from engine.events import Removed
from engine.prefix_tree import root_of

NUM_BLOCKS = 12
SIZE = 2
OWNERS = [OwnerId(bytes([index]) * 16) for index in range(3)]
WEIGHTS = [1.0, 1.0, 2.0]
RETENTIONS = st.builds(
    Retention, st.sampled_from([0, 35, 60, 100]), st.sampled_from([None, 3.0, 8.0]), st.sampled_from(["demote", "drop"])
)


@dataclass
class Node:
    """One indexed block, as the model sees it."""

    path: tuple[int, ...]
    block: int
    owner: int
    retention: Retention
    deadline: float = math.inf
    users: int = 0
    tick: int = 0
    copies: int = 0


class PoolAgainstScan(RuleBasedStateMachine):
    """Sequences are paths of tokens, one block a token pair; the model keeps one `Node` per indexed path."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE, record_events=True)
        self.numbers = [self.pool.enter(owner, b"n" * 32) for owner in OWNERS]
        self.pool.set_weights(dict(zip(OWNERS, WEIGHTS, strict=True)))
        self.root = root_of(self.numbers[0][1])
        self.nodes: dict[tuple[int, ...], Node] = {}
        self.running: list[tuple[tuple[int, ...], ...]] = []
        self.departing = 0
        self.gone_while_copied: list[Node] = []
        self.now = 0.0
        self.tick = 0

    @rule(
        path=st.lists(st.integers(0, 2), min_size=1, max_size=5),
        owner=st.integers(0, 2),
        retention=RETENTIONS,
    )
    def admit(self, path: list[int], owner: int, retention: Retention) -> None:
        """A sequence matches what is there and allocates and indexes the rest, or changes nothing."""
        self.expire()
        paths = tuple(tuple(path[: end + 1]) for end in range(len(path)))
        matched = [each for each in paths if each in self.nodes]
        count = len(paths) - len(matched)
        victims = self.victims(count, owner, set(matched))
        for each in matched:
            self.pool.acquire(self.nodes[each].block)
        self.pool.take_events()
        got = self.pool.allocate(count, self.numbers[owner][0])
        if victims is None:
            assert got is None
            for each in matched:
                self.pool.unacquire(self.nodes[each].block)
            return
        assert got is not None, f"{count} blocks were to be had by evicting {victims}"
        # One after the other, as if each had been chosen alone: the order of rules 4.2 and 4.3 holds inside a chain, too.
        removed = [
            each for event in self.pool.take_events() if isinstance(event, Removed) for each in event.block_hashes
        ]
        assert removed == [hash_of(gone) for gone in victims]
        for gone in victims:
            del self.nodes[gone]
        for each in matched:
            self.nodes[each].users += 1
        for each, block in zip(paths[len(matched) :], got, strict=True):
            self.pool.set_retention(block, retention)
            parent = self.nodes[each[:-1]].block if len(each) > 1 else self.root
            self.pool.index_run([block], parent, self.numbers[0][1], [hash_of(each)], [key_of(each)], True)
            self.nodes[each] = Node(each, block, owner, retention, users=1)
        self.running.append(paths)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 100))
    def release(self, choice: int) -> None:
        paths = self.running.pop(choice % len(self.running))
        self.tick += 1
        self.pool.release([self.nodes[each].block for each in reversed(paths)], self.now)
        for each in paths:
            node = self.nodes[each]
            node.users -= 1
            if not node.users:
                node.tick = self.tick
                duration = node.retention.duration_s
                node.deadline = math.inf if duration is None else self.now + duration

    @precondition(lambda self: self.nodes)
    @rule(choice=st.integers(0, 100))
    def begin_copy(self, choice: int) -> None:
        node = self.nodes[sorted(self.nodes)[choice % len(self.nodes)]]
        self.pool.hold(node.block)
        node.copies += 1

    @rule(choice=st.integers(0, 100))
    def end_copy(self, choice: int) -> None:
        copied = [node for node in (*self.nodes.values(), *self.gone_while_copied) if node.copies]
        if not copied:
            return
        node = copied[choice % len(copied)]
        self.pool.unhold(node.block)
        node.copies -= 1
        if node in self.gone_while_copied and not node.copies:
            self.gone_while_copied.remove(node)

    @rule(seconds=st.sampled_from([1.0, 4.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    def expire(self) -> None:
        self.pool.expire(self.now)
        while True:
            due = [node for node in self.nodes.values() if not node.users and node.deadline <= self.now]
            if not due:
                return
            node = min(due, key=lambda each: each.deadline)
            if node.retention.on_expiry == "drop":
                for path in [each for each in self.nodes if each[: len(node.path)] == node.path]:
                    gone = self.nodes.pop(path)
                    if gone.copies:
                        self.gone_while_copied.append(gone)
            else:
                node.retention = Retention(min(node.retention.priority, 35), None, "demote")
                node.deadline = math.inf

    def victims(self, count: int, owner: int, in_use: set[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        """Rules 4.1, 4.2, 4.3 and 4.4, by looking at everything for every victim."""
        left = dict(self.nodes)
        held = [sum(node.owner == each for node in (*left.values(), *self.gone_while_copied)) for each in range(3)]
        free = NUM_BLOCKS - sum(held)
        weighing = {each for each in range(3) if held[each]} | {owner}
        held[owner] += count
        unit = NUM_BLOCKS / sum(WEIGHTS[each] for each in weighing)
        victims: list[tuple[int, ...]] = []
        while free < count:
            leaves = [node for node in left.values() if self.is_leaf(node, left, in_use)]
            if not leaves:
                return None
            excess = {node.owner: held[node.owner] - WEIGHTS[node.owner] * unit for node in leaves}
            most = max(excess.values())
            if most > 0:
                leaves = [node for node in leaves if excess[node.owner] == most]
            victim = min(leaves, key=lambda node: (node.retention.priority, node.tick, -len(node.path)))
            del left[victim.path]
            victims.append(victim.path)
            held[victim.owner] -= 1
            free += 1
        return victims

    def is_leaf(self, node: Node, left: dict[tuple[int, ...], Node], in_use: set[tuple[int, ...]]) -> bool:
        if node.users or node.copies or node.path in in_use:
            return False
        return not any(each[:-1] == node.path for each in left)

    @invariant()
    def same_index(self) -> None:
        assert {self.pool.tree.hash_of(block) for block in self.pool.tree.indexed()} == {
            hash_of(path) for path in self.nodes
        }
        for node in self.nodes.values():
            assert self.pool.ref_count(node.block) == node.users
            assert self.pool.priority(node.block) == node.retention.priority
        used = sum(1 for node in self.nodes.values() if node.users)
        assert self.pool.num_idle == len(self.nodes) - used
        assert self.pool.num_used == used + len(self.gone_while_copied)

    @invariant()
    def consistent(self) -> None:
        self.pool.check_invariants()


def hash_of(path: tuple[int, ...]) -> BlockHash:
    return BlockHash(hashlib.sha256(bytes(path)).digest())


def key_of(path: tuple[int, ...]) -> bytes:
    return b"".join(token.to_bytes(4, "big") for token in (path[-1], 7))


PoolAgainstScan.TestCase.settings = hypothesis_settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolAgainstScan = PoolAgainstScan.TestCase
