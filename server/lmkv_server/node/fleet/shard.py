"""Which coordinator is told what the node holds, of those that keep one layout map together. Pure. Used by `Fleet`."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple


class Role(NamedTuple):
    """What a stream of reports is for."""

    map_id: str
    """The layout map that its coordinator shares with others; empty if it keeps its own."""
    tells_chunks: bool
    """Whether the chunks are told over it, not only all else."""


def homes(instance_id: str, map_ids: Mapping[str, str]) -> dict[str, str]:
    """For each coordinator the one that is told the chunks so that it knows them; all are named by their addresses.

    `map_ids` has the id of each one's layout map, empty if it keeps its own: then it has to be told itself. Of those
    that share a map, the one of the highest weight is the home of all. Each pair of instance and coordinator has a
    weight of its own (rendezvous hashing): so homes are spread evenly, and where a coordinator goes, only those
    instances move whose home it was.
    """
    chosen: dict[str, str] = {}
    for address in sorted(map_ids, key=lambda address: _weight(instance_id, address)):
        chosen[map_ids[address]] = address  # the last one stays
    return {address: chosen[map_id] if map_id else address for address, map_id in map_ids.items()}


def _weight(instance_id: str, address: str) -> bytes:
    return sha256(f"{instance_id}\0{address}".encode()).digest()
