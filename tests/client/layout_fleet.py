"""A coordinator and nodes whose layout map is compared with indexes built from its events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_client import Coordinator as Client
from lmkv_client.kv_events import MEDIA
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.node.node import Node
from tests.client.event_consumers import Index, Subscriber
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.support.specs import small_spec

SPEC = small_spec()
CAPACITY = 30
"""Chunks in each pool."""


class Fleet:
    """A coordinator and nodes with small pools, which restart; an engine at each stores chunks."""

    def __init__(self, folder: Path, names: tuple[str, ...], capacity: int = CAPACITY) -> None:
        """`capacity`: chunks in each pool."""
        self._folder = folder
        self._capacity = capacity
        self._names = names
        self._nodes: dict[str, AsyncExitStack] = {}
        self.engines: dict[str, EngineClient] = {}
        self.address = ""

    async def __aenter__(self) -> Fleet:
        self._coordinator = await Coordinator(CoordinatorConfig(port=0, http_port=OFF)).__aenter__()
        self.address = self._coordinator.address
        for name in self._names:
            await self._start(name)
        return self

    async def __aexit__(self, *_: object) -> None:
        for stack in self._nodes.values():
            await stack.aclose()
        await self._coordinator.__aexit__(None, None, None)

    async def _start(self, name: str) -> None:
        stack = self._nodes[name] = AsyncExitStack()
        disk = self._folder / f"{name}-disk"
        node = await stack.enter_async_context(
            Node(
                node_config(
                    self._folder,
                    name,
                    coordinator_address=(self.address,),
                    enable_p2p=False,
                    max_local_cpu_size=f"{self._capacity * SPEC.chunk_bytes}B",
                    **({"local_disk": str(disk), "max_local_disk_size": "1MiB"} if name == self._names[0] else {}),
                )
            )
        )
        self.engines[name] = await stack.enter_async_context(EngineClient(node, "engine", SPEC))

    async def restart(self, name: str) -> None:
        """The node ends, and starts with an empty pool."""
        await self._nodes.pop(name).aclose()
        await self._start(name)

    async def restart_coordinator(self, meanwhile: Callable[[], Awaitable[None]] | None = None) -> None:
        """The coordinator ends, and starts at the same address with an empty map, after `meanwhile`."""
        port = self._coordinator.port
        await self._coordinator.__aexit__(None, None, None)
        if meanwhile:
            await meanwhile()
        self._coordinator = await Coordinator(CoordinatorConfig(port=port, http_port=OFF)).__aenter__()

    async def map(self) -> Index:
        """What the coordinator's map has, as it sends it to a new watcher."""
        held: Index = set()
        async with Client(self.address) as client:
            async for one in client.watch():
                for part in one.changes:
                    held |= {(f"kv@{part.instance_id}@small", MEDIA[part.tier], key) for key in part.admitted_keys}
                if not one.snapshot:
                    return held
        raise AssertionError("the watch ended")


async def drift(fleet: Fleet, consumer: Subscriber) -> Index:
    consumer.check()
    return consumer.index ^ await fleet.map()


async def has(fleet: Fleet, one: tuple[str, str | None, bytes]) -> bool:
    """Whether the map has a chunk."""
    return one in await fleet.map()
