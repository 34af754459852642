"""Usage and content of a node's own tiers, as reports carry them. Used by `Node`."""

from __future__ import annotations

from collections.abc import Iterator

from lmkv.v1 import chunk_pb2
from lmkv.v1.registry_service_pb2 import TierUsage
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.tiers.disk.tier import DiskTier


def usages(tier: HostTier, disk: DiskTier | None) -> list[TierUsage]:
    """How full the tiers are that are the node's own."""
    host = TierUsage(
        tier=chunk_pb2.TIER_HOST,
        capacity_bytes=tier.size_bytes,
        used_bytes=tier.used_bytes,
        chunk_count=len(tier),
    )
    if disk is None:
        return [host]
    on_disk = TierUsage(
        tier=chunk_pb2.TIER_DISK,
        capacity_bytes=disk.capacity_bytes,
        used_bytes=disk.used_bytes,
        chunk_count=disk.chunk_count,
    )
    return [host, on_disk]


def held(tier: HostTier, disk: DiskTier | None) -> Iterator[HeldChunk]:
    """Every chunk of these tiers."""
    for chunk in tier:
        yield HeldChunk(
            tier=chunk_pb2.TIER_HOST,
            fingerprint=chunk.fingerprint,
            key=chunk.key,
            token_count=chunk.token_count,
        )
    for stored in disk or ():
        yield HeldChunk(
            tier=chunk_pb2.TIER_DISK,
            fingerprint=stored.fingerprint,
            key=stored.key,
            token_count=stored.token_count,
        )
