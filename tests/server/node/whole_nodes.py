"""What an engine does at a whole node: stores chunks whose every word is their number, and loads them."""

from __future__ import annotations

import numpy as np

from lmkv.pool.pool import Pool
from lmkv.pool.socket import AttachedPool, attach
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_kernels import checksum
from lmkv_server.node.node import Node
from tests.server.node.cases import chunk_key
from tests.server.node.disk_parts import until
from tests.server.node.engine_client import EngineClient
from tests.support.specs import small_spec

SPEC = small_spec()


async def store(engine: EngineClient, pool: Pool, *numbers: int, owner: bytes = b"") -> None:
    """Chunks whose every word is their number."""
    commits = []
    granted = await engine.reserve(len(numbers))
    for number, extent in zip(numbers, granted, strict=True):
        np.frombuffer(pool.buffer, np.uint64, SPEC.chunk_bytes // 8, extent.offset)[:] = number
        right = checksum(pool.buffer, extent.offset, SPEC.chunk_bytes)
        commits.append(engine.commit(chunk_key(number), extent, checksum=right, owner=owner))
    await engine.say(commit=commits)


async def load(
    engine: EngineClient, pool: Pool, ticket: str, first: int, count: int, *, seconds: float = 60.0
) -> list[int]:
    """The numbers of the chunks that came, as their every word says."""
    order = pb.LoadChunks(lookup_id=ticket, first_chunk=first, chunk_count=count)
    order.timeout.FromMilliseconds(round(seconds * 1000))
    await engine.say(load=[order])
    numbers: list[int] = []
    while True:
        for loaded in await engine.hear("loaded"):
            for chunk in loaded.chunks:
                words = np.frombuffer(pool.buffer, np.uint64, SPEC.chunk_bytes // 8, chunk.extent.offset)
                assert (words == words[0]).all()
                numbers.append(int(words[0]))
            if loaded.done:
                return numbers


async def until_free(node: Node) -> bool:
    """Waits until no chunk is held or reserved."""
    await until(lambda: not any(chunk.holds for chunk in node.tier))
    node.tier.check()
    return node.tier.reserved_count == 0


def mapped(engine: EngineClient) -> AttachedPool:
    """The pool, as a worker of the engine maps it."""
    return attach(engine.welcomed.pool_socket, engine.engine_id, 0, engine.welcomed.epoch, 60.0)
