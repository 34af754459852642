"""A bounded memory of chunks that were lost, and why. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from lmkv.keys import ChunkKey
from lmkv.misses.reason import MissReason

WAYS = 4
"""Entries that a key may be in."""
HEAD_BYTES = 8
"""Bytes of a key that the memory keeps."""
CODE_BITS = 16
"""Bits of an entry for the reason and the tier."""
MAX_TIERS = 256
CAPACITY = 1 << 17
"""Entries of a memory, unless another number is given: 2 MiB."""

_REASONS = list(MissReason)
_NUMBERS = {reason: number for number, reason in enumerate(_REASONS)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Why and when a chunk was lost."""

    tier: str
    """The tier that it left."""
    reason: MissReason
    time: float
    """Seconds since 1970."""


class LossMemory:
    """The reason and time of each key's last loss, in 16 bytes a key. Constant time; the oldest entries are replaced.

    A key is found by its first 8 bytes; each has four entries that it may be in. Memory is taken once and never grows.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity` is the number of entries, a multiple of 4."""
        assert capacity >= WAYS
        assert capacity % WAYS == 0
        self._set_count = capacity // WAYS
        self._heads = array("Q", bytes(HEAD_BYTES * capacity))
        self._losses = array("Q", bytes(HEAD_BYTES * capacity))
        """Milliseconds since 1970, then numbers of reason and tier: the oldest is the smallest. 0 in a free entry."""
        self._tiers: list[str] = []

    def add(self, key: ChunkKey, tier: str, reason: MissReason, time: float) -> None:
        """Records the loss of a key from a tier at `time`, in seconds since 1970, in place of an earlier one."""
        head, entries = self._entries(key)
        at = next((entry for entry in entries if self._heads[entry] == head), None)
        if at is None:
            at = min(entries, key=self._losses.__getitem__)
        self._heads[at] = head
        self._losses[at] = int(time * 1000) << CODE_BITS | _NUMBERS[reason] * MAX_TIERS | self._tier_number(tier)

    def discard(self, key: ChunkKey) -> None:
        """Forgets the key: it is held again."""
        head, entries = self._entries(key)
        for entry in entries:
            if self._heads[entry] == head:
                self._losses[entry] = self._heads[entry] = 0

    def get(self, key: ChunkKey) -> Loss | None:
        """The key's last loss; None if there was none since it was held, or it is forgotten."""
        head, entries = self._entries(key)
        for entry in entries:
            if self._heads[entry] == head and (loss := self._losses[entry]):
                reason, tier = divmod(loss % (1 << CODE_BITS), MAX_TIERS)
                return Loss(tier=self._tiers[tier], reason=_REASONS[reason], time=(loss >> CODE_BITS) / 1000)
        return None

    def __len__(self) -> int:
        return sum(map(bool, self._losses))

    def _tier_number(self, tier: str) -> int:
        if tier not in self._tiers:
            assert len(self._tiers) < MAX_TIERS
            self._tiers.append(tier)
        return self._tiers.index(tier)

    def _entries(self, key: ChunkKey) -> tuple[int, range]:
        head = int.from_bytes(key[:HEAD_BYTES], "little")
        first = head % self._set_count * WAYS
        return head, range(first, first + WAYS)
