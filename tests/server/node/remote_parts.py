"""Real stores on loopback, and host tiers over real pools that share one."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from botocore.config import Config
from botocore.session import get_session

from lmkv.config.remote_url import parse_remote_url
from lmkv.pool.pool import Pool
from lmkv_kernels import checksum
from lmkv_server.node.cache.allocator import align
from lmkv_server.node.cache.build import HostCache
from lmkv_server.node.cache.events import CacheEvents
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.tiers.base import Needs, Selection
from lmkv_server.node.tiers.codec import ChunkCodec
from lmkv_server.node.tiers.encryption import ChunkEncryption
from lmkv_server.node.tiers.remote.folder import FolderStore
from lmkv_server.node.tiers.remote.s3 import S3Store
from lmkv_server.node.tiers.remote.store import ROOT as PLAIN_ROOT
from lmkv_server.node.tiers.remote.store import RemoteStore, object_name
from lmkv_server.node.tiers.remote.sweeper import FolderLimits
from lmkv_server.node.tiers.remote.tier import STORE_TIMES, RemoteTier
from tests.server.node.cases import chunk_key, chunk_keys, put
from tests.server.node.disk_parts import RANDOM, WAIT_SECONDS, Chunks, until
from tests.support.redis_server import Server
from tests.support.specs import small_spec

SPEC = small_spec()
CHUNK_BYTES = SPEC.chunk_bytes
ROOT = Path(__file__).parents[3]
BUCKET = "chunks"
AWS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}


class S3Server(Server):
    """moto's server with one bucket."""

    client: Any

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.server.node.s3_server"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self.process.stdout
        self.port = int(self.process.stdout.readline())
        self.client = get_session().create_client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            config=Config(retries={"total_max_attempts": 1}),
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        self.client.create_bucket(Bucket=BUCKET)

    def kill(self) -> None:
        self.client.close()
        super().kill()

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}/of/tests"

    def store(self, url: str = "", *, timeout_seconds: float = 30.0) -> RemoteStore:
        return S3Store(
            parse_remote_url(url or self.url), endpoint_url=self.endpoint_url, timeout_seconds=timeout_seconds
        )

    def names(self) -> set[str]:
        found = self.client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
        return {each["Key"].removeprefix("of/tests/") for each in found}

    def read(self, name: str) -> bytes:
        return bytes(self.client.get_object(Bucket=BUCKET, Key=f"of/tests/{name}")["Body"].read())

    def replace(self, name: str, content: bytes) -> None:
        self.client.put_object(Bucket=BUCKET, Key=f"of/tests/{name}", Body=content)

    def empty(self) -> None:
        for name in self.names():
            self.client.delete_object(Bucket=BUCKET, Key=f"of/tests/{name}")


