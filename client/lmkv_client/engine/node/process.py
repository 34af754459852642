"""A node process that outlives the engine that started it. Used by the launcher."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_STARTER = '"$@" >&2 & echo $!'
"""Starts a command in the background, prints its process id and ends: the command is then no child of this process."""


class NodeProcess:
    """A process in a session of its own that is no child of this one.

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
    """When a process began, in the kernel's words; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
