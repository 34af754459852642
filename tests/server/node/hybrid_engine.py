"""An engine of a model with full attention, a sliding window and states, at a whole node: its items name themselves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey, part_key
from lmkv.pool.pool import Pool
from lmkv.spec import KvPart, PartItem
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PART_RULE_END, PART_RULE_LAST, Extent
from lmkv_kernels import checksum
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec

FULL, WINDOW, STATE = range(3)
_PART = KvPart(
    layer_count=1, kv_head_count=2, head_size=16, kv_dtype="float32", block_size=16, tile_isa="vec", layers="sliding"
)
HYBRID = small_spec(
    model_name="hybrid",
    model_id="hybrid-weights",
    head_size=16,
    tile_isa="vec",
    layers="full",
    more_parts=(
        replace(_PART, rule=PART_RULE_LAST, span=40),
        KvPart(
            rule=PART_RULE_END,
            layer_count=2,
            kv_head_count=1,
            head_size=6144,
            kv_dtype="int8",
            layers="with states",
        ),
    ),
    vocab_size=0,
)
"""A hit of n chunks needs all chunks of full attention, the last two of the window, and the last state."""

CAPACITY = 60
"""Chunks, all of their parts, that the pool of a node has room for."""
PROMPT = [chunk_key(number) for number in range(1, 9)]


class HybridEngine(EngineClient):
    """Stores items whose every word follows from their key, and checks those that it loads."""

    def use(self, pool: Pool) -> HybridEngine:
        """Works on this pool, which it has mapped."""
        self.pool = pool
        return self

    async def credits(self, *counts: int) -> list[list[Extent]]:
        """Write credits for each part."""
        await self.say(reserve=counts)
        assert await self.hear("settled") == list(counts)
        granted = self.heard.take("credits")
        return [[one.extent for one in granted if one.part == part] for part in range(len(counts))]

    async def store_items(self, items: Sequence[PartItem], superseded: bytes = b"") -> None:
        """Stores items of `PROMPT`."""
        at_once = self.welcomed.credit_limit
        for batch in (items[start : start + at_once] for start in range(0, len(items), at_once)):
            counts = [sum(item.part == part for item in batch) for part in range(len(self.spec.parts))]
            granted = await self.credits(*counts)
            await self.say(commit=[self.commit_item(item, granted[item.part].pop(0), superseded) for item in batch])

    async def store_hits(self, *chunk_counts: int) -> None:
        """Stores the items of hits of these numbers of chunks."""
        for count in chunk_counts:
            await self.store_items(self.spec.items(count))

    def commit_item(self, item: PartItem, credit: Extent, superseded: bytes = b"") -> pb.CommitChunk:
        """Writes an item of `PROMPT` into a credit."""
        key = PROMPT[item.chunk]
        size_bytes = self.spec.part_bytes(item.part)
        np.frombuffer(self.pool.buffer, np.uint64, size_bytes // 8, credit.offset)[:] = _word(part_key(key, item.part))
        return pb.CommitChunk(
            chunk_key=key,
            parent_key=PROMPT[item.chunk - 1] if item.chunk else b"",
            part=item.part,
            superseded_key=superseded,
            offset=credit.offset,
            size_bytes=size_bytes,
            checksum=checksum(self.pool.buffer, credit.offset, size_bytes),
            token_count=self.spec.chunk_size,
        )

    async def find(self, ticket: str, chunk_count: int = len(PROMPT), **more: int) -> pb.FoundChunks:
        """Looks the first chunks of `PROMPT` up, and checks those that are in the pool."""
        found = await self.lookup(ticket, PROMPT[:chunk_count], **more)
        self.check(found.hit_chunk_count, 0, found.own)
        return found

    async def load(self, ticket: str, found: pb.FoundChunks) -> int:
        """Loads all items of a hit that are not its own; how many of the hit's items the engine has then."""
        items = self.spec.items(found.hit_chunk_count)
        arrived = len(found.own)
        order = pb.LoadChunks(lookup_id=ticket, first_chunk=arrived, chunk_count=len(items) - arrived)
        order.timeout.FromSeconds(10)
        await self.say(load=[order])
        while True:
            for loaded in await self.hear("loaded"):
                assert loaded.first_chunk in (arrived, 0 if loaded.done else arrived)
                self.check(found.hit_chunk_count, arrived, loaded.chunks)
                arrived += len(loaded.chunks)
                if loaded.done:
                    return arrived

    def check(self, chunk_count: int, first: int, chunks: Sequence[pb.HeldChunk]) -> None:
        """Asserts that these chunks have the items of a hit of `PROMPT` from `first` on."""
        items = self.spec.items(chunk_count)[first:]
        assert len(chunks) <= len(items)
        for item, chunk in zip(items, chunks, strict=False):
            extent = chunk.extent
            assert extent.size_bytes == self.spec.part_bytes(item.part)
            words = np.frombuffer(self.pool.buffer, np.uint64, extent.size_bytes // 8, extent.offset)
            assert (words == _word(part_key(PROMPT[item.chunk], item.part))).all()


@asynccontextmanager
async def engine_at_node(
    folder: Path, instance_id: str = "n", *, capacity: int = CAPACITY, **more: Any
) -> AsyncIterator[tuple[Node, HybridEngine]]:
    values: dict[str, Any] = {
        "instance_id": instance_id,
        "runtime_dir": str(folder),
        "max_local_cpu_size": f"{capacity * HYBRID.chunk_bytes}B",
        "enable_p2p": False,
    }
    async with Node(NodeConfig(**(values | more))) as node, HybridEngine(node, spec=HYBRID) as engine:
        yield node, engine.use(node.pool)


def item_key(part: int, chunk: int) -> ChunkKey:
    return part_key(PROMPT[chunk], part)


def places(found: pb.FoundChunks | pb.EngineServiceLookupResponse) -> list[tuple[str, int]]:
    """The runs of an answer."""
    return [(run.tier, run.chunk_count) for run in found.runs]


def _word(key: ChunkKey) -> np.uint64:
    return np.uint64(int.from_bytes(key[-8:], "little"))
