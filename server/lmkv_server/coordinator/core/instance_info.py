"""What a node registers and reports. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmkv.spec import KvSpec, ServedModel

MAX_SHOWN = 500
"""Characters of a client's text that an error repeats: all of them must fit into the trailers of a call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedTier:
    """How full a tier is; the fields are those of `lmkv.v1.TierUsage`."""

    tier: str
    capacity_bytes: int = 0
    used_bytes: int = 0
    chunk_count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedPin:
    """A pin in force; its fields are those of `lmkv.v1.PinnedChunks`."""

    pin_id: str
    tier: str
    chunk_count: int
    token_count: int
    expire_time_ns: int
    """By the clock of the time of day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedTraffic:
    """What an instance has fetched from another one; the fields are those of `lmkv.v1.PeerTraffic`."""

    instance_id: str
    chunk_count: int
    transferred_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedStats:
    """What an instance has done since its start; the fields are those of `lmkv.v1.InstanceStats`, times in seconds."""

    asked_chunks: int = 0
    own_chunks: int = 0
    peer_chunks: int = 0
    evicted_chunks: int = 0
    load_count: int = 0
    load_seconds: float = 0.0
    avoided_prefill_seconds: float = 0.0
    traffic: tuple[ReportedTraffic, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceInfo:
    """What a node sends when it registers; the fields are those of `lmkv.v1.Instance`."""

    instance_id: str
    epoch: int
    peer_address: str
    specs: tuple[KvSpec, ...] = ()
    version: str = ""
    served_models: tuple[ServedModel, ...] = ()
    """Further names; the fingerprint of each is that of one of `specs`."""
    coordinator_count: int = 0
    size_bytes: int = field(default=0, compare=False)
    """Size of its message."""
