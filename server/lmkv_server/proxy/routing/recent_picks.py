"""What instances will hold soon: the chunks of prompts that were routed to them and are not reported yet. Pure.

Requests of one session may follow each other faster than an engine computes a prompt. Without this they would be spread
over engines that each compute the same prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from lmkv.keys import KEY_BYTES

TTL_SECONDS = 30.0
"""Time after which the layout map has what an engine stored; a request may also have failed."""
MAX_KEYS = 500_000
"""Keys that are kept, about 60 MB. More replace the oldest ones."""


class RecentPicks:
    """The last instance that each chunk's prompt was routed to. Time is passed in."""

    def __init__(self, ttl_seconds: float = TTL_SECONDS, max_keys: int = MAX_KEYS) -> None:
        self._ttl_seconds = ttl_seconds
        self._max_keys = max_keys
        self._picks: deque[tuple[float, str, bytes]] = deque()
        """Expiry, instance and keys, oldest first."""
        self._instances: dict[bytes, tuple[str, float]] = {}
        """Instance and expiry by key."""
        self._key_count = 0

    def add(self, keys: bytes, instance_id: str, now: float) -> None:
        """Records that a prompt with these chunks, 16 bytes each, was routed to an instance."""
        pick = (instance_id, now + self._ttl_seconds)
        self._picks.append((pick[1], instance_id, keys))
        self._key_count += len(keys) // KEY_BYTES
        self._instances.update(dict.fromkeys(_split(keys), pick))
        while self._picks and (self._picks[0][0] <= now or self._key_count > self._max_keys):
            self._drop_oldest()

    def matches(self, keys: bytes, now: float) -> Mapping[str, int]:
        """The number of leading chunks that instances will hold: of the one that the prompt's begin was routed to."""
        found: str | None = None
        count = 0
        for key in _split(keys):
            instance_id, expiry = self._instances.get(key, (None, 0.0))
            if instance_id is None or expiry <= now:
                break
            count += 1
            found = instance_id  # the last one: earlier chunks may be shared with prompts elsewhere
        return {found: count} if found is not None else {}

    def _drop_oldest(self) -> None:
        expiry, instance_id, keys = self._picks.popleft()
        self._key_count -= len(keys) // KEY_BYTES
        for key in _split(keys):
            if self._instances.get(key) == (instance_id, expiry):
                del self._instances[key]


def _split(keys: bytes) -> list[bytes]:
    split: list[bytes] = np.frombuffer(keys, f"V{KEY_BYTES}").tolist()  # a fifth of the time of slices
    return split
