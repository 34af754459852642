"""What `lmkv doctor` says of copies: the processor, a GPU and its compiler, and the pool's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.config import ConnectorConfig
from lmkv.pool.memory import huge_pages
from lmkv_client.commands.doctor.host import check_kernels, check_pool
from lmkv_kernels import _host, cuda
from lmkv_kernels.cuda import NoCompiler, NoCuda, compilers, images
from tests.kernels.emulation import emulated_driver


def findings_of(config: ConnectorConfig) -> list[tuple[str, str, str]]:
    return [(finding.check, finding.level, finding.text) for finding in (*check_pool(config), *check_kernels(config))]


def config(folder: Path, **settings: object) -> ConnectorConfig:
    return ConnectorConfig(runtime_dir=str(folder), instance_id="n", max_local_cpu_size=0.01, **settings)  # type: ignore[arg-type]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine with a device, and with an empty cache."""
    monkeypatch.setattr(cuda, "driver", emulated_driver)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(images, "BUILT_FOLDER", tmp_path / "built")


def cuda_lines(folder: Path) -> list[tuple[str, str]]:
    return [(level, text) for check, level, text in findings_of(config(folder)) if check == "cuda"]


def test_it_says_what_the_host_copies_with_and_why_not_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoCuda("no CUDA driver: libcuda.so.1 is missing")

    monkeypatch.setattr(cuda, "driver", none)
    found = {check: (level, text) for check, level, text in findings_of(config(tmp_path, copy_threads=3))}
    assert found["kernels"][1].startswith(f"host copies use {_host.isa()}, threads: up to 3, on ")
    assert found["cuda"] == (
        "ok",
        "no CUDA driver: libcuda.so.1 is missing: only KV cache in host memory can be copied",
    )


@pytest.mark.usefixtures("gpu")
def test_it_says_which_gpu_there_is_and_what_compiles_for_it(tmp_path: Path) -> None:
    device, compiler = cuda_lines(tmp_path)
    assert device == ("ok", "device 0 is emulated, sm_90; the driver has CUDA 13.0")
    assert compiler[0] == "ok"
    found = images.find_compiler()
    assert compiler[1] == (
        f"kernels for sm_90 will be compiled at first use by {found.path}, version {found.version}, "
        f"into {tmp_path}/lmkv/kernels"
    )


@pytest.mark.usefixtures("gpu")
def test_it_says_where_compiled_kernels_are(tmp_path: Path) -> None:
    images.write(images.cache_folder() / images.file_name(90), b"image")
    assert cuda_lines(tmp_path)[1] == ("ok", f"kernels for sm_90 are compiled, in {tmp_path}/lmkv/kernels")
    images.write(images.BUILT_FOLDER / images.file_name(90), b"image")
    assert cuda_lines(tmp_path)[1] == ("ok", f"kernels for sm_90 are prebuilt, in {tmp_path}/built")


@pytest.mark.usefixtures("gpu")
def test_a_cache_that_cannot_be_written_warns_with_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/self/nowhere")
    level, text = cuda_lines(tmp_path)[1]
    assert level == "warn"
    assert text.endswith(", each time: /proc/self/nowhere/lmkv/kernels cannot be written; set XDG_CACHE_HOME")


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_a_compiler_fails_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> None:
        raise NoCompiler("install nvidia-cuda-nvrtc")

    monkeypatch.setattr(compilers, "find_nvrtc", nothing)
    monkeypatch.setattr(compilers, "find_nvcc", nothing)
    level, text = cuda_lines(tmp_path)[1]
    assert level == "fail"
    assert text.startswith("kernels for sm_90 cannot be compiled: install nvidia-cuda-nvrtc")


def test_it_says_what_the_pools_memory_will_be(tmp_path: Path) -> None:
    pages, node = list(check_pool(config(tmp_path)))
    assert (pages.check, pages.level, node.level) == ("pool", "ok", "ok")
    assert "huge pages" in pages.text
    assert "NUMA node" in node.text
    assert "pool_path" in next(check_pool(config(tmp_path, pool_path="/dev/shm/pool"))).text
    assert "pool_path, /dev/shm/lmkv-" in next(check_pool(config(tmp_path, persist_pool=True))).text
    assert next(check_pool(config(tmp_path, pool_huge_pages="never"))).text.startswith("uses small pages")


def test_huge_pages_and_nodes_that_are_not_there_fail_with_the_key(tmp_path: Path) -> None:
    size = huge_pages().free_bytes / 2**30 + 1
    wanted = ConnectorConfig(
        runtime_dir=str(tmp_path), max_local_cpu_size=size, pool_huge_pages="always", numa_node="1023"
    )
    pages, node = list(check_pool(wanted))
    assert (pages.level, node.level) == ("fail", "fail")
    assert "raise vm.nr_hugepages, lower max_local_cpu_size, or set pool_huge_pages to auto" in pages.text
    assert node.text.startswith("numa_node: node 1023 does not exist, only 0")


def test_nothing_is_said_of_a_pool_that_is_not_wanted(tmp_path: Path) -> None:
    assert list(check_pool(config(tmp_path, local_cpu=False))) == []
