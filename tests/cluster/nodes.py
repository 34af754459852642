"""Engines without vLLM at the nodes of a cluster: they store and load chunks through the sockets of hosts' folders."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lmkv.pool.pool import Pool
from lmkv.pool.socket import attach
from tests.cluster.cluster import Cluster
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count
from tests.server.node.whole_nodes import SPEC, load, store

RUNTIME = "/run/lmkv/prod-demo-lmkv"
ANSWER_SECONDS = 60.0


@asynccontextmanager
async def attached(cluster: Cluster, host: str) -> AsyncIterator[tuple[EngineClient, Pool]]:
    """An engine at the node of a host, and the pool that they share."""
    folder = cluster.places.of_host(host, RUNTIME)

    async def listens() -> bool:
        return (folder / host / "engine.sock").is_socket()

    await cluster.wait_for(listens, f"the node of {host} listens")
    async with EngineClient(folder / host / "engine.sock", spec=SPEC, answer_seconds=ANSWER_SECONDS) as engine:
        socket = folder / Path(engine.welcomed.pool_socket).relative_to("/run/lmkv")
        with attach(str(socket), engine.engine_id, 0, engine.welcomed.epoch, ANSWER_SECONDS) as mapped:
            yield engine, mapped.pool


async def store_at(cluster: Cluster, host: str, first: int, count: int) -> None:
    """Stores chunks whose every word is their number."""
    async with attached(cluster, host) as (engine, pool):
        await store(engine, pool, *range(first, first + count))


async def load_at(cluster: Cluster, host: str, first: int, count: int) -> int:
    """Loads chunks at a node and checks every word; returns how many of them were not in its own memory."""
    async with attached(cluster, host) as (engine, pool):
        found = await engine.lookup("1", chunk_keys(*range(first, first + count)))
        held, elsewhere = len(found.own), absent_count(found)
        assert held + elsewhere == count, f"{host} finds {held} chunks in its memory and {elsewhere} elsewhere"
        numbers = await load(engine, pool, "1", held, count - held) if elsewhere else []
        assert numbers == list(range(first + held, first + count)), numbers
        await engine.release("1")
        return elsewhere
