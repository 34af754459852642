"""`vllm` of the tests: forks it from the nursery, which has vLLM imported, and is in its place until it ends."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from tests.support.fork_server import Request, connected_when_ready, fork  # noqa: E402 # behind its path


def main(path: str, arguments: list[str]) -> int:
    """Passes files, environment and signals on; the exit status."""
    request = Request(
        module="vllm.entrypoints.cli.main",
        arguments=tuple(arguments),
        environment=dict(os.environ),
        folder=str(Path.cwd()),
    )
    process = fork(connected_when_ready(path), request, [0, 1, 2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: os.kill(process.pid, number))
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
