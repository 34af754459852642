"""Checks of this host alone: memory, folders and ports, kernels of copies, and the memory of the pool."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig
from lmkv.config.kinds import OFF
from lmkv.errors import ConfigError
from lmkv.pool.memory import HugePages, available_bytes, huge_pages, node_for, node_of_pci
from lmkv.units import format_bytes
from lmkv_client.commands.doctor.finding import Finding, fail, ok, warn


def node_runs(config: NodeConfig) -> bool:
    """Whether the node of this instance runs on this host and holds its lock."""
    try:
        with config.lock_path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # another process holds it, or there is no such file
        return isinstance(error, BlockingIOError)
    return False


def check_memory(config: NodeConfig) -> Iterator[Finding]:
    """Whether the pool fits into memory."""
    wanted = config.pool_bytes
    if not config.stores_chunks:
        yield ok("memory", "not needed: local_cpu is false")
        return
    if node_runs(config):
        yield ok("memory", f"the node {config.instance_id} is running and has {format_bytes(wanted)}")
        return
    available, where = available_bytes(), "this machine and its cgroup"
    if _fits_huge_pages(config, huge_pages()):
        yield ok("memory", f"max_local_cpu_size is {format_bytes(wanted)}, which reserved huge pages have room for")
        return
    if config.pool_file:
        folder = existing_folder(config.pool_file.absolute().parent)
        system = os.statvfs(folder)
        free = system.f_bavail * system.f_frsize
        if free < available:
            available, where = free, f"the file system of pool_path, {folder},"
        if config.persist_pool and config.pool_file.is_file():  # what an earlier life has left is the pool's already
            available += config.pool_file.stat().st_blocks * 512
    said = f"max_local_cpu_size is {format_bytes(wanted)}, {where} can give {format_bytes(available)}"
    if wanted > available:
        yield fail("memory", f"{said}; set max_local_cpu_size to less")
    elif wanted > 0.8 * available:
        yield warn("memory", f"{said}: little is left for the engine; set max_local_cpu_size to less")
    else:
        yield ok("memory", said)


def check_folder(config: NodeConfig) -> Iterator[Finding]:
    """Whether sockets can be created in the runtime folder."""
    try:
        path = config.engine_socket
        with suppress(OSError):
            config.open_instance_folder(make=False).close()
    except ConfigError as error:
        yield fail("runtime_dir", str(error))
        return
    folder = existing_folder(config.instance_dir)
    if os.access(folder, os.W_OK | os.X_OK):
        yield ok("runtime_dir", f"engine and node connect in {path}")
    else:
        yield fail(
            "runtime_dir", f"this user may not write to {folder}; set runtime_dir to a folder that this user may write"
        )


def check_peer_port(config: NodeConfig) -> Iterator[Finding]:
    """Whether the port for peers can be bound, if it is set, and whether peers can reach it."""
    if not config.enable_p2p:
        yield ok("p2p_port", "not needed: enable_p2p is false")
        return
    if not node_runs(config):
        yield from _try_port(config.p2p_host, config.p2p_port, "p2p_host", "p2p_port")
    else:
        yield ok("p2p_port", f"the node {config.instance_id} is running and has it")
    if config.p2p_host == "127.0.0.1" and not all(map(_is_loopback, config.coordinator_address)):
        yield warn("p2p_host", "is 127.0.0.1, which other hosts cannot reach; set p2p_host to this host's address")


def check_metrics_port(config: NodeConfig) -> Iterator[Finding]:
    """Whether the node can serve its metrics; nothing, where it does not or runs already."""
    if config.metrics_port is None or config.metrics_port == OFF:
        return
    if node_runs(config):
        yield ok("metrics_port", f"the node {config.instance_id} is running and has it")
    else:
        yield from _try_port(config.p2p_host, config.metrics_port, "p2p_host", "metrics_port")


def check_coordinator_ports(config: CoordinatorConfig) -> Iterator[Finding]:
    """Whether a coordinator can bind its ports."""
    for key, port in {**config.grpc_ports, **config.http_ports}.items():
        yield from _try_port(config.host, port, "host", key)


def _try_port(host: str, port: int, host_key: str, port_key: str) -> Iterator[Finding]:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
            probe.listen(1)
    except socket.gaierror as error:
        yield fail(host_key, f"{host} is unknown ({error.strerror}); set {host_key}")
    except OSError as error:
        if not port:
            fix = f"set {host_key} to an address of this machine"
            yield fail(host_key, f"{host} cannot be bound ({error.strerror}); {fix}")
            return
        stop = f"set {port_key} to a free port, or stop the process that uses it"
        fix = f"{stop}; set {host_key} to an address of this machine"
        yield fail(port_key, f"{port} on {host} cannot be bound ({error.strerror}); {fix}")
    else:
        yield ok(port_key, f"{port} on {host} can be bound" if port else f"a free port on {host} will be selected")


def existing_folder(path: Path) -> Path:
    """The path, or its closest existing parent."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in ("localhost", "127.0.0.1", "[::1]")


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
    free = f"{format_bytes(there.free_bytes)} of huge pages are free"
    if config.pool_file:
        yield ok("pool", f"its pages are those of the file system of pool_path, {config.pool_file}")
    elif config.pool_huge_pages == "never":
        yield ok("pool", "uses small pages (pool_huge_pages: never)")
    elif _fits_huge_pages(config, there):
        yield ok("pool", f"uses huge pages of {format_bytes(there.page_bytes)}: {free}")
    elif config.pool_huge_pages == "always":
        yield fail(
            "pool",
            f"pool_huge_pages: {free}, not {format_bytes(wanted)}; raise vm.nr_hugepages, lower max_local_cpu_size, "
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


def _fits_huge_pages(config: NodeConfig, there: HugePages) -> bool:
    """Whether the pool will be made of the reserved huge pages."""
    if config.pool_file or config.pool_huge_pages == "never" or not there.page_bytes:
        return False
    return there.page_bytes <= config.pool_bytes <= there.free_bytes + there.page_bytes - 1
