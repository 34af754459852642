"""The worker side of the encoder cache: copies outputs from the plan to the device, and stores what encoders make.

Stores run on a thread beside the engine's steps. Every failure ends as an output that is not stored, and a count.
"""

from __future__ import annotations

import queue
import threading
from collections import Counter

import torch

from lmkv.config import ConnectorConfig
from lmkv.spec import KvSpec
from lmkv_client.connector.encoder.outputs import CHUNK_ROWS, EncoderPlan, EncoderReport, LoadedOutput, OutputName
from lmkv_client.connector.vllm_api import init_logger
from lmkv_client.engine import Engine, Extent, Written
from lmkv_client.processors import use_processors

logger = init_logger("vllm.lmkv")

MAX_WAITING_BYTES = 256 << 20
"""Bytes of outputs that wait to be stored; they stay in the device's memory. Others are not stored."""
MAX_RESERVED = 32
"""Most extents that a store reserves at once."""
CLOSE_SECONDS = 5.0
"""Longest time that a worker which ends waits for stores."""


class EncoderStores:
    """Stores outputs, one after the other, on a thread that attaches first."""

    def __init__(self, config: ConnectorConfig, spec: KvSpec) -> None:
        self._config = config
        self._spec = spec
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._counts: Counter[str] = Counter()
        self._queue: queue.SimpleQueue[tuple[OutputName, torch.Tensor, torch.cuda.Event | None] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="lmkv-encoder-store", daemon=True)
        self._thread.start()

    def add(self, name: OutputName, output: torch.Tensor) -> None:
        """Stores an output, unless too many wait. Never blocks."""
        with self._lock:
            if self._waiting_bytes + output.nbytes > MAX_WAITING_BYTES:
                self._counts["encoder_skipped_stores"] += 1
                return
            self._waiting_bytes += output.nbytes
        written = None
        if output.is_cuda:
            written = torch.cuda.Event()  # type: ignore[no-untyped-call]
            written.record()
        self._queue.put((name, output, written))

    def take_counts(self) -> dict[str, int]:
        """Returns the counts since the last call."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)

    def close(self) -> None:
        """Ends the thread once all outputs are stored; waits for that a few seconds."""
        self._queue.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        use_processors()
        engine = None
        try:
            engine = Engine.attach(self._spec, config=self._config)
        except Exception as error:
            logger.error("outputs of encoders are not stored: %s", error)
        while (task := self._queue.get()) is not None:
            name, output, written = task
            stored_bytes = 0
            try:
                if engine is not None:
                    stored_bytes = store(engine, name, host_bytes(output, written))
            except Exception:
                logger.exception("storing an output of an encoder failed")
            with self._lock:
                self._waiting_bytes -= output.nbytes
                self._counts["encoder_stored_bytes"] += stored_bytes
                self._counts["encoder_skipped_stores"] += not stored_bytes
            del task, output
        if engine is not None:
            engine.close()


def host_bytes(output: torch.Tensor, written: torch.cuda.Event | None) -> torch.Tensor:
    """The bytes of an output, in host memory."""
    if written is not None:
        written.synchronize()
    return output.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def store(engine: Engine, name: OutputName, data: torch.Tensor) -> int:
    """Stores the bytes of an output. Returns their number; 0 if the node has no room for all."""
    row_bytes = data.numel() // name.row_count
    at, parent = 0, b""
    while at < len(name.keys):
        extents = engine.reserve(min(MAX_RESERVED, len(name.keys) - at), timeout=engine.config.load_timeout)
        if not extents:
            return 0
        written = []
        for extent, key in zip(extents, name.keys[at:], strict=False):
            first = at * CHUNK_ROWS
            rows = min(CHUNK_ROWS, name.row_count - first)
            _write(extent, data[first * row_bytes : (first + rows) * row_bytes])
            chunk = Written(key=key, extent=extent, token_count=rows, parent=parent, owner=name.owner)
            written.append(chunk)
            at, parent = at + 1, key
        engine.commit(written)
    return data.numel()


def _write(extent: Extent, data: torch.Tensor) -> None:
    torch.frombuffer(extent.view, dtype=torch.uint8)[: data.numel()].copy_(data)


class EncoderWorker:
    """The worker side of one rank. vLLM calls all methods on the thread that computes."""

    def __init__(self, config: ConnectorConfig, dtype: torch.dtype, device: str, *, is_writer: bool) -> None:
        """`device` is the type of the rank's device; `is_writer`: whether this rank stores outputs, which all have."""
        self._config = config
        self._dtype = dtype
        self._device = device
        self._is_writer = is_writer
        self._stores: EncoderStores | None = None
        self._skipped_count = 0

    def load(self, encoder_cache: dict[str, torch.Tensor], plan: EncoderPlan) -> None:
        """Puts the loaded outputs where the runner looks for those of the encoder."""
        for name, output in plan.loads.items():
            if name not in encoder_cache:
                encoder_cache[name] = self._tensor(output)

    def save(self, encoder_cache: dict[str, torch.Tensor], name: str, plan: EncoderPlan) -> None:
        """Stores what the encoder has made, if the plan has a name for it."""
        wanted, output = plan.stores.get(name), encoder_cache.get(name)
        if not self._is_writer or wanted is None or output is None or plan.spec is None:
            return
        shape = (wanted.place_count, wanted.embeddings * plan.spec.head_size)
        if tuple(output.shape) != shape or output.dtype != self._dtype:
            self._skipped_count += 1
            return
        if self._stores is None:
            self._stores = EncoderStores(self._config, plan.spec)
        self._stores.add(wanted, output)

    def report(self) -> EncoderReport | None:
        """Returns the counts since the last report, if there are any."""
        counts = Counter(self._stores.take_counts() if self._stores else {})
        counts["encoder_skipped_stores"] += self._skipped_count
        self._skipped_count = 0
        counts = +counts
        return EncoderReport(dict(counts)) if counts else None

    def close(self) -> None:
        """Ends the stores. Idempotent."""
        stores, self._stores = self._stores, None
        if stores is not None:
            stores.close()

    def _tensor(self, output: LoadedOutput) -> torch.Tensor:
        size_bytes = sum(chunk.nbytes for chunk in output.chunks)
        data = torch.empty(size_bytes, dtype=torch.uint8)
        at = 0
        for chunk in output.chunks:
            data[at : at + chunk.nbytes].copy_(torch.from_numpy(chunk))
            at += chunk.nbytes
        return data.view(self._dtype).reshape(output.place_count, -1).to(self._device)
