"""What tests need that let the connector start real nodes: their configuration, their processes, their end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from lmkv.config import ConnectorConfig
from tests.waiting import wait_until

until = wait_until


def connector_config(runtime_dir: Path, **settings: object) -> ConnectorConfig:
    """A small node of its own in `runtime_dir`, which ends soon after its engine."""
    values: dict[str, object] = {
        "instance_id": "n",
        "runtime_dir": str(runtime_dir),
        "enable_p2p": False,
        "max_local_cpu_size": "16MB",
        "node_linger": 1.0,
        "chunk_size": 32,
    }
    return ConnectorConfig(**(values | settings))  # type: ignore[arg-type]


def node_pid(config: ConnectorConfig) -> int:
    """Process id of the node that runs under this configuration."""
    return int(config.lock_path.read_text())


def is_running(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def kill(pid: int) -> None:
    """Ends a process at once and waits until the kernel is done with it."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_running(pid))


def kill_all(runtime_dir: Path) -> None:
    """Ends the nodes that were started in a folder."""
    for lock in runtime_dir.glob("*/lock"):
        text = lock.read_text().strip()
        if text and is_running(pid := int(text)) and b"lmkv" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGCONT)
            kill(pid)
