"""The shared-memory channel: peers on one host map each other's pools read-only and copy once.

docs/contribute/transfer.md describes all channels.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np

from lmkv.errors import ChannelUnsupported, ConfigError, Unreachable
from lmkv.pool.pool import enter_pages
from lmkv.pool.socket import FdOffer, FdServer, Fields, receive_fd
from lmkv.transfer.channel import ChannelEnd, Copy, PeerReader, Region, SummedCopy, unwrap, wrap
from lmkv.transfer.threads import Job, ThreadedChannel, ThreadedRead

COPY_THREADS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
"""A thread copies and sums 4 to 6 GB/s, a fraction of the memory bandwidth. The engine needs processors, too."""
STEP_BYTES = 2 << 20
"""Bytes copied between two checks for cancellation: a fraction of a millisecond."""
AHEAD_BYTES = 256 << 20
"""Bytes of a peer's pool that are in this process's page tables before they are read, behind the last read. A pool is
filled from its start; to enter a page of 4 KiB takes longer than to copy it."""
RECEIVE_SECONDS = 1.0
TOKEN_BYTES = 32
WORD_BYTES = 8
CHECKSUMS = 1 << 64
"""Partial checksums are added modulo this."""


class ShmChannel(ThreadedChannel["_MappedPeer"]):
    """The `Channel` contract over shared memory. Created by `open`."""

    name = "shm"

    def __init__(self, end: ChannelEnd) -> None:
        if end.socket_path is None:
            raise ConfigError("transfer_channel: 'shm' needs a unix socket to pass the pool", key="transfer_channel")
        super().__init__(end, COPY_THREADS)
        self._mapper = ThreadPoolExecutor(1, "lmkv-shm-map")
        self._copy = end.summed_copy or _plain_copy
        self._sums = end.summed_copy is not None
        self._token = secrets.token_hex(TOKEN_BYTES)
        fields = {"socket": str(end.socket_path), "token": self._token}
        self._metadata = wrap(self.name, end, json.dumps(fields).encode())
        # Reopened read-only: receivers of this file description cannot write to the pool.
        self._read_only_fd = os.open(f"/proc/self/fd/{end.pool.fd}", os.O_RDONLY | os.O_CLOEXEC)
        self._fd_server = FdServer(end.socket_path, self._offer, "transfer socket")

    @classmethod
    async def open(cls, end: ChannelEnd) -> Self:
        """Opens the channel. Raises `ConfigError` if its socket cannot be bound."""
        channel = cls(end)
        try:
            await channel._fd_server.start()
        except BaseException:
            await channel.aclose()
            raise
        return channel

    def metadata_for(self, _reader: PeerReader) -> bytes:
        """The same metadata for every reader: this channel cannot distinguish its readers."""
        return self._metadata

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        region, payload = unwrap(self.name, peer_name, metadata)
        known = self._peers.get(peer_name)
        if known and known.metadata == metadata and not known.disconnected:
            return
        try:
            peer = await asyncio.to_thread(_map, metadata, region, json.loads(payload))
        except (Unreachable, OSError, ValueError) as error:
            raise ChannelUnsupported(f"{peer_name} shares no memory with this node: {error}", peer=peer_name) from None
        await self.remove_peer(peer_name)
        self._peers[peer_name] = peer
        asyncio.get_running_loop().add_reader(peer.connection, self._forget, peer_name)
        self._map_ahead(peer)

    def _make_read(self, peer: _MappedPeer, copies: Sequence[Copy], _grant_id: str) -> ThreadedRead:
        steps = deque(_steps(copies))
        summed: deque[tuple[int, int]] = deque()
        parts = [partial(_copy_steps, peer, steps, self._copy, summed)] * min(COPY_THREADS, len(steps))
        peer.read_count += 1
        peer.follow(copies)

        def checksums() -> list[int] | None:
            if not self._sums:
                return None
            sums = [0] * len(copies)
            for index, part in summed:
                sums[index] = (sums[index] + part) % CHECKSUMS
            return sums

        def stop() -> None:
            peer.end_read()
            self._map_ahead(peer)

        return ThreadedRead(parts=parts, stop=stop, checksums=checksums)

    def _map_ahead(self, peer: _MappedPeer) -> None:
        """Has the pages that the next reads need entered on another thread, while no read of the peer runs."""
        if peer.begin_mapping():
            mapping = asyncio.get_running_loop().run_in_executor(self._mapper, peer.map_ahead)
            mapping.add_done_callback(lambda _: peer.end_mapping())

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.to_thread(self._mapper.shutdown, cancel_futures=True)
        await self._fd_server.aclose()
        if self._read_only_fd >= 0:
            os.close(self._read_only_fd)
            self._read_only_fd = -1

    def _offer(self, hello: Fields) -> FdOffer:
        token = hello.get("token")
        if not isinstance(token, str) or not secrets.compare_digest(token.encode(), self._token.encode()):
            raise Unreachable("the token is wrong")
        return FdOffer(fd=self._read_only_fd, fields={})


class _MappedPeer:
    """The mapped pool of a peer. It is unmapped when the peer is removed and no read uses it."""

    def __init__(self, metadata: bytes, connection: socket.socket, region: Region, fd: int) -> None:
        """Takes ownership of `fd` and `connection`, unless it raises `OSError` or `ValueError`: it cannot be mapped."""
        self.metadata = metadata
        self.connection = connection
        connection.setblocking(False)
        self.region = region
        """The pool, at the address in the peer's process."""
        self.read_count = 0
        """Reads in flight."""
        self._is_removed = False
        if os.fstat(fd).st_size < region.size_bytes:  # access beyond the end of the file raises SIGBUS
            raise ValueError(f"the file is shorter than {region.size_bytes} bytes")
        self._memory = [np.frombuffer(mmap.mmap(fd, region.size_bytes, prot=mmap.PROT_READ), np.uint8)]
        self.address = self._memory[0].ctypes.data
        """Address of the pool in this process."""
        self._fd = fd
        self._read_end = 0
        """End of what was read, of reads that follow each other."""
        self._mapped_end = 0
        """End of what `map_ahead` has entered in the page tables."""
        self._is_mapping = False

    def follow(self, copies: Sequence[Copy]) -> None:
        """Notes where a read ends, so that what lies behind is mapped ahead of the next one."""
        for copy in copies:
            start = copy.remote_address - self.region.address
            if start <= self._read_end + AHEAD_BYTES:
                self._read_end = max(self._read_end, start + copy.size_bytes)

    def begin_mapping(self) -> bool:
        """Whether the caller is to run `map_ahead` now and to call `end_mapping` then: no read runs meanwhile."""
        if self._is_mapping or self.read_count or self._is_removed:
            return False
        self._mapped_end = max(self._mapped_end, self._read_end // mmap.PAGESIZE * mmap.PAGESIZE)
        self._is_mapping = self._mapped_end < self._ahead_end
        return self._is_mapping

    def map_ahead(self) -> None:
        """Enters the pages of the next reads in the page tables, until a read begins. Runs in a thread.

        Memory that the peer has not allocated stays unallocated: it would count as this node's.
        """
        with suppress(OSError):  # huge pages do not know their holes; few of them are to be entered
            while not (self.read_count or self._is_removed):
                start = self._mapped_end
                size_bytes = min(STEP_BYTES, self._ahead_end - start)
                if size_bytes <= 0 or os.lseek(self._fd, start, os.SEEK_HOLE) < start + size_bytes:
                    break
                enter_pages(self.address + start, size_bytes)
                self._mapped_end = start + size_bytes

    def end_mapping(self) -> None:
        """`map_ahead` has returned."""
        self._is_mapping = False
        self._close_if_done()

    @property
    def _ahead_end(self) -> int:
        return min(self._read_end + AHEAD_BYTES, self.region.size_bytes)

    def forget(self) -> None:
        """Unmaps the pool, when no read uses it."""
        asyncio.get_running_loop().remove_reader(self.connection)
        self._is_removed = True
        self._close_if_done()

    def end_read(self) -> None:
        """A read has stopped."""
        self.read_count -= 1
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._is_removed and not self.read_count and not self._is_mapping and self._memory:
            self._memory.clear()
            self.connection.close()
            os.close(self._fd)

    @property
    def disconnected(self) -> bool:
        """Whether its process has closed the connection or exited."""
        try:
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True


def _map(metadata: bytes, region: Region, fields: dict[str, str]) -> _MappedPeer:
    received = receive_fd(fields["socket"], {"token": fields["token"]}, RECEIVE_SECONDS)
    try:
        return _MappedPeer(metadata, received.connection, region, received.fd)
    except BaseException:
        received.connection.close()
        os.close(received.fd)
        raise


@dataclass(frozen=True, slots=True)
class _Step:
    """A part of one copy, of at most `STEP_BYTES`."""

    index: int
    """Index of the copy."""
    offset: int
    """Offset in the copy, in bytes."""
    copy: Copy

    @property
    def size_bytes(self) -> int:
        return min(STEP_BYTES, self.copy.size_bytes - self.offset)


def _steps(copies: Sequence[Copy]) -> Iterator[_Step]:
    for index, copy in enumerate(copies):
        for offset in range(0, copy.size_bytes, STEP_BYTES):
            yield _Step(index, offset, copy)


def _copy_steps(
    peer: _MappedPeer, steps: deque[_Step], copy_bytes: SummedCopy, summed: deque[tuple[int, int]], job: Job
) -> None:
    """Runs in a thread: copies steps until none is left. The GIL is released while bytes are copied."""
    shift = peer.address - peer.region.address
    with suppress(IndexError):
        while step := steps.popleft():
            job.check()
            target, source = step.copy.local_address + step.offset, step.copy.remote_address + step.offset + shift
            summed.append((step.index, copy_bytes(target, source, step.size_bytes, step.offset // WORD_BYTES)))
    if peer.disconnected:  # the memory is still mapped, but its content is no longer reliable
        raise Unreachable(f"{job.peer_name} is lost", peer=job.peer_name)


def _plain_copy(target: int, source: int, size_bytes: int, _first_word: int) -> int:
    ctypes.memmove(target, source, size_bytes)
    return 0
