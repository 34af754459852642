"""Chooses the chunk that is evicted when a tier is full. Pure; each tier has a queue, with a policy of its owner.

A policy only orders chunks. The queue keeps chunks in use, and keeps a chunk as long as a chunk that follows it in a
prompt is there, under every policy:

in line ──choose──► its turn ──it has no hold───────────► evicted
   ▲                   └─────held, or has children──► set aside ──let go──► evicted first
   └──────────────────────────use─────────────────────────┘

A chunk that is superseded has its turn at once, and is evicted before those that are not. A retained chunk has its turn
when no others are left.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Protocol

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.learned import Learned

_FIRST = 1 << 62
"""Turns of superseded chunks are this much lower than their own, so that they precede those of all others."""


class EvictionPolicy(Protocol):
    """An order of chunks. Every call takes amortized constant time."""

    def ask(self, keys: Sequence[ChunkKey], missing: Sequence[ChunkKey]) -> None:
        """A prompt is asked for: `keys` are in the order, and are used next; `missing` follow them and are not there.

        Those of `missing` that are admitted afterwards are taken for parts of this prompt. Takes constant time a key.
        """

    def admit(self, key: ChunkKey) -> None:
        """Adds a chunk that is not in the order."""

    def use(self, key: ChunkKey) -> None:
        """Notes a use of a chunk. A chunk that was chosen and stayed is in the order again."""

    def forget(self, key: ChunkKey) -> None:
        """Removes a chunk that left for another reason; it may have been chosen before."""

    def choose(self) -> ChunkKey | None:
        """Removes and returns the next chunk to evict; None if the order is empty."""


class ByUses:
    """The base of policies that look at each chunk by itself, not at the prompts that it is part of."""

    def ask(self, keys: Sequence[ChunkKey], missing: Sequence[ChunkKey]) -> None:
        """Makes no difference."""


class Lru(ByUses):
    """Least recently used first."""

    def __init__(self) -> None:
        self._line: OrderedDict[ChunkKey, None] = OrderedDict()

    def admit(self, key: ChunkKey) -> None:
        self._line[key] = None

    def use(self, key: ChunkKey) -> None:
        self._line[key] = None
        self._line.move_to_end(key)

    def forget(self, key: ChunkKey) -> None:
        self._line.pop(key, None)

    def choose(self) -> ChunkKey | None:
        return self._line.popitem(last=False)[0] if self._line else None


class Arc(ByUses):
    """Adaptive replacement (Megiddo and Modha, FAST '03): those used once and those used again, each by recency.

    Chunks that were used once go first as long as there are more of them than their share, so that a long document
    that is read once pushes out only others of its kind. The share follows what comes back soon after it was evicted:
    had a chunk that was used once been kept a little longer, its kind gets more room, and the other way round.
    """

    def __init__(self) -> None:
        self._once: OrderedDict[ChunkKey, None] = OrderedDict()
        self._again: OrderedDict[ChunkKey, None] = OrderedDict()
        self._once_chosen: OrderedDict[ChunkKey, None] = OrderedDict()  # keys that are out, in the order they left
        self._again_chosen: OrderedDict[ChunkKey, None] = OrderedDict()
        self._share = 0.0  # chunks that those used once may be

    def admit(self, key: ChunkKey) -> None:
        once, again = len(self._once_chosen), len(self._again_chosen)
        if key in self._once_chosen:
            self._share = min(self._share + max(1.0, again / once), len(self._once) + len(self._again))
        elif key in self._again_chosen:
            self._share = max(self._share - max(1.0, once / again), 0.0)
        else:
            self._once[key] = None
            return
        self.use(key)

    def use(self, key: ChunkKey) -> None:
        for line in (self._once, self._once_chosen, self._again_chosen):
            line.pop(key, None)
        self._again[key] = None
        self._again.move_to_end(key)

    def forget(self, key: ChunkKey) -> None:
        for line in (self._once, self._again, self._once_chosen, self._again_chosen):
            line.pop(key, None)

    def choose(self) -> ChunkKey | None:
        if self._once and (len(self._once) > self._share or not self._again):
            line, chosen = self._once, self._once_chosen
        elif self._again:
            line, chosen = self._again, self._again_chosen
        else:
            return None
        key, _ = line.popitem(last=False)
        chosen[key] = None
        while len(self._once_chosen) + len(self._again_chosen) > len(self._once) + len(self._again) + 1:
            more = self._once_chosen if len(self._once_chosen) > len(self._again_chosen) else self._again_chosen
            more.popitem(last=False)
        return key


POLICIES: Mapping[str, Callable[[], EvictionPolicy]] = {"learned": Learned, "lru": Lru, "arc": Arc}
"""The policies by their value of `eviction_policy`."""


class EvictionQueue:
    """The chunks of one tier; those without holds are evicted in the order of a policy.

    A chunk counts as held by each of its children, the chunks that come next in some prompt: without it they could not
    be found. All times are constant over many calls, but for a logarithm of how many were set aside and let go.
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self._policy = policy or Lru()
        self._parents: dict[ChunkKey, ChunkKey | None] = {}  # of every chunk that is there
        self._holds: dict[ChunkKey, int] = {}
        self._children: dict[ChunkKey, int] = {}  # also of parents that are not there
        self._aside: dict[ChunkKey, int] = {}  # whose turn came while they were held, in the order of their turns
        self._let_go: list[tuple[int, ChunkKey]] = []  # heap; entries whose turn is not that of `_aside` are void
        self._waiting: set[ChunkKey] = set()  # who has an entry there that is not void
        self._turns = 0
        self._superseded: OrderedDict[ChunkKey, None] = OrderedDict()  # whose turn has not come; not in the policy
        self._superseded_children: dict[ChunkKey, int] = {}  # those among `_children`, also if they were set aside
        self._retained: dict[ChunkKey, tuple[int, int]] = {}  # priority and turn; not in the policy
        self._retained_line: list[tuple[int, int, ChunkKey]] = []  # heap; entries unlike those of `_retained` are void
        self._retained_held: set[ChunkKey] = set()  # whose turn came while they were held; not in that heap

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._parents

    def add(self, key: ChunkKey, parent: ChunkKey | None = None) -> None:
        """Adds a chunk; `parent` is the chunk before it in its prompts, which may be added later.

        A parent that is a descendant of the chunk is ignored: keys are hashes of what is before them, so the client
        invented these.
        """
        assert key not in self._parents, "added twice"
        if parent is not None and self._descends(parent, key):
            parent = None
        self._parents[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._policy.admit(key)

    def use(self, keys: Sequence[ChunkKey], missing: Sequence[ChunkKey] | None = None) -> None:
        """Chunks of a prompt, in its order, were used. The head becomes the youngest: tails are evicted first.

        If they were used because the prompt was asked for, `missing` are those of its chunks behind them, which are
        not there; None if it was not.
        """
        if missing is not None:
            self._policy.ask(keys, missing)
        for key in reversed(keys):
            assert key in self._parents, "use of a chunk that is not there"
            if key in self._retained:
                continue
            if key in self._aside or key in self._superseded:
                self._back(key)
            self._policy.use(key)

    def supersede(self, key: ChunkKey) -> None:
        """Has the chunk evicted before all that are not superseded, once it has no hold, unless it is used before."""
        assert key in self._parents, "supersession of a chunk that is not there"
        self._back(key)
        self._end_retention(key)
        self._policy.forget(key)
        self._superseded[key] = None
        self._count_superseded(key, 1)

    def retain(self, key: ChunkKey, priority: int) -> None:
        """Has the chunk evicted after all that are not retained, and after those of lower priority, until `release`."""
        assert key in self._parents, "retention of a chunk that is not there"
        self._back(key)
        self._end_retention(key)
        self._policy.forget(key)
        self._turns += 1
        self._retained[key] = priority, self._turns
        heapq.heappush(self._retained_line, (priority, self._turns, key))
        if len(self._retained_line) > 2 * len(self._retained) + 16:
            in_line = self._retained.keys() - self._retained_held
            self._retained_line = [(*self._retained[one], one) for one in in_line]
            heapq.heapify(self._retained_line)

    def release(self, key: ChunkKey) -> None:
        """Ends a retention, if there is one: the chunk counts as just used."""
        if key in self._retained:
            self._end_retention(key)
            self._policy.use(key)

    def is_retained(self, key: ChunkKey) -> bool:
        return key in self._retained

    def is_free(self, key: ChunkKey) -> bool:
        """Whether the chunk is neither held, nor continued by another one, nor retained."""
        return not self._is_held(key) and key not in self._retained

    def tail(self, keys: Sequence[ChunkKey], kept: Container[ChunkKey] = ()) -> list[ChunkKey]:
        """Returns the chunks of a prompt, each behind its parent, that no other prompt continues; the last one first.

        Neither does a chunk of `kept`, which is not among the result. Superseded chunks do not count as a continuation.
        """
        found: list[ChunkKey] = []
        found_children: Counter[ChunkKey] = Counter()
        for key in reversed(keys):
            assert key in self._parents, "tail of a chunk that is not there"
            others = self._children.get(key, 0) - self._superseded_children.get(key, 0) - found_children[key]
            if key in kept or others > 0:
                continue
            found.append(key)
            parent = self._parents[key]
            if parent is not None and not self._is_superseded(key):
                found_children[parent] += 1
        return found

    def hold(self, key: ChunkKey) -> None:
        """Keeps the chunk until `unhold` was called as often."""
        assert key in self._parents, "hold of a chunk that is not there"
        self._holds[key] = self._holds.get(key, 0) + 1

    def unhold(self, key: ChunkKey) -> None:
        """Ends one hold."""
        assert key in self._holds, "unhold without hold"
        self._decrease(self._holds, key)

    def remove(self, key: ChunkKey) -> None:
        """Removes the chunk, held or not, and its holds. Its children stay, and keep it if it is added again."""
        self._back(key)
        self._holds.pop(key, None)
        self._policy.forget(key)
        self._leave(key)

    def pop(self) -> ChunkKey | None:
        """Removes and returns the next chunk to evict; None if every chunk is held."""
        while self._superseded:
            key, _ = self._superseded.popitem(last=False)
            if not self._is_held(key):
                self._count_superseded(key, -1)
                self._leave(key)
                return key
            self._turns += 1
            self._aside[key] = self._turns - _FIRST
        while self._let_go:
            turn, key = heapq.heappop(self._let_go)
            if self._aside.get(key) != turn:
                continue
            self._waiting.remove(key)
            if not self._is_held(key):
                self._back(key)
                self._leave(key)
                return key
        while (chosen := self._policy.choose()) is not None:
            if not self._is_held(chosen):
                self._leave(chosen)
                return chosen
            self._turns += 1
            self._aside[chosen] = self._turns
        while self._retained_line:
            priority, turn, key = heapq.heappop(self._retained_line)
            if self._retained.get(key) != (priority, turn):
                continue
            if not self._is_held(key):
                self._leave(key)
                return key
            self._retained_held.add(key)
        return None

    def _is_held(self, key: ChunkKey) -> bool:
        return key in self._holds or key in self._children

    def _back(self, key: ChunkKey) -> None:
        """Takes the chunk back from those that were set aside or are superseded, if it is one."""
        if self._is_superseded(key):
            self._count_superseded(key, -1)
        self._superseded.pop(key, None)
        self._aside.pop(key, None)
        self._waiting.discard(key)

    def _is_superseded(self, key: ChunkKey) -> bool:
        return key in self._superseded or self._aside.get(key, 0) < 0

    def _count_superseded(self, key: ChunkKey, change: int) -> None:
        parent = self._parents[key]
        if parent is not None:
            count = self._superseded_children.pop(parent, 0) + change
            if count:
                self._superseded_children[parent] = count

    def _end_retention(self, key: ChunkKey) -> None:
        self._retained.pop(key, None)
        self._retained_held.discard(key)

    def _leave(self, key: ChunkKey) -> None:
        self._end_retention(key)
        parent = self._parents.pop(key)
        if parent is not None:
            self._decrease(self._children, parent)

    def _decrease(self, counts: dict[ChunkKey, int], key: ChunkKey) -> None:
        if counts[key] > 1:
            counts[key] -= 1
            return
        del counts[key]
        if key in self._retained_held and not self._is_held(key):
            self._retained_held.remove(key)
            heapq.heappush(self._retained_line, (*self._retained[key], key))
        if key in self._aside and key not in self._waiting and not self._is_held(key):
            self._waiting.add(key)
            heapq.heappush(self._let_go, (self._aside[key], key))

    def _descends(self, key: ChunkKey, ancestor: ChunkKey) -> bool:
        """Whether `key` is `ancestor` or comes after it. A walk up only if the ancestor has children already."""
        if ancestor not in self._children:
            return key == ancestor
        above: ChunkKey | None = key
        while above is not None and above != ancestor:
            above = self._parents.get(above)
        return above is not None

    def check(self) -> None:
        """Asserts that counts match the chunks, and that no evictable chunk stays set aside."""
        assert Counter(parent for parent in self._parents.values() if parent is not None) == self._children
        assert all(key in self._parents and count > 0 for key, count in self._holds.items())
        ready = {key for turn, key in self._let_go if self._aside.get(key) == turn}
        assert self._waiting == ready >= {key for key in self._aside if not self._is_held(key)}
        assert self._superseded.keys() <= self._parents.keys() - self._aside.keys()
        superseded = [self._parents[key] for key in self._parents if self._is_superseded(key)]
        assert Counter(parent for parent in superseded if parent is not None) == self._superseded_children
        assert self._retained.keys() <= self._parents.keys() - self._aside.keys() - self._superseded.keys()
        in_line = {key for priority, turn, key in self._retained_line if self._retained.get(key) == (priority, turn)}
        assert in_line | self._retained_held == self._retained.keys()
        assert not in_line & self._retained_held
        assert all(self._is_held(key) for key in self._retained_held)
