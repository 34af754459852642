"""A node's index without bytes, a wire that breaks, and who asks: what tests of the fleet are made of."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from typing import Any, Self

from lmkv import rpc
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason
from lmkv.rpc.messages import by_keys
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1 import cache_service_pb2_grpc, registry_service_pb2_grpc
from lmkv.v1.cache_service_pb2 import LookupRequest
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest, SpecConflict, TierUsage
from lmkv_server.node.cache.events import CachedChunk
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.commands.executor import OrderContext
from lmkv_server.node.commands.runner import OrderRunner
from lmkv_server.node.fleet.membership import FleetMembership
from lmkv_server.node.fleet.registration import FleetContext
from lmkv_server.node.fleet.reports import HeldChunk
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.server.node.cases import put
from tests.support.specs import make_spec
from tests.waiting import WAIT_SECONDS, eventually

LEASE_SECONDS = 2.0
"""Short enough to be waited for, and longer than a busy machine stands still."""
LLAMA = make_spec(model_name="llama", model_id="llama@1", kv_dtype="bfloat16", head_size=64, chunk_size=256)
KEYS = [ChunkKey(sha256(bytes([i])).digest()[:16]) for i in range(40)]
EPOCHS = itertools.count(time.time_ns())


class Shelf:
    """A node's index as the fleet sees it."""

    def __init__(self, instance_id: str = "a", *, port: int = 7000, specs: Sequence[KvSpec] = (LLAMA,)) -> None:
        self.instance_id = instance_id
        self.epoch = next(EPOCHS)
        self.peer_address = f"127.0.0.1:{port}"
        self.specs = list(specs)
        self.held: dict[ChunkKey, HeldChunk] = {}
        self.fleet: FleetMembership | None = None
        self.conflict_lists: list[list[SpecConflict]] = []
        """All that `conflicts_changed` was called with."""
        self.tier = HostTier(1 << 20, self)
        """For orders, which work on a real one."""
        self.orders = OrderRunner(
            OrderContext(instance_id=instance_id, tier=self.tier, engines=EngineSessions(self.tier))
        )

    def describe(self) -> Instance:
        return Instance(
            instance_id=self.instance_id,
            epoch=self.epoch,
            peer_address=self.peer_address,
            specs=[spec.to_proto() for spec in self.specs],
            tiers=[TierUsage(tier=HOST, capacity_bytes=1 << 30, chunk_count=len(self.held))],
            engine_count=len(self.specs),
        )

    def conflicts_changed(self, conflicts: list[SpecConflict]) -> None:
        self.conflict_lists.append(conflicts)

    def snapshot(self) -> Iterator[HeldChunk]:
        yield from self.held.values()

    @asynccontextmanager
    async def join(self, *addresses: str, **options: Any) -> AsyncIterator[FleetMembership]:
        async with self.orders:
            outside = {name: options.pop(name) for name in ("credentials", "resolve") if name in options}
            context = FleetContext(node=self, orders=self.orders, **options)
            self.fleet = FleetMembership(addresses, context, **outside)
            async with self.fleet:
                yield self.fleet

    def keep(self, keys: Iterable[ChunkKey]) -> None:
        """Puts chunks into the tier."""
        for key in keys:
            put(
                self.tier,
                key,
                4096,
                fingerprint=LLAMA.fingerprint,
                token_count=LLAMA.chunk_size,
            )

    def stored(self, tier: str, chunk: CachedChunk) -> None:
        self.put([chunk.key], token_count=chunk.token_count)

    def removed(self, tier: str, chunk: CachedChunk, reason: MissReason) -> None:
        self.take([chunk.key])

    def put(self, keys: Iterable[ChunkKey], spec: KvSpec = LLAMA, token_count: int = 256) -> None:
        for key in keys:
            held = HeldChunk(tier=HOST, fingerprint=spec.fingerprint, key=key, token_count=token_count)
            self.held[key] = held
            if self.fleet is not None:
                self.fleet.admitted(held)

    def take(self, keys: Iterable[ChunkKey]) -> None:
        for key in keys:
            held = self.held.pop(key)
            if self.fleet is not None:
                self.fleet.evicted(HOST, held.fingerprint, key)


class Wire:
    """A TCP connection to the coordinator that can be cut, frozen and mended."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._running = asyncio.Event()
        self._running.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def cut(self) -> None:
        """Breaks every connection and lets none in."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.transport.abort()
        await self._server.wait_closed()

    def freeze(self) -> None:
        """Drops all packets silently."""
        self._running.clear()

    def thaw(self) -> None:
        """What waited gets through."""
        self._running.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there_writer)
        for ways in ((reader, there_writer), (there_reader, writer)):
            task = asyncio.create_task(self._pump(*ways))
            self._tasks.add(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._running.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.transport.abort()


class Asker:
    """Asks the coordinator what a client would."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def tokens(self, keys: Sequence[ChunkKey] = KEYS) -> dict[str, int]:
        async with rpc.open_channel(self.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)
            request = LookupRequest(prompt=by_keys(keys))
            response = await cache.Lookup(request, timeout=WAIT_SECONDS, wait_for_ready=True)
        return {holder.instance_id: holder.matched_token_count for holder in response.holders}

    async def instances(self) -> list[Instance]:
        async with rpc.open_channel(self.address) as channel:
            registry: Any = registry_service_pb2_grpc.RegistryServiceStub(channel)
            response = await registry.ListInstances(ListInstancesRequest(), timeout=WAIT_SECONDS)
        return list(response.instances)

    async def until(self, expected: dict[str, int], keys: Sequence[ChunkKey] = KEYS) -> None:
        """Waits until a lookup gives just this."""
        await eventually(partial(self.tokens, keys), expected)

    async def until_complete(self) -> None:
        """Waits until the coordinator does not call its lookups partial any more."""
        async with rpc.open_channel(self.address) as channel:
            cache: Any = cache_service_pb2_grpc.CacheServiceStub(channel)

            async def is_partial() -> bool:
                request = LookupRequest(prompt=by_keys(KEYS))
                response = await cache.Lookup(request, timeout=WAIT_SECONDS, wait_for_ready=True)
                return not response.is_complete

            await eventually(is_partial, expected=False)
