"""The chunks of a layout map in which prompts end, by the chunk before them. Pure; used by `LayoutMap`.

The map drops the chunks of an instance without naming them, so some chunks here may have no holder any more. Whenever a
chunk is added, two others are looked at, and removed if no instance holds them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from lmkv.keys import KEY_BYTES, split_keys
from lmkv.prompt import EndIndex

LOOKED_AT = 2
"""Chunks that are looked at for each one that is added."""
MAX_LOST = 256
"""Chunks of a change that are removed at once: some 50 microseconds. Those of larger ones are removed in time."""


class PartialChunkMap:
    """Chunks in which prompts end and whose parents are known, by key.

    `is_held` returns whether an instance holds a chunk.
    """

    def __init__(self, is_held: Callable[[bytes], bool]) -> None:
        self._is_held = is_held
        self.index: EndIndex[bytes] = EndIndex()
        self._queue: deque[bytes] = deque()
        """Every chunk of the index, the one to look at next first; and at most as many others, which were removed."""

    def __len__(self) -> int:
        return len(self.index)

    def add(self, key: bytes, parent: bytes, token_count: int, prefix_digests: bytes = b"", *, look: bool) -> None:
        """Adds a chunk; with `look`, looks at others."""
        if key not in self.index:
            self._queue.append(key)
        self.index.add(key, parent, token_count, prefix_digests)
        for _ in range(min(LOOKED_AT, len(self._queue)) if look else 0):
            oldest = self._queue.popleft()
            if oldest in self.index and self._is_held(oldest):
                self._queue.append(oldest)
            else:
                self.index.remove(oldest)
        self._trim()

    def lost(self, keys: bytes) -> None:
        """Removes those of the chunks, which an instance has lost, that no other instance holds."""
        if self.index and len(keys) <= MAX_LOST * KEY_BYTES:
            self.index.remove_all(key for key in split_keys(keys) if key in self.index and not self._is_held(key))
            self._trim()

    def _trim(self) -> None:
        """Bounds the queue: chunks that were removed wait in it to be looked at, which may never be."""
        if len(self._queue) > 2 * len(self.index):
            self._queue = deque(self.index)

    def check(self) -> None:
        """Asserts the invariants."""
        self.index.check()
        assert set(self.index) <= set(self._queue)
        assert len(self._queue) <= 2 * len(self.index)
