"""How fast the CUDA kernels are, in every page layout, against plain copies: `python -m benchmarks.kernels_gpu`.

Needs a CUDA device, torch's CUDA build, and NVRTC or nvcc; without a device it ends with one line and exit code 2.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.node.copies import rate_row, scattered_copies
from benchmarks.support import timing
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.rows import Row
from lmkv_kernels import ChunkCopy, Pages, token_rows
from lmkv_kernels.cuda import (
    CopyPath,
    CopyPaths,
    CudaCopier,
    CudaError,
    CudaEvent,
    CudaStream,
    Device,
    DeviceMemory,
    PendingCopy,
    PinnedMemory,
    Program,
    driver,
)
from lmkv_kernels.cuda.copier import BLOCKS_PER_PROCESSOR

TOKENS = 8192
"""64 KiB each: ten times what a GPU's caches hold."""
QUICK_TOKENS = 2048
CHUNK_SIZE = 256
SPARE_BLOCKS = 10
NO_DEVICE = 2
"""Exit code where there is nothing to measure on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredGpu:
    device: Device
    program: Program
    memory: str
    """The device as torch names it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLayout:
    """A KV cache of `bfloat16`, and the order of dimensions in memory."""

    name: str
    order: tuple[int, int, int, int]
    """Which of layer, block, head and token is outermost, and so on."""
    layer_count: int = 32
    head_count: int = 8
    content: int = 128
    part_count: int = 2
    block_size: int = 16

    def pages(self, token_count: int, device: str) -> tuple[list[torch.Tensor], Pages]:
        """A KV cache for this number of tokens and some spare blocks, one tensor per layer."""
        blocks = token_count // self.block_size + SPARE_BLOCKS
        shape = (self.layer_count, blocks, self.head_count, self.block_size, self.content)
        memory = torch.ones([shape[dimension] for dimension in (*self.order, 4)], dtype=torch.bfloat16, device=device)
        back = [self.order.index(dimension) for dimension in range(4)]
        tensors = list(memory.permute(*back, 4))
        return tensors, token_rows(tensors, 0, self.head_count, part_count=self.part_count)


LAYOUTS = (
    GpuLayout(name="lbhnc", order=(0, 1, 2, 3)),
    GpuLayout(name="lbnhc", order=(0, 1, 3, 2)),
    GpuLayout(name="lhbnc", order=(0, 2, 1, 3)),
    GpuLayout(name="blhnc", order=(1, 0, 2, 3)),
    GpuLayout(name="blnhc", order=(1, 0, 3, 2)),
    GpuLayout(name="bhlnc", order=(1, 2, 0, 3)),
    GpuLayout(
        name="latent", order=(0, 1, 2, 3), layer_count=57, head_count=1, content=576, part_count=1, block_size=64
    ),
)
"""vLLM's layouts of pages, and MLA; 64 KiB a token in all of them."""


class Timer:
    """Measures by the device's own clock, on a stream that copies are made to wait for and to hold."""

    def __init__(self, gpu: MeasuredGpu) -> None:
        self._driver = gpu.device.driver
        self.stream = CudaStream(self._driver)

    def copying(self, begin: Callable[[], PendingCopy]) -> float:
        """Seconds from the beginning to the end of copies that start `after` the timer's stream."""
        with closing(CudaEvent(self._driver, self.stream.handle, timing=True)) as started:
            copying = begin()
            copying.block_stream(self.stream.handle)
            return self._since(started, copying)

    def memcpy(self, target: int, source: int, size_bytes: int) -> float:
        """Seconds of one plain copy."""
        with closing(CudaEvent(self._driver, self.stream.handle, timing=True)) as started:
            self._driver.call("cuMemcpyAsync", target, source, size_bytes, self.stream.handle)
            return self._since(started)

    def _since(self, started: CudaEvent, copying: PendingCopy | None = None) -> float:
        with closing(CudaEvent(self._driver, self.stream.handle, timing=True)) as ended:
            ended.wait()
            if copying:
                copying.wait()
            return ended.seconds_since(started)


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePool:
    """Device memory in the pool's place: what a copier does where the bus is not the limit."""

    memory: DeviceMemory

    @property
    def host_address(self) -> int:
        raise CudaError("nothing is staged on the way to device memory")

    @property
    def device_address(self) -> int:
        return self.memory.address

    @property
    def size_bytes(self) -> int:
        return self.memory.size_bytes


def measure(run: BenchmarkRun) -> None:
    """Adds rows for the first device."""
    device = Device(driver())
    run.report.settings["gpu"] = device.name
    run.say(f"{device.name}: compiling for sm_{device.architecture}")
    with closing(device):
        gpu = MeasuredGpu(device=device, program=Program.load(device), memory="cuda:0")
        with device.current(), closing(gpu.program):
            measure_on(run, gpu, QUICK_TOKENS if run.quick else TOKENS)


def measure_on(run: BenchmarkRun, gpu: MeasuredGpu, token_count: int, layouts: Sequence[GpuLayout] = LAYOUTS) -> None:
    """Adds rows, with the device current."""
    for layout in layouts:
        run.say(f"{layout.name}: within the device")
        _measure_within(run, gpu, layout, token_count)
    run.say(f"{layouts[0].name}: to and from pinned memory")
    _measure_across(run, gpu, layouts[0], token_count)


