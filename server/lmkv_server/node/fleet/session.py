"""The node as a member at one coordinator: keeps it registered, reports what it holds, asks who holds what.

    register ──► report until the stream breaks ──► pause ──► register anew ...
                   └── its role is another ──► at once ──┘

Whatever happens to the coordinator, the node keeps serving its engines: it then finds nothing elsewhere and no other
node finds it. The same is true while another node has its instance id.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

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
)
from lmkv.keys import ChunkKey
from lmkv.v1 import cache_service_pb2, cache_service_pb2_grpc, chunk_pb2, registry_service_pb2_grpc
from lmkv.v1 import registry_service_pb2 as pb
from lmkv_server.node.commands.orders import Orders
from lmkv_server.node.fleet.lookup import CoordinatorLookup
from lmkv_server.node.fleet.registration import REGISTER_TIMEOUT_SECONDS, Membership, Registration
from lmkv_server.node.fleet.report_stream import ReportStream
from lmkv_server.node.fleet.reports import Held
from lmkv_server.node.fleet.shard import Role

logger = logging.getLogger(__name__)

DEREGISTER_TIMEOUT_SECONDS = 0.5
MIN_PAUSE_SECONDS = 0.05
MAX_PAUSE_SECONDS = 0.5
"""Between two attempts to join; an attempt may take `REGISTER_TIMEOUT_SECONDS` besides."""
MAX_BUSY_PAUSE_SECONDS = 3.0
"""The same, where the coordinator is there and does not answer in time: perhaps thousands want to join."""
MAX_REST_SECONDS = 30.0
"""The same, where the coordinator has no room and says when to come back."""
REFUSED_REST_SECONDS = 5.0
"""The same, where another node has the instance id."""
MIN_ROLE_SECONDS = 1.0
"""Between two changes of a member's role: each costs a registration, and perhaps a snapshot."""


