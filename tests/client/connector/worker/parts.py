"""Parts of tests of the worker side: a served pool, workers, caches and plans."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from lmkv.pool.pool import Pool
from lmkv.pool.socket import PoolSocket
from lmkv.spec import NATIVE_TILES
from lmkv_client.connector.engine_kv import LayerGroup
from lmkv_client.connector.messages import ExtentChecksum, LoadPlan, StepPlan
from lmkv_client.connector.worker.side import WorkerSide
from lmkv_client.engine.attachment import Attachment
from lmkv_kernels import ChunkCopy
from tests.support.specs import make_spec
from tests.waiting import WAIT_SECONDS, wait_until

LAYERS, HEADS, BLOCK, CONTENT, BLOCKS = 3, 4, 32, 2 * 16, 24
TILE_BYTES = BLOCK * CONTENT * 4
CHUNK_BLOCKS = 2
CHUNK_BYTES = LAYERS * HEADS * CHUNK_BLOCKS * TILE_BYTES
POOL_BYTES = 8 * CHUNK_BYTES

Caches = dict[str, torch.Tensor]
SPEC = make_spec(
    model_name="m",
    model_id="m",
    layer_count=LAYERS,
    kv_head_count=HEADS,
    head_size=CONTENT // 2,
    chunk_size=CHUNK_BLOCKS * BLOCK,
    format=NATIVE_TILES,
    block_size=BLOCK,
)

NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))
GROUP = LayerGroup(part=0, block_size=BLOCK, layer_names=NAMES)


class ServedPool:
    """The parts of a node that workers use: a pool and its socket, in a thread."""

    def __init__(self, path: Path, epoch: int, size_bytes: int = POOL_BYTES) -> None:
        self.pool = Pool.create(size_bytes)
        self.path = path
        self.epoch = epoch
        self.workers: list[tuple[str, int]] = []
        self.added_count = 0
        self._loop = asyncio.new_event_loop()
        self._socket = PoolSocket(
            path,
            self.pool,
            epoch,
            on_worker=self._add,
            on_worker_gone=lambda engine, rank: self.workers.remove((engine, rank)),
        )
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._run(self._socket.start())

    def attachment(self, engine_id: str = "engine") -> Attachment:
        return Attachment(engine_id=engine_id, pool_socket=str(self.path), epoch=self.epoch)

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Its event loop does not run."""
        stalled, resume = threading.Event(), threading.Event()

        def stall() -> None:
            stalled.set()
            resume.wait()

        self._loop.call_soon_threadsafe(stall)
        stalled.wait()
        try:
            yield
        finally:
            resume.set()

    def exit(self) -> None:
        """Disconnects its workers and accepts no others, as a node that exits."""
        self._run(self._socket.aclose())

    def close(self) -> None:
        self._run(self._socket.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self.pool.close()

    def _add(self, engine_id: str, rank: int) -> None:
        self.workers.append((engine_id, rank))
        self.added_count += 1

    def _run(self, work: object) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)  # type: ignore[arg-type]


MakeWorker = Callable[..., WorkerSide]
Serve = Callable[..., ServedPool]


def caches(seed: int | None, heads: int = HEADS, blocks: int = BLOCKS) -> Caches:
    """One allocation for all layers, as vLLM makes it; random bytes, or zeros without a seed."""
    shape = (LAYERS, blocks, heads, BLOCK, CONTENT)
    memory = torch.zeros(shape) if seed is None else torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return dict(zip(NAMES, memory, strict=True))


def chunk_copy(number: int, block_ids: list[int], first_block: int = 0, blocks: int = CHUNK_BLOCKS) -> ChunkCopy:
    return ChunkCopy(
        offset=number * CHUNK_BYTES,
        extent_tokens=blocks * BLOCK,
        token_count=len(block_ids) * BLOCK,
        first_token=first_block * BLOCK,
        block_ids=block_ids,
    )


def load_of(
    copies: list[ChunkCopy],
    *,
    sync: bool = False,
    final: bool = True,
    failed_blocks: list[int] | None = None,
    checks: list[ExtentChecksum] | None = None,
    request_id: str = "r",
    all_or_none: bool = False,
) -> LoadPlan:
    return LoadPlan(
        request_id=request_id,
        copies=copies,
        sync=sync,
        final=final,
        checks=checks or [],
        failed_blocks=failed_blocks or [],
        all_or_none=all_or_none,
    )


def plan_of(
    served: ServedPool | Attachment | None,
    *,
    loads: list[LoadPlan] | None = None,
    stores: list[ChunkCopy] | None = None,
    tails: dict[str, list[ChunkCopy]] | None = None,
) -> StepPlan:
    attachment = served.attachment() if isinstance(served, ServedPool) else served
    return StepPlan(attachment=attachment, loads=loads or [], stores=stores or [], tails=tails or {})


def step(worker: WorkerSide, plan: StepPlan) -> None:
    worker.load(plan)
    worker.store(plan)


def finished(worker: WorkerSide, request_id: str = "r") -> None:
    """Waits, as steps do, until an asynchronous load has ended."""
    wait_until(lambda: request_id in worker.take_finished())


def is_stored(worker: WorkerSide, served: ServedPool, chunks: dict[int, list[int]]) -> bool:
    stores = [chunk_copy(number, pages, blocks=len(pages)) for number, pages in chunks.items()]
    step(worker, plan_of(served, stores=stores))
    report = worker.take_report()
    return report is not None and set(report.stores) == {copy.offset for copy in stores} and not report.skipped


def stored(worker: WorkerSide, served: ServedPool, chunks: dict[int, list[int]]) -> None:
    """As `is_stored`, and it must be."""
    assert is_stored(worker, served, chunks)


def pages_equal(left: Caches, left_pages: list[int], right: Caches, right_pages: list[int]) -> bool:
    return all(torch.equal(left[name][left_pages], right[name][right_pages]) for name in left)
