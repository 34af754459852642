"""Memory available to this process, by the machine and its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Per version: limit, usage, and the line of memory.stat with the file pages that the kernel reclaims first.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Bytes that can be allocated without swapping and within the limits of all cgroups of this process.

    A snapshot: other processes may allocate them first.
    """
    limits = [_machine_bytes(proc)]
    for directory, files in _cgroups(proc, cgroup_root):
        free = _cgroup_bytes(directory, *files)
        if free is not None:
            limits.append(free)
    return max(0, min(limits))


@dataclass(frozen=True, kw_only=True, slots=True)
class HugePages:
    """The reserved huge pages of the machine."""

    page_bytes: int
    free_bytes: int
    """Bytes of pages that are neither used nor reserved."""


def huge_pages(proc: Path = Path("/proc")) -> HugePages:
    """Reserved huge pages of the default size; zero if the kernel has none."""
    numbers = _meminfo(proc)
    page_bytes = numbers.get("Hugepagesize", 0) * 1024
    count = numbers.get("HugePages_Free", 0) - numbers.get("HugePages_Rsvd", 0)
    return HugePages(page_bytes=page_bytes, free_bytes=max(0, count) * page_bytes)


def _machine_bytes(proc: Path) -> int:
    available = _meminfo(proc).get("MemAvailable")
    return 1 << 62 if available is None else available * 1024  # not reported by this kernel


def _meminfo(proc: Path) -> dict[str, int]:
    """The numbers of /proc/meminfo by name; memory is in KiB."""
    lines = (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.split()}


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """The directories of all cgroups of this process, from its own to the root.

    In a container the path in /proc may not be mounted; the root of the mount is then the container's cgroup.
    """
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, files = root, _V2
        elif "memory" in controllers.split(","):
            top, files = root / "memory", _V1
        else:
            continue
        own = top / path.lstrip("/")
        for directory in (own, *own.parents):
            yield directory, files
            if directory == top:
                break


def _cgroup_bytes(directory: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """Bytes left under one cgroup's limit; None if it has none."""
    try:
        most = (directory / limit).read_text().strip()
        used = int((directory / usage).read_text())
        stat = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    if most == "max":
        return None
    return int(most) - used + int(stat.get(reclaimable, 0))
