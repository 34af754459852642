"""Memory available to this process, by the machine and its cgroups, and the NUMA node that it is bound to."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path

from lmkv.errors import ConfigError
from lmkv.runtime.memory_budget import CGROUP_ROOT, PROC, memory_cgroups


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


_SYS = Path("/sys")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # PCI vendor, and prefix of the class of GPUs
_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1
_MASK_BITS = 1024  # number of nodes in a mask


def node_for(setting: str, sys: Path = _SYS) -> int | None:
    """The node for a value of `numa_node`: `auto`, `none` or a number. None: the kernel decides.

    Raises `ConfigError` if the node does not exist.
    """
    if setting == "none":
        return None
    online = _online(sys)
    if setting == "auto":
        return nearest_node(sys) if len(online) > 1 else None
    if int(setting) not in online:
        known = ", ".join(map(str, online))
        raise ConfigError(f"numa_node: node {setting} does not exist, only {known}; set one of those, or auto")
    return int(setting)


def nearest_node(sys: Path = _SYS) -> int | None:
    """The node of all GPUs; if there are none or they are on several nodes, the node of all RDMA cards."""
    gpus = {
        _node_of(device)
        for device in (sys / "bus/pci/devices").glob("*")
        if _read(device / "vendor") == _NVIDIA and _read(device / "class").startswith(_DISPLAY)
    }
    cards = {_node_of(card / "device") for card in (sys / "class/infiniband").glob("*")}
    for nodes in (gpus, cards):
        if len(nodes) == 1 and (node := nodes.pop()) >= 0:
            return node
    return None


def node_of_pci(address: str, sys: Path = _SYS) -> int | None:
    """The node of a device by its PCI address, such as `0000:3b:00.0`; None if unknown."""
    node = _node_of(sys / "bus/pci/devices" / address)
    return node if node >= 0 else None


def prefer(address: int, size_bytes: int, node: int) -> bool:
    """Makes the kernel prefer a node for the memory of a shared mapping, for all processes that map it.

    `address` must be page-aligned. Affects only memory that is not populated yet. Returns False if the kernel does not
    allow it, as in some containers.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    libc = ctypes.CDLL(None, use_errno=True)
    status = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_size_t(size_bytes),
        ctypes.c_int(_PREFERRED),
        mask,
        ctypes.c_ulong(_MASK_BITS + 1),  # the kernel subtracts one
        ctypes.c_uint(0),
    )
    return bool(status == 0)


def _online(sys: Path) -> list[int]:
    """Numbers of the nodes, from a list such as `0-1,4`."""
    nodes: list[int] = []
    for part in filter(None, _read(sys / "devices/system/node/online").split(",")):
        first, _, last = part.partition("-")
        nodes += range(int(first), int(last or first) + 1)
    return nodes or [0]


def _node_of(device: Path) -> int:
    """The node of a PCI device; negative if unknown."""
    return int(_read(device / "numa_node") or -1)


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
