"""The connection to one peer: its session, its memory, its bandwidth, and a backoff after failures.

`granted_chunks` checks where a peer says that chunks are in its memory, before anything is read from there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from google.protobuf import duration_pb2

from lmkv import rpc
from lmkv.auth.credentials import Credentials
from lmkv.errors import BadMessage, ChannelUnsupported, Full, KvSpecMismatch, LmkvError, SessionNotFound, Unreachable
from lmkv.keys import KEY_BYTES, ChunkKey, check_prefix_digests
from lmkv.kv_inputs import MAX_WRITERS, KvInputs
from lmkv.runtime.places import Places, most_of, requester
from lmkv.spec import KvSpec
from lmkv.tiers import PEERS
from lmkv.transfer import Channels
from lmkv.transfer.bandwidth import Bandwidth, MovedShares
from lmkv.v1 import chunk_pb2
from lmkv.v1 import peer_service_pb2 as pb
from lmkv.v1 import peer_service_pb2_grpc as pb_grpc
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import Origin

logger = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 10.0
LATE_SECONDS = 10.0
"""A peer that was late is asked only after other peers for this long, unless it answers."""
METADATA_SECONDS = 5.0
MAX_GRANTS = 64
"""Most grants that one session may have at a time; engines of the node that has the session share them."""
FULL_SECONDS = 0.02
"""A fetch that gets no grant asks again after this time."""
TURN_SECONDS = 5 * FULL_SECONDS
"""An engine without a grant that was refused one this short a while ago is the next to get one."""
NIXL = "nixl"
WORD_BYTES = 8
"""Chunks and what encodes them have whole words, as their checksums."""


class PeerConnection:
    """One peer in one epoch. Its RPCs raise the peer's error, or `Unreachable`, unless they say otherwise."""

    def __init__(
        self,
        instance_id: str,
        epoch: int,
        channels: Channels,
        holder: Holder,
        credentials: Credentials = rpc.PLAINTEXT,
    ) -> None:
        """`instance_id` and `epoch` are this node's."""
        self.instance_id = holder.instance_id
        self.epoch = holder.epoch
        self.address = holder.peer_address
        self.name = f"{holder.instance_id}:{holder.epoch}"
        """Its name on the transfer channel."""
        self.mismatches: dict[bytes, KvSpecMismatch] = {}
        """Why it does not share specs, by their fingerprint. Does not change within an epoch."""
        self.on_connected: Callable[[KvSpec], object] = lambda _: None
        """Called when chunks of a spec can be read from it."""
        self.channel = ""
        """The transfer channel of reads from it, once connected."""
        self.regions: Sequence[pb.Region] = ()
        """Its registered memory, once connected."""
        self.nixl_metadata = b""
        """The metadata by which an engine's workers read its memory by NIXL, once connected for that; else empty."""
        self.bandwidth = Bandwidth()
        """Measured by reads from it."""
        self.shares = MovedShares()
        """The bytes that reads from it move, by spec."""
        self._origins: dict[bytes, Origin] = {}
        """The origin of chunks that are read from it, by the fingerprint of their spec."""
        self._session_id = ""
        self._is_nixl_connected = False
        self._own_instance_id = instance_id
        self._own_epoch = epoch
        self._channels = channels
        self._connected: set[bytes] = set()
        self._compared: set[bytes] = set()
        self._connecting = asyncio.Lock()
        self._failure_count = 0
        self._retry_at = 0.0
        self._late_until = 0.0
        self._grants = Places[object]("grants of this node", MAX_GRANTS, most_of(MAX_GRANTS))
        self._places: dict[str, object] = {}
        """The places of grants, by grant."""
        self._refused: dict[str, float] = {}
        """Engines, and when the peer last refused them a grant since this node has too much of its memory."""
        self._rpc_channel = rpc.open_channel(self.address, credentials)
        self._stub = pb_grpc.PeerServiceStub(self._rpc_channel)

    @property
    def is_backing_off(self) -> bool:
        """Whether it failed a short while ago and should not be called."""
        return time.monotonic() < self._retry_at

    @property
    def is_late(self) -> bool:
        """Whether an answer was overdue a short while ago, and it has not answered since."""
        return time.monotonic() < self._late_until

    def mark_late(self) -> None:
        """Records that an answer is overdue."""
        self._late_until = time.monotonic() + LATE_SECONDS

    def record_answer(self) -> None:
        """Records an answer: it is no longer late."""
        self._late_until = 0.0

    def record_success(self) -> None:
        """Resets the backoff."""
        self._failure_count = 0

    def record_failure(self) -> None:
        """Starts the backoff, which doubles with each failure in a row. `connect` is needed again after it."""
        self._connected.clear()
        backoff = min(FIRST_BACKOFF_SECONDS * 2**self._failure_count, LAST_BACKOFF_SECONDS)
        self._failure_count += 1
        self._retry_at = time.monotonic() + backoff

    async def connect(self, spec: KvSpec, timeout_seconds: float) -> None:
        """Ensures that both sides share chunks of this spec, and that the peer's memory is readable."""
        try:
            async with asyncio.timeout(timeout_seconds), self._connecting:
                if spec.fingerprint not in self._connected:
                    await self._connect(spec, timeout_seconds)
        except TimeoutError:
            raise Unreachable(f"{self.name} did not answer within {timeout_seconds:.3g} s") from None

    async def _connect(self, spec: KvSpec, timeout_seconds: float) -> None:
        if known := self.mismatches.get(spec.fingerprint):
            raise known
        wanted = self._channels.names
        while True:
            self._channels.prepare(wanted[:1])
            response = await self._init(spec, wanted, timeout_seconds)
            try:
                await self._channels.add_peer(
                    self.name, response.channel, response.channel_metadata, partial(self._get_metadata, spec)
                )
                break
            except (ChannelUnsupported, Unreachable) as error:
                others = tuple(name for name in wanted if name != response.channel)
                if not others or others == wanted:
                    raise
                wanted = others
                logger.debug("cannot read from %s by channel %s: %s", self.name, response.channel, error)
        logger.info("reading from %s by channel %s", self.name, response.channel)
        self.channel = response.channel
        self._origins[spec.fingerprint] = Origin(
            tier=PEERS,
            channel=response.channel,
            peer_id=self.instance_id,
            writers=[KvInputs.from_proto(one) for one in response.kv_inputs[:MAX_WRITERS]],
        )
        self.regions = tuple(response.regions)
        self._connected.add(spec.fingerprint)
        self.on_connected(spec)

    def origin(self, fingerprint: bytes) -> Origin:
        """The origin of chunks of a spec that are read from it."""
        return self._origins.get(fingerprint) or Origin(tier=PEERS, channel=self.channel, peer_id=self.instance_id)

    async def compare_specs(self, spec: KvSpec, timeout_seconds: float) -> None:
        """Ensures that the peer shares chunks of this spec, before a handoff to it."""
        async with self._connecting:
            if spec.fingerprint in self._compared:
                return
            if known := self.mismatches.get(spec.fingerprint):
                raise known
            await self._init(spec, (), timeout_seconds)
            self._compared.add(spec.fingerprint)

    async def connect_nixl(self, spec: KvSpec, timeout_seconds: float) -> None:
        """Fetches its NIXL metadata, for reads into device memory; the nodes themselves may use another channel."""
        if self._channels.requires_encryption:
            raise ChannelUnsupported("require_encryption: the channel nixl does not encrypt", channel=NIXL)
        if not self._is_nixl_connected:
            self.nixl_metadata = (await self._init(spec, (NIXL,), timeout_seconds)).channel_metadata
            self._is_nixl_connected = True  # after the call: one that fails or is cancelled is repeated

    async def _get_metadata(self, spec: KvSpec, name: str) -> bytes:
        """Asks it for its metadata for one more channel."""
        async with self._connecting:
            return (await self._init(spec, (name,), METADATA_SECONDS)).channel_metadata

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
            logger.warning(
                "no chunks are shared with %s: %s is %s there, %s here",
                self.instance_id,
                error.metadata.get("field", "the spec"),
                error.metadata.get("own_value", "another"),
                error.metadata.get("other_value", "another"),
            )
            raise
        if response.session_id != self._session_id:  # channels of an earlier session are void
            self._session_id = response.session_id
            self._connected.clear()
        return response

    async def _open_session(self, spec: KvSpec, timeout_seconds: float) -> str:
        """The id of this node's session at the peer; `connect` opens one, too."""
        async with self._connecting:
            if not self._session_id:
                await self._init(spec, (), timeout_seconds)
            return self._session_id

    def _forget_session(self, session_id: str) -> None:
        """Forgets a session that the peer has dropped."""
        if self._session_id == session_id:
            self._session_id = ""
            self._connected.clear()

    async def acquire(
        self, spec: KvSpec, keys: Sequence[ChunkKey], ttl_seconds: float, timeout_seconds: float, codec: str = ""
    ) -> pb.AcquireResponse:
        """Acquires a grant on chunks of the peer, which the caller releases. Call `connect` first.

        With a `codec` the peer may encode chunks so.

        Connects again if the peer has dropped the session. Engines share the grants: raises `Full` to one that has
        its share, and to one that has some while the peer has refused the first one to another engine.
        """
        caller, place = requester.get(), object()
        self._take_place(place, caller)
        grant_id = ""
        try:
            response = await self._acquire(spec, keys, ttl_seconds, timeout_seconds, codec)
            grant_id = response.grant.grant_id
        except Full:
            self._refused[caller] = time.monotonic()
            raise
        finally:
            if grant_id:
                self._places[grant_id] = place
            else:
                self._grants.release(place)
        self._refused.pop(caller, None)
        return response

    def _take_place(self, place: object, caller: str) -> None:
        now = time.monotonic()
        self._refused = {one: since for one, since in self._refused.items() if now - since < TURN_SECONDS}
        if self._grants.count(caller) and any(not self._grants.count(one) for one in self._refused):
            raise Full("another engine of this node is the next to get a grant", retry_seconds=FULL_SECONDS)
        try:
            self._grants.take(place, caller)
        except Full as error:
            raise Full(str(error), retry_seconds=FULL_SECONDS) from None

    async def _acquire(
        self, spec: KvSpec, keys: Sequence[ChunkKey], ttl_seconds: float, timeout_seconds: float, codec: str
    ) -> pb.AcquireResponse:
        ttl = duration_pb2.Duration()
        ttl.FromNanoseconds(round(ttl_seconds * 1e9))
        request = pb.AcquireRequest(
            peer_epoch=self.epoch,
            fingerprint=spec.fingerprint,
            chunk_keys=keys,
            ttl=ttl,
            codec=codec,
        )
        request.session_id = self._session_id
        try:
            response: pb.AcquireResponse = await self._call("Acquire", request, timeout_seconds)
        except SessionNotFound:
            self._forget_session(request.session_id)
            await self.connect(spec, timeout_seconds)
            request.session_id = self._session_id
            response = await self._call("Acquire", request, timeout_seconds)
        return response

    async def allocate(self, request: pb.AllocateRequest, spec: KvSpec, timeout_seconds: float) -> pb.AllocateResponse:
        """Announces a handoff. Opens a session first, if there is none or the peer has dropped it."""
        request.session_id = await self._open_session(spec, timeout_seconds)
        try:
            response: pb.AllocateResponse = await self._call("Allocate", request, timeout_seconds)
        except SessionNotFound:
            self._forget_session(request.session_id)
            request.session_id = await self._open_session(spec, timeout_seconds)
            response = await self._call("Allocate", request, timeout_seconds)
        return response

    async def commit(self, request: pb.CommitRequest, timeout_seconds: float) -> pb.CommitResponse:
        """Has the peer read chunks of a handoff; returns when it has."""
        request.session_id = self._session_id
        response: pb.CommitResponse = await self._call("Commit", request, timeout_seconds)
        return response

    async def release(self, grant_id: str, timeout_seconds: float, damaged: Sequence[int] = ()) -> None:
        """Releases a grant; `damaged` are its extents that arrived damaged. On failure it expires, without error."""
        try:
            request = pb.ReleaseRequest(grant_id=grant_id, damaged=damaged, session_id=self._session_id)
            await self._call("Release", request, timeout_seconds)
        except LmkvError as error:
            logger.debug("grant %s of %s will expire: %s", grant_id, self.name, error)
        finally:
            self._grants.release(self._places.pop(grant_id, None))

    async def withdraw(self, handoff_id: str, timeout_seconds: float) -> None:
        """Withdraws a handoff. On failure the peer abandons it after a time, without error here."""
        try:
            request = pb.ReleaseRequest(handoff_id=handoff_id, session_id=self._session_id)
            await self._call("Release", request, timeout_seconds)
        except LmkvError as error:
            logger.debug("handoff %s to %s will be abandoned: %s", handoff_id, self.name, error)

    async def close(self, grace_seconds: float | None = None) -> None:
        """Ends the connection, once the calls in flight have ended or this time has passed. Idempotent."""
        await self._rpc_channel.close(grace_seconds)

    async def _call(self, name: str, request: object, timeout_seconds: float) -> Any:
        method = getattr(self._stub, name)
        return await rpc.call(method, f"lmkv.v1.PeerService/{name}", self.address, request, timeout_seconds)


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerChunk:
    """A chunk in a peer's memory that this node may read."""

    index: int
    """Index of its key among those of the prompt, or of the order."""
    address: int
    """Address in the peer's memory."""
    checksum: int
    token_count: int
    size_bytes: int
    encoded_bytes: int = 0
    """Bytes of the peer's memory if it is encoded there; `checksum` is of these. 0: it is not encoded."""
    parent: ChunkKey | None = None
    """For a chunk in which prompts end: the key of the chunk before it, or the root of its key chain, if the peer knows
    it."""
    prefix_digests: bytes = b""
    """`lmkv.keys.prefix_digests` of a chunk with a `parent`, if the peer knows them."""

    @property
    def read_bytes(self) -> int:
        """Bytes that are read from the peer."""
        return self.encoded_bytes or self.size_bytes


