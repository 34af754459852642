"""The fleet, as its nodes see it: whoever coordinates it knows the same, and any of them can be asked.

A node is a member at each coordinator, and each has the whole layout map, so one that is lost costs nothing but the
next lookup that it was asked for. Of those that keep one layout map together, one is the node's home: it is told the
chunks, and the others all else. A name that stands for several addresses stands for as many coordinators; it is
resolved again and again, since they come and go.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Self

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import Unreachable
from lmkv.keys import ChunkKey
from lmkv.rpc.resolver import resolve
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.v1 import cache_service_pb2, chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.commands.orders import Orders
from lmkv_server.node.fleet.reports import Held
from lmkv_server.node.fleet.session import CoordinatorSession
from lmkv_server.node.fleet.shard import Role, homes

__all__ = ["Fleet", "Held"]

logger = logging.getLogger(__name__)

LOCATE_SECONDS = 0.5
"""Most time that one coordinator gets to say where an instance is."""

REPORTED_TIERS = {"host": chunk_pb2.TIER_HOST, "disk": chunk_pb2.TIER_DISK}
"""Tiers of this node alone, by the name that their events have: the layout map holds their chunks."""


class Fleet:
    """Membership of one node. Enter it to join, leave it to deregister; all methods are for the loop it is entered in.

    `instance` describes the node as it is now; `snapshot` yields everything it holds now and is read in one go, so
    that it may iterate over a living index. `orders` are told what a coordinator wants done. `on_conflicts` is told
    whenever the instances that share nothing with this one have changed, as seen at each registration. The intervals
    are how often it registers anew, how often, if anything changed, digests are compared, and how often names are
    resolved. `secret` proves to coordinators that it is the same node as before. Without coordinators nothing is done
    and nothing is ever found.
    """

    def __init__(
        self,
        coordinator_addresses: Sequence[str],
        *,
        instance: Callable[[], pb.Instance],
        snapshot: Callable[[], Iterable[Held]],
        orders: Orders,
        on_conflicts: Callable[[list[pb.SpecConflict]], None] = lambda _: None,
        digest_interval_seconds: float = 60.0,
        register_interval_seconds: float = 30.0,
        resolve_interval_seconds: float = 5.0,
        max_pending_changes: int = 200_000,
        credentials: Credentials = rpc.PLAINTEXT,
        secret: bytes = b"",
        resolve: Callable[[str], Awaitable[list[str]]] = resolve,
    ) -> None:
        self.on_conflicts = on_conflicts
        self._describe = instance
        self._instance_id = ""
        self._roles_alarm = DeadlineTimer(self._change_roles)
        self._names = tuple(dict.fromkeys(coordinator_addresses))
        self._resolve = resolve
        self._resolve_interval_seconds = resolve_interval_seconds
        self._credentials = credentials
        self._make_member = partial(
            CoordinatorSession,
            instance=instance,
            snapshot=snapshot,
            orders=orders,
            on_conflicts=lambda: self.on_conflicts(self.conflicts),
            on_standing=self._roles_alarm.changed,
            others_answered=self._answered,
            digest_interval_seconds=digest_interval_seconds,
            register_interval_seconds=register_interval_seconds,
            max_pending_changes=max_pending_changes,
            secret=secret,
        )
        self._members: dict[str, CoordinatorSession] = {}
        """By the coordinator's IP address and port."""
        self._unknown: set[str] = set()
        self._following: asyncio.Task[None] | None = None
        self._asked = 0

    # --- Life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._instance_id = self._describe().instance_id
        await self._find()
        await self._roles_alarm.__aenter__()
        self._following = asyncio.create_task(self._follow(), name="lmkv-fleet")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves the fleet, in at most half a second. Repeating it is safe."""
        following, self._following = self._following, None
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await self._roles_alarm.aclose()
        await asyncio.gather(*map(self._leave, tuple(self._members)))

    async def started(self) -> None:
        """Returns once every coordinator that answers knows the node; it joins the others when they do.

        Raises `ConfigError` if another living node has this instance id.
        """
        await asyncio.gather(*(member.started() for member in self.members))

    # --- Coordinators --------------------------------------------------------------------------------------------

    @property
    def members(self) -> list[CoordinatorSession]:
        """What it is at each coordinator."""
        return list(self._members.values())

    async def _follow(self) -> None:
        while self._names:
            await asyncio.sleep(self._resolve_interval_seconds)
            await self._find()

    async def _find(self) -> None:
        """Joins who is behind the names now, and leaves who is not any more, and does not answer either."""
        found: dict[str, str] = {}
        for name in self._names:
            try:
                found |= dict.fromkeys(await self._resolve(name), name)
                self._unknown.discard(name)
            except Unreachable as error:
                if name not in self._unknown:
                    logger.warning("not in the fleet at %s, trying again: %s", name, error)
                self._unknown.add(name)
        for address in found.keys() - self._members.keys():
            await self._join(address, found[address])
        if not self._unknown:
            gone = [address for address in self._members.keys() - found.keys() if not self._members[address].connected]
            await asyncio.gather(*map(self._leave, gone))

    async def _join(self, address: str, name: str) -> None:
        host = name.rpartition(":")[0]
        credentials = self._credentials
        if credentials.ca and not credentials.name:
            credentials = dataclasses.replace(credentials, name=host)
        member = self._make_member(address, credentials=credentials, tells_chunks=partial(self._tells_chunks, address))
        self._members[address] = await member.__aenter__()

    async def _leave(self, address: str) -> None:
        await self._members.pop(address).aclose()

    # --- Which of them is told the chunks ------------------------------------------------------------------------

    async def _answered(self) -> None:
        """Returns once every coordinator has answered once, or failed to."""
        await asyncio.gather(*(member.settled() for member in self.members))

    def _homes(self) -> dict[str, str]:
        ids = {address: member.layout_map_id for address, member in self._members.items()}
        return homes(self._instance_id, {address: one for address, one in ids.items() if one is not None})

    def _tells_chunks(self, address: str) -> bool:
        return self._homes().get(address, address) == address

    def _change_roles(self) -> float | None:
        """Has members begin anew whose stream is for another role than theirs; when to look again.

        One that tells chunks goes on with it until the new home has all of them.
        """
        now = time.monotonic()
        chosen = self._homes()
        dues = []
        for address, member in self._members.items():
            home = chosen.get(address, address)
            wanted = Role(map_id=member.layout_map_id or "", tells_chunks=home == address)
            if member.role in (None, wanted):
                continue
            if member.role.map_id != wanted.map_id or wanted.tells_chunks or self._members[home].has_told:
                dues.append(member.change_role(now))
        return min((due for due in dues if due is not None), default=None)

    # --- What this node holds ------------------------------------------------------------------------------------

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Reports a chunk of the host tier or of the disk. Chunks of other tiers are not in the layout map."""
        if (reported := REPORTED_TIERS.get(tier)) is not None:
            self.admitted(reported, chunk.fingerprint, chunk.key, chunk.token_count)

    def removed(self, tier: str, chunk: CachedChunk) -> None:
        """Reports that the tier no longer has the chunk."""
        if (reported := REPORTED_TIERS.get(tier)) is not None:
            self.evicted(reported, chunk.fingerprint, chunk.key)

    def admitted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey, token_count: int) -> None:
        """Notes that the node now holds a chunk. Call it in the step that makes `snapshot` yield it."""
        for member in self._members.values():
            member.admitted(tier, fingerprint, key, token_count)

    def evicted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey) -> None:
        """Notes that the node no longer holds a chunk. Call it in the step that makes `snapshot` leave it out."""
        for member in self._members.values():
            member.evicted(tier, fingerprint, key)

    def refresh(self) -> None:
        """Registers anew, because `instance` has other specs or engines. Call it before chunks of a new spec come."""
        for member in self.members:
            member.refresh()

    # --- Who else holds what -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether a coordinator answers, as far as is known."""
        return any(member.connected for member in self.members)

    @property
    def connected_count(self) -> int:
        """Coordinators that answer, as far as is known."""
        return sum(member.connected for member in self.members)

    @property
    def refused_count(self) -> int:
        """Coordinators at which another node has this one's instance id."""
        return sum(member.is_refused for member in self.members)

    @property
    def conflicts(self) -> list[pb.SpecConflict]:
        """Instances of the same models that share nothing with this one, and why, each once."""
        found = {(one.instance_id, one.model_name): one for member in self.members for one in member.conflicts}
        return list(found.values())

    @property
    def lookup_failures(self) -> int:
        """Lookups that a coordinator did not answer, or refused."""
        return sum(member.lookup_failures for member in self.members)

    async def lookup(self, keys: Sequence[ChunkKey], deadline_seconds: float) -> list[cache_service_pb2.Holder]:
        """The other instances that hold the first key, longest contiguous run first. A failure is a miss.

        Instances without an address are left out: nothing can be fetched from them.
        Coordinators are asked in turn, one per lookup. One that says that it is yet to hear of everything is believed
        only if no other one answers within the deadline.
        """
        if not keys:
            return []
        self._asked += 1
        deadline = time.monotonic() + deadline_seconds
        members = self.members
        first = self._asked % max(len(members), 1)
        holders: list[cache_service_pb2.Holder] = []
        for member in members[first:] + members[:first]:
            left = deadline - time.monotonic()
            response = await member.lookup(keys, left) if member.connected and left > 0 else None
            if response is None:
                continue
            found = [holder for holder in response.holders if holder.peer_address]
            if not response.partial:
                return found
            if longest(found) > longest(holders):
                holders = found
        return holders

    async def locate(self, instance_id: str) -> cache_service_pb2.Holder | None:
        """The node of an instance, as a coordinator has it registered; None if none of those that answer has.

        Raises `Unreachable` if there are coordinators and none answers.
        """
        failure: Unreachable | None = None
        answered = not self._names
        for member in sorted(self.members, key=lambda one: not one.connected):
            try:
                if found := await member.locate(instance_id, LOCATE_SECONDS):
                    return found
                answered = True
            except Unreachable as error:
                failure = error
        if answered:
            return None
        raise failure or Unreachable("no coordinator is known yet")


def longest(holders: Sequence[cache_service_pb2.Holder]) -> int:
    """Chunks that the best of them holds."""
    return holders[0].matched_chunk_count if holders else 0
