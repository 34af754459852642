"""The node's session at one coordinator: keeps it registered, reports what it holds, looks up chunks.

    register ──► report until the stream ends ──► wait ──► register again ...
                   └── its role has changed ──► at once ──┘

Whatever fails at the coordinator, the node continues to serve its engines; it then finds nothing on other nodes, and
they find nothing on it. The same is true while another node has its instance id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Self, Unpack

import grpc

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import (
    ConfigError,
    Full,
    InstanceIdInUse,
    InstanceNotFound,
    LmkvError,
    ResyncRequired,
    StaleEpoch,
    Unreachable,
    VersionMismatch,
)
from lmkv.internal.v1 import lookup_service_pb2
from lmkv.internal.v1.lookup_service_pb2_grpc import LookupServiceStub
from lmkv.internal.v1.report_service_pb2_grpc import ReportServiceStub
from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.coordinator_client import CoordinatorConnection
from lmkv.rpc.lookup_call import Lookups
from lmkv.runtime.patience import Silence
from lmkv.telemetry.spans import current_ids
from lmkv.v1 import cache_service_pb2
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.fetch.tier import LookupFields
from lmkv_server.node.fleet.registration import (
    MAX_BUSY_DELAY_SECONDS,
    MAX_DELAY_SECONDS,
    MAX_REQUESTED_DELAY_SECONDS,
    REFUSED_DELAY_SECONDS,
    REGISTER_TIMEOUT_SECONDS,
    FleetContext,
    InstanceLease,
    RegisterBackoff,
    Registrar,
    SessionHooks,
)
from lmkv_server.node.fleet.report_stream import ReportStream
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.fleet.shard import SessionState, StreamRole

logger = logging.getLogger(__name__)

MAX_LOOKUP_KEYS = 32_768
"""Longer prompts are looked up by their head: 512 KiB of keys, half a message."""

IDLE_SECONDS = 30.0
"""A call without lookups ends after this time."""
LATE_SHARE = 0.9
"""Share of its time after which a failed lookup counts as late; a lookup that fails sooner cannot be answered."""
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
        self._on_stream = Lookups[lookup_service_pb2.LookupRequest, lookup_service_pb2.LookupResponse](
            self._stub, lookup_service_pb2.LookupStreamRequest, connection.address, idle_seconds=idle_seconds
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
    ) -> lookup_service_pb2.LookupResponse | None:
        """Instances but this one that hold the chunks, as `LookupRequest` says; None if there is no answer.

        `fields` are further ones of the request.
        """
        request = lookup_service_pb2.LookupRequest(
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

    async def _send(
        self, request: lookup_service_pb2.LookupRequest, deadline_seconds: float
    ) -> lookup_service_pb2.LookupResponse:
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
                pb.LocateInstanceRequest(instance_id=instance_id),
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


DEREGISTER_TIMEOUT_SECONDS = 0.5
MIN_ROLE_SECONDS = 1.0
"""Between two changes of a session's role: each costs a registration, and perhaps a snapshot."""


