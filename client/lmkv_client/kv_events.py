"""The layout map as vLLM's KV events: batches for each instance and model, numbered and replayable.

    Watch ──► LayoutEvents ──► PublishedBatch(topic, sequence, payload)   a block is a chunk, its hash the key
                  └── EventStream, one for each topic: what is held, and the last batches

A consumer that has missed batches asks for them by their number. Where these are no longer kept, it gets batches that
replace everything: `AllBlocksCleared`, and a `BlockStored` for all that is held.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from lmkv.tiers import DISK, GPU, HOST, REMOTE
from lmkv.v1.cache_service_pb2 import LayoutChange
from lmkv_client.coordinator import LayoutUpdate

MEDIA: Mapping[str, str] = {GPU: "GPU", HOST: "CPU", DISK: "STORAGE", REMOTE: "STORAGE"}
"""vLLM's names of the tiers."""
BATCH_EVENTS = 1024
"""Most events in a batch, unless a replay has room for too few batches."""
HEARTBEAT_SECONDS = 5.0
"""Longest time between two batches of a topic: a consumer that missed the last batch learns of it by the next."""


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    """As in vLLM. Fields that the layout map does not know are empty."""

    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    """As in vLLM."""

    block_hashes: list[bytes | int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    """As in vLLM."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """As in vLLM. Each instance and model has one publisher, of rank 0."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class PublishedBatch(NamedTuple):
    """One message to consumers."""

    topic: str
    sequence: int
    payload: bytes


class Model(NamedTuple):
    """The fields of a spec that events need."""

    name: str
    chunk_size: int
    has_tokens: bool = True


class EventStream:
    """The batches of one topic, and what its consumers hold for true."""

    def __init__(self, topic: str, *, first_sequence: int, buffer_batches: int, integers: bool) -> None:
        self.topic = topic
        self.published_at = 0.0
        self._sequence = first_sequence
        """The next batch has this number."""
        self._buffer: deque[PublishedBatch] = deque(maxlen=buffer_batches)
        self._integers = integers
        self._held: dict[tuple[str, bytes], dict[bytes, int]] = {}
        """Block sizes by key, for each tier and fingerprint."""

    @property
    def held(self) -> dict[tuple[str, bytes], set[bytes]]:
        """Keys by tier and fingerprint."""
        return {place: set(keys) for place, keys in self._held.items() if keys}

    def change(
        self, tier: str, fingerprint: bytes, block_size: int, admitted: Iterable[bytes], evicted: Iterable[bytes]
    ) -> list[Event]:
        """The events of what was not so before."""
        held = self._held.setdefault((tier, fingerprint), {})
        new = [key for key in dict.fromkeys(admitted) if key not in held]
        held.update(dict.fromkeys(new, block_size))
        gone = [key for key in dict.fromkeys(evicted) if held.pop(key, 0)]
        events: list[Event] = [self._stored(tier, key, block_size) for key in new]
        if gone:
            events.append(BlockRemoved(block_hashes=[self._hash(key) for key in gone], medium=MEDIA.get(tier)))
        return events

    def clear(self) -> list[Event]:
        """The events of the instance's end."""
        self._held.clear()
        return [AllBlocksCleared()]

    def publish(self, events: list[Event], now: float) -> Iterator[PublishedBatch]:
        """Numbers and keeps batches of these events; an empty batch if there are no events."""
        for start in range(0, max(1, len(events)), BATCH_EVENTS):
            batch = self._batch(self._sequence, events[start : start + BATCH_EVENTS], now)
            self._sequence += 1
            self.published_at = now
            self._buffer.append(batch)
            yield batch

    def replay(self, start: int, now: float) -> list[PublishedBatch]:
        """The batches from `start` on; if they are no longer kept, batches up to the last one's number that replace
        everything."""
        if not self._buffer or start == self._sequence:
            return []
        if self._buffer[0].sequence <= start < self._sequence:
            return [batch for batch in self._buffer if batch.sequence >= start]
        events: list[Event] = [AllBlocksCleared()]
        events += (
            self._stored(tier, key, size) for (tier, _), held in self._held.items() for key, size in held.items()
        )
        step = max(BATCH_EVENTS, -(-len(events) // len(self._buffer)))
        parts = [events[first : first + step] for first in range(0, len(events), step)]
        first_sequence = self._sequence - len(parts)
        return [self._batch(first_sequence + at, part, now) for at, part in enumerate(parts)]

    def _batch(self, sequence: int, events: list[Event], now: float) -> PublishedBatch:
        payload = msgspec.msgpack.encode(EventBatch(ts=now, events=events, data_parallel_rank=0))
        return PublishedBatch(self.topic, sequence, payload)

    def _stored(self, tier: str, key: bytes, block_size: int) -> BlockStored:
        return BlockStored(
            block_hashes=[self._hash(key)],
            parent_block_hash=None,
            token_ids=[],
            block_size=block_size,
            lora_id=None,
            medium=MEDIA.get(tier),
            lora_name=None,
        )

    def _hash(self, key: bytes) -> bytes | int:
        return int.from_bytes(key[-8:], "big") if self._integers else key  # as vLLM shortens hashes


class LayoutEvents:
    """Turns the updates of one watch into batches. Each instance and model has a topic."""

    def __init__(
        self,
        *,
        topic: str,
        instance_id: str = "",
        first_sequence: int,
        buffer_batches: int = 10_000,
        integers: bool = False,
    ) -> None:
        """`topic` has `{instance}` and `{model}` in it, or neither; `instance_id` selects one instance.

        `first_sequence` must exceed the numbers of an earlier life, so that consumers notice a restart.
        """
        self.models: dict[bytes, Model] = {}
        """The key is the fingerprint; the caller adds those that `unknown` names before it calls `apply`."""
        self._topic = topic
        self._instance_id = instance_id
        self._first_sequence = first_sequence
        self._buffer_batches = buffer_batches
        self._integers = integers
        self._streams: dict[str, EventStream] = {}
        self._topics: dict[str, set[str]] = {}
        """The key is the instance."""
        self._snapshot: list[LayoutChange] | None = None
        """The changes of a snapshot that has begun."""

    @property
    def streams(self) -> Mapping[str, EventStream]:
        """The key is the topic."""
        return self._streams

    def unknown(self, update: LayoutUpdate) -> set[bytes]:
        """Fingerprints of the update whose model is not known."""
        return {one.fingerprint for one in update.changes if one.fingerprint and one.fingerprint not in self.models}

    def apply(self, update: LayoutUpdate, now: float) -> Iterator[PublishedBatch]:
        """The batches of an update. A snapshot is compared with what is held once it is complete."""
        if update.reset:
            self._snapshot = []
        if update.snapshot and self._snapshot is not None:
            self._snapshot += update.changes
            return
        events: dict[EventStream, list[Event]] = {}
        if self._snapshot is not None:
            self._replace(self._snapshot, events)
            self._snapshot = None
        for change in update.changes:
            self._change(change, events)
        for stream, some in events.items():
            if some:
                yield from stream.publish(some, now)
        for stream in self._streams.values():
            if now - stream.published_at >= HEARTBEAT_SECONDS:
                yield from stream.publish([], now)

    def replay(self, start: int, now: float, topic: str | None = None) -> Iterator[PublishedBatch]:
        """Missed batches of one topic, or of all."""
        for stream in self._streams.values():
            if topic is None or stream.topic == topic:
                yield from stream.replay(start, now)

    def _change(self, change: LayoutChange, events: dict[EventStream, list[Event]]) -> None:
        if self._instance_id not in ("", change.instance_id):
            return
        if not self._model(change.fingerprint).has_tokens:  # a consumer takes blocks for beginnings of prompts
            return
        if change.instance_gone:
            for topic in self._topics.get(change.instance_id, ()):
                stream = self._streams[topic]
                events.setdefault(stream, []).extend(stream.clear())
            return
        stream = self._stream(change.instance_id, change.fingerprint, events)
        events.setdefault(stream, []).extend(
            stream.change(
                change.tier,
                change.fingerprint,
                self._model(change.fingerprint).chunk_size,
                change.admitted_keys,
                change.evicted_keys,
            )
        )

    def _replace(self, snapshot: Iterable[LayoutChange], events: dict[EventStream, list[Event]]) -> None:
        """Adds what the snapshot has, and removes what it has not."""
        kept: dict[tuple[str, str, bytes], set[bytes]] = {}
        for change in snapshot:
            place = self._topic_of(change.instance_id, change.fingerprint), change.tier, change.fingerprint
            kept.setdefault(place, set()).update(change.admitted_keys)
        for topic, stream in self._streams.items():
            for (tier, fingerprint), keys in stream.held.items():
                gone = keys - kept.get((topic, tier, fingerprint), set())
                events.setdefault(stream, []).extend(stream.change(tier, fingerprint, 0, (), gone))
        for change in snapshot:
            self._change(change, events)

    def _stream(self, instance_id: str, fingerprint: bytes, events: dict[EventStream, list[Event]]) -> EventStream:
        topic = self._topic_of(instance_id, fingerprint)
        self._topics.setdefault(instance_id, set()).add(topic)
        stream = self._streams.get(topic)
        if stream is None:
            stream = self._streams[topic] = EventStream(
                topic,
                first_sequence=self._first_sequence,
                buffer_batches=self._buffer_batches,
                integers=self._integers,
            )
            events[stream] = stream.clear()  # what consumers know of an earlier life
        return stream

    def _topic_of(self, instance_id: str, fingerprint: bytes) -> str:
        return self._topic.replace("{instance}", instance_id).replace("{model}", self._model(fingerprint).name)

    def _model(self, fingerprint: bytes) -> Model:
        return self.models.get(fingerprint) or Model(fingerprint.hex(), 0)
