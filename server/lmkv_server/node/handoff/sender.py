"""The prefill's side of handoffs: announces each chunk to the decode's node once it is committed here.

announce (`Allocate`) ──► name committed chunks (`Commit`) ──► ... ──► all were read, or no more follow (`Release`)
    └── refused, or dropped by the engine ──► withdrawn (`Release` by its name): the decode stops waiting

The decode's node reads the chunks while `Commit` is running. An empty `Commit` renews the handoff's deadline while the
engine computes. Only the chunks that a running `Commit` names are held for a handoff. `HandoffSenders` has all handoffs
from the engines of one node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from lmkv import telemetry
from lmkv.errors import BadMessage, Full, GrantNotFound, LmkvError, Unreachable, WrongInstance
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.runtime.places import Places, most_of, requester
from lmkv.telemetry import Span
from lmkv.tiers import HOST
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.encoded_copies import EncodedCopy, offer_copies
from lmkv_server.node.handoff.state import HandedPrompt
from lmkv_server.node.peers.connection import PeerConnection
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.peers.directory import InstanceDirectory
from lmkv_server.node.sessions.session import add_granted

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Timeout of a call to the decode's node."""
ADMISSION_SECONDS = 30.0
"""The time for which the announcement is repeated while the decode's node has no room."""
COMMIT_BYTES = 256 << 20
"""Approximate bytes that one `Commit` names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HandoffResult:
    """The outcome of a handoff, at the prefill's node."""

    handoff_id: str
    chunk_count: int = 0
    """Chunks that the decode's node has now, including those that it had before."""
    size_bytes: int = 0
    """Bytes that it read."""
    seconds: float = 0.0
    """Duration of the transfers, without waiting for chunks to be computed."""
    error: LmkvError | None = None
    """Why chunks are missing, if there was an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LentChunks:
    """Chunks that one peer may read."""

    grant_id: str
    """A secret that gives the right to read: send it to that peer only."""
    copies: Mapping[Chunk, EncodedCopy]
    """The encoded copies that it reads in place of chunks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderContext:
    """The collaborators that all handoffs from one node share."""

    instance_id: str
    """The prefill's node: this one."""
    epoch: int
    tier: HostTier
    connections: PeerConnectionPool
    directory: InstanceDirectory
    grant_reads: Callable[[str, Sequence[Chunk], str], AbstractAsyncContextManager[LentChunks]]
    """Permits a peer, by its name, to read chunks here, in a codec that it has named."""
    inspect: Callable[[Sequence[Chunk], str], None]
    """Called with chunks that arrived damaged at a peer, and its instance id."""


