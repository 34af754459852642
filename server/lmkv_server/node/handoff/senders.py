"""All handoffs from the engines of one node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmkv import telemetry
from lmkv.errors import BadMessage, Full, LmkvError
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.runtime.places import Places, most_of, requester
from lmkv.spec import KvSpec
from lmkv.telemetry import Span
from lmkv.tiers import HOST
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.handoff.sender import HandoffResult, HandoffSender, SenderContext

logger = logging.getLogger(__name__)

MAX_SENDERS = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class SenderStats:
    """Handoffs from this node since the start."""

    done_count: int = 0
    """Handoffs all of whose chunks were sent."""
    failed_count: int = 0
    sent_bytes: int = 0
    """Bytes that the decodes' nodes have read."""


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
        spec: KvSpec,
        *,
        handoff_id: str,
        decode_instance_id: str,
        keys: Sequence[ChunkKey],
        token_count: int,
        on_end: Callable[[HandoffResult], None],
        traceparent: str = "",
    ) -> None:
        """Begins a handoff; `on_end` is called with its result: at once if it is refused."""
        if error := self._refusal(handoff_id):
            on_end(HandoffResult(handoff_id=handoff_id, error=error))
            return
        sender = HandoffSender(
            self._context,
            handoff_id=handoff_id,
            decode_instance_id=decode_instance_id,
            spec=spec,
            chunk_keys=keys,
            token_count=token_count,
        )
        span = telemetry.follow("lmkv.handoff", traceparent, handoff_id=handoff_id, asked_chunks=len(keys))
        running = self._run(sender, handoff_id, decode_instance_id, on_end, span)
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
        on_end: Callable[[HandoffResult], None],
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
        on_end(result)
