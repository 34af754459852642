"""The server from which tests fork processes, and the check for shared memory that a run leaves behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lmkv_client.demo.process import SHARED_MEMORY
from tests.support.fork_server import ROOT
from tests.support.shared_memory import RUN_VARIABLE, SharedMemoryWatch, processes_with
from tests.waiting import wait_until

CLIENT = """
import os, signal, sys, tempfile
from pathlib import Path
from tests.support.fork_server import ForkServer

server = ForkServer("tests.support.lmkv_worker", Path(sys.argv[1], "server.log"), {})
with Path(sys.argv[1], "log").open("wb") as log:
    process = server.launch("http.server", ["0", "--bind", "127.0.0.1"], log, dict(os.environ))
if sys.argv[2] == "frozen":
    os.kill(process.pid, signal.SIGSTOP)
print(process.pid, server._folder.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["running", "frozen"])
def test_processes_end_when_their_client_was_killed(tmp_path: Path, state: str) -> None:
    client = subprocess.run(
        [sys.executable, "-c", CLIENT, str(tmp_path), state], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=120
    )
    assert client.returncode == -signal.SIGKILL, (tmp_path / "server.log").read_text()
    pid, folder = client.stdout.split()
    shutil.rmtree(folder)
    wait_until(lambda: not Path("/proc", pid).exists(), "the process has ended")


HOLD = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); sys.stdin.read()"


@contextmanager
def held(path: Path, mark: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run with this mark that has the file open and leaves it behind when it is killed."""
    command = [sys.executable, "-c", HOLD, str(path)]
    environment = os.environ | {RUN_VARIABLE: mark}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def paths() -> Iterator[list[Path]]:
    """Files as pools are named, gone afterwards."""
    mark = uuid.uuid4().hex
    paths = [SHARED_MEMORY / f"lmkv-{os.getuid()}-{mark}-{number}.pool" for number in range(6)]
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


def test_only_memory_that_the_run_held_is_left_behind_by_it(paths: list[Path]) -> None:
    outer = os.environ[RUN_VARIABLE]  # so that the run around this test ends what this test cannot
    run, other = f"{outer}/{uuid.uuid4().hex}", f"{outer}/{uuid.uuid4().hex}"
    earlier, killed, inner, removed, others, gone = paths
    with held(earlier, run):
        watch = SharedMemoryWatch(run)
        with held(killed, run) as process, held(others, other):
            assert watch.wait() == killed.name
            assert process.pid in processes_with(run)
        with held(inner, f"{run}/inner"):
            assert watch.wait() == inner.name
        with held(removed, run):
            assert watch.wait() == removed.name
        removed.unlink()
        gone.touch()  # as after the kill of a process that this watch has not seen
        assert watch.close() == {killed.name, inner.name}