class CoordinatorSession:
    """Registers on entry, deregisters on exit. All methods belong to the event loop it was entered on."""

    def __init__(
        self,
        coordinator_address: str,
        context: FleetContext,
        hooks: SessionHooks,
        *,
        credentials: Credentials = rpc.PLAINTEXT,
    ) -> None:
        self.coordinator_address = coordinator_address
        self.is_refused = False
        """Whether another node has this one's instance id at the coordinator."""
        self._context = context
        self._hooks = hooks
        self._connection = CoordinatorConnection(coordinator_address, REGISTER_TIMEOUT_SECONDS, credentials)
        self._reports: Any = ReportServiceStub(self._connection.channel)
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._registrar = Registrar(context, self._connection, hooks.conflicts_changed)
        self._lookups = CoordinatorLookup(self._connection)
        self._map_id: str | None = None
        self._role: StreamRole | None = None
        self._role_time = float("-inf")
        self._stream: ReportStream | None = None
        self._registration_is_outdated = False
        self._refused_since: float | None = None
        self._backoff = RegisterBackoff()
        self._mismatch_seconds = REFUSED_DELAY_SECONDS
        """Next delay if the coordinator speaks another protocol: an older one logs each time that the node left."""
        self._logged = ""
        self._settled = asyncio.Event()
        self._start_error: ConfigError | None = None

    # --- Life ----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=f"lmkv-session-{self.coordinator_address}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Deregisters, in at most half a second. Idempotent."""
        task, self._task = self._task, None
        self._is_closing = True
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._settled.set()
        await self._lookups.aclose()
        if task is not None and self._registrar.lease is not None and not self.is_refused:
            await self._registrar.deregister(self._registrar.lease.instance, DEREGISTER_TIMEOUT_SECONDS)
        await self._connection.aclose()

    async def started(self) -> None:
        """Returns once the first attempt to register has ended; if it failed, it is repeated.

        Raises `ConfigError` if another living node has this instance id.
        """
        await self.settled()
        if self._start_error is not None:
            raise self._start_error

    async def settled(self) -> None:
        """Returns once the first attempt to register has succeeded or failed."""
        await self._settled.wait()

    # --- Reports -------------------------------------------------------------------------------------------------

    def admitted(self, chunk: HeldChunk) -> None:
        """Reports a chunk that the node now holds. Call it in the step that makes `snapshot` yield it."""
        if self._stream is not None:
            self._stream.admitted(chunk)

    def evicted(self, tier: str, fingerprint: bytes, key: ChunkKey) -> None:
        """Reports a chunk that the node no longer holds. Call it in the step that makes `snapshot` omit it."""
        if self._stream is not None:
            self._stream.evicted(tier, fingerprint, key)

    def report_wrong(self, keys: Sequence[ChunkKey]) -> bool:
        """Reports wrong chunks, which all instances are to drop; False if the coordinator is not connected."""
        if self._stream is not None:
            self._stream.report_wrong(keys)
        return self._stream is not None

    @property
    def state(self) -> SessionState:
        """The part of the session that the roles of streams depend on."""
        is_synced = self._stream is not None and self._stream.is_synced
        return SessionState(map_id=self._map_id, role=self._role, is_synced=is_synced)

    def change_role(self, now: float) -> float | None:
        """Has a new stream replace the open one, in the role that is then right.

        Returns when to call it again if the last change was less than `MIN_ROLE_SECONDS` ago.
        """
        due = self._role_time + MIN_ROLE_SECONDS
        if self._stream is None or self._role is None:
            return None
        if now < due:
            return due
        self._role_time = now
        self._stream.end()
        return None

    def refresh(self) -> None:
        """Registers again, because specs or engines have changed. Call it before chunks of a new spec are stored."""
        self._registration_is_outdated = True
        if self._stream is not None:
            self._stream.refresh()

    # --- Lookups -------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the coordinator answers, according to the last attempts."""
        return self._stream is not None and not self._lookups.silence

    def answers_within(self, seconds: float) -> bool:
        """Whether the coordinator may answer within this time: not if it has been silent for as long."""
        return self._stream is not None and not self._lookups.silence.outlasts(seconds, time.monotonic())

    @property
    def lookup_failures(self) -> int:
        """Lookups that the coordinator refused or did not answer in time."""
        return self._lookups.failure_count

    @property
    def conflicts(self) -> list[pb.SpecConflict]:
        """Instances of the same models whose KvSpec is incompatible, as of the last registration."""
        return self._registrar.conflicts

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float, **fields: Unpack[LookupFields]
    ) -> lookup_service_pb2.LookupResponse | None:
        """The other instances that hold the chunks, as `FleetMembership.lookup`; None if there is no answer.

        After a lookup without an answer in time, none is sent that has less time than the coordinator has been silent,
        until it answers one or a heartbeat.
        """
        lease = self._registrar.lease
        if not self.answers_within(deadline_seconds) or lease is None:
            return None
        instance_id = lease.instance.instance_id
        response = await self._lookups.lookup(instance_id, keys, deadline_seconds, **fields)
        if self._lookups.silence and self._stream is not None:
            self._stream.probe()
        return response

    async def locate(self, instance_id: str, deadline_seconds: float) -> cache_service_pb2.Holder | None:
        """The node of an instance; None if it is not registered. Raises `Unreachable` if there is no answer."""
        return await self._lookups.locate(instance_id, deadline_seconds)

    # --- Registering, again and again ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            began = time.monotonic()
            max_delay_seconds = await self._run_once()
            if self._is_closing:  # a task group that fails just when it is cancelled swallows the cancellation
                return
            if not max_delay_seconds:
                continue
            lease = self._registrar.lease
            was_stable = lease is not None and time.monotonic() - began > lease.lease_ttl
            await asyncio.sleep(self._backoff.next_delay(max_delay_seconds, was_stable=was_stable))

    async def _run_once(self) -> float:
        """Registers and reports until the stream ends. Returns the longest delay before the next attempt."""
        can_look_up = False
        try:
            lease = await self.register()
            self._stream = ReportStream(lease, self, self._context)
            if self._registration_is_outdated:  # by a change during the registration
                self._stream.refresh()
            self._lookups.silence.end()
            self._logged = ""
            self.is_refused, self._refused_since, self._mismatch_seconds = False, None, REFUSED_DELAY_SECONDS
            logger.info("instance %s joined the fleet at %s", lease.instance.instance_id, self.coordinator_address)
            self._settled.set()
            await self._report(self._stream, lease)
            can_look_up = True
            return 0.0
        except (InstanceIdInUse, StaleEpoch) as error:
            self._refused(error)
            return self._max_delay_seconds()
        except (ResyncRequired, InstanceNotFound) as error:
            can_look_up = True
            self._log_failure(error)
            return MAX_DELAY_SECONDS
        except Full as error:
            can_look_up, self._map_id = True, None
            self._backoff.request(error.retry_seconds)
            self._log_failure(error)
        except VersionMismatch as error:
            self._map_id = None
            self._backoff.request(self._mismatch_seconds)
            self._mismatch_seconds = min(2 * self._mismatch_seconds, MAX_REQUESTED_DELAY_SECONDS)
            self._log_failure(error)
        except LmkvError as error:
            self._log_failure(error)
        except Exception:
            logger.exception("reporting to the coordinator at %s failed unexpectedly", self.coordinator_address)
        finally:
            self._role = None
            if not can_look_up:  # else the coordinator answers, although there is no stream for the moment
                self._stream, self._map_id = None, None
            self._hooks.state_changed()
        self._settled.set()
        return self._max_delay_seconds()

    def _max_delay_seconds(self) -> float:
        accepts = self._connection.channel.get_state() is grpc.ChannelConnectivity.READY
        return MAX_BUSY_DELAY_SECONDS if accepts else MAX_DELAY_SECONDS

    async def _report(self, stream: ReportStream, lease: InstanceLease) -> None:
        """Reports until the role changes. Raises what ends it otherwise."""
        if lease.layout_map_id:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(REGISTER_TIMEOUT_SECONDS, lease.lease_ttl / 3)):
                    await self._hooks.settled()
        reports_chunks = self._hooks.reports_chunks(self.coordinator_address)
        self._role = StreamRole(map_id=lease.layout_map_id, reports_chunks=reports_chunks)
        await stream.run(self._reports.Report(), reports_chunks=reports_chunks)

    async def register(self) -> InstanceLease:
        """Registers the node as it is now. Raises the coordinator's error, or `Unreachable`."""
        self._registration_is_outdated = False
        # The first attempt is to fail soon if there is no coordinator: the start of the node waits for it.
        lease = await self._registrar.register(wait_for_ready=self._settled.is_set())
        self._map_id = lease.layout_map_id
        self._hooks.state_changed()
        return lease

    def response_received(self) -> None:
        """The coordinator has sent a message on the stream."""
        self._lookups.silence.end()

    def synced(self) -> None:
        """The coordinator has acknowledged the stream's snapshot."""
        self._hooks.state_changed()

    def _refused(self, error: InstanceIdInUse | StaleEpoch) -> None:
        """Another node has the instance id: at the start perhaps a dead one whose lease has not expired yet.

        A node that has started keeps its chunks and continues to serve its engines, and waits for its id. Its epoch
        may be the newer one: then the clock was set back since.
        """
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if self._settled.is_set():
            self._backoff.request(REFUSED_DELAY_SECONDS)
            if not self.is_refused:
                logger.error(
                    "lost its registration at %s, continues to serve its engines, registers again every %g s: %s",
                    self.coordinator_address,
                    REFUSED_DELAY_SECONDS,
                    error,
                )
        else:
            self._log_failure(error)
            if now - self._refused_since > float(error.metadata.get("lease_ttl", 3.0)):
                self._start_error = ConfigError(str(error), key="instance_id")
                self._settled.set()
        self.is_refused = True

    def _log_failure(self, error: LmkvError) -> None:
        text = f"not in the fleet at {self.coordinator_address}, trying again: {error}"
        if text != self._logged:  # once, not with every attempt
            logger.warning(text)
            self._logged = text
