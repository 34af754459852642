"""The parts of a node that peers have to do with, put together: in this process, or in one of their own."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio import Future
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from lmkv.config import NodeConfig
from lmkv.keys import ChunkKey, part_key
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec, PartItem
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.events import CacheListener
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.fetch.pipeline import PeerTraffic
from lmkv_server.node.handoff.sender import HandoffResult
from lmkv_server.node.handoff.state import HandedPrompt
from lmkv_server.node.serving.build import open_peer_side
from lmkv_server.node.serving.service import ServedNode
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.base import Loaded, Needs, OnChunks, Progress
from tests.server.node.cases import put
from tests.support.fork_server import start_module
from tests.support.ordered_process import OrderedProcess
from tests.support.specs import make_spec
from tests.waiting import WAIT_SECONDS, until

SERVICE = "lmkv.v1.PeerService"
RUNTIME_VARIABLE = "LMKV_TESTS_RUNTIME_DIR"
_FOLDER = None if RUNTIME_VARIABLE in os.environ else tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp")
RUNTIME_DIR = _FOLDER.name if _FOLDER else os.environ[RUNTIME_VARIABLE]
"""Where all nodes of the tests find each other, those in processes of their own too."""
SMALL = make_spec(model_name="m", model_id="m@1", head_size=16, chunk_size=256)
"""Its chunks have 128 KiB."""
LARGE = replace(SMALL, layer_count=32, kv_head_count=8)
"""Its chunks have 8 MiB."""
SPECS = {"small": SMALL, "large": LARGE}


def keys_of(count: int) -> list[ChunkKey]:
    """The keys of one long prompt."""
    return [ChunkKey(index.to_bytes(16, "big")) for index in range(1, count + 1)]


def words_of(key: ChunkKey, spec: KvSpec, token_count: int = 256) -> NDArray[np.uint64]:
    """What the chunk of this key holds, wherever it is."""
    words = np.arange(spec.size_bytes(token_count) // 8, dtype=np.uint64)
    return words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(int.from_bytes(key, "big"))


def item_words(key: ChunkKey, size_bytes: int) -> NDArray[np.uint64]:
    """What the part of a chunk of this key holds, wherever it is."""
    return np.full(size_bytes // 8, int.from_bytes(key[-8:], "little"), np.uint64)


class Parts:
    """One node's tier, pool, channel, `PeerService`, fetcher, and both sides of handoffs."""

    def __init__(
        self,
        instance_id: str,
        *,
        spec: KvSpec = SMALL,
        chunk_count: int = 32,
        grant_ttl_seconds: float = 10 * WAIT_SECONDS,
        listener: CacheListener | None = None,
        transfer_channel: str = "nixl",
        verify_transfers: bool = True,
        **config: Any,
    ) -> None:
        """`config` are further keys of the node's configuration.

        No test takes a grant that has expired for one that was released, unless it sets `grant_ttl_seconds`.
        """
        self.instance_id = instance_id
        self.spec = spec
        self.epoch = time.time_ns()
        self.address = ""
        self._size_bytes = chunk_count * spec.chunk_bytes
        self._grant_ttl_seconds = grant_ttl_seconds
        self._listener = listener
        self._transfer_channel = transfer_channel
        self._verify_transfers = verify_transfers
        self._config = {"pd_buffer_size": self._size_bytes // 2} | config
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def _start(self) -> None:
        self.pool = Pool.create(self._size_bytes)
        self._stack.callback(self.pool.close)
        self.tier = HostTier(self.pool.size_bytes, self._listener)
        self.engines = EngineSessions(self.tier)
        self.engines.attach("engine", self.spec)
        config = NodeConfig(
            instance_id=self.instance_id,
            runtime_dir=RUNTIME_DIR,
            transfer_channel=self._transfer_channel,
            grant_ttl=self._grant_ttl_seconds,
            verify_transfers=self._verify_transfers,
            **self._config,
        )
        config.make_instance_dir()
        self.transfer_socket = config.transfer_socket
        node = ServedNode(
            instance_id=self.instance_id, epoch=self.epoch, tier=self.tier, pool=self.pool, engines=self.engines
        )
        side = await open_peer_side(config, node, self._stack)
        self.address = side.address
        self.channels = side.channels
        self.inspector = side.inspector
        self.connections = side.connections
        self.fetcher = side.fetcher
        self.pipeline = side.pipeline
        self.receiver = side.receiver
        self.senders = side.senders
        self.directory = side.directory
        self.service = side.service

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def holder(self, matched_count: int) -> Holder:
        """The node as lookups name it."""
        return Holder(
            instance_id=self.instance_id,
            epoch=self.epoch,
            peer_address=self.address,
            matched_chunk_count=matched_count,
        )

    def words(self, offset: int, size_bytes: int) -> NDArray[np.uint64]:
        """Words of the pool; not to be kept."""
        return np.frombuffer(self.pool.buffer, np.uint64, size_bytes // 8, offset)

    def put(self, key: ChunkKey, token_count: int = 256) -> Chunk:
        """Commits the chunk of this key."""
        token_count = min(token_count, self.spec.chunk_size)
        size_bytes = self.spec.size_bytes(token_count)
        chunk = put(
            self.tier,
            key,
            size_bytes,
            fingerprint=self.spec.fingerprint,
            token_count=token_count,
            pool=self.pool,
            content=words_of(key, self.spec, token_count).tobytes(),
        )
        self.senders.stored(HOST, chunk)
        return chunk

    def put_item(self, item: PartItem, chunk_keys: Sequence[ChunkKey]) -> Chunk:
        """Commits a part of a chunk of a prompt; its words are what the item's key stands for."""
        key, size_bytes = part_key(chunk_keys[item.chunk], item.part), self.spec.part_bytes(item.part)
        return put(
            self.tier,
            key,
            size_bytes,
            fingerprint=self.spec.fingerprint,
            token_count=self.spec.chunk_size,
            pool=self.pool,
            content=item_words(key, size_bytes).tobytes(),
        )

    async def fetch(
        self,
        spec: KvSpec,
        keys: Sequence[ChunkKey],
        holders: Sequence[Holder],
        timeout_seconds: float,
        on_chunks: OnChunks,
        *,
        first: int = 0,
    ) -> Loaded:
        """Fetches `keys[first:]`, as a load of an engine does."""
        progress = Progress(self.tier, Needs(spec=spec, keys=keys, indices=range(first, len(keys))), on_chunks)
        try:
            return await self.fetcher.fetch(progress, holders, timeout_seconds)
        finally:
            progress.close()

    def traffic(self) -> dict[str, PeerTraffic]:
        """What was transferred, by peer."""
        return {peer.instance_id: peer for peer in self.pipeline.stats().traffic}

    def hand(
        self, handoff_id: str, instance_id: str, keys: Sequence[ChunkKey], token_count: int = 0
    ) -> Future[HandoffResult]:
        """Hands a prompt to the node of this instance; how that went."""
        ended: Future[HandoffResult] = asyncio.get_running_loop().create_future()
        tokens = token_count or len(keys) * self.spec.chunk_size
        prompt = HandedPrompt(handoff_id=handoff_id, spec=self.spec, chunk_keys=keys, token_count=tokens)
        self.senders.start(prompt, instance_id, HandingEngine(ended))
        return ended

    def damage(self, key: ChunkKey) -> None:
        """Changes a committed chunk's bytes."""
        chunk = self.tier.get(key)
        assert chunk
        self.words(chunk.offset, chunk.size_bytes)[5] ^= np.uint64(1 << 40)

    def holds_right(self, chunk: Chunk) -> bool:
        """Whether the chunk's bytes are those that its key stands for."""
        words = self.words(chunk.offset, chunk.size_bytes)
        if not self.spec.has_plain_parts:
            return np.array_equal(words, item_words(chunk.key, chunk.size_bytes))
        return np.array_equal(words, words_of(chunk.key, self.spec, chunk.token_count))

    def check_nothing_left(self) -> None:
        """Asserts that nothing is reserved, held or granted, and that every chunk is what it should be."""
        self.tier.check()
        self.receiver.handoffs.check()
        assert len(self.receiver.handoffs) == 0
        assert self.tier.reserved_count == 0
        assert not any(chunk.holds for chunk in self.tier)
        assert len(self.fetcher.inflight) == 0
        assert all(self.holds_right(chunk) for chunk in self.tier)


class HandingEngine:
    """Waits for the end of one handoff."""

    def __init__(self, ended: Future[HandoffResult]) -> None:
        self.handed = ended.set_result


class Taken:
    """An `on_chunks` that keeps what it is given, and checks that it comes in order."""

    def __init__(self, node: Parts, first: int = 0, then: Callable[[], None] | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.call_count = 0
        self._node = node
        self._first = first
        self._then = then

    def __call__(self, chunks: list[tuple[int, Chunk]]) -> None:
        assert chunks
        for index, chunk in chunks:
            assert index == self._first + len(self.chunks)
            assert chunk.holds > 0
            self.chunks.append(chunk)
        self.call_count += 1
        if self._then:
            self._then()

    def keys(self) -> list[ChunkKey]:
        """Keys of what came."""
        return [chunk.key for chunk in self.chunks]

    def let_go(self) -> None:
        """Checks the bytes and ends the holds."""
        assert all(self._node.holds_right(chunk) for chunk in self.chunks)
        self._node.tier.unhold(self.chunks)


class Remote(OrderedProcess):
    """`Parts` in a process of their own, holding chunks. It takes orders: `ask`."""

    def __init__(
        self, instance_id: str, *, spec: str = "large", chunk_count: int = 16, transfer_channel: str = "nixl"
    ) -> None:
        # Its own would stay if it is killed.
        self._folder = tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp")
        paths = os.pathsep.join(path for path in sys.path if path)
        environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": self._folder.name, RUNTIME_VARIABLE: RUNTIME_DIR}
        arguments = (instance_id, spec, chunk_count, transfer_channel)
        super().__init__(start_module("tests.server.node.peer_parts", *arguments, environment=environment))
        said = self._heard()
        self.holder = Holder(
            instance_id=instance_id,
            epoch=said["epoch"],
            peer_address=said["address"],
            matched_chunk_count=chunk_count,
        )

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._folder.cleanup()


def serve(instance_id: str, spec: str, chunk_count: str, transfer_channel: str) -> None:
    """What a remote's process does: carries out orders until its standard input ends."""

    async def run() -> None:
        count = int(chunk_count)
        parts = Parts(instance_id, spec=SPECS[spec], chunk_count=count * 4, transfer_channel=transfer_channel)
        async with parts as node:
            for key in keys_of(count):
                node.put(key)
            _say({"epoch": node.epoch, "address": node.address})
            while order := await asyncio.to_thread(sys.stdin.readline):
                _say(_obey(node, order.split()))

    asyncio.run(run())


def _obey(node: Parts, order: Sequence[str]) -> Any:
    match order:
        case ["damage", index]:
            node.damage(keys_of(int(index) + 1)[-1])
        case ["drop", index]:
            node.tier.drop(keys_of(int(index) + 1)[-1:])
        case ["hand", handoff_id, instance_id, count]:
            node.hand(handoff_id, instance_id, keys_of(int(count)))
        case ["put", index]:
            node.put(keys_of(int(index) + 1)[-1])
        case ["sending"]:
            return len(node.senders)
        case ["grants"]:
            return len(node.service.grants)
        case ["holds"]:
            return sum(chunk.holds for chunk in node.tier)
    return None


def _say(what: Any) -> None:
    print(json.dumps(what), flush=True)


async def no_grants(owner: Parts) -> None:
    """Waits until the last grants are given back, and nothing is held for them."""
    await until(lambda: len(owner.service.grants) == 0)
    assert not any(chunk.holds for chunk in owner.tier)


async def lets_go(owner: Remote) -> None:
    """Waits until an owner grants and holds nothing."""
    await until(lambda: owner.ask("grants") == owner.ask("holds") == 0)


if __name__ == "__main__":
    serve(*sys.argv[1:])
