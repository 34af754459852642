"""The prefill's side of handoffs: tells a decode's node of each chunk once it is committed here.

announce (`Allocate`) ──► say what is committed (`Commit`) ──► ... ──► all is there, or nothing more comes (`Release`)
    └── refused, or dropped by the engine ──► withdrawn (`Release` by its name): the decode waits no longer

The other node reads the bytes while `Commit` is under way. Between chunks an empty `Commit` says that the prefill is
still at work. Nothing is kept in place for a handoff but what a running `Commit` names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmkv.errors import Full, GrantNotFound, LmkvError, Unreachable, WrongInstance
from lmkv.keys import ChunkKey, join_keys
from lmkv.spec import KvSpec
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.host import Chunk
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.sessions.wire import extent

if TYPE_CHECKING:
    from lmkv_server.node.handoff.senders import Senders

ANSWER_SECONDS = 10.0
"""A decode's node that takes longer to answer has failed."""
ADMISSION_SECONDS = 30.0
"""So long a prefill tries to announce a handoff that there is no room for."""
COMMIT_BYTES = 256 << 20
"""One `Commit` names about so much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Handed:
    """How a handoff went."""

    request_id: str
    chunk_count: int = 0
    """Chunks that the decode's node has now, those that it had before included."""
    size_bytes: int = 0
    """Bytes that it read."""
    seconds: float = 0.0
    """Time that took, without waiting for chunks to be computed."""
    error: LmkvError | None = None
    """Why it is not whole, if there was an error."""


class Sender:
    """One handoff."""

    def __init__(
        self,
        senders: Senders,
        *,
        request_id: str,
        decode_instance_id: str,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        token_count: int,
    ) -> None:
        self._senders = senders
        self._request_id = request_id
        self._decode_instance_id = decode_instance_id
        self._spec = spec
        self._keys = keys
        self._token_count = token_count
        self._missing: dict[ChunkKey, int] = {}
        """What the other node has not yet, by key: the index."""
        self._ready: dict[ChunkKey, int] = {}
        """Those of them that are committed here."""
        self._ended = asyncio.Event()
        self._is_dropped = False
        self._changed = asyncio.Event()
        self._size_bytes = 0
        self._seconds = 0.0

    def admitted(self, key: ChunkKey) -> None:
        """A chunk was committed here."""
        if key in self._missing:
            self._ready[key] = self._missing[key]
            self._changed.set()

    def end(self) -> None:
        """No chunk will be committed any more."""
        self._ended.set()
        self._changed.set()

    def drop(self) -> None:
        """No request will load it: `run` withdraws it."""
        self._is_dropped = True
        self.end()

    async def run(self) -> Handed:
        """Returns when everything is handed over, nothing more will come, or it has failed. Raises nothing."""
        error: LmkvError | None = None
        try:
            await self._hand_over()
        except LmkvError as failure:
            error = failure
        except TimeoutError:
            error = Unreachable(f"{self._decode_instance_id} does not answer", instance_id=self._decode_instance_id)
        return Handed(
            request_id=self._request_id,
            chunk_count=len(self._keys) - len(self._missing),
            size_bytes=self._size_bytes,
            seconds=self._seconds,
            error=error,
        )

    async def _hand_over(self) -> None:
        self._missing = {key: index for index, key in enumerate(self._keys)}
        connections = self._senders.peers.connections
        peer, answer = await self._begin()
        if peer is None:  # both engines share this node: what is committed is there
            self._missing.clear()
            return
        self._missing = {self._keys[index]: index for index in answer.missing if 0 <= index < len(self._keys)}
        try:
            tier = self._senders.tier
            self._ready = {key: index for key, index in self._missing.items() if tier.get(key)}
            await self._send_all(peer, answer)
        finally:
            if self._is_dropped:
                connections.withdraw(peer, self._request_id)
            elif self._missing:
                connections.release(peer, answer.grant_id)

    async def _begin(self) -> tuple[PeerConnection | None, pb.AllocateResponse]:
        """The decode's node once it has room; None if that is this node. Raises why there is none."""
        directory = self._senders.directory
        for is_last in (False, True):
            holder = await directory.find(self._decode_instance_id)
            if holder.instance_id == self._senders.instance_id:
                return None, pb.AllocateResponse()
            peer = self._senders.peers.connections.get(holder)
            if peer is None:
                raise Unreachable(f"{holder.instance_id} has left {holder.peer_address}", address=holder.peer_address)
            try:
                await peer.compare(self._spec, ANSWER_SECONDS)
                return peer, await self._announce(peer)
            except WrongInstance:  # it was started again since
                directory.forget(self._decode_instance_id)
                if is_last:
                    raise
            except (Unreachable, GrantNotFound):  # the decode is gone, or has ended it
                directory.forget(self._decode_instance_id)
                raise
            except BaseException:
                self._senders.peers.connections.withdraw(peer, self._request_id)
                raise
        raise AssertionError("the second try returns or raises")

    async def _announce(self, peer: PeerConnection) -> pb.AllocateResponse:
        """Asks for room until there is some. Raises why there is none."""
        request = pb.AllocateRequest(
            instance_id=self._senders.instance_id,
            epoch=self._senders.epoch,
            peer_epoch=peer.epoch,
            request_id=self._request_id,
            fingerprint=self._spec.fingerprint,
            chunk_keys=join_keys(self._keys),
            token_count=self._token_count,
        )
        give_up_at = time.monotonic() + ADMISSION_SECONDS
        while True:
            try:
                return await peer.allocate(request, self._spec, ANSWER_SECONDS)
            except Full as error:
                if self._ended.is_set() or time.monotonic() > give_up_at:
                    raise
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), float(error.metadata.get("retry_seconds", 0.05)))

    async def _send_all(self, peer: PeerConnection, answer: pb.AllocateResponse) -> None:
        sign_of_life_seconds = answer.timeout.ToNanoseconds() / 1e9 / 3
        while self._missing and not self._is_dropped:
            self._changed.clear()
            if not self._ready:
                if self._ended.is_set():
                    return
                try:
                    async with asyncio.timeout(sign_of_life_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    await peer.commit(pb.CommitRequest(grant_id=answer.grant_id), ANSWER_SECONDS)
                continue
            if not await self._send(peer, answer.grant_id):
                return

    async def _send(self, peer: PeerConnection, grant_id: str) -> bool:
        """Has the other node read what is ready, as much as one call may name; whether all of it came whole."""
        tier = self._senders.tier
        batch: dict[int, Chunk] = {}
        size_bytes = 0
        while self._ready and size_bytes < COMMIT_BYTES:
            key = next(iter(self._ready))
            index = self._ready.pop(key)
            if chunk := tier.get(key):  # it may be evicted again
                batch[index] = chunk
                size_bytes += chunk.size_bytes
        if not batch:
            return True
        request = pb.CommitRequest(grant_id=grant_id, indices=batch, extents=map(extent, batch.values()))
        tier.hold(batch.values())
        began = time.monotonic()
        try:
            with self._senders.lending(peer.name, tuple(batch.values())) as read_grant_id:
                request.read_grant_id = read_grant_id
                response = await peer.commit(request, ANSWER_SECONDS)
        finally:
            tier.unhold(batch.values())
        self._seconds += time.monotonic() - began
        self._senders.suspect([batch[index] for index in response.damaged if index in batch], peer.instance_id)
        for index, chunk in batch.items():
            if index not in response.damaged:
                self._missing.pop(chunk.key, None)
                self._size_bytes += chunk.size_bytes
        return not response.damaged
