"""What the links of this host can do, and what that means for the order of channels.

`rank` is pure. A node sends its channels in its own order (`Init`), and the peer ranks them again by its own links: a
channel that needs a link comes first only if both hosts have it. NVLink is no such link: it carries device memory, and
pools are host memory. Device buffers of handoffs are always read by NIXL.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

RDMA = "RDMA device"
"""An RDMA device with an active port, which this process may open."""
NEEDED_LINKS: Mapping[str, str] = {"nixl": RDMA}
"""The link without which a channel is slower than the others: NIXL over TCP reaches half of `tcp`'s bandwidth."""


def missing_link(name: str, links: Collection[str]) -> str | None:
    """The link that a channel needs and a host with these links lacks."""
    needed = NEEDED_LINKS.get(name)
    return needed if needed not in links else None


def rank(names: Iterable[str], links: Collection[str]) -> tuple[str, ...]:
    """The channels in this order, but those whose link the host lacks last."""
    return tuple(sorted(names, key=lambda name: missing_link(name, links) is not None))


def find_links(sys: Path = Path("/sys"), dev: Path = Path("/dev")) -> frozenset[str]:
    """The links of the host that has these folders; none where there is no `/sys`."""
    return frozenset({RDMA} if active_rdma_devices(sys) and _may_open_rdma(dev) else ())


def active_rdma_devices(sys: Path) -> list[str]:
    """The RDMA devices (InfiniBand, RoCE, EFA) with an active port, by name."""
    states = sorted(sys.glob("class/infiniband/*/ports/*/state"))
    return list(dict.fromkeys(state.parts[-4] for state in states if _is_active(state)))


def _is_active(state: Path) -> bool:
    """Whether the file of a port's state contains `4: ACTIVE`."""
    try:
        return state.read_text().strip().endswith(": ACTIVE")
    except OSError:  # the device was removed meanwhile
        return False


def _may_open_rdma(dev: Path) -> bool:
    """Whether a device file can be opened. Containers see the devices of their host in `/sys` in any case."""
    return any(os.access(file, os.R_OK | os.W_OK) for file in dev.glob("infiniband/uverbs*"))
