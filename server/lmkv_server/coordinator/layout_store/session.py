"""One connection to the shared map: reads the logs, loads the chunks of followed instances, and publishes.

Used by `SharedMap`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.layout_store import StoreLost, all_of
from lmkv_server.coordinator.layout_store.publication import MAX_BATCH_BYTES, Backlog, PendingEntry, Publication
from lmkv_server.coordinator.layout_store.records import (
    READ_ENTRIES,
    SHARD_COUNT,
    ChunkOwner,
    EntryKind,
    LogEntry,
    LogPosition,
    decode,
)

if TYPE_CHECKING:  # it imports valkey, which is optional
    from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.05
"""Pause between two writes or reads, so that each carries many entries: a call costs as much as dozens of changes."""
ROOM_SECONDS = 1.0
RENEWALS_PER_CALL = 200


class Publisher:
    """Publishes through one connected store.

    `on_refused` is called with the owner, the term and the reply for a publication whose term is over (`fenced`) or
    whose chunks were lost (`lost`).
    """

    def __init__(self, store: ValkeyClient, on_refused: Callable[[ChunkOwner, int, str], None]) -> None:
        self._store = store
        self._on_refused = on_refused
        self.backlog = Backlog()
        self._complete: dict[ChunkOwner, int] = {}
        """The newest term of each instance whose snapshot is published; cleared of others at each renewal."""
        self._room = asyncio.Event()
        self.published_count = 0
        """Entries that were written."""

    async def wait_for_room(self) -> None:
        """Waits, at most a second, while the backlog is more than half full."""
        if not self.backlog.is_below_half:
            self._room.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(ROOM_SECONDS):
                    await self._room.wait()

    async def run(self) -> None:
        """Writes until cancelled. Raises `StoreLost`, also when the backlog overflows."""
        while True:
            await self.backlog.added.wait()
            self.backlog.added.clear()
            while batches := self.backlog.take():
                await all_of(self._publish(shard, batch) for shard, batch in batches.items())
                if self.backlog.is_below_half:
                    self._room.set()
                if self.backlog.size_bytes < MAX_BATCH_BYTES:  # else snapshots are being written
                    await asyncio.sleep(GATHER_SECONDS)
            if self.backlog.has_overflowed:
                raise StoreLost("the backlog of publications overflowed")

    async def renew(self, publications: Callable[[], Iterable[Publication]], interval_seconds: float) -> None:
        """Renews the publications at every interval until cancelled. Raises `StoreLost`."""
        while True:
            await asyncio.sleep(interval_seconds)
            by_shard: dict[int, list[Publication]] = {}
            current = {publication.owner: publication for publication in publications()}
            self._complete = {owner: term for owner, term in self._complete.items() if owner in current}
            for publication in current.values():
                by_shard.setdefault(publication.owner.shard, []).append(publication)
            for shard, renewed in by_shard.items():
                for start in range(0, len(renewed), RENEWALS_PER_CALL):
                    await self._renew(shard, renewed[start : start + RENEWALS_PER_CALL])

    async def _publish(self, shard: int, batch: list[PendingEntry]) -> None:
        replies = await self._store.publish(shard, batch)
        self.published_count += len(batch)
        for pending, reply in zip(batch, replies, strict=True):
            if reply == b"ok" and pending.entry.kind is EntryKind.COMPLETE:
                self._complete[pending.owner] = pending.entry.term
            elif reply != b"ok":
                self._on_refused(pending.owner, pending.entry.term, reply.decode())

    async def _renew(self, shard: int, publications: list[Publication]) -> None:
        terms = [(each.owner, each.term, self._complete.get(each.owner) == each.term) for each in publications]
        replies = await self._store.renew(shard, terms)
        for publication, reply in zip(publications, replies, strict=True):
            if reply != b"ok":
                self._on_refused(publication.owner, publication.term, reply.decode())


ENTRIES_PER_STEP = 16
"""Entries that are applied before other tasks run."""


class LogListener(Protocol):
    """Receives what a `LogReader` reads."""

    def handle_entry(self, entry: LogEntry) -> None:
        """An entry was read."""

    def advance(self, shard: int) -> None:
        """Notes that all entries up to the reader's position were handled."""

    def handle_gap(self, shard: int) -> None:
        """Entries were trimmed before they were read, or cannot be decoded, or the log was dropped."""


