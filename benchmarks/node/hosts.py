"""Two hosts in miniature: network namespaces, joined by a pair of virtual network cards.

Processes of different hosts share no memory: shared memory within the kernel is separate too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lmkv.errors import LmkvError

NETWORK = "198.18.77"
"""Of the addresses that are set aside for benchmarks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One host."""

    address: str
    prefix: Sequence[str] = ()
    """What a command line begins with to run there."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts, and removes them. Raises `LmkvError` if this process may not; it needs root."""
    names = [f"lmkv-{os.getpid()}-{number}" for number in (1, 2)]
    cards = [f"lm{os.getpid()}-{number}" for number in (1, 2)]
    hosts = [
        Host(
            address=f"{NETWORK}.{number}",
            prefix=("ip", "netns", "exec", name, "unshare", "--pid", "--ipc", "--uts", "--fork", "--kill-child"),
        )
        for number, name in enumerate(names, 1)
    ]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cards[0], "netns", names[0], "type", "veth", "peer", "name", cards[1], "netns", names[1])
        for name, card, host in zip(names, cards, hosts, strict=True):
            _ip("-n", name, "address", "add", f"{host.address}/24", "dev", card)
            for device in ("lo", card):
                _ip("-n", name, "link", "set", device, "up")
        yield hosts[0], hosts[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # and its card


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise LmkvError("network namespaces need the program `ip`") from None
    except subprocess.CalledProcessError as error:
        raise LmkvError(f"ip {' '.join(words)}: {error.stderr.strip()}") from None
