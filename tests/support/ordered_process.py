"""A process that carries out orders, a line each, and answers with a line of JSON, until its standard input ends."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any, Self

from tests.support.fork_server import ForkedProcess


class OrderedProcess:
    """The process, as the test sees it. A context manager, which ends it."""

    def __init__(self, process: ForkedProcess | subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, order: str) -> Any:
        """Has it carry out an order; its answer."""
        assert self._process.stdin
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._heard()

    def _heard(self) -> Any:
        assert self._process.stdout
        return json.loads(self._process.stdout.readline())

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal; returns from SIGKILL when the process is gone."""
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait()

    def close(self) -> None:
        """Ends it."""
        self._process.send_signal(signal.SIGCONT)
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