def peer_chunk(
    index: int,
    granted: chunk_pb2.GrantedChunk,
    token_count: int,
    spec: KvSpec,
    regions: Sequence[pb.Region],
    size_bytes: int | None = None,
) -> PeerChunk:
    """The chunk of `token_count` tokens, or one part of it, as a peer offers it; `size_bytes` is its size, if known.

    Raises `BadMessage` if the extent is outside the peer's regions, or does not have the size of such a chunk,
    `BadChunkKey` if its prefix digests are malformed.
    """
    extent = granted.extent
    own_bytes = granted.decoded_bytes or extent.size_bytes
    if not (
        0 <= extent.region < len(regions)
        and granted.token_count == token_count
        and spec.fits(own_bytes, token_count)
        and size_bytes in (None, own_bytes)
        and (not granted.decoded_bytes or 0 < extent.size_bytes < own_bytes)
        and extent.size_bytes % WORD_BYTES == 0
        and 0 <= extent.offset <= regions[extent.region].size_bytes - extent.size_bytes
    ):
        raise BadMessage(f"a peer offers an invalid extent: {extent}", field="extent")
    digests = check_prefix_digests(granted.prefix_digests, token_count)
    has_parent = (token_count < spec.chunk_size or digests) and len(granted.parent_key) == KEY_BYTES
    return PeerChunk(
        index=index,
        address=regions[extent.region].address + extent.offset,
        checksum=granted.checksum,
        token_count=token_count,
        size_bytes=own_bytes,
        encoded_bytes=extent.size_bytes if granted.decoded_bytes else 0,
        parent=ChunkKey(granted.parent_key) if has_parent else None,
        prefix_digests=digests if has_parent and spec.ends_anywhere else b"",
    )


def granted_chunks(
    response: pb.AcquireResponse,
    indices: Sequence[int],
    spec: KvSpec,
    regions: Sequence[pb.Region],
    size_bytes: Callable[[int], int | None] = lambda _: None,
) -> list[PeerChunk]:
    """The chunks that a peer grants, of those whose keys were sent; `indices` are the indices of these.

    `size_bytes` returns the size of a chunk by its index, if that is known.

    Raises `BadMessage` if the grant does not match the keys, or an extent is invalid.
    """
    chunks, present = response.grant.chunks, list(response.present)
    is_ordered = present == sorted(set(present)) and all(0 <= at < len(indices) for at in present)
    if len(chunks) != len(present) or not is_ordered:
        raise BadMessage("a peer's grant does not match the keys that were sent", field="present")
    return [
        peer_chunk(indices[at], granted, granted.token_count, spec, regions, size_bytes(indices[at]))
        for at, granted in zip(present, chunks, strict=True)
    ]
