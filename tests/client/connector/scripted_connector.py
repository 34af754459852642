"""vLLM's real scheduler, and the connector that it makes: with a scripted node at the other end of its line."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.structured_output import StructuredOutputManager

from lmkv.config import ConnectorConfig
from lmkv_client.connector.engine_kv import EngineKv
from lmkv_client.connector.scheduler.hit_choice import StepLoads
from lmkv_client.connector.scheduler.side import SchedulerSide
from lmkv_client.connector.scheduler.stores import SchedulerOptions
from lmkv_client.connector.stats import ConnectorStats
from lmkv_client.connector.vllm_connector import LMKVConnector
from tests.client.connector.scripted_node import ScriptedNode

MOST_IMAGE_TOKENS = 4096


class Clock:
    """Time that a test moves. Each look at it takes a little, so that no wait is endless."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 1e-4
        return self.now


class ScriptedConnector(LMKVConnector):
    """The connector with a scripted node at the other end of its line. vLLM's scheduler makes it."""

    node: ScriptedNode
    clock: Clock
    config: ConnectorConfig
    kv: EngineKv
    rank_count: int
    step_tokens: int
    step_loads: StepLoads

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self.counts: dict[str, float] = {}
        """Everything that was counted so far."""
        self.events: list[KVCacheEvent] = []
        """All events that vLLM's subscribers have received so far."""
        self._worker = None
        self._scheduler = SchedulerSide(
            self.config,
            self.kv,
            self.node,  # type: ignore[arg-type]  # it has what the scheduler side needs of a link
            SchedulerOptions(
                rank_count=self.rank_count, step_tokens=self.step_tokens, has_events=True, clock=self.clock
            ),
            step_loads=self.step_loads,
        )

    def get_kv_connector_stats(self) -> ConnectorStats | None:
        """See vLLM."""
        stats = super().get_kv_connector_stats()
        for name, amount in stats.data.items() if stats else ():
            self.counts[name] = self.counts.get(name, 0) + amount
        return stats

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See vLLM."""
        events = list(super().take_events())
        self.events += events
        return events

    def shutdown(self) -> None:
        """Nothing to end."""


def make_scheduler(vllm_config: VllmConfig, caches: KVCacheConfig) -> Scheduler:
    """vLLM's scheduler for these groups."""
    block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, vllm_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        init_none_hash(get_hash_fn_by_name("sha256"))
        scheduler = Scheduler(
            vllm_config,
            caches,
            StructuredOutputManager(vllm_config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
    # vLLM has no encoder cache for images if the model takes none, and nothing computes them here.
    scheduler.max_num_encoder_input_tokens = MOST_IMAGE_TOKENS
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=MOST_IMAGE_TOKENS)
    return scheduler
