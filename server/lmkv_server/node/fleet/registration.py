"""The node's registration at one coordinator: made, made anew, and what came of it. Used by `Member`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from lmkv import rpc
from lmkv.v1 import registry_service_pb2 as pb

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_SECONDS = 1.0
MIN_LEASE_SECONDS = 0.05
"""Whatever the coordinator says, heartbeats come no faster than three in this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """What a successful registration settled."""

    instance: pb.Instance
    """The node as it registered."""
    lease_ttl: float
    layout_map_id: str = ""
    """Which layout map the coordinator shares with others; empty if it keeps its own."""

    @property
    def chunk_sizes(self) -> dict[bytes, int]:
        """Tokens of a full chunk, by fingerprint."""
        return {spec.fingerprint: spec.chunk_size for spec in self.instance.specs}


class Registration:
    """`describe` gives the node as it is now, `secret` proves that it is the same one as before.

    `on_conflicts` is called whenever `conflicts` has changed.
    """

    def __init__(
        self, *, describe: Callable[[], pb.Instance], on_conflicts: Callable[[], None], secret: bytes = b""
    ) -> None:
        self.membership: Membership | None = None
        """What the last successful attempt settled."""
        self.conflicts: list[pb.SpecConflict] = []
        """Instances of the same models that share nothing with this one, and why, as of then."""
        self._describe = describe
        self._on_conflicts = on_conflicts
        self._secret = secret

    async def make(self, registry: Any, *, wait_for_ready: bool) -> Membership:
        """Registers the node as it is now. Raises what the coordinator answers, or `Unreachable`."""
        said = self._describe()
        request = pb.RegisterRequest(instance=said, secret=self._secret)
        try:
            response = await registry.Register(request, timeout=REGISTER_TIMEOUT_SECONDS, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        self._note_conflicts(list(response.instance.conflicts))
        lease_ttl = max(response.lease_ttl.ToNanoseconds() / 1e9, MIN_LEASE_SECONDS)
        self.membership = Membership(instance=said, lease_ttl=lease_ttl, layout_map_id=response.layout_map_id)
        return self.membership

    def _note_conflicts(self, conflicts: list[pb.SpecConflict]) -> None:
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
