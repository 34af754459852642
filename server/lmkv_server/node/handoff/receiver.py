"""The decode's side of handoffs: has read what prefills hand over, and hands it on to the requests that come for it.

`Allocate`, `Commit` and `Release` of `PeerService` end here, and so do lookups and loads that name a handoff.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from google.protobuf import duration_pb2

from lmkv.errors import BadMessage, GrantNotFound, KvSpecMismatch
from lmkv.keys import split_keys
from lmkv.runtime.deadline_timer import DeadlineTimer
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fetch.fetcher import Peers
from lmkv_server.node.handoff.device_buffers import DeviceBuffers
from lmkv_server.node.handoff.directory import Directory
from lmkv_server.node.handoff.intake import READ_SECONDS, Intake
from lmkv_server.node.handoff.state import Handoff, HandoffSource, State
from lmkv_server.node.handoff.table import HandoffTable
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.sessions.sessions import Engines
from lmkv_server.node.tiers.progress import Progress

logger = logging.getLogger(__name__)

MAX_KEYS = 4096
ANNOUNCE_SECONDS = 1.0
"""A request that comes before its handoff was announced waits for that so long."""


class Receiver:
    """The handoffs of one decode's node. One event loop owns it; to be used as an async context manager."""

    def __init__(
        self, handoffs: HandoffTable, peers: Peers, engines: Engines, directory: Directory, instance_id: str
    ) -> None:
        """`directory` finds the prefills' nodes; `instance_id` is the own one."""
        self.handoffs = handoffs
        self._instance_id = instance_id
        self._directory = directory
        self._peers = peers
        self._tier = peers.tier
        self._engines = engines
        self.buffers = DeviceBuffers(
            engines, handoffs.buffer_bytes, verify=peers.verifier.enabled, on_lost=self._lost_buffer
        )
        """What engines have lent for prompts that are handed to them."""
        self.intake = Intake(peers, self.buffers)
        """What reads."""
        self._announced: dict[str, asyncio.Event] = {}
        self._alarm = DeadlineTimer(self._expire)

    async def __aenter__(self) -> Receiver:
        await self._alarm.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends every handoff. Idempotent."""
        await self._alarm.aclose()
        self.handoffs.clear()

    # --- What prefills say ---------------------------------------------------------------------------------------

    async def allocate(self, request: pb.AllocateRequest, session_id: str) -> pb.AllocateResponse:
        """See the proto; epoch and session were checked. The registry has the address that the prefill is read from."""
        spec = self._engines.spec(request.fingerprint)
        if spec is None:
            raise KvSpecMismatch("no engine here shares chunks of this spec", fingerprint=request.fingerprint.hex())
        if request.instance_id == self._instance_id:
            raise BadMessage("instance_id is this node's own", field="instance_id")
        holder = await self._directory.find_epoch(request.instance_id, request.epoch)
        giver = HandoffSource(
            instance_id=holder.instance_id,
            epoch=holder.epoch,
            address=holder.peer_address,
            session_id=session_id,
        )
        connection = self._connection(giver)
        keys = split_keys(request.chunk_keys, limit=MAX_KEYS)
        now = time.monotonic()
        buffer = self.buffers.of(spec)
        room = buffer.tier if buffer and connection.nixl_metadata else None
        handoff = self.handoffs.allocate(request.request_id, giver, spec, keys, request.token_count, now, room)
        self._alarm.changed()
        if handoff.is_open:
            self._peers.connections.introduce(connection, spec, READ_SECONDS, by_nixl=buffer is not None)
        if announced := self._announced.get(handoff.request_id):
            announced.set()
        timeout = duration_pb2.Duration()
        timeout.FromNanoseconds(round(self.handoffs.silence_seconds * 1e9))
        return pb.AllocateResponse(grant_id=handoff.grant_id, missing=handoff.missing, timeout=timeout)

    async def commit(self, request: pb.CommitRequest, session_id: str) -> pb.CommitResponse:
        """See the proto; `session_id` is the caller's session, empty if it has none.

        Cancelled, it leaves no room reserved but of memory that a transfer may still write to.
        """
        handoff = self.handoffs.get(request.grant_id, session_id)
        if handoff.state in (State.ABORTED, State.EXPIRED):
            raise GrantNotFound(f"handoff {handoff.request_id!r} is {handoff.state.value}", state=handoff.state.value)
        if len(request.indices) != len(request.extents):
            raise BadMessage("indices and extents differ in number", field="extents")
        damaged: list[int] = []
        self.handoffs.heard(handoff, time.monotonic() + (2 * READ_SECONDS if request.indices else 0))
        try:
            if request.indices:
                connection = self._connection(handoff.giver)
                await connection.agree(handoff.spec, READ_SECONDS)
                damaged = await self.intake.bring(handoff, connection, request)
        finally:
            self.handoffs.heard(handoff, time.monotonic())
            self._alarm.changed()
        return pb.CommitResponse(damaged=damaged)

    def drop(self, request_id: str, session_id: str | None = None) -> None:
        """The handoff was refused, or no request will load it: a request that waits for it waits no longer.

        `session_id` is that of a prefill, which may end its own; None: this node's engine.
        """
        if not self.handoffs.withdraw(request_id, time.monotonic(), session_id):
            return
        if announced := self._announced.get(request_id):
            announced.set()
        self._alarm.changed()

    def release(self, grant_id: str, session_id: str) -> bool:
        """The prefill will send nothing more; whether the grant is that of a handoff of this session."""
        found = self.handoffs.end(grant_id, session_id, time.monotonic())
        self._alarm.changed()
        return found

    def _connection(self, giver: HandoffSource) -> PeerConnection:
        holder = Holder(instance_id=giver.instance_id, epoch=giver.epoch, peer_address=giver.address)
        connection = self._peers.connections.get(holder)
        if connection is None:
            raise BadMessage(
                f"{giver.instance_id!r} of epoch {giver.epoch} at {giver.address!r} is no peer to read from",
                field="peer_address",
            )
        return connection

    # --- What the decode's requests want -------------------------------------------------------------------------

    def claim(self, request_id: str, engine_id: str = "") -> Callable[[], None]:
        """A request has come to an engine for a handoff; the result is to be called when it lets go."""
        self.handoffs.claim(request_id, self.buffers.tier_of(engine_id))

        def unclaim() -> None:
            self.handoffs.unclaim(request_id)
            self._alarm.changed()

        return unclaim

    def promised(self, request_id: str, first: int, total: int) -> tuple[int, str]:
        """Of a prompt of `total` chunks, those from `first` on that may come without a gap, and whose they are."""
        handoff = self.handoffs.find(request_id)
        if handoff is None:
            return (0 if self.handoffs.is_over(request_id) else total - first), ""
        if not self.handoffs.reaches(handoff):
            return 0, ""
        return min(handoff.promised(first), total - first), handoff.giver.instance_id

    async def follow(self, request_id: str, progress: Progress, timeout_seconds: float) -> None:
        """Takes chunks as they come, until all are there, the handoff has ended, or the time is up."""
        deadline = time.monotonic() + timeout_seconds
        handoff = await self._announcement(request_id, min(timeout_seconds, ANNOUNCE_SECONDS))
        while handoff and self.handoffs.reaches(handoff) and (left := deadline - time.monotonic()) > 0:
            handoff.changed.clear()
            progress.find_own()
            brought = {chunk.key: chunk for chunk in handoff.kept}
            missing = [(index, brought.get(progress.keys[index])) for index in sorted(progress.missing)]
            progress.add([(index, chunk) for index, chunk in missing if chunk])
            if not progress.missing or not handoff.is_open:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await handoff.changed.wait()

    async def _announcement(self, request_id: str, timeout_seconds: float) -> Handoff | None:
        """The handoff, which may be announced while this waits; None if it is not, or is over."""
        if not self.handoffs.find(request_id) and not self.handoffs.is_over(request_id):
            announced = self._announced.setdefault(request_id, asyncio.Event())
            try:
                async with asyncio.timeout(timeout_seconds):
                    await announced.wait()
            except TimeoutError:
                logger.warning("handoff %s was not announced within %.3g s", request_id, timeout_seconds)
            finally:
                self._announced.pop(request_id, None)
        return self.handoffs.find(request_id)

    def _lost_buffer(self, tier: HostTier) -> None:
        self.handoffs.lose_room(tier, time.monotonic())
        self._alarm.changed()

    def _expire(self) -> float | None:
        """Ends what its time has come for; when the next time is."""
        for handoff in self.handoffs.expire(time.monotonic()):
            logger.warning(
                "handoff %s expired: no word from %s for %.3g s",
                handoff.request_id,
                handoff.giver.instance_id,
                self.handoffs.silence_seconds,
            )
        return self.handoffs.next_expiry()
