"""Launches server processes on this host: for the demo, the tests and the benchmarks.

Linux only: reads from /proc which processes belong to a server.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar, Protocol, Self

from lmkv.errors import LmkvError

POLL_SECONDS = 0.05
PORT_CLASSES = 32
"""Number of disjoint sets of ports, of which a process chooses from one."""
SHARED_MEMORY = Path("/dev/shm")  # where POSIX shared memory is
LEFT_BY_ENGINES = ("vllm_dist_", "sgl_shm_mq_", "sglang_loads_")
"""The beginnings of the names of shared memory that vLLM and SGLang leave behind when a signal ends them."""

_returned_ports: deque[int] = deque(maxlen=100)

_CAUSE = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): (?!.*See root cause).+(?:\n +Value error, .+)?")
"""The last line of a Python traceback, also of pydantic's; not vLLM's reference to an earlier error."""


class RunningProcess(Protocol):
    """The methods of a process that `ServerProcess` needs. `subprocess.Popen` has them."""

    @property
    def pid(self) -> int:
        """Process id; also the id of its session."""

    def poll(self) -> int | None:
        """None while it runs, then its exit status."""

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it exits. Raises `subprocess.TimeoutExpired`."""

    def terminate(self) -> None:
        """Sends SIGTERM."""


def launch(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> RunningProcess:
    """Starts `command` in its own session, with output to `log` and with exactly this environment."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
    )


class ServerProcess:
    """A process in its own session, with a log file.

    `stop` and `kill` end all processes of the session, and remove the shared memory that an engine leaves behind. A
    child with its own session, such as a node that an engine starts, survives them.
    """

    launch: ClassVar[Callable[[Sequence[str], IO[bytes], Mapping[str, str]], RunningProcess]] = staticmethod(launch)
    """Function that starts processes."""

    def __init__(
        self, name: str, command: Sequence[str], log_file: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment` is added to the environment of this process without `LMKV_...`. `start` starts the process."""
        self.name = name
        self.command = list(command)
        self.log_file = log_file
        self.environment = dict(environment or {})
        self._process: RunningProcess | None = None
        self._stop_requested = False
        self._shared_memory = set[Path]()

    def start(self) -> None:
        """Starts the process, also again after it exited. Appends to the log."""
        assert not self.alive, f"{self.name} is already running"
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("LMKV_")}
        self._stop_requested = False
        with self.log_file.open("ab") as log:
            self._process = ServerProcess.launch(self.command, log, inherited | self.environment)

    @property
    def pid(self) -> int:
        """Process id; also the id of its session."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it was started and has not exited."""
        return self._process is not None and self._process.poll() is None

    def wait_until(self, ready: Callable[[], bool], what: str, timeout_seconds: float) -> None:
        """Waits until `ready` returns true.

        Raises `LmkvError` on timeout and if the process exits, with the end of the log as a note.
        """
        deadline = time.monotonic() + timeout_seconds
        while self.alive:
            if ready():
                return
            if time.monotonic() > deadline:
                raise self._failed(f"was not {what} within {timeout_seconds:.0f} s")
            time.sleep(POLL_SECONDS)
        raise self._failed(f"exited before it was {what}")

    def log(self) -> str:
        """The content of the log."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def _failed(self, what: str) -> LmkvError:
        log = self.log()
        causes = _CAUSE.findall(log) or log.strip().splitlines()
        cause = " ".join(causes[-1].split()) if causes else "the log is empty"
        error = LmkvError(f"{self.name} {what}: {cause}", log=self.log_file)
        error.add_note("\n".join([f"The end of {self.log_file}:", *log.splitlines()[-30:]]))
        return error

    def request_stop(self) -> None:
        """Sends SIGTERM without waiting. Idempotent, since some servers skip their clean-up at a second signal."""
        if self._process is not None and self.alive and not self._stop_requested:
            self._stop_requested = True
            self._shared_memory |= left_by_engines(session_pids(self._process.pid))
            self._process.terminate()

    def stop(self, timeout_seconds: float = 20.0) -> None:
        """Sends SIGTERM, and kills the rest of the session after the timeout. Idempotent."""
        if self._process is None:
            return
        self.request_stop()
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            pass
        self.kill()

    def kill(self) -> None:
        """Kills all processes of the session (SIGKILL) and waits until they have exited. Idempotent."""
        if self._process is None:
            return
        session = self._process.pid
        self._shared_memory |= left_by_engines(session_pids(session))
        deadline = time.monotonic() + 10.0
        while True:
            for pid in (members := session_pids(session)):
                _signal(pid, signal.SIGKILL)
            self._process.poll()
            if not members:
                break
            if time.monotonic() > deadline:
                raise LmkvError(f"{self.name}: processes {members} survived SIGKILL")
            time.sleep(0.01)
        self._process.wait(10.0)
        while self._shared_memory:
            self._shared_memory.pop().unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class CheckedServer(ServerProcess, ABC):
    """A server with a readiness check. Entering it starts it and waits until it is ready."""

    ready_timeout_seconds = 120.0
    """Deadline for it to become ready."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves requests."""

    def wait_ready(self) -> None:
        """Waits until it is ready. Raises `LmkvError` with the end of its log on timeout and if it exits."""
        self.wait_until(self.is_ready, "ready", self.ready_timeout_seconds)

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self


def free_port() -> int:
    """A free TCP port on loopback, outside the range that the system assigns to connections.

    A port that was returned may not be in use yet: none is returned again soon, and processes with close ids choose
    from different ports.
    """
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    own = range(10_000 + os.getpid() % PORT_CLASSES, max(lowest, 20_000), PORT_CLASSES)
    while True:
        port = random.SystemRandom().choice(own)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _returned_ports:
            _returned_ports.append(port)
            return port


def available_memory_bytes() -> int:
    """Memory that new processes can use without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise LmkvError("/proc/meminfo has no MemAvailable")


def session_pids(session: int) -> list[int]:
    """Processes of a session, without zombies."""
    members = []
    for pid in _all_pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, own_session = stat.rpartition(")")[2].split()[:4]
        if int(own_session) == session and state not in "ZX":
            members.append(pid)
    return members


def left_by_engines(pids: Sequence[int]) -> set[Path]:
    """The shared memory that these processes map, if engines leave it behind when a signal ends them."""
    found = set[Path]()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for name in re.findall(rf"{SHARED_MEMORY}/([^/\n]+)", maps):
            if name.startswith(LEFT_BY_ENGINES) and not name.endswith(" (deleted)"):
                found.add(SHARED_MEMORY / name)
    return found


def pids_with_environment(variables: Mapping[str, str], word: str) -> list[int]:
    """Processes with these environment variables and with `word` in their command line.

    Finds the nodes that engines have started.
    """
    wanted = {f"{name}={value}".encode() for name, value in variables.items()}
    found = []
    for pid in _all_pids():
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if wanted <= set(environment) and word.encode() in command:
            found.append(pid)
    return found


def end_processes(pids: Sequence[int], timeout_seconds: float = 10.0) -> None:
    """Sends SIGTERM, and SIGKILL to those that have not exited after the timeout. Ignores unknown ids."""
    for pid in pids:
        _signal(pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout_seconds
    while (left := [pid for pid in pids if _is_alive(pid)]) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for pid in left:
        _signal(pid, signal.SIGKILL)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
