"""Checks the resources of copies: instruction set, GPU and compiler, and the memory of the pool."""

from __future__ import annotations

import os
from collections.abc import Iterator

from lmkv.config import ConnectorConfig, NodeConfig
from lmkv.errors import ConfigError
from lmkv.pool.memory import huge_pages, node_for, node_of_pci
from lmkv.units import format_bytes
from lmkv_client.commands.doctor.finding import Finding, fail, ok, warn
from lmkv_client.commands.doctor.host import node_runs


def check_kernels(config: ConnectorConfig) -> Iterator[Finding]:
    """The resources of copies on the CPU and on a GPU."""
    from lmkv_kernels import _host
    from lmkv_kernels.cuda import Device, NoCuda, driver

    processors = len(os.sched_getaffinity(0))
    threads = f"up to {config.copy_threads}" if config.copy_threads else "automatic"
    yield ok("kernels", f"host copies use {_host.isa()}, threads: {threads}, on {processors} processors")
    try:
        cuda = driver()
    except NoCuda as error:
        yield ok("cuda", f"{error}: only KV cache in host memory can be copied")
        return
    version = ".".join(map(str, cuda.version))
    for ordinal in range(cuda.device_count):
        device = Device(cuda, ordinal)
        node = node_of_pci(device.pci_address)
        where = f", NUMA node {node}" if node is not None else ""
        yield ok(
            "cuda", f"device {ordinal} is {device.name}, sm_{device.architecture}{where}; the driver has CUDA {version}"
        )
        yield _check_compiler(device.architecture, cuda.version[0])
        device.close()


def _check_compiler(architecture: int, driver_major: int) -> Finding:
    """Says where the kernels for an architecture come from."""
    from lmkv_kernels.cuda import CudaError, images

    name, folder = images.file_name(architecture), images.cache_folder()
    if images.read(images.BUILT_FOLDER / name):
        return ok("cuda", f"kernels for sm_{architecture} are prebuilt, in {images.BUILT_FOLDER}")
    if images.read(folder / name):
        return ok("cuda", f"kernels for sm_{architecture} are compiled, in {folder}")
    try:
        compiler = images.find_compiler(driver_major)
    except CudaError as error:
        return fail("cuda", f"kernels for sm_{architecture} cannot be compiled: {error}")
    said = f"kernels for sm_{architecture} will be compiled at first use by {compiler.path}, version {compiler.version}"
    if not images.can_write(folder):
        return warn("cuda", f"{said}, each time: {folder} cannot be written; set XDG_CACHE_HOME")
    return ok("cuda", f"{said}, into {folder}")


def check_pool(config: NodeConfig) -> Iterator[Finding]:
    """The page size and the NUMA node of the pool."""
    if not config.stores_chunks or node_runs(config):
        return
    there = huge_pages()
    wanted = config.pool_bytes
    enough = there.page_bytes and there.page_bytes <= wanted <= there.free_bytes + there.page_bytes - 1
    free = f"{format_bytes(there.free_bytes)} of huge pages are free"
    if config.pool_file:
        yield ok("pool", f"its pages are those of the file system of pool_path, {config.pool_file}")
    elif config.pool_huge_pages == "never":
        yield ok("pool", "uses small pages (pool_huge_pages: never)")
    elif enough:
        yield ok("pool", f"uses huge pages of {format_bytes(there.page_bytes)}: {free}")
    elif config.pool_huge_pages == "always":
        yield fail(
            "pool",
            f"{free}, not {format_bytes(wanted)}; raise vm.nr_hugepages, lower max_local_cpu_size, "
            "or set pool_huge_pages to auto",
        )
    else:
        yield ok("pool", f"uses small pages: {free}; vm.nr_hugepages sets some apart")
    try:
        node = node_for(config.numa_node)
    except ConfigError as error:
        yield fail("pool", str(error))
        return
    yield ok("pool", f"its memory will be on NUMA node {node}" if node is not None else "no NUMA node is preferred")
