"""Finds the node of an engine, and starts one where none is configured: a process that outlives the engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from lmkv import config as configuration
from lmkv.config import ConnectorConfig
from lmkv.errors import ConfigConflict, ConfigError, Unreachable
from lmkv_client.engine.log import logger

_STARTER = '"$@" >&2 & echo $!'
"""Starts a command in the background, prints its process id and ends: the command is then no child of this process."""


class NodeProcess:
    """A process in a session of its own, which is no child of this process.

    vLLM kills all descendants of an engine with it, sessions or not; an orphan is none of them.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._start_time = _start_time(pid)

    @classmethod
    def start(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Self:
        """Starts a command whose output goes to the end of `log`. Raises `OSError` if there is no shell."""
        with log.open("ab") as output:
            started = subprocess.run(  # noqa: S603  # our own command
                ["/bin/sh", "-c", _STARTER, "sh", *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=output,
                start_new_session=True,
                check=True,
            )
        return cls(int(started.stdout))

    @property
    def running(self) -> bool:
        """Whether it has not ended. Another process that got its id does not count."""
        return self._start_time != "" and _start_time(self.pid) == self._start_time


def _start_time(pid: int) -> str:
    """Returns the time at which a process began, as the kernel writes it; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]


READY_POLL_SECONDS = 0.02
RESTART_SECONDS = 0.2
ERROR_PREFIX = "lmkv: error: "
ALREADY_RUN = "is already run by process"
"""Part of the error of a node that finds another node of its instance id on the host."""
NODE_FLAGS = ("--linger", "--started-by-connector")
NOT_EXPECTED = ("LMKV_LOG_FORMAT", "LMKV_LOG_LEVEL", "LMKV_METRICS_PORT", "LMKV_NODE_LINGER")
"""Settings in which a running node may differ from the expected one."""


class NodeLauncher:
    """Finds or starts the engine's node: a process of its own that outlives the engine by `node_linger`."""

    def __init__(self, config: ConnectorConfig, closing: threading.Event) -> None:
        """`closing` ends a wait for the node."""
        self._config = config
        self._closing = closing
        self._node: NodeProcess | None = None

    @property
    def expected_config(self) -> dict[str, str]:
        """Settings that the engine's node must have; empty if the operator named a node by `node_address`."""
        if self._config.node_address:
            return {}
        environment = configuration.to_comparison(self._config.node_config())
        return {key: value for key, value in environment.items() if key not in NOT_EXPECTED}

    def address(self) -> str:
        """gRPC address of a node that listens, started if need be.

        Raises `ConfigError` if it cannot start as configured, `Unreachable` if it does not listen in time.
        """
        if self._config.node_address:
            return f"unix:{self._config.node_address.removeprefix('unix:')}"
        path = self._config.engine_socket
        self._config.make_instance_dir()  # another user's is refused before anything listens to this engine there
        if not listens(path):
            self._start(path)
        return f"unix:{path}"

    def replaces(self, conflict: ConfigConflict) -> bool:
        """Whether the node of another configuration ends in favor of the node that this launcher will start.

        The node decides: it ends if a connector started it and no engine is attached.
        """
        if conflict.metadata.get("replaced") != "true":
            return False
        logger.info("replacing the idle node of an earlier configuration (%s)", conflict)
        return True

    def _start(self, path: Path) -> None:
        log = self._config.make_instance_dir() / "node.log"
        mark = log.stat().st_size if log.exists() else 0
        if self._node is None or not self._node.running:
            self._node = self._spawn(log)
        deadline = time.monotonic() + self._config.node_start_timeout
        while time.monotonic() < deadline and not self._closing.is_set():
            running = self._node.running
            if listens(path):
                return
            if not running:
                reason = last_error(log, mark)
                if not reason:
                    raise Unreachable(f"the node ended without an error message; see {log}")
                if ALREADY_RUN not in reason:
                    raise ConfigError(configuration.as_written(reason, self._config.written))
                # Another engine is starting the same node, or the node that is to end has not ended yet.
                self._closing.wait(RESTART_SECONDS)
                mark = log.stat().st_size
                self._node = self._spawn(log)
            self._closing.wait(READY_POLL_SECONDS)
        raise Unreachable(f"the node is not ready after {self._config.node_start_timeout:.0f} s; see {log}")

    def _spawn(self, log: Path) -> NodeProcess:
        logger.info("starting node %s, log at %s", self._config.instance_id, log)
        environment = configuration.to_environment(self._config.node_config(), child_environment())
        return NodeProcess.start([sys.executable, "-m", "lmkv", "node", *NODE_FLAGS], environment, log)


ENGINES_OWN = ("LD_PRELOAD", "OTEL_SERVICE_NAME")
"""Variables that apply to the engine alone."""


def child_environment() -> dict[str, str]:
    """This process's environment without variables that apply to the engine alone."""
    return {key: value for key, value in os.environ.items() if key not in ENGINES_OWN}


def listens(path: Path) -> bool:
    """Whether a process accepts connections there. The socket file alone may be a dead node's."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # a full backlog means that a process listens
            return True
        except OSError:
            return False
    return True


def last_error(log: Path, mark: int) -> str:
    """The last error in the log since it was `mark` bytes long; empty if there is none.

    Other processes may write there too.
    """
    lines = log.read_bytes()[mark:].decode(errors="replace").splitlines()
    errors = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
    return errors[-1] if errors else ""
