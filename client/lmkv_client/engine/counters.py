"""Counts of one engine's use of lmkv, since it attached first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounters:
    """A snapshot of `Engine.counters`. All values only grow."""

    lookups: int = 0
    """Calls of `lookup` and `begin_lookup`."""
    asked_chunks: int = 0
    """Keys in them."""
    asked_tokens: int = 0
    """Tokens of their prompts."""
    hit_chunks: int = 0
    """Chunks that their answers offered."""
    hit_tokens: int = 0
    """Tokens in these chunks."""
    tier_tokens: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """Tokens of hits by the tier that had them, without those that a load did not bring."""
    miss_tokens: Mapping[str, int] = field(default_factory=lambda: NOTHING)
    """All other tokens of prompts, by the reason why they were missed (docs/operate/misses.md)."""
    lookup_timeouts: int = 0
    """Lookups, those of `missing` included, that the node did not answer in time."""
    loaded_chunks: int = 0
    """Chunks that were handed out by loads."""
    loaded_tokens: int = 0
    loaded_bytes: int = 0
    failed_loads: int = 0
    """Loads that ended with fewer chunks than wanted."""
    damaged_chunks: int = 0
    """Chunks that differed from their checksum; only if `verify_loads` is set."""
    reserved_extents: int = 0
    short_reserves: int = 0
    """Reservations that got fewer extents than wanted."""
    committed_chunks: int = 0
    committed_bytes: int = 0
    dropped_commits: int = 0
    """Chunks that were not committed because the node that granted their extents is lost."""
    rejected_commits: int = 0
    """Commits that the node refused."""
    node_losses: int = 0
    """Times that the connection to the node was lost."""


class EngineCounts:
    """The counters while they grow. Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._labelled: dict[str, dict[str, int]] = {}

    def add(self, name: str, count: int = 1, *, label: str = "") -> None:
        """Adds to the counter of this name, a field of `EngineCounters`; `label` is the key in a field with several."""
        values = self._labelled.setdefault(name, {}) if label else self._values
        values[label or name] = values.get(label or name, 0) + count

    def snapshot(self) -> EngineCounters:
        """All counters."""
        values: dict[str, Any] = dict(self._values)
        values |= {name: MappingProxyType(dict(own)) for name, own in self._labelled.items()}
        return EngineCounters(**values)
