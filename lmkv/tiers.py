"""The names of tiers. Used by the commands and wherever a tier is typed or shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmkv.errors import BadRequest
from lmkv.v1.chunk_pb2 import TIER_DISK, TIER_GPU, TIER_HOST, TIER_REMOTE, Position, Tier

OWN = "own"
"""The node's own pool: not a tier behind it, but named beside them where found chunks are counted."""
DISK = "disk"
"""The node's own disk."""
PEERS = "peers"
"""The memory of other nodes, or their disks."""
REMOTE = "remote"
"""The store that all nodes share."""
HANDOFF = "handoff"
"""Chunks that a prefill engine's node sends."""
HIT_TIERS = (OWN, DISK, PEERS, REMOTE, HANDOFF)
"""Values of the label `tier` that metrics always have; a third-party tier's is added with its first hit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive chunks of a prompt that are in one tier behind the node's pool; tiers are known by name."""

    tier: str
    chunk_count: int


NAMES: Mapping[Tier.ValueType, str] = {
    TIER_GPU: "gpu",
    TIER_HOST: "host",
    TIER_DISK: "disk",
    TIER_REMOTE: "remote",
}

_BY_NAME = {name: tier for tier, name in NAMES.items()}


def tier_name(tier: int) -> str:
    """A tier's name; its number, if it is newer than this version."""
    return {int(known): name for known, name in NAMES.items()}.get(tier, str(tier))


def parse_tier(text: str) -> Tier.ValueType:
    """The tier of this name, in any case. Raises `BadRequest`."""
    tier = _BY_NAME.get(text.lower())
    if tier is None:
        raise BadRequest(f"{text[:100]!r} is no tier; use {', '.join(NAMES.values())}", tier=text[:100])
    return tier


def format_position(position: Position) -> str:
    """A position as people write it: `lmkv-1/host`."""
    return f"{position.instance_id}/{tier_name(position.tier or TIER_HOST)}"


def parse_position(text: str) -> Position:
    """The position that `INSTANCE` or `INSTANCE/TIER` names; without a tier it is host memory. Raises `BadRequest`."""
    instance_id, slash, tier = text.partition("/")
    if not instance_id or (slash and not tier):
        raise BadRequest(f"{text[:100]!r} is no position; write INSTANCE or INSTANCE/TIER", position=text[:100])
    return Position(instance_id=instance_id, tier=parse_tier(tier) if tier else TIER_HOST)
