"""Servers and clients that have ended, or were refused at their start, keep nothing open.

No file, socket, thread, task or mapping of shared memory is left. All that they had is still referred to, so that what
is only forgotten counts as open; and each part of it can be closed again, which changes nothing.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import mmap
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from lmkv.config import CoordinatorConfig, PickerConfig, ProxyConfig
from lmkv.errors import ConfigError
from lmkv.runtime.folder import Folder
from lmkv_client.engine.extent import Extent, MappedPool
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.http.server import HttpOptions, HttpServer
from lmkv_server.node.instance_lock import InstanceLock
from lmkv_server.node.node import Node
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.proxy import Proxy
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.server.node.whole_nodes import load, store
from tests.server.test_interruptions import (
    Engines,
    OfHttp,
    Operators,
    Peers,
    Pickers,
    Proxies,
    Sessions,
    Webhook,
    Webhooks,
    lookup,
    lookup_stream,
    watch,
)
from tests.support.held import opened, reachable, tasks
from tests.support.redis_server import RedisServer
from tests.waiting import WAIT_SECONDS, until

LEFT_OPEN_SECONDS = 10.0
OTHER_FILES = 64
OF_OTHERS = ("thread asyncio_", "anon_inode:")
"""What the event loop ends itself, and the pollers of gRPC, whose number varies."""
ENDS = ("aclose", "cancel", "close", "disconnect", "shutdown", "stop", "__exit__", "__aexit__")
BY_REFERENCE = (Extent, Folder, Future, MappedPool, memoryview, mmap.mmap)
"""What is closed with its last reference, since calls on other threads may still use it."""


class TcpPeers(Peers):
    """Nodes whose channel leaves nothing to the libraries that it uses."""

    transfer_channel = "tcp"


class OfStore:
    """A node with a remote store, which an engine has used."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack

    async def start(self, folder: Path) -> None:
        server = self._stack.enter_context(RedisServer())
        config = node_config(folder, "n", remote_url=server.url, remote_lookup_timeout=20.0)
        self.node = await self._stack.enter_async_context(Node(config))
        async with EngineClient(self.node) as engine:
            await store(engine, self.node.pool, 0, 1, 2)
            await until(lambda: len(server.names()) == 3)
            self.node.tier.drop(chunk_keys(0, 1, 2))
            await engine.lookup("request", chunk_keys(0, 1, 2))
            assert await load(engine, self.node.pool, "request", 0, 3) == [0, 1, 2]

    def roots(self) -> tuple[object, ...]:
        return (self.node,)


USES: dict[type[Any], tuple[Callable[[Any], Awaitable[object]], ...]] = {
    Operators: (lookup, lookup_stream, watch),
    OfHttp: (OfHttp.lookup, OfHttp.watch),
    TcpPeers: (Peers.fetch, Peers.hand),
    Engines: (Engines.use, Engines.lend),
    Sessions: (Sessions.use,),
    OfStore: (),
    Proxies: (Proxies.stream,),
    Pickers: (Pickers.pick,),
    Webhooks: (Webhooks.mutate,),
}


def can_be_closed(one: object) -> bool:
    """Whether its owner has to close it."""
    return not isinstance(one, BY_REFERENCE) and any(hasattr(one, name) for name in ENDS)


@asynccontextmanager
async def used(kind: type[Any], folder: Path) -> AsyncIterator[list[object]]:
    """A fleet that was used; yields all that it refers to."""
    async with AsyncExitStack() as stack:
        fleet = kind(stack)
        await fleet.start(folder)
        for use in USES[kind]:
            await use(fleet)
        yield [one for one in reachable(*fleet.roots()) if can_be_closed(one)]


async def close_again(parts: Iterable[object]) -> None:
    """Closes all that is of lmkv. Numbers of files that it had are those of others by now."""
    others = [os.open(os.devnull, os.O_RDONLY) for _ in range(OTHER_FILES)]
    for one in parts:
        for close in filter(None, (getattr(one, name, None) for name in ("aclose", "close"))):
            if type(one).__module__.partition(".")[0].startswith("lmkv") and not needs_arguments(close):
                ending = close()
                if inspect.isawaitable(ending):
                    await asyncio.wait_for(ending, WAIT_SECONDS)
    for file in others:
        os.close(file)  # fails if it was closed


