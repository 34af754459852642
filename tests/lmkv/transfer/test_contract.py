"""The contract of channels: the same scenarios for each, between real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.lmkv.transfer.ends import environment
from tests.lmkv.transfer.scenarios import SCENARIOS

KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "tcp": ("tcp", {}),
    "nixl": ("nixl", {}),
    "nixl_over_tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "ucx": ("ucx", {}),
    "mooncake": ("mooncake", {}),
}
"""Name of the channel, and the environment of both ends."""


class Runner:
    """A process that runs scenarios. It is restarted after a scenario that has ended it."""

    def __init__(self, kind: str) -> None:
        self._kind, self._environment = KINDS[kind]
        self._process: subprocess.Popen[str] | None = None

    def run(self, scenario: str) -> None:
        """Runs one; raises `AssertionError` with what it raised."""
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        process.stdin.write(scenario + "\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith("{"):
                problem = json.loads(line)["problem"]
                assert not problem, problem
                return
        self._process = None
        raise AssertionError(f"the process ended with code {process.wait()}")

    def _start(self) -> subprocess.Popen[str]:
        program = f"from tests.lmkv.transfer.scenarios import serve; serve({self._kind!r})"
        return subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(**self._environment),
        )

    def close(self) -> None:
        """Ends the process."""
        if self._process:
            self._process.communicate(timeout=10)


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[str], Runner]]:
    runners: dict[str, Runner] = {}

    def find(kind: str) -> Runner:
        return runners.setdefault(kind, Runner(kind))

    yield find
    for runner in runners.values():
        runner.close()


@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_channel(runner_of: Callable[[str], Runner], kind: str, scenario: str) -> None:
    runner_of(kind).run(scenario)
