"""The layout map that coordinators share: connects this coordinator to it, and again when the connection is lost.

    connect ──► shared: publish, read the logs, load ──► lost ──► pause ──► connect ...

At both transitions all instances register again, so that no other state has to be synchronized.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from typing import TypeVar

from prometheus_client.metrics_core import Metric

from lmkv.config.remote_url import parse_remote_url
from lmkv.errors import ConfigError
from lmkv.telemetry.calls import Scraped
from lmkv_server.coordinator.layout_store.follower import InstanceFollower
from lmkv_server.coordinator.layout_store.layout_store import OwnedRecords, StoreLost
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.layout_store.records import ChunkOwner
from lmkv_server.coordinator.layout_store.session import Session, SharedMapStats, TenantDirectory

logger = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_SECONDS = 2.0
"""Longest time for which a starting coordinator waits for the map before it serves."""
MIN_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
STABLE_SECONDS = 60.0
"""A connection that lasted this long resets the pause to the shortest."""
MIN_HELD_SECONDS = 60.0
HELD_LEASES = 10
"""Publications expire after this many leases without renewal, and after `MIN_HELD_SECONDS` at the earliest."""


class SharedMap:
    """Connects to the store at `url`. The coordinator keeps serving whatever happens to the store.

    Raises `ConfigError` if the URL is invalid, or the package that it needs is not installed.
    """

    def __init__(self, url: str, *, lease_ttl: float) -> None:
        parsed = parse_remote_url(url)
        if find_spec("valkey") is None:
            raise ConfigError(
                f"layout_map_url: {parsed.shown} needs valkey, which is not installed; "
                "pip install '.[valkey]' in a clone of lmkv",
                key="layout_map_url",
            )
        from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient

        self.address = ""
        """`HOST:PORT` under which this coordinator is known to the others; set before `start`."""
        self._process_id = secrets.token_hex(8)
        self._held_seconds = max(MIN_HELD_SECONDS, HELD_LEASES * lease_ttl)
        self._store = ValkeyClient(parsed, held_seconds=self._held_seconds)
        self._session: Session | None = None
        self._past_stats = SharedMapStats()
        self._tenants: TenantDirectory | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._logged = ""

    @property
    def map_id(self) -> str:
        """Id of the shared map; empty while it is not connected."""
        return self._session.map_id if self._session else ""

    @property
    def owner(self) -> str:
        """The name of this coordinator's process in the map."""
        return f"{self.address}#{self._process_id}"

    def stats(self) -> SharedMapStats:
        """Returns the counts since the process started."""
        return self._past_stats.plus(self._session.stats()) if self._session else self._past_stats

    def of(self, tenant: str) -> TenantLayoutStore:
        """One tenant's part of the map."""
        return TenantLayoutStore(self, tenant)

    async def start(self, tenants: TenantDirectory) -> None:
        """Starts sharing; returns once the map is connected, or after `FIRST_SECONDS`."""
        self._tenants = tenants
        self._task = asyncio.create_task(self._run(tenants), name="lmkv-shared-map")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._tried.wait()

    async def aclose(self) -> None:
        """Stops sharing. Publications stay for the coordinator that takes over. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._store.aclose()

    async def publish(self, owner: ChunkOwner, epoch: int) -> Publication | None:
        """Starts a new term of an instance; None if the map is not connected."""
        return await self._call(lambda session: session.publish(owner, epoch))

    async def write_operations(
        self,
        tenant: str,
        changed: Mapping[str, bytes | None],
        lifetime_seconds: float,
        age_seconds: float,
    ) -> int | None:
        """Writes records of operations of this coordinator; returns how many there are, None if it is not connected."""
        return await self._call(
            lambda _: self._store.write_operations(tenant, self.owner, changed, lifetime_seconds, age_seconds)
        )

    async def read_operations(self, tenant: str, name: str, max_bytes: int) -> list[OwnedRecords]:
        """Records of the operations of a tenant, or of one of them; empty if the map is not connected."""
        return await self._call(lambda _: self._store.read_operations(tenant, name, max_bytes)) or []

    def load(self, owner: ChunkOwner, follower: InstanceFollower) -> None:
        """Schedules a load of an instance's chunks."""
        if self._session is not None:
            self._session.loader.load(owner, follower)

    async def wait_for_room(self) -> None:
        """Waits, at most a second, while the backlog of publications is more than half full."""
        if self._session is not None:
            await self._session.publisher.wait_for_room()

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _call(self, call: Callable[[Session], Awaitable[T]]) -> T | None:
        """The result of a call to the store; None if it is not connected, or just lost."""
        session = self._session
        if session is None:
            return None
        try:
            result = await call(session)
        except StoreLost as lost:
            session.fail(lost)
            self._end(session, str(lost))
            return None
        return result if self._session is session else None

    async def _run(self, tenants: TenantDirectory) -> None:
        pause = MIN_PAUSE_SECONDS
        while self._task is not None:  # a task group that fails just when it is cancelled swallows the cancellation
            began = time.monotonic()
            session = Session(self._store, tenants, self._held_seconds)
            try:
                await session.open()
                self._begin(session)
                await session.run()
            except* StoreLost as lost:
                self._end(session, str(lost.exceptions[0]))
            except* Exception:
                logger.exception("the shared layout map failed unexpectedly")
                self._end(session, "unexpected failure")
            self._tried.set()
            was_stable = time.monotonic() - began > STABLE_SECONDS
            pause = MIN_PAUSE_SECONDS if was_stable else min(2 * pause, MAX_PAUSE_SECONDS)
            await asyncio.sleep(pause)

    def _begin(self, session: Session) -> None:
        self._session, self._logged = session, ""
        logger.info("sharing the layout map %s at %s", session.map_id, self._store.shown)
        self._resync_all("the layout map is shared now")
        self._tried.set()

    def _end(self, session: Session, reason: str) -> None:
        if self._session is session:
            past = self.stats()
            self._session, self._past_stats = None, replace(past, loss_count=past.loss_count + 1)
            self._resync_all("the layout map is not shared any more")
        text = f"layout_map_url: {self._store.shown} cannot be used, continuing without it: {reason}"
        if text != self._logged:  # once, not at every attempt
            logger.warning(text)
            self._logged = text

    def _resync_all(self, reason: str) -> None:
        for _, services in self._tenants.by_name() if self._tenants else ():
            services.core.stop_sharing()
            services.resync(reason)


