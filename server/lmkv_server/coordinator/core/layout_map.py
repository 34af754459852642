"""The layout map: which instance holds which chunk in which tier. Pure; written by report streams, read by lookups.

`lmkv_kernels.ChunkTable` keeps it, with a slot for each instance; here slots get names and changes get revisions. What
an instance says in its opening snapshot goes into a slot of its own that nobody can see, and that takes the place of
the instance's slot when it is complete, whatever its size. Slots that are given up are masked out at once and swept
clean later, a few thousand chunks at a time.

Keys come and go as one string of bytes, 16 for each, so that nothing here works key by key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv.digests import EMPTY_DIGEST, Digest
from lmkv.errors import Full
from lmkv.keys import KEY_BYTES, join_keys, split_keys
from lmkv_kernels import ChunkTable

TIER_COUNT = ChunkTable.TIER_COUNT
"""Tiers are numbered from 1, fastest first, as in `lmkv.v1.Tier`."""
MAX_TOKENS = ChunkTable.MAX_TOKENS
"""Most tokens that a chunk can have."""

MIN_FINGERPRINTS = 256
"""Fingerprints that are noted before those without chunks are forgotten."""

_NO_PARTIALS: Mapping[int, int] = {}


class MatchRun(NamedTuple):  # a fifth of what a frozen dataclass takes to make, and every lookup makes some
    """Neighbouring chunks of a match in the same tier."""

    tier: int
    chunk_count: int
    token_count: int


class Match(NamedTuple):
    """How much of a prompt one instance holds, from the first chunk without a gap."""

    instance_id: str
    chunk_count: int
    token_count: int
    runs: tuple[MatchRun, ...]
    """In prompt order; together they are the whole match."""


class LayoutListener(Protocol):
    """Who wants to hear of every visible change. It is called before the method that made the change returns."""

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None:
        """An instance gained and lost chunks in one tier; the keys are those that really changed."""

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        """All that an instance holds is new: tiers, fingerprints and keys, in as many parts as they were told.

        Each key is there once per tier.
        """

    def gone(self, revision: int, instance_id: str) -> None:
        """An instance and all it held are gone."""


class Snapshot:
    """What one instance says it holds, while it is still saying so. `LayoutMap.stage` makes it."""

    def __init__(self, instance_id: str, slot: int, *, kept: bool) -> None:
        self.instance_id = instance_id
        self.slot = slot
        self.content: list[tuple[int, bytes, bytes]] | None = [] if kept else None
        """Tiers, fingerprints and keys, while somebody listens who will want them."""

    def note(self, tier: int, fingerprint: bytes, gained: bytes, lost: bytes) -> None:
        """Keeps up its content."""
        if self.content is None:
            return
        if gained:
            self.content.append((tier, fingerprint, gained))
        if lost:  # hardly ever: nodes tell what they hold, not what they held meanwhile
            dropped = set(split_keys(lost))
            self.content = [
                (at, of, join_keys(key for key in split_keys(keys) if key not in dropped) if at == tier else keys)
                for at, of, keys in self.content
            ]


class LayoutMap:
    """The layout map in memory. Not thread-safe: one event loop owns it.

    `chunk_keys`, like all keys, are 16 bytes each, in one string; tiers are numbers from 1 to `TIER_COUNT`.
    """

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        """Rises with each change that a lookup could see."""
        self.listener: LayoutListener | None = None
        self._table = ChunkTable()
        self._live: dict[str, int] = {}
        self._instance_ids: dict[int, str] = {}
        """The same, by slot."""
        self._staged: set[Snapshot] = set()
        self._fingerprints: set[bytes] = set()
        """Specs that chunks were reported under; some may hold none any more."""
        self._fingerprint_limit = MIN_FINGERPRINTS

    def __len__(self) -> int:
        """Chunks that somebody holds, or held until lately."""
        return len(self._table)

    # --- Writing -------------------------------------------------------------------------------------------------

    def apply(
        self,
        instance_id: str,
        tier: int,
        admitted: bytes = b"",
        evicted: bytes = b"",
        partial_token_counts: Mapping[int, int] = _NO_PARTIALS,
        *,
        chunk_size: int,
        fingerprint: bytes = b"",
    ) -> int:
        """Notes what an instance gained, then what it lost, in one tier; returns the revision after it.

        `partial_token_counts` maps an index into `admitted` to the chunk's tokens; every other one has `chunk_size`.
        Keys that are already noted, or are not there to be lost, change nothing. A chunk's tokens and spec are those
        that its first holder told. Raises `Full` if there are chunks of too many specs, `ValueError` if a chunk has
        more than `MAX_TOKENS`.
        """
        slot = self._live.get(instance_id)
        if slot is None:
            if not admitted:
                return self.revision
            slot = self._table.open_slot()
            self._show(instance_id, slot)
        gained, lost = self._write(slot, tier, admitted, evicted, partial_token_counts, chunk_size, fingerprint)
        if gained or lost:
            self.revision += 1
            if self.listener is not None:
                self.listener.changed(self.revision, instance_id, tier, fingerprint, gained, lost)
        return self.revision

    def stage(self, instance_id: str) -> Snapshot:
        """Opens a snapshot of what an instance holds. Nobody sees it until `install`; end it by that or `discard`."""
        staged = Snapshot(instance_id, self._table.open_slot(), kept=self.listener is not None)
        self._staged.add(staged)
        return staged

    def apply_staged(
        self,
        staged: Snapshot,
        tier: int,
        admitted: bytes = b"",
        evicted: bytes = b"",
        partial_token_counts: Mapping[int, int] = _NO_PARTIALS,
        *,
        chunk_size: int,
        fingerprint: bytes = b"",
    ) -> None:
        """As `apply`, into an open snapshot."""
        assert staged in self._staged, "the snapshot has ended"
        gained, lost = self._write(staged.slot, tier, admitted, evicted, partial_token_counts, chunk_size, fingerprint)
        staged.note(tier, fingerprint, gained, lost)

    def install(self, staged: Snapshot) -> int:
        """Makes a snapshot what the instance holds, all at once; returns the revision after it."""
        self._staged.remove(staged)
        self._hide(staged.instance_id)
        self._show(staged.instance_id, staged.slot)
        self.revision += 1
        if self.listener is not None:
            self.listener.replaced(self.revision, staged.instance_id, staged.content or [])
        return self.revision

    def discard(self, staged: Snapshot) -> None:
        """Forgets an open snapshot; one that has ended already is no error."""
        if staged in self._staged:
            self._staged.remove(staged)
            self._table.retire(staged.slot)

    def drop_instance(self, instance_id: str) -> None:
        """Forgets everything that an instance holds; one that holds nothing is no error."""
        if self._hide(instance_id):
            self.revision += 1
            if self.listener is not None:
                self.listener.gone(self.revision, instance_id)

    def sweep(self, limit: int) -> bool:
        """Cleans about `limit` chunks of slots that were given up; returns whether more are left to clean."""
        return self._table.sweep(limit)

    # --- Reading -------------------------------------------------------------------------------------------------

    def lookup(self, chunk_keys: bytes, excluded: str = "") -> list[Match]:
        """Everyone but `excluded` who holds the first chunk, with the contiguous prefix they hold.

        Longest first, then by instance id. Where a chunk is in several tiers, the fastest counts.
        """
        matches = [
            Match(self._instance_ids[slot], chunk_count, token_count, tuple(MatchRun(*run) for run in runs))
            for slot, chunk_count, token_count, runs in self._table.lookup(chunk_keys, self._live.get(excluded, -1))
        ]
        if len(matches) > 1:
            matches.sort(key=lambda match: (-match.chunk_count, match.instance_id))
        return matches

    def may_hold(self, fingerprint: bytes) -> bool:
        """Whether there may be chunks of a spec. Chunks that were reported without a spec may be of any."""
        return fingerprint in self._fingerprints or b"" in self._fingerprints

    def match_at(self, instance_id: str, tier: int, chunk_keys: bytes) -> tuple[int, int]:
        """Chunks and tokens of the contiguous prefix that an instance holds in one tier (0: in any)."""
        slot = self._live.get(instance_id)
        return (0, 0) if slot is None else self._table.match_at(slot, tier, chunk_keys)

    def held_mask(self, instance_id: str, tier: int, chunk_keys: bytes) -> NDArray[np.bool_]:
        """Which of the chunks an instance holds in one tier (0: in any)."""
        slot = self._live.get(instance_id)
        if slot is None:
            return np.zeros(len(chunk_keys) // KEY_BYTES, np.bool_)
        return np.frombuffer(self._table.held(slot, tier, chunk_keys), np.bool_)

    def fingerprint_of(self, chunk_key: bytes) -> bytes | None:
        """The spec that a chunk which somebody holds was reported under; None if nobody does."""
        return self._table.fingerprint_of(chunk_key)

    def scan(self, cursor: int, limit: int) -> tuple[int, list[tuple[str, int, bytes, bytes]]]:
        """A step of a walk over everything that is held, about `limit` keys of it, and where the next step begins.

        Begin with 0; the walk ends when 0 comes back. Parts are instance, tier, fingerprint and keys. The map may
        change between steps: what is held throughout is seen, the rest may be.
        """
        cursor, parts = self._table.scan(cursor, limit)
        return cursor, [(self._instance_ids[slot], tier, fingerprint, keys) for slot, tier, fingerprint, keys in parts]

    def digest(self, instance_id: str, tier: int) -> Digest:
        """The digest of what an instance holds in one tier, over all specs."""
        total = EMPTY_DIGEST
        for of_tier, _, chunk_count, key_sum in self._holdings(instance_id):
            if of_tier == tier:
                total = total.plus(Digest(chunk_count=chunk_count, key_sum=key_sum))
        return total

    def chunk_counts(self, instance_id: str) -> dict[tuple[int, bytes], int]:
        """Chunks that an instance holds, by tier and by the fingerprint they were reported under."""
        return {(tier, fingerprint): count for tier, fingerprint, count, _ in self._holdings(instance_id)}

    def check(self) -> None:
        """Asserts what must hold between any two calls. Reads everything: for tests."""
        self._table.check()
        assert self._instance_ids == {slot: instance_id for instance_id, slot in self._live.items()}
        assert self._instance_ids.keys().isdisjoint(staged.slot for staged in self._staged)

    # --- Inside --------------------------------------------------------------------------------------------------

    def _show(self, instance_id: str, slot: int) -> None:
        self._table.show(slot)
        self._live[instance_id] = slot
        self._instance_ids[slot] = instance_id

    def _hide(self, instance_id: str) -> bool:
        slot = self._live.pop(instance_id, None)
        if slot is None:
            return False
        del self._instance_ids[slot]
        self._table.retire(slot)
        return True

    def _holdings(self, instance_id: str) -> list[tuple[int, bytes, int, int]]:
        slot = self._live.get(instance_id)
        return [] if slot is None else self._table.holdings(slot)

    def _write(
        self,
        slot: int,
        tier: int,
        admitted: bytes,
        evicted: bytes,
        partial_token_counts: Mapping[int, int],
        chunk_size: int,
        fingerprint: bytes,
    ) -> tuple[bytes, bytes]:
        """Writes into an open slot; returns the keys that it gained and lost."""
        try:
            gained = self._table.admit(
                slot, tier, fingerprint, chunk_size, admitted, sorted(partial_token_counts.items())
            )
        except OverflowError:
            raise Full("there are chunks of too many specs; wait until some are gone", retry_seconds=1.0) from None
        if gained:
            self._note_fingerprint(fingerprint)
        return gained, self._table.evict(slot, tier, evicted)

    def _note_fingerprint(self, fingerprint: bytes) -> None:
        """Notes that there are chunks of a spec, and forgets specs without chunks once there are many."""
        self._fingerprints.add(fingerprint)
        if len(self._fingerprints) > self._fingerprint_limit:
            slots = [*self._live.values(), *(staged.slot for staged in self._staged)]
            self._fingerprints = {held for slot in slots for _, held, _, _ in self._table.holdings(slot)}
            self._fingerprint_limit = max(MIN_FINGERPRINTS, 2 * len(self._fingerprints))
