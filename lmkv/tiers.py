"""Ids of tiers: one text names a tier in protos, nodes, commands, metrics and logs. A plug-in's tier has its own."""

from __future__ import annotations

from dataclasses import dataclass

from lmkv.errors import BadRequest
from lmkv.v1.chunk_pb2 import Position

GPU = "gpu"
"""Accelerator memory of an engine."""
HOST = "host"
"""The node's pool in host memory."""
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
INSTANCE_TIERS = (GPU, HOST, DISK)
"""Tiers of one instance alone, fastest first: coordinators know which instance holds which chunk in them."""
LAYOUT_TIERS = (*INSTANCE_TIERS, REMOTE)
"""Tiers that layout maps have, fastest first."""
HIT_TIERS = (OWN, DISK, PEERS, REMOTE, HANDOFF)
"""Values of the label `tier` that metrics always have; a third-party tier's is added with its first hit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive chunks of a prompt that are in one tier behind the node's pool."""

    tier: str
    chunk_count: int


def format_position(position: Position) -> str:
    """A position as people write it: `lmkv-1/host`."""
    return f"{position.instance_id}/{position.tier or HOST}"


def parse_position(text: str) -> Position:
    """The position that `INSTANCE` or `INSTANCE/TIER` names; without a tier it is host memory. Raises `BadRequest`."""
    instance_id, slash, tier = text.partition("/")
    if not instance_id or (slash and not tier):
        raise BadRequest(f"{text[:100]!r} is no position; write INSTANCE or INSTANCE/TIER", position=text[:100])
    return Position(instance_id=instance_id, tier=tier or HOST)
