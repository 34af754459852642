"""One connection to the shared map, from connecting until it is lost. Used by `SharedMap`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.log_reader import CONCURRENT_LOADS, LogReader, SnapshotLoader
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.layout_store.publisher import Publisher
from lmkv_server.coordinator.layout_store.records import SHARD_COUNT, ChunkOwner, LogEntry, LogPosition
from lmkv_server.coordinator.layout_store.store_lost import StoreLost, all_of

if TYPE_CHECKING:  # it imports valkey, which is optional
    from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""Interval at which the id of the map is checked."""
RENEWALS = 6
"""Renewals within the lifetime of a publication."""
REASONS = {"fenced": "another coordinator publishes its chunks", "lost": "its published chunks were lost"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMapStats:
    """Counts since the process started."""

    published_count: int = 0
    """Entries that were published."""
    followed_count: int = 0
    """Entries of other coordinators that were applied."""
    load_count: int = 0
    """Instances whose chunks were loaded."""
    loss_count: int = 0
    """Times that the connection to the map was lost."""

    def plus(self, other: SharedMapStats) -> SharedMapStats:
        """The sum of both."""
        return SharedMapStats(
            published_count=self.published_count + other.published_count,
            followed_count=self.followed_count + other.followed_count,
            load_count=self.load_count + other.load_count,
            loss_count=self.loss_count + other.loss_count,
        )


class SharedRegistry(Protocol):
    """The part of a tenant's `Registry` that a shared map uses."""

    @property
    def followers(self) -> Mapping[str, InstanceFollower]:
        """By instance id: instances that report to another coordinator."""

    @property
    def publications(self) -> Mapping[str, Publication]:
        """By instance id: instances that report here."""

    def unpublish(self, instance_id: str) -> None:
        """Stops publishing an instance. Idempotent."""

    def stop_sharing(self) -> None:
        """Stops publishing and following all instances."""


class TenantServices(Protocol):
    """The part of a tenant's `Services` that a shared map uses."""

    @property
    def core(self) -> SharedRegistry:
        """The tenant's registry."""

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the report streams of all instances, or of one: they register again."""


class TenantDirectory(Protocol):
    """The tenants of a coordinator."""

    def find(self, tenant: str) -> TenantServices | None:
        """The services of a tenant; None if no call has named it."""

    def by_name(self) -> Iterable[tuple[str, TenantServices]]:
        """All tenants."""


class Session:
    """Publishes and follows through one store. `open` and `run` raise `StoreLost`. It is the listener of its logs."""

    def __init__(self, store: ValkeyClient, tenants: TenantDirectory, held_seconds: float) -> None:
        self.map_id = ""
        self.publisher = Publisher(store, self._resync_refused)
        self.loader = SnapshotLoader(store, self._position)
        self._store = store
        self._tenants = tenants
        self._held_seconds = held_seconds
        self._followed_count = 0
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers = [LogReader(store, shard, self) for shard in range(SHARD_COUNT)]

    def stats(self) -> SharedMapStats:
        """What it has done so far."""
        return SharedMapStats(
            published_count=self.publisher.published_count,
            followed_count=self._followed_count,
            load_count=self.loader.load_count,
        )

    async def open(self) -> None:
        """Connects, and sets the logs' readers to the newest entries."""
        map_id = await self._store.connect()
        await all_of(reader.begin() for reader in self._readers)
        self.map_id = map_id

    async def run(self) -> None:
        """Runs until the store is lost."""
        async with asyncio.TaskGroup() as group:
            for reader in self._readers:
                group.create_task(reader.run())
            for _ in range(CONCURRENT_LOADS):
                group.create_task(self.loader.run())
            group.create_task(self.publisher.run())
            group.create_task(self.publisher.renew(self._publications, self._held_seconds / RENEWALS))
            group.create_task(self._check())
            group.create_task(self._wait_failed())

    def fail(self, lost: StoreLost) -> None:
        """Ends `run` with an error that occurred outside of it. Idempotent."""
        if not self._failed.done():
            self._failed.set_exception(lost)

    async def publish(self, owner: ChunkOwner, epoch: int) -> Publication:
        """Starts a new term of an instance. Raises `StoreLost`."""
        return Publication(owner, epoch, await self._store.next_term(owner), self.publisher.enqueue)

    # --- LogListener ---------------------------------------------------------------------------------------------

    def handle_entry(self, entry: LogEntry) -> None:
        """Passes an entry to the follower of its instance, if there is one."""
        services = self._tenants.find(entry.tenant)
        follower = services.core.followers.get(entry.instance_id) if services else None
        if follower is not None:
            self._followed_count += follower.handle_entry(entry)
            if follower.difference:
                logger.warning("%s; loading its chunks again", follower.difference)
                follower.difference = ""

    def advance(self, shard: int) -> None:
        """Completes the loads that waited for this part of the log."""
        self.loader.advance(shard)

    def handle_gap(self, shard: int) -> None:
        """Loads all instances of the shard again."""
        for owner, follower in self._followers():
            if owner.shard == shard:
                follower.request_load()

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._store.check()

    async def _wait_failed(self) -> None:
        await self._failed

    def _position(self, shard: int) -> LogPosition:
        return self._readers[shard].position

    def _followers(self) -> Iterator[tuple[ChunkOwner, InstanceFollower]]:
        for tenant, services in self._tenants.by_name():
            for instance_id, follower in list(services.core.followers.items()):
                yield ChunkOwner(tenant, instance_id), follower

    def _publications(self) -> Iterator[Publication]:
        for _, services in self._tenants.by_name():
            yield from list(services.core.publications.values())

    def _resync_refused(self, owner: ChunkOwner, term: int, reply: str) -> None:
        services = self._tenants.find(owner.tenant)
        publication = services.core.publications.get(owner.instance_id) if services else None
        if services is not None and publication is not None and publication.term == term:
            services.core.unpublish(owner.instance_id)
            services.resync(REASONS.get(reply, reply), owner.instance_id)
