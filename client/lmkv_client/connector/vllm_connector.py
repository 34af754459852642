"""`LMKVConnector`: vLLM's hooks, each delegated to the side that it belongs to.

vLLM makes one of these per role: in the process that schedules, and in each worker. Every failure of the cache ends
here as "no hit" or "not stored" and a counter; only a mistake in the configuration, at start, is raised.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from lmkv import telemetry
from lmkv.config import ConnectorConfig
from lmkv.errors import LmkvError
from lmkv.spec import TOKEN_MAJOR
from lmkv_client import startup_error
from lmkv_client.connector.adapters import Adapters
from lmkv_client.connector.engine_kv import engine_kv
from lmkv_client.connector.identity import (
    adapter_options,
    draft_model,
    head_shares,
    kv_inputs,
    loaded_after,
    served_names,
    worker_rank,
)
from lmkv_client.connector.messages import StepPlan
from lmkv_client.connector.scheduler.side import SchedulerSide
from lmkv_client.connector.scheduler.stores import SchedulerOptions
from lmkv_client.connector.stats import ConnectorStats, PromMetrics
from lmkv_client.connector.vllm_api import (
    AttentionSpec,
    CacheHitSource,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheEvent,
    KVConnectorBase_V1,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorTransferResults,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
    attention_isa,
    get_pp_group,
    get_tensor_model_parallel_rank,
    init_logger,
)
from lmkv_client.connector.weight_updates import watch
from lmkv_client.connector.worker.page_copier import check_packing
from lmkv_client.connector.worker.side import WorkerSide
from lmkv_client.engine.key_space import ServedNames
from lmkv_client.engine.log import join_log
from lmkv_client.engine.node.client import NodeClient
from lmkv_client.preflight import connector_config

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

logger = init_logger("vllm.lmkv")
join_log(logger)


class LMKVConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector that `--kv-transfer-config '{"kv_connector":"LMKVConnector","kv_role":"kv_both"}'` names."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        try:
            self._start(vllm_config, role, kv_cache_config)
        except LmkvError as error:
            startup_error.record(error)
            raise

    def _start(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        config = connector_config(self._kv_transfer_config.kv_connector_extra_config)
        if role is KVConnectorRole.SCHEDULER:  # an engine has one scheduler side, and a worker side for each rank
            for notice in config.notices:
                logger.warning("%s", notice)
            self._recompute_failed_loads()
        stage = 0 if role is KVConnectorRole.SCHEDULER else get_pp_group().rank_in_group
        kv = engine_kv(vllm_config, kv_cache_config, config, stage=stage, is_identified=False)
        spec = kv.spec
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        parallel = vllm_config.parallel_config
        events = vllm_config.kv_events_config
        if role is KVConnectorRole.SCHEDULER:
            telemetry.trace_engine(
                config.instance_id, engine_traces=bool(vllm_config.observability_config.otlp_traces_endpoint)
            )
            names = served_names(vllm_config.model_config)
            has_events = bool(events and events.enable_kv_cache_events)
            self._link = NodeClient(
                config,
                spec,
                parallel.world_size,
                ServedNames(names),
                wants_tier_changes=has_events,
            )
            self._link.start(
                partial(_identify, self._link, vllm_config, kv_cache_config, config),
                time.time() - loaded_after(vllm_config),
            )
            options = SchedulerOptions(
                rank_count=parallel.world_size,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                may_load=self._kv_transfer_config.is_kv_consumer,
                may_store=self._kv_transfer_config.is_kv_producer,
                reads_ahead=draft_model(vllm_config) is not None,
                has_events=has_events,
            )
            self._scheduler = SchedulerSide(config, kv, self._link, options, adapters=_adapters(vllm_config))
            watch(scheduler_sides)
        else:
            if spec.format == TOKEN_MAJOR and vllm_config.device_config.device_type == "cpu":
                for group in kv_cache_config.kv_cache_groups:
                    if isinstance(cache := group.kv_cache_spec, AttentionSpec):
                        isa = attention_isa(vllm_config, cache.head_size, cache.block_size)
                        check_packing(isa, cache.head_size, cache.block_size, cache.dtype)
            tensor_rank, tensor_ranks = get_tensor_model_parallel_rank(), parallel.tensor_parallel_size
            rank = worker_rank(stage, tensor_rank, tensor_ranks)
            self._worker = WorkerSide(
                spec,
                head_shares(spec, tensor_rank, tensor_ranks),
                groups=kv.groups,
                rank=rank,
                threads=config.copy_threads,
                buffer_backends=config.nixl_backends if self._lends_buffer(config, vllm_config, rank) else (),
            )

    def _recompute_failed_loads(self) -> None:
        """Sets the policy that computes failed loads. vLLM's scheduler reads it after it has made the connector.

        vLLM's default fails the request; whether that was configured or is the default cannot be known.
        """
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.info("kv_load_failure_policy: recompute; lmkv supports no other")
            self._kv_transfer_config.kv_load_failure_policy = "recompute"

    def _lends_buffer(self, config: ConnectorConfig, vllm_config: VllmConfig, rank: int) -> bool:
        """Whether handoffs are read into a buffer on the device."""
        device = vllm_config.device_config.device_type
        if config.pd_buffer_device == "cuda" and device != "cuda" and rank == 0:
            logger.warning("pd_buffer_device: the KV cache is on %s, so handoffs are read into the pool", device)
        return config.pd_buffer_device == device == "cuda" and bool(self._kv_transfer_config.is_kv_consumer)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a cache may lose chunks."""
        return False

    # ---- worker side

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Registers the pages of all layers."""
        self.worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Called before the pages' memory is freed, in sleep mode: waits for the copies that run. From vLLM 0.33 on."""
        self.worker.release_pages()

    def restore_kv_caches(self) -> None:
        """Called when the pages have memory again."""
        self.worker.restore_pages()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Begins a step, before pages can change: stores that read them end first."""
        if isinstance(kv_connector_metadata, StepPlan):  # an older vLLM calls it with other arguments, not in each step
            self.worker.begin_step()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Starts the step's loads. Those that the forward pass needs precede it."""
        self.worker.load(self._plan())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads that a forward pass needs are done before it starts."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: all layers are stored together after the forward pass."""

    def wait_for_save(self) -> None:
        """Starts the step's stores."""
        self.worker.store(self._plan())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Finished requests whose last tokens are stored, so that their pages may be freed, and requests whose
        asynchronous loads have ended."""
        return self.worker.take_stored_requests() or None, self.worker.take_finished() or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """As `get_finished`, with the requests whose loads have failed: vLLM computes them. Only where chunks have
        several parts; otherwise failures are reported by page."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving = self.worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Pages that failed loads did not fill: vLLM computes them."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> Any:
        """The report of this worker's copies; None if there are none."""
        return self.worker.take_report()

    def _plan(self) -> StepPlan:
        plan = self._get_connector_metadata()
        assert isinstance(plan, StepPlan)
        return plan

    # ---- scheduler side

    @property
    def scheduler(self) -> SchedulerSide:
        """The scheduler side, where vLLM schedules."""
        assert self._scheduler is not None
        return self._scheduler

    def on_new_request(self, request: Request) -> None:
        """Looks a new request up."""
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded, and whether asynchronously; None while the lookup is not answered."""
        return self.scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begins the load of a request that has pages now."""
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """The tokens of the load that was just planned, by their source."""
        return self.scheduler.hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """The plan of a step for the workers."""
        return self.scheduler.plan(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Handles the workers' reports of a step."""
        self.scheduler.handle_report(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Ends the request; its pages stay while its last tokens are stored. Returns the node's instance id if
        requested."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """As `request_finished`, where the model may have several KV-cache groups."""
        keeps_pages = self.scheduler.finished(request, block_ids)
        return keeps_pages, self.scheduler.identity(request)

    def has_pending_push_work(self) -> bool:
        """Whether stores still run: vLLM continues its steps until they are done."""
        return self._scheduler is not None and self._scheduler.is_storing

    def reset_cache(self) -> bool:
        """Drops every chunk of this engine's spec on its node; whether the node has confirmed."""
        return self.scheduler.reset()

    def take_events(self) -> Iterable[KVCacheEvent]:
        """KV events of the node's chunks, which vLLM publishes with its own if `--kv-events-config` is set."""
        return self.scheduler.take_events()

    # ---- both

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """Statistics since the last call. The scheduler side counts for both."""
        return self._scheduler.take_stats() if self._scheduler else None

    def shutdown(self) -> None:
        """Closes both sides. vLLM does not always call it: nothing depends on it."""
        if self._scheduler:
            self._link.close()
        if self._worker:
            self._worker.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        """The statistics that were sent between processes as `data`."""
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: VllmConfig, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        """The exporter of the statistics at `/metrics`."""
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _identify(
    link: NodeClient, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: ConnectorConfig
) -> str:
    """The identity of the weights; announces what it is computed from. Raises as `engine_kv`."""
    model_id = engine_kv(vllm_config, kv_cache_config, config).spec.model_id
    is_computed = not config.model_id and not config.share_across_engines
    link.kv_inputs = kv_inputs(vllm_config, "" if is_computed else model_id)
    return model_id


def _adapters(vllm_config: VllmConfig) -> Adapters:
    lora = vllm_config.lora_config
    return Adapters(adapter_options(lora), lora.max_cpu_loras or 0) if lora else Adapters()


def scheduler_sides(core: Any) -> list[SchedulerSide]:
    """The scheduler sides of lmkv's connectors in an `EngineCore`: its connector, or one inside a `MultiConnector`."""
    connector = getattr(getattr(core, "scheduler", None), "connector", None)
    connectors = (connector, *getattr(connector, "_connectors", ()))
    return [one.scheduler for one in connectors if isinstance(one, LMKVConnector)]