class HandoffSender:
    def __init__(self, context: SenderContext, prompt: HandedPrompt, decode_instance_id: str) -> None:
        self._context = context
        self._prompt = prompt
        self._handoff_id = prompt.handoff_id
        self._decode_instance_id = decode_instance_id
        self._spec = prompt.spec
        self._keys = list(prompt.items().keys)
        self._missing: dict[ChunkKey, int] = {}
        """Index, by key, of each chunk that the decode's node lacks."""
        self._ready: dict[ChunkKey, int] = {}
        """The missing chunks that are committed here and not sent yet."""
        self._ended = asyncio.Event()
        self._is_dropped = False
        self._changed = asyncio.Event()
        self._size_bytes = 0
        self._seconds = 0.0

    def add(self, key: ChunkKey) -> None:
        """Sends a chunk that was committed here, if it is one of the handoff's."""
        if key in self._missing:
            self._ready[key] = self._missing[key]
            self._changed.set()

    def end(self) -> None:
        """Marks that no further chunk will be committed: `run` returns when all committed chunks are sent."""
        self._ended.set()
        self._changed.set()

    def drop(self) -> None:
        """Has `run` withdraw the handoff: no request will load it."""
        self._is_dropped = True
        self.end()

    async def run(self) -> HandoffResult:
        """Returns when all chunks are sent, no more will be committed, or the handoff has failed. Raises nothing."""
        error: LmkvError | None = None
        try:
            await self._transfer()
        except LmkvError as failure:
            error = failure
        except TimeoutError:
            error = Unreachable(f"{self._decode_instance_id} does not answer", instance_id=self._decode_instance_id)
        except Exception as failure:  # the engine waits for the end
            logger.exception("handoff %s failed unexpectedly", self._handoff_id)
            error = LmkvError(f"it failed unexpectedly: {failure!r}; see the node's log")
        return HandoffResult(
            handoff_id=self._handoff_id,
            chunk_count=len(self._keys) - len(self._missing),
            size_bytes=self._size_bytes,
            seconds=self._seconds,
            error=error,
        )

    async def _transfer(self) -> None:
        self._missing = {key: index for index, key in enumerate(self._keys)}
        connections = self._context.connections
        peer, answer = await self._begin()
        if peer is None:  # both engines share this node: the chunks are there
            self._missing.clear()
            return
        self._missing = {self._keys[index]: index for index in answer.missing if 0 <= index < len(self._keys)}
        try:
            tier = self._context.tier
            self._ready = {key: index for key, index in self._missing.items() if tier.get(key)}
            await self._send_all(peer, answer)
        finally:
            if self._is_dropped:
                connections.withdraw(peer, self._handoff_id)
            elif self._missing:
                connections.release(peer, answer.grant_id)

    async def _begin(self) -> tuple[PeerConnection | None, pb.AllocateResponse]:
        """The decode's node, once it has reserved room; None if that is this node. Raises why it refuses."""
        directory = self._context.directory
        for is_last in (False, True):
            holder = await directory.find(self._decode_instance_id)
            if holder.instance_id == self._context.instance_id:
                return None, pb.AllocateResponse()
            peer = self._context.connections.get(holder)
            if peer is None:
                raise Unreachable(
                    f"{holder.instance_id} is no longer at {holder.peer_address}", address=holder.peer_address
                )
            try:
                await peer.compare_specs(self._spec, ANSWER_SECONDS)
                return peer, await self._announce(peer)
            except WrongInstance:  # it has restarted
                directory.forget(self._decode_instance_id)
                if is_last:
                    raise
            except (Unreachable, GrantNotFound):  # the decode's node has ended, or the handoff has
                directory.forget(self._decode_instance_id)
                raise
            except BaseException:
                self._context.connections.withdraw(peer, self._handoff_id)
                raise
        raise AssertionError("the second try returns or raises")

    async def _announce(self, peer: PeerConnection) -> pb.AllocateResponse:
        """Repeats `Allocate` while there is no room, up to `ADMISSION_SECONDS`. Raises why it is refused."""
        request = pb.AllocateRequest(
            instance_id=self._context.instance_id,
            epoch=self._context.epoch,
            peer_epoch=peer.epoch,
            handoff_id=self._handoff_id,
            fingerprint=self._spec.fingerprint,
            chunk_keys=self._prompt.chunk_keys,
            token_count=self._prompt.token_count,
        )
        deadline = time.monotonic() + ADMISSION_SECONDS
        while True:
            try:
                return await peer.allocate(request, self._spec, ANSWER_SECONDS)
            except Full as error:
                if self._ended.is_set() or time.monotonic() > deadline:
                    raise
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), float(error.metadata.get("retry_seconds", 0.05)))

    async def _send_all(self, peer: PeerConnection, answer: pb.AllocateResponse) -> None:
        renewal_seconds = answer.timeout.ToNanoseconds() / 1e9 / 3
        while self._missing and not self._is_dropped:
            self._changed.clear()
            if not self._ready:
                if self._ended.is_set():
                    return
                try:
                    async with asyncio.timeout(renewal_seconds):
                        await self._changed.wait()
                except TimeoutError:
                    await peer.commit(pb.CommitRequest(grant_id=answer.grant_id), ANSWER_SECONDS)
                continue
            if not await self._send(peer, answer):
                return

    async def _send(self, peer: PeerConnection, answer: pb.AllocateResponse) -> bool:
        """Has the decode's node read the ready chunks, up to the limit of a call; whether all arrived intact."""
        tier = self._context.tier
        batch: dict[int, Chunk] = {}
        size_bytes = 0
        while self._ready and size_bytes < COMMIT_BYTES:
            key = next(iter(self._ready))
            index = self._ready.pop(key)
            if chunk := tier.get(key):  # else it was evicted since
                batch[index] = chunk
                size_bytes += chunk.size_bytes
        if not batch:
            return True
        request = pb.CommitRequest(grant_id=answer.grant_id, indices=batch)
        add_granted(request.chunks, batch.values(), self._spec.chunk_size)
        tier.hold(batch.values())
        began = time.monotonic()
        try:
            async with self._context.grant_reads(peer.name, tuple(batch.values()), answer.codec) as lent:
                request.read_grant_id = lent.grant_id
                offer_copies(request.chunks, batch.values(), lent.copies)
                response = await peer.commit(request, ANSWER_SECONDS)
        finally:
            tier.unhold(batch.values())
        self._seconds += time.monotonic() - began
        self._context.inspect([batch[index] for index in response.damaged if index in batch], peer.instance_id)
        for index, chunk in batch.items():
            if index not in response.damaged:
                self._missing.pop(chunk.key, None)
                self._size_bytes += lent.copies.get(chunk, chunk).size_bytes
        return not response.damaged


