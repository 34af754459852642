"""Whose chunks they are, in a map that coordinators share."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

SHARD_COUNT = 4
"""Parts of the map. A cluster keeps each in one place, so that what belongs together changes together.

The fewer, the more changes share a call; and coordinators are busy long before a part is too much for one server.
"""


class Owner(NamedTuple):
    """An instance of a tenant."""

    tenant: str
    instance_id: str

    @property
    def name(self) -> str:
        """As keys have it. No tenant has a slash in its name."""
        return f"{self.tenant}/{self.instance_id}"

    @property
    def shard(self) -> int:
        """The part of the map that it is in."""
        return crc32(self.name.encode()) % SHARD_COUNT
