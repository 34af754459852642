"""vLLM's KV events for what the engine's node holds: routers that follow an engine learn what it can load, too.

    commit, or the node's `TierChange`  ──►  BlockStored       if the chunk's tokens are known
    the node's `TierChange`, or its loss ──► BlockRemoved      if a BlockStored was published

There is no `AllBlocksCleared`: it would remove what routers know of the engine's own GPU blocks, too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmkv.keys import ChunkKey, part_key
from lmkv.spec import KvSpec
from lmkv.tiers import DISK, HOST
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.vllm_api import (
    MEDIUM_CPU,
    MEDIUM_STORAGE,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
    Request,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)

MEDIA: Mapping[str, str] = {HOST: MEDIUM_CPU, DISK: MEDIUM_STORAGE}
"""vLLM's names of the node's tiers."""
MAX_KNOWN = 16_384
"""Most chunks of finished requests whose tokens are kept, about 4 KiB each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupBlocks:
    """The blocks of one of vLLM's KV-cache groups that end in a chunk."""

    group: int
    block_size: int
    hashes: tuple[bytes | int, ...]
    parent: bytes | int | None
    tokens: array[int]
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None
    lora_id: int | None
    lora_name: str | None

    def stored(self, medium: str, first: int = 0) -> BlockStored:
        """The event of storing them, from the block with the index `first` on."""
        return BlockStored(
            block_hashes=list(self.hashes[first:]),
            parent_block_hash=self.hashes[first - 1] if first else self.parent,
            token_ids=self.tokens[first * self.block_size :].tolist(),
            block_size=self.block_size,
            lora_id=self.lora_id,
            medium=medium,
            lora_name=self.lora_name,
            extra_keys=list(self.extra_keys[first:]) if self.extra_keys else None,
            group_idx=self.group,
        )


ChunkBlocks = tuple[GroupBlocks, ...]
"""The blocks of one part of a chunk, by group."""
TierKey = tuple[str, ChunkKey]


