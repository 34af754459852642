"""`Arc` against the algorithm of its paper, with plain lists."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import Arc
from tests.server.node.cases import chunk_key

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["come", "come", "use", "forget", "choose", "choose"]), st.integers(0, 9)), min_size=40
)


class ListedArc:
    """The four lists of the paper, each with the least recent first: T1, T2, and B1 and B2 of what was evicted."""

    def __init__(self) -> None:
        self.once: list[ChunkKey] = []
        self.again: list[ChunkKey] = []
        self.once_gone: list[ChunkKey] = []
        self.again_gone: list[ChunkKey] = []
        self.share = 0.0

    def come(self, key: ChunkKey) -> None:
        """A chunk is stored."""
        if key in self.once_gone:
            step = max(1.0, len(self.again_gone) / len(self.once_gone))
            self.share = min(self.share + step, len(self.once + self.again))
        elif key in self.again_gone:
            step = max(1.0, len(self.once_gone) / len(self.again_gone))
            self.share = max(self.share - step, 0.0)
        else:
            self.once.append(key)
            return
        self.use(key)

    def use(self, key: ChunkKey) -> None:
        """A chunk is used: again."""
        self.forget(key)
        self.again.append(key)

    def forget(self, key: ChunkKey) -> None:
        """A chunk is removed, whichever list has it."""
        for line in (self.once, self.again, self.once_gone, self.again_gone):
            if key in line:
                line.remove(key)

    def choose(self) -> ChunkKey | None:
        """Evicts the least recent of the list that has more than its share."""
        if not self.once and not self.again:
            return None
        is_once = bool(self.once) and (len(self.once) > self.share or not self.again)
        key = (self.once if is_once else self.again).pop(0)
        (self.once_gone if is_once else self.again_gone).append(key)
        while len(self.once_gone + self.again_gone) > len(self.once + self.again) + 1:
            longer = self.once_gone if len(self.once_gone) > len(self.again_gone) else self.again_gone
            longer.pop(0)
        return key


@given(ACTIONS)
def test_chunks_are_chosen_as_the_paper_says(actions: Sequence[tuple[str, int]]) -> None:
    policy, listed = Arc(), ListedArc()
    for action, number in actions:
        key = chunk_key(number)
        is_there = key in listed.once or key in listed.again
        if action == "choose":
            assert policy.choose() == listed.choose()
        elif action == "forget":
            policy.forget(key)
            listed.forget(key)
        elif action == "come" and not is_there:
            policy.admit(key)
            listed.come(key)
        elif is_there:
            policy.use(key)
            listed.use(key)
    while (key_or_none := listed.choose()) is not None:
        assert policy.choose() == key_or_none
    assert policy.choose() is None


def filled(once: int, again: int) -> tuple[Arc, list[ChunkKey]]:
    """A policy with chunks that were used once, then others that were used again."""
    policy, keys = Arc(), [chunk_key(number) for number in range(once + again)]
    for key in keys:
        policy.admit(key)
    for key in keys[once:]:
        policy.use(key)
    return policy, keys


def test_those_used_once_get_room_when_one_of_them_comes_back() -> None:
    policy, keys = filled(3, 3)
    assert policy.choose() == keys[0]
    policy.admit(keys[0])  # now among those used again; the others' share is 1
    assert policy.choose() == keys[1]
    policy.admit(keys[1])
    assert policy.choose() == keys[3], "one is left of those used once: its share"
