"""The server that processes of the tests are forked from."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fork_server import ROOT
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
