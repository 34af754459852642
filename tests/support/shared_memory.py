"""Shared memory that a run of the tests leaves behind: only what its own processes held, since other runs have theirs.

The files in `/dev/shm` do not show who has made them, and a process that is killed takes that with it. So a process
beside the run looks while they are held: `python -m tests.support.shared_memory MARK PID` prints each new name once.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

from lmkv_client.demo.process import LEFT_BY_ENGINES, SHARED_MEMORY

RUN_VARIABLE = "TESTS_OF_LMKV"
"""Set for every process that the tests start; not `LMKV_...`, since those are configuration.

A run within a run adds to the value: `OUTER/INNER`. A process belongs to both.
"""
POLL_SECONDS = 0.1
MOST_LOOKS = 20
"""Number of times that it looks for a process that holds a new file. Memory without one belongs to no run."""
ROOT = Path(__file__).parents[2]


def processes_with(mark: str) -> dict[int, str]:
    """Commands of the processes of the run with this mark, zombies left out, by process id."""
    found = {}
    for pid in _pids():
        try:
            if pid != os.getpid() and _has_mark(pid, mark):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[pid] = command.strip()
        except OSError:  # it ended, or it is another user's
            continue
    return found


class SharedMemoryWatch:
    """Records which shared memory of lmkv and of engines the processes of one run have held, from now until `close`."""

    def __init__(self, mark: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != RUN_VARIABLE}
        command = [sys.executable, "-m", __name__, mark, str(os.getpid()), *sorted(_names())]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._held: set[str] = set()

    def wait(self) -> str:
        """Waits for the next file that a process of the run holds, and returns its name."""
        assert self._process.stdout is not None
        name = self._process.stdout.readline().decode().rstrip("\n")
        self._held.add(name)
        return name

    def close(self) -> set[str]:
        """Ends the watch, and returns the names of the files that were held and are left."""
        output, _ = self._process.communicate()
        return (self._held | set(output.decode().splitlines())) & _names()


def watch(mark: str, pid: int, known: set[str]) -> None:
    """Prints the name of each new file that the process `pid` or one with the mark holds, until standard input ends."""
    looks = dict.fromkeys(known, MOST_LOOKS)
    ended = False
    while not ended:
        ended = bool(select.select([0], [], [], POLL_SECONDS)[0])
        new = {name for name in _names() if looks.get(name, 0) < MOST_LOOKS}
        for name, holders in _holders(new).items() if new else ():
            looks[name] = MOST_LOOKS if holders else looks.get(name, 0) + 1
            if any(holder == pid or _has_mark(holder, mark) for holder in holders):
                print(name, flush=True)


def _holders(names: set[str]) -> dict[str, set[int]]:
    """For each of these files the processes of this user that map it or have it open."""
    found: dict[str, set[int]] = {name: set() for name in sorted(names)}
    for pid in _pids():
        try:
            places = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir()]
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:  # it ended, or it is another user's
            continue
        for name in names:
            if SHARED_MEMORY / name in places or f"{SHARED_MEMORY / name}\n" in maps:
                found[name].add(pid)
    return found


def _has_mark(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    own = f"{RUN_VARIABLE}={mark}".encode()
    return any(entry == own or entry.startswith(own + b"/") for entry in environment)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _names() -> set[str]:
    if not SHARED_MEMORY.is_dir():
        return set()
    names = {entry.name for entry in SHARED_MEMORY.iterdir()}
    return {name for name in names if "lmkv" in name or name.startswith(LEFT_BY_ENGINES)}


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), set(sys.argv[3:]))
