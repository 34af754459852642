"""One engine whose own cache is too small for its chats, with what keeps the rest: nothing, lmkv, and other systems."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.systems.pairs import ROOT, lmcache_problem, remove_regions
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import EngineProcess

ALONE = "alone"
"""The system that keeps nothing but what the engine's own cache has room for."""
FINE_TOKENS = 32
"""The smallest blocks that vLLM's attention on CPUs takes: other systems keep most in chunks of one block."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPlan:
    """What all systems have in common."""

    run: BenchmarkRun
    model: Path
    dtype: str
    context_tokens: int
    chats_in_cache: int
    """The number of full-length chats that fit into the engine's own cache."""
    pool_bytes: int
    """Host memory for what does not."""
    cache_bytes: int = 0
    """The engine's own cache, sized for a model whose tokens take more or fewer bytes than those of the benchmarks."""

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the engine."""
        options = engines.options(self.dtype, self.context_tokens, prompts_in_cache=self.chats_in_cache)
        return options | ({"kv_cache_bytes": self.cache_bytes} if self.cache_bytes else {})

    def options_for(self, chunk_tokens: int) -> dict[str, Any]:
        """Arguments of an engine whose blocks are no larger than a chunk."""
        return self.options | {"block_size": min(engines.BLOCK_SIZE, chunk_tokens)}


def systems(
    run: BenchmarkRun, plan: ChatPlan, lmcache_python: Path | None, *, fine: bool = False
) -> dict[str, Callable[[], AbstractContextManager[EngineProcess]]]:
    """The systems that can be measured, by the name that their rows begin with; each yields an engine that starts.

    `fine`: other systems also with the smallest blocks.
    """
    found: dict[str, Callable[[], AbstractContextManager[EngineProcess]]] = {
        ALONE: partial(alone, plan),
        "lmkv": partial(lmkv, plan),
        "vllm_offload": partial(offloading, plan),
    }
    if fine:
        found["vllm_offload_fine"] = partial(offloading, plan, chunk_tokens=FINE_TOKENS)
    if problem := lmcache_problem(lmcache_python):
        run.note(problem)
    elif lmcache_python:
        python = lmcache_python.absolute()
        found["lmcache"] = partial(lmcache, plan, python)
        if fine:
            found["lmcache_fine"] = partial(lmcache, plan, python, chunk_tokens=FINE_TOKENS)
    return found


@contextmanager
def alone(plan: ChatPlan) -> Iterator[EngineProcess]:
    """vLLM and nothing else."""
    engine = EngineProcess(plan.model, plan.run.logs, name="alone", transfer_config=None, **plan.options)
    with _running(engine):
        yield engine


@contextmanager
def lmkv(
    plan: ChatPlan, name: str = "lmkv", *, disk_bytes: int = 0, more: Mapping[str, str] | None = None
) -> Iterator[EngineProcess]:
    """lmkv's node beside the engine, without a coordinator. Each needs a name of its own; `more` are its settings."""
    settings = engines.PATIENCE | engines.pool_setting(plan.pool_bytes) | dict(more or {})
    run = plan.run
    if disk_bytes:
        settings |= {
            "LMKV_LOCAL_DISK": str(run.folder / f"{name}-disk"),
            "LMKV_MAX_LOCAL_DISK_SIZE": f"{-(-disk_bytes >> 20)}MiB",
        }
    with Cluster(run.folder, plan.model, logs=run.logs, settings=settings, coordinator=False) as cluster:
        engine = cluster.add_engine(name, **plan.options)
        engine.start()
        yield engine


@contextmanager
def offloading(
    plan: ChatPlan, chunk_tokens: int = engines.CHUNK_SIZE, *, tiers: Sequence[Mapping[str, object]] = ()
) -> Iterator[EngineProcess]:
    """vLLM's `OffloadingConnector`, its copies by NumPy. `tiers` are those behind its memory."""
    options = plan.options_for(chunk_tokens) | {"tiers": tiers}
    with offloading_engine(plan.run, plan.model, plan.pool_bytes, chunk_tokens=chunk_tokens, **options) as engine:
        yield engine


@contextmanager
def offloading_engine(
    run: BenchmarkRun,
    model: Path,
    pool_bytes: int,
    *,
    chunk_tokens: int = engines.CHUNK_SIZE,
    tiers: Sequence[Mapping[str, object]] = (),
    **options: Any,
) -> Iterator[EngineProcess]:
    """An engine of any model; by default with the chunk size of the benchmarks."""
    engine = EngineProcess(
        model,
        run.logs,
        name=f"offloading-{chunk_tokens}",
        transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": pool_bytes,
                "block_size": chunk_tokens,
                "spec_name": "MemcpyOffloadingSpec",
                "spec_module_path": "benchmarks.systems.memcpy_offload",
                **({"secondary_tiers": list(tiers)} if tiers else {}),
            },
        },
        environment={"PYTHONPATH": str(ROOT)},
        **options,
    )
    with ExitStack() as stack:
        stack.callback(remove_regions, [engine])
        stack.enter_context(_running(engine))
        yield engine


@contextmanager
def lmcache(
    plan: ChatPlan,
    python: Path,
    chunk_tokens: int = engines.CHUNK_SIZE,
    *,
    more: Mapping[str, object] | None = None,
) -> Iterator[EngineProcess]:
    """LMCache's in-process connector, its copies between pages by torch. `more` is added to its configuration."""
    config = plan.run.folder / f"lmcache-{chunk_tokens}.yaml"
    values = {
        "chunk_size": chunk_tokens,
        "local_cpu": True,
        "max_local_cpu_size": round(plan.pool_bytes / (1 << 30), 2),
        **(more or {}),
    }
    config.write_text(json.dumps(values))  # JSON is YAML
    engine = EngineProcess(
        plan.model,
        plan.run.logs,
        name=f"lmcache-{chunk_tokens}",
        transfer_config={
            "kv_connector": "LMCacheConnectorV1Dynamic",
            "kv_connector_module_path": "benchmarks.systems.lmcache_cpu",
            "kv_role": "kv_both",
        },
        environment={
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": "0",
            "LMCACHE_TRACK_USAGE": "false",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_CONFIG_FILE": str(config),
        },
        **plan.options_for(chunk_tokens),
    )
    engine.command[0] = str(python)
    with _running(engine):
        yield engine


@contextmanager
def _running(engine: EngineProcess) -> Iterator[None]:
    try:
        engine.start()
        yield
    finally:
        engine.stop()
