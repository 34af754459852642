"""The connector's statistics in vLLM's form: for its log and the engine's `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmkv.tiers import HIT_TIERS, OWN
from lmkv_client.connector.vllm_api import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "stored_tokens": "Tokens whose KV was stored in the node's pool.",
    "stored_bytes": "Bytes stored in the node's pool.",
    "store_seconds": "Seconds that stores took inside the engine's steps.",
    "loaded_tokens": "Tokens whose KV was loaded instead of computed.",
    "loaded_bytes": "Bytes loaded from the node's pool into pages.",
    "load_seconds": "Seconds from the start of each load until its last byte was in its page.",
    "avoided_prefill_seconds": "Seconds that computing the loaded tokens would have taken, at the measured rate.",
    "tier_tokens": "Tokens among the loaded ones that were not in the node's pool, by the tier that held them.",
    "peer_bytes": "Bytes fetched from peers into the node's pool.",
    "peer_seconds": "Seconds that fetches from peers took.",
    "lookups": "Prompts looked up.",
    "lookup_seconds": "Seconds that prompts waited for their lookups.",
    "refused_fetch_tokens": "Tokens that could be fetched and were computed, for that was quicker.",
    "lookup_timeouts": "Lookups that the node did not answer in time.",
    "load_failures": "Loads that brought less than was found; the rest was computed.",
    "skipped_chunks": "Chunks not stored in all parts: no write credits, no node, failed stores, or null pages.",
    "null_page_requests": "Requests of which no more is stored because vLLM freed pages of them while they ran.",
    "handed_tokens": "Tokens whose KV decode engines have from this one by handoffs.",
    "handed_bytes": "Bytes that their nodes read for that.",
    "handed_seconds": "Seconds that these reads took.",
    "handoff_failures": "Handoffs that ended by an error; the decode computes what it has not.",
    "node_losses": "Times that the node was lost.",
}
"""Counters by name; Prometheus knows them as `lmkv:NAME_total`."""

TIER_TOKENS = "tier_tokens"
"""The counter that has the label `tier`; its counts are kept under `tier_tokens(tier)`."""

SPEC_CONFLICTS = "spec_conflicts"
"""Gauge: instances of the same model that share nothing with this one."""


@dataclass
class ConnectorStats(KVConnectorStats):
    """Counts since the last time vLLM took them."""

    def reset(self) -> None:
        """Starts over."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> ConnectorStats:
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


class ConnectorCounters:
    """Counters of the scheduler side; shared by its parts."""

    def __init__(self) -> None:
        self._data: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Counts."""
        if amount:
            self._data[name] = self._data.get(name, 0) + amount

    def set(self, name: str, amount: float) -> None:
        """Notes the value of a gauge."""
        self._data[name] = amount

    def take(self) -> ConnectorStats | None:
        """Everything since the last call; None if nothing was counted."""
        if not self._data:
            return None
        data, self._data = self._data, {}
        return ConnectorStats(data=data)


def tier_tokens(tier: str) -> str:
    """The name under which loaded tokens of one tier are counted."""
    return f"{TIER_TOKENS}:{tier}"


class PromMetrics(KVConnectorPromMetrics):
    """Exports the counts at the engine's `/metrics`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        make = {name: (self._counter_cls, text) for name, text in COUNTERS.items()}
        make[SPEC_CONFLICTS] = (self._gauge_cls, "Instances of the same model that share nothing with this one.")
        self._labelvalues = labelvalues
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, (kind, text) in make.items():
            labels = [*self._labelnames, "tier"] if name == TIER_TOKENS else self._labelnames
            metric = kind(name=f"lmkv:{name}", documentation=text, labelnames=labels)
            if name == TIER_TOKENS:
                self._tier_tokens = metric
            else:
                self._metrics[name] = {index: metric.labels(*values) for index, values in labelvalues.items()}
        for tier in HIT_TIERS:
            if tier != OWN:
                self._metric(tier_tokens(tier), next(iter(labelvalues)))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval."""
        for name, amount in transfer_stats_data.items():
            metric = self._metric(name, engine_idx)
            metric.set(amount) if name == SPEC_CONFLICTS else metric.inc(amount)

    def _metric(self, name: str, engine_idx: int) -> Any:
        if name not in self._metrics:
            tier = name.removeprefix(f"{TIER_TOKENS}:")
            children = {index: self._tier_tokens.labels(*values, tier) for index, values in self._labelvalues.items()}
            self._metrics[name] = children
        return self._metrics[name][engine_idx]