class TenantLayoutStore:
    """One tenant's part of a shared map; a `LayoutStore`."""

    def __init__(self, shared: SharedMap, tenant: str) -> None:
        self._shared = shared
        self._tenant = tenant

    @property
    def map_id(self) -> str:
        """Id of the shared map; empty while it is not connected."""
        return self._shared.map_id

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:
        """Starts a publication; None if the map is not connected."""
        return await self._shared.publish(ChunkOwner(self._tenant, instance_id), epoch)

    @property
    def owner(self) -> str:
        """The name of this coordinator's process in the map."""
        return self._shared.owner

    async def write_operations(
        self, changed: Mapping[str, bytes | None], lifetime_seconds: float, age_seconds: float
    ) -> int | None:
        """Writes records of operations; returns how many there are now, None if the map is not connected."""
        return await self._shared.write_operations(self._tenant, changed, lifetime_seconds, age_seconds)

    async def read_operations(self, name: str, max_bytes: int) -> list[OwnedRecords]:
        """The records of all coordinators, or those of one operation."""
        return await self._shared.read_operations(self._tenant, name, max_bytes)

    def load(self, follower: InstanceFollower) -> None:
        """Schedules a load of an instance's chunks."""
        self._shared.load(ChunkOwner(self._tenant, follower.instance.info.instance_id), follower)

    async def wait_for_room(self) -> None:
        """Waits, at most a second, while the backlog of publications is more than half full."""
        await self._shared.wait_for_room()


class SharedMapMetrics(Scraped):
    """Metrics of a coordinator that has a `layout_map_url`."""

    prefix = "lmkv_coordinator_layout_map_"

    def __init__(self, shared: SharedMap) -> None:
        self._shared = shared

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        is_shared = bool(self._shared.map_id)
        yield self.gauge("shared", "1 while the layout map is shared with other coordinators.", is_shared)
        stats = self._shared.stats()
        yield self.counter("published_reports", "Reports published to other coordinators.", stats.published_count)
        yield self.counter("followed_reports", "Reports of other coordinators that were applied.", stats.followed_count)
        yield self.counter("loads", "Instances whose chunks were loaded from the shared map.", stats.load_count)
        yield self.counter("losses", "Times that the connection to the shared map was lost.", stats.loss_count)
