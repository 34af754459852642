"""How soon a node has its pool back: `python -m benchmarks.warm_start [--gigabytes 4] [--chunk-mib 2]`.

A node stores chunks and ends; the next one finds them. `serves` is when engines may attach, `verified` when the last
chunk can be found, `longest pause` the longest time that the event loop was blocked.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time

import numpy as np

from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey
from lmkv_kernels import checksum
from lmkv_server.node.node import Node

LOOK_SECONDS = 0.001


async def fill(node: Node, chunk_bytes: int) -> int:
    """Fills the pool, page by page and chunk by chunk, as stores would; how many chunks fit."""
    content = np.random.default_rng(0).bytes(chunk_bytes)
    count = node.tier.size_bytes // chunk_bytes
    for index in range(count):
        reserved = node.tier.reserve(chunk_bytes)
        assert reserved
        end = reserved.offset + chunk_bytes
        node.pool.buffer[reserved.offset : end] = index.to_bytes(8, "little") + content[8:]
        node.tier.commit(
            reserved.offset,
            key=ChunkKey(index.to_bytes(16, "big")),
            fingerprint=bytes(16),
            size_bytes=chunk_bytes,
            checksum=checksum(node.pool.buffer, reserved.offset, chunk_bytes),
            token_count=256,
        )
        await asyncio.sleep(0)
    return count


async def measure(config: NodeConfig, chunk_bytes: int) -> None:
    """Two lives of a node."""
    async with Node(config) as node:
        count = await fill(node, chunk_bytes)
    began = time.perf_counter()
    async with Node(config) as node:
        assert node.warm
        serves, pause = time.perf_counter() - began, 0.0
        while node.warm.stats().waiting_chunks:
            before = time.perf_counter()
            await asyncio.sleep(LOOK_SECONDS)
            pause = max(pause, time.perf_counter() - before)
        seconds = time.perf_counter() - began
        assert node.warm.stats().found_chunks == count
    print(
        f"{count} chunks of {chunk_bytes >> 20} MiB: serves after {serves:.2f} s, verified after {seconds:.2f} s "
        f"({count * chunk_bytes / seconds / 2**30:.1f} GB/s), longest pause {pause * 1000:.0f} ms"
    )


def main() -> None:
    """Measures, in shared memory, and leaves nothing there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--chunk-mib", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lmkv-", dir="/dev/shm") as folder:
        config = NodeConfig(
            instance_id="bench",
            runtime_dir=f"{folder}/run",
            enable_p2p=False,
            persist_pool=True,
            pool_path=f"{folder}/pool",
            max_local_cpu_size=args.gigabytes,
        )
        asyncio.run(measure(config, args.chunk_mib << 20))


if __name__ == "__main__":
    main()
