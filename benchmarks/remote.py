"""Throughput of the remote tier: write-behind, and reads into the pool: `python -m benchmarks.remote`.

Chunks of random bytes in a pool, a store on loopback, the whole tier in between. `client` is what the bare client makes
of the same objects on as many threads: `set` and `get`, and a copy into the pool. S3 is moto's server, written in
Python: what it says is how much the tier takes beside it, not how fast S3 is. `encrypted` is the tier with
`encryption_key_file`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import valkey
from botocore.config import Config
from botocore.session import get_session

from benchmarks.support.encryption import encryption_in
from benchmarks.support.redis import RedisProcess
from lmkv.config.remote_url import parse_remote_url
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv.units import GIB
from lmkv_kernels import checksum
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.tiers.base import Needs, Selection
from lmkv_server.node.tiers.encryption.chunks import ChunkEncryption
from lmkv_server.node.tiers.remote.backend import READ_THREADS, WRITE_THREADS
from lmkv_server.node.tiers.remote.s3 import S3Store
from lmkv_server.node.tiers.remote.store import RemoteStore
from lmkv_server.node.tiers.remote.tier import RemoteTier
from lmkv_server.node.tiers.remote.valkey import ValkeyStore

TIMEOUT_SECONDS = 120.0
BUCKET = "chunks"


def spec_of(chunk_bytes: int) -> KvSpec:
    """A spec whose full chunks have this size."""
    return KvSpec(
        model_name="bench",
        model_id="bench",
        kv_dtype="float32",
        layer_count=1,
        kv_head_count=1,
        head_size=chunk_bytes // (2 * 16 * 4),
        chunk_size=16,
        format=NATIVE_TILES,
        tile_backend="BENCH",
        block_size=16,
        vocab_size=1000,
    )


class RemoteBench:
    """A full pool, and the events that a node sends to its remote tier."""

    def __init__(self, chunk_count: int, chunk_bytes: int) -> None:
        self.spec = spec_of(chunk_bytes)
        assert self.spec.chunk_bytes == chunk_bytes
        self.keys = [ChunkKey(index.to_bytes(16, "big")) for index in range(chunk_count)]
        self.names = [str(index) for index in range(chunk_count)]
        self.pool = Pool.create(chunk_count * chunk_bytes)
        self.pool.populate()
        self.pool.buffer[:] = np.random.default_rng(0).bytes(len(self.pool.buffer))
        self.tier = HostTier(self.pool.size_bytes)

    @property
    def size_bytes(self) -> int:
        """Of all chunks."""
        return len(self.keys) * self.spec.chunk_bytes

    def part(self, index: int) -> memoryview:
        """The memory of one chunk."""
        return self.pool.buffer[index * self.spec.chunk_bytes : (index + 1) * self.spec.chunk_bytes]

    def fill(self) -> None:
        """Commits every chunk."""
        for key in self.keys:
            reserved = self.tier.reserve(self.spec.chunk_bytes)
            assert reserved
            self.tier.commit(
                reserved.offset,
                key=key,
                fingerprint=self.spec.fingerprint,
                size_bytes=self.spec.chunk_bytes,
                checksum=checksum(self.pool.buffer, reserved.offset, self.spec.chunk_bytes),
                token_count=self.spec.chunk_size,
            )


@contextmanager
def timed(label: str, size_bytes: int) -> Iterator[None]:
    """Prints the throughput of the block."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    size = size_bytes / GIB
    print(f"{label:36} {size / wall:6.2f} GB/s {cpu / size:6.2f} cpu s/GB", flush=True)


async def through_tier(bench: RemoteBench, store: RemoteStore, encryption: ChunkEncryption | None = None) -> None:
    """Puts and reads by a remote tier."""
    label = "encrypted" if encryption else "tier"
    remote = RemoteTier(
        store,
        tier=bench.tier,
        pool=bench.pool,
        events=CacheEvents(),
        lookup_seconds=TIMEOUT_SECONDS,
        encryption=encryption,
    )
    async with remote:
        await remote.backend.health.attempted.wait()
        bench.fill()
        with timed(f"{label}: write-behind", bench.size_bytes):
            for chunk in bench.tier:
                remote.writer.add(chunk)
            await remote.writer.flush()
        assert remote.stats().written_chunks == len(bench.keys), "not all were put"
        bench.tier.drop(bench.keys)
        needs = Needs(spec=bench.spec, keys=bench.keys, indices=range(len(bench.keys)))
        began = time.perf_counter()
        assert (await remote.lookup(needs)).run_from(0) == len(bench.keys)
        print(f"{label + ': looked up':36} {1000 * (time.perf_counter() - began):6.1f} ms")
        came: list[int] = []
        with timed(f"{label}: read, verify, commit", bench.size_bytes):
            await remote.reader.read(bench.spec.fingerprint, bench.keys, TIMEOUT_SECONDS, lambda at, _: came.append(at))
        assert len(came) == len(bench.keys), "not all came"
        bench.tier.drop(bench.keys)
        await remote.drop(Selection())


def bare(bench: RemoteBench, put: Callable[[str, memoryview], object], get: Callable[[str], bytes]) -> None:
    """Puts and gets the same objects with the bare client, and nothing else."""

    def read(index: int) -> None:
        bench.part(index)[:] = get(bench.names[index])

    with ThreadPoolExecutor(WRITE_THREADS) as threads, timed("client: put", bench.size_bytes):
        list(threads.map(lambda index: put(bench.names[index], bench.part(index)), range(len(bench.names))))
    with ThreadPoolExecutor(READ_THREADS) as threads, timed("client: get, copy", bench.size_bytes):
        list(threads.map(read, range(len(bench.names))))


def of_redis(bench: RemoteBench) -> None:
    """Measures `redis-server`."""
    with tempfile.TemporaryDirectory() as folder, RedisProcess(Path(folder)) as redis:
        client: Any = valkey.Valkey(port=redis.port)
        bare(bench, client.set, client.get)
        client.flushall()
        for encryption in (None, encryption_in(Path(folder))):
            store = ValkeyStore(parse_remote_url(redis.url), timeout_seconds=TIMEOUT_SECONDS)
            asyncio.run(through_tier(bench, store, encryption))
        client.close()


def of_s3(bench: RemoteBench) -> None:
    """Measures moto's S3 server."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.server.node.s3_server"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
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
        bare(
            bench,
            lambda name, memory: client.put_object(Bucket=BUCKET, Key=name, Body=bytes(memory)),
            lambda name: bytes(client.get_object(Bucket=BUCKET, Key=name)["Body"].read()),
        )
        url = parse_remote_url(f"s3://{BUCKET}")
        with tempfile.TemporaryDirectory() as folder:
            for encryption in (None, encryption_in(Path(folder))):
                store = S3Store(url, endpoint_url=endpoint_url, timeout_seconds=TIMEOUT_SECONDS)
                asyncio.run(through_tier(bench, store, encryption))
        client.close()
    finally:
        process.kill()
        process.communicate()


def main() -> None:
    """Measures each store with each size of chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256, help="MiB to put and read each time")
    size = parser.parse_args().size
    os.environ |= {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    for label, run in (("Redis", of_redis), ("S3", of_s3)):
        for mib in (1, 8):
            print(f"--- {label}, chunks of {mib} MiB")
            bench = RemoteBench(size // mib, mib << 20)
            run(bench)
            bench.pool.close()


if __name__ == "__main__":
    main()
