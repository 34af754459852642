"""A node as a process, and configurations of nodes: what tests of whole nodes are made of."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lmkv.config import NodeConfig
from tests.waiting import WAIT_SECONDS, wait_until

SIZE = "16MB"
COORDINATOR_SECONDS = 20.0
"""Of a node's lookups at its coordinator: on a busy machine they take longer than they may by default."""


class NodeProcess:
    """One `lmkv node`, with its sockets and its output in `folder` by default."""

    def __init__(
        self, folder: Path, flags: Sequence[str], settings: Mapping[str, object], *, within: Sequence[str] = ()
    ) -> None:
        """`within` is a command that executes the one behind it."""
        values: dict[str, object] = {
            "instance_id": "n",
            "runtime_dir": str(folder),
            "max_local_cpu_size": SIZE,
            "enable_p2p": "false",
        }
        values |= {"coordinator_timeout": str(COORDINATOR_SECONDS)} | dict(settings)
        self.config = NodeConfig(**values)  # type: ignore[arg-type]  # as people write them
        self.socket = self.config.engine_socket
        self._log = folder / f"{time.monotonic_ns()}.log"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
        environment |= {f"LMKV_{name.upper()}": str(value) for name, value in values.items()}
        with self._log.open("wb") as output:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "lmkv", "node", *flags], env=environment, stdout=output, stderr=output
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def ready(self) -> NodeProcess:
        """Waits until engines can attach."""
        wait_until(lambda: listens(self.socket) or self.process.poll() is not None, "the node listens")
        assert self.process.poll() is None, self.output
        return self

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals, and waits for the exit code."""
        self.process.send_signal(number)
        return self.exit_code()

    def exit_code(self, seconds: float = WAIT_SECONDS) -> int:
        return self.process.wait(seconds)

    def refusal(self) -> str:
        """The one line of a node that could not start as configured."""
        assert self.exit_code(WAIT_SECONDS) == 2, self.output
        (line,) = [line for line in self.output.splitlines() if line.startswith("lmkv: error: ")]
        assert "Traceback" not in self.output
        return line


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def node_config(runtime_dir: Path, instance_id: str, **settings: object) -> NodeConfig:
    values: dict[str, object] = {
        "max_local_cpu_size": SIZE,
        "runtime_dir": str(runtime_dir),
        "coordinator_timeout": COORDINATOR_SECONDS,
    }
    return NodeConfig(instance_id=instance_id, **(values | settings))  # type: ignore[arg-type]
