"""What a scripted node holds: chunks of simulated KV, lookups and loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lmkv.keys import ChunkKey
from lmkv.tiers import HOST
from lmkv.v1 import engine_service_pb2 as pb

Content = dict[tuple[int, int], list[int]]
"""KV in one extent: the value of each row, by rank and KV-cache group."""
Pool = dict[int, Content]
"""Content by offset."""
SPOILT = -1
"""Value of a slot whose bytes mean nothing."""


@dataclass
class Stored:
    """A chunk, or one part of it, at a peer or in the pool."""

    token_count: int
    content: Content
    offset: int = -1
    holds: int = 0
    part: int = 0


@dataclass
class Fetch:
    """A load that the engine has asked for: chunks, or items of a hit, by their index."""

    ticket: str
    indexes: list[int]


@dataclass
class Ticket:
    """A lookup that was answered."""

    keys: list[ChunkKey]
    """Of the chunks, or of the items of the hit."""
    own_count: int
    held: list[Stored] = field(default_factory=list)


class HeldChunks(dict[ChunkKey, Stored]):
    """The chunks in the pool; reports what it gains and loses."""

    def __init__(self, report: Callable[[pb.TierChange], None]) -> None:
        super().__init__()
        self._report = report

    def __setitem__(self, key: ChunkKey, chunk: Stored) -> None:
        super().__setitem__(key, chunk)
        self._report(pb.TierChange(tier=HOST, stored_keys=[key]))

    def pop(self, key: ChunkKey) -> Stored:  # type: ignore[override]  # without a default
        self._report(pb.TierChange(tier=HOST, removed_keys=[key]))
        return super().pop(key)

    def clear(self) -> None:
        self._report(pb.TierChange(tier=HOST, removed_keys=list(self)))
        super().clear()
