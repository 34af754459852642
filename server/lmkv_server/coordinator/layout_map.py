"""The layout map: which instance holds which chunk in which tier. Pure; written by report streams, read by lookups.

One integer per chunk key says it all, so that a million chunks cost about a hundred megabytes:

    bit  0..19   tokens in the chunk (a partial chunk has fewer than its spec's chunk_size)
    bit 20..31   index of the spec it was reported under
    bit 32..35   slot 0: GPU, host, disk, remote
    bit 36..39   slot 1: ...

A slot belongs to one instance. What an instance says in its opening snapshot goes into a slot of its own that nobody
can see; installing it swaps two slots, whatever their size. Slots that are given up are masked out at once and swept
clean later, a few thousand keys at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmkv.digests import EMPTY_DIGEST, Digest, digest
from lmkv.keys import ChunkKey, join_keys, split_keys

TIER_COUNT = 4
"""Tiers are numbered from 1, fastest first, as in `lmkv.v1.Tier`."""

_TOKEN_BITS = 32
_TOKENS = (1 << _TOKEN_BITS) - 1
_SPEC_SHIFT = 20
_COUNT = (1 << _SPEC_SHIFT) - 1
_SLOT = (1 << TIER_COUNT) - 1
_NO_PARTIALS: Mapping[int, int] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Neighbouring chunks of a match in the same tier."""

    tier: int
    chunk_count: int
    token_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """How much of a prompt one instance holds, from the first chunk without a gap."""

    instance_id: str
    runs: tuple[Run, ...]

    @property
    def chunk_count(self) -> int:
        """Chunks matched from the first."""
        return sum(run.chunk_count for run in self.runs)

    @property
    def token_count(self) -> int:
        """Tokens matched from the first."""
        return sum(run.token_count for run in self.runs)


class LayoutListener(Protocol):
    """Who wants to hear of every visible change. It is called before the method that made the change returns."""

    def changed(
        self, revision: int, instance_id: str, tier: int, fingerprint: bytes, gained: bytes, lost: bytes
    ) -> None:
        """An instance gained and lost chunks in one tier; the keys are those that really changed."""

    def replaced(self, revision: int, instance_id: str, content: Sequence[tuple[int, bytes, bytes]]) -> None:
        """All that an instance holds is new: tiers, fingerprints and keys. Each key is there once per tier."""

    def gone(self, revision: int, instance_id: str) -> None:
        """An instance and all it held are gone."""


class Slot:
    """What one instance holds, or says it holds: its four bits in every key's integer, and digests of them."""

    __slots__ = ("content", "digests", "index", "instance_id")

    def __init__(self, instance_id: str, index: int) -> None:
        self.instance_id = instance_id
        self.index = index
        self.digests: dict[tuple[int, bytes], Digest] = {}
        """By tier and fingerprint."""
        self.content: dict[tuple[int, bytes], dict[ChunkKey, None]] | None = None
        """Keys by tier and fingerprint, while it is staged and somebody listens."""

    @property
    def shift(self) -> int:
        """Position of the slot's first bit."""
        return _TOKEN_BITS + TIER_COUNT * self.index

    @property
    def mask(self) -> int:
        """All bits of the slot."""
        return _SLOT << self.shift


