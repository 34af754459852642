"""Counts of one engine's use of lmkv."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounters:
    """A snapshot of `Engine.counters`, since the engine has attached first. All values only grow."""

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


class Counters:
    """Counts by name, and by label where a name has several: then under `name:label`. Not thread-safe."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def add(self, name: str, amount: float = 1, *, label: str = "") -> None:
        """Counts."""
        if amount:
            key = f"{name}:{label}" if label else name
            self._values[key] = self._values.get(key, 0) + amount

    def set(self, name: str, amount: float) -> None:
        """Records the value of a gauge."""
        self._values[name] = amount

    def take(self) -> dict[str, float]:
        """Removes and returns all values."""
        values, self._values = self._values, {}
        return values

    def snapshot(self) -> EngineCounters:
        """The values that are fields of `EngineCounters`."""
        values: dict[str, Any] = {}
        for key, amount in self._values.items():
            name, _, label = key.partition(":")
            if name not in FIELDS:
                continue
            if label:
                values.setdefault(name, {})[label] = amount
            else:
                values[name] = amount
        frozen: dict[str, Any] = {
            name: MappingProxyType(value) if isinstance(value, dict) else value for name, value in values.items()
        }
        return EngineCounters(**frozen)


FIELDS = frozenset(EngineCounters.__dataclass_fields__)
