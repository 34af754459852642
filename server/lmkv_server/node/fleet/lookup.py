"""Lookups at one coordinator: which instances hold a prompt, and where an instance is. Used by `CoordinatorSession`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Unpack

from lmkv.errors import InstanceNotFound, LmkvError, Unreachable
from lmkv.internal.v1 import lookup_service_pb2 as pb
from lmkv.internal.v1.lookup_service_pb2_grpc import LookupServiceStub
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.coordinator_client import CoordinatorConnection
from lmkv.rpc.lookup_call import Lookups
from lmkv.runtime.patience import Silence
from lmkv.telemetry.spans import current_ids
from lmkv.v1 import cache_service_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb
from lmkv_server.node.fetch.tier import LookupFields

logger = logging.getLogger(__name__)

MAX_LOOKUP_KEYS = 32_768
"""Longer prompts are looked up by their head: 512 KiB of keys, half a message."""

IDLE_SECONDS = 30.0
"""A call without lookups ends after this time."""
LATE_SHARE = 0.9
"""Share of its time after which a lookup that fails had no answer in time; one that fails sooner cannot be answered."""
UNARY_SECONDS = 10.0
"""After a failure on the stream each lookup is a call of its own for this time: a coordinator delays refusals. On a
stream, that also delays the lookups behind them; and only a call has a deadline that the coordinator knows."""


class CoordinatorLookup:
    """Sends lookups to one coordinator. Its session sends none that its `silence` outlasts."""

    def __init__(
        self,
        connection: CoordinatorConnection,
        *,
        unary_seconds: float = UNARY_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.silence = Silence()
        """Begins with a lookup that had no answer in time; ends with the coordinator's next answer to any message."""
        self._failure_count = 0
        self._connection = connection
        self._stub = LookupServiceStub(connection.channel)
        self._on_stream = Lookups[pb.LookupRequest, pb.LookupResponse](
            self._stub, pb.LookupStreamRequest, connection.address, idle_seconds=idle_seconds
        )
        self._unary_seconds = unary_seconds
        self._unary_until = 0.0

    @property
    def failure_count(self) -> int:
        """Lookups that the coordinator refused or did not answer in time."""
        return self._failure_count

    async def lookup(
        self,
        instance_id: str,
        keys: Sequence[ChunkKey],
        deadline_seconds: float,
        **fields: Unpack[LookupFields],
    ) -> pb.LookupResponse | None:
        """Instances but this one that hold the chunks, as `LookupRequest` says; None if there is no answer.

        `fields` are further ones of the request.
        """
        request = pb.LookupRequest(
            chunk_keys=join_keys(keys[:MAX_LOOKUP_KEYS]), excluded_instance_id=instance_id, **fields
        )
        asked_at = time.monotonic()
        try:
            response = await self._send(request, deadline_seconds)
        except LmkvError as error:
            self._failure_count += 1
            if isinstance(error, Unreachable):
                if time.monotonic() - asked_at < LATE_SHARE * deadline_seconds:
                    self.silence.broken()
                self.silence.begin(asked_at)
            logger.debug("lookup failed: %s", error)
            return None
        self.silence.end()
        return response

    async def aclose(self) -> None:
        """Ends lookups that wait for an answer."""
        await self._on_stream.aclose()

    async def _send(self, request: pb.LookupRequest, deadline_seconds: float) -> pb.LookupResponse:
        """Raises the coordinator's error, or `Unreachable`. A lookup that is traced is a call of its own: only calls
        have spans."""
        if current_ids() is None and time.monotonic() >= self._unary_until:
            try:
                return await self._on_stream.lookup(request, deadline_seconds)
            except LmkvError:
                self._unary_until = time.monotonic() + self._unary_seconds
                raise
        return await self._connection.call(
            self._stub.Lookup,
            request,
            timeout_seconds=deadline_seconds,
            span_name="lmkv.internal.v1.LookupService/Lookup",
        )

    async def locate(self, instance_id: str, deadline_seconds: float) -> cache_service_pb2.Holder | None:
        """The node of an instance; None if it is not registered. Raises `Unreachable` if there is no answer."""
        try:
            found = await self._connection.call(
                self._connection.registry.LocateInstance,
                registry_pb.LocateInstanceRequest(instance_id=instance_id),
                timeout_seconds=deadline_seconds,
                span_name="lmkv.v1.RegistryService/LocateInstance",
            )
        except InstanceNotFound:
            return None
        except LmkvError as error:
            raise Unreachable(
                f"the coordinator at {self._connection.address} did not locate {instance_id}: {error}"
            ) from None
        return cache_service_pb2.Holder(instance_id=instance_id, epoch=found.epoch, peer_address=found.peer_address)
