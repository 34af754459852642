"""What a node tells the fleet about its chunks: collected cheaply, packed into reports of bounded size. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple, TypeVar

from lmkv.digests import digest
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb

MAX_KEYS_PER_REPORT = 16_384
"""256 KiB of keys: well below the message limit, and few milliseconds of the coordinator's time."""

MAX_SHARED_BYTES = 256 * 1024
"""Outcomes, or records, that share a report have at most this; a larger one has a report for itself."""

Part = TypeVar("Part", pb.OrderOutcome, pb.OperationRecord)

_GONE = 0


class Held(NamedTuple):  # a fifth of what a frozen dataclass takes to make, and snapshots make one per chunk
    """One chunk that the node holds in one tier."""

    tier: chunk_pb2.Tier.ValueType
    fingerprint: bytes
    key: ChunkKey
    token_count: int


class Changes:
    """What to report: per chunk only its last state, so that it stays small however often a chunk comes and goes.

    Beyond `limit` chunks (0: none) it keeps nothing and only knows that it has `overflown`.
    """

    def __init__(self, held: Iterable[Held] = (), limit: int = 0) -> None:
        self._limit = limit
        self._places: dict[tuple[chunk_pb2.Tier.ValueType, bytes], dict[ChunkKey, int]] = defaultdict(dict)
        self.overflown = False
        for tier, fingerprint, key, token_count in held:
            self._places[tier, fingerprint][key] = token_count

    def __len__(self) -> int:
        return sum(map(len, self._places.values()))

    def admitted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey, token_count: int) -> None:
        """Notes that a chunk is now held."""
        if not self.overflown:
            self._places[tier, fingerprint][key] = token_count
            self._check_limit()

    def evicted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey) -> None:
        """Notes that a chunk is no longer held."""
        if not self.overflown:
            self._places[tier, fingerprint][key] = _GONE
            self._check_limit()

    def _check_limit(self) -> None:
        if self._limit and len(self) > self._limit:
            self._places.clear()
            self.overflown = True

    def digests(self, tiers: Iterable[chunk_pb2.Tier.ValueType]) -> list[pb.TierDigest]:
        """Digests of the chunks that are held, one for each of `tiers` and for every tier that holds any."""
        keys: dict[chunk_pb2.Tier.ValueType, list[ChunkKey]] = {tier: [] for tier in tiers}
        for (tier, _), states in self._places.items():
            keys.setdefault(tier, []).extend(key for key, tokens in states.items() if tokens != _GONE)
        found = ((tier, digest(held)) for tier, held in keys.items())
        return [pb.TierDigest(tier=tier, chunk_count=part.chunk_count, key_sum=part.key_sum) for tier, part in found]

    def reports(self, chunk_sizes: Mapping[bytes, int]) -> Iterator[pb.ReportRequest]:
        """The changes as reports, at least one; a chunk shorter than its spec's `chunk_sizes` is marked as partial.

        They are made one by one as they are asked for; nothing may be noted meanwhile.
        """
        report, room = pb.ReportRequest(), MAX_KEYS_PER_REPORT
        for (tier, fingerprint), states in self._places.items():
            items = iter(states.items())
            while part := list(islice(items, room)):
                report.changes.append(_change(tier, fingerprint, part, chunk_sizes.get(fingerprint, 0)))
                room -= len(part)
                if not room:
                    yield report
                    report, room = pb.ReportRequest(), MAX_KEYS_PER_REPORT
        yield report


def outcome_reports(outcomes: Iterable[pb.OrderOutcome]) -> Iterator[pb.ReportRequest]:
    """The outcomes as reports, in order; none if there are none."""
    return (pb.ReportRequest(outcomes=part) for part in _shared(outcomes))


def record_reports(records: Iterable[pb.OperationRecord]) -> Iterator[pb.ReportRequest]:
    """The records as reports, in order; none if there are none."""
    return (pb.ReportRequest(records=part) for part in _shared(records))


def _shared(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts by the report that they share."""
    shared: list[Part] = []
    size_bytes = 0
    for part in parts:
        if shared and size_bytes + part.ByteSize() > MAX_SHARED_BYTES:
            yield shared
            shared, size_bytes = [], 0
        shared.append(part)
        size_bytes += part.ByteSize()
    if shared:
        yield shared


def _change(
    tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, states: list[tuple[ChunkKey, int]], chunk_size: int
) -> pb.ChunkChange:
    admitted = [(key, tokens) for key, tokens in states if tokens != _GONE]
    return pb.ChunkChange(
        tier=tier,
        fingerprint=fingerprint,
        admitted_keys=join_keys(key for key, _ in admitted),
        partial_token_counts={i: tokens for i, (_, tokens) in enumerate(admitted) if tokens != chunk_size},
        evicted_keys=join_keys(key for key, tokens in states if tokens == _GONE),
    )
