"""Policies of eviction that were not chosen, for comparison with those that were."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.eviction import ByUses


class Sieve(ByUses):
    """SIEVE (Zhang et al., NSDI '24): one line, and a hand that evicts the first unused one it meets."""

    def __init__(self) -> None:
        self._ahead: OrderedDict[ChunkKey, bool] = OrderedDict()  # of the hand; whether each was used since it passed
        self._behind: OrderedDict[ChunkKey, bool] = OrderedDict()

    def admit(self, key: ChunkKey) -> None:
        self._ahead[key] = False

    def use(self, key: ChunkKey) -> None:
        (self._behind if key in self._behind else self._ahead)[key] = True

    def forget(self, key: ChunkKey) -> None:
        self._ahead.pop(key, None)
        self._behind.pop(key, None)

    def choose(self) -> ChunkKey | None:
        while self._ahead or self._behind:
            if not self._ahead:
                self._turn_back()
            key, used = self._ahead.popitem(last=False)
            if used:
                self._behind[key] = False
                continue
            if not self._ahead:  # immediately: new entries are appended after the old ones
                self._turn_back()
            return key
        return None

    def _turn_back(self) -> None:
        self._ahead, self._behind = self._behind, self._ahead


class S3Fifo(ByUses):
    """S3-FIFO (Yang et al., SOSP '23): what is not used while it passes a short line does not get into the long one."""

    SHORT_SHARE = 0.1
    MAX_USES = 3

    def __init__(self) -> None:
        self._short: OrderedDict[ChunkKey, int] = OrderedDict()  # with uses
        self._long: OrderedDict[ChunkKey, int] = OrderedDict()
        self._chosen: OrderedDict[ChunkKey, None] = OrderedDict()  # out of the short line

    def admit(self, key: ChunkKey) -> None:
        line = self._long if key in self._chosen else self._short
        self._chosen.pop(key, None)
        line[key] = 0

    def use(self, key: ChunkKey) -> None:
        line = self._short if key in self._short else self._long
        line[key] = min(line.get(key, -1) + 1, self.MAX_USES)
        self._chosen.pop(key, None)

    def forget(self, key: ChunkKey) -> None:
        for line in (self._short, self._long, self._chosen):
            line.pop(key, None)

    def choose(self) -> ChunkKey | None:
        while self._short or self._long:
            count = len(self._short) + len(self._long)
            if self._short and (len(self._short) >= self.SHORT_SHARE * count or not self._long):
                key, uses = self._short.popitem(last=False)
                if uses:
                    self._long[key] = 0
                    continue
                self._chosen[key] = None
                if len(self._chosen) > count:
                    self._chosen.popitem(last=False)
                return key
            key, uses = self._long.popitem(last=False)
            if not uses:
                return key
            self._long[key] = uses - 1
        return None


class TwoQueues(ByUses):
    """2Q (Johnson and Shasha, VLDB '94), half and half: only what comes back after its time gets into the LRU line."""

    def __init__(self) -> None:
        self._first: OrderedDict[ChunkKey, None] = OrderedDict()
        self._lru: OrderedDict[ChunkKey, None] = OrderedDict()
        self._chosen: OrderedDict[ChunkKey, None] = OrderedDict()  # out of the first

    def admit(self, key: ChunkKey) -> None:
        line = self._lru if key in self._chosen else self._first
        self._chosen.pop(key, None)
        line[key] = None

    def use(self, key: ChunkKey) -> None:
        if key not in self._first:
            self._chosen.pop(key, None)
            self._lru[key] = None
            self._lru.move_to_end(key)

    def forget(self, key: ChunkKey) -> None:
        for line in (self._first, self._lru, self._chosen):
            line.pop(key, None)

    def choose(self) -> ChunkKey | None:
        count = len(self._first) + len(self._lru)
        if self._first and (2 * len(self._first) >= count or not self._lru):
            key, _ = self._first.popitem(last=False)
            self._chosen[key] = None
            if len(self._chosen) > count:
                self._chosen.popitem(last=False)
            return key
        return self._lru.popitem(last=False)[0] if self._lru else None


class Gdsf(ByUses):
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs '98) for chunks of equal size and cost: by uses and age.

    The clock is the priority of the last chunk that was evicted; each use sets a chunk's priority to clock plus uses.
    """

    def __init__(self) -> None:
        self._priorities: dict[ChunkKey, tuple[int, int]] = {}  # with the number of the call, for equal priorities
        self._uses: dict[ChunkKey, int] = {}
        self._heap: list[tuple[tuple[int, int], ChunkKey]] = []  # entries that differ from `_priorities` are void
        self._clock = 0
        self._calls = 0

    def admit(self, key: ChunkKey) -> None:
        self.use(key)

    def use(self, key: ChunkKey) -> None:
        self._calls += 1
        self._uses[key] = self._uses.get(key, 0) + 1
        self._priorities[key] = (self._clock + self._uses[key], self._calls)
        heapq.heappush(self._heap, (self._priorities[key], key))
        if len(self._heap) > 64 + 4 * len(self._priorities):
            self._heap = [(priority, one) for one, priority in self._priorities.items()]
            heapq.heapify(self._heap)

    def forget(self, key: ChunkKey) -> None:
        self._priorities.pop(key, None)
        self._uses.pop(key, None)

    def choose(self) -> ChunkKey | None:
        while self._heap:
            priority, key = heapq.heappop(self._heap)
            if self._priorities.get(key) == priority:
                self._clock = priority[0]
                self.forget(key)
                return key
        return None
