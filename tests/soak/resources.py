"""What each process of a fleet uses, by Linux: memory, file descriptors, threads; and asyncio tasks, by itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from lmkv_client.demo.process import session_pids
from tests.chaos.fleet import Fleet
from tests.chaos.store import Store
from tests.chaos.victim import Victim
from tests.waiting import until

PROGRAM = Path(__file__).with_name("counted_lmkv.py")
PLAIN = ["-m", "lmkv"]
_READ_ONLY = re.compile(r" r--s \S+ \S+ \S+ +/memfd:[^\n]*\n(?:[A-Z][^\n]*\n)*?Rss: +(\d+) kB")
"""A mapping of shared memory without a file, in /proc/PID/smaps."""


@dataclass(kw_only=True, slots=True)
class Usage:
    """Of all processes of a session together."""

    memory_bytes: int = 0
    """Resident anonymous and shared memory, without memory of others that is mapped to be read; not mapped files, which
    the kernel drops when it likes."""
    fds: int = 0
    threads: int = 0
    tasks: int = 0
    """0 for processes that are not lmkv's."""

    def values(self) -> dict[str, int]:
        """All of them, by name."""
        return asdict(self)


class Resources:
    """Reads the usage of all processes of a fleet. To be created before they start; `folder` gets a file of each."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet = fleet
        self._folder = folder

    def prepare(self, victim: Victim) -> None:
        """Makes a process that has not started count its tasks."""
        if not isinstance(victim, Store):
            command = victim.process.command
            index = next(index for index in range(len(command)) if command[index : index + 2] == PLAIN)
            command[index : index + 2] = ["-P", str(PROGRAM), str(self._file(victim))]

    async def usage(self) -> dict[str, Usage]:
        """The usage of each process now, by name. Fails if one does not count its tasks within `WAIT_SECONDS`."""
        read = await asyncio.gather(*(self._read(victim) for victim in self._fleet.victims.values()))
        return dict(zip(self._fleet.victims, read, strict=True))

    async def _read(self, victim: Victim) -> Usage:
        pid = victim.process.pid
        usage = Usage()
        if not isinstance(victim, Store):
            file = self._file(victim)
            file.unlink(missing_ok=True)
            os.kill(pid, signal.SIGUSR1)
            await until(file.exists, f"{victim.name} counts its tasks")
            usage.tasks = int(file.read_text())
        for member in session_pids(pid):
            with suppress(FileNotFoundError, ProcessLookupError):  # a child that has just ended
                add_usage(usage, member)
        return usage

    def _file(self, victim: Victim) -> Path:
        return self._folder / f"{victim.name}.tasks"


def add_usage(usage: Usage, pid: int) -> None:
    """Adds what a process uses. Raises `OSError` if it has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    usage.memory_bytes += 1024 * sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    usage.memory_bytes -= peers_bytes(pid)
    usage.fds += len(list(Path(f"/proc/{pid}/fd").iterdir()))
    usage.threads += int(status["Threads"])


def peers_bytes(pid: int) -> int:
    """Resident bytes of pools that a process maps to read them: they count for the node whose pools they are."""
    found = _READ_ONLY.findall(Path(f"/proc/{pid}/smaps").read_text())
    return 1024 * sum(int(resident_kib) for resident_kib in found)
