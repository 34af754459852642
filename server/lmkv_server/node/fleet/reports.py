"""Chunk changes of a node, collected and packed into reports of bounded size; usage and content of its tiers.

Used by `ReportStream`, `Node` and `FleetMembership`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, cast

from lmkv.internal.v1 import report_service_pb2 as pb
from lmkv.keys import KEY_BYTES, ChunkKey, digest, join_keys
from lmkv.tiers import DISK, HOST
from lmkv.v1.registry_service_pb2 import TierUsage
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.quotas import OwnerQuotas
from lmkv_server.node.tiers.backend_tier import BackendTier
from lmkv_server.node.tiers.base import SecondaryTier
from lmkv_server.node.tiers.disk.tier import DiskTier

MAX_KEYS_PER_REPORT = 16_384
"""256 KiB of keys: well below the message limit, and few milliseconds of the coordinator's time."""

MAX_SHARED_BYTES = 256 * 1024
"""Most bytes of outcomes in one report; a larger one has a report of its own."""

_EVICTED = 0


class HeldChunk(NamedTuple):  # five times faster to make than a frozen dataclass; a snapshot makes one per chunk
    """One chunk that the node holds in one tier."""

    tier: str
    fingerprint: bytes
    key: ChunkKey
    token_count: int
    parent: ChunkKey | None = None
    """For a chunk in which prompts end: the chunk before it, or the root of the key chain, if that is known."""
    prefix_digests: bytes = b""
    """`lmkv.keys.prefix_digests` of a chunk with a `parent`, if they are known."""


class ChunkChanges:
    """Chunks to report: only the last state of each, so that repeated changes of one chunk take no more memory.

    Beyond `limit` chunks (0: unlimited) it keeps none of them and sets `overflowed`.
    """

    def __init__(self, held: Iterable[HeldChunk] = (), limit: int = 0) -> None:
        self._limit = limit
        self._states: dict[tuple[str, bytes], dict[ChunkKey, int]] = defaultdict(dict)
        self._parents: dict[ChunkKey, ChunkKey] = {}
        """Parents of chunks in which prompts end, and perhaps of others."""
        self._digests: dict[ChunkKey, bytes] = {}
        """Prefix digests of those that have any."""
        self.overflowed = False
        for tier, fingerprint, key, token_count, parent, digests in held:
            self._states[tier, fingerprint][key] = token_count
            if parent is not None:
                self._parents[key] = parent
                if digests:
                    self._digests[key] = digests

    def __len__(self) -> int:
        return sum(map(len, self._states.values()))

    def admitted(self, chunk: HeldChunk) -> None:
        """Adds a chunk that is now held."""
        if not self.overflowed:
            self._states[chunk.tier, chunk.fingerprint][chunk.key] = chunk.token_count
            if chunk.parent is not None:
                self._parents[chunk.key] = chunk.parent
                if chunk.prefix_digests:
                    self._digests[chunk.key] = chunk.prefix_digests
            self._check_limit()

    def evicted(self, tier: str, fingerprint: bytes, key: ChunkKey) -> None:
        """Adds a chunk that is no longer held."""
        if not self.overflowed:
            self._states[tier, fingerprint][key] = _EVICTED
            self._check_limit()

    def _check_limit(self) -> None:
        if self._limit and len(self) > self._limit:
            self._states.clear()
            self._parents.clear()
            self._digests.clear()
            self.overflowed = True

    def digests(self, tiers: Iterable[str]) -> list[pb.TierDigest]:
        """Digests of the chunks that are held, one for each of `tiers` and for every tier that holds any."""
        keys: dict[str, list[ChunkKey]] = {tier: [] for tier in tiers}
        for (tier, _), states in self._states.items():
            keys.setdefault(tier, []).extend(key for key, tokens in states.items() if tokens != _EVICTED)
        found = ((tier, digest(held)) for tier, held in keys.items())
        return [pb.TierDigest(tier=tier, chunk_count=part.chunk_count, key_sum=part.key_sum) for tier, part in found]

    def reports(self, chunk_sizes: Mapping[bytes, int]) -> Iterator[pb.ReportRequest]:
        """The changes as reports, at least one; a chunk shorter than its spec's `chunk_sizes` is marked as partial.

        A generator: add no change until it is exhausted.
        """
        report, room = pb.ReportRequest(), MAX_KEYS_PER_REPORT
        for (tier, fingerprint), states in self._states.items():
            items = iter(states.items())
            while part := list(islice(self._that_fit(items, room), room)):
                report.changes.append(self._change(tier, fingerprint, part, chunk_sizes.get(fingerprint, 0)))
                room -= sum(map(self._room_of, part))
                if room <= 0:
                    yield report
                    report, room = pb.ReportRequest(), MAX_KEYS_PER_REPORT
        yield report

    def _room_of(self, state: tuple[ChunkKey, int]) -> int:
        """Size of the report of a chunk, in keys."""
        return 1 + len(self._digests.get(state[0], b"")) // KEY_BYTES

    def _that_fit(self, items: Iterator[tuple[ChunkKey, int]], room: int) -> Iterator[tuple[ChunkKey, int]]:
        """Yields states until their reports take `room`."""
        while room > 0 and (state := next(items, None)):
            room -= self._room_of(state)
            yield state

    def _change(
        self,
        tier: str,
        fingerprint: bytes,
        states: list[tuple[ChunkKey, int]],
        chunk_size: int,
    ) -> pb.ChunkChange:
        admitted = [(key, tokens) for key, tokens in states if tokens != _EVICTED]
        partial = {i: tokens for i, (_, tokens) in enumerate(admitted) if tokens != chunk_size}
        digests = {i: found for i, (key, _) in enumerate(admitted) if (found := self._digests.get(key))}
        ends = partial.keys() | digests.keys() if chunk_size else digests.keys()
        parents = {i: self._parents.get(admitted[i][0]) for i in ends}
        return pb.ChunkChange(
            tier=tier,
            fingerprint=fingerprint,
            admitted_keys=join_keys(key for key, _ in admitted),
            partial_token_counts=partial,
            evicted_keys=join_keys(key for key, tokens in states if tokens == _EVICTED),
            partial_parent_keys={i: parent for i, parent in parents.items() if parent is not None},
            prefix_digests=digests,
        )


