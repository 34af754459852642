"""The memory cgroups of this process: its own and all above it, of version 1 and 2. Any may have the least limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Limits from here on are none: version 1 has the largest number of whole pages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCgroup:
    """One cgroup, by its files."""

    directory: Path
    limit: str
    usage: str
    reclaimable: str
    """The line of memory.stat with the file pages that the kernel reclaims first."""

    @property
    def limit_bytes(self) -> int | None:
        """The bytes that its processes may use together; None: it has no limit."""
        try:
            most = int((self.directory / self.limit).read_text())
        except (OSError, ValueError):  # there is no such file, or it says `max`
            return None
        return most if most < _UNLIMITED else None

    @property
    def free_bytes(self) -> int | None:
        """The bytes that are left under the limit; None: it has none."""
        most = self.limit_bytes
        if most is None:
            return None
        try:
            used = int((self.directory / self.usage).read_text())
            stat = dict(line.split() for line in (self.directory / "memory.stat").read_text().splitlines())
        except OSError:
            return None
        return most - used + int(stat.get(self.reclaimable, 0))


def memory_cgroups(proc: Path = PROC, root: Path = CGROUP_ROOT) -> Iterator[MemoryCgroup]:
    """All cgroups of this process, from its own to the root.

    In a container the path in /proc may not be mounted; the root of the mount is then the container's cgroup.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = top / path.lstrip("/")
        for directory in (own, *own.parents):
            yield MemoryCgroup(directory=directory, limit=files[0], usage=files[1], reclaimable=files[2])
            if directory == top:
                break
