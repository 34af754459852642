"""Fetches from node to node, against a bare NIXL read of the same bytes and against memcpy."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from benchmarks import engines
from benchmarks.command import Run
from benchmarks.copies import rate_row
from benchmarks.fetch_ends import BareAgent, Node, Owner, keys_of
from lmkv.errors import LmkvError
from lmkv_server.node.host_tier import Chunk

PROMPT_TOKENS = {4000: "", 2000: "_2000", 512: "_512"}
"""Lengths of prompts, and what rows of that length end with."""
SPARE_CHUNKS = 1
FETCH_SECONDS = 30.0


def measure(run: Run, dtype: str) -> None:
    """Adds rows: a fetch is `Acquire`, read, checksum and commit; a bare read is none of these."""
    asyncio.run(_measure(run, dtype))


async def _measure(run: Run, dtype: str) -> None:
    spec = engines.kv_spec(dtype)
    most = max(PROMPT_TOKENS) // spec.chunk_size
    run.logs.mkdir(parents=True, exist_ok=True)
    with Owner(dtype, most, run.logs / "fetch-owner.log") as owner:
        async with Node("reader", spec, most + SPARE_CHUNKS) as node:
            ends = Ends(node, owner)
            for token_count, suffix in PROMPT_TOKENS.items():
                await ends.measure(run, token_count // spec.chunk_size, suffix)


class Ends:
    """Both ends, and the three ways that bytes get from one to the other."""

    def __init__(self, node: Node, owner: Owner) -> None:
        self._node = node
        self._owner = owner
        self._agent = BareAgent("bare-reader", node.pool)
        self._agent.connect(bytes.fromhex(owner.said.metadata))
        self._source = np.ones(node.pool.size_bytes, np.uint8)
        self._target = np.frombuffer(node.pool.buffer, np.uint8)

    async def measure(self, run: Run, chunk_count: int, suffix: str) -> None:
        """Adds the rows for prompts of so many chunks."""
        fetched: list[float] = []
        read: list[float] = []
        copied: list[float] = []
        for number in range((10 if run.quick else 60) + 1):
            if number % 2:
                copied.append(self._copy(chunk_count))
                fetched.append(await self._fetch(chunk_count))
                read.append(self._read(chunk_count))
            else:
                read.append(self._read(chunk_count))
                fetched.append(await self._fetch(chunk_count))
                copied.append(self._copy(chunk_count))
        size_bytes = chunk_count * self._node.spec.chunk_bytes
        fetched, read, copied = fetched[1:], read[1:], copied[1:]  # the first connects
        run.add(
            rate_row(f"nixl_fetch{suffix}_vs_raw", size_bytes, fetched, "bare NIXL read", read),
            rate_row(f"nixl_fetch{suffix}_vs_memcpy", size_bytes, fetched, "memcpy", copied),
        )

    async def _fetch(self, chunk_count: int) -> float:
        """Seconds of a fetch into an empty tier."""
        keys, held = keys_of(chunk_count), list[Chunk]()
        started = time.perf_counter()
        fetched = await self._node.peers.fetch(
            self._node.spec,
            keys,
            [self._owner.holder(chunk_count)],
            FETCH_SECONDS,
            lambda chunks: held.extend(chunk for _, chunk in chunks),
        )
        seconds = time.perf_counter() - started
        self._node.tier.unhold(held)
        self._node.tier.drop(keys)
        if fetched.size_bytes != chunk_count * self._node.spec.chunk_bytes:
            raise LmkvError(f"a fetch brought {fetched.chunk_count} of {chunk_count} chunks: {fetched.error}")
        return seconds

    def _read(self, chunk_count: int) -> float:
        """Seconds of a bare read into the same memory."""
        size_bytes, address = self._node.spec.chunk_bytes, self._node.pool.address
        local = [address + index * size_bytes for index in range(chunk_count)]
        self._owner.serve_bare(self._agent.metadata)
        started = time.perf_counter()
        self._agent.read("bare-owner", self._owner.addresses(chunk_count), local, size_bytes)
        seconds = time.perf_counter() - started
        self._owner.rest_bare()
        return seconds

    def _copy(self, chunk_count: int) -> float:
        """Seconds of a memcpy into the same memory."""
        size_bytes = chunk_count * self._node.spec.chunk_bytes
        started = time.perf_counter()
        np.copyto(self._target[:size_bytes], self._source[:size_bytes])
        return time.perf_counter() - started