class LogReader:
    """Reads one shard's log."""

    def __init__(self, store: ValkeyClient, shard: int, listener: LogListener) -> None:
        self.position: LogPosition = (0, 0)
        """The position of the last entry that was read."""
        self._store = store
        self._shard = shard
        self._listener = listener

    async def begin(self) -> None:
        """Sets the position to the newest entry. Raises `StoreLost`."""
        self.position = await self._store.tail(self._shard)

    async def run(self) -> None:
        """Reads until cancelled. Raises `StoreLost`."""
        while True:
            logged = await self._store.read(self._shard, self.position)
            for number, (position, previous, data) in enumerate(logged):
                if previous != self.position:
                    logger.warning("fell behind the log of the shared layout map; reloading shard %d", self._shard)
                    self._listener.handle_gap(self._shard)
                self.position = position
                try:
                    entry = decode(data)
                except ValueError as error:
                    logger.warning("cannot decode an entry of the shared layout map: %s", error)
                    self._listener.handle_gap(self._shard)
                else:
                    self._listener.handle_entry(entry)
                self._listener.advance(self._shard)
                if number % ENTRIES_PER_STEP == ENTRIES_PER_STEP - 1:
                    await asyncio.sleep(0)
            if not logged:
                await self._check_dropped()
            if len(logged) < READ_ENTRIES:  # else more entries are available already
                await asyncio.sleep(GATHER_SECONDS)

    async def _check_dropped(self) -> None:
        """Reads the log from its beginning if the store has dropped the one that was read. Raises `StoreLost`.

        Positions contain the time of the store. If its clock was set back since, those of a new log are lower than the
        reader's: nothing follows that one, and nothing shows a gap.
        """
        if await self._store.tail(self._shard) < self.position:
            logger.warning("the log of the shared layout map was dropped; reloading shard %d", self._shard)
            self.position = (0, 0)
            self._listener.handle_gap(self._shard)


CONCURRENT_LOADS = 8
RETRY_SECONDS = 1.0
"""Delay of a load after two failed loads in a row."""


class SnapshotLoader:
    """Loads through one connected store. `position` returns how far a shard's log has been read."""

    def __init__(self, store: ValkeyClient, position: Callable[[int], LogPosition]) -> None:
        self._store = store
        self._position = position
        self._queue: asyncio.Queue[tuple[ChunkOwner, InstanceFollower]] = asyncio.Queue()  # at most one per instance
        self._catching_up: dict[int, set[InstanceFollower]] = {}
        """Loaded followers that wait for the log to be read up to the end of their load, by shard."""
        self.load_count = 0
        """Instances that were loaded."""

    def load(self, owner: ChunkOwner, follower: InstanceFollower) -> None:
        """Schedules a load."""
        if follower.failure_count > 1:
            asyncio.get_running_loop().call_later(RETRY_SECONDS, self._queue.put_nowait, (owner, follower))
        else:
            self._queue.put_nowait((owner, follower))

    def advance(self, shard: int) -> None:
        """The log of a shard was read further: completes the loads that waited for it."""
        waiting = self._catching_up.get(shard)
        if waiting:
            position = self._position(shard)
            for follower in waiting:
                follower.advance(position)
            self._catching_up[shard] = {follower for follower in waiting if follower.is_catching_up}

    async def run(self) -> None:
        """Loads one instance after the other until cancelled; `CONCURRENT_LOADS` tasks run it. Raises `StoreLost`."""
        while True:
            owner, follower = await self._queue.get()
            if follower.needs_load and not follower.is_closed:
                await self._load(owner, follower)

    async def _load(self, owner: ChunkOwner, follower: InstanceFollower) -> None:
        if follower.needs_resync:
            follower.needs_resync = False
            await self._store.next_term(owner)  # fences the publisher, which has the instance send a new snapshot
        load = follower.begin_load()
        if not follower.set_term(load, await self._store.current(owner)):
            return
        cursor = -1
        while cursor and follower.is_loading(load):
            cursor, records = await self._store.scan(owner, load.term, max(cursor, 0))
            follower.add_records(load, records)
            await asyncio.sleep(0)
        if not follower.is_loading(load):
            return
        follower.finish_scan(load, await self._store.tail(owner.shard))
        follower.advance(self._position(owner.shard))
        self.load_count += 1
        if follower.is_catching_up:
            self._catching_up.setdefault(owner.shard, set()).add(follower)


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
        """Followers of the instances that report to another coordinator, by instance id."""

    @property
    def publications(self) -> Mapping[str, Publication]:
        """Publications of the instances that report here, by instance id."""

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
        """Returns the counts of this connection."""
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
        return Publication(owner, epoch, await self._store.next_term(owner), self.publisher.backlog)

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
