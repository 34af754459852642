"""The two ends of a fetch, each in a process of its own: a node's parts for peers, and the channel's limit beside them.

Both ends have both, over the same memory, so that the same bytes go either way. `fetches` runs the reading end;
`python -m benchmarks.node.fetch_ends` is the owning end, which obeys the lines that it reads.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import trustme

from benchmarks.node.bare_ends import bare_owner
from benchmarks.support import engines
from benchmarks.support.chunks import commit_chunk
from lmkv.config import NodeConfig
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey
from lmkv.pool.pool import Pool
from lmkv.spec import KvSpec
from lmkv.v1.cache_service_pb2 import Holder
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.serving.build import open_peer_side
from lmkv_server.node.serving.read_grants import SHARE
from lmkv_server.node.serving.service import ServedNode
from lmkv_server.node.sessions.sessions import EngineSessions

TCP_TLS = "tcp_tls"
"""The channel `tcp` between nodes with certificates."""
TLS_FILES = ("ca", "cert", "key")
ANSWER_SECONDS = 60.0
READ_SECONDS = 30.0


def keys_of(count: int) -> list[ChunkKey]:
    return [ChunkKey(index.to_bytes(16, "big")) for index in range(1, count + 1)]


def issue_certificates(folder: Path) -> None:
    """Writes the certificates of a fleet on this host: `ca.pem`, `cert.pem`, `key.pem`."""
    issuer = trustme.CA()
    issued = issuer.issue_cert("localhost", "127.0.0.1")
    issuer.cert_pem.write_to_path(str(folder / "ca.pem"))
    issued.private_key_pem.write_to_path(str(folder / "key.pem"))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(folder / "cert.pem"), append=True)


class ReadingNode:
    """What a node has for its peers: pool, tier, channel, fetcher, and `PeerService` on a free port."""

    def __init__(
        self,
        instance_id: str,
        spec: KvSpec,
        chunk_count: int,
        transfer_channel: str,
        *,
        host: str = "127.0.0.1",
        shares_memory: bool = True,
        certificates: Path | None = None,
    ) -> None:
        """`shares_memory` is false for a node whose pool no other one can map, as from another host; `certificates` is
        the folder of the fleet's certificates, for `TCP_TLS`."""
        self.spec = spec
        self.epoch = time.time_ns()
        self.instance_id = instance_id
        self._chunk_count = chunk_count
        self._transfer_channel = "tcp" if transfer_channel == TCP_TLS else transfer_channel
        self._tls: dict[str, Any] = (
            {f"tls_{name}": str(certificates / f"{name}.pem") for name in TLS_FILES} if certificates else {}
        )
        self._host = host
        self._shares_memory = shares_memory
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        self.pool = Pool.create(self._chunk_count * self.spec.chunk_bytes)
        self._stack.callback(self.pool.close)
        self.pool.populate()
        self.tier = HostTier(self.pool.size_bytes)
        engines_here = EngineSessions(self.tier)
        engines_here.attach("engine", self.spec)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp"))
        config = NodeConfig(
            instance_id=self.instance_id,
            runtime_dir=folder,
            transfer_channel=self._transfer_channel,
            p2p_host=self._host,
            grant_ttl=READ_SECONDS,
            **self._tls,
        )
        config.make_instance_dir()
        if not self._shares_memory:
            config.transfer_socket.mkdir()  # in the place of the socket: it cannot be opened
        node = ServedNode(
            instance_id=self.instance_id, epoch=self.epoch, tier=self.tier, pool=self.pool, engines=engines_here
        )
        side = await open_peer_side(config, node, self._stack)
        self.address = side.address
        self.channels = side.channels
        self.connections = side.connections
        self.fetcher = side.fetcher

    def fill(self, keys: list[ChunkKey]) -> list[int]:
        """Commits a chunk for each key; their offsets in the pool."""
        content = np.arange(self.spec.chunk_bytes // 8, dtype=np.uint64)
        return [
            commit_chunk(self.pool, self.tier, self.spec, key, content + np.uint64(number << 40))
            for number, key in enumerate(keys)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """The first message of the owning end."""

    epoch: int
    address: str
    pool_address: int
    offsets: list[int]
    bare: str


class OwnerProcess:
    """The owning end's process, as the reading end sees it. A context manager."""

    NAME = "owner"

    def __init__(
        self, transfer_channel: str, dtype: str, chunk_count: int, log: Path, certificates: Path | None = None
    ) -> None:
        command = [sys.executable, "-m", "benchmarks.node.fetch_ends", transfer_channel, dtype, str(chunk_count)]
        command += [str(certificates)] if certificates else []
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self._chunk_count = chunk_count

    def __enter__(self) -> Self:
        try:
            self.said = Said(**self._hear())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._process.communicate(timeout=10)  # the end of its input ends it
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def holder(self, chunk_count: int) -> Holder:
        return Holder(
            instance_id=self.NAME,
            epoch=self.said.epoch,
            peer_address=self.said.address,
            matched_chunk_count=chunk_count,
        )

    def addresses(self, chunk_count: int) -> list[int]:
        """Where its first chunks lie."""
        return [self.said.pool_address + offset for offset in self.said.offsets[:chunk_count]]

    @property
    def pid(self) -> int:
        return self._process.pid

    def serve_bare(self) -> None:
        """Has its bare end serve until `rest_bare`."""
        self._order("serve")

    def rest_bare(self) -> None:
        """Has its bare end sleep."""
        self._order("rest")

    def _order(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        self._hear()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise LmkvError("the owning end of the fetches has ended; its log says why")
        answer: dict[str, Any] = json.loads(line)
        return answer


async def own(transfer_channel: str, dtype: str, chunk_count: int, certificates: Path | None = None) -> None:
    """What the owning end does."""
    spec = engines.kv_spec(dtype)
    async with ReadingNode(
        OwnerProcess.NAME, spec, SHARE * chunk_count, transfer_channel, certificates=certificates
    ) as node:
        offsets = node.fill(keys_of(chunk_count))
        bare = bare_owner(transfer_channel, node.pool)
        try:
            _say(
                epoch=node.epoch,
                address=node.address,
                pool_address=node.pool.address,
                offsets=offsets,
                bare=bare.metadata.hex(),
            )
            while order := await asyncio.to_thread(sys.stdin.readline):
                if order.strip() == "serve":
                    bare.begin()
                else:
                    bare.pause()
                _say()
        finally:
            bare.close()


def _say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    asyncio.run(own(sys.argv[1], sys.argv[2], int(sys.argv[3]), *map(Path, sys.argv[4:])))
