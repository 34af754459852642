"""The contract of channels: the same scenarios for each, between real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.lmkv.transfer.ends import TLS_VARIABLE, environment
from tests.lmkv.transfer.scenarios import SCENARIOS

KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "shm": ("shm", {}),
    "tcp": ("tcp", {}),
    "tcp_with_tls": ("tcp", {TLS_VARIABLE: "in a folder of the scenarios"}),
    "nixl": ("nixl", {}),
    "nixl_over_tcp": ("nixl", {"UCX_TLS": "tcp"}),
    "ucx": ("ucx", {}),
    "mooncake": ("mooncake", {}),
}
"""Name of the channel, and the environment of both ends."""

OF_TLS = (
    "a_peer_killed_while_it_is_read_from_is_noticed",
    "a_frozen_peer_costs_the_deadline_at_most",
    "a_cancelled_read_stops_soon_and_does_not_disturb_the_next",
    "closing_ends_reads_that_run",
)
"""What TLS might change; `test_tcp_encryption` has the rest."""


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
            self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def runner_of() -> Iterator[Callable[[str], Runner]]:
    runners: dict[str, Runner] = {}

    def find(kind: str) -> Runner:
        return runners.setdefault(kind, Runner(kind))

    yield find
    for runner in runners.values():
        runner.close()


@pytest.mark.parametrize(
    ("kind", "scenario"),
    [(kind, scenario) for kind in KINDS for scenario in SCENARIOS if kind != "tcp_with_tls" or scenario in OF_TLS],
)
def test_every_channel(runner_of: Callable[[str], Runner], kind: str, scenario: str) -> None:
    runner_of(kind).run(scenario)