class CoordinatorSession:
    """Enter it to join, leave it to deregister; all methods are for the loop it is entered in. Used by `Fleet`.

    `instance` describes the node as it is now; `snapshot` yields everything it holds now and is read in one go, so
    that it may iterate over a living index. `orders` are told what the coordinator wants done. `on_conflicts` is told
    whenever the instances that share nothing with this one have changed, as seen at each registration: the intervals
    are how often it registers anew and how often, if anything changed, digests are compared.

    `tells_chunks` says whether this coordinator is told the chunks, asked when a stream begins. `on_standing` is called
    whenever that may have changed for anybody: `layout_map_id` or `has_told` is another. `others_answered` returns once
    each of the other coordinators has answered or failed to; waiting for it saves a first snapshot at one that is home
    only until the next has answered.
    """

    def __init__(
        self,
        coordinator_address: str,
        *,
        instance: Callable[[], pb.Instance],
        snapshot: Callable[[], Iterable[Held]],
        orders: Orders,
        on_conflicts: Callable[[], None],
        tells_chunks: Callable[[], bool],
        on_standing: Callable[[], None],
        others_answered: Callable[[], Awaitable[None]],
        digest_interval_seconds: float = 60.0,
        register_interval_seconds: float = 30.0,
        max_pending_changes: int = 200_000,
        credentials: Credentials = rpc.PLAINTEXT,
        secret: bytes = b"",
    ) -> None:
        self.coordinator_address = coordinator_address
        self._credentials = credentials
        self.layout_map_id: str | None = None
        """Which layout map the coordinator shares with others, empty if it keeps its own; None while nothing can be
        told to it."""
        self.role: Role | None = None
        """What the stream under way is for; None if there is none."""
        self.is_refused = False
        """Whether another node has this one's instance id at the coordinator."""
        self._describe = instance
        self._snapshot = snapshot
        self._orders = orders
        self._tells_chunks = tells_chunks
        self._on_standing = on_standing
        self._others_answered = others_answered
        self._role_time = float("-inf")
        self._digest_interval_seconds = digest_interval_seconds
        self._register_interval_seconds = register_interval_seconds
        self._max_pending_changes = max_pending_changes
        self._channel: grpc.aio.Channel | None = None
        self._registry: Any = None
        self._cache: Any = None
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._secret = secret
        self._registration = Registration(describe=instance, on_conflicts=on_conflicts, secret=secret)
        self._asking = CoordinatorLookup(coordinator_address)
        self._stream: ReportStream | None = None
        self._registration_is_old = False
        self._refused_since: float | None = None
        self._rest_seconds = 0.0
        self._logged = ""
        self._settled = asyncio.Event()
        self._start_error: ConfigError | None = None

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
            if self._registration.membership is not None and not self.is_refused:
                said = self._registration.membership.instance
                farewell = pb.DeregisterRequest(instance_id=said.instance_id, epoch=said.epoch, secret=self._secret)
                with suppress(grpc.RpcError):  # then the lease will run out
                    await self._registry.Deregister(farewell, timeout=DEREGISTER_TIMEOUT_SECONDS)
            await channel.close(None)

    async def started(self) -> None:
        """Returns once the node is registered, or nobody answered: it then joins when somebody does.

        Raises `ConfigError` if another living node has this instance id.
        """
        await self.settled()
        if self._start_error is not None:
            raise self._start_error

    async def settled(self) -> None:
        """Returns once the first attempt to join has succeeded or failed."""
        await self._settled.wait()

    # --- What this node holds ------------------------------------------------------------------------------------

    def admitted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey, token_count: int) -> None:
        """Notes that the node now holds a chunk. Call it in the step that makes `snapshot` yield it."""
        if self._stream is not None:
            self._stream.admitted(tier, fingerprint, key, token_count)

    def evicted(self, tier: chunk_pb2.Tier.ValueType, fingerprint: bytes, key: ChunkKey) -> None:
        """Notes that the node no longer holds a chunk. Call it in the step that makes `snapshot` leave it out."""
        if self._stream is not None:
            self._stream.evicted(tier, fingerprint, key)

    @property
    def has_told(self) -> bool:
        """Whether the coordinator has all chunks, and is told what changes."""
        return self._stream is not None and self._stream.has_told

    def change_role(self, now: float) -> float | None:
        """Begins a new stream soon, in the role that is then right; or says when it may, if the last was just now."""
        due = self._role_time + MIN_ROLE_SECONDS
        if self._stream is None or self.role is None:
            return None
        if now < due:
            return due
        self._role_time = now
        self._stream.end()
        return None

    def refresh(self) -> None:
        """Registers anew, because `instance` has other specs or engines. Call it before chunks of a new spec come."""
        self._registration_is_old = True
        if self._stream is not None:
            self._stream.refresh()

    # --- Who else holds what -------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the coordinator answers, as far as is known."""
        return self._stream is not None and not self._asking.doubted

    @property
    def lookup_failures(self) -> int:
        """Lookups that the coordinator did not answer, or refused."""
        return self._asking.failure_count

    @property
    def conflicts(self) -> list[pb.SpecConflict]:
        """Instances of the same models that share nothing with this one, and why, as of the last registration."""
        return self._registration.conflicts

    async def lookup(
        self, keys: Sequence[ChunkKey], deadline_seconds: float
    ) -> cache_service_pb2.LookupResponse | None:
        """The other instances that hold the first key, longest contiguous run first; None if there is no answer.

        After a lookup that had no answer in time none is asked any more, until the coordinator gives a sign of life.
        """
        membership = self._registration.membership
        if not self.connected or membership is None:
            return None
        response = await self._asking.lookup(self._cache, membership.instance.instance_id, keys, deadline_seconds)
        if self._asking.doubted and self._stream is not None:
            self._stream.probe()
        return response

    async def locate(self, instance_id: str, deadline_seconds: float) -> cache_service_pb2.Holder | None:
        """The node of an instance; None if it is not registered. Raises `Unreachable` if there is no answer."""
        return await self._asking.locate(self._registry, instance_id, deadline_seconds)

    # --- Joining, and joining again ------------------------------------------------------------------------------

    async def _stay(self) -> None:
        pause = MIN_PAUSE_SECONDS
        while True:
            began = time.monotonic()
            longest_pause = await self._join_once()
            if self._is_closing:  # a task group that fails just when it is cancelled swallows the cancellation
                return
            if not longest_pause:
                continue
            lease_ttl = self._registration.membership.lease_ttl if self._registration.membership else 0.0
            was_stable = lease_ttl and time.monotonic() - began > lease_ttl
            pause = MIN_PAUSE_SECONDS if was_stable else min(2 * pause, longest_pause)
            await asyncio.sleep(max(pause * random.uniform(0.5, 1.0), self._rest_seconds))  # noqa: S311 # spreads them
            self._rest_seconds = 0.0

    async def _join_once(self) -> float:
        """Registers and reports until that ends, and draws the consequences. The longest pause before the next time."""
        is_there = False
        try:
            membership = await self._register()
            self._stream = self._open_stream(membership)
            if self._registration_is_old:  # something changed while the registration was on its way
                self._stream.refresh()
            self._asking.doubted, self._logged = False, ""
            self.is_refused, self._refused_since = False, None
            logger.info("instance %s joined the fleet at %s", membership.instance.instance_id, self.coordinator_address)
            self._settled.set()
            await self._report(self._stream, membership)
            is_there = True
            return 0.0
        except (InstanceIdInUse, StaleEpoch) as error:
            self._refused(error)
            return self._max_pause_seconds()
        except (ResyncRequired, InstanceNotFound) as error:
            is_there = True
            self._log_loss(error)
            return MAX_PAUSE_SECONDS
        except Full as error:
            is_there, self.layout_map_id = True, None
            self._rest_seconds = min(error.retry_seconds, MAX_REST_SECONDS)
            self._log_loss(error)
        except LmkvError as error:
            self._log_loss(error)
        except Exception:
            logger.exception("reporting to the coordinator at %s failed unexpectedly", self.coordinator_address)
        finally:
            self.role = None
            if not is_there:  # one that is can be asked, although it is told nothing for the moment
                self._stream, self.layout_map_id = None, None
            self._on_standing()
        self._settled.set()
        return self._max_pause_seconds()

    def _max_pause_seconds(self) -> float:
        assert self._channel is not None
        is_there = self._channel.get_state() is grpc.ChannelConnectivity.READY
        return MAX_BUSY_PAUSE_SECONDS if is_there else MAX_PAUSE_SECONDS

    async def _report(self, stream: ReportStream, membership: Membership) -> None:
        """Reports until the role is another. Raises what ends it otherwise."""
        if membership.layout_map_id:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(REGISTER_TIMEOUT_SECONDS, membership.lease_ttl / 3)):
                    await self._others_answered()
        self.role = Role(map_id=membership.layout_map_id, tells_chunks=self._tells_chunks())
        await stream.run(self._registry.Report(), tells_chunks=self.role.tells_chunks)

    async def _register(self) -> Membership:
        """Registers the node as it is now. Raises what the coordinator answers, or `Unreachable`."""
        self._registration_is_old = False
        # The first attempt shall tell soon that nobody is there.
        membership = await self._registration.make(self._registry, wait_for_ready=self._settled.is_set())
        self.layout_map_id = membership.layout_map_id
        self._on_standing()
        return membership

    def _open_stream(self, membership: Membership) -> ReportStream:
        return ReportStream(
            membership,
            coordinator_address=self.coordinator_address,
            describe=self._describe,
            snapshot=self._snapshot,
            register=self._register,
            orders=self._orders,
            on_answer=self._answered,
            on_told=self._on_standing,
            digest_interval_seconds=self._digest_interval_seconds,
            register_interval_seconds=self._register_interval_seconds,
            max_pending_changes=self._max_pending_changes,
            secret=self._secret,
        )

    def _answered(self) -> None:
        self._asking.doubted = False

    def _refused(self, error: InstanceIdInUse | StaleEpoch) -> None:
        """Another node has the id: at the start perhaps a dead one whose lease has yet to end.

        A node that has started keeps what it holds and keeps serving its engines; it only waits for its id. Its epoch
        may be the newer one: then the clock was set back since.
        """
        now = time.monotonic()
        self._refused_since = self._refused_since or now
        if self._settled.is_set():
            self._rest_seconds = REFUSED_REST_SECONDS
            if not self.is_refused:
                logger.error(
                    "lost its place in the fleet at %s, keeps serving its engines and tries again every %g s: %s",
                    self.coordinator_address,
                    REFUSED_REST_SECONDS,
                    error,
                )
        else:
            self._log_loss(error)
            if now - self._refused_since > float(error.metadata.get("lease_ttl", 3.0)):
                self._start_error = ConfigError(str(error), key="instance_id")
                self._settled.set()
        self.is_refused = True

    def _log_loss(self, error: LmkvError) -> None:
        text = f"not in the fleet at {self.coordinator_address}, trying again: {error}"
        if text != self._logged:  # once, not with every attempt
            logger.warning(text)
            self._logged = text
