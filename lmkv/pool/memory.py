"""How much memory this process may still take: the machine's and its cgroups'. The pool asks before it is created."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")
# Per version: limit, usage, and the line of memory.stat that counts file pages which the kernel gives up first.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(proc: Path = Path("/proc"), cgroup_root: Path = _CGROUP_ROOT) -> int:
    """Bytes that can be had without swapping and without meeting the limit of any cgroup above this process.

    A promise for now only: others may take them first.
    """
    limits = [_machine_bytes(proc)]
    for directory, files in _cgroups(proc, cgroup_root):
        free = _cgroup_bytes(directory, *files)
        if free is not None:
            limits.append(free)
    return max(0, min(limits))


@dataclass(frozen=True, kw_only=True, slots=True)
class HugePages:
    """The huge pages that the machine has set apart."""

    page_bytes: int
    free_bytes: int
    """Of those that nobody has, or has a claim on."""


def huge_pages(proc: Path = Path("/proc")) -> HugePages:
    """What there is of huge pages of the default size; none where the kernel has none."""
    numbers = _meminfo(proc)
    page_bytes = numbers.get("Hugepagesize", 0) * 1024
    count = numbers.get("HugePages_Free", 0) - numbers.get("HugePages_Rsvd", 0)
    return HugePages(page_bytes=page_bytes, free_bytes=max(0, count) * page_bytes)


def _machine_bytes(proc: Path) -> int:
    available = _meminfo(proc).get("MemAvailable")
    return 1 << 62 if available is None else available * 1024  # a kernel that does not say


def _meminfo(proc: Path) -> dict[str, int]:
    """Numbers by name; those of memory in KiB."""
    lines = (line.partition(":") for line in (proc / "meminfo").read_text().splitlines())
    return {name: int(value.split()[0]) for name, _, value in lines if value.split()}


def _cgroups(proc: Path, root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Every directory whose limit counts for this process: its own and all above it.

    In a container the path that the kernel names may not be mounted; then the top of the mount is the container's own.
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
