"""What the nodes of a prefill and a decode say to each other, and how fast bytes follow: from what they count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from benchmarks.support.rows import Row
from lmkv.v1 import peer_service_pb2 as pb
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import EngineProcess

SERVICE = pb.DESCRIPTOR.services_by_name["PeerService"]
GB = 1 << 30
SHORT_PROMPT = (5, 6, 7, 8)
"""Has an engine take a step, which reports its counters; nothing is handed off, since no proxy asks for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PdCounts:
    """What was counted up to one moment, or between two."""

    rpcs: Mapping[str, float]
    """Calls that the nodes have answered each other, by method."""
    handed_bytes: float
    """What decodes' nodes have read."""
    handed_seconds: float
    """How long that took, without waiting for chunks to be computed."""

    def __sub__(self, earlier: PdCounts) -> PdCounts:
        return PdCounts(
            rpcs={method: count - earlier.rpcs[method] for method, count in self.rpcs.items()},
            handed_bytes=self.handed_bytes - earlier.handed_bytes,
            handed_seconds=self.handed_seconds - earlier.handed_seconds,
        )

    def rows(self, request_count: int, suffix: str) -> Iterator[Row]:
        """Rows for this number of requests; no speed where no time was counted, as the clock of a fast machine may."""
        yield Row(name=f"pd_rpcs_per_request{suffix}", value=sum(self.rpcs.values()) / request_count, unit="RPCs")
        if self.handed_seconds > 0:
            speed = self.handed_bytes / GB / self.handed_seconds
            yield Row(name=f"pd_handoff_gb_per_s{suffix}", value=speed, unit="GB/s")

    def in_words(self, request_count: int) -> str:
        """The number of RPCs per request."""
        return ", ".join(f"{method} {count / request_count:.3g}" for method, count in self.rpcs.items() if count)


@dataclass(frozen=True, kw_only=True, slots=True)
class PdCalls:
    """Where it is counted."""

    prefill: EngineProcess
    node_ports: tuple[int, ...]
    """Where the nodes show their metrics."""

    def counts(self) -> PdCounts:
        """What was counted so far. An engine reports a handoff with its next request, so it gets a short one first."""
        self.prefill.complete(SHORT_PROMPT, 1)
        nodes = [Endpoint("node", port, "") for port in self.node_ports]
        engine = self.prefill.metrics()
        return PdCounts(
            rpcs={method.name: sum(answered(node, method.name) for node in nodes) for method in SERVICE.methods},
            handed_bytes=engine.get("lmkv:handed_bytes_total", 0.0),
            handed_seconds=engine.get("lmkv:handed_seconds_total", 0.0),
        )


def answered(node: Endpoint, method: str) -> float:
    """How many calls of one method of `PeerService` a node has answered."""
    values = node.metrics(rpc_method=f"{SERVICE.full_name}/{method}")
    return values.get("rpc_server_call_duration_seconds_count", 0.0)
