"""Pairs of engines that share prompts by lmkv or another system, with the same interface for measurements."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import ServerProcess, free_port
from tests.support.plain_nixl import plain_nixl

ROOT = Path(__file__).parents[2]
STORE_SECONDS = 30.0
BLIND_WAIT_SECONDS = 2.0
"""For stores of a system that does not say when they are done."""
POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePair:
    """Two engines. What the first has computed, the second can have."""

    first: EngineProcess
    second: EngineProcess
    wait_until_stored: Callable[[Sequence[int]], None]
    """Returns when the second can have a prompt that the first has answered."""
    direction: Callable[[], Mapping[str, object]] = dict
    """What a request to the second must carry so that it finds the first; nothing where the system knows."""
    other_pids: Callable[[], list[int]] = list
    """Processes that belong to the engines besides their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairPlan:
    """What all pairs have in common."""

    run: BenchmarkRun
    model: Path
    context_tokens: int
    dtype: str
    prompts_in_pool: int = 5
    prompts_in_second_pool: int = 0
    """The same of the second engine, if it has another number."""
    prompts_in_cache: int = 3
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings of lmkv's nodes."""

    @property
    def pool_bytes(self) -> int:
        """Host memory for each engine's chunks."""
        return self.prompts_in_pool * self.context_tokens * engines.token_bytes(self.dtype)

    @property
    def second_pool_bytes(self) -> int:
        """The same of the second engine."""
        return self.pool_bytes // self.prompts_in_pool * (self.prompts_in_second_pool or self.prompts_in_pool)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the engines."""
        return engines.options(self.dtype, self.context_tokens, self.prompts_in_cache)


@contextmanager
def lmkv_pair(plan: PairPlan) -> Iterator[EnginePair]:
    """lmkv, with a coordinator."""
    settings = engines.PATIENCE | dict(plan.settings)
    with Cluster(plan.run.folder, plan.model, logs=plan.run.logs, settings=settings) as cluster:
        coordinator = cluster.coordinator
        assert coordinator is not None
        for name, pool_bytes in (("engine-1", plan.pool_bytes), ("engine-2", plan.second_pool_bytes)):
            cluster.add_engine(name, settings=engines.pool_setting(pool_bytes), **plan.options)
        cluster.start_engines(lambda engine: plan.run.say(f"{engine.name} is ready"))
        first, second = cluster.engines.values()

        def wait(prompt: Sequence[int]) -> None:
            coordinator.wait_for_holder(prompt, first.name, len(prompt), STORE_SECONDS)

        yield EnginePair(first=first, second=second, wait_until_stored=wait, other_pids=cluster.node_pids)


@contextmanager
def offloading_pair(plan: PairPlan) -> Iterator[EnginePair]:
    """vLLM's `OffloadingConnector` with its p2p tier, its copies by NumPy."""
    ports = [free_port(), free_port()]
    pair = [
        EngineProcess(
            plan.model,
            plan.run.logs,
            name=f"offloading-{number}",
            transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "cpu_bytes_to_use": plan.pool_bytes if number == 1 else plan.second_pool_bytes,
                    "block_size": engines.CHUNK_SIZE,
                    "spec_name": "MemcpyOffloadingSpec",
                    "spec_module_path": "benchmarks.systems.memcpy_offload",
                    "secondary_tiers": [{"type": "p2p", "host": "127.0.0.1", "port": port}],
                },
            },
            environment={"PYTHONPATH": f"{plain_nixl(plan.run.folder)}:{ROOT}"},
            **plan.options,
        )
        for number, port in enumerate(ports, 1)
    ]
    numbers = itertools.count(1)

    def direction() -> Mapping[str, object]:
        source = {"kv_request_id": f"r{next(numbers)}", "remote_host": "127.0.0.1", "remote_port": ports[0]}
        return {"kv_transfer_params": {"remote_kv_source": source}}

    with running(plan.run, pair), ExitStack() as stack:
        stack.callback(remove_regions, pair)
        yield EnginePair(
            first=pair[0],
            second=pair[1],
            wait_until_stored=lambda _prompt: time.sleep(BLIND_WAIT_SECONDS),
            direction=direction,
        )


