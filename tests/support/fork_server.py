"""Processes forked from one that has imported what they need, instead of started: the imports are most of a start.

Such a process is as one that `subprocess.Popen` starts with `start_new_session`: it has a session, files, environment
and arguments of its own, and reports its exit status. It differs in `/proc`, which shows the command line and the
environment of the server, and in what is decided at import: see `ForkServer.launch`.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Self

ROOT = Path(__file__).parents[2]
PATH_VARIABLE = "TESTS_OF_LMKV_FORK_SERVER"
"""Path of the server that `start_module` uses: `forked_commands` sets it, for processes of the tests too."""
READY_TIMEOUT_SECONDS = 600.0
STOP_TIMEOUT_SECONDS = 60.0
MOST_FILES = 8
"""Descriptors that a request may bring: standard input, output and error, and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a new process is to be."""

    environment: dict[str, str]
    folder: str
    module: str = ""
    """Runs as `python -m MODULE ARGUMENTS`, if there is one."""
    arguments: tuple[str, ...] = ()


# --- The server ------------------------------------------------------------------------------------------------------


def serve(path: str, run: Callable[[Request, list[int]], None]) -> None:
    """Forks a process for each connection to `path`, which calls `run` with the request and further descriptors.

    Returns when standard input ends: with the process that has started the server, whatever ended that. Then it stops
    the processes that still run.
    """
    gc.collect()
    gc.freeze()  # a collection would copy the pages that processes share
    connections: dict[int, socket.socket] = {}
    wakes, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        while True:
            ready, _, _ = select.select([listener.fileno(), wakes, 0], [], [])
            if 0 in ready:
                _stop(connections)
                return
            if wakes in ready:
                os.read(wakes, 4096)
                _report_ended(connections)
            if listener.fileno() not in ready:
                continue
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for inherited in (listener, *connections.values()):
                    inherited.close()
                for descriptor in (wakes, waker):
                    os.close(descriptor)
                os._exit(_become(connection, run))  # all that Python would tidy up is the server's
            connections[pid] = connection


def _report_ended(connections: dict[int, socket.socket]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        with connections.pop(pid) as connection, suppress(OSError):  # the client has ended
            connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _stop(pids: Iterable[int]) -> None:
    """Stops processes and what else is in their sessions, frozen ones too."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
            os.killpg(pid, signal.SIGCONT)


def _become(connection: socket.socket, run: Callable[[Request, list[int]], None]) -> int:
    """Turns this process into the requested one; the exit status."""
    try:
        with connection, connection.makefile("rw") as lines:
            _, files, _, _ = socket.recv_fds(connection, 1, MOST_FILES)
            request = Request(**json.loads(lines.readline()))
            os.setsid()
            for number, file in enumerate(files[:3]):
                os.dup2(file, number)
                os.close(file)
            os.chdir(request.folder)
            os.environ.clear()
            os.environ.update(request.environment)
            tempfile.tempdir = None  # of the environment
            sys.path[:0] = filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
            lines.write(f"{os.getpid()}\n")
        return _status_of(lambda: run(request, files[3:]))
    except BaseException:
        traceback.print_exc()
        return 1


def _status_of(run: Callable[[], None]) -> int:
    """Runs a program to its end, as the interpreter does; its exit status."""
    status = 0
    try:
        run()
    except SystemExit as error:
        if isinstance(error.code, int):
            status = error.code
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            status = 1
    except BaseException:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def run_module(request: Request) -> None:
    """Becomes `python -m MODULE ARGUMENTS`."""
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it is imported already
    sys.argv = [request.module, *request.arguments]
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


# --- Its client ------------------------------------------------------------------------------------------------------


