"""Nodes that no engine has started: processes of `lmkv node` at one coordinator, for tests and benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from lmkv_client.demo.process import ServerProcess

READY_TIMEOUT_SECONDS = 30.0


class Nodes:
    """So many nodes, by name: a context manager that starts all at once, waits for them, and ends them."""

    def __init__(
        self, names: Sequence[str], *, coordinator_address: str, runtime_dir: Path, logs: Path, pool_size: str
    ) -> None:
        """`logs` gets a log of each; `pool_size` is that of each node's memory for chunks, such as `64MiB`."""
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
                },
            )
            for name in names
        ]

    def socket(self, name: str) -> Path:
        """Where engines reach a node."""
        return self._runtime_dir / name / "engine.sock"

    def __enter__(self) -> Self:
        try:
            for process in self._processes:
                process.start()
            for process in self._processes:
                process.wait_until(self.socket(process.name).exists, "ready", READY_TIMEOUT_SECONDS)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.request_stop()  # all at once: each takes a moment
        for process in self._processes:
            process.stop()
