"""Tiers and positions that requests name; a position is one tier of a registered instance."""

from __future__ import annotations

from typing import NamedTuple

from lmkv.errors import BadSelection, TierUnsupported
from lmkv.tiers import HOST, INSTANCE_TIERS, LAYOUT_TIERS
from lmkv.v1 import chunk_pb2
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import tier_id, tier_number

MAX_SHOWN = 100
"""Characters of a tier's id in an error."""
MAX_LISTED = 32
"""Tiers that an error lists."""


class Position(NamedTuple):
    """A tier of a registered instance, as layout maps are asked for it: by the tier's number."""

    instance_id: str
    tier: int

    @property
    def tier_id(self) -> str:
        """The id of the tier, as messages have it."""
        return tier_id(self.tier)

    def to_proto(self) -> chunk_pb2.Position:
        """The position as a message."""
        return chunk_pb2.Position(instance_id=self.instance_id, tier=self.tier_id)


def resolve_position(instances: Instances, position: chunk_pb2.Position, field: str) -> Position:
    """The position that a request's field names; host memory if it names no tier.

    Raises `InstanceNotFound`, `BadSelection` for a tier that no instance has, `TierUnsupported`.
    """
    instance = instances.named(position.instance_id, field)
    tier = position.tier or HOST
    check_tier(instances, tier, field)
    tiers = _tiers(instance)
    if tier not in tiers:
        raise TierUnsupported(
            f"{field}: instance {position.instance_id!r} has no chunks of its own in {tier[:MAX_SHOWN]!r}; use "
            f"{' or '.join(tiers)}",
            instance_id=position.instance_id,
            tier=tier[:MAX_SHOWN],
        )
    return Position(position.instance_id, tier_number(tier))


def check_tier(instances: Instances, tier: str, field: str) -> None:
    """Raises `BadSelection` for a tier that layout maps do not have, and no registered instance."""
    if tier in LAYOUT_TIERS:
        return
    reported = sorted({usage.tier for instance in instances for usage in instance.tiers} - {*LAYOUT_TIERS})
    if tier not in reported:
        known = ", ".join(one[:MAX_SHOWN] for one in (*LAYOUT_TIERS, *reported)[:MAX_LISTED])
        raise BadSelection(f"{field}: {tier[:MAX_SHOWN]!r} is no tier; known tiers are {known}", tier=tier[:MAX_SHOWN])


def _tiers(instance: Instance) -> list[str]:
    """The tiers that belong to the instance alone, fastest first."""
    reported = {HOST, *(usage.tier for usage in instance.tiers)}
    return [tier for tier in INSTANCE_TIERS if tier in reported]
