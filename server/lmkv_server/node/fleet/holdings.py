"""Usage and content of a node's tiers, as reports carry them. Used by `Node` and `FleetMembership`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import cast

from lmkv.tiers import DISK, HOST
from lmkv.v1.registry_service_pb2 import TierUsage
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.tiers.base import SecondaryTier
from lmkv_server.node.tiers.disk.tier import DiskTier


def usages(tier: HostTier, tiers: Iterable[SecondaryTier]) -> list[TierUsage]:
    """How full host memory is, and each of the secondary tiers that knows it."""
    host = TierUsage(
        tier=HOST,
        capacity_bytes=tier.size_bytes,
        used_bytes=tier.used_bytes,
        chunk_count=len(tier),
    )
    return [
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
