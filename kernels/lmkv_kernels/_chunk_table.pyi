"""Which slot holds which chunk in which tier: the coordinator's layout map without its names."""

from collections.abc import Sequence
from typing import ClassVar

class ChunkTable:
    """A table of chunks and their holders, about 40 bytes for each chunk. Not thread-safe.

    Keys are 16 bytes each, in one string; tiers are numbered from 1, fastest first. A slot stands for one instance; it
    is opened, shown to lookups, and retired. Its number is used again once a sweep has passed.
    Methods raise `ValueError`, before anything is changed, for arguments that make no sense.
    """

    MAX_TOKENS: ClassVar[int]
    """Most tokens that a chunk can have."""
    MAX_SPECS: ClassVar[int]
    """Most fingerprints under which there can be chunks at one time."""
    TIER_COUNT: ClassVar[int]

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """Chunks that have holders, though they may be retired."""

    @property
    def slot_count(self) -> int:
        """Slots that there were at one time."""

    @property
    def set_count(self) -> int:
        """Sets of holders that differ."""

    def open_slot(self) -> int:
        """A slot that holds nothing, and that lookups do not see."""

    def show(self, slot: int) -> None:
        """Lets lookups see an open slot."""

    def retire(self, slot: int) -> None:
        """Forgets an open slot and what it holds. Takes no time; `sweep` gives the memory back."""

    def admit(
        self,
        slot: int,
        tier: int,
        fingerprint: bytes,
        tokens: int,
        keys: bytes,
        partials: Sequence[tuple[int, int]] = (),
    ) -> bytes:
        """Notes chunks that an open slot now holds in a tier; returns those that it did not hold there.

        They have `tokens` tokens, but for those in `partials`: index and tokens, in order. A chunk's tokens and
        fingerprint are those that its first holder told. Raises `OverflowError` if there are chunks of too many specs.
        """

    def evict(self, slot: int, tier: int, keys: bytes) -> bytes:
        """Notes chunks that an open slot holds no longer in a tier; returns those that it did hold there."""

    def sweep(self, limit: int) -> bool:
        """Cleans up behind retired slots, about `limit` chunks at a time; returns whether there is more to do."""

    def lookup(self, keys: bytes, excluded: int = -1) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
        """Slots that lookups see and that hold the first chunk, longest match first: slot, chunks, tokens, runs.

        A run is tier, chunks, tokens; where a chunk is in several tiers, the fastest counts.
        """

    def match_at(self, slot: int, tier: int, keys: bytes) -> tuple[int, int]:
        """Chunks and tokens of the prefix that a slot holds in one tier (0: in any)."""

    def held(self, slot: int, tier: int, keys: bytes) -> bytes:
        """A byte per key: 1 if the slot holds it in the tier (0: in any), else 0."""

    def fingerprint_of(self, key: bytes) -> bytes | None:
        """The fingerprint of a chunk that lookups see."""

    def scan(self, cursor: int, limit: int) -> tuple[int, list[tuple[int, int, bytes, bytes]]]:
        """A step of a walk over what lookups see: the next cursor, at last 0, and slot, tier, fingerprint, keys."""

    def holdings(self, slot: int) -> list[tuple[int, bytes, int, int]]:
        """What a slot holds: tier, fingerprint, chunks, and the sum of their keys' first 8 bytes modulo 2^64."""

    def check(self) -> None:
        """Raises `AssertionError` if its parts do not agree. Reads everything: for tests."""
