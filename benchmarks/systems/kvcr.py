"""Two engines with KVCR 0.1 below vLLM's `OffloadingConnector`: its hints, its transfers between engines, its disk.

KVCR's hint `kv.fetch` names the engine that holds a request's prompt, and comes with the request.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.support import engines
from benchmarks.systems.pairs import ROOT, PairPlan, remove_regions, running
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import free_port

VERSION = "import kvcr, nixl, vllm; from importlib.metadata import version; print(version('kvcr'))"
TIMEOUT_MS = 20_000
"""Of one transfer: a busy machine makes it slow, not wrong."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvcrPair:
    """Two engines. What leaves the memory of the first goes to its disk; the second takes hinted prompts from it."""

    first: EngineProcess
    second: EngineProcess
    address: str
    """Where the first engine's KVCR is asked."""

    def hint(self) -> Mapping[str, object]:
        """What a request to the second must carry so that it finds the first.

        KVCR looks for each of the request's blocks, whichever are named: the router that names them is not measured.
        """
        payload = {"source_control_endpoint": self.address, "block_hashes": [0]}
        action = {"action_id": "fetch", "action_type": "kv.fetch", "action_version": "1.0", "payload": payload}
        envelope = {"protocol_version": "0.1", "message_id": "benchmark", "actions": [action]}
        return {"kv_transfer_params": {"kv_hints": envelope}}

    def stored_chunks(self) -> int:
        """Chunks that the first engine's KVCR has stored since it started."""
        return self._metric("kvcr_transfer_blocks_total", operation="local_fill")

    def disk_chunks(self) -> int:
        """Chunks on the first engine's disk."""
        return self._metric("kvcr_state", resource="g3_evictable_slots")

    def _metric(self, name: str, **labels: str) -> int:
        return int(self.first.metrics(**labels).get(f"vllm:{name}", 0))


@contextmanager
def kvcr_pair(plan: PairPlan, python: Path, *, chunk_count: int, disk_chunk_count: int) -> Iterator[KvcrPair]:
    """Engines with memory for a prompt and a half of `chunk_count` chunks; the first one's KVCR has memory for one."""
    chunk_bytes = engines.CHUNK_SIZE * engines.token_bytes(plan.dtype)
    ports = [free_port(), free_port()]
    disk = {
        "secondary_g2_slots": chunk_count,
        "g3": {
            "paths": [str(plan.run.folder / "kvcr-disk")],
            "capacity_bytes_per_file": disk_chunk_count * chunk_bytes,
            "backend": "POSIX",
        },
    }
    pair = [
        _engine(plan, python, f"kvcr-{number}", port, 3 * chunk_count // 2 * chunk_bytes, disk if number == 1 else {})
        for number, port in enumerate(ports, 1)
    ]
    with ExitStack() as stack:
        stack.callback(remove_regions, pair)
        stack.enter_context(running(plan.run, pair))
        yield KvcrPair(first=pair[0], second=pair[1], address=f"tcp://127.0.0.1:{ports[0]}")


def _engine(
    plan: PairPlan, python: Path, name: str, port: int, memory_bytes: int, disk: Mapping[str, object]
) -> EngineProcess:
    tier = {
        "type": "HintedKvcrTier",
        "module_path": "benchmarks.systems.kvcr_tier",
        "router_capabilities": ["router_hint"],
        "control_host": "127.0.0.1",
        "control_advertise_host": "127.0.0.1",
        "control_ports": [port],
        "operation_timeout_ms": TIMEOUT_MS,
        "abandon_timeout_ms": 2 * TIMEOUT_MS,
        "enable_telemetry": True,
        **disk,
    }
    return EngineProcess(
        plan.model,
        plan.run.logs,
        name=name,
        python=str(python.absolute()),
        transfer_config={
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": memory_bytes,
                "block_size": engines.CHUNK_SIZE,
                "spec_name": "MemcpyOffloadingSpec",
                "spec_module_path": "benchmarks.systems.memcpy_offload",
                "secondary_tiers": [tier],
            },
        },
        environment={"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,sm,self"},
        **plan.options,
    )


def kvcr_problem(python: Path | None) -> str | None:
    """Why KVCR cannot be measured; None if it can."""
    if python is None:
        return "KVCR was not measured: --kvcr-python was not given"
    if not python.exists():
        return f"KVCR was not measured: there is no {python.name} where --kvcr-python says"
    if not kvcr_version(python):
        return "KVCR was not measured: the environment of --kvcr-python does not have it, NIXL and vLLM"
    return None


def kvcr_version(python: Path) -> str:
    """The version that this Python has, or nothing."""
    command: Sequence[str | Path] = [python, "-c", VERSION]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