MAX_SENDERS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderStats:
    """Handoffs from this node since the start."""

    done_count: int = 0
    """Handoffs all of whose chunks were sent."""
    failed_count: int = 0
    sent_bytes: int = 0
    """Bytes that the decodes' nodes have read."""


class HandoffEngine(Protocol):
    """The engine whose chunks a handoff sends. `EngineHandoffs`, on a higher floor, is one."""

    def handed(self, result: HandoffResult) -> None:
        """A handoff has ended."""


class HandoffSenders:
    """The running handoffs. One event loop owns it; to be used as an async context manager."""

    def __init__(self, context: SenderContext, *, limit: int = MAX_SENDERS) -> None:
        """`limit` is the most handoffs that run at a time."""
        self._context = context
        self._limit = limit
        self._stats = SenderStats()
        self._places = Places[str]("outgoing handoffs", limit, most_of(limit))
        self._running: dict[str, tuple[HandoffSender, asyncio.Task[None]]] = {}
        self._withdrawing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> HandoffSenders:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends every handoff. Idempotent."""
        tasks = [*(task for _, task in self._running.values()), *self._withdrawing]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)

    def stats(self) -> SenderStats:
        """The counters as they are now."""
        return self._stats

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Sends a chunk of the host tier for the handoffs that it is part of."""
        if tier == HOST:
            for sender, _ in self._running.values():
                sender.add(chunk.key)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        """Does nothing: a handoff holds the chunks that it announced."""

    def start(
        self,
        prompt: HandedPrompt,
        decode_instance_id: str,
        engine: HandoffEngine,
        traceparent: str = "",
    ) -> None:
        """Begins a handoff; `engine` is given its result, at once if it is refused."""
        handoff_id = prompt.handoff_id
        if error := self._refusal(handoff_id):
            engine.handed(HandoffResult(handoff_id=handoff_id, error=error))
            return
        sender = HandoffSender(self._context, prompt, decode_instance_id)
        span = telemetry.follow("lmkv.handoff", traceparent, handoff_id=handoff_id, asked_chunks=len(prompt.chunk_keys))
        running = self._run(sender, handoff_id, decode_instance_id, engine, span)
        task = asyncio.create_task(running, name=f"lmkv-handoff-{handoff_id}")
        self._running[handoff_id] = sender, task
        task.add_done_callback(lambda _: self._ended(handoff_id))

    def _ended(self, handoff_id: str) -> None:
        self._running.pop(handoff_id, None)
        self._places.release(handoff_id)

    def _refusal(self, handoff_id: str) -> LmkvError | None:
        if handoff_id in self._running:
            return BadMessage(f"a handoff {handoff_id!r} is already running", field="handoff_id")
        try:
            self._places.take(handoff_id, requester.get())
        except Full as full:
            return full
        return None

    def end(self, handoff_id: str) -> None:
        """No further chunk of this handoff will be committed. Idempotent."""
        if known := self._running.get(handoff_id):
            known[0].end()

    def drop(self, handoff_id: str, decode_instance_id: str) -> None:
        """Withdraws a handoff that no request will load, also at the decode's node and after all chunks were sent."""
        if known := self._running.get(handoff_id):
            known[0].drop()
        elif len(self._withdrawing) < self._limit:
            task = asyncio.create_task(self._withdraw(handoff_id, decode_instance_id), name="lmkv-withdraw")
            self._withdrawing.add(task)
            task.add_done_callback(self._withdrawing.discard)

    async def _withdraw(self, handoff_id: str, decode_instance_id: str) -> None:
        try:
            peer = self._context.connections.get(await self._context.directory.find(decode_instance_id))
        except LmkvError as error:
            logger.debug("handoff %s will be abandoned: %s", handoff_id, error)
            return
        if peer is not None:
            await self._context.connections.withdraw(peer, handoff_id)

    def cancel(self, handoff_id: str) -> None:
        """Cancels and withdraws a handoff: its engine has detached."""
        if known := self._running.get(handoff_id):
            known[0].drop()
            known[1].cancel()

    async def _run(
        self,
        sender: HandoffSender,
        handoff_id: str,
        decode_instance_id: str,
        engine: HandoffEngine,
        span: Span,
    ) -> None:
        with span:
            result = await sender.run()
            span.set(arrived_chunks=result.chunk_count, transferred_bytes=result.size_bytes)
            if result.error:
                span.fail(result.error.reason, str(result.error))
        if result.error:
            logger.warning("handoff %s to %s failed: %s", handoff_id, decode_instance_id, result.error)
        self._stats = SenderStats(
            done_count=self._stats.done_count + (result.error is None),
            failed_count=self._stats.failed_count + (result.error is not None),
            sent_bytes=self._stats.sent_bytes + result.size_bytes,
        )
        engine.handed(result)