class ForkedProcess:
    """A process that the server forked, with what the tests use of `subprocess.Popen`."""

    def __init__(self, connection: socket.socket) -> None:
        """The server reports the end of the process on the connection, which this closes."""
        self._connection = connection.detach()  # a descriptor: the collector would complain of an open socket
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.returncode: int | None = None
        pid = self._line()
        assert pid, "the fork server ended"
        self.pid = int(pid)

    def poll(self) -> int | None:
        """None while it runs, then its exit status: negative after a signal."""
        self._wait_for_end(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._wait_for_end(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("forked process", timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Closes its standard input and waits for its end; the rest of its output, which must be short."""
        if self.stdin:
            with suppress(BrokenPipeError):
                self.stdin.close()
        self.wait(timeout)
        if self.stdout is None:
            return "", None
        with self.stdout:
            return self.stdout.read(), None

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _wait_for_end(self, timeout: float | None) -> None:
        if self.returncode is not None:
            return
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        if poll.poll(None if timeout is None else timeout * 1000):
            line = self._line()
            self.returncode = int(line) if line else -signal.SIGKILL  # the server has ended: nothing more is known
            self._close()

    def _line(self) -> bytes:
        """The next line; empty if the server has ended."""
        line = b""
        while not line.endswith(b"\n"):
            if not (character := os.read(self._connection, 1)):
                return b""
            line += character
        return line

    def _close(self) -> None:
        if self._connection >= 0:
            os.close(self._connection)
            self._connection = -1

    def __del__(self) -> None:
        self._close()


def connected(path: str) -> socket.socket:
    """A new connection to a server."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        raise
    return connection


def connected_when_ready(path: str, has_ended: Callable[[], bool] = lambda: False) -> socket.socket:
    """Waits until the server is ready. Raises `TimeoutError` if it is not in time, or has ended."""
    deadline = time.monotonic() + READY_TIMEOUT_SECONDS
    while time.monotonic() < deadline and not has_ended():
        with suppress(OSError):
            return connected(path)
        time.sleep(0.05)
    raise TimeoutError("the fork server is not ready")


def fork(connection: socket.socket, request: Request, files: Sequence[int]) -> ForkedProcess:
    """Forks a process, by a new connection, whose standard input, output and error are these files; more if wanted."""
    socket.send_fds(connection, [b"."], list(files))
    connection.sendall(json.dumps(asdict(request)).encode() + b"\n")
    return ForkedProcess(connection)


def _fork_with_log(connection: socket.socket, request: Request, log: IO[bytes]) -> ForkedProcess:
    with Path(os.devnull).open("rb") as nothing:
        return fork(connection, request, [nothing.fileno(), log.fileno(), log.fileno()])


def start_module(
    module: str, *arguments: object, environment: Mapping[str, str], log: IO[bytes] | None = None
) -> ForkedProcess:
    """Starts `python -m MODULE ARGUMENTS`, with output to `log`, else with pipes for standard input and output."""
    request = Request(
        module=module,
        arguments=tuple(map(str, arguments)),
        environment=dict(environment),
        folder=str(Path.cwd()),
    )
    connection = connected_when_ready(os.environ[PATH_VARIABLE])
    if log:
        return _fork_with_log(connection, request, log)
    theirs, stdin = os.pipe()
    stdout, their_stdout = os.pipe()
    process = fork(connection, request, [theirs, their_stdout, 2])
    for descriptor in (theirs, their_stdout):
        os.close(descriptor)
    process.stdin, process.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)
    return process


class ForkServer:
    """A server that has imported some modules. It starts with the first process, or by `start`. A context manager."""

    def __init__(self, module: str, log: Path, environment: Mapping[str, str]) -> None:
        """`module` of the tests imports what its processes need, and calls `serve` with its argument."""
        self._folder = tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp")
        self.path = str(Path(self._folder.name, "fork.sock"))
        """Its socket."""
        self._command = [sys.executable, "-m", module, self.path]
        self._log = log
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the server without waiting until it is ready. Idempotent."""
        if self._process is None:
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    self._command,
                    cwd=ROOT,
                    env=os.environ | self._environment,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def connect(self) -> socket.socket:
        """A connection for `fork`. Waits until the server is ready."""
        self.start()
        try:
            return connected_when_ready(self.path, self._has_ended)
        except TimeoutError as error:
            raise AssertionError(f"the fork server is not ready:\n{self._log.read_text()}") from error

    def launch(
        self, module: str, arguments: Sequence[str], log: IO[bytes], environment: Mapping[str, str]
    ) -> ForkedProcess:
        """As `lmkv_client.demo.process.launch`, for `python -m MODULE ARGUMENTS`."""
        request = Request(
            module=module, arguments=tuple(arguments), environment=dict(environment), folder=str(Path.cwd())
        )
        return _fork_with_log(self.connect(), request, log)

    def _has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            try:
                self._process.communicate(timeout=STOP_TIMEOUT_SECONDS)  # closes its standard input
            except subprocess.TimeoutExpired:  # it still imports
                self._process.kill()
                self._process.communicate(timeout=STOP_TIMEOUT_SECONDS)
        self._folder.cleanup()
