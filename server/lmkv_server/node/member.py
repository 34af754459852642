"""The node as a member at one coordinator: keeps it registered, reports what it holds, asks who holds what.

    register ──► report until the stream breaks ──► pause ──► register anew ...

Whatever happens to the coordinator, the node goes on: it then finds nothing elsewhere and is found by nobody.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, cast

import grpc

from lmkv import rpc
from lmkv.credentials import Credentials
from lmkv.errors import ConfigError, Full, InstanceIdInUse, LmkvError, StaleEpoch, Unreachable
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc, chunk_pb2, registry_service_pb2_grpc
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.orders import Orders
from lmkv_server.node.report_stream import Membership, ReportStream
from lmkv_server.node.reports import Held

logger = logging.getLogger(__name__)

REGISTER_TIMEOUT_SECONDS = 1.0
DEREGISTER_TIMEOUT_SECONDS = 0.5
MIN_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 0.5
"""Between two attempts to join; an attempt may take `REGISTER_TIMEOUT_SECONDS` besides."""
MAX_BUSY_PAUSE_SECONDS = 3.0
"""The same, where the coordinator is there and does not answer in time: perhaps thousands want to join."""
MAX_REST_SECONDS = 30.0
"""The same, where the coordinator has no room and says when to come back."""
MIN_LEASE_SECONDS = 0.05
"""Whatever the coordinator says, heartbeats come no faster than three in this."""
MAX_LOOKUP_KEYS = 32_768
"""Longer prompts are looked up by their head: 512 KiB of keys, half a message."""


class Member:
    """Enter it to join, leave it to deregister; all methods are for the loop it is entered in. Used by `Fleet`.

    `instance` describes the node as it is now; `snapshot` yields everything it holds now and is read in one go, so
    that it may iterate over a living index. `orders` are told what the coordinator wants done. `on_conflicts` is told
    whenever the instances that share nothing with this one have changed, as seen at each registration: the intervals
    are how often it registers anew and how often, if anything changed, digests are compared.
    """

    def __init__(
        self,
        coordinator_address: str,
        *,
        instance: Callable[[], pb.Instance],
        snapshot: Callable[[], Iterable[Held]],
        orders: Orders,
        on_conflicts: Callable[[], None],
        digest_interval_seconds: float = 60.0,
        register_interval_seconds: float = 30.0,
        max_pending_changes: int = 200_000,
        credentials: Credentials = rpc.PLAINTEXT,
    ) -> None:
        self.coordinator_address = coordinator_address
        self._credentials = credentials
        self.conflicts: list[pb.SpecConflict] = []
        """Instances of the same models that share nothing with this one, and why, as of the last registration."""
        self.lookup_failures = 0
        """Lookups that the coordinator did not answer, or refused."""
        self._describe = instance
        self._snapshot = snapshot
        self._orders = orders
        self._on_conflicts = on_conflicts
        self._digest_interval_seconds = digest_interval_seconds
        self._register_interval_seconds = register_interval_seconds
        self._max_pending_changes = max_pending_changes
        self._channel: grpc.aio.Channel | None = None
        self._registry: Any = None
        self._cache: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._last_membership: Membership | None = None
        self._stream: ReportStream | None = None
        self._registration_is_old = False
        self._doubted = False
        self._refused_since: float | None = None
        self._rest_seconds = 0.0
        self._logged = ""
        self._settled = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: LmkvError | None = None

    # --- Life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._channel = rpc.open_channel(self.coordinator_address, self._credentials)
        self._registry = registry_service_pb2_grpc.RegistryServiceStub(self._channel)
        self._cache = cache_service_pb2_grpc.CacheServiceStub(self._channel)
        self._task = asyncio.create_task(self._stay(), name=f"lmkv-member-{self.coordinator_address}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leaves the fleet, in at most half a second. Repeating it is safe."""
        task, self._task = self._task, None
        self._is_closing = True
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._settled.set()
        channel, self._channel = self._channel, None
        if channel is not None:
            if self._last_membership is not None and self._error is None:
                said = self._last_membership.instance
                farewell = pb.DeregisterRequest(instance_id=said.instance_id, epoch=said.epoch)
                with suppress(grpc.RpcError):  # then the lease will run out
                    await self._registry.Deregister(farewell, timeout=DEREGISTER_TIMEOUT_SECONDS)
            await channel.close(None)

    async def started(self) -> None:
        """Returns once the node is registered, or nobody answered: it then joins when somebody does.

        Raises `ConfigError` if another living node has this instance id.
        """
        await self._settled.wait()
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Lasts until the fleet has no place for this node: raises `ConfigError` when another has its instance id."""
        await self._ended.wait()
        assert self._error is not None
        raise self._error

    # --- What this node holds ------------------------------------------------------------------------------------

    def admitted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey, token_count: int) -> None:
        """Notes that the node now holds a chunk. Call it in the step that makes `snapshot` yield it."""
        if self._stream is not None:
            self._stream.admitted(tier, fingerprint, key, token_count)

    def evicted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey) -> None:
        """Notes that the node no longer holds a chunk. Call it in the step that makes `snapshot` leave it out."""
        if self._stream is not None:
            self._stream.evicted(tier, fingerprint, key)

    def refresh(self) -> None:
        """Registers anew, because `instance` has other specs or engines. Call it before chunks of a new spec come."""
        self._registration_is_old = True
        if self._stream is not None:
            self._stream.refresh()

    # --- Who else holds what -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the coordinator answers, as far as is known."""
        return self._stream is not None and not self._doubted

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float
    ) -> cache_service_pb2.LookupResponse | None:
        """The other instances that hold the first key, longest contiguous run first; None if there is no answer.

        After a lookup that had no answer in time none is asked any more, until the coordinator gives a sign of life.
        """
        if not self.connected or self._last_membership is None:
            return None
        request = cache_service_pb2.LookupRequest(
            chunk_keys=join_keys(keys[:MAX_LOOKUP_KEYS]),
            excluded_instance_id=self._last_membership.instance.instance_id,
        )
        method = "lmkv.v1.CacheService/Lookup"
        try:
            return cast(
                cache_service_pb2.LookupResponse,
                await rpc.call(self._cache.Lookup, method, self.coordinator_address, request, deadline_seconds),
            )
        except LmkvError as error:
            self._lookup_failed(error)
            return None

    def _lookup_failed(self, error: LmkvError) -> None:
        self.lookup_failures += 1
        logger.debug("a lookup failed: %s", error)
        if isinstance(error, Unreachable):
            self._doubted = True
            if self._stream is not None:
                self._stream.probe()

    # --- Joining, and joining again ------------------------------------------------------------------------------

    async def _stay(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            await self._join_once()
            if self._is_closing:  # a task group that fails just when it is cancelled swallows the cancellation
                return
            if self._error is not None:
                break
            lease_ttl = self._last_membership.lease_ttl if self._last_membership else 0.0
            was_stable = lease_ttl and time.monotonic() - began > lease_ttl
            pause = MIN_PAUSE_SECONDS if was_stable else min(2 * pause, self._max_pause_seconds())
            await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), self._rest_seconds))  # noqa: S311 # spreads them
            self._rest_seconds = 0.0
        self._settled.set()
        self._ended.set()

    def _max_pause_seconds(self) -> float:
        assert self._channel is not None
        is_there = self._channel.get_state() is grpc.ChannelConnectivity.READY
        return MAX_BUSY_PAUSE_SECONDS if is_there else MAX_PAUSE_SECONDS

    async def _join_once(self) -> None:
        """Registers and reports until that ends, and draws the consequences."""
        try:
            membership = await self._register()
            self._stream = self._open_stream(membership)
            if self._registration_is_old:  # something changed while the registration was on its way
                self._stream.refresh()
            self._doubted, self._logged, self._refused_since = False, "", None
            logger.info("instance %s joined the fleet at %s", membership.instance.instance_id, self.coordinator_address)
            self._settled.set()
            await self._stream.run(self._registry.Report())
        except (InstanceIdInUse, StaleEpoch) as error:
            self._refused(error)
        except LmkvError as error:
            if isinstance(error, Full):
                self._rest_seconds = min(error.retry_seconds, MAX_REST_SECONDS)
            self._log_loss(error)
            self._settled.set()
        except Exception:
            logger.exception("reporting to the coordinator at %s failed unexpectedly", self.coordinator_address)
            self._settled.set()
        finally:
            self._stream = None

    async def _register(self) -> Membership:
        """Registers the node as it is now. Raises what the coordinator answers, or `Unreachable`."""
        self._registration_is_old = False
        said = self._describe()
        try:
            response = await self._registry.Register(
                pb.RegisterRequest(instance=said),
                timeout=REGISTER_TIMEOUT_SECONDS,
                wait_for_ready=self._settled.is_set(),  # the first attempt shall tell soon that nobody is there
            )
        except grpc.RpcError as error:
            raise rpc.from_rpc_error(error) from None
        self._note_conflicts(list(response.instance.conflicts))
        lease_ttl = max(response.lease_ttl.ToNanoseconds() / 1e9, MIN_LEASE_SECONDS)
        self._last_membership = Membership(instance=said, lease_ttl=lease_ttl)
        return self._last_membership

    def _open_stream(self, membership: Membership) -> ReportStream:
        return ReportStream(
            membership,
            coordinator_address=self.coordinator_address,
            describe=self._describe,
            snapshot=self._snapshot,
            register=self._register,
            orders=self._orders,
            on_answer=self._answered,
            digest_interval_seconds=self._digest_interval_seconds,
            register_interval_seconds=self._register_interval_seconds,
            max_pending_changes=self._max_pending_changes,
        )

    def _answered(self) -> None:
        self._doubted = False

    def _refused(self, error: InstanceIdInUse | StaleEpoch) -> None:
        """Another node has the id: at the start perhaps a dead one whose lease has yet to end.

        Its epoch may be the newer one: then the clock was set back since.
        """
        self._log_loss(error)
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        lease_ttl = float(error.metadata.get("lease_ttl", 3.0))
        is_late = now - self._refused_since > lease_ttl
        if is_late if self._last_membership is None else isinstance(error, StaleEpoch):
            self._give_up(error)

    def _give_up(self, error: LmkvError) -> None:
        logger.error("out of the fleet for good: %s", error)
        self._error = ConfigError(str(error), key="instance_id")

    def _log_loss(self, error: LmkvError) -> None:
        text = f"not in the fleet at {self.coordinator_address}, trying again: {error}"
        if text != self._logged:  # once, not with every attempt
            logger.warning(text)
            self._logged = text

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
