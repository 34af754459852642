"""The connector's statistics in vLLM's form: for its log and the engine's `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lmkv.hints import HintAction
from lmkv.misses import MissReason
from lmkv.tiers import HIT_TIERS, OWN
from lmkv_client.connector.vllm_api import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "stored_tokens": "Tokens whose KV was stored in the node's pool.",
    "stored_bytes": "Bytes stored in the node's pool.",
    "store_seconds": "Seconds that stores took, in or beside the engine's steps.",
    "loaded_tokens": "Tokens whose KV was loaded instead of computed.",
    "loaded_bytes": "Bytes loaded from the node's pool into pages.",
    "load_seconds": "Seconds from the start of each load until its last byte was in its page.",
    "avoided_prefill_seconds": "Seconds that computing the loaded tokens would have taken, at the measured rate.",
    "miss_tokens": "Tokens of prompts that were computed, by the reason of the miss, when the request ends.",
    "tier_tokens": "Loaded tokens that were not in the node's pool, by the tier where the lookup found them.",
    "peer_bytes": "Bytes fetched from peers into the node's pool.",
    "peer_seconds": "Seconds that fetches from peers took.",
    "lookups": "Prompts looked up.",
    "lookup_seconds": "Seconds that prompts waited for their lookups.",
    "refused_fetch_tokens": "Tokens that could be loaded or fetched and were computed because that was quicker.",
    "abandoned_tokens": "Tokens whose load was under way and which were computed because that was quicker.",
    "expected_load_seconds": "Seconds that loads of known speed were expected to take.",
    "load_error_seconds": "Seconds by which these loads took longer or shorter than expected.",
    "lookup_timeouts": "Lookups that the node did not answer in time.",
    "load_failures": "Loads of less than was found; the rest was computed.",
    "skipped_chunks": "Chunks not stored in all parts: no write credits, no node, failed stores, or null pages.",
    "null_page_requests": "Requests of which no more is stored because vLLM freed pages of them while they ran.",
    "audited_tokens": "Tokens of hits that were computed, to compare them with what the cache holds.",
    "audited_chunks": "Chunks that were computed and compared with what the cache holds, by outcome.",
    "handed_tokens": "Tokens whose KV decode engines received from this one by handoffs.",
    "handed_bytes": "Bytes of handoffs that nodes of decode engines read.",
    "handed_seconds": "Seconds that nodes of decode engines took to read handoffs.",
    "handoff_failures": "Handoffs that ended with an error; the decode engine computes the rest.",
    "node_losses": "Times that the node was lost.",
    "hints": "Actions of hints in requests, by action and outcome.",
}
"""Counters by name; Prometheus knows them as `lmkv:NAME_total`."""

TIER_TOKENS = "tier_tokens"
"""The counter that has the label `tier`."""
MISS_TOKENS = "miss_tokens"
"""The counter that has the label `reason`."""

HINTS = "hints"
"""The counter that has the labels `action` and `outcome`."""

AUDITED_CHUNKS = "audited_chunks"
"""The counter that has the label `outcome` alone."""
AUDIT_OUTCOMES = ("equal", "suspect", "wrong", "void")

LABELS = {AUDITED_CHUNKS: ("outcome",), TIER_TOKENS: ("tier",), MISS_TOKENS: ("reason",), HINTS: ("action", "outcome")}
"""Labels of counters besides vLLM's own. Their counts are kept under the name and the values, separated by colons."""

ENCODER_COUNTERS = {
    "encoder_hits": "Images, sounds and videos whose encoder did not run, since its output was loaded.",
    "encoder_misses": "Images, sounds and videos that were encoded, since no output of an encoder was found.",
    "encoder_loaded_bytes": "Bytes of outputs of encoders that were loaded.",
    "encoder_stored_bytes": "Bytes of outputs of encoders that were stored in the node's pool.",
    "encoder_load_failures": "Outputs of encoders that were found and not loaded; the encoder ran again.",
    "encoder_skipped_stores": "Outputs of encoders that were not stored: no node, no room, or another shape.",
    "encoder_unknown_media": "Images, sounds and videos of unknown content, whose outputs are not cached.",
}
"""Counters of `LMKVECConnector` by name; Prometheus knows them as `lmkv:NAME_total`."""

SPEC_CONFLICTS = "spec_conflicts"
GAUGES = {SPEC_CONFLICTS: "Instances of the same model that share nothing with this one."}
"""Gauges by name; Prometheus knows them as `lmkv:NAME`."""


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
        """Returns the values for vLLM's log line."""
        return {name: round(amount, 4) for name, amount in self.data.items()}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


def hint_labels(action: str, outcome: str) -> str:
    """The labels of hints of one action and outcome; actions of clients that are unknown are one."""
    return f"{action if action in set(HintAction) else 'unknown'}:{outcome}"


class PromMetrics(KVConnectorPromMetrics):
    """Exports the counts at the engine's `/metrics`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        make = {name: (self._counter_cls, text) for name, text in COUNTERS.items()}
        make |= {name: (self._gauge_cls, text) for name, text in GAUGES.items()}
        self._labelvalues = labelvalues
        self._metrics: dict[str, dict[int, Any]] = {}
        self._labelled: dict[str, Any] = {}
        for name, (kind, text) in make.items():
            labels = [*self._labelnames, *LABELS.get(name, ())]
            metric = kind(name=f"lmkv:{name}", documentation=text, labelnames=labels)
            if name in LABELS:
                self._labelled[name] = metric
            else:
                self._metrics[name] = {index: metric.labels(*values) for index, values in labelvalues.items()}
        always = [f"{TIER_TOKENS}:{tier}" for tier in HIT_TIERS if tier != OWN]
        always += [f"{MISS_TOKENS}:{reason}" for reason in MissReason]
        always += [f"{AUDITED_CHUNKS}:{outcome}" for outcome in AUDIT_OUTCOMES]
        for name in always:
            self._metric(name, next(iter(labelvalues)))

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval."""
        for name, amount in transfer_stats_data.items():
            metric = self._metric(name, engine_idx)
            metric.set(amount) if name == SPEC_CONFLICTS else metric.inc(amount)

    def _metric(self, name: str, engine_idx: int) -> Any:
        if name not in self._metrics:
            family, _, rest = name.partition(":")
            own = rest.split(":", len(LABELS[family]) - 1)
            metric = self._labelled[family]
            self._metrics[name] = {index: metric.labels(*values, *own) for index, values in self._labelvalues.items()}
        return self._metrics[name][engine_idx]
