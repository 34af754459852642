"""A node's membership in the fleet: one session per coordinator, reports to all of them, lookups at any of them.

Each coordinator has the whole layout map, so that losing one costs no more than the lookup that was sent to it. Of
coordinators that share one layout map, only the node's primary receives chunks, and the others everything else
(`shard`). A name may stand for several addresses, one per coordinator; names are resolved periodically.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, Unpack

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.rpc.endpoints import resolve
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.tiers import INSTANCE_TIERS
from lmkv.v1 import cache_service_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.fetch.tier import FoundHolders, LookupFields
from lmkv_server.node.fleet.registration import FleetContext
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.fleet.session import CoordinatorSession
from lmkv_server.node.fleet.shard import SessionState, current_primaries, outdated

logger = logging.getLogger(__name__)

LOCATE_SECONDS = 0.5
"""Deadline of one coordinator for locating an instance."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FleetStats:
    """The node's coordinators, now and since the start."""

    connected_count: int
    """Coordinators that answer."""
    refused_count: int
    """Coordinators at which another node holds this one's instance id."""
    lookup_failures: int
    """Lookups that a coordinator refused or did not answer in time."""


class FleetMembership:
    """Registers on entry, deregisters on exit. All methods belong to the event loop it was entered on.

    Without coordinators it does nothing, and lookups find nothing.
    """

    def __init__(
        self,
        coordinator_addresses: Sequence[str],
        context: FleetContext,
        *,
        credentials: Credentials = rpc.PLAINTEXT,
        resolve: Callable[[str], Awaitable[list[str]]] = resolve,
    ) -> None:
        self._names = tuple(dict.fromkeys(coordinator_addresses))
        self._context = context
        self._credentials = credentials
        self._resolve = resolve
        self._instance_id = ""
        self._sessions: dict[str, CoordinatorSession] = {}
        """Sessions by the coordinator's IP address and port."""
        self._unresolved: set[str] = set()
        self._address_count = 0
        """Addresses that the names stand for."""
        self._role_timer = DeadlineTimer(self._change_roles)
        self._resolving: asyncio.Task[None] | None = None
        self._lookup_count = 0

    # --- Life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._instance_id = self._context.node.describe().instance_id
        await self._find_coordinators()
        await self._role_timer.__aenter__()
        self._resolving = asyncio.create_task(self._resolve_periodically(), name="lmkv-fleet")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Deregisters everywhere, in at most half a second. Idempotent."""
        resolving, self._resolving = self._resolving, None
        if resolving is not None:
            resolving.cancel()
            await asyncio.gather(resolving, return_exceptions=True)
        await self._role_timer.aclose()
        await asyncio.gather(*map(self._leave, tuple(self._sessions)))

    async def started(self) -> None:
        """Returns once the first attempt to register at each coordinator has ended; failed ones are repeated.

        Raises `ConfigError` if another living node has this instance id.
        """
        await asyncio.gather(*(session.started() for session in self.sessions))

    # --- Coordinators --------------------------------------------------------------------------------------------

    @property
    def sessions(self) -> list[CoordinatorSession]:
        """One per known coordinator."""
        return list(self._sessions.values())

    async def _resolve_periodically(self) -> None:
        while self._names:
            await asyncio.sleep(self._context.resolve_interval_seconds)
            await self._find_coordinators()

    async def _find_coordinators(self) -> None:
        """Joins coordinators that appeared behind the names, and leaves those that disappeared and do not answer."""
        found: dict[str, str] = {}
        for name in self._names:
            try:
                found |= dict.fromkeys(await self._resolve(name), name)
                self._unresolved.discard(name)
            except Unreachable as error:
                if name not in self._unresolved:
                    logger.warning("not in the fleet at %s, trying again: %s", name, error)
                self._unresolved.add(name)
        before, self._address_count = self.coordinator_count, len(found.keys() | self._sessions.keys())
        if self.coordinator_count != before:
            self.refresh()
        for address in found.keys() - self._sessions.keys():
            await self._join(address, found[address])
        if not self._unresolved:
            gone = [one for one in self._sessions.keys() - found.keys() if not self._sessions[one].connected]
            await asyncio.gather(*map(self._leave, gone))

    async def _join(self, address: str, name: str) -> None:
        credentials = self._credentials
        if credentials.ca and not credentials.name:
            credentials = dataclasses.replace(credentials, name=name.rpartition(":")[0])
        session = CoordinatorSession(address, self._context, self, credentials=credentials)
        self._sessions[address] = await session.__aenter__()

    async def _leave(self, address: str) -> None:
        await self._sessions.pop(address).aclose()

    # --- Roles of streams: `SessionHooks` ------------------------------------------------------------------------

    def _states(self) -> dict[str, SessionState]:
        return {address: session.state for address, session in self._sessions.items()}

    def reports_chunks(self, address: str) -> bool:
        """Whether a new stream to this coordinator is to carry chunks."""
        return current_primaries(self._instance_id, self._states()).get(address, address) == address

    def state_changed(self) -> None:
        """The state of a session has changed: roles may have, too."""
        self._role_timer.changed()

    def conflicts_changed(self) -> None:
        """Notifies the node."""
        self._context.node.conflicts_changed(self.conflicts)

    async def settled(self) -> None:
        """Returns once the first attempt to register at each coordinator has ended."""
        await asyncio.gather(*(session.settled() for session in self.sessions))

    def _change_roles(self) -> float | None:
        """Ends streams of outdated roles, which their sessions replace; when to call it again."""
        now = time.monotonic()
        dues = [self._sessions[one].change_role(now) for one in outdated(self._instance_id, self._states())]
        return min((due for due in dues if due is not None), default=None)

    # --- Reports: `CacheListener` --------------------------------------------------------------------------------

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Reports a chunk that this node alone holds. Chunks of shared tiers are not reported."""
        if tier in INSTANCE_TIERS:
            self.admitted(
                HeldChunk(tier, chunk.fingerprint, chunk.key, chunk.token_count, chunk.parent, chunk.prefix_digests)
            )

    def removed(self, tier: str, chunk: CachedChunk, _reason: MissReason) -> None:
        """Reports that the tier no longer has the chunk."""
        if tier in INSTANCE_TIERS:
            self.evicted(tier, chunk.fingerprint, chunk.key)

    def admitted(self, chunk: HeldChunk) -> None:
        """Reports a chunk that the node now holds. Call it in the step that makes `snapshot` yield it."""
        for session in self._sessions.values():
            session.admitted(chunk)

    def evicted(self, tier: str, fingerprint: bytes, key: ChunkKey) -> None:
        """Reports a chunk that the node no longer holds. Call it in the step that makes `snapshot` omit it."""
        for session in self._sessions.values():
            session.evicted(tier, fingerprint, key)

    def refresh(self) -> None:
        """Registers again, because specs or engines have changed. Call it before chunks of a new spec are stored."""
        for session in self.sessions:
            session.refresh()

    def report_wrong(self, keys: Sequence[ChunkKey]) -> bool:
        """Has one coordinator order all instances to drop these chunks; False if none is connected."""
        return any(session.report_wrong(keys) for session in self._sessions.values() if session.connected)

    # --- Lookups -------------------------------------------------------------------------------------------------

    @property
    def is_configured(self) -> bool:
        """Whether the node has coordinators."""
        return bool(self._names)

    @property
    def coordinator_count(self) -> int:
        """The number of coordinators; a name that cannot be resolved counts as one."""
        return self._address_count + len(self._unresolved)

    @property
    def connected(self) -> bool:
        """Whether a coordinator answers, according to the last attempts."""
        return any(session.connected for session in self.sessions)

    def answers_within(self, seconds: float) -> bool:
        """Whether a coordinator may answer a lookup within this time: none that has been silent for longer."""
        return any(session.answers_within(seconds) for session in self.sessions)

    def stats(self) -> FleetStats:
        """The state of all sessions."""
        return FleetStats(
            connected_count=sum(session.connected for session in self.sessions),
            refused_count=sum(session.is_refused for session in self.sessions),
            lookup_failures=sum(session.lookup_failures for session in self.sessions),
        )

    @property
    def conflicts(self) -> list[pb.SpecConflict]:
        """Instances of the same models whose KvSpec is incompatible, and the field that differs, each once."""
        found = {(one.instance_id, one.model_name): one for session in self.sessions for one in session.conflicts}
        return list(found.values())

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float, /, **fields: Unpack[LookupFields]
    ) -> FoundHolders:
        """The other instances that hold the first key, longest contiguous run first. A failure is a miss.

        Instances without an address are left out: nothing can be fetched from them. Lookups are distributed over the
        coordinators in turn. A partial answer, from a coordinator that does not have all snapshots yet, is returned
        only if no other coordinator answers within the deadline.
        """
        if not keys and not fields.get("prefix_digests"):
            return FoundHolders()
        best: FoundHolders | None = None
        has_failed = False
        self._lookup_count += 1
        deadline = time.monotonic() + deadline_seconds
        sessions = self.sessions
        first = self._lookup_count % max(len(sessions), 1)
        for session in sessions[first:] + sessions[:first]:
            left = deadline - time.monotonic()
            if left <= 0 or not session.answers_within(left):
                continue
            found = await session.lookup(keys, left, **fields)
            if found is None:
                has_failed = True
                continue
            answer = FoundHolders(
                holders=[holder for holder in found.holders if holder.peer_address],
                partial_token_counts=found.partial_token_counts,
                key_index=found.key_index,
                prefix_key=found.prefix_key,
                prefix_token_count=found.prefix_token_count,
            )
            if found.is_complete:
                return answer
            if best is None or longest(answer.holders) >= longest(best.holders):
                best = answer
        if best is None:
            return FoundHolders(is_answered=False)
        return dataclasses.replace(best, is_answered=not has_failed)

    async def locate(self, instance_id: str) -> cache_service_pb2.Holder | None:
        """The node of an instance, as a coordinator has it registered; None if none of those that answer has.

        Raises `Unreachable` if there are coordinators and none answers.
        """
        failure: Unreachable | None = None
        answered = not self._names
        for session in sorted(self.sessions, key=lambda one: not one.connected):
            try:
                if found := await session.locate(instance_id, LOCATE_SECONDS):
                    return found
                answered = True
            except Unreachable as error:
                failure = error
        if answered:
            return None
        raise failure or Unreachable("no coordinator is known yet")


def longest(holders: Sequence[cache_service_pb2.Holder]) -> int:
    """Number of chunks that the best of them holds."""
    return holders[0].matched_chunk_count if holders else 0
