"""Chunks that a node gains and loses, until an engine's stream sends them. Used by `Outbox`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice

from lmkv.keys import ChunkKey
from lmkv.v1 import engine_service_pb2 as pb

MAX_CHANGES = 65_536
"""Most chunks whose change is kept, as the proto says."""
MAX_KEYS = 4096
"""Most keys in one message: 72 KiB."""

TierKey = tuple[str, ChunkKey]


class ChangeFeed:
    """The last change of each chunk of one spec. It begins with all chunks that are held."""

    def __init__(self, held: Callable[[], Iterable[TierKey]], limit: int = MAX_CHANGES) -> None:
        self._held = held
        self._limit = limit
        self._snapshot = deque(held())
        """Chunks that were held when the feed began, and were not sent yet."""
        self._changes: dict[TierKey, bool] = {}
        """Whether the chunk is held, by what has changed since."""
        self._overflowed = False

    def __bool__(self) -> bool:
        """Whether there is something to send."""
        return bool(self._snapshot or self._changes or self._overflowed)

    def add(self, tier: str, key: ChunkKey, *, held: bool) -> None:
        """Notes a change. Call it in the step that makes `held` yield or omit the chunk."""
        if self._overflowed:
            return
        self._changes[tier, key] = held
        if len(self._changes) > self._limit:
            self.restart()

    def restart(self) -> None:
        """Begins again with all chunks that are held when the next message is made."""
        self._snapshot.clear()
        self._changes.clear()
        self._overflowed = True

    def take(self) -> list[pb.TierChange]:
        """Removes what one message can carry."""
        taken = []
        if self._overflowed:
            self._overflowed = False
            self._snapshot.extend(self._held())
            taken.append(pb.TierChange(restarted=True))
        if self._snapshot:
            keys = [self._snapshot.popleft() for _ in range(min(MAX_KEYS, len(self._snapshot)))]
            return taken + _changes((one, True) for one in keys)
        changes = list(islice(self._changes.items(), MAX_KEYS))
        for one, _ in changes:
            del self._changes[one]
        return taken + _changes(changes)


def _changes(states: Iterable[tuple[TierKey, bool]]) -> list[pb.TierChange]:
    """One message for each tier."""
    changes: dict[str, pb.TierChange] = {}
    for (tier, key), held in states:
        change = changes.setdefault(tier, pb.TierChange(tier=tier))
        (change.stored_keys if held else change.removed_keys).append(key)
    return list(changes.values())
