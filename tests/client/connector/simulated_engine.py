"""vLLM's real scheduler with the connector's real scheduler side, and workers whose KV is simulated.

No model runs. The KV of a token is a number that depends on every token before it, so that a page that holds the wrong
bytes is noticed as soon as a step reads it. Which token comes next depends on the KV too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey, KeyChain, as_tokens, root_key
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv_client.connector.engine_kv import EngineKv
from lmkv_client.connector.kv_layout import LayerGroup
from lmkv_client.connector.messages import Attachment, StepPlan
from lmkv_client.connector.scheduler.multimodal import multimodal_extras
from lmkv_client.connector.scheduler.side import SchedulerSide
from lmkv_client.connector.stats import ConnectorStats
from lmkv_client.connector.vllm_connector import LMKVConnector
from tests.client.connector.scripted_node import SPOILT, ScriptedNode, Stored
from tests.client.connector.simulated_worker import (
    BLOCK,
    SimulatedWorker,
    answer_of,
    kv_values,
    next_token,
    seen,
)

CHUNK = 64
STEP_SECONDS = 0.002
MAX_STEPS = 2000
MOST_IMAGE_TOKENS = 4096

SPEC = KvSpec(
    model_name="simulated",
    model_id="simulated",
    kv_dtype="bfloat16",
    layer_count=1,
    kv_head_count=2,
    head_size=64,
    chunk_size=CHUNK,
    format=NATIVE_TILES,
    tile_backend="TEST",
    block_size=BLOCK,
)
ENGINE_KV = EngineKv(spec=SPEC, groups=(LayerGroup(part=0, block_size=BLOCK, layer_names=("layer",)),))


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
    rank_count: int
    step_tokens: int

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
            ENGINE_KV,
            self.node,  # type: ignore[arg-type]  # it has what the scheduler side needs of a link
            rank_count=self.rank_count,
            step_tokens=self.step_tokens,
            has_events=True,
            clock=self.clock,
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


class SimulatedEngine:
    """An engine step by step. `node` is attached from the start unless a test says otherwise."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        *,
        rank_count: int = 1,
        block_count: int = 64,
        step_tokens: int = 8192,
        credit_limit: int = 64,
        attached: bool = True,
        window: int = 0,
        **config: Any,
    ) -> None:
        """`window`: tokens that all layers attend to; 0: all of them."""
        self.window = window
        self.node = ScriptedNode(SPEC, credit_limit=credit_limit)
        self.node.on_commit = self._check_commit
        self.clock = Clock()
        ScriptedConnector.node = self.node
        ScriptedConnector.clock = self.clock
        ScriptedConnector.config = ConnectorConfig(**({"chunk_size": CHUNK, "save_partial_chunks": False} | config))
        ScriptedConnector.rank_count = rank_count
        ScriptedConnector.step_tokens = step_tokens
        vllm_config.cache_config.num_gpu_blocks = block_count
        vllm_config.scheduler_config.max_num_batched_tokens = step_tokens
        self.scheduler = make_scheduler(vllm_config, block_count, window)
        connector = self.scheduler.connector
        assert isinstance(connector, ScriptedConnector)
        self.side: SchedulerSide = connector.scheduler
        self.workers = [SimulatedWorker(rank, self.node) for rank in range(rank_count)]
        self.said: dict[str, list[int]] = {}
        self.transfer_params: dict[str, dict[str, Any]] = {}
        """The `kv_transfer_params` of answers."""
        self.requests: dict[str, Request] = {}
        self.scheduled_tokens: dict[str, int] = {}
        """Tokens computed for each request, not loaded."""
        self.steps = 0
        self.during_step: Callable[[], None] = lambda: None
        """Called after the workers have finished a step, before the scheduler gets their output."""
        self._aggregator = KVOutputAggregator(rank_count)
        self._hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
        self._attachment: Attachment | None = None
        self._free_at_start = self.free_block_count
        if attached:
            self.node.attach()

    @property
    def free_block_count(self) -> int:
        """Pages that no request has."""
        count: int = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return count

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        output: int = 2,
        salt: str = "",
        reads_caches: bool = True,
        transfer: object = None,
        images: Sequence[tuple[str, int, int]] = (),
        **more: Any,
    ) -> Request:
        """A request has arrived; `transfer` is its `kv_transfer_params`, `images` are hashes, begins and lengths.

        `more` are further arguments of vLLM's `Request`.
        """
        params = SamplingParams(
            max_tokens=output,
            ignore_eos=True,
            skip_reading_prefix_cache=not reads_caches,
            extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
        )
        params.update_from_generation_config({}, 1)
        request = Request(
            request_id,
            list(prompt),
            params,
            None,
            cache_salt=salt or None,
            block_hasher=self._hasher,
            mm_features=[
                MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(begin, length))
                for identifier, begin, length in images
            ],
            **more,
        )
        self.requests[request_id] = request
        self.said[request_id] = []
        self.scheduled_tokens[request_id] = 0
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """The client has gone away."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """Schedules, computes, and takes in the result."""
        self.clock.now += STEP_SECONDS
        self.steps += 1
        output = self.scheduler.schedule()
        plan = output.kv_connector_metadata
        assert isinstance(plan, StepPlan)
        results = [self._work(worker, plan, output) for worker in self.workers]
        if plan.attachment != self._attachment and plan.attachment:
            self._attachment = plan.attachment
            self.node.let_go()
        self.during_step()
        result = self._aggregator.aggregate(results)
        assert result is not None
        for outputs in self.scheduler.update_from_output(output, result).values():
            for one in outputs.outputs:
                self.said[one.request_id] += one.new_token_ids
                if one.kv_transfer_params is not None:
                    self.transfer_params[one.request_id] = one.kv_transfer_params
        return output

    def run(self, *request_ids: str) -> None:
        """Steps until these requests are over, or all of them."""
        for _ in range(MAX_STEPS):
            waiting = request_ids or tuple(self.requests)
            if all(self.requests[request_id].is_finished() for request_id in waiting):
                return
            self.step()
        raise AssertionError(f"not over after {MAX_STEPS} steps")

    def serve(self, request_id: str, prompt: Sequence[int], *, output: int = 2, salt: str = "") -> int:
        """Answers a prompt, checks the answer, and says how many tokens had to be computed."""
        self.add(request_id, prompt, output=output, salt=salt)
        self.run(request_id)
        self.check_answer(request_id)
        return self.scheduled_tokens[request_id]

    def settle(self) -> None:
        """Steps until nothing is under way any more, and the node has answered everything."""
        self.node.prompt = True
        self.node.answer()
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests():
                break
            self.step()
        self.side.drain_events()

    def check_answer(self, request_id: str) -> None:
        """The same as without any cache."""
        request = self.requests[request_id]
        prompt = seen(request)[: request.num_prompt_tokens]
        expected = answer_of(prompt, request.max_tokens, request.cache_salt or "")
        assert self.said[request_id] == expected, f"{request_id} got a wrong answer"

    def check_nothing_is_left(self) -> None:
        """No page, hold, ticket, load, write or credit outlives the requests."""
        self.settle()
        assert not self.scheduler.requests
        assert self.free_block_count == self._free_at_start
        assert not any(worker.load_count for worker in self.workers)
        side = self.side
        assert (len(side._states), len(side._lookups), len(side._loads), len(side._stores)) == (0, 0, 0, 0)
        assert not side._handoffs._finished
        in_hand = side._stores.credits[0]
        assert (in_hand.requested_count, in_hand.writing_count) == (0, 0)
        if self.node.attached:
            assert not self.node.tickets, "the node still holds chunks for a request"
            assert not self.node.fetches
            assert set(in_hand._offsets) == self.node.credits_out
        else:
            assert not in_hand._offsets

    @property
    def events(self) -> list[KVCacheEvent]:
        """The events of the node that vLLM's subscribers have received so far."""
        connector = self.scheduler.connector
        assert isinstance(connector, ScriptedConnector)
        return connector.events

    def count(self, name: str) -> float:
        """What was counted under this name since the start."""
        connector = self.scheduler.connector
        assert isinstance(connector, ScriptedConnector)
        connector.get_kv_connector_stats()
        return connector.counts.get(name, 0)

    def _work(self, worker: SimulatedWorker, plan: StepPlan, output: SchedulerOutput) -> ModelRunnerOutput:
        if output.has_sync_kv_loads:
            worker.load(plan)
        sampled = self._forward(worker, output)
        if not output.has_sync_kv_loads:
            worker.load(plan)
        worker.store(plan)
        request_ids = list(sampled)
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in request_ids],
            kv_connector_output=worker.result(),
        )

    def _forward(self, worker: SimulatedWorker, output: SchedulerOutput) -> dict[str, list[int]]:
        """Reads the pages of the tokens before, writes those of the scheduled tokens, says what comes next."""
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled: dict[str, list[int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if worker.rank == 0:
                self.scheduled_tokens[request_id] += count
            (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            tokens = seen(request)
            values = list(kv_values(tokens, request.cache_salt or ""))
            start, stop = computed[request_id], computed[request_id] + count
            oldest = max(0, start + 1 - self.window) if self.window else 0
            right = all(worker.page(block_ids[at // BLOCK])[at % BLOCK] == values[at] for at in range(oldest, start))
            if not right:
                failed = worker._failed_blocks & set(block_ids)
                assert failed, f"{request_id} reads pages that hold other bytes than its prompt's"
            for at in range(start, stop):
                worker.page(block_ids[at // BLOCK])[at % BLOCK] = values[at] if right else SPOILT
            token = next_token(values[stop - 1] + (not right))
            sampled[request_id] = [token] if stop == len(tokens) else []
        return sampled

    def _check_commit(self, key: ChunkKey, chunk: Stored) -> None:
        """What becomes visible is what its key says, on every rank."""
        values = self._values_of(key)
        for worker in self.workers:
            slots = [slot for block in chunk.content[worker.rank] for slot in block]
            right = slots[: chunk.token_count] == values[-chunk.token_count :]
            assert right, "a chunk holds other bytes than its key says"

    def _values_of(self, key: ChunkKey) -> list[int]:
        for request in self.requests.values():
            salt = request.cache_salt or ""
            tokens = as_tokens(list(request.all_token_ids))
            extras = multimodal_extras(request.mm_features, CHUNK)
            chain = KeyChain(root_key(SPEC.fingerprint, cache_salt=salt), CHUNK, extras)
            chain.extend(tokens)
            if key in chain.keys:
                count = (chain.keys.index(key) + 1) * CHUNK
                return list(kv_values(seen(request), salt))[:count]
            prompt = as_tokens(request.prompt_token_ids or [])
            for handed in (prompt, prompt[:-1]):  # a decode's prompt has more tokens than the prefill's
                chain = KeyChain(root_key(SPEC.fingerprint, cache_salt=salt), CHUNK)
                chain.extend(handed)
                if chain.partial(handed) == key:
                    return list(kv_values(handed.tolist(), salt))
        raise AssertionError("a key of no request")


def make_scheduler(vllm_config: VllmConfig, block_count: int, window: int) -> Scheduler:
    """vLLM's scheduler for one layer with `block_count` pages, which attends to `window` tokens (0: to all)."""
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 64}
    shape["dtype"] = vllm_config.model_config.dtype
    cache: AttentionSpec = SlidingWindowSpec(sliding_window=window, **shape) if window else FullAttentionSpec(**shape)
    kv_cache_config = KVCacheConfig(
        num_blocks=block_count, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], cache)]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        init_none_hash(get_hash_fn_by_name("sha256"))
        scheduler = Scheduler(
            vllm_config,
            kv_cache_config,
            StructuredOutputManager(vllm_config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
    # vLLM has no encoder cache for images if the model takes none, and nothing computes them here.
    scheduler.max_num_encoder_input_tokens = MOST_IMAGE_TOKENS
    scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=MOST_IMAGE_TOKENS)
    return scheduler
