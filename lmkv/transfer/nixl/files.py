"""Reads and writes files by NIXL's POSIX or GDS plugin. For the node's disk tier.

Each calling thread has an agent of its own, because an agent is not thread-safe.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from lmkv.errors import ConfigError
from lmkv.transfer.channel import Region
from lmkv.transfer.nixl import api as nixl_api

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
        anchor = ctypes.c_char.from_buffer(memory)
        address, size_bytes = ctypes.addressof(anchor), len(memory)
        del anchor  # would keep the memory mapped
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
