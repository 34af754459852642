"""The fleet: two coordinators, four nodes, and between any two of them a link that can be in trouble.

If the coordinators share a layout map there is a store, too, which each of them calls by a link.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.chaos.clock import Clock, compiled
from tests.chaos.disks import Disks
from tests.chaos.link import Link
from tests.chaos.relay import CoordinatorRelay, PeerRelay
from tests.chaos.store import Store
from tests.chaos.tap import Tap
from tests.chaos.victim import Coordinator, Node, Place, Victim

CHANNELS = {"node-1": "auto", "node-2": "auto", "node-3": "tcp", "node-4": "nixl"}
"""Bytes go by shared memory, sockets and NIXL; between the last two not at all."""
WITH_DISK = ("node-1", "node-3")
COORDINATORS = ("coordinator-1", "coordinator-2")
STORE = "store"


class Fleet:
    """A context manager that starts everything, and leaves nothing. `folder`'s path must be short, for sockets."""

    def __init__(self, folder: Path, logs: Path, *, shares_map: bool, tap: Tap | None = None) -> None:
        self.shares_map = shares_map
        """Whether there is a store where the coordinators share a layout map."""
        self._tap = tap or Tap()
        self._folder = folder
        self._logs = logs
        self._stack = AsyncExitStack()
        self.links: dict[str, Link] = {}
        """By `CALLER>OTHER`."""
        self.relays: dict[str, CoordinatorRelay] = {}
        self.nodes: list[Node] = []
        self.coordinators: list[Coordinator] = []
        self.stores: list[Store] = []
        self.disks = Disks(WITH_DISK, folder, logs)
        self.clocks_jump = False
        self._peer_addresses: dict[tuple[str, str], str] = {}
        self._byte_addresses: dict[tuple[str, str], str] = {}

    @property
    def victims(self) -> dict[str, Victim]:
        """All processes, by name."""
        return {victim.name: victim for victim in (*self.nodes, *self.coordinators, *self.stores)}

    def links_of(self, node: str) -> list[Link]:
        return [link for name, link in self.links.items() if node in name.split(">")]

    async def __aenter__(self) -> Self:
        try:
            await self._build()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def end(self) -> None:
        """Stops all processes. Raises `Hangs` if one does not end."""
        await asyncio.gather(*(victim.end() for victim in self.victims.values()))

    async def _build(self) -> None:
        library = compiled(self._folder)
        self.clocks_jump = library is not None
        self._stack.enter_context(self.disks)
        if self.shares_map:
            store = Store(STORE, self._logs, Clock(library, self._folder / f"{STORE}.clock"))
            self.stores.append(store)
            self._start(store)
            await asyncio.to_thread(store.wait_ready)
        for name in COORDINATORS:
            clock = Clock(library, self._folder / f"{name}.clock")
            coordinator = Coordinator(name, self._logs, clock, await self._sharing(name), self._tap)
            self.coordinators.append(coordinator)
            self._start(coordinator)
            to_coordinator = self._tap.relay_channel(f"127.0.0.1:{coordinator.port}", name)
            relay = CoordinatorRelay(to_coordinator, lambda node, peer: self._peer_addresses[node, peer])
            self.relays[name] = await self._stack.enter_async_context(relay)
        for coordinator in self.coordinators:
            await asyncio.to_thread(coordinator.server.wait_ready)
        for name, channel in CHANNELS.items():
            self.nodes.append(await self._node(name, channel, Clock(library, self._folder / f"{name}.clock")))
        for node in self.nodes:
            to_node = self._tap.relay_channel(f"127.0.0.1:{node.port}", node.name)
            relay_of_peer = PeerRelay(to_node, partial(self._bytes_address, node.name))
            port = (await self._stack.enter_async_context(relay_of_peer)).port
            for peer in self.nodes:
                if peer is not node:
                    link = await self._link(peer.name, node.name)
                    self._peer_addresses[peer.name, node.name] = await link.open_door(port)
                    self._byte_addresses[peer.name, node.name] = await link.open_door(node.bytes_port)
        for node in self.nodes:
            self._start(node)

    async def _sharing(self, coordinator: str) -> dict[str, str]:
        """The configuration of the shared store for a coordinator, if there is one."""
        for store in self.stores:
            door = await (await self._link(coordinator, store.name)).open_door(store.port)
            return {"LAYOUT_MAP_URL": f"redis://{door}/0"}
        return {}

    async def _node(self, name: str, channel: str, clock: Clock) -> Node:
        doors = [
            await (await self._link(name, coordinator)).open_door(relay.port)
            for coordinator, relay in self.relays.items()
        ]
        place = Place(
            name=name,
            channel=channel,
            runtime_dir=self._folder,
            logs=self._logs,
            coordinator_addresses=",".join(doors),
        )
        return Node(place, self.disks, clock, self._tap)

    async def _link(self, name: str, other: str) -> Link:
        link = await self._stack.enter_async_context(Link(f"{name}>{other}"))
        self.links[link.name] = link
        return link

    def _start(self, victim: Victim) -> None:
        victim.start()
        self._stack.callback(victim.process.kill)

    def _bytes_address(self, owner: str, reader: str) -> str:
        return self._byte_addresses[reader, owner]
