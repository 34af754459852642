"""The copies of a hit of SGLang: through HiCache's host pool, as it is, and directly, as by an external linker.

No SGLang runs: `LmkvStorage` with a host pool of HiCache's layout `page_first_direct`, a KV cache of SGLang's layout (a
tensor for the keys of each layer, and one for the values), and a node. HiCache's second copy is that of the shim for
CPUs; on a GPU it is a transfer by DMA, beside the computation.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from hashlib import sha256

import torch

from benchmarks.support import engines, timing
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.rows import Row
from lmkv.config import ConnectorConfig
from lmkv.errors import LmkvError
from lmkv_client.demo.process import ServerProcess
from lmkv_client.engine import Copier, Engine
from lmkv_client.sglang import LmkvStorage
from lmkv_client.sglang.host_pool import layer_tensors, make_pages
from lmkv_client.sglang.kv_spec import make_spec
from tests.client.sglang.contract import HostPoolFields, StorageConfigFields
from tests.sglang.shim.hicache_on_cpu import load_layer
from tests.waiting import is_listening

MODEL_ID = "copies"
READY_SECONDS = 30.0
TIMEOUT_SECONDS = 10.0
GAP = 2
"""Pages of the host pool and of the KV cache for each page of the prompt, which takes every other one."""


def measure(run: BenchmarkRun, prompt_tokens: int, page_tokens: int) -> None:
    """Adds rows for a prompt that is in the node's pool."""
    socket = run.folder / "copies" / "node" / "engine.sock"
    (run.folder / "copies").mkdir(mode=0o700)
    environment = {
        "LMKV_INSTANCE_ID": "node",
        "LMKV_RUNTIME_DIR": str(run.folder / "copies"),
        **engines.pool_setting(2 * prompt_tokens * engines.token_bytes(engines.EXACT_DTYPE)),
    }
    command = [sys.executable, "-m", "lmkv", "node"]
    with ServerProcess("copies-node", command, run.logs / "copies-node.log", environment) as node:
        node.start()
        node.wait_until(lambda: is_listening(socket), "ready", READY_SECONDS)
        settings = {
            "node_address": str(socket),
            "model_id": MODEL_ID,
            "lookup_timeout": TIMEOUT_SECONDS,
            "load_timeout": TIMEOUT_SECONDS,
        }
        torch.set_num_threads(1)  # as the servers
        rounds = 5 if run.quick else 20
        run.say(f"copies of {prompt_tokens} tokens, {rounds} rounds")
        run.add(*rows_of(*Hits(settings, prompt_tokens // page_tokens, page_tokens).times(rounds)))


class Hits:
    """The pages of one prompt in the node's pool, in a host pool and in a KV cache."""

    def __init__(self, settings: dict[str, object], page_count: int, page_tokens: int) -> None:
        """Stores the pages. Raises `LmkvError` if they cannot be loaded then."""
        shape = engines.SHAPE
        self._page_tokens = page_tokens
        self._keys = [sha256(index.to_bytes(4)).hexdigest() for index in range(page_count)]
        self._pages = [GAP * index for index in range(page_count)]
        slots = [page * page_tokens + slot for page in self._pages for slot in range(page_tokens)]
        self._slots = torch.tensor(slots, dtype=torch.int64)
        page_shape = (shape.layer_count, page_tokens, shape.kv_head_count, shape.head_size)
        self._host = torch.randn((2, GAP * page_count, *page_shape))
        cache = (GAP * page_count * page_tokens, shape.kv_head_count, shape.head_size)
        self._cache = [[torch.zeros(cache) for _ in range(shape.layer_count)] for _ in range(2)]
        self._storage = LmkvStorage(StorageConfigFields(extra_config={"interface_v1": 1, "lmkv": settings}), {})
        self._storage.register_mem_pool_host(
            HostPoolFields(layout="page_first_direct", kv_buffer=self._host, page_size=page_tokens, dtype=torch.float32)
        )
        self._direct, self._copier = self._attach_directly(settings)
        if not all(self._storage.batch_set_v1(self._keys, self._slots)):
            raise LmkvError("the pages were not stored")

    def _attach_directly(self, settings: dict[str, object]) -> tuple[Engine, Copier]:
        """An attachment whose pages are the KV cache. The chunks are those of the storage backend."""
        tensors = [
            [layer_tensors(layer[None], "layer_first", self._page_tokens)[0] for layer in part] for part in self._cache
        ]
        spec = make_spec(
            tensors,
            model_name="tiny",
            model_id=MODEL_ID,
            kv_dtype=engines.EXACT_DTYPE,
            page_size=self._page_tokens,
            shards={},
        )
        engine = Engine.attach(spec, config=ConnectorConfig(**settings))  # type: ignore[arg-type]
        return engine, engine.register(make_pages(tensors))

    def times(self, rounds: int) -> list[list[float]]:
        """Seconds in turns: storage call alone, storage call and HiCache's copy, direct copy."""
        expected = [part[self._pages].transpose(0, 1).flatten(1, 2).clone() for part in self._host]
        times = timing.in_turns([self.read, self.read_by_hicache, self.read_directly], rounds)
        for loaded, own in zip(self._cache, expected, strict=True):
            if not all(torch.equal(layer[self._slots], other) for layer, other in zip(loaded, own, strict=True)):
                raise LmkvError("a copy has other bytes")
        self._direct.close()
        self._storage.close()
        return times

    def read(self) -> None:
        """Lookup, and pool to host pool."""
        if self._storage.batch_exists(self._keys) < len(self._keys):
            raise LmkvError("the pages are not found")
        if not all(self._storage.batch_get_v1(self._keys, self._slots)):
            raise LmkvError("the pages are not read")

    def read_by_hicache(self) -> None:
        """Lookup, pool to host pool, and host pool to KV cache, layer by layer."""
        self.read()
        for layer in range(engines.SHAPE.layer_count):
            targets = [part[layer] for part in self._cache]
            load_layer(list(self._host), targets, self._slots, self._slots, layer, self._page_tokens)

    def read_directly(self) -> None:
        """Lookup, and pool to KV cache."""
        with self._direct.lookup(self._direct.foreign_keys(self._keys), timeout=TIMEOUT_SECONDS) as held:
            extents = list(held.load(timeout=TIMEOUT_SECONDS))
            if len(extents) < len(self._keys):
                raise LmkvError("the pages are not found")
            self._copier.scatter(extents, [[page] for page in self._pages])


def rows_of(storage: Sequence[float], hicache: Sequence[float], direct: Sequence[float]) -> list[Row]:
    """Direct copies beside HiCache's."""
    direct_ms, hicache_ms = 1e3 * statistics.median(direct), 1e3 * statistics.median(hicache)
    return [
        Row(name="sglang_storage_read_ms", value=1e3 * statistics.median(storage), unit="ms"),
        Row(
            name="sglang_direct_read_ms",
            value=direct_ms,
            unit="ms",
            baseline="through HiCache's host pool",
            baseline_value=hicache_ms,
            ratio=timing.median_ratio(direct, hicache),
        ),
    ]
