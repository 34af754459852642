"""The event-loop side of NIXL: the channel between nodes, and files for the disk tier by the POSIX or GDS plugin.

docs/contribute/transfer.md describes the channel. Each thread that reads or writes files has an agent of its own,
because an agent is not thread-safe.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv.transfer.channel import ChannelEnd, Copy, PeerReader, Region, check_copies, unwrap, wrap
from lmkv.transfer.nixl import api as nixl_api
from lmkv.transfer.nixl.agent import STALL_SECONDS, AgentThread, Read, ReadOutcome

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
CLOSE_SECONDS = 3.0


class NixlChannel:
    """The `Channel` contract over NIXL. Created by `open`."""

    name = "nixl"

    def __init__(
        self,
        agent_name: str,
        region: Region,
        backends: Sequence[str],
        prepare_thread: Callable[[], object] = lambda: None,
    ) -> None:
        """Opens a channel that only reads, into host or device memory. `prepare_thread` is called on NIXL's thread.

        Raises `ConfigError` if NIXL is missing or does not start. Blocks for half a second.
        """
        self._metadata = b""
        self._own = region
        self._peers: dict[str, Region] = {}
        self._thread = AgentThread(agent_name, region, backends, prepare_thread)
        self._agent_metadata = self._thread.start()
        self._pid = os.getpid()
        atexit.register(self._exit)  # a thread inside NIXL would crash the exiting interpreter

    @classmethod
    async def open(cls, end: ChannelEnd) -> Self:
        """Opens the channel in a thread. Raises `ConfigError` as the constructor does."""
        channel = await asyncio.to_thread(cls, end.name, end.region, end.nixl_backends)
        channel._metadata = wrap(cls.name, end, channel._agent_metadata)
        return channel

    def metadata_for(self, _reader: PeerReader) -> bytes:
        """The same metadata for every reader: this channel cannot distinguish its readers."""
        return self._metadata

    async def add_peer(self, peer_name: str, metadata: bytes) -> None:
        region, agent_metadata = unwrap(self.name, peer_name, metadata)
        await self._call(lambda: self._thread.add_peer(peer_name, agent_metadata))
        self._peers[peer_name] = region

    async def remove_peer(self, peer_name: str) -> None:
        self._peers.pop(peer_name, None)
        await self._call(lambda: self._thread.forget_peer(peer_name))

    async def read(
        self,
        peer_name: str,
        copies: Sequence[Copy],
        timeout_seconds: float,
        on_stopped: Callable[[], None],
        grant_id: str = "",  # noqa: ARG002 # readers access the memory themselves
    ) -> None:
        try:
            region = self._peers.get(peer_name)
            if region is None:
                raise Unreachable(f"{peer_name} is not connected", peer=peer_name)
            check_copies(peer_name, copies, region, self._own)
            read = Read(peer_name, copies, on_stopped)
            self._thread.submit(lambda: self._thread.begin(read))
        except LmkvError:
            on_stopped()
            raise
        try:
            async with asyncio.timeout(timeout_seconds):
                await read.outcome.future
        except TimeoutError:
            read.abandoned_at = time.monotonic() - STALL_SECONDS
            raise Unreachable(
                f"{peer_name} did not deliver within {timeout_seconds:.3g} s", peer=peer_name, quarantined=True
            ) from None
        except asyncio.CancelledError:
            read.abandoned_at = time.monotonic()
            raise

    def serve(self, needed: bool) -> None:
        self._thread.serving = needed
        self._thread.wake()

    async def aclose(self) -> None:
        atexit.unregister(self._exit)
        self._thread.stop()
        if not await asyncio.to_thread(self._thread.join, CLOSE_SECONDS):
            logger.warning("NIXL did not close within %.0f s; its thread is abandoned", CLOSE_SECONDS)

    async def _call(self, call: Callable[[], None]) -> None:
        """Runs a function on the agent's thread. Raises what it raises, or `Unreachable` if it takes too long."""
        outcome = ReadOutcome()

        def job() -> None:
            try:
                call()
            except LmkvError as error:
                outcome.resolve(error)
            else:
                outcome.resolve()

        self._thread.submit(job)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await outcome.future
        except TimeoutError:
            raise Unreachable(f"NIXL did not answer within {CALL_SECONDS:.0f} s") from None

    def _exit(self) -> None:
        if os.getpid() == self._pid:  # a forked process does not have the thread
            self._thread.stop()
            self._thread.join(CLOSE_SECONDS)


