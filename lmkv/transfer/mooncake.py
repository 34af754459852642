"""The Mooncake channel, a plug-in: Mooncake's transfer engine over TCP or RDMA (docs/contribute/transfer.md)."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple, Self

import numpy as np

from lmkv.errors import ConfigError, Unreachable
from lmkv.transfer.channel import ChannelEnd, Copy, PeerReader, Region, unwrap, wrap
from lmkv.transfer.threads import Job, ThreadedChannel, ThreadedRead

ENVIRONMENT = {
    "MC_LOG_LEVEL": "ERROR",
    "GLOG_minloglevel": "3",  # lmkv reports errors itself
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
}
"""Defaults of environment variables of Mooncake. The last two make reads from frozen peers fail."""
PROTOCOLS = ("tcp", "rdma")
"""Values of the option `protocol`, the default first."""
READ_THREADS = 4
STEP_BYTES = 32 << 20
"""Bytes read between two checks for cancellation."""
CONNECT_SECONDS = 4.0
SCRATCH_BYTES = 4096


class _MooncakePeer(NamedTuple):
    region: Region
    target: str
    """Its name in Mooncake."""

    def forget(self) -> None:
        """Does nothing: Mooncake keeps its connections."""


class MooncakeChannel(ThreadedChannel[_MooncakePeer]):
    """The `Channel` contract over Mooncake. Created by `open`."""

    name = "mooncake"

    def __init__(self, end: ChannelEnd) -> None:
        """Raises `ConfigError` if Mooncake is missing or does not start."""
        super().__init__(end, READ_THREADS)
        protocol = _protocol(end.options)
        self._engine: Any = _load().TransferEngine()
        if self._engine.initialize(end.host, "P2PHANDSHAKE", protocol, ""):
            raise ConfigError(
                f"transfer_options: Mooncake did not start with the protocol {protocol} at {end.host}; set another",
                key="transfer_options",
            )
        if self._engine.register_memory(self._own.address, self._own.size_bytes):
            raise ConfigError("transfer_channel: Mooncake did not register the pool", key="transfer_channel")
        # Target of the one byte that is read from a new peer's pool to probe the connection.
        self._scratch = np.zeros(SCRATCH_BYTES, np.uint8)
        self._engine.register_memory(self._scratch.ctypes.data, SCRATCH_BYTES)
        fields = {"target": f"{end.host}:{self._engine.get_rpc_port()}"}
        self._metadata = wrap(self.name, end, json.dumps(fields).encode())

    @classmethod
    async def open(cls, end: ChannelEnd) -> Self:
        """Opens the channel in a thread. Raises `ConfigError` as the constructor does."""
        return await asyncio.to_thread(cls, end)

    def metadata_for(self, _reader: PeerReader) -> bytes:
        """The same metadata for every reader: this channel cannot distinguish its readers."""
        return self._metadata

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        region, payload = unwrap(self.name, peer_name, metadata)
        target = json.loads(payload)["target"]
        probe = Copy(remote_address=region.address, local_address=self._scratch.ctypes.data, size_bytes=1)
        part = partial(self._read, target, [probe])
        await self._threads.run(peer_name, [part], CONNECT_SECONDS, lambda: None)
        self._peers[peer_name] = _MooncakePeer(region, target)

    async def aclose(self) -> None:
        await super().aclose()
        engine, self._engine = self._engine, None
        if engine:
            await asyncio.to_thread(_close, engine, [self._own.address, self._scratch.ctypes.data])

    def _make_read(self, peer: _MooncakePeer, copies: Sequence[Copy], _grant_id: str) -> ThreadedRead:
        return ThreadedRead(parts=[partial(self._read, peer.target, copies)] if copies else [])

    def _read(self, target: str, copies: Sequence[Copy], job: Job) -> None:
        """Runs in a thread. Reads one range at a time: of several, some might continue after one has failed."""
        for step in _steps(copies):
            job.check()
            if self._engine.transfer_sync_read(target, step.local_address, step.remote_address, step.size_bytes):
                raise Unreachable(f"{job.peer_name} refused the read or is lost", peer=job.peer_name)


def _protocol(options: Mapping[str, str]) -> str:
    protocol = options.get("protocol", "tcp")
    if options.keys() - {"protocol"} or protocol not in PROTOCOLS:
        raise ConfigError(
            f"transfer_options must be protocol with one of {', '.join(PROTOCOLS)}, not {dict(options)}",
            key="transfer_options",
        )
    return protocol


def _steps(copies: Sequence[Copy]) -> Iterator[Copy]:
    """The same bytes in ranges of at most `STEP_BYTES`; adjacent copies are merged."""
    merged: list[Copy] = []
    for copy in copies:
        last = merged[-1] if merged else None
        if (
            last
            and last.local_address + last.size_bytes == copy.local_address
            and last.remote_address + last.size_bytes == copy.remote_address
        ):
            merged.pop()
            copy = Copy(
                remote_address=last.remote_address,
                local_address=last.local_address,
                size_bytes=last.size_bytes + copy.size_bytes,
            )
        merged.append(copy)
    for copy in merged:
        for at in range(0, copy.size_bytes, STEP_BYTES):
            yield Copy(
                remote_address=copy.remote_address + at,
                local_address=copy.local_address + at,
                size_bytes=min(STEP_BYTES, copy.size_bytes - at),
            )


def _close(engine: Any, addresses: list[int]) -> None:
    for address in addresses:
        engine.unregister_memory(address)
    del engine  # stops its threads and closes its connections


def _load() -> Any:
    """Imports Mooncake's engine. Raises `ConfigError` if it is not installed or a system library is missing."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return import_module("mooncake.engine")
    except ModuleNotFoundError:
        raise ConfigError(
            "transfer_channel: 'mooncake' needs Mooncake's transfer engine, which is not installed; "
            "pip install '.[mooncake]' in a clone of lmkv",
            key="transfer_channel",
        ) from None
    except ImportError as error:
        raise ConfigError(
            f"transfer_channel: Mooncake cannot be loaded: {error}; it needs the system's RDMA library, even for TCP "
            "(Debian's libibverbs1)",
            key="transfer_channel",
        ) from None
