"""Disaggregated prefill on GPUs, with handoffs in the decode node's pool and in a buffer on the decode's GPU."""

from __future__ import annotations

import statistics
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
            _add(cluster, f"decode-{buffer}", "kv_consumer", options, own)
        run.say("starting a prefill engine and two decode engines")
        cluster.start_engines(lambda engine: run.say(f"{engine.name} is ready"))
        for length in lengths:
            answers: dict[str, list[TimedResponse]] = {buffer: [] for buffer in BUFFERS}
            for buffer in BUFFERS:
                with ProxyProcess(run.logs, [prefill], [cluster.engines[f"decode-{buffer}"]]) as proxy:
                    prompts = Prompts(seed=length)  # the same for both
                    for number in range(rounds + 2):  # two warm up
                        answer = whole_answer(proxy.stream(prompts.make(length), output_tokens))
                        if number > 1:
                            answers[buffer].append(answer)
                    prefill.reset_prefix_cache()
            add_rows(run, length, answers)
        if not Endpoint("node", ports["cuda"], "").metrics().get(DEVICE_BYTES):
            raise LmkvError(f"no handoff used the buffer on the GPU: {DEVICE_BYTES} is 0")


def _add(cluster: Cluster, name: str, role: str, options: dict[str, Any], settings: dict[str, str]) -> EngineProcess:
    transfer = {"kv_connector": "LMKVConnector", "kv_role": role}
    return cluster.add_engine(name, settings=settings, **options | {"transfer_config": transfer})


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
