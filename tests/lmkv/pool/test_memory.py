"""The available memory, read from files in the kernel's format."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.pool.memory import HugePages, available_bytes, huge_pages

GB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with 10 GB available, in no cgroup."""
    directory = tmp_path / "proc"
    (directory / "self").mkdir(parents=True)
    (directory / "meminfo").write_text(f"MemTotal: {20 * GB // 1024} kB\nMemAvailable:   {10 * GB // 1024} kB\n")
    (directory / "self" / "cgroup").write_text("")
    return directory


def cgroup(directory: Path, limit: str, used: int, **stat: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current")
    if "memory" in directory.parts:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (directory / names[0]).write_text(f"{limit}\n")
    (directory / names[1]).write_text(f"{used}\n")
    (directory / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in {"anon": 1, **stat}.items()))


def test_this_machine_has_some() -> None:
    assert available_bytes() > 1 << 20


def test_without_cgroups_the_machine_decides(proc: Path, tmp_path: Path) -> None:
    assert available_bytes(proc, tmp_path / "none") == 10 * GB


def test_the_tightest_cgroup_above_decides(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/pod/engine\n")
    root = tmp_path / "cgroup"
    cgroup(root / "pod" / "engine", "max", 1 * GB)
    assert available_bytes(proc, root) == 10 * GB
    cgroup(root / "pod", str(8 * GB), 3 * GB, inactive_file=1 * GB)
    assert available_bytes(proc, root) == 6 * GB
    cgroup(root / "pod" / "engine", str(4 * GB), 3 * GB)
    assert available_bytes(proc, root) == 1 * GB
    cgroup(root / "pod" / "engine", str(2 * GB), 3 * GB)
    assert available_bytes(proc, root) == 0


def test_cgroups_of_version_1_count_too(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("5:devices:/\n4:cpu,memory:/pod\n0::/\n")
    root = tmp_path / "cgroup"
    cgroup(root / "memory", str(2**63 - 4096), 1 * GB)
    assert available_bytes(proc, root) == 10 * GB
    cgroup(root / "memory" / "pod", str(3 * GB), 2 * GB, total_inactive_file=GB // 2)
    assert available_bytes(proc, root) == 3 * GB // 2


def test_a_path_that_is_not_mounted_here_means_the_top_of_the_mount(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/kubepods/pod1/container\n")
    cgroup(tmp_path / "cgroup", str(5 * GB), 1 * GB)
    assert available_bytes(proc, tmp_path / "cgroup") == 4 * GB


def test_huge_pages_that_are_promised_are_not_free(proc: Path) -> None:
    assert huge_pages(proc) == HugePages(page_bytes=0, free_bytes=0)
    with (proc / "meminfo").open("a") as file:
        file.write("HugePages_Total: 12\nHugePages_Free: 10\nHugePages_Rsvd: 3\nHugepagesize: 2048 kB\n")
    assert huge_pages(proc) == HugePages(page_bytes=2 << 20, free_bytes=14 << 20)
