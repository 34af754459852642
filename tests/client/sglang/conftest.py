"""A coordinator and nodes for tests of the storage backend and of the linker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.process import ServerProcess
from tests.waiting import is_listening


class NodeOfTests(ServerProcess):
    """A node without engines, which restarts under the same name."""

    def __init__(
        self, folder: Path, logs: Path, coordinator: CoordinatorProcess, *, name: str = "node", memory: str = "16MiB"
    ) -> None:
        self.socket = folder / name / "engine.sock"
        environment = {
            "LMKV_INSTANCE_ID": name,
            "LMKV_RUNTIME_DIR": str(folder),
            "LMKV_COORDINATOR_ADDRESS": coordinator.address,
            "LMKV_MAX_LOCAL_CPU_SIZE": memory,
            "LMKV_COORDINATOR_TIMEOUT": "2",
            "LMKV_REFUSE_SLOW_FETCHES": "false",
        }
        super().__init__(name, [sys.executable, "-m", "lmkv", "node"], logs / f"{name}.log", environment)

    def start_and_wait(self) -> None:
        self.start()
        self.wait_until(lambda: is_listening(self.socket), "ready", 30.0)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path) as coordinator:
        yield coordinator


@pytest.fixture
def node(tmp_path: Path, short_folder: Path, coordinator: CoordinatorProcess) -> Iterator[NodeOfTests]:
    with NodeOfTests(short_folder, tmp_path, coordinator) as node:
        node.start_and_wait()
        yield node
