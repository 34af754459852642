"""Stores on loopback, and what coordinators that share one know."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Self

from lmkv.config.remote_url import parse_remote_url
from lmkv.keys import ChunkKey, join_keys
from lmkv_client.demo.process import free_port
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.coordinator.layout_store.records import ChunkOwner
from lmkv_server.coordinator.layout_store.valkey_client import ValkeyClient
from tests.support.redis_server import RedisServer
from tests.waiting import until as until
from tests.waiting import wait_until

TIER = 2


def chunks_of(name: str, count: int, tokens: int = 16) -> dict[ChunkKey, int]:
    """A number of chunks that only this owner holds."""
    return {ChunkKey(sha256(f"{name}/{number}".encode()).digest()[:16]): tokens for number in range(count)}


def held(coordinator: Coordinator, instance_id: str, keys: Sequence[ChunkKey], tenant: str = "") -> set[ChunkKey]:
    """Which of the chunks a coordinator knows an instance to hold."""
    mask = coordinator.tenants.of(tenant).core.layout.held_mask(instance_id, 0, join_keys(keys))
    return {key for key, is_held in zip(keys, mask, strict=True) if is_held}


def knows(coordinator: Coordinator, instance_id: str, chunks: dict[ChunkKey, int], tenant: str = "") -> bool:
    """Whether a coordinator knows just these chunks of an instance, with their tokens, and has no doubt of it."""
    layout = coordinator.tenants.of(tenant).core.layout
    instance = coordinator.tenants.of(tenant).core.instances.find(instance_id)
    count = sum(layout.chunk_counts(instance_id).values())
    return (
        instance is not None
        and instance.synced
        and count == len(chunks)
        and all(layout.match_at(instance_id, 0, key) == (1, tokens) for key, tokens in chunks.items())
    )


def is_partial(coordinator: Coordinator, tenant: str = "") -> bool:
    """Whether a coordinator says of itself that it may know too little."""
    return coordinator.tenants.of(tenant).core.is_partial(time.monotonic())


async def connected(url: str) -> ValkeyClient:
    """A store for a test's own words to it."""
    store = ValkeyClient(parse_remote_url(url), held_seconds=60)
    await store.connect()
    return store


def names_in_shard(shard: int, count: int) -> list[str]:
    """Ids of instances that are in one shard."""
    found: list[str] = []
    number = 0
    while len(found) < count:
        number += 1
        if ChunkOwner("", f"node-{number}").shard == shard:
            found.append(f"node-{number}")
    return found


def _serves_cluster(server: RedisServer) -> bool:
    with server.client() as client:
        return bool(client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")


class RedisCluster:
    """Three `redis-server` processes that share the slots among them; one that is restarted is empty."""

    def __init__(self, folder: Path) -> None:
        self.servers: list[RedisServer] = []
        for number in range(3):
            (folder / str(number)).mkdir()
            arguments = [
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "1000",
                "--dir",
                str(folder / str(number)),
            ]
            self.servers.append(RedisServer(*arguments, "--cluster-port", str(free_port())))
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for server in self.servers:
                stack.enter_context(server)
            addresses = [f"127.0.0.1:{server.port}" for server in self.servers]
            command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            # Some learn a second later that all are there.
            wait_until(lambda: all(map(_serves_cluster, self.servers)), "the cluster is up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        return self.servers[0].url