class SharedFolder:
    """A folder that nodes share. The paths of its files name what is in it, without the folders of first digits."""

    def __init__(self) -> None:
        self._made = TemporaryDirectory(prefix="lmkv-shared-")
        self.path = Path(self._made.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._made.cleanup()

    @property
    def url(self) -> str:
        return f"file://{self.path}"

    def store(
        self, *, timeout_seconds: float = 30.0, size_bytes: int = 1 << 40, unused_seconds: float = 0.0
    ) -> FolderStore:
        limits = FolderLimits(size_bytes=size_bytes, unused_seconds=unused_seconds)
        return FolderStore(parse_remote_url(self.url), timeout_seconds=timeout_seconds, limits=limits)

    def file(self, name: str) -> Path:
        """The file of an object."""
        folder, _, key = name.rpartition("/")
        return self.path / folder / key[:2] / key

    def names(self) -> set[str]:
        """What has been stored or placed here."""
        files = (path.relative_to(self.path) for path in self.path.rglob("*") if path.is_file())
        return {str(file.parent.parent / file.name) for file in files if file.parts[0] != "lmkv-sweeps"}

    def read(self, name: str) -> bytes:
        return self.file(name).read_bytes()

    def replace(self, name: str, content: bytes) -> None:
        self.file(name).parent.mkdir(parents=True, exist_ok=True)
        self.file(name).write_bytes(content)

    def empty(self) -> None:
        for entry in self.path.iterdir():
            shutil.rmtree(entry)


def padded(server: object, header_bytes: int) -> int:
    """Bytes that the headers of an object take in this store."""
    return align(header_bytes) if isinstance(server, SharedFolder) else header_bytes


class Silent:
    """A port that takes connections and says nothing."""

    def __enter__(self) -> str:
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"redis://127.0.0.1:{self._socket.getsockname()[1]}/0"

    def __exit__(self, *_: object) -> None:
        self._socket.close()


class Host:
    """A pool of a number of chunks whose tier sends its events to the remote tier, as in a node."""

    def __init__(self, chunk_count: int, chunks: Chunks = RANDOM) -> None:
        self.chunks = chunks
        self.pool = Pool.create(chunk_count * CHUNK_BYTES, huge_pages="never")
        self.events = CacheEvents()
        self.tier = HostTier(self.pool.size_bytes, self.events)
        self.cache = HostCache(pool=self.pool, tier=self.tier, events=self.events)
        self.remote: RemoteTier

    def store(self, *numbers: int, token_count: int = SPEC.chunk_size, owner: bytes = b"") -> None:
        """Chunks whose bytes follow from their numbers, each the next one's parent."""
        size_bytes = SPEC.size_bytes(token_count)
        for number in numbers:
            put(
                self.tier,
                chunk_key(number),
                size_bytes,
                fingerprint=self.chunks.spec.fingerprint,
                token_count=token_count,
                parent=chunk_key(number - 1) if number else None,
                pool=self.pool,
                content=self.chunks.content(number, size_bytes),
                owner=owner,
            )

    def drop(self, *numbers: int) -> None:
        """Forgets chunks in host memory."""
        self.tier.drop(chunk_keys(*numbers))

    async def flushed(self) -> None:
        """Waits until everything is put."""
        async with asyncio.timeout(WAIT_SECONDS):
            await self.remote.writer.flush()

    async def count(self, *numbers: int) -> int:
        """How many of the chunks the store has, from the first on."""
        keys = chunk_keys(*numbers)
        return (await self.remote.lookup(Needs(spec=self.chunks.spec, keys=keys, indices=range(len(keys))))).run_from(0)

    async def clear(self, fingerprint: bytes = b"", *, dry_run: bool = False) -> int:
        """Removes all chunks of a spec, or of all; returns how many there were."""
        return (await self.remote.drop(Selection(fingerprint=fingerprint, dry_run=dry_run))).chunk_count

    async def remove(self, *numbers: int) -> int:
        """Removes chunks from the store; returns how many there were."""
        return (
            await self.remote.drop(Selection(keys=chunk_keys(*numbers), specs=[self.chunks.spec.fingerprint]))
        ).chunk_count

    async def read(self, *numbers: int, seconds: float = WAIT_SECONDS) -> list[int]:
        """Reads chunks that are known to be there; those that came, each looked at byte by byte."""
        came: dict[int, Chunk] = {}
        fingerprint = self.chunks.spec.fingerprint
        await self.remote.reader.read(
            fingerprint, chunk_keys(*numbers), seconds, lambda at, chunk: came.update({numbers[at]: chunk})
        )
        for number, chunk in came.items():
            found = bytes(self.pool.buffer[chunk.offset : chunk.offset + chunk.size_bytes])
            assert self.chunks.is_same(found, self.chunks.content(number, chunk.size_bytes))
            assert (chunk.key, chunk.fingerprint) == (chunk_key(number), fingerprint)
            assert chunk.checksum == checksum(found)
            assert SPEC.size_bytes(chunk.token_count) == chunk.size_bytes
            assert chunk.parent == (chunk_key(number - 1) if number else None)
        return sorted(came)

    async def open(self) -> None:
        """Waits until the store can be used."""
        await until(lambda: self.remote.usable)

    def check(self) -> None:
        """Nothing is left over."""
        self.tier.check()
        assert not self.tier.reserved_count
        assert not any(chunk.holds for chunk in self.tier)
        self.remote.backend.check()


@asynccontextmanager
async def host_with(
    store: RemoteStore,
    *,
    chunk_count: int = 32,
    lookup_seconds: float = WAIT_SECONDS,
    ready: bool = True,
    encryption: ChunkEncryption | None = None,
    codec: ChunkCodec | None = None,
    chunks: Chunks = RANDOM,
    quota_chunks: int = 0,
    **seconds: float,
) -> AsyncIterator[Host]:
    """A host tier and a remote tier, whose store can be used if it is to be `ready`."""
    host = Host(chunk_count, chunks)
    try:
        host.remote = RemoteTier(
            store,
            host.cache,
            lookup_seconds=lookup_seconds,
            encryption=encryption,
            codec=codec,
            times=replace(STORE_TIMES, **seconds),
            quota_bytes=quota_chunks * CHUNK_BYTES,
        )
        async with host.remote:
            if ready:
                await host.open()
            yield host
            await until(lambda: not any(chunk.holds for chunk in host.tier))
            host.check()
    finally:
        host.pool.close()


def name_of(number: int, root: str = PLAIN_ROOT) -> str:
    """The name of a chunk in the store."""
    return object_name(SPEC.fingerprint, chunk_key(number), root)


def names_of(*numbers: int, root: str = PLAIN_ROOT) -> set[str]:
    """The names of chunks in the store."""
    return {name_of(number, root) for number in numbers}
