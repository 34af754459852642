"""The fleet, as its nodes see it: whoever coordinates it is told the same, and any of them can be asked.

Coordinators know nothing of each other. A node is a member at each, so each has the whole layout map, and one that is
lost costs nothing but the next lookup that it was asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from lmkv import rpc
from lmkv.keys import ChunkKey
from lmkv.tls import Tls
from lmkv.v1 import cache_service_pb2, chunk_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.member import Member
from lmkv_server.node.orders import Orders
from lmkv_server.node.reports import Held

__all__ = ["Fleet", "Held"]


class Fleet:
    """Membership of one node. Enter it to join, leave it to deregister; all methods are for the loop it is entered in.

    `instance` describes the node as it is now; `snapshot` yields everything it holds now and is read in one go, so
    that it may iterate over a living index. `orders` are told what a coordinator wants done. `on_conflicts` is told
    whenever the instances that share nothing with this one have changed, as seen at each registration. The intervals
    are how often it registers anew and how often, if anything changed, digests are compared. Without coordinators
    nothing is done and nothing is ever found.
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
        max_pending_changes: int = 200_000,
        tls: Tls = rpc.PLAINTEXT,
    ) -> None:
        self.members = [
            Member(
                address,
                instance=instance,
                snapshot=snapshot,
                orders=orders,
                on_conflicts=lambda: self.on_conflicts(self.conflicts),
                digest_interval_seconds=digest_interval_seconds,
                register_interval_seconds=register_interval_seconds,
                max_pending_changes=max_pending_changes,
                tls=tls,
            )
            for address in dict.fromkeys(coordinator_addresses)
        ]
        """What it is at each coordinator."""
        self.on_conflicts = on_conflicts
        self._asked = 0
        self._stack = AsyncExitStack()

    # --- Life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        for member in self.members:
            await self._stack.enter_async_context(member)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves the fleet, in at most half a second. Repeating it is safe."""
        await asyncio.gather(*(member.aclose() for member in self.members))
        await self._stack.aclose()

    async def started(self) -> None:
        """Returns once every coordinator that answers knows the node; it joins the others when they do.

        Raises `ConfigError` if another living node has this instance id.
        """
        await asyncio.gather(*(member.started() for member in self.members))

    async def wait(self) -> None:
        """Lasts until the fleet has no place for this node: raises `ConfigError` when another has its instance id."""
        await asyncio.gather(asyncio.Event().wait(), *(member.wait() for member in self.members))

    # --- What this node holds ------------------------------------------------------------------------------------

    def admitted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey, token_count: int) -> None:
        """Notes that the node now holds a chunk. Call it in the step that makes `snapshot` yield it."""
        for member in self.members:
            member.admitted(tier, fingerprint, key, token_count)

    def evicted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey) -> None:
        """Notes that the node no longer holds a chunk. Call it in the step that makes `snapshot` leave it out."""
        for member in self.members:
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

        Coordinators are asked in turn, one per lookup. One that says that it is yet to hear of everything is believed
        only if no other one answers within the deadline.
        """
        if not keys:
            return []
        self._asked += 1
        deadline = time.monotonic() + deadline_seconds
        first = self._asked % max(len(self.members), 1)
        holders: list[cache_service_pb2.Holder] = []
        for member in self.members[first:] + self.members[:first]:
            left = deadline - time.monotonic()
            response = await member.lookup(keys, left) if member.connected and left > 0 else None
            if response is not None and not response.partial:
                return list(response.holders)
            if response is not None and longest(response.holders) > longest(holders):
                holders = list(response.holders)
        return holders


def longest(holders: Sequence[cache_service_pb2.Holder]) -> int:
    """Chunks that the best of them holds."""
    return holders[0].matched_chunk_count if holders else 0
