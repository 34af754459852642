"""What every coordinator session of a node has in common: the node, its orders, the intervals, the other sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.fleet.reports import HeldChunk


class FleetNode(Protocol):
    """The node as this package sees it. Its implementation, in the node, imports this package."""

    def describe(self) -> pb.Instance:
        """The node as it is now, for registrations and heartbeats."""

    def snapshot(self) -> Iterable[HeldChunk]:
        """Every chunk that the node holds now. Read without awaiting, so that it may iterate over a live index."""

    def conflicts_changed(self, conflicts: list[pb.SpecConflict]) -> None:
        """The instances of the same models whose KvSpec is incompatible have changed; `conflicts` are all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetContext:
    """Shared by `FleetMembership`, its sessions and their streams."""

    node: FleetNode
    orders: OrderRunner
    secret: bytes = b""
    """Proves to coordinators that this is the node that registered before."""
    register_interval_seconds: float = 30.0
    """Between two registrations at a coordinator, which also fetch `conflicts`."""
    digest_interval_seconds: float = 60.0
    """Between two comparisons of digests, if chunks have changed."""
    resolve_interval_seconds: float = 5.0
    """Between two resolutions of the coordinators' names."""
    max_pending_changes: int = 200_000
    """Unreported chunk changes beyond which a snapshot replaces them."""


class SessionHooks(Protocol):
    """What a session needs to know about, and reports to, the sessions at the other coordinators.

    `FleetMembership` implements it, which imports sessions: they know only this.
    """

    def reports_chunks(self, address: str) -> bool:
        """Whether a new stream to this coordinator is to carry chunks."""

    def state_changed(self) -> None:
        """The session's `state` has changed."""

    def conflicts_changed(self) -> None:
        """The session's `conflicts` have changed."""

    async def settled(self) -> None:
        """Returns once the first attempt to register at each coordinator has ended.

        A first snapshot waits for it: it would be wasted on a coordinator that is the primary only until another one
        answers.
        """
