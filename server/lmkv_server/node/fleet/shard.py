"""Chooses the coordinator to which a node reports its chunks, if several share a map. Pure; for `FleetMembership`."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple


class StreamRole(NamedTuple):
    """The purpose of a report stream."""

    map_id: str
    """The layout map that its coordinator shares with others; empty if it keeps its own."""
    reports_chunks: bool
    """Whether it carries chunks; a stream to another coordinator of the same map does if this one does not."""


class SessionState(NamedTuple):
    """The part of a coordinator session that roles depend on."""

    map_id: str | None
    """The layout map of its coordinator, empty if it keeps its own; None while nothing can be reported to it."""
    role: StreamRole | None
    """The role of its open stream; None if there is none."""
    is_synced: bool
    """Whether its coordinator has acknowledged a snapshot, and receives changes."""


def primaries(instance_id: str, map_ids: Mapping[str, str]) -> dict[str, str]:
    """Returns the coordinator that receives the chunks on behalf of each one; both are addresses.

    `map_ids` has the id of each one's layout map, empty if it keeps its own: then it receives the chunks itself. Of
    those that share a map, the one of the highest weight is the primary of all. Each pair of instance and coordinator
    has its own weight (rendezvous hashing): primaries are spread evenly, and if a coordinator is lost, only the
    instances whose primary it was move.
    """
    chosen: dict[str, str] = {}
    for address in sorted(map_ids, key=lambda address: _weight(instance_id, address)):
        chosen[map_ids[address]] = address  # the last one stays
    return {address: chosen[map_id] if map_id else address for address, map_id in map_ids.items()}


def current_primaries(instance_id: str, states: Mapping[str, SessionState]) -> dict[str, str]:
    """The `primaries` among the coordinators that can be reported to."""
    return primaries(
        instance_id, {address: state.map_id for address, state in states.items() if state.map_id is not None}
    )


def outdated(instance_id: str, states: Mapping[str, SessionState]) -> list[str]:
    """Coordinators whose open stream has another role than it should have, and may be replaced now.

    A stream that reports chunks continues to until the new primary has all of them.
    """
    chosen = current_primaries(instance_id, states)
    found = []
    for address, state in states.items():
        primary = chosen.get(address, address)
        wanted = StreamRole(map_id=state.map_id or "", reports_chunks=primary == address)
        if state.role is None or state.role == wanted:
            continue
        if state.role.map_id != wanted.map_id or wanted.reports_chunks or states[primary].is_synced:
            found.append(address)
    return found


def _weight(instance_id: str, address: str) -> bytes:
    return sha256(f"{instance_id}\0{address}".encode()).digest()
