"""All handoffs that the engines of one node give away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from lmkv import telemetry
from lmkv.errors import BadMessage, Full, LmkvError
from lmkv.keys import ChunkKey
from lmkv.spec import KvSpec
from lmkv.telemetry import Span
from lmkv_server.node.cache.events import HOST, CachedChunk
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.fetcher import Peers
from lmkv_server.node.handoff.directory import Directory
from lmkv_server.node.handoff.sender import Handed, Sender

logger = logging.getLogger(__name__)

MAX_SENDERS = 1024


class Senders:
    """The handoffs that a node's engines give away. One event loop owns it; to be used as an async context manager."""

    def __init__(
        self,
        *,
        instance_id: str,
        epoch: int,
        peers: Peers,
        directory: Directory,
        limit: int = MAX_SENDERS,
        lending: Callable[[str, Sequence[Chunk]], AbstractContextManager[str]],
        suspect: Callable[[Sequence[Chunk], str], None],
    ) -> None:
        """`lending` permits a peer to read chunks here and yields the grant's id; `suspect` is called with chunks that
        came damaged from here to a peer.
        """
        self.instance_id = instance_id
        self.epoch = epoch
        self.peers = peers
        self.directory = directory
        self.lending = lending
        self.suspect = suspect
        self.done_count = 0
        """Handoffs that brought everything, since the start."""
        self.failed_count = 0
        """Those that did not."""
        self.sent_bytes = 0
        """Bytes that decodes' nodes have read."""
        self._limit = limit
        self._running: dict[str, tuple[Sender, asyncio.Task[None]]] = {}
        self._withdrawing: set[asyncio.Task[None]] = set()

    @property
    def tier(self) -> HostTier:
        """Where the chunks are."""
        return self.peers.tier

    def __len__(self) -> int:
        return len(self._running)

    async def __aenter__(self) -> Senders:
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

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        """Announces a chunk of the host tier in the handoffs that wait for it."""
        if tier == HOST:
            for sender, _ in self._running.values():
                sender.admitted(chunk.key)

    def removed(self, tier: str, chunk: CachedChunk) -> None:
        """Does nothing: a handoff holds the chunks that it announced."""

    def start(
        self,
        spec: KvSpec,
        *,
        request_id: str,
        decode_instance_id: str,
        keys: Sequence[ChunkKey],
        token_count: int,
        on_end: Callable[[Handed], None],
        traceparent: str = "",
    ) -> None:
        """Begins a handoff, which tells `on_end` how it went: at once if another of its name is under way."""
        if error := self._refusal(request_id):
            on_end(Handed(request_id=request_id, error=error))
            return
        sender = Sender(
            self,
            request_id=request_id,
            decode_instance_id=decode_instance_id,
            spec=spec,
            keys=keys,
            token_count=token_count,
        )
        span = telemetry.follow("lmkv.handoff", traceparent, handoff_id=request_id, asked_chunks=len(keys))
        running = self._run(sender, request_id, decode_instance_id, on_end, span)
        task = asyncio.create_task(running, name=f"lmkv-handoff-{request_id}")
        self._running[request_id] = sender, task
        task.add_done_callback(lambda _: self._running.pop(request_id, None))

    def _refusal(self, request_id: str) -> LmkvError | None:
        if request_id in self._running:
            return BadMessage(f"a handoff {request_id!r} is under way already", field="request_id")
        if len(self._running) >= self._limit:
            return Full(f"{self._limit} handoffs are all that this node may give at a time", limit=self._limit)
        return None

    def end(self, request_id: str) -> None:
        """No chunk of this handoff will be committed any more. One that has ended is no error."""
        if known := self._running.get(request_id):
            known[0].end()

    def drop(self, request_id: str, decode_instance_id: str) -> None:
        """No request will load this handoff: ends it at the decode's node too, also if everything has arrived there."""
        if known := self._running.get(request_id):
            known[0].drop()
        elif len(self._withdrawing) < self._limit:
            task = asyncio.create_task(self._withdraw(request_id, decode_instance_id), name="lmkv-withdraw")
            self._withdrawing.add(task)
            task.add_done_callback(self._withdrawing.discard)

    async def _withdraw(self, request_id: str, decode_instance_id: str) -> None:
        try:
            peer = self.peers.connections.get(await self.directory.find(decode_instance_id))
        except LmkvError as error:
            logger.debug("handoff %s is left to be abandoned: %s", request_id, error)
            return
        if peer is not None:
            await self.peers.connections.withdraw(peer, request_id)

    def cancel(self, request_id: str) -> None:
        """Stops a handoff: its engine is gone."""
        if known := self._running.get(request_id):
            known[0].drop()
            known[1].cancel()

    async def _run(
        self, sender: Sender, request_id: str, decode_instance_id: str, on_end: Callable[[Handed], None], span: Span
    ) -> None:
        with span:
            handed = await sender.run()
            span.set(arrived_chunks=handed.chunk_count, transferred_bytes=handed.size_bytes)
            if handed.error:
                span.fail(handed.error.reason, str(handed.error))
        self.sent_bytes += handed.size_bytes
        if handed.error:
            self.failed_count += 1
            logger.warning("handoff %s to %s failed: %s", request_id, decode_instance_id, handed.error)
        else:
            self.done_count += 1
        on_end(handed)
