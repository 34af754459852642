"""The node's registration at one coordinator, and the delays between its attempts. Used by `CoordinatorSession`.

`FleetContext` has what every session has in common.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from lmkv.errors import LmkvError, VersionMismatch
from lmkv.internal import OWN_BUILD, PROTOCOL_VERSION, Build, check_builds
from lmkv.rpc.coordinator_client import CoordinatorConnection
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.fleet.reports import HeldChunk

logger = logging.getLogger(__name__)


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
    """Connects a session with the sessions at the other coordinators.

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


REGISTER_TIMEOUT_SECONDS = 1.0
MIN_LEASE_SECONDS = 0.05
"""Lower bound for the lease that a coordinator grants; three heartbeats are sent per lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLease:
    """A successful registration."""

    instance: pb.Instance
    """The node as it registered."""
    lease_ttl: float
    layout_map_id: str = ""
    """The layout map that the coordinator shares with others; empty if it keeps its own."""

    @property
    def chunk_sizes(self) -> dict[bytes, int]:
        """Tokens of a full chunk, by fingerprint."""
        return {spec.fingerprint: spec.chunk_size for spec in self.instance.specs}


class Registrar:
    """Registers the node at one coordinator. Calls `on_conflicts` whenever `conflicts` has changed."""

    def __init__(
        self, context: FleetContext, connection: CoordinatorConnection, on_conflicts: Callable[[], None]
    ) -> None:
        self.lease: InstanceLease | None = None
        """The last successful registration."""
        self.conflicts: list[pb.SpecConflict] = []
        """Instances of the same models whose KvSpec is incompatible, as of that registration."""
        self._context = context
        self._connection = connection
        self._on_conflicts = on_conflicts

    async def register(self, *, wait_for_ready: bool) -> InstanceLease:
        """Registers the node as it is now. Raises the coordinator's error, `VersionMismatch`, or `Unreachable`."""
        instance = self._context.node.describe()
        request = pb.RegisterRequest(instance=instance, secret=self._context.secret, protocol_version=PROTOCOL_VERSION)
        response = await self._connection.call(
            self._connection.registry.Register,
            request,
            timeout_seconds=REGISTER_TIMEOUT_SECONDS,
            wait_for_ready=wait_for_ready,
        )
        await self._check_build(response, instance)
        self._update_conflicts(list(response.instance.conflicts))
        lease_ttl = max(response.lease_ttl.ToNanoseconds() / 1e9, MIN_LEASE_SECONDS)
        self.lease = InstanceLease(instance=instance, lease_ttl=lease_ttl, layout_map_id=response.layout_map_id)
        return self.lease

    async def deregister(self, instance: pb.Instance, timeout_seconds: float) -> None:
        """Deregisters what `register` has registered. If that fails, the lease will expire."""
        request = pb.DeregisterRequest(
            instance_id=instance.instance_id, epoch=instance.epoch, secret=self._context.secret
        )
        with suppress(LmkvError):
            await self._connection.call(self._connection.registry.Deregister, request, timeout_seconds=timeout_seconds)

    async def _check_build(self, response: pb.RegisterResponse, instance: pb.Instance) -> None:
        """Leaves a coordinator that speaks another protocol, and has accepted the node because it is older."""
        theirs = Build(version=response.version, protocol_version=response.protocol_version)
        try:
            check_builds(node=OWN_BUILD, coordinator=theirs)
        except VersionMismatch:
            await self.deregister(instance, REGISTER_TIMEOUT_SECONDS)
            raise

    def _update_conflicts(self, conflicts: list[pb.SpecConflict]) -> None:
        known, self.conflicts = self.conflicts, conflicts
        for conflict in conflicts:
            if conflict not in known:
                logger.warning(
                    "shares nothing of model %s with instance %s: %s %s here, %s there",
                    conflict.model_name,
                    conflict.instance_id,
                    conflict.field,
                    conflict.own_value,
                    conflict.other_value,
                )
        if conflicts != known:
            self._on_conflicts()


MIN_DELAY_SECONDS = 0.05
MAX_DELAY_SECONDS = 0.5
"""If the coordinator does not accept connections; an attempt may take `REGISTER_TIMEOUT_SECONDS` besides."""
MAX_BUSY_DELAY_SECONDS = 3.0
"""If it accepts connections and does not answer in time: perhaps thousands of nodes are registering."""
MAX_REQUESTED_DELAY_SECONDS = 30.0
"""Upper bound for the delay that a coordinator without room asks for."""
REFUSED_DELAY_SECONDS = 5.0
"""While another node has the instance id. If the coordinator speaks another protocol: at first, then twice as long."""


class RegisterBackoff:
    """Exponential backoff with jitter, so that nodes that lost a coordinator together do not return together."""

    def __init__(self) -> None:
        self._delay_seconds = MIN_DELAY_SECONDS
        self._least_seconds = 0.0

    def request(self, seconds: float) -> None:
        """Sets a lower bound for the next delay only."""
        self._least_seconds = min(seconds, MAX_REQUESTED_DELAY_SECONDS)

    def next_delay(self, max_seconds: float, *, was_stable: bool) -> float:
        """Seconds to wait: twice as many as last time up to `max_seconds`, or few if the last session `was_stable`."""
        least_seconds, self._least_seconds = self._least_seconds, 0.0
        self._delay_seconds = MIN_DELAY_SECONDS if was_stable else min(2 * self._delay_seconds, max_seconds)
        return max(self._delay_seconds * random.uniform(0.5, 1.0), least_seconds)  # noqa: S311 # jitter
