"""One time during which the map is shared, from a connection until it is lost. Used by `SharedMap`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from lmkv_server.coordinator.core.registry import Registry
from lmkv_server.coordinator.layout_store.counts import Counts
from lmkv_server.coordinator.layout_store.entry import Entry, Position
from lmkv_server.coordinator.layout_store.follower import Follower
from lmkv_server.coordinator.layout_store.loader import LOADS_AT_ONCE, Loader
from lmkv_server.coordinator.layout_store.lost import StoreLost, all_of
from lmkv_server.coordinator.layout_store.owner import SHARD_COUNT, Owner
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.layout_store.publisher import Publisher
from lmkv_server.coordinator.layout_store.reader import Reader

if TYPE_CHECKING:  # it needs a package that not everybody has
    from lmkv_server.coordinator.layout_store.store import Store

logger = logging.getLogger(__name__)

CHECK_SECONDS = 2.0
"""Between two looks whether the map is still the same."""
RENEWALS = 6
"""In the time after which what nobody renews vanishes."""
REASONS = {"fenced": "another coordinator publishes it", "lost": "what was published of it was lost"}


class Member(Protocol):
    """What the map deals with of a tenant's services."""

    @property
    def core(self) -> Registry:
        """Its instances."""

    def resync(self, reason: str, instance_id: str = "") -> None:
        """Ends the streams of reports of all instances, or of one: they register anew."""


class Members(Protocol):
    """The tenants."""

    def find(self, tenant: str) -> Member | None:
        """What serves one; None if nobody has called for it."""

    def by_name(self) -> Iterable[tuple[str, Member]]:
        """What serves each."""


class Session:
    """Publishes and follows through one store. `open` and `run` raise `StoreLost`."""

    def __init__(self, store: Store, members: Members, counts: Counts, held_seconds: float) -> None:
        self.map_id = ""
        self.publisher = Publisher(store, counts, self._refused)
        self.loader = Loader(store, counts, self._position)
        self._store = store
        self._members = members
        self._counts = counts
        self._held_seconds = held_seconds
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._readers = [Reader(store, shard, self) for shard in range(SHARD_COUNT)]

    async def open(self) -> None:
        """Connects; the logs are read from where they are now."""
        map_id = await self._store.connect()
        await all_of(reader.begin() for reader in self._readers)
        self.map_id = map_id

    async def run(self) -> None:
        """Lasts as long as the map is shared."""
        async with asyncio.TaskGroup() as group:
            for reader in self._readers:
                group.create_task(reader.run())
            for _ in range(LOADS_AT_ONCE):
                group.create_task(self.loader.run())
            group.create_task(self.publisher.run())
            group.create_task(self.publisher.renew(self._publications, self._held_seconds / RENEWALS))
            group.create_task(self._check())
            group.create_task(self._wait_failed())

    def fail(self, lost: StoreLost) -> None:
        """Ends it: somebody else found out that the store is lost."""
        if not self._failed.done():
            self._failed.set_exception(lost)

    async def publish(self, owner: Owner, epoch: int) -> Publication:
        """Begins a term of an instance. Raises `StoreLost`."""
        return Publication(owner, epoch, await self._store.next_term(owner), self.publisher.tell)

    # --- What the logs say ---------------------------------------------------------------------------------------

    def hear(self, entry: Entry) -> None:
        """See `Listener`."""
        member = self._members.find(entry.tenant)
        follower = member.core.followers.get(entry.instance_id) if member else None
        if follower is not None:
            self._counts.followed += follower.hear(entry)
            if follower.difference:
                logger.warning("%s; loading it anew", follower.difference)
                follower.difference = ""

    def reached(self, shard: int) -> None:
        """See `Listener`."""
        self.loader.reached(shard)

    def missed(self, shard: int) -> None:
        """See `Listener`."""
        for owner, follower in self._followers():
            if owner.shard == shard:
                follower.want()

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _check(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            await self._store.check()

    async def _wait_failed(self) -> None:
        await self._failed

    def _position(self, shard: int) -> Position:
        return self._readers[shard].position

    def _followers(self) -> Iterator[tuple[Owner, Follower]]:
        for tenant, member in self._members.by_name():
            for instance_id, follower in list(member.core.followers.items()):
                yield Owner(tenant, instance_id), follower

    def _publications(self) -> Iterator[Publication]:
        for _, member in self._members.by_name():
            yield from list(member.core.publications.values())

    def _refused(self, owner: Owner, term: int, reply: str) -> None:
        member = self._members.find(owner.tenant)
        publication = member.core.publications.get(owner.instance_id) if member else None
        if member is not None and publication is not None and publication.term == term:
            member.core.unpublish(owner.instance_id)
            member.resync(REASONS.get(reply, reply), owner.instance_id)
