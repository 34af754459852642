"""Two hosts in miniature: network namespaces, joined by a pair of virtual network cards.

Processes of different hosts share no memory: shared memory within the kernel is separate too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lmkv.errors import LmkvError
from lmkv_client.demo.process import CheckedServer
from tests.waiting import is_listening

BURST = "1mb"
"""A shaped link passes bursts of this size unshaped: 0.8 ms at 10 Gbit/s."""
NETWORK = "198.18.77"
OWN_NETWORK = "198.18.78"
"""Of the addresses that are set aside for benchmarks; the second one is for networks with this host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    address: str
    prefix: Sequence[str] = ()
    """What a command line begins with to run there."""


class NoHosts(LmkvError):
    """This process may not make hosts."""


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts, and removes them. Raises `NoHosts` if this process may not; it needs root."""
    names = [f"lmkv-{os.getpid()}-{number}" for number in (1, 2)]
    cards = [f"lm{os.getpid()}-{number}" for number in (1, 2)]
    apart = ("unshare", "--pid", "--ipc", "--uts", "--fork", "--kill-child")
    hosts = [
        Host(address=f"{NETWORK}.{number}", prefix=("ip", "netns", "exec", name, *apart))
        for number, name in enumerate(names, 1)
    ]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cards[0], "netns", names[0], "type", "veth", "peer", "name", cards[1], "netns", names[1])
        for name, card, host in zip(names, cards, hosts, strict=True):
            _start(card, host, "-n", name)
        yield hosts[0], hosts[1]
    finally:
        for name in names:
            _remove(name)


class HostNode(CheckedServer):
    """An `lmkv node` on another host."""

    def __init__(self, host: Host, name: str, folder: Path, logs: Path, settings: Mapping[str, str]) -> None:
        self._socket = folder / name / "engine.sock"
        command = [*host.prefix, sys.executable, "-m", "lmkv", "node"]
        super().__init__(f"node-{name}", command, logs / f"node-{name}.log", settings)

    def is_ready(self) -> bool:
        """Whether it takes engines."""
        return is_listening(self._socket)


@contextmanager
def this_host_and_another(gbit_per_s: float = 0) -> Iterator[tuple[Host, Host]]:
    """This host with an address for another one, which is made and removed. Raises `NoHosts` as `two_hosts` does.

    The link between them carries no more than `gbit_per_s` in each direction; 0: what the kernel does.
    """
    name, cards = f"lmkv-{os.getpid()}", [f"lm{os.getpid()}-{number}" for number in (1, 2)]
    here = Host(address=f"{OWN_NETWORK}.1")
    there = Host(address=f"{OWN_NETWORK}.2", prefix=("ip", "netns", "exec", name, "unshare", "--ipc", "--uts"))
    try:
        _ip("netns", "add", name)
        _ip("link", "add", cards[0], "type", "veth", "peer", "name", cards[1], "netns", name)
        _start(cards[0], here)
        _start(cards[1], there, "-n", name)
        if gbit_per_s:
            shape = ("root", "tbf", "rate", f"{gbit_per_s:g}gbit", "burst", BURST, "latency", "50ms")
            _call("tc", "qdisc", "add", "dev", cards[0], *shape)
            _call("tc", "-n", name, "qdisc", "add", "dev", cards[1], *shape)
        yield here, there
    finally:
        _remove(name)


def _start(card: str, host: Host, *place: str) -> None:
    _ip(*place, "address", "add", f"{host.address}/24", "dev", card)
    for device in ("lo", card):
        _ip(*place, "link", "set", device, "up")


def _remove(name: str) -> None:
    """Removes a namespace, and with it its card and the card's other end."""
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def _ip(*words: str) -> None:
    _call("ip", *words)


def _call(*words: str) -> None:
    try:
        subprocess.run(words, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        raise NoHosts(f"network namespaces need the program `{words[0]}`") from None
    except subprocess.CalledProcessError as error:
        raise NoHosts(f"{' '.join(words)}: {error.stderr.strip()}") from None
