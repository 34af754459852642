"""Finds the node of this host that listens on a port, for the error message of a node that cannot bind it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"
"""State of a listening socket in `/proc/net/tcp`."""


def describe_port(runtime_dir: Path, port: int) -> str:
    """Names the node in a runtime folder that listens on a port, and the fix; empty if none does."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for lock in sorted(runtime_dir.glob("*/lock")):
        with suppress(OSError, ValueError):
            pid = int(lock.read_text())
            if inodes & set(_open_files(pid)):
                return (
                    f"the node of instance {lock.parent.name!r} (process {pid}) has it, and stays for its node_linger "
                    f"after its last engine; stop it with `kill {pid}`, or choose another port"
                )
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    yield fields[9]


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            yield str(descriptor.readlink())
