"""What the services of one tenant see of a map that coordinators share. `SharedMap` is behind it, or nothing."""

from __future__ import annotations

from typing import Protocol

from lmkv_server.coordinator.layout_store.follower import Follower
from lmkv_server.coordinator.layout_store.publication import Publication


class LayoutStore(Protocol):
    """Publishes what is told here, and follows what is told elsewhere."""

    @property
    def map_id(self) -> str:
        """Which map is shared now; empty while none is."""

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:
        """Begins to publish a stream of reports; None if nothing is shared, or no longer."""

    def load(self, follower: Follower) -> None:
        """Has what an instance holds loaded soon."""

    async def has_room(self) -> None:
        """Waits, a second at most, while much is still to be published."""


class NoSharedStore:
    """What a coordinator has that shares none."""

    map_id = ""

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:  # noqa: ARG002
        """See `LayoutStore`."""
        return None

    def load(self, follower: Follower) -> None:
        """See `LayoutStore`."""

    async def has_room(self) -> None:
        """See `LayoutStore`."""
