"""Positions of chunks: one tier of a registered instance."""

from __future__ import annotations

from typing import NamedTuple

from lmkv.errors import TierUnsupported
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.instances import Instance, Instances


class Position(NamedTuple):
    """A tier of a registered instance; `tier` is a number of `lmkv.v1.Tier`."""

    instance_id: str
    tier: chunk_pb2.Tier.ValueType

    def to_proto(self) -> chunk_pb2.Position:
        """The position as a message."""
        return chunk_pb2.Position(instance_id=self.instance_id, tier=self.tier)


def resolve_position(instances: Instances, position: chunk_pb2.Position, field: str) -> Position:
    """The position that a request's field names; host memory if it names no tier.

    Raises `InstanceNotFound`, `TierUnsupported`.
    """
    instance = instances.named(position.instance_id, field)
    tier = position.tier or chunk_pb2.TIER_HOST
    tiers = _tiers(instance)
    if tier not in tiers:
        name = chunk_pb2.Tier.Name(tier) if tier in chunk_pb2.Tier.values() else str(tier)
        names = ", ".join(map(chunk_pb2.Tier.Name, tiers))
        raise TierUnsupported(
            f"{field}: instance {position.instance_id!r} has no {name}; its tiers are: {names}",
            instance_id=position.instance_id,
            tier=name,
        )
    return Position(position.instance_id, tier)


def _tiers(instance: Instance) -> list[chunk_pb2.Tier.ValueType]:
    reported = {chunk_pb2.Tier.ValueType(usage.tier) for usage in instance.tiers if usage.tier}
    return sorted(reported | {chunk_pb2.TIER_HOST})
