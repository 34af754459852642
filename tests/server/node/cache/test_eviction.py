"""Every policy against a model of what the queue promises, and what each policy is there for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lmkv.config import NodeConfig, keys
from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import POLICIES, Arc, EvictionPolicy, EvictionQueue, Lru
from lmkv_server.node.cache.learned import Learned
from tests.server.node.cases import chunk_key

NUMBERS = st.integers(0, 11)


def number_of(key: ChunkKey) -> int:
    return int.from_bytes(key, "big")


def parent_of(number: int) -> int | None:
    """Two prompts of six chunks that share their first two: 0 1 2 3 4 5 and 0 1 6 7 8 9. 10 and 11 stand alone."""
    return None if number in (0, 10, 11) else 1 if number == 6 else number - 1


def prompt_to(number: int) -> list[int]:
    """The chunks from the head of a prompt to this one."""
    above = parent_of(number)
    return [*([] if above is None else prompt_to(above)), number]


def add(queue: EvictionQueue, *numbers: int) -> None:
    for number in numbers:
        above = parent_of(number)
        queue.add(chunk_key(number), None if above is None else chunk_key(above))


def use(queue: EvictionQueue, *numbers: int) -> None:
    queue.use([chunk_key(number) for number in numbers])


def evicted(queue: EvictionQueue) -> list[int]:
    """The evicted chunks, in order, until none can be evicted."""
    gone = []
    while (key := queue.pop()) is not None:
        gone.append(number_of(key))
        queue.check()
    return gone


class QueueAgainstModel(RuleBasedStateMachine):
    """The model knows who is there, in order of use, how often each is held, and which are superseded."""

    policy: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.queue = EvictionQueue(self.make())
        self.there: dict[int, int] = {}
        """Holds of each, least recently used first."""
        self.superseded: set[int] = set()
        self.retained: dict[int, int] = {}
        """Priority of each retained chunk."""

    @staticmethod
    def make() -> EvictionPolicy:
        """The policy; each machine has its own."""
        raise NotImplementedError

    def can_go(self) -> list[int]:
        parents = {parent_of(number) for number in self.there}
        return [number for number, holds in self.there.items() if not holds and number not in parents]

    @rule(number=NUMBERS)
    def add(self, number: int) -> None:
        if number not in self.there:
            add(self.queue, number)
            self.there[number] = 0

    @rule(number=NUMBERS, asked=st.booleans())
    def use(self, number: int, asked: bool) -> None:
        found = []
        for one in prompt_to(number):
            if one not in self.there:
                break
            found.append(one)
        prompt = [chunk_key(one) for one in prompt_to(number)]
        self.queue.use(prompt[: len(found)], prompt[len(found) :] if asked else None)
        for one in reversed(found):
            self.there[one] = self.there.pop(one)
        self.superseded.difference_update(found)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def supersede(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        self.queue.supersede(chunk_key(number))
        self.superseded.add(number)
        self.retained.pop(number, None)

    @precondition(lambda self: self.there)
    @rule(data=st.data(), priority=st.integers(1, 3))
    def retain(self, data: st.DataObject, priority: int) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        self.queue.retain(chunk_key(number), priority)
        self.superseded.discard(number)
        self.retained[number] = priority

    @rule(number=NUMBERS)
    def release(self, number: int) -> None:
        self.queue.release(chunk_key(number))
        if self.retained.pop(number, None):
            self.there[number] = self.there.pop(number)

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        self.queue.hold(chunk_key(number))
        self.there[number] += 1

    @precondition(lambda self: any(self.there.values()))
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from([number for number, holds in self.there.items() if holds]))
        self.queue.unhold(chunk_key(number))
        self.there[number] -= 1

    @precondition(lambda self: self.there)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.there)))
        self.queue.remove(chunk_key(number))
        del self.there[number]
        self.superseded.discard(number)
        self.retained.pop(number, None)

    @rule()
    def pop(self) -> None:
        key = self.queue.pop()
        if key is None:
            assert not self.can_go(), "a chunk could have been evicted"
            return
        number = number_of(key)
        assert number in self.can_go(), "it was held, or a child of it is there"
        if early := self.superseded.intersection(self.can_go()):
            assert number in early, "one that is superseded could have been evicted"
            self.superseded.remove(number)
        elif not self.oldest():
            assert self.retained[number] == min(self.retained[one] for one in self.can_go())
            del self.retained[number]
        elif self.policy == "lru":
            assert self.there[number] == 0
            assert number == self.oldest()[0], "another chunk was used less recently"
        else:
            assert number in self.oldest(), "it was retained"
        del self.there[number]

    def oldest(self) -> list[int]:
        """Those that can be evicted and are not retained, the least recently used first."""
        return [number for number in self.can_go() if number not in self.retained]

    @invariant()
    def agrees(self) -> None:
        self.queue.check()
        assert len(self.queue) == len(self.there)
        assert all(chunk_key(number) in self.queue for number in self.there)
        assert all(self.queue.is_retained(chunk_key(number)) == (number in self.retained) for number in range(12))

    def teardown(self) -> None:
        for number, holds in self.there.items():
            for _ in range(holds):
                self.queue.unhold(chunk_key(number))
        assert sorted(evicted(self.queue)) == sorted(self.there), "some can never go"


def machine(policy: str, make: Callable[[], EvictionPolicy]) -> Any:
    cls: Any = type(policy, (QueueAgainstModel,), {"policy": policy, "make": staticmethod(make)})
    case = cls.TestCase
    case.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
    return case


TestLru = machine("lru", Lru)
TestArc = machine("arc", Arc)
TestLearned = machine("learned", Learned)


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_can_be_configured(name: str) -> None:
    assert NodeConfig(eviction_policy=name).eviction_policy == name
    assert name in keys(NodeConfig)["eviction_policy"].kind.expects


def test_every_policy_has_a_model_test() -> None:
    assert {f"Test{name.capitalize()}" for name in POLICIES} <= globals().keys()


def test_a_prompt_that_came_head_first_leaves_tail_first() -> None:
    queue = EvictionQueue()
    add(queue, 0, 1, 2, 3, 10)
    assert evicted(queue) == [3, 2, 1, 0, 10]


def test_what_prompts_share_leaves_after_them() -> None:
    queue = EvictionQueue()
    add(queue, 0, 1, 2, 6, 3, 7)
    assert evicted(queue) == [3, 2, 7, 6, 1, 0]


def test_a_parent_that_comes_late_is_kept_too() -> None:
    queue = EvictionQueue()
    add(queue, 2, 1, 0)
    assert evicted(queue) == [2, 1, 0]


def test_a_parent_that_comes_again_is_kept_by_the_children_that_stayed() -> None:
    queue = EvictionQueue()
    add(queue, 0, 1, 2)
    queue.remove(chunk_key(1))
    queue.hold(chunk_key(2))
    add(queue, 1)
    assert evicted(queue) == []
    queue.unhold(chunk_key(2))
    assert evicted(queue) == [2, 1, 0]


def test_superseded_chunks_leave_before_those_that_were_let_go() -> None:
    queue = EvictionQueue()
    add(queue, 10, 11, 0)
    for number in (10, 11):
        queue.hold(chunk_key(number))
    assert evicted(queue) == [0]
    queue.supersede(chunk_key(11))
    add(queue, 1)
    assert evicted(queue) == [1]
    for number in (10, 11):
        queue.unhold(chunk_key(number))
    assert evicted(queue) == [11, 10]


def test_a_use_ends_supersession() -> None:
    queue = EvictionQueue()
    add(queue, 0, 10, 11)
    queue.supersede(chunk_key(10))
    queue.supersede(chunk_key(11))
    use(queue, 11)
    assert evicted(queue) == [10, 0, 11]


def test_retained_chunks_leave_last_and_by_priority() -> None:
    queue = EvictionQueue()
    add(queue, 10, 11, 0, 6)
    queue.retain(chunk_key(10), 7)
    queue.retain(chunk_key(11), 3)
    use(queue, 10)
    assert evicted(queue) == [0, 6, 11, 10]


def test_a_released_chunk_counts_as_just_used() -> None:
    queue = EvictionQueue()
    add(queue, 10, 11, 0)
    queue.retain(chunk_key(10), 1)
    queue.release(chunk_key(10))
    queue.release(chunk_key(11))
    assert evicted(queue) == [11, 0, 10]


def test_a_retained_chunk_on_hold_returns_to_its_place() -> None:
    queue = EvictionQueue()
    add(queue, 10, 11)
    queue.retain(chunk_key(10), 1)
    queue.retain(chunk_key(11), 2)
    queue.hold(chunk_key(10))
    assert queue.pop() == chunk_key(11)
    assert queue.pop() is None
    add(queue, 0)
    queue.unhold(chunk_key(10))
    assert evicted(queue) == [0, 10]


def test_retaining_again_and_again_leaves_no_trail() -> None:
    queue = EvictionQueue()
    add(queue, 10)
    for turn in range(1000):
        queue.retain(chunk_key(10), turn)
        queue.check()
    assert len(queue._retained_line) <= 20


def test_the_tail_of_a_prompt_ends_where_another_one_continues() -> None:
    queue = EvictionQueue()
    add(queue, 0, 1, 2, 3, 6)
    prompt = [chunk_key(number) for number in (0, 1, 2, 3)]
    assert [number_of(key) for key in queue.tail(prompt)] == [3, 2]
    assert [number_of(key) for key in queue.tail(prompt[:3])] == []
    queue.supersede(chunk_key(6))
    assert [number_of(key) for key in queue.tail(prompt)] == [3, 2, 1, 0]
    queue.supersede(chunk_key(3))
    assert [number_of(key) for key in queue.tail(prompt)] == [3, 2, 1, 0]
    assert [number_of(key) for key in queue.tail(prompt[:3])] == [2, 1, 0]
    assert [number_of(key) for key in queue.tail(prompt, {chunk_key(2)})] == [3]


def test_a_chunk_on_hold_keeps_all_before_it() -> None:
    queue = EvictionQueue()
    add(queue, 0, 1, 2, 3)
    queue.hold(chunk_key(2))
    assert evicted(queue) == [3]
    queue.unhold(chunk_key(2))
    assert evicted(queue) == [2, 1, 0]


@pytest.mark.parametrize("circle", [[(0, 0)], [(0, 1), (1, 0)], [(0, 2), (1, 0), (2, 1)]])
def test_invented_keys_do_not_use_memory_for_ever(circle: list[tuple[int, int]]) -> None:
    queue = EvictionQueue()
    for number, parent in circle:
        queue.add(chunk_key(number), chunk_key(parent))
    assert sorted(evicted(queue)) == sorted(number for number, _ in circle)


class Counted:
    """A policy that counts what it is asked."""

    def __init__(self, inner: EvictionPolicy) -> None:
        self.inner = inner
        self.choices = 0
        self.ask, self.admit, self.use, self.forget = inner.ask, inner.admit, inner.use, inner.forget

    def choose(self) -> ChunkKey | None:
        self.choices += 1
        return self.inner.choose()


def test_a_chunk_that_is_held_again_and_again_leaves_no_trail() -> None:
    queue = EvictionQueue()
    add(queue, 0, 10)
    queue.hold(chunk_key(0))
    assert queue.pop() == chunk_key(10)
    for _ in range(100):
        queue.unhold(chunk_key(0))
        queue.hold(chunk_key(0))
        queue.check()
    assert len(queue._let_go) == 1
    assert queue.pop() is None
    queue.unhold(chunk_key(0))
    assert evicted(queue) == [0]


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_chunks_on_hold_are_looked_at_once(make: Callable[[], EvictionPolicy]) -> None:
    policy = Counted(make())
    queue = EvictionQueue(policy)
    for number in range(100, 200):
        queue.add(chunk_key(number))
        queue.hold(chunk_key(number))
    for number in range(200, 300):
        queue.add(chunk_key(number))
        assert queue.pop() == chunk_key(number)
    assert policy.choices <= 200


def filled(policy: EvictionPolicy, capacity: int, arrivals: Iterable[ChunkKey], hot: Sequence[ChunkKey]) -> int:
    """How many of the hot ones are there after others came, each hot one being used twice before."""
    queue = EvictionQueue(policy)
    for key in hot:
        queue.add(key)
        queue.use([key])
    for key in arrivals:
        if len(queue) == capacity:
            queue.pop()
        queue.add(key)
    return sum(key in queue for key in hot)


@pytest.mark.parametrize(("policy", "left"), [("lru", 0), ("arc", 10)])
def test_a_scan_pushes_out_what_is_used_again_and_again_or_not(policy: str, left: int) -> None:
    hot = [chunk_key(number) for number in range(100, 110)]
    scan = [chunk_key(number) for number in range(200, 400)]
    assert filled(POLICIES[policy](), 20, scan, hot) == left


def test_arc_gives_room_to_those_used_once_when_they_come_back() -> None:
    policy = Arc()
    queue = EvictionQueue(policy)
    for number in range(10):
        queue.add(chunk_key(100 + number))
        queue.use([chunk_key(100 + number)])
    for turn in range(4):
        for number in range(200, 206):  # each comes back soon after it was evicted
            if chunk_key(number) not in queue:
                while len(queue) >= 14:
                    queue.pop()
                queue.add(chunk_key(number))
            elif turn:
                queue.use([chunk_key(number)])
    assert all(chunk_key(number) in queue for number in range(200, 206))


def test_what_a_policy_remembers_of_evicted_chunks_is_bounded() -> None:
    policy = Arc()
    queue = EvictionQueue(policy)
    for number in range(1000):
        queue.add(chunk_key(number))
        if len(queue) > 10:
            queue.pop()
    assert len(policy._once_chosen) + len(policy._again_chosen) <= 11


def test_superseded_chunks_leave_in_the_order_in_which_they_were_superseded() -> None:
    queue = EvictionQueue()
    add(queue, 0, 10, 11)
    for number in (11, 0, 10):
        queue.supersede(chunk_key(number))
    assert evicted(queue) == [11, 0, 10]