class LayoutMap:
    """The layout map in memory. Not thread-safe: one event loop owns it.

    Keys are 16 bytes; tiers are numbers from 1 to `TIER_COUNT`.
    """

    def __init__(self, revision: int = 0) -> None:
        self.revision = revision
        """Rises with each change that a lookup could see."""
        self.listener: LayoutListener | None = None
        self._specs: list[bytes] = []
        self._bits: dict[ChunkKey, int] = {}
        self._live: dict[str, Slot] = {}
        self._staged: set[Slot] = set()
        self._visible = _TOKENS
        self._owners: list[Slot | None] = []
        self._free: list[int] = []
        self._retired: list[int] = []
        self._sweeping: list[int] = []
        self._sweep_keys: list[ChunkKey] = []

    def __len__(self) -> int:
        """Keys that somebody holds, or held until lately."""
        return len(self._bits)

    # --- Writing -------------------------------------------------------------------------------------------------

    def apply(
        self,
        instance_id: str,
        tier: int,
        admitted: Sequence[ChunkKey] = (),
        evicted: Sequence[ChunkKey] = (),
        partial_token_counts: Mapping[int, int] = _NO_PARTIALS,
        *,
        chunk_size: int,
        fingerprint: bytes = b"",
    ) -> int:
        """Notes what an instance gained, then what it lost, in one tier; returns the revision after it.

        `partial_token_counts` maps an index into `admitted` to the chunk's tokens; every other one has `chunk_size`.
        Keys that are already noted, or are not there to be lost, change nothing.
        """
        slot = self._live.get(instance_id)
        if slot is None:
            slot = self._live[instance_id] = self._take_slot(instance_id)
            self._visible |= slot.mask
        gained, lost = self._write(slot, tier, admitted, evicted, partial_token_counts, chunk_size, fingerprint)
        if gained or lost:
            self.revision += 1
            if self.listener:
                self.listener.changed(self.revision, instance_id, tier, fingerprint, join_keys(gained), join_keys(lost))
        return self.revision

    def stage(self, instance_id: str) -> Slot:
        """Opens a snapshot of what an instance holds. Nobody sees it until `install`; end it by that or `discard`."""
        slot = self._take_slot(instance_id)
        self._staged.add(slot)
        slot.content = {} if self.listener else None
        return slot

    def apply_staged(
        self,
        staged: Slot,
        tier: int,
        admitted: Sequence[ChunkKey] = (),
        evicted: Sequence[ChunkKey] = (),
        partial_token_counts: Mapping[int, int] = _NO_PARTIALS,
        *,
        chunk_size: int,
        fingerprint: bytes = b"",
    ) -> None:
        """As `apply`, into an open snapshot."""
        assert staged in self._staged, "the snapshot has ended"
        gained, lost = self._write(staged, tier, admitted, evicted, partial_token_counts, chunk_size, fingerprint)
        if staged.content is not None:
            held = staged.content.setdefault((tier, fingerprint), {})
            held.update(dict.fromkeys(gained))
            for key in lost:
                held.pop(key, None)

    def install(self, staged: Slot) -> int:
        """Makes a snapshot what the instance holds, all at once; returns the revision after it."""
        self._staged.remove(staged)
        old = self._live.get(staged.instance_id)
        if old is not None:
            self._retire(old)
        self._live[staged.instance_id] = staged
        self._visible |= staged.mask
        self.revision += 1
        content, staged.content = staged.content, None
        if self.listener:
            packed = [(tier, fingerprint, join_keys(keys)) for (tier, fingerprint), keys in (content or {}).items()]
            self.listener.replaced(self.revision, staged.instance_id, packed)
        return self.revision

    def discard(self, staged: Slot) -> None:
        """Forgets an open snapshot; one that has ended already is no error."""
        if staged in self._staged:
            self._staged.remove(staged)
            self._retire(staged)

    def drop_instance(self, instance_id: str) -> None:
        """Forgets everything that an instance holds; one that holds nothing is no error."""
        slot = self._live.pop(instance_id, None)
        if slot is not None:
            self._retire(slot)
            self.revision += 1
            if self.listener:
                self.listener.gone(self.revision, instance_id)

    def sweep(self, limit: int) -> bool:
        """Cleans at most `limit` keys of slots that were given up; returns whether more are left to clean."""
        if not self._sweeping:
            if not self._retired:
                return False
            # Nobody writes to a retired slot, so keys that come after this copy cannot carry its bits.
            self._sweeping, self._retired = self._retired, []
            self._sweep_keys = list(self._bits)
        dead = sum(_SLOT << (_TOKEN_BITS + TIER_COUNT * index) for index in self._sweeping)
        self._clear_bits(self._sweep_keys[-limit:], dead)
        del self._sweep_keys[-limit:]
        if not self._sweep_keys:
            for index in self._sweeping:
                heapq.heappush(self._free, index)
            self._sweeping = []
        return bool(self._sweeping or self._retired)

    # --- Reading -------------------------------------------------------------------------------------------------

    def lookup(self, keys: bytes | Sequence[ChunkKey], excluded: str = "") -> list[Match]:
        """Everyone but `excluded` who holds the first key, with the contiguous prefix they hold.

        Longest first, then by instance id. Where a chunk is in several tiers, the fastest counts.
        """
        if isinstance(keys, bytes):
            keys = split_keys(keys)
        reading = self._visible & ~_TOKENS
        if excluded in self._live:
            reading &= ~self._live[excluded].mask
        lowest = self._lowest_bits()
        spans: list[tuple[int, int]] = []
        last = 0
        end = len(keys)
        get = self._bits.get
        for index, key in enumerate(keys):
            mask = get(key, 0)
            if mask == last and index:
                continue
            held = mask & reading
            if not held:
                end = index
                break
            # Whoever lacks this chunk is out for good: keep the four bits of those only who hold it in some tier.
            reading = (_any_tier(held) & lowest) * _SLOT
            spans.append((index, held | (mask & _TOKENS)))
            last = mask
        return self._matches(spans, end)

    def match_at(self, instance_id: str, tier: int, chunk_keys: bytes) -> tuple[int, int]:
        """Chunks and tokens of the contiguous prefix of the keys that an instance holds in one tier (0: in any)."""
        chunk_count = token_count = 0
        for key, held in zip(split_keys(chunk_keys), self.held_mask(instance_id, tier, chunk_keys), strict=True):
            if not held:
                break
            chunk_count += 1
            token_count += self._bits[key] & _COUNT
        return chunk_count, token_count

    def held_mask(self, instance_id: str, tier: int, chunk_keys: bytes) -> NDArray[np.bool_]:
        """Which of the keys an instance holds in one tier (0: in any)."""
        keys = split_keys(chunk_keys)
        slot = self._live.get(instance_id)
        if slot is None:
            return np.zeros(len(keys), np.bool_)
        mask = 1 << (slot.shift + tier - 1) if tier else slot.mask
        return np.array([bool(self._bits.get(key, 0) & mask) for key in keys], np.bool_)

    def fingerprint_of(self, chunk_key: bytes) -> bytes | None:
        """The spec that a key which somebody holds was reported under; None if nobody does."""
        mask = self._bits.get(ChunkKey(chunk_key), 0)
        return self._specs[(mask & _TOKENS) >> _SPEC_SHIFT] if mask & self._visible & ~_TOKENS else None

    def scan(self, cursor: int, limit: int) -> tuple[int, list[tuple[str, int, bytes, bytes]]]:
        """A step of a walk over everything that is held, about `limit` keys of it, and where the next step begins.

        Begin with 0; the walk ends when 0 comes back. Parts are instance, tier, fingerprint and keys. The map may
        change between steps: what is held throughout is seen, the rest may be.
        """
        assert cursor == 0
        assert limit > 0
        parts: dict[tuple[str, int, bytes], list[ChunkKey]] = {}
        for key, mask in self._bits.items():
            for slot in self._live.values():
                for tier in range(1, TIER_COUNT + 1):
                    if mask >> (slot.shift + tier - 1) & 1:
                        place = (slot.instance_id, tier, self._specs[(mask & _TOKENS) >> _SPEC_SHIFT])
                        parts.setdefault(place, []).append(key)
        return 0, [(*place, join_keys(keys)) for place, keys in parts.items()]

    def digest(self, instance_id: str, tier: int) -> Digest:
        """The digest of what an instance holds in one tier, over all specs."""
        slot = self._live.get(instance_id)
        total = EMPTY_DIGEST
        for (of_tier, _), part in slot.digests.items() if slot else ():
            if of_tier == tier:
                total = total.plus(part)
        return total

    def chunk_counts(self, instance_id: str) -> dict[tuple[int, bytes], int]:
        """Chunks that an instance holds, by tier and by the fingerprint they were reported under."""
        slot = self._live.get(instance_id)
        return {place: part.chunk_count for place, part in slot.digests.items()} if slot else {}

    def check(self) -> None:
        """Asserts what must hold between any two calls. Reads everything: for tests."""
        slots = [*self._live.values(), *self._staged]
        indices = [slot.index for slot in slots] + self._free + self._retired + self._sweeping
        assert sorted(indices) == list(range(len(self._owners))), "every slot is in exactly one state"
        assert all(self._owners[slot.index] is slot for slot in slots)
        assert self._visible == _TOKENS + sum(slot.mask for slot in self._live.values())
        known = sum(slot.mask for slot in slots)
        stale = sum(_SLOT << (_TOKEN_BITS + TIER_COUNT * index) for index in self._retired + self._sweeping)
        for key, mask in self._bits.items():
            assert len(key) == 16
            assert mask >> _TOKEN_BITS, "a key that nobody holds is not kept"
            assert not mask & ~(_TOKENS | known | stale), "free slots have no bits"
        for slot in slots:
            for tier in range(1, TIER_COUNT + 1):
                bit = 1 << (slot.shift + tier - 1)
                noted = [part for (of_tier, _), part in slot.digests.items() if of_tier == tier]
                total = sum((part.chunk_count for part in noted), 0)
                key_sum = sum(part.key_sum for part in noted) % (1 << 64)
                actual = digest([key for key, mask in self._bits.items() if mask & bit])
                assert actual == Digest(chunk_count=total, key_sum=key_sum), "digests are those of the keys"

    # --- Inside --------------------------------------------------------------------------------------------------

    def _take_slot(self, instance_id: str) -> Slot:
        index = heapq.heappop(self._free) if self._free else len(self._owners)
        slot = Slot(instance_id, index)
        if index == len(self._owners):
            self._owners.append(slot)
        else:
            self._owners[index] = slot
        return slot

    def _retire(self, slot: Slot) -> None:
        self._visible &= ~slot.mask
        self._owners[slot.index] = None
        self._retired.append(slot.index)

    def _write(
        self,
        slot: Slot,
        tier: int,
        admitted: Sequence[ChunkKey],
        evicted: Sequence[ChunkKey],
        partial_token_counts: Mapping[int, int],
        chunk_size: int,
        fingerprint: bytes,
    ) -> tuple[list[ChunkKey], list[ChunkKey]]:
        assert 1 <= tier <= TIER_COUNT
        bit = 1 << (slot.shift + tier - 1)
        if fingerprint not in self._specs:
            self._specs.append(fingerprint)
        spec = self._specs.index(fingerprint) << _SPEC_SHIFT
        if partial_token_counts:
            full = [key for index, key in enumerate(admitted) if index not in partial_token_counts]
            gained = self._set_bit(full, bit, spec | chunk_size)
            for index, tokens in partial_token_counts.items():
                gained += self._set_bit([admitted[index]], bit, spec | tokens)
        else:
            gained = self._set_bit(admitted, bit, spec | chunk_size)
        lost = self._clear_bits(evicted, bit)
        place = (tier, fingerprint)
        noted = slot.digests.get(place, EMPTY_DIGEST).plus(digest(gained)).minus(digest(lost))
        slot.digests[place] = noted
        if noted == EMPTY_DIGEST:
            del slot.digests[place]
        return gained, lost

    def _set_bit(self, keys: Iterable[ChunkKey], bit: int, tokens: int) -> list[ChunkKey]:
        """Sets one bit of some keys; returns those that did not have it."""
        bits = self._bits
        get = bits.get
        # Neighbours mostly have the same holders: one integer object serves them all, 32 bytes less for each chunk.
        shared: dict[int, int] = {}
        alive = (self._visible | sum(slot.mask for slot in self._staged)) & ~_TOKENS
        gained = []
        for key in keys:
            old = get(key, 0)
            if old & bit:
                continue
            new = shared.get(old)
            if new is None:
                # What a key says of itself counts as long as anybody holds it who is not to be swept away.
                new = shared[old] = (old if old & alive else old & ~_TOKENS | tokens) | bit
            bits[key] = new
            gained.append(key)
        return gained

    def _clear_bits(self, keys: Iterable[ChunkKey], dead: int) -> list[ChunkKey]:
        """Clears some bits of some keys and drops the keys that are left without; returns those that had any."""
        bits = self._bits
        get = bits.get
        shared: dict[int, int] = {}
        lost = []
        for key in keys:
            old = get(key, 0)
            if not old & dead:
                continue
            new = shared.get(old)
            if new is None:
                new = shared[old] = old & ~dead
            if new >> _TOKEN_BITS:
                bits[key] = new
            else:
                del bits[key]
            lost.append(key)
        return lost

    def _lowest_bits(self) -> int:
        """The first bit of every slot."""
        return (((1 << (TIER_COUNT * len(self._owners))) - 1) // _SLOT) << _TOKEN_BITS

    def _matches(self, spans: Sequence[tuple[int, int]], end: int) -> list[Match]:
        """Per instance the runs in `spans`: the first index and the integer from there on, the last until `end`."""
        if not spans:
            return []
        lengths = [stop - start for (start, _), (stop, _) in zip(spans, [*spans[1:], (end, 0)], strict=True)]
        holders = _any_tier(spans[0][1] & ~_TOKENS) & self._lowest_bits()
        matches = []
        while holders:
            slot = self._owners[(_lowest(holders) - _TOKEN_BITS) // TIER_COUNT]
            assert slot is not None
            holders &= holders - 1
            masks = (mask >> slot.shift & _SLOT for _, mask in spans)
            tokens = (mask & _COUNT for _, mask in spans)
            matches.append(Match(instance_id=slot.instance_id, runs=_runs(zip(masks, tokens, lengths, strict=True))))
        return sorted(matches, key=lambda match: (-match.chunk_count, match.instance_id))


def _any_tier(held: int) -> int:
    """Slots' first bits are set where any bit of the slot is; the other bits mean nothing."""
    return held | held >> 1 | held >> 2 | held >> 3


def _lowest(mask: int) -> int:
    """Position of the lowest bit that is set."""
    return (mask & -mask).bit_length() - 1


def _runs(spans: Iterable[tuple[int, int, int]]) -> tuple[Run, ...]:
    """One instance's runs from spans of its tier bits, the tokens per chunk and the number of chunks."""
    runs: list[Run] = []
    for tiers, tokens, chunk_count in spans:
        if not tiers:
            break
        run = Run(tier=_lowest(tiers) + 1, chunk_count=chunk_count, token_count=tokens * chunk_count)
        if runs and runs[-1].tier == run.tier:
            last = runs.pop()
            run = Run(
                tier=run.tier,
                chunk_count=last.chunk_count + run.chunk_count,
                token_count=last.token_count + run.token_count,
            )
        runs.append(run)
    return tuple(runs)
