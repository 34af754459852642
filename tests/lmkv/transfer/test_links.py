"""Which links a host has, on machines of all kinds, and which channel comes first on two of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.transfer.channels import AUTO_NAMES, names_of
from lmkv.transfer.choice import RDMA, active_rdma_devices, find_links, rank
from tests.lmkv.transfer.rdma import fake_rdma

LINKS = st.sampled_from([frozenset[str](), frozenset({RDMA})])


def test_a_machine_without_rdma_devices_has_no_links(tmp_path: Path) -> None:
    assert find_links(tmp_path, tmp_path) == frozenset()


def test_an_active_port_is_a_link(tmp_path: Path) -> None:
    fake_rdma(tmp_path, states=("1: DOWN", "4: ACTIVE"))
    assert active_rdma_devices(tmp_path / "sys") == ["mlx5_0"]
    assert find_links(tmp_path / "sys", tmp_path / "dev") == {RDMA}


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER", ""])
def test_a_port_in_another_state_is_none(state: str, tmp_path: Path) -> None:
    fake_rdma(tmp_path, states=(state,))
    assert find_links(tmp_path / "sys", tmp_path / "dev") == frozenset()


def test_a_device_that_cannot_be_opened_is_none(tmp_path: Path) -> None:
    """A container without devices still sees those of its host in `/sys`."""
    fake_rdma(tmp_path)
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert active_rdma_devices(tmp_path / "sys") == ["mlx5_0"]
    assert find_links(tmp_path / "sys", tmp_path / "dev") == frozenset()


def test_auto_prefers_nixl_to_tcp_only_with_rdma() -> None:
    assert names_of("auto", {RDMA}) == ("shm", "nixl", "tcp")
    assert names_of("auto", ()) == ("shm", "tcp", "nixl")
    assert names_of("nixl", ()) == ("nixl",)
    assert names_of("smoke", ()) == ("smoke",)


@given(LINKS, LINKS)
def test_two_hosts_agree_on_the_order_in_both_directions(reader: frozenset[str], owner: frozenset[str]) -> None:
    order = rank(names_of("auto", reader), owner)
    assert order == rank(names_of("auto", owner), reader)
    assert set(order) == set(AUTO_NAMES)
    assert order[0] == "shm"
    assert (order.index("nixl") < order.index("tcp")) is (RDMA in reader & owner)


@given(st.lists(st.sampled_from(["shm", "tcp", "smoke", "ucx"]), unique=True), LINKS)
def test_channels_that_need_no_link_keep_the_order_of_the_caller(names: list[str], links: frozenset[str]) -> None:
    assert rank(names, links) == tuple(names)