@contextmanager
def lmcache_pair(plan: PairPlan, python: Path) -> Iterator[EnginePair]:
    """LMCache's in-process connector with its controller and P2P over NIXL, its copies between pages by torch."""
    http, pull, reply, heartbeat = (free_port() for _ in range(4))
    common = {
        "PYTHONPATH": str(ROOT),
        "PYTHONHASHSEED": "0",
        "LMCACHE_TRACK_USAGE": "false",
        "LMCACHE_DISABLE_BANNER": "1",
        "UCX_TLS": "tcp,sm,self",
    }
    monitor_ports = json.dumps({"pull": pull, "reply": reply, "heartbeat": heartbeat})
    arguments = ["--host", "127.0.0.1", "--port", str(http), "--monitor-ports", monitor_ports]
    controller = ServerProcess(
        "lmcache-controller",
        [str(python.parent / "lmcache_controller"), *arguments],
        plan.run.logs / "lmcache-controller.log",
        common,
    )
    pair = []
    for number in (1, 2):
        config = plan.run.folder / f"lmcache-{number}.yaml"
        config.write_text(json.dumps(_lmcache_config(plan, number, pull, reply)))  # JSON is YAML
        engine = EngineProcess(
            plan.model,
            plan.run.logs,
            name=f"lmcache-{number}",
            transfer_config={
                "kv_connector": "LMCacheConnectorV1Dynamic",
                "kv_connector_module_path": "benchmarks.systems.lmcache_cpu",
                "kv_role": "kv_both",
            },
            environment=common | {"LMCACHE_CONFIG_FILE": str(config)},
            **plan.options,
        )
        engine.command[0] = str(python)
        pair.append(engine)

    def wait(prompt: Sequence[int]) -> None:
        _wait_for_lmcache(http, prompt)

    with controller:
        controller.start()
        controller.wait_until(lambda: answers(f"http://127.0.0.1:{http}/controller/key-stats"), "ready", 60.0)
        with running(plan.run, pair):
            yield EnginePair(first=pair[0], second=pair[1], wait_until_stored=wait)


def _lmcache_config(plan: PairPlan, number: int, pull: int, reply: int) -> dict[str, object]:
    return {
        "chunk_size": engines.CHUNK_SIZE,
        "local_cpu": True,
        "max_local_cpu_size": round((plan.pool_bytes if number == 1 else plan.second_pool_bytes) / (1 << 30), 2),
        "enable_async_loading": True,
        "enable_p2p": True,
        "p2p_host": "127.0.0.1",
        "p2p_init_ports": [free_port()],
        "p2p_lookup_ports": [free_port()],
        "transfer_channel": "nixl",
        "nixl_buffer_device": "cpu",
        "enable_controller": True,
        "lmcache_instance_id": f"instance-{number}",
        "controller_pull_url": f"127.0.0.1:{pull}",
        "controller_reply_url": f"127.0.0.1:{reply}",
        "lmcache_worker_ports": [free_port()],
        "extra_config": {"lookup_backoff_time": 0.001},
    }


def _wait_for_lmcache(http: int, prompt: Sequence[int]) -> None:
    """Waits until the controller knows all of a prompt. Raises `LmkvError` when time is up."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{http}/lookup",
        json.dumps({"tokens": list(prompt)}).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + STORE_SECONDS
    held = 0
    while held < engines.full_chunks(len(prompt)):
        if time.monotonic() > deadline:
            raise LmkvError(f"LMCache's controller knows {held} of {len(prompt)} tokens")
        time.sleep(POLL_SECONDS)
        with urllib.request.urlopen(request, timeout=10.0) as response:
            layout = json.load(response)["layout_info"]
        held = max((count for _, count in layout.values()), default=0)


def answers(url: str) -> bool:
    """Whether a server responds there."""
    try:
        with urllib.request.urlopen(url, timeout=2.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def running(run: BenchmarkRun, pair: Sequence[EngineProcess]) -> Iterator[None]:
    """Both engines, started at once and ended at once."""
    try:
        for engine in pair:
            engine.start()
        for engine in pair:
            engine.wait_ready()
            run.say(f"{engine.name} is ready")
        yield
    finally:
        for engine in pair:
            engine.request_stop()
        for engine in pair:
            engine.stop()


def remove_regions(pair: Sequence[EngineProcess]) -> None:
    """Removes the shared memory that vLLM leaves behind when it is killed; its log names it."""
    for engine in pair:
        for name in set(re.findall(r"/dev/shm/vllm_offload_[\w.-]+\.mmap", engine.log())):
            Path(name).unlink(missing_ok=True)


def lmcache_problem(python: Path | None) -> str | None:
    """Why LMCache cannot be measured; None if it can."""
    if python is None:
        return "LMCache was not measured: --lmcache-python was not given"
    if not python.exists():
        return f"LMCache was not measured: there is no {python.name} where --lmcache-python says"
    if not (python.parent / "lmcache_controller").exists():
        return "LMCache was not measured: the environment of --lmcache-python does not have it"
    return None


def nixl_problem() -> str | None:
    """Why vLLM's p2p tier cannot be measured; None if it can."""
    if importlib.util.find_spec("nixl") or importlib.util.find_spec("nixl_cu12"):
        return None
    return f"vLLM's p2p tier was not measured: {Path(sys.executable).name} has no NIXL"
