"""A fake of the folders by which Linux shows RDMA devices: no machine of the tests has one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lmkv.transfer import channels
from lmkv.transfer.choice import find_links


def fake_rdma(folder: Path, states: Sequence[str] = ("4: ACTIVE",)) -> None:
    """Makes `sys` and `dev` of a machine that has one RDMA device, with a port for each state."""
    for number, state in enumerate(states, 1):
        port = folder / f"sys/class/infiniband/mlx5_0/ports/{number}"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
    (folder / "dev/infiniband").mkdir(parents=True)
    (folder / "dev/infiniband/uverbs0").touch()


def use_links_of(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that are started from now on find the links of this machine."""
    monkeypatch.setattr(channels, "find_links", lambda: find_links(folder / "sys", folder / "dev"))
