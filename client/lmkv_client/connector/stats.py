"""What the connector counts, as vLLM wants it: stats from both sides, on the log and at the engine's `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "stored_tokens": "Tokens whose KV was stored in the node's pool.",
    "stored_bytes": "Bytes stored in the node's pool.",
    "store_seconds": "Seconds that stores took inside the engine's steps.",
    "loaded_tokens": "Tokens whose KV was loaded instead of computed.",
    "loaded_bytes": "Bytes loaded from the node's pool into pages.",
    "load_seconds": "Seconds from the start of each load until its last byte was in its page.",
    "disk_tokens": "Tokens among the loaded ones that were on the node's own disk.",
    "peer_tokens": "Tokens among the loaded ones that peers held.",
    "remote_tokens": "Tokens among the loaded ones that were in the store which all share.",
    "peer_bytes": "Bytes fetched from peers into the node's pool.",
    "peer_seconds": "Seconds that fetches from peers took.",
    "lookups": "Prompts looked up.",
    "lookup_seconds": "Seconds that prompts waited for their lookups.",
    "refused_fetch_tokens": "Tokens that could be fetched and were computed, for that was quicker.",
    "lookup_timeouts": "Lookups that the node did not answer in time.",
    "load_failures": "Loads that brought less than was found; the rest was computed.",
    "skipped_chunks": "Chunks that were not stored: no write credits, no node, failed stores, or null pages.",
    "null_page_requests": "Requests of which no more is stored because vLLM freed pages of them while they ran.",
    "handed_tokens": "Tokens whose KV decode engines have from this one by handoffs.",
    "handed_bytes": "Bytes that their nodes read for that.",
    "handed_seconds": "Seconds that these reads took.",
    "handoff_failures": "Handoffs that ended by an error; the decode computes what it has not.",
    "node_losses": "Times that the node was lost.",
}
"""Counters by name; Prometheus knows them as `lmkv:NAME_total`."""

SPEC_CONFLICTS = "spec_conflicts"
"""Gauge: instances of the same model that share nothing with this one."""


@dataclass
class Stats(KVConnectorStats):
    """Counts since the last time vLLM took them."""

    def reset(self) -> None:
        """Starts over."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> Stats:
        """Both together; the latest value of the gauge."""
        for name, amount in other.data.items():
            self.data[name] = amount if name == SPEC_CONFLICTS else self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(amount, 4) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class Counters:
    """What the scheduler side counts; shared by its parts."""

    def __init__(self) -> None:
        self._data: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Counts."""
        if amount:
            self._data[name] = self._data.get(name, 0) + amount

    def set(self, name: str, amount: float) -> None:
        """Notes the value of a gauge."""
        self._data[name] = amount

    def take(self) -> Stats | None:
        """Everything since the last call; None if nothing was counted."""
        if not self._data:
            return None
        data, self._data = self._data, {}
        return Stats(data=data)


class PromMetrics(KVConnectorPromMetrics):
    """The same at the engine's `/metrics`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        make = {name: (self._counter_cls, text) for name, text in COUNTERS.items()}
        make[SPEC_CONFLICTS] = (self._gauge_cls, "Instances of the same model that share nothing with this one.")
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, (kind, text) in make.items():
            metric = kind(name=f"lmkv:{name}", documentation=text, labelnames=self._labelnames)
            self._metrics[name] = {index: metric.labels(*values) for index, values in labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval."""
        for name, amount in transfer_stats_data.items():
            metric = self._metrics[name][engine_idx]
            metric.set(amount) if name == SPEC_CONFLICTS else metric.inc(amount)
