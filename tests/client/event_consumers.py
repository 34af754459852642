"""Consumers of KV events, as routers have them: an index, and what they missed."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Callable

import msgspec
import zmq
import zmq.asyncio

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's own, at import
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from lmkv_client.kv_event_publisher import END
from lmkv_client.kv_events import PublishedBatch

REPLAY_MS = 3000
"""After so long without a batch, a replay is asked for again: its publisher may have ended."""
Index = set[tuple[str, str | None, bytes]]
"""What is held: topic, medium and key."""

batch_decoder = msgspec.msgpack.Decoder(KVEventBatch)


class Consumer:
    """An index built from batches, as a router keeps one. Batches are decoded by vLLM's own classes."""

    def __init__(self) -> None:
        self.index: Index = set()
        self.last: dict[str, int] = {}
        """The number of the last batch by topic."""
        self.stored_count = self.removed_count = self.cleared_count = 0
        """Blocks, and `AllBlocksCleared` events."""

    def apply(self, batch: PublishedBatch) -> None:
        """Applies a batch that is the next one, or that a replay has."""
        topic = batch.topic
        if batch.sequence <= self.last.get(topic, -1):
            return
        self.last[topic] = batch.sequence
        decoded = batch_decoder.decode(batch.payload)
        assert decoded.data_parallel_rank == 0
        for event in decoded.events:
            match event:
                case AllBlocksCleared():
                    self.index = {one for one in self.index if one[0] != topic}
                    self.cleared_count += 1
                case BlockStored(block_hashes=hashes, medium=medium):
                    assert (event.token_ids, event.parent_block_hash) == ([], None)
                    self.stored_count += len(hashes)
                    self.index |= {(topic, medium, hash_) for hash_ in hashes if isinstance(hash_, bytes)}
                case BlockRemoved(block_hashes=hashes, medium=medium):
                    self.removed_count += len(hashes)
                    self.index -= {(topic, medium, hash_) for hash_ in hashes if isinstance(hash_, bytes)}

    def lacks(self, batch: PublishedBatch) -> bool:
        """Whether batches before this one were missed."""
        return batch.sequence > self.last.get(batch.topic, -1) + 1


class Subscriber(Consumer):
    """A consumer at the sockets of a publisher, of whose batches it misses some."""

    def __init__(self, endpoint: str, replay_endpoint: str, misses: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._endpoints = endpoint, replay_endpoint
        self._misses = misses
        self.missed_count = self.replay_count = 0

    async def __aenter__(self) -> Subscriber:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.connect(self._endpoints[0])
        self._socket.subscribe(b"kv@")
        self._task = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        self._context.destroy(linger=0)

    def check(self) -> None:
        """Raises the error of a batch."""
        if self._task.done():
            self._task.result()

    async def _follow(self) -> None:
        await self._catch_up(0)  # whatever was published before
        while True:
            topic, sequence, payload = await self._socket.recv_multipart()
            batch = PublishedBatch(topic.decode(), int.from_bytes(sequence, "big"), payload)
            if self._misses():
                self.missed_count += 1
                continue
            if self.lacks(batch):
                self.replay_count += 1
                await self._catch_up(self.last.get(batch.topic, -1) + 1, topic)
            self.apply(batch)

    async def _catch_up(self, start: int, *of_topic: bytes) -> None:
        while True:
            with self._context.socket(zmq.DEALER) as replay:
                replay.linger = 0
                replay.connect(self._endpoints[1])
                await replay.send_multipart([b"", start.to_bytes(8, "big"), *of_topic])
                while await replay.poll(REPLAY_MS):
                    _, topic, sequence, payload = await replay.recv_multipart()
                    if sequence == END:
                        return
                    self.apply(PublishedBatch(topic.decode(), int.from_bytes(sequence, "big"), payload))
