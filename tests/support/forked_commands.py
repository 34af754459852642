"""Forks the processes of `lmkv node`, `lmkv coordinator` and `lmkv proxy` that tests start; see `fork_server`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import pytest

from lmkv_client.demo.process import RunningProcess, ServerProcess
from tests.support.fork_server import PATH_VARIABLE, ForkServer

COMMANDS = ("node", "coordinator", "proxy")
AT_START = ("LD_PRELOAD", "PYTHONHASHSEED")
"""Variables that only the start of a process reads."""
RUN = ([sys.executable, "-m", "lmkv"], [str(Path(sys.executable).with_name("lmkv"))])
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1"}
"""Of the server: no threads of NumPy, which a fork would lose."""


def arguments_of(command: Sequence[str], environment: Mapping[str, str]) -> list[str] | None:
    """The arguments of `lmkv` in a command that can be forked."""
    if any(environment.get(name) != os.environ.get(name) for name in AT_START):
        return None
    for run in RUN:
        if list(command[: len(run)]) == run and command[len(run)] in COMMANDS:
            return list(command[len(run) :])
    return None


@pytest.fixture(scope="session", autouse=True)
def forked_commands(tmp_path_factory: pytest.TempPathFactory, nothing_is_left_behind: None) -> Iterator[None]:
    """Has `ServerProcess` fork the commands: imports are most of their start, and tests start hundreds."""
    others = ServerProcess.launch
    log = tmp_path_factory.mktemp("forked") / "server.log"
    with ForkServer("tests.support.lmkv_worker", log, ENVIRONMENT) as server, pytest.MonkeyPatch.context() as patch:

        def launch(command: Sequence[str], log: IO[bytes], environment: Mapping[str, str]) -> RunningProcess:
            arguments = arguments_of(command, environment)
            if arguments is None:
                return others(command, log, environment)
            return server.launch("lmkv", arguments, log, environment)

        patch.setattr(ServerProcess, "launch", launch)
        patch.setenv(PATH_VARIABLE, server.path)
        server.start()
        yield