def needs_arguments(method: Callable[..., object]) -> bool:
    return any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(method).parameters.values()
    )


def all_open() -> Counter[str]:
    counts = opened() + tasks()
    return Counter({name: count for name, count in counts.items() if not any(each in name for each in OF_OTHERS)})


def watched_in_vain() -> list[int]:
    """Closed files that the event loop still watches: it would watch another file of that number instead."""
    loop: Any = asyncio.get_running_loop()
    return [number for number in loop._selector.get_map() if not Path(f"/proc/self/fd/{number}").exists()]


@pytest.mark.parametrize("kind", USES, ids=lambda kind: kind.__name__)
async def test_nothing_stays_open(runtime_dir: Path, kind: type[Any]) -> None:
    folders = [runtime_dir / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    async with used(kind, folders[0]):  # what libraries open once, for the whole process
        pass
    gc.collect()
    before = all_open()
    async with used(kind, folders[1]) as kept:
        pass
    with suppress(AssertionError):  # which would name what was open at first
        await until(lambda: not all_open() - before, timeout_seconds=LEFT_OPEN_SECONDS)
    assert not all_open() - before
    assert not watched_in_vain()
    assert kept
    await close_again(kept)
    assert not all_open() - before


def refused_disk(folder: Path, port: int) -> Node:
    """The second folder of its disk is a link."""
    (folder / "link").symlink_to(folder)
    return Node(node_config(folder, "n", local_disk=f"{folder}/disk,{folder}/link", max_local_disk_size="64MB"))


def refused_socket(folder: Path, port: int) -> Node:
    config = node_config(folder, "n")
    config.engine_socket.mkdir(parents=True)
    return Node(config)


ENGINES = ("http://127.0.0.1:1",)
REFUSED: dict[str, Callable[[Path, int], AbstractAsyncContextManager[object]]] = {
    "node, disk": refused_disk,
    "node, socket": refused_socket,
    "node, p2p_port": lambda folder, port: Node(node_config(folder, "n", p2p_port=port)),
    "node, metrics_port": lambda folder, port: Node(node_config(folder, "n", metrics_port=port)),
    "coordinator, port": lambda _, port: Coordinator(CoordinatorConfig(port=port, http_port=0)),
    "coordinator, http_port": lambda _, port: Coordinator(CoordinatorConfig(port=0, http_port=port)),
    "proxy, port": lambda _, port: Proxy(ProxyConfig(port=port, engines=ENGINES)),
    "picker, port": lambda _, port: Picker(PickerConfig(port=port, metrics_port=0, engines=ENGINES)),
    "picker, metrics_port": lambda _, port: Picker(PickerConfig(port=0, metrics_port=port, engines=ENGINES)),
}


async def refuse(kind: str, folder: Path) -> BaseException:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError) as refused:
        async with REFUSED[kind](folder, taken.getsockname()[1]):
            pass
    return refused.value  # it refers to all that was made


@pytest.mark.parametrize("kind", REFUSED)
async def test_a_server_that_is_refused_at_its_start_leaves_nothing_open(runtime_dir: Path, kind: str) -> None:
    folders = [runtime_dir / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    await refuse(kind, folders[0])  # what libraries open once, for the whole process
    gc.collect()
    before = all_open()
    refused = await refuse(kind, folders[1])
    with suppress(AssertionError):
        await until(lambda: not all_open() - before, timeout_seconds=LEFT_OPEN_SECONDS)
    assert not all_open() - before, refused


def test_a_node_whose_instance_id_is_taken_leaves_no_file_open(runtime_dir: Path) -> None:
    with Folder.private(runtime_dir / "n", "runtime_dir") as folder, InstanceLock(folder, "n"):
        before = opened()
        with pytest.raises(ConfigError, match="already run by process") as refused:
            InstanceLock(folder, "n")
        assert not opened() - before, refused.value


async def test_a_server_that_was_never_started_frees_its_port() -> None:
    server = HttpServer(Webhook(), HttpOptions(host="127.0.0.1", port=0))
    await server.aclose()
    HttpServer(Webhook(), HttpOptions(host="127.0.0.1", port=server.port))._listener.close()
