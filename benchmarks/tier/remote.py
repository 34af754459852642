"""The remote tier with a store on this host, beside the bare client on as many threads.

`bare` is the client's `set` and `get` of the same objects, and a copy into the pool. `encrypted` is `tier` with
`encryption_key_file`. S3 is moto's server, written in Python: it shows what the tier costs, not how fast S3 is.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import valkey
from botocore.config import Config
from botocore.session import get_session

from benchmarks.support.command import BenchmarkRun
from benchmarks.support.encryption import encryption_in
from benchmarks.support.redis import RedisProcess
from benchmarks.tier.passes import TIMEOUT_SECONDS, Chunks, Passes, through
from lmkv.config.remote_url import parse_remote_url
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.tiers.encryption import ChunkEncryption
from lmkv_server.node.tiers.remote.backend import READ_THREADS, WRITE_THREADS
from lmkv_server.node.tiers.remote.s3 import S3Store
from lmkv_server.node.tiers.remote.store import RemoteStore
from lmkv_server.node.tiers.remote.tier import RemoteTier
from lmkv_server.node.tiers.remote.valkey import ValkeyStore

SIZES = {"1mib": 1 << 20, "8mib": 8 << 20}
SIZE_BYTES = {"redis": 256 << 20, "s3": 64 << 20}
BUCKET = "chunks"


@dataclass(frozen=True, kw_only=True, slots=True)
class BareClient:
    """A store's client, and lmkv's store for the same server."""

    put: Callable[[str, memoryview], object]
    get: Callable[[str], bytes]
    remove: Callable[[str], object]
    store: Callable[[], RemoteStore]


def measure(run: BenchmarkRun, rounds: int) -> None:
    """Adds rows for each store and each size of chunks. In a round, each way follows the bare client."""
    for name, serve in (("redis", _redis), ("s3", _s3)):
        with serve(run) as client:
            for size_name, chunk_bytes in SIZES.items():
                run.say(f"{name}: chunks of {chunk_bytes >> 20} MiB")
                passes = Passes()
                with Chunks(chunk_bytes, SIZE_BYTES[name]) as chunks:
                    for _ in range(rounds):
                        _bare(chunks, client, passes)
                        for way, encryption in (("tier", None), ("encrypted", encryption_in(run.folder))):
                            tier = _tier(chunks, client.store(), encryption)
                            asyncio.run(through(tier, chunks, passes, way))
                run.add(*passes.rows(name, size_name))


def _tier(chunks: Chunks, store: RemoteStore, encryption: ChunkEncryption | None) -> RemoteTier:
    return RemoteTier(
        store,
        HostCache(pool=chunks.pool, tier=chunks.tier, events=CacheEvents()),
        lookup_seconds=TIMEOUT_SECONDS,
        encryption=encryption,
    )


def _bare(chunks: Chunks, client: BareClient, passes: Passes) -> None:
    indices = range(len(chunks.keys))

    def read(index: int) -> None:
        chunks.part(index)[:] = client.get(str(index))

    with ThreadPoolExecutor(WRITE_THREADS) as threads, passes.timed("bare", "write", chunks.size_bytes):
        list(threads.map(lambda index: client.put(str(index), chunks.part(index)), indices))
    with ThreadPoolExecutor(READ_THREADS) as threads, passes.timed("bare", "read", chunks.size_bytes):
        list(threads.map(read, indices))
    for index in indices:
        client.remove(str(index))


@contextmanager
def _redis(run: BenchmarkRun) -> Iterator[BareClient]:
    with RedisProcess(run.logs) as redis:
        client: Any = valkey.Valkey(port=redis.port)
        url = parse_remote_url(redis.url)
        yield BareClient(
            put=client.set,
            get=client.get,
            remove=client.delete,
            store=lambda: ValkeyStore(url, timeout_seconds=TIMEOUT_SECONDS),
        )
        client.close()


@contextmanager
def _s3(_run: BenchmarkRun) -> Iterator[BareClient]:
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    command = [sys.executable, "-m", "tests.server.node.s3_server"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout
        endpoint_url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        config = Config(
            max_pool_connections=16,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        client: Any = get_session().create_client(
            "s3", endpoint_url=endpoint_url, region_name="us-east-1", config=config
        )
        client.create_bucket(Bucket=BUCKET)
        url = parse_remote_url(f"s3://{BUCKET}")
        yield BareClient(
            put=lambda name, memory: client.put_object(Bucket=BUCKET, Key=name, Body=bytes(memory)),
            get=lambda name: bytes(client.get_object(Bucket=BUCKET, Key=name)["Body"].read()),
            remove=lambda name: client.delete_object(Bucket=BUCKET, Key=name),
            store=lambda: S3Store(url, endpoint_url=endpoint_url, timeout_seconds=TIMEOUT_SECONDS),
        )
        client.close()
    finally:
        process.kill()
        process.communicate()
