"""Memory available to this process, by the machine and its cgroups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmkv.runtime.cgroups import CGROUP_ROOT, PROC, memory_cgroups


def available_bytes(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes that can be allocated without swapping and within the limits of all cgroups of this process.

    A snapshot: other processes may allocate them first.
    """
    limits = [_machine_bytes(proc)]
    limits += (cgroup.free_bytes for cgroup in memory_cgroups(proc, cgroup_root) if cgroup.free_bytes is not None)
    return max(0, min(limits))


@dataclass(frozen=True, kw_only=True, slots=True)
class HugePages:
    """The reserved huge pages of the machine."""

    page_bytes: int
    free_bytes: int
    """Bytes of pages that are neither used nor reserved."""


def huge_pages(proc: Path = PROC) -> HugePages:
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
