"""The table of chunks and their holders, of which the coordinator's layout map consists."""

from collections.abc import Sequence
from typing import ClassVar

class ChunkTable:
    """A table of chunks and their holders, about 40 bytes for each chunk. Not thread-safe.

    Keys are concatenated, 16 bytes each; tiers are numbered from 1, fastest first. A slot represents one instance: it
    is opened, shown to lookups, and retired. Its number is reused after a sweep. Methods raise `ValueError` for invalid
    arguments, before anything is changed.
    """

    MAX_TOKENS: ClassVar[int]
    """Maximum number of tokens of a chunk."""
    MAX_SPECS: ClassVar[int]
    """Maximum number of distinct fingerprints."""
    TIER_COUNT: ClassVar[int]

    def __init__(self) -> None: ...
    def __len__(self) -> int:
        """Number of chunks that have holders, including retired ones."""

    @property
    def slot_count(self) -> int:
        """Maximum number of slots that were open at one time."""

    @property
    def set_count(self) -> int:
        """Number of distinct sets of holders."""

    def open_slot(self) -> int:
        """Opens an empty slot, which lookups do not see yet."""

    def show(self, slot: int) -> None:
        """Makes an open slot visible to lookups."""

    def retire(self, slot: int) -> None:
        """Closes a slot and drops its chunks, in constant time; `sweep` frees the memory."""

    def admit(
        self,
        slot: int,
        tier: int,
        fingerprint: bytes,
        tokens: int,
        keys: bytes,
        partials: Sequence[tuple[int, int]] = (),
    ) -> bytes:
        """Adds chunks to a tier of an open slot; returns those that it did not hold there.

        They have `tokens` tokens, except those in `partials`: index and tokens, in order. A chunk's tokens and
        fingerprint are those of its first holder. Raises `OverflowError` if there are chunks of too many specs.
        """

    def evict(self, slot: int, tier: int, keys: bytes) -> bytes:
        """Removes chunks from a tier of an open slot; returns those that it held there."""

    def sweep(self, limit: int) -> bool:
        """Frees the chunks of retired slots, about `limit` at a time; returns whether there are more."""

    def lookup(self, keys: bytes, excluded: int = -1) -> list[tuple[int, int, int, list[tuple[int, int, int]]]]:
        """The visible slots that hold the first chunk, longest match first: slot, chunks, tokens, runs.

        A run is tier, chunks, tokens; a chunk in several tiers counts for the fastest.
        """

    def match_at(self, slot: int, tier: int, keys: bytes) -> tuple[int, int]:
        """Chunks and tokens of the prefix that a slot holds in a tier (0: any tier)."""

    def held(self, slot: int, tier: int, keys: bytes) -> bytes:
        """A byte per key: 1 if the slot holds it in the tier (0: any tier), else 0."""

    def fingerprint_of(self, key: bytes) -> bytes | None:
        """The fingerprint of a chunk, or None if lookups do not see it."""

    def scan(self, cursor: int, limit: int) -> tuple[int, list[tuple[int, int, bytes, bytes]]]:
        """A step of an iteration over visible chunks: the next cursor (0: end), and slot, tier, fingerprint, keys."""

    def holdings(self, slot: int) -> list[tuple[int, bytes, int, int]]:
        """Per tier and fingerprint of a slot: number of chunks, and sum of the keys' first 8 bytes modulo 2^64."""

    def check(self) -> None:
        """Raises `AssertionError` if the table is inconsistent. Reads all of it; for tests."""