def outcome_reports(outcomes: Iterable[pb.OrderOutcome]) -> Iterator[pb.ReportRequest]:
    """The outcomes as reports, in order; none if there are none."""
    return (pb.ReportRequest(outcomes=part) for part in _shared(outcomes))


def _shared(parts: Iterable[pb.OrderOutcome]) -> Iterator[list[pb.OrderOutcome]]:
    """Groups the parts by report."""
    shared: list[pb.OrderOutcome] = []
    size_bytes = 0
    for part in parts:
        if shared and size_bytes + part.ByteSize() > MAX_SHARED_BYTES:
            yield shared
            shared, size_bytes = [], 0
        shared.append(part)
        size_bytes += part.ByteSize()
    if shared:
        yield shared


def usages(tier: HostTier, tiers: Iterable[SecondaryTier]) -> list[TierUsage]:
    """Returns the usage of host memory, and of each secondary tier that knows it."""
    tiers = list(tiers)
    quotas = salt_quotas(tier, tiers)
    host = TierUsage(
        tier=HOST,
        capacity_bytes=tier.size_bytes,
        used_bytes=tier.used_bytes,
        chunk_count=len(tier),
    )
    found = [
        host,
        *(
            TierUsage(
                tier=secondary.name,
                capacity_bytes=usage.capacity_bytes,
                used_bytes=usage.used_bytes,
                chunk_count=usage.chunk_count,
            )
            for secondary in tiers
            if (usage := secondary.usage()) is not None
        ),
    ]
    for reported in found:
        if (quota := quotas.get(reported.tier)) is not None:
            reported.salt_quota_bytes, reported.max_salt_used_bytes = quota.limit_bytes, quota.most_bytes
            reported.salt_count = len(quota)
    return found


def salt_quotas(tier: HostTier, tiers: Iterable[SecondaryTier]) -> dict[str, OwnerQuotas]:
    """The quotas of the tiers that have them, by the name of the tier."""
    named = {HOST: tier.quotas} | {one.name: one.quotas for one in tiers if isinstance(one, BackendTier)}
    return {name: quotas for name, quotas in named.items() if quotas is not None}


def held(tier: HostTier, disk: DiskTier | None, chunk_sizes: Mapping[bytes, int]) -> Iterator[HeldChunk]:
    """Every chunk of these tiers. One in which prompts end, of a spec in `chunk_sizes`, with the chunk before it."""
    for name, chunks in ((HOST, tier), (DISK, disk or ())):
        for chunk in cast(Iterable[CachedChunk], chunks):
            yield HeldChunk(
                tier=name,
                fingerprint=chunk.fingerprint,
                key=chunk.key,
                token_count=chunk.token_count,
                parent=chunk.parent
                if chunk.prefix_digests or chunk.token_count < chunk_sizes.get(chunk.fingerprint, 0)
                else None,
                prefix_digests=chunk.prefix_digests,
            )
