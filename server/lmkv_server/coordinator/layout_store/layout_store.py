"""The contract between the services of one tenant and a shared layout map; `SharedMap` implements it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.publication import Publication

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnedRecords:
    """Records that one coordinator wrote about operations of a tenant."""

    owner: str
    """The coordinator, as `LayoutStore.owner` of it."""
    age_seconds: float
    """Time since that coordinator wrote last."""
    records: Mapping[str, bytes]
    """The records by name of their operation."""


class LayoutStore(Protocol):
    """Publishes the chunks of instances that report here, and loads those that other coordinators publish."""

    @property
    def map_id(self) -> str:
        """Id of the shared map; empty while it is not connected."""

    @property
    def owner(self) -> str:
        """The name of this coordinator's process in the map, `HOST:PORT#ID`."""

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:
        """Starts a publication for a stream of reports; None if no map is connected."""

    def load(self, follower: InstanceFollower) -> None:
        """Schedules a load of an instance's chunks."""

    async def wait_for_room(self) -> None:
        """Waits, at most a second, while the backlog of publications is more than half full."""

    async def write_operations(
        self, changed: Mapping[str, bytes | None], lifetime_seconds: float, age_seconds: float
    ) -> int | None:
        """Writes records of operations of this coordinator, or removes them (None), and renews all others.

        They count as renewed `age_seconds` ago. Returns how many there are now; None if no map is connected.
        """

    async def read_operations(self, name: str, max_bytes: int) -> list[OwnedRecords]:
        """The records of all coordinators, newest coordinator first, or those of one operation; none without a map."""


class NoSharedStore:
    """The `LayoutStore` of a coordinator without a shared map."""

    map_id = ""
    owner = ""

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:  # noqa: ARG002
        """Returns None: nothing is published."""
        return None

    def load(self, follower: InstanceFollower) -> None:
        """Does nothing."""

    async def wait_for_room(self) -> None:
        """Returns at once."""

    async def write_operations(
        self,
        changed: Mapping[str, bytes | None],  # noqa: ARG002
        lifetime_seconds: float,  # noqa: ARG002
        age_seconds: float,  # noqa: ARG002
    ) -> int | None:
        """Returns None: nothing is written."""
        return None

    async def read_operations(self, name: str, max_bytes: int) -> list[OwnedRecords]:  # noqa: ARG002
        """Empty: no coordinator shares operations."""
        return []


class StoreLost(Exception):
    """The store does not answer, refuses, or holds another map than before: connect again."""


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs calls concurrently and returns their results. Raises `StoreLost` if one does, after all have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except* StoreLost as lost:
        raise lost.exceptions[0] from None
    return [task.result() for task in tasks]
