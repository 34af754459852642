"""`lmkv node` processes without engines, registered with one coordinator: for tests and benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

from lmkv_client.demo.process import ServerProcess
from tests.waiting import is_listening

READY_TIMEOUT_SECONDS = 120.0


class NodeProcesses:
    """One node per name. Entering it starts all nodes and waits for them; exiting it stops them."""

    def __init__(
        self, names: Sequence[str], *, coordinator_address: str, runtime_dir: Path, logs: Path, pool_size: str
    ) -> None:
        """Each node logs to `logs`. `pool_size` is the size of its pool, such as `64MiB`."""
        self._runtime_dir = runtime_dir
        self._processes = [
            ServerProcess(
                name,
                [sys.executable, "-m", "lmkv", "node"],
                logs / f"{name}.log",
                {
                    "LMKV_INSTANCE_ID": name,
                    "LMKV_RUNTIME_DIR": str(runtime_dir),
                    "LMKV_COORDINATOR_ADDRESS": coordinator_address,
                    "LMKV_MAX_LOCAL_CPU_SIZE": pool_size,
                    "LMKV_COORDINATOR_TIMEOUT": "1",  # longer than a busy machine stands still
                },
            )
            for name in names
        ]

    def socket(self, name: str) -> Path:
        """The socket on which a node serves engines."""
        return self._runtime_dir / name / "engine.sock"

    def pid(self, name: str) -> int:
        """Process id of a node."""
        return self._of(name).pid

    def kill(self, name: str) -> None:
        """Kills a node with SIGKILL."""
        self._of(name).kill()

    def _of(self, name: str) -> ServerProcess:
        return next(process for process in self._processes if process.name == name)

    def __enter__(self) -> Self:
        try:
            for process in self._processes:
                process.start()
            for process in self._processes:
                process.wait_until(partial(is_listening, self.socket(process.name)), "ready", READY_TIMEOUT_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.request_stop()  # concurrently
        for process in self._processes:
            process.stop()
