"""Which NUMA node the pool prefers, on machines of all kinds, and that its memory comes from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv.pool.memory import nearest_node, node_for
from lmkv.pool.pool import Pool

NVIDIA, OTHER = "0x10de", "0x8086"
GPU, DISPLAY, AUDIO = "0x030200", "0x030000", "0x040300"


class Machine:
    """A /sys of a machine."""

    def __init__(self, folder: Path, online: str = "0-1") -> None:
        self.sys = folder
        self._write("devices/system/node/online", online)
        self._count = 0

    def add_device(self, vendor: str, kind: str, node: int) -> None:
        self._count += 1
        for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
            self._write(f"bus/pci/devices/0000:{self._count:02x}:00.0/{name}", text)

    def add_card(self, node: int) -> None:
        self._count += 1
        self._write(f"class/infiniband/mlx5_{self._count}/device/numa_node", str(node))

    def _write(self, name: str, text: str) -> None:
        file = self.sys / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def test_the_node_is_that_of_the_gpus_whatever_else_is_in_the_machine(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add_device(NVIDIA, GPU, 1)
    machine.add_device(NVIDIA, DISPLAY, 1)
    machine.add_device(NVIDIA, AUDIO, 0)
    machine.add_device(OTHER, DISPLAY, 0)
    machine.add_card(0)
    assert node_for("auto", tmp_path) == 1


def test_without_gpus_it_is_that_of_the_rdma_cards(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add_card(1)
    machine.add_card(1)
    assert node_for("auto", tmp_path) == 1


def test_where_gpus_are_on_several_nodes_the_rdma_cards_decide_if_they_agree(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.add_device(NVIDIA, GPU, 0)
    machine.add_device(NVIDIA, GPU, 1)
    assert node_for("auto", tmp_path) is None
    machine.add_card(0)
    assert node_for("auto", tmp_path) == 0
    machine.add_card(1)
    assert node_for("auto", tmp_path) is None


def test_a_device_that_does_not_say_where_it_is_decides_nothing(tmp_path: Path) -> None:
    Machine(tmp_path).add_device(NVIDIA, GPU, -1)
    assert node_for("auto", tmp_path) is None


def test_a_machine_of_one_node_has_nothing_to_prefer(tmp_path: Path) -> None:
    machine = Machine(tmp_path, online="0")
    machine.add_device(NVIDIA, GPU, 0)
    assert node_for("auto", tmp_path) is None
    assert node_for("0", tmp_path) == 0
    assert nearest_node(tmp_path) == 0


def test_a_kernel_without_numa_is_a_machine_of_one_node(tmp_path: Path) -> None:
    assert node_for("auto", tmp_path) is None
    assert node_for("0", tmp_path) == 0


def test_nodes_can_be_named_or_left_alone(tmp_path: Path) -> None:
    machine = Machine(tmp_path, online="0-1,4")
    machine.add_device(NVIDIA, GPU, 1)
    assert [node_for(setting, tmp_path) for setting in ("none", "0", "1", "4")] == [None, 0, 1, 4]
    with pytest.raises(ConfigError, match=r"^numa_node: node 2 does not exist, only 0, 1, 4; "):
        node_for("2", tmp_path)


def test_the_kernel_takes_the_preference_and_every_mapping_of_the_pool_has_it() -> None:
    with Pool.create(1 << 20, numa_node=0) as pool:
        if pool.numa_node is None:
            pytest.skip("this kernel, or this container, does not let memory prefer a node")
        line = next(
            line
            for line in Path("/proc/self/numa_maps").read_text().splitlines()
            if line.startswith(f"{pool.address:x} ")
        )
        assert line.split()[1].startswith("prefer")
        assert line.split()[1].endswith(":0")


def test_a_node_that_the_kernel_does_not_have_is_not_preferred_and_does_no_harm() -> None:
    with Pool.create(1 << 20, numa_node=1000) as pool:
        assert pool.numa_node is None
        pool.buffer[5] = 7