class BlockEvents:
    """The blocks that an engine's node holds, named as vLLM names its own: by block, with the same hashes.

    Prompts that part within a chunk have different chunks with the same first blocks. A block is stored with the first
    and removed with the last of the chunks that have it, so that subscribers need not count.

    An event needs the tokens of its blocks. They are known of the chunks of requests that are followed, and for some
    time after these have finished. Recurrent states have no events.
    """

    def __init__(
        self, *, spec: KvSpec, groups: Sequence[LayerGroup], hash_block_size: int, max_known: int = MAX_KNOWN
    ) -> None:
        """`hash_block_size`: tokens of each of `Request.block_hashes`."""
        self._chunk_size = spec.chunk_size
        self._parts = [part for part, one in enumerate(spec.parts) if one.rule != PART_RULE_END]
        self._kept_tokens = [part.kept_tokens(spec.chunk_size) for part in spec.parts]
        self._groups = groups
        self._hash_block_size = hash_block_size
        self._max_known = max_known
        self._requests: dict[str, Request] = {}
        self._places: dict[ChunkKey, dict[str, tuple[int, int]]] = {}
        """Part and index of the chunks of followed requests, by key and request."""
        self._keys: dict[str, list[ChunkKey]] = {}
        """The entries of `_places` that each request has."""
        self._known: dict[ChunkKey, ChunkBlocks] = {}
        """Chunks whose tokens are known, in the order in which they became so."""
        self._held: dict[str, set[ChunkKey]] = {tier: set() for tier in MEDIA}
        """The chunks that the node has reported to hold."""
        self._published: dict[TierKey, tuple[tuple[int, tuple[bytes | int, ...]], ...]] = {}
        """Groups and hashes of the blocks of chunks that are published."""
        self._counts: dict[tuple[str, int], dict[bytes | int, int]] = {}
        """The number of published chunks that have a block, by tier and group: subscribers believe in these blocks."""
        self._events: list[KVCacheEvent] = []

    # ---- requests

    def follow(self, request: Request, keys: Iterable[ChunkKey]) -> None:
        """Creates events for the chunks of this request from now on; `keys` are those of its full chunks."""
        request_id = request.request_id
        self._requests[request_id] = request
        added = self._keys[request_id] = []
        for index, chunk_key in enumerate(keys):
            for part in self._parts:
                key = part_key(chunk_key, part)
                self._places.setdefault(key, {})[request_id] = part, index
                added.append(key)
                for tier in MEDIA:
                    if key in self._held[tier] and (tier, key) not in self._published:
                        self._publish(tier, key)

    def forget(self, request_id: str) -> None:
        """Ends the events of a finished request. Chunks that it stores may still be committed."""
        self._requests.pop(request_id, None)
        for key in self._keys.pop(request_id, ()):
            places = self._places[key]
            del places[request_id]
            if not places:
                del self._places[key]

    def of_chunk(self, request_id: str, part: int, index: int) -> ChunkBlocks:
        """The blocks of one part of a full chunk; none if the request is not followed, or no block ends in the chunk.

        A block that begins in the previous chunk is complete now: that chunk was stored, or held, before this one.
        """
        request = self._requests.get(request_id)
        if request is None or part not in self._parts:
            return ()
        return tuple(
            blocks
            for group, layers in enumerate(self._groups)
            if layers.part == part and (blocks := self._of_group(request, group, layers, index))
        )

    def _of_group(self, request: Request, group: int, layers: LayerGroup, index: int) -> GroupBlocks | None:
        unit, chunk_size, end = self._hash_block_size, self._chunk_size, (index + 1) * self._chunk_size
        size = layers.block_size if layers.block_size % unit == 0 else unit
        kept = self._kept_tokens[layers.part]
        first = (end - chunk_size) // size if kept == chunk_size else -(-(end - kept) // size)
        blocks = range(first, end // size)
        if not blocks:
            return None
        hashes = [
            maybe_convert_block_hash(request.block_hashes[(at + 1) * size // unit - 1])
            for at in range(max(0, blocks.start - 1), blocks.stop)
        ]
        parent = hashes.pop(0) if blocks.start else None
        extras = to_event_extra_keys(
            [generate_block_hash_extra_keys(request, at * size, (at + 1) * size, 0)[0] for at in blocks]
        )
        lora = request.lora_request
        return GroupBlocks(
            group=group,
            block_size=size,
            hashes=tuple(hashes),
            parent=parent,
            tokens=array("q", request.all_token_ids[blocks.start * size : blocks.stop * size]),
            extra_keys=tuple(extras) if extras else None,
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
        )

    # ---- what the node holds

    def committed(self, chunk_key: ChunkKey, part: int, blocks: ChunkBlocks) -> None:
        """Publishes a committed chunk. It is held in host memory, unless the node reports something else later."""
        if blocks:
            key = part_key(chunk_key, part)
            self._learn(key, blocks)
            self._publish(HOST, key)

    def refused(self, chunk_key: ChunkKey) -> None:
        """Removes a chunk whose commit was refused."""
        for part in self._parts:
            key = part_key(chunk_key, part)
            if key not in self._held[HOST]:
                self._remove([(HOST, key)])

    def apply(self, changes: Iterable[pb.TierChange]) -> None:
        """Publishes what the node has gained and lost."""
        for change in changes:
            if change.restarted:
                self.node_lost()
            if (held := self._held.get(change.tier)) is None:
                continue
            for raw in change.stored_keys:
                key = ChunkKey(raw)
                held.add(key)
                self._publish(change.tier, key)
            removed = [ChunkKey(raw) for raw in change.removed_keys]
            held.difference_update(removed)
            self._remove((change.tier, key) for key in removed)

    def node_lost(self) -> None:
        """Removes everything: it is not known any more what is held."""
        for held in self._held.values():
            held.clear()
        self._remove(list(self._published))

    def take(self) -> list[KVCacheEvent]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    # ---- the index that subscribers have

    def _publish(self, tier: str, key: ChunkKey) -> None:
        if (tier, key) in self._published or not (blocks := self._blocks(key)):
            return
        self._published[tier, key] = tuple((one.group, one.hashes) for one in blocks)
        for one in blocks:
            counts = self._counts.setdefault((tier, one.group), {})
            new = sum(hash_ not in counts for hash_ in one.hashes)  # the last ones: hashes are chained
            if new:
                self._events.append(one.stored(MEDIA[tier], len(one.hashes) - new))
            for hash_ in one.hashes:
                counts[hash_] = counts.get(hash_, 0) + 1

    def _remove(self, keys: Iterable[TierKey]) -> None:
        """Publishes the removal of those that were published, one event for each tier and group."""
        removed: dict[tuple[str, int], list[bytes | int]] = {}
        for one in keys:
            for group, hashes in self._published.pop(one, ()):
                counts = self._counts[one[0], group]
                for hash_ in hashes:
                    counts[hash_] -= 1
                    if not counts[hash_]:
                        del counts[hash_]
                        removed.setdefault((one[0], group), []).append(hash_)
        self._events += [
            BlockRemoved(block_hashes=hashes, medium=MEDIA[tier], group_idx=group)
            for (tier, group), hashes in removed.items()
        ]

    def _blocks(self, key: ChunkKey) -> ChunkBlocks:
        """The blocks of one part of a chunk; none if its tokens are not known."""
        if blocks := self._known.get(key):
            return blocks
        for request_id, (part, index) in self._places.get(key, {}).items():
            if blocks := self.of_chunk(request_id, part, index):
                self._learn(key, blocks)
                return blocks
        return ()

    def _learn(self, key: ChunkKey, blocks: ChunkBlocks) -> None:
        self._known.pop(key, None)
        self._known[key] = blocks
        if len(self._known) > self._max_known:
            del self._known[next(iter(self._known))]
