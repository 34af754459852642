"""One peer, as a node that fetches from it sees it: agreed with once, left alone for a while when it fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf import duration_pb2

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import ChannelUnsupported, KvSpecMismatch, LmkvError, SessionNotFound, Unreachable
from lmkv.keys import ChunkKey, join_keys
from lmkv.spec import KvSpec
from lmkv.transfer import Channels
from lmkv.transfer.bandwidth import Bandwidth
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv.v1.cache_service_pb2 import Holder

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 10.0
LATE_SECONDS = 10.0
"""A peer that was late is asked after others for this long, unless it answers."""
NIXL = "nixl"


class PeerConnection:
    """One peer in one epoch. Everything but `close` may raise the peer's error, or `Unreachable`."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        channels: Channels,
        holder: Holder,
        on_mismatch: Callable[[str, KvSpecMismatch], None],
        credentials: Credentials = rpc.PLAINTEXT,
    ) -> None:
        """`instance_id` and `epoch` are the own ones; `on_mismatch` is told once which peer shares nothing, and why."""
        self.instance_id = holder.instance_id
        self.epoch = holder.epoch
        self.address = holder.peer_address
        self.name = f"{holder.instance_id}:{holder.epoch}"
        """What it is called on the channel."""
        self.mismatches: dict[bytes, KvSpecMismatch] = {}
        """By fingerprint: the specs that it shares nothing with, and why. Does not change within an epoch."""
        self.regions: Sequence[pb.Region] = ()
        """Its registered memory, once agreed."""
        self.nixl_metadata = b""
        """How an engine's workers read its memory by themselves, once agreed; empty if they cannot, or may no more."""
        self.bandwidth = Bandwidth()
        """How fast bytes have come from it."""
        self._session_id = ""
        self._knows_nixl = False
        self._own_instance_id = instance_id
        self._own_epoch = epoch
        self._channels = channels
        self._on_mismatch = on_mismatch
        self._agreed: set[bytes] = set()
        self._compared: set[bytes] = set()
        self._agreeing = asyncio.Lock()
        self._failure_count = 0
        self._retry_at = 0.0
        self._late_until = 0.0
        self._words = rpc.open_channel(self.address, credentials)
        self._stub = pb_grpc.PeerServiceStub(self._words)

    @property
    def resting(self) -> bool:
        """Whether it failed a short while ago and should be left alone."""
        return time.monotonic() < self._retry_at

    @property
    def is_late(self) -> bool:
        """Whether it took longer than it should for an answer a short while ago, and has not answered since."""
        return time.monotonic() < self._late_until

    def was_late(self) -> None:
        """It takes longer than it should for an answer."""
        self._late_until = time.monotonic() + LATE_SECONDS

    def answered(self) -> None:
        """It has answered."""
        self._late_until = 0.0

    def worked(self) -> None:
        """It did what it was asked for."""
        self._failure_count = 0

    def failed(self) -> None:
        """It did not; it will be left alone, longer each time, and then be asked to agree anew."""
        self._agreed.clear()
        backoff = min(FIRST_BACKOFF_SECONDS * 2**self._failure_count, LAST_BACKOFF_SECONDS)
        self._failure_count += 1
        self._retry_at = time.monotonic() + backoff

    async def agree(self, spec: KvSpec, timeout_seconds: float) -> None:
        """Makes sure that both sides share chunks of this spec and that the peer's memory is readable."""
        try:
            async with asyncio.timeout(timeout_seconds), self._agreeing:
                if spec.fingerprint not in self._agreed:
                    await self._introduce(spec, timeout_seconds)
        except TimeoutError:
            raise Unreachable(f"{self.name} did not answer within {timeout_seconds:.3g} s") from None

    async def _introduce(self, spec: KvSpec, timeout_seconds: float) -> None:
        if known := self.mismatches.get(spec.fingerprint):
            raise known
        wanted = self._channels.names
        while True:
            self._channels.prepare(wanted[:1])
            response = await self._init(spec, wanted, timeout_seconds)
            try:
                await self._channels.add_peer(self.name, response.channel, response.channel_metadata)
                break
            except (ChannelUnsupported, Unreachable) as error:
                wanted = wanted[wanted.index(response.channel) + 1 :] if response.channel in wanted else ()
                if not wanted:
                    raise
                logger.debug("bytes of %s do not come by %s: %s", self.name, response.channel, error)
        logger.info("bytes of %s come by %s", self.name, response.channel)
        self.regions = tuple(response.regions)
        self._agreed.add(spec.fingerprint)

    async def compare(self, spec: KvSpec, timeout_seconds: float) -> None:
        """Makes sure that the peer shares chunks of this spec, before anything is handed to it."""
        async with self._agreeing:
            if spec.fingerprint in self._compared:
                return
            if known := self.mismatches.get(spec.fingerprint):
                raise known
            await self._init(spec, (), timeout_seconds)
            self._compared.add(spec.fingerprint)

    async def agree_on_nixl(self, spec: KvSpec, timeout_seconds: float) -> None:
        """Learns how to read its memory into a device's: by NIXL, whichever channel the nodes themselves use."""
        if not self._knows_nixl:
            self._knows_nixl = True
            self.nixl_metadata = (await self._init(spec, (NIXL,), timeout_seconds)).channel_metadata

    async def _init(self, spec: KvSpec, wanted: Sequence[str], timeout_seconds: float) -> pb.InitResponse:
        request = pb.InitRequest(
            instance_id=self._own_instance_id,
            epoch=self._own_epoch,
            peer_instance_id=self.instance_id,
            peer_epoch=self.epoch,
            spec=spec.to_proto(),
            channels=wanted,
            session_id=self._session_id,
        )
        try:
            response: pb.InitResponse = await self._call("Init", request, timeout_seconds)
        except KvSpecMismatch as error:
            self.mismatches[spec.fingerprint] = error
            self._on_mismatch(self.instance_id, error)
            raise
        if response.session_id != self._session_id:  # what was agreed on in another session is void
            self._session_id = response.session_id
            self._agreed.clear()
        return response

    async def _open_session(self, spec: KvSpec, timeout_seconds: float) -> str:
        """The id of the own session at the peer; `agree` opens one, too."""
        async with self._agreeing:
            if not self._session_id:
                await self._init(spec, (), timeout_seconds)
            return self._session_id

    def _lost_session(self, session_id: str) -> None:
        """The peer has dropped this session."""
        if self._session_id == session_id:
            self._session_id = ""
            self._agreed.clear()

    async def acquire(
        self, spec: KvSpec, keys: Sequence[ChunkKey], ttl_seconds: float, timeout_seconds: float
    ) -> pb.AcquireResponse:
        """Has the peer keep chunks in place for us; call `agree` first. The caller releases the grant.

        Agrees again if the peer has dropped our session.
        """
        ttl = duration_pb2.Duration()
        ttl.FromNanoseconds(round(ttl_seconds * 1e9))
        request = pb.AcquireRequest(
            instance_id=self._own_instance_id,
            peer_epoch=self.epoch,
            fingerprint=spec.fingerprint,
            chunk_keys=join_keys(keys),
            ttl=ttl,
        )
        request.session_id = self._session_id
        try:
            response: pb.AcquireResponse = await self._call("Acquire", request, timeout_seconds)
        except SessionNotFound:
            self._lost_session(request.session_id)
            await self.agree(spec, timeout_seconds)
            request.session_id = self._session_id
            response = await self._call("Acquire", request, timeout_seconds)
        return response

    async def allocate(self, request: pb.AllocateRequest, spec: KvSpec, timeout_seconds: float) -> pb.AllocateResponse:
        """Announces a handoff to the peer. Opens a session first, if there is none or the peer has dropped it."""
        request.session_id = await self._open_session(spec, timeout_seconds)
        try:
            response: pb.AllocateResponse = await self._call("Allocate", request, timeout_seconds)
        except SessionNotFound:
            self._lost_session(request.session_id)
            request.session_id = await self._open_session(spec, timeout_seconds)
            response = await self._call("Allocate", request, timeout_seconds)
        return response

    async def commit(self, request: pb.CommitRequest, timeout_seconds: float) -> pb.CommitResponse:
        """Has the peer read chunks of a handoff."""
        request.session_id = self._session_id
        response: pb.CommitResponse = await self._call("Commit", request, timeout_seconds)
        return response

    async def release(self, grant_id: str, timeout_seconds: float, damaged: Sequence[int] = ()) -> None:
        """Gives a grant back, and says which of its extents came damaged. If it fails the grant expires by itself."""
        try:
            request = pb.ReleaseRequest(grant_id=grant_id, damaged=damaged, session_id=self._session_id)
            await self._call("Release", request, timeout_seconds)
        except LmkvError as error:
            logger.debug("grant %s of %s is left to expire: %s", grant_id, self.name, error)

    async def withdraw(self, request_id: str, timeout_seconds: float) -> None:
        """Ends a handoff that no request will load. If it fails, the handoff is abandoned by itself."""
        try:
            request = pb.ReleaseRequest(request_id=request_id, session_id=self._session_id)
            await self._call("Release", request, timeout_seconds)
        except LmkvError as error:
            logger.debug("handoff %s to %s is left to be abandoned: %s", request_id, self.name, error)

    async def close(self) -> None:
        """Ends the connection. Idempotent."""
        await self._words.close(None)

    async def _call(self, name: str, request: object, timeout_seconds: float) -> Any:
        method = getattr(self._stub, name)
        return await rpc.call(method, f"lmkv.v1.PeerService/{name}", self.address, request, timeout_seconds)
