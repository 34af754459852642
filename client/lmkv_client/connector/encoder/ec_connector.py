"""`LMKVECConnector`: the hooks of vLLM's encoder cache, each delegated to the side that it belongs to.

vLLM makes one of these in the process that schedules and one in each worker. Every failure ends as a run of the encoder
and a count; only a mistake in the configuration, at start, is raised.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from lmkv.errors import LmkvError
from lmkv_client import startup_error
from lmkv_client.connector.encoder.ec_api import (
    ECConnectorBase,
    ECConnectorOutput,
    ECConnectorPromMetrics,
    ECConnectorRole,
    ECConnectorStats,
)
from lmkv_client.connector.encoder.outputs import EncoderPlan, EncoderReport, OutputWidths, encoder_spec
from lmkv_client.connector.encoder.scheduler import EncoderRoles, EncoderScheduler
from lmkv_client.connector.encoder.worker import EncoderWorker
from lmkv_client.connector.identity import loaded_after
from lmkv_client.connector.stats import ENCODER_COUNTERS
from lmkv_client.connector.vllm_api import (
    Request,
    SchedulerOutput,
    VllmConfig,
    get_tensor_model_parallel_rank,
    init_logger,
)
from lmkv_client.connector.vllm_connector import scheduler_sides
from lmkv_client.connector.weight_updates import watch
from lmkv_client.engine import Engine
from lmkv_client.engine.late_engine import LateEngine
from lmkv_client.engine.log import join_log
from lmkv_client.preflight import encoder_config

logger = init_logger("vllm.lmkv")
join_log(logger)


@dataclass
class EncoderStats(ECConnectorStats):
    """Counts since the last time vLLM took them."""

    data: dict[str, Any] = field(default_factory=dict)
    """Counts by name; the names are those of `ENCODER_COUNTERS`."""

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


class LMKVECConnector(ECConnectorBase):
    """The connector that `--ec-transfer-config '{"ec_connector":"LMKVECConnector","ec_role":"ec_both"}'` names."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        self._scheduler: EncoderScheduler | None = None
        self._worker: EncoderWorker | None = None
        self._engine: LateEngine | None = None
        try:
            self._start(vllm_config, role)
        except LmkvError as error:
            startup_error.record(error)
            raise

    def _start(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        config = encoder_config(vllm_config.kv_transfer_config, vllm_config.ec_transfer_config)
        if role is ECConnectorRole.SCHEDULER:
            for notice in config.notices:
                logger.warning("%s", notice)
            self._engine = LateEngine(
                lambda: Engine.attach(encoder_spec(vllm_config, config), config=config),
                without="encoders run for everything",
            )
            self._engine.wait(config.node_start_timeout + time.time() - loaded_after(vllm_config))
            lora = vllm_config.lora_config
            roles = EncoderRoles(
                may_load=self.is_consumer,
                may_store=self.is_producer,
                adapts_encoders=bool(lora and lora.enable_tower_connector_lora),
            )
            self._scheduler = EncoderScheduler(self._engine, OutputWidths(vllm_config), roles)
            watch(scheduler_sides)
        else:
            self._worker = EncoderWorker(
                config,
                vllm_config.model_config.dtype,
                vllm_config.device_config.device_type,
                is_writer=self.is_producer and get_tensor_model_parallel_rank() == 0,
            )

    # ---- worker side

    @property
    def worker(self) -> EncoderWorker:
        """The worker side, in a worker."""
        assert self._worker is not None
        return self._worker

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Loads the outputs of the step's plan, before the runner looks for them."""
        self.worker.load(encoder_cache, self._step_plan())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        """Stores what the encoder has made."""
        self.worker.save(encoder_cache, mm_hash, self._step_plan())

    def build_connector_worker_meta(self) -> EncoderReport | None:
        """The counts of the worker since its last report."""
        return self.worker.report()

    def _step_plan(self) -> EncoderPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, EncoderPlan)
        return plan

    # ---- scheduler side

    @property
    def scheduler(self) -> EncoderScheduler:
        """The scheduler side, in the process that schedules."""
        assert self._scheduler is not None
        return self._scheduler

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether a request needs not wait for lookups of its media."""
        return self.scheduler.admit(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        """Whether the output for a medium can be loaded, so that its encoder does not run."""
        return self.scheduler.has(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Plans the load or the store of a medium's output."""
        self.scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> EncoderPlan:
        """The plan of a step for the workers."""
        return self.scheduler.plan()

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        """Adds what the workers have counted."""
        if isinstance(report := connector_output.ec_connector_worker_meta, EncoderReport):
            self.scheduler.count(report.counts)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Ends the lookups of a request."""
        self.scheduler.finished(request)
        return False, None

    def weights_changed(self) -> None:
        """The weights change in place: see `weight_updates`."""
        self.scheduler.weights_changed()

    # ---- both

    def get_ec_connector_stats(self) -> EncoderStats | None:
        """Statistics since the last call. The scheduler side counts for both."""
        counts = self._scheduler.take_counts() if self._scheduler else {}
        return EncoderStats(data=counts) if counts else None

    def shutdown(self) -> None:
        """Closes both sides. vLLM does not always call it: nothing depends on it."""
        if self._worker:
            self._worker.close()
        if self._engine:
            self._engine.close()

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> EncoderStats:
        """The statistics that were sent between processes as `data`."""
        return EncoderStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> EncoderPromMetrics:
        """The exporter of the statistics at `/metrics`."""
        return EncoderPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
