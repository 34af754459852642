"""Disaggregated prefill on GPUs, with handoffs in the decode node's pool and in a buffer on the decode's GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.systems.prefill_decode import TimedResponse, whole_answer
from lmkv.errors import LmkvError
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import free_port
from tests.support.proxy import ProxyProcess

BUFFERS = ("cpu", "cuda")
"""Values of `pd_buffer_device`."""
DEVICE_BYTES = "lmkv_node_handoff_device_bytes_total"
STORED_TOKENS = "lmkv:stored_tokens_total"
LOADED_TOKENS = "lmkv:loaded_tokens_total"
PIN_SECONDS = 120.0
"""An engine on a GPU stores and loads nothing until its worker has pinned the pool."""


def measure(
    run: BenchmarkRun,
    model: Path,
    options: dict[str, Any],
    *,
    lengths: Sequence[int],
    rounds: int,
    pool_bytes: int,
    output_tokens: int,
) -> None:
    """Adds rows for one prefill engine and two decode engines, one for each buffer, which must answer alike.

    Raises `LmkvError` if no handoff used the buffer on the GPU.
    """
    settings = engines.PATIENCE | engines.pool_setting(pool_bytes) | {"LMKV_PD_TIMEOUT": "60"}
    with Cluster(run.folder, model, logs=run.logs, settings=settings, coordinator=False) as cluster:
        ports = {buffer: free_port() for buffer in BUFFERS}
        prefill = _add(cluster, "prefill", "kv_producer", options, {})
        for buffer, port in ports.items():
            own = {"LMKV_PD_BUFFER_DEVICE": buffer, "LMKV_METRICS_PORT": str(port)}
            if buffer == "cuda":
                own["LMKV_TRANSFER_CHANNEL"] = "nixl"  # without an RDMA device no other value reads into the buffer
            _add(cluster, f"decode-{buffer}", "kv_consumer", options, own)
        run.say("starting a prefill engine and two decode engines")
        cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
        for length in lengths:
            answers: dict[str, list[TimedResponse]] = {}
            for buffer in BUFFERS:
                decode = cluster.engines[f"decode-{buffer}"]
                with ProxyProcess(run.logs, [prefill], [decode]) as proxy:
                    _wait_until_handed(proxy, decode, length)
                    prompts = Prompts(seed=length)  # the same for both
                    before = decode.metrics().get(LOADED_TOKENS, 0.0)
                    answers[buffer] = [
                        whole_answer(proxy.stream(prompts.make(length), output_tokens)) for _ in range(rounds)
                    ]
                    if (loaded := decode.metrics().get(LOADED_TOKENS, 0.0) - before) < rounds * length:
                        raise LmkvError(f"{decode.name} loaded {loaded:.0f} of {rounds * length} tokens handed to it")
                    prefill.reset_prefix_cache()
            add_rows(run, length, answers)
        if not Endpoint("node", ports["cuda"], "").metrics().get(DEVICE_BYTES):
            raise LmkvError(f"no handoff used the buffer on the GPU: {DEVICE_BYTES} is 0")


def _wait_until_handed(proxy: ProxyProcess, decode: EngineProcess, length: int) -> None:
    """Sends prompts until two have been handed to the engine: neither is possible before both pools are pinned.

    Raises `LmkvError` if that takes too long.
    """
    prompts = Prompts(seed=length + 1)
    deadline = time.monotonic() + PIN_SECONDS
    wanted = decode.metrics().get(LOADED_TOKENS, 0.0) + 2 * length
    while decode.metrics().get(LOADED_TOKENS, 0.0) < wanted:
        if time.monotonic() > deadline:
            raise LmkvError(f"{decode.name} loaded no prompt that was handed to it in {PIN_SECONDS:g} s")
        whole_answer(proxy.stream(prompts.make(length), 2))


def _add(cluster: Cluster, name: str, role: str, options: dict[str, Any], settings: dict[str, str]) -> EngineProcess:
    transfer = {"kv_connector": "LMKVConnector", "kv_role": role}
    return cluster.add_engine(name, settings=settings, **options | {"transfer_config": transfer})


def wait_until_pinned(engine: EngineProcess, prompts: Prompts) -> None:
    """Sends prompts until the engine stores what it computes. Raises `LmkvError` if that takes too long."""
    deadline = time.monotonic() + PIN_SECONDS
    while not engine.metrics().get(STORED_TOKENS, 0.0):
        if time.monotonic() > deadline:
            raise LmkvError(f"{engine.name} stored nothing in {PIN_SECONDS:g} s")
        engine.complete(prompts.make(engines.CHUNK_SIZE + 1), 1)
        time.sleep(0.5)


def add_rows(run: BenchmarkRun, length: int, answers: dict[str, list[TimedResponse]]) -> None:
    """Adds rows for prompts of one length, with the answers for each buffer."""
    pool, device = (answers[buffer] for buffer in BUFFERS)
    for what in ("ttft", "second_token"):
        pool_ms, device_ms = (1e3 * statistics.median(getattr(one, what) for one in side) for side in (pool, device))
        run.add(compare(f"pd_{what}_device_ms_{length}", device_ms, "ms", "in the node's pool", pool_ms))
    same = [one.token_ids == other.token_ids for one, other in zip(pool, device, strict=True)]
    run.add(Row(name=f"pd_buffers_identical_{length}", value=100 * statistics.mean(same), unit="%"))
    words = ", ".join(f"{row.name} {row.value:.1f}" for row in run.report.rows[-3:])
    run.say(f"P/D, {length} tokens: {words}")
    if not all(same):
        run.fail(f"P/D, {length} tokens: answers to {same.count(False)} of {len(same)} prompts depend on the buffer")
