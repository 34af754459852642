"""The contract between the services of one tenant and a shared layout map; `SharedMap` implements it."""

from __future__ import annotations

from typing import Protocol

from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.publication import Publication


class LayoutStore(Protocol):
    """Publishes the chunks of instances that report here, and loads those that other coordinators publish."""

    @property
    def map_id(self) -> str:
        """Id of the shared map; empty while it is not connected."""

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:
        """Starts a publication for a stream of reports; None if no map is connected."""

    def load(self, follower: InstanceFollower) -> None:
        """Schedules a load of an instance's chunks."""

    async def wait_for_room(self) -> None:
        """Waits, at most a second, while the backlog of publications is more than half full."""


class NoSharedStore:
    """The `LayoutStore` of a coordinator without a shared map."""

    map_id = ""

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:  # noqa: ARG002
        """None: nothing is published."""
        return None

    def load(self, follower: InstanceFollower) -> None:
        """Does nothing."""

    async def wait_for_room(self) -> None:
        """Returns at once."""
