"""The layout map: which instance holds which chunk in which tier. Pure; written by report streams, read by lookups.

`lmkv_kernels.ChunkTable` stores it, with a slot per instance; this module maps slots to instances and counts revisions.
The snapshot of an instance is staged in a slot that lookups do not see, and replaces the instance's slot when it is
complete, whatever its size. Retired slots are masked out at once and swept later, a few thousand chunks at a time.

Keys are passed as one string of bytes, 16 for each, so that no code here handles single keys.

The chunks in which prompts end are also kept by the chunk before them. The map drops the chunks of an instance without
naming them, so some of these may have no holder any more: whenever one is added, two others are looked at, and removed
if no instance holds them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from lmkv.end_index import EndIndex
from lmkv.errors import BadMessage, Full
from lmkv.keys import EMPTY_DIGEST, KEY_BYTES, ChunkKey, Digest, join_keys, part_key, split_keys
from lmkv.tiers import LAYOUT_TIERS
from lmkv_kernels import ChunkTable

LOOKED_AT = 2
"""Number of chunks that are looked at for each added chunk."""
MAX_LOST = 256
"""Maximum chunks of a change that are removed at once, in some 50 microseconds; others are removed over time."""


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


TIER_COUNT = ChunkTable.TIER_COUNT
"""The table numbers tiers from 1, fastest first; 0 means any. Outside of `core`, and of the records of a shared map,
tiers have ids: `tier_number` and `tier_id` translate."""
MAX_TOKENS = ChunkTable.MAX_TOKENS
"""Largest token count of a chunk."""

MIN_FINGERPRINTS = 256
"""Fingerprints that are stored before those without chunks are removed."""

_KEY = np.dtype(f"V{KEY_BYTES}")
_TIER_IDS = ("", *LAYOUT_TIERS)


def tier_number(tier: str) -> int:
    """The number of a tier in the table; 0 for an empty id. Raises `BadMessage` if layout maps have no such tier."""
    if tier not in _TIER_IDS:
        raise BadMessage(
            f"layout maps have no tier {tier[:100]!r}; their tiers are {', '.join(LAYOUT_TIERS)}", tier=tier[:100]
        )
    return _TIER_IDS.index(tier)


def tier_id(number: int) -> str:
    """The inverse of `tier_number`."""
    return _TIER_IDS[number]


class Change(msgspec.Struct, array_like=True, frozen=True):
    """Chunks that one instance gained, then chunks that it lost, in one tier; keys are 16 bytes each."""

    tier: int
    fingerprint: bytes
    """The fingerprint of their spec; empty if it is not known."""
    chunk_size: int
    """Tokens of each admitted chunk, except of those in `partial_token_counts`."""
    admitted: bytes = b""
    partial_token_counts: dict[int, int] = {}
    """The tokens of other chunks, by index in `admitted`."""
    evicted: bytes = b""
    partial_parents: dict[int, bytes] = {}
    """The key of the chunk before, or the root, of each chunk in which prompts end, by its index in `admitted`."""
    prefix_digests: dict[int, bytes] = {}
    """The known `lmkv.keys.prefix_digests` of chunks in `partial_parents`, by index in `admitted`."""

    def without_parents(self) -> Change:
        """The change of the chunks that are not in `partial_parents`."""
        keys = split_keys(self.admitted)
        kept = [index for index in range(len(keys)) if index not in self.partial_parents]
        counts = {
            place: self.partial_token_counts[index]
            for place, index in enumerate(kept)
            if index in self.partial_token_counts
        }
        admitted = join_keys(keys[index] for index in kept)
        return Change(self.tier, self.fingerprint, self.chunk_size, admitted, counts, self.evicted)


class MatchRun(NamedTuple):  # five times faster than a dataclass; every lookup creates some
    """Consecutive chunks of a match in the same tier."""

    tier: int
    chunk_count: int
    token_count: int


class Match(NamedTuple):
    """The contiguous prefix of a prompt that one instance holds."""

    instance_id: str
    chunk_count: int
    token_count: int
    runs: tuple[MatchRun, ...]
    """Runs in prompt order, which cover the match."""


class LayoutListener(Protocol):
    """Receives every visible change, before the method that made it returns."""

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None:
        """An instance gained and lost chunks in one tier; the keys are those that changed."""

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        """An instance's chunks were replaced; `content` has tiers, fingerprints and keys, each key once per tier."""

    def gone(self, revision: int, instance_id: str) -> None:
        """An instance and its chunks were removed."""


