"""The layout map that coordinators share: whether this one has its part in it now.

    connect ──► shared: publish, read the logs, load ──► lost ──► pause ──► connect ...

Whenever it begins or ends, all instances are told to register anew: nothing else has to be kept in step.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress
from importlib.util import find_spec

from lmkv.errors import ConfigError
from lmkv.remote_url import parse_remote_url
from lmkv_server.coordinator.layout_store.counts import Counts
from lmkv_server.coordinator.layout_store.follower import Follower
from lmkv_server.coordinator.layout_store.lost import StoreLost
from lmkv_server.coordinator.layout_store.owner import Owner
from lmkv_server.coordinator.layout_store.publication import Publication
from lmkv_server.coordinator.layout_store.session import Members, Session

logger = logging.getLogger(__name__)

FIRST_SECONDS = 2.0
"""How long a coordinator that starts waits for the map before it serves."""
MIN_PAUSE_SECONDS = 0.25
MAX_PAUSE_SECONDS = 10.0
STABLE_SECONDS = 60.0
"""After so long the next pause is the shortest again."""
MIN_HELD_SECONDS = 60.0
HELD_LEASES = 10
"""What nobody renews vanishes after so many leases, and a minute at least."""


class SharedMap:
    """Connects to the store of `url`, and again whenever that is lost. Whatever happens to it, the coordinator goes on.

    Raises `ConfigError` if the URL cannot be used, or the package for it is not installed.
    """

    def __init__(self, url: str, *, lease_ttl: float) -> None:
        self.counts = Counts()
        parsed = parse_remote_url(url)
        if find_spec("valkey") is None:
            raise ConfigError(
                f"layout_map_url: {parsed.shown} needs valkey, which is not installed; pip install 'lmkv[valkey]'",
                key="layout_map_url",
            )
        from lmkv_server.coordinator.layout_store.store import Store

        self._held_seconds = max(MIN_HELD_SECONDS, HELD_LEASES * lease_ttl)
        self._store = Store(parsed, held_seconds=self._held_seconds)
        self._session: Session | None = None
        self._members: Members | None = None
        self._task: asyncio.Task[None] | None = None
        self._tried = asyncio.Event()
        self._logged = ""

    @property
    def map_id(self) -> str:
        """Which map is shared now; empty while none is."""
        return self._session.map_id if self._session else ""

    def of(self, tenant: str) -> TenantLayoutStore:
        """What the services of one tenant see of it."""
        return TenantLayoutStore(self, tenant)

    async def start(self, members: Members) -> None:
        """Begins to share what these know; returns once it does, or after two seconds."""
        self._members = members
        self._task = asyncio.create_task(self._run(members), name="lmkv-shared-map")
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self._tried.wait()

    async def aclose(self) -> None:
        """Shares no longer; what was published stays for who takes over. Repeating it is safe."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._store.aclose()

    async def publish(self, owner: Owner, epoch: int) -> Publication | None:
        """Begins a term of an instance; None if nothing is shared, or no longer."""
        session = self._session
        if session is None:
            return None
        try:
            publication = await session.publish(owner, epoch)
        except StoreLost as lost:
            session.fail(lost)
            self._end(session, str(lost))
            return None
        return publication if self._session is session else None

    def load(self, owner: Owner, follower: Follower) -> None:
        """Has what an instance holds loaded soon."""
        if self._session is not None:
            self._session.loader.load(owner, follower)

    async def has_room(self) -> None:
        """Waits, a second at most, while much is still to be published."""
        if self._session is not None:
            await self._session.publisher.has_room()

    # --- Inside --------------------------------------------------------------------------------------------------

    async def _run(self, members: Members) -> None:
        pause = MIN_PAUSE_SECONDS
        while self._task is not None:  # a task group that fails just when it is cancelled swallows the cancellation
            began = time.monotonic()
            session = Session(self._store, members, self.counts, self._held_seconds)
            try:
                await session.open()
                self._begin(session)
                await session.run()
            except* StoreLost as lost:
                self._end(session, str(lost.exceptions[0]))
            except* Exception:
                logger.exception("sharing the layout map failed unexpectedly")
                self._end(session, "it failed unexpectedly")
            self._tried.set()
            was_stable = time.monotonic() - began > STABLE_SECONDS
            pause = MIN_PAUSE_SECONDS if was_stable else min(2 * pause, MAX_PAUSE_SECONDS)
            await asyncio.sleep(pause)

    def _begin(self, session: Session) -> None:
        self._session, self._logged = session, ""
        logger.info("shares the layout map %s at %s", session.map_id, self._store.shown)
        self._start_anew("the layout map is shared now")
        self._tried.set()

    def _end(self, session: Session, reason: str) -> None:
        if self._session is session:
            self._session = None
            self.counts.losses += 1
            self._start_anew("the layout map is not shared any more")
        text = f"layout_map_url: {self._store.shown} cannot be used, going on without it: {reason}"
        if text != self._logged:  # once, not with every attempt
            logger.warning(text)
            self._logged = text

    def _start_anew(self, reason: str) -> None:
        for _, member in self._members.by_name() if self._members else ():
            member.core.unshare()
            member.resync(reason)


class TenantLayoutStore:
    """One tenant's part of a shared map; see `Share`."""

    def __init__(self, shared: SharedMap, tenant: str) -> None:
        self._shared = shared
        self._tenant = tenant

    @property
    def map_id(self) -> str:
        """See `Share`."""
        return self._shared.map_id

    async def publish(self, instance_id: str, epoch: int) -> Publication | None:
        """See `Share`."""
        return await self._shared.publish(Owner(self._tenant, instance_id), epoch)

    def load(self, follower: Follower) -> None:
        """See `Share`."""
        self._shared.load(Owner(self._tenant, follower.instance.said.instance_id), follower)

    async def has_room(self) -> None:
        """See `Share`."""
        await self._shared.has_room()
