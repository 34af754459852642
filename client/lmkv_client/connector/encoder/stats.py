"""Statistics of the encoder cache in vLLM's form: for its log and the engine's `/metrics`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from lmkv_client.connector.encoder.ec_api import ECConnectorPromMetrics, ECConnectorStats
from lmkv_client.connector.stats import ENCODER_COUNTERS


@dataclass
class EncoderStats(ECConnectorStats):
    """Counts since the last time vLLM took them."""

    data: dict[str, Any] = field(default_factory=dict)
    """By the names of `ENCODER_COUNTERS`."""

    def reset(self) -> None:
        """Starts over."""
        self.data.clear()

    def aggregate(self, other: ECConnectorStats) -> EncoderStats:
        """Both together."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values for vLLM's log line."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class EncoderPromMetrics(ECConnectorPromMetrics):
    """Exports the counts at the engine's `/metrics`."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for name, text in ENCODER_COUNTERS.items():
            metric = self._counter_cls(name=f"lmkv:{name}", documentation=text, labelnames=labelnames)
            self._metrics[name] = {index: metric.labels(*values) for index, values in labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds one interval."""
        for name, count in transfer_stats_data.items():
            self._metrics[name][engine_idx].inc(count)