class Snapshot:
    """The chunks of one instance, while it reports its snapshot. Created by `LayoutMap.stage`."""

    def __init__(self, instance_id: str, slot: int, *, kept: bool) -> None:
        self.instance_id = instance_id
        self.slot = slot
        self.content: list[tuple[int, bytes, bytes]] | None = [] if kept else None
        """Tiers, fingerprints and keys, if there is a listener."""

    def record(self, tier: int, fingerprint: bytes, gained: bytes, lost: bytes) -> None:
        """Updates `content`."""
        if self.content is None:
            return
        if gained:
            self.content.append((tier, fingerprint, gained))
        if lost:  # rare: nodes report what they hold, not what they held meanwhile
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
        """Increases with each change that a lookup can see."""
        self.listener: LayoutListener | None = None
        self._table = ChunkTable()
        self._live: dict[str, int] = {}
        self._instance_ids: dict[int, str] = {}
        """The inverse of `_live`."""
        self._staged: set[Snapshot] = set()
        self._fingerprints: set[bytes] = set()
        """Fingerprints of reported chunks; some may have no chunks any more."""
        self._fingerprint_limit = MIN_FINGERPRINTS
        self._partials = PartialChunkMap(self._is_held)

    def __len__(self) -> int:
        """Chunk keys in the map, including those that have yet to be swept."""
        return len(self._table)

    # --- Writing -------------------------------------------------------------------------------------------------

    def apply(self, target: str | Snapshot, change: Change) -> int:
        """Applies a change to an instance, or to its open snapshot; returns the revision afterwards.

        Known keys that are admitted, and unknown ones that are evicted, change nothing. A chunk's tokens and spec are
        those that its first holder reported. Raises `Full` if there are chunks of too many specs, `ValueError` if a
        chunk has more than `MAX_TOKENS`.
        """
        if isinstance(target, Snapshot):
            assert target in self._staged, "the snapshot has ended"
            target.record(change.tier, change.fingerprint, *self._write(target.slot, change))
            return self.revision
        slot = self._live.get(target)
        if slot is None:
            if not change.admitted:
                return self.revision
            slot = self._table.open_slot()
            self._show(target, slot)
        gained, lost = self._write(slot, change)
        if gained or lost:
            self.revision += 1
            if self.listener is not None:
                self.listener.changed(self.revision, target, change.tier, change.fingerprint, gained, lost)
        return self.revision

    def stage(self, instance_id: str) -> Snapshot:
        """Opens a snapshot of an instance. Lookups do not see it until `install`; end it by `install` or `discard`."""
        staged = Snapshot(instance_id, self._table.open_slot(), kept=self.listener is not None)
        self._staged.add(staged)
        return staged

    def install(self, staged: Snapshot) -> int:
        """Replaces the instance's chunks by the snapshot atomically; returns the revision afterwards."""
        self._staged.remove(staged)
        self._hide(staged.instance_id)
        self._show(staged.instance_id, staged.slot)
        self.revision += 1
        if self.listener is not None:
            self.listener.replaced(self.revision, staged.instance_id, staged.content or [])
        return self.revision

    def discard(self, staged: Snapshot) -> None:
        """Discards an open snapshot. Idempotent."""
        if staged in self._staged:
            self._staged.remove(staged)
            self._table.retire(staged.slot)

    def drop_instance(self, instance_id: str) -> None:
        """Removes all chunks of an instance. Idempotent."""
        if self._hide(instance_id):
            self.revision += 1
            if self.listener is not None:
                self.listener.gone(self.revision, instance_id)

    def sweep(self, limit: int) -> bool:
        """Sweeps about `limit` chunks of retired slots; returns whether more are left."""
        return self._table.sweep(limit)

    # --- Reading -------------------------------------------------------------------------------------------------

    def lookup(self, chunk_keys: bytes, excluded: str = "") -> list[Match]:
        """All instances but `excluded` that hold the first chunk, with their contiguous prefix.

        Longest first, then by instance id. For a chunk in several tiers, the fastest counts.
        """
        matches = [
            Match(self._instance_ids[slot], chunk_count, token_count, tuple(MatchRun(*run) for run in runs))
            for slot, chunk_count, token_count, runs in self._table.lookup(chunk_keys, self._live.get(excluded, -1))
        ]
        if len(matches) > 1:
            matches.sort(key=lambda match: (-match.chunk_count, match.instance_id))
        return matches

    def lookup_any(
        self, chunk_keys: Sequence[ChunkKey], part_count: int = 1, excluded: str = ""
    ) -> tuple[int, list[Match]]:
        """The first key of which instances but `excluded` hold all parts of the chunk, by index, and these
        instances."""
        for index, key in enumerate(chunk_keys):
            if matches := self.holders_of_parts(key, part_count, excluded):
                return index, matches
        return 0, []

    def holders_of_parts(self, chunk_key: ChunkKey, part_count: int, excluded: str = "") -> list[Match]:
        """The instances but `excluded` that hold all parts of a chunk, each with the chunk as its match."""
        if part_count == 1:
            return self.lookup(chunk_key, excluded)
        keys = join_keys(part_key(chunk_key, part) for part in range(part_count))
        whole = (one for one in self.lookup(keys, excluded) if one.chunk_count == part_count)
        return [Match(one.instance_id, 1, one.token_count // part_count, one.runs) for one in whole]

    @property
    def ends(self) -> EndIndex[bytes]:
        """The chunks in which prompts end, by the chunk before them; some may have no holder any more."""
        return self._partials.index

    def may_hold(self, fingerprint: bytes) -> bool:
        """Whether there may be chunks of a spec; chunks reported without a spec may be of any."""
        return fingerprint in self._fingerprints or b"" in self._fingerprints

    def holders_of_spec(self, fingerprint: bytes) -> list[str]:
        """The instances that may hold chunks of a spec; chunks reported without a spec may be of any."""
        wanted = (fingerprint, b"")
        return [
            instance_id
            for instance_id, slot in self._live.items()
            if any(held in wanted for _, held, _, _ in self._table.holdings(slot))
        ]

    def match_at(self, instance_id: str, tier: int, chunk_keys: bytes) -> tuple[int, int]:
        """Chunks and tokens of the contiguous prefix that an instance holds in one tier (0: in any)."""
        slot = self._live.get(instance_id)
        return (0, 0) if slot is None else self._table.match_at(slot, tier, chunk_keys)

    def held_mask(self, instance_id: str, tier: int, chunk_keys: bytes) -> NDArray[np.bool_]:
        """Marks the chunks that an instance holds in one tier (0: in any)."""
        return np.frombuffer(self.held(instance_id, tier, chunk_keys), np.bool_)

    def held(self, instance_id: str, tier: int, chunk_keys: bytes) -> bytes:
        """Returns `held_mask` with a byte for each chunk, 1 or 0."""
        slot = self._live.get(instance_id)
        return bytes(len(chunk_keys) // KEY_BYTES) if slot is None else self._table.held(slot, tier, chunk_keys)

    def fingerprint_of(self, chunk_key: bytes) -> bytes | None:
        """The spec under which a chunk was reported; None if no instance holds it."""
        return self._table.fingerprint_of(chunk_key)

    def scan(self, cursor: int, limit: int) -> tuple[int, list[tuple[str, int, bytes, bytes]]]:
        """A step of a scan of all chunks: the next cursor, and about `limit` keys by instance, tier and fingerprint.

        Start with cursor 0; the scan ends when 0 is returned. The map may change between steps: chunks that are held
        throughout are returned, others may be.
        """
        cursor, parts = self._table.scan(cursor, limit)
        return cursor, [(self._instance_ids[slot], tier, fingerprint, keys) for slot, tier, fingerprint, keys in parts]

    def scan_sole(
        self, instance_id: str, ignored: Collection[str], cursor: int, limit: int
    ) -> tuple[int, dict[bytes, bytes]]:
        """A step of a scan of the chunks that only one instance holds: the next cursor, and keys by fingerprint.

        Holders in `ignored` do not count. Cursor and `limit` as in `scan`.
        """
        cursor, parts = self.scan(cursor, limit)
        own: dict[bytes, list[bytes]] = {}
        elsewhere = []
        for holder, _, fingerprint, keys in parts:  # all holders of a chunk are in the same step
            if holder == instance_id:
                own.setdefault(fingerprint, []).append(keys)
            elif holder not in ignored:
                elsewhere.append(keys)
        shared = np.frombuffer(b"".join(elsewhere), dtype=_KEY)
        sole = {}
        for fingerprint, lists in own.items():
            keys_of_spec = np.unique(np.frombuffer(b"".join(lists), dtype=_KEY))  # a chunk may be in several tiers
            if alone := keys_of_spec[~np.isin(keys_of_spec, shared)].tobytes():
                sole[fingerprint] = alone
        return cursor, sole

    def digest(self, instance_id: str, tier: int) -> Digest:
        """The digest of an instance's chunks in one tier, over all specs."""
        total = EMPTY_DIGEST
        for of_tier, _, chunk_count, key_sum in self._holdings(instance_id):
            if of_tier == tier:
                total = total.plus(Digest(chunk_count=chunk_count, key_sum=key_sum))
        return total

    def chunk_counts(self, instance_id: str) -> dict[tuple[int, bytes], int]:
        """Number of chunks of an instance, by tier and fingerprint."""
        return {(tier, fingerprint): count for tier, fingerprint, count, _ in self._holdings(instance_id)}

    def check(self) -> None:
        """Asserts the invariants. Reads everything: for tests."""
        self._table.check()
        self._partials.check()
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

    def _write(self, slot: int, change: Change) -> tuple[bytes, bytes]:
        """Writes into an open slot; returns the keys that it gained and lost."""
        partials = sorted(change.partial_token_counts.items())
        try:
            gained = self._table.admit(
                slot, change.tier, change.fingerprint, change.chunk_size, change.admitted, partials
            )
        except OverflowError:
            raise Full("there are chunks of too many specs; retry when some are removed", retry_seconds=1.0) from None
        if gained:
            self._add_fingerprint(change.fingerprint)
        is_staging = bool(self._staged)  # chunks of open snapshots count as held by no instance
        for index, parent in change.partial_parents.items():
            key = change.admitted[index * KEY_BYTES : (index + 1) * KEY_BYTES]
            token_count = change.partial_token_counts.get(index, change.chunk_size)
            self._partials.add(key, parent, token_count, change.prefix_digests.get(index, b""), look=not is_staging)
        lost = self._table.evict(slot, change.tier, change.evicted)
        if lost and not is_staging:
            self._partials.lost(lost)
        return gained, lost

    def _is_held(self, key: bytes) -> bool:
        return self._table.fingerprint_of(key) is not None

    def _add_fingerprint(self, fingerprint: bytes) -> None:
        """Stores the fingerprint of admitted chunks; removes those without chunks once there are many."""
        self._fingerprints.add(fingerprint)
        if len(self._fingerprints) > self._fingerprint_limit:
            slots = [*self._live.values(), *(staged.slot for staged in self._staged)]
            self._fingerprints = {held for slot in slots for _, held, _, _ in self._table.holdings(slot)}
            self._fingerprint_limit = max(MIN_FINGERPRINTS, 2 * len(self._fingerprints))
