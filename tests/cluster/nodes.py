"""Engines without vLLM at the nodes of a cluster: they store and load chunks through the sockets of hosts' folders."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lmkv.pool.pool import Pool
from lmkv.pool.socket import attach
from lmkv.v1 import engine_service_pb2 as pb
from tests.cluster.cluster import Cluster
from tests.server.node.cases import chunk_keys
from tests.server.node.engine_client import EngineClient, absent_count, runs
from tests.server.node.whole_nodes import SPEC, load, store

RUNTIME = "/run/lmkv/prod-demo-lmkv"
ANSWER_SECONDS = 60.0


class Missed(AssertionError):
    """Chunks or a prompt that should hit, and did not."""


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


async def load_at(cluster: Cluster, host: str, first: int, count: int) -> dict[str, int]:
    """Loads chunks at a node and checks every word. Returns the number in each tier of which its own memory is none.

    Looks them up until all are found, because nodes and coordinators report chunks in the background. Raises `Missed`
    if some are not found.
    """
    keys = chunk_keys(*range(first, first + count))
    numbers = itertools.count(1)
    ticket, found = "", pb.FoundChunks()
    async with attached(cluster, host) as (engine, pool):

        async def all_found() -> bool:
            nonlocal ticket, found
            if ticket:
                await engine.release(ticket)
            ticket = str(next(numbers))
            found = await engine.lookup(ticket, keys)
            return len(found.own) + absent_count(found) == count

        await cluster.wait_for(all_found, f"{host} finds {count} chunks", error=Missed)
        held, elsewhere = len(found.own), runs(found)
        loaded = await load(engine, pool, ticket, held, count - held) if elsewhere else []
        if loaded != list(range(first + held, first + count)):
            raise Missed(f"{host} loaded {loaded} of {elsewhere}")
        await engine.release(ticket)
        return elsewhere