def _measure_within(run: BenchmarkRun, gpu: MeasuredGpu, layout: GpuLayout, token_count: int) -> None:
    """Gather and scatter between pages and device memory, against one copy of as many bytes on the device."""
    _tensors, pages, copies, size = _case(gpu, layout, token_count)
    blocks = BLOCKS_PER_PROCESSOR * gpu.device.processor_count
    direct = CopyPaths(gather=CopyPath.DIRECT, scatter=CopyPath.DIRECT, direct_blocks=blocks)
    with _memory(gpu, size) as chunks, _memory(gpu, size) as other:
        pool = DevicePool(memory=chunks)
        copier = CudaCopier(gpu.device, gpu.program, pages, pool, paths=direct)
        timer = Timer(gpu)
        with closing(copier), closing(timer.stream):
            stream = timer.stream.handle
            summed, plain, scattered, copied = _in_turns(
                [
                    lambda: timer.copying(partial(copier.gather, copies, after=stream)),
                    lambda: timer.copying(partial(copier.gather, copies, after=stream, summed=False)),
                    lambda: timer.copying(partial(copier.scatter, copies, after=stream)),
                    lambda: timer.memcpy(other.address, chunks.address, size),
                ],
                run.quick,
            )
    name = layout.name
    run.add(
        rate_row(f"gpu_gather_{name}_vs_memcpy", size, plain, "device to device", copied),
        rate_row(f"gpu_gather_summed_{name}_vs_memcpy", size, summed, "device to device", copied),
        rate_row(f"gpu_scatter_{name}_vs_memcpy", size, scattered, "device to device", copied),
    )


def _measure_across(run: BenchmarkRun, gpu: MeasuredGpu, layout: GpuLayout, token_count: int) -> None:
    """Stores and loads both ways, against one copy of as many bytes between the device and pinned memory."""
    _tensors, pages, copies, size = _case(gpu, layout, token_count)
    with closing(PinnedMemory(gpu.device.driver, size)) as pool, _memory(gpu, size) as other:
        pool.bytes[:] = 1
        timer = Timer(gpu)
        with closing(timer.stream):
            for way in CopyPath:
                with closing(
                    CudaCopier(gpu.device, gpu.program, pages, pool, paths=CopyPaths(gather=way, scatter=way))
                ) as copier:
                    _measure_way(run, timer, copier, copies, pool, other, way)


def _measure_way(
    run: BenchmarkRun,
    timer: Timer,
    copier: CudaCopier,
    copies: list[ChunkCopy],
    pool: PinnedMemory,
    other: DeviceMemory,
    way: CopyPath,
) -> None:
    stream, size = timer.stream.handle, pool.size_bytes
    stored, unsummed, store_memcpy, loaded, load_memcpy = _in_turns(
        [
            lambda: timer.copying(partial(copier.gather, copies, after=stream)),
            lambda: timer.copying(partial(copier.gather, copies, after=stream, summed=False)),
            lambda: timer.memcpy(pool.device_address, other.address, size),
            lambda: timer.copying(partial(copier.scatter, copies, after=stream)),
            lambda: timer.memcpy(other.address, pool.device_address, size),
        ],
        run.quick,
    )
    run.add(
        rate_row(f"gpu_store_{way}_vs_memcpy", size, stored, "device to pinned memory", store_memcpy),
        rate_row(f"gpu_load_{way}_vs_memcpy", size, loaded, "pinned memory to device", load_memcpy),
        Row(
            name=f"gpu_checksum_cost_{way}",
            value=statistics.median(stored) * 1e3,
            unit="ms",
            baseline="not summed",
            baseline_value=statistics.median(unsummed) * 1e3,
            ratio=timing.median_ratio(stored, unsummed) - 1,
        ),
    )


def _case(
    gpu: MeasuredGpu, layout: GpuLayout, token_count: int
) -> tuple[list[torch.Tensor], Pages, list[ChunkCopy], int]:
    """Pages, copies of all their tokens in blocks that lie apart, and the bytes of these."""
    tensors, pages = layout.pages(token_count, gpu.memory)
    pages = dataclasses.replace(pages, device="cuda:0")
    copies = scattered_copies(pages, CHUNK_SIZE, token_count // CHUNK_SIZE)
    return tensors, pages, copies, len(copies) * pages.extent_bytes(CHUNK_SIZE)


@contextmanager
def _memory(gpu: MeasuredGpu, size_bytes: int) -> Iterator[DeviceMemory]:
    memory = DeviceMemory(gpu.device.driver, size_bytes)
    try:
        yield memory
    finally:
        memory.close()


def _in_turns(acts: Sequence[Callable[[], float]], quick: bool) -> list[list[float]]:
    """Durations that each act returns, per round without the first. Each round reverses the order."""
    seconds: list[list[float]] = [[] for _ in acts]
    for number in range((5 if quick else 20) + 1):
        order = range(len(acts)) if number % 2 else reversed(range(len(acts)))
        for index in order:
            took = acts[index]()
            if number:
                seconds[index].append(took)
    return seconds


BENCHMARK = Benchmark(
    name="kernels_gpu",
    description="Measures the CUDA kernels between pages and chunks, and both ways to pinned memory.",
    measure=measure,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it. Returns the exit code."""
    BENCHMARK.parser().parse_args(arguments)
    try:
        driver()
        return BENCHMARK.main(arguments)
    except CudaError as error:
        print(f"kernels_gpu: {error}", file=sys.stderr)
        return NO_DEVICE


if __name__ == "__main__":
    sys.exit(main())