POLL_SECONDS = 0.0001
BACKEND_PARAMETERS: Mapping[str, Sequence[dict[str, str]]] = {
    "POSIX": ({"use_uring": "true", "use_aio": "false"}, {}),
    "GDS": ({},),
}
"""Parameters to try for each plugin, best first: POSIX with io_uring, then with its default."""


class NixlFiles:
    """Copies between open files and one region of memory. Methods block and are thread-safe."""

    def __init__(self, region: Region, plugin: str = "POSIX") -> None:
        """Raises `ConfigError` if NIXL is not installed or the plugin does not start."""
        try:
            self._api = nixl_api.load()
        except ConfigError as error:
            raise ConfigError(f"local_disk_io: {error}", key="local_disk_io") from None
        self._errors = nixl_api.errors(self._api)
        self._region = region
        self._plugin = plugin
        self._agents = threading.local()
        try:
            self._agent()
        except self._errors as error:
            needs = "; it needs a GPU, its driver's nvidia-fs, and libcufile" if plugin == "GDS" else ""
            raise ConfigError(
                f"local_disk_io: NIXL's {plugin} plugin did not start: {error}{needs}; set local_disk_io to plain",
                key="local_disk_io",
            ) from None

    def read(self, fd: int, memory: memoryview) -> int:
        """Reads from the beginning of a file into a part of the region; returns the number of bytes read.

        Raises `OSError`.
        """
        size_bytes = os.fstat(fd).st_size
        if size_bytes >= len(memory):
            self._transfer("READ", fd, memory)
        return min(size_bytes, len(memory))

    def write(self, fd: int, memory: memoryview) -> None:
        """Writes a part of the region to the beginning of a file. Raises `OSError`."""
        os.posix_fallocate(fd, 0, len(memory))  # NIXL does not report a full disk
        self._transfer("WRITE", fd, memory)

    def _transfer(self, operation: str, fd: int, memory: memoryview) -> None:
        # In one expression: a variable of what it makes would keep the memory mapped.
        address, size_bytes = ctypes.addressof(ctypes.c_char.from_buffer(memory)), len(memory)
        try:
            agent = self._agent()
            file = agent.register_memory([(0, size_bytes, fd, "")], "FILE")
            try:
                self._run_read(agent, operation, (address, size_bytes, 0), (0, size_bytes, fd))
            finally:
                agent.deregister_memory(file)
        except self._errors as error:
            raise OSError(errno.EIO, f"NIXL: {error}") from None

    def _run_read(self, agent: Any, operation: str, memory: tuple[int, int, int], file: tuple[int, int, int]) -> None:
        handle = agent.initialize_xfer(
            operation, agent.get_xfer_descs([memory], "DRAM"), agent.get_xfer_descs([file], "FILE"), agent.name
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_SECONDS)
                state = agent.check_xfer_state(handle)
        finally:
            agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"the {operation.lower()} ended as {state}")

    def _agent(self) -> Any:
        """The agent of the calling thread."""
        agent = getattr(self._agents, "agent", None)
        if agent is None:
            config = self._api.nixl_agent_config(enable_prog_thread=False, backends=[])
            agent = self._api.nixl_agent(f"lmkv-files-{threading.get_ident()}", config)
            parameters = BACKEND_PARAMETERS[self._plugin]
            for parameter_set in parameters:
                try:
                    agent.create_backend(self._plugin, parameter_set)
                    break
                except self._errors:
                    if parameter_set is parameters[-1]:
                        raise
            agent.register_memory([(self._region.address, self._region.size_bytes, 0, "")], "DRAM")
            self._agents.agent = agent
        return agent
