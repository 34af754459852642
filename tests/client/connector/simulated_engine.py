"""vLLM's real scheduler with the connector's real scheduler side, and workers whose KV is simulated.

No model runs. The KV of a token is a number that depends on every token before it, so that a page that holds the wrong
bytes is noticed as soon as a step reads it. Which token comes next depends on the KV too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from lmkv.config import ConnectorConfig
from lmkv.keys import ChunkKey, KeyChain, PageKeyChain, as_tokens, page_seed, root_key
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import PART_RULE_END
from lmkv_client.connector.engine_kv import EngineKv, LayerGroup, engine_kv
from lmkv_client.connector.messages import StepPlan
from lmkv_client.connector.multimodal import MediaDigests
from lmkv_client.connector.scheduler.hit_choice import StepLoads
from lmkv_client.connector.scheduler.side import SchedulerSide
from lmkv_client.engine.attachment import Attachment
from tests.client.connector.scripted_chunks import SPOILT, Stored
from tests.client.connector.scripted_connector import Clock, ScriptedConnector, make_scheduler
from tests.client.connector.scripted_node import PARTIAL, ScriptedNode
from tests.client.connector.simulated_models import (
    BLOCK,
    CHUNK,
    PLAIN,
    SimulatedModel,
    kv_cache_config,
    oldest_read,
    sliding,
    slots_per_page,
)
from tests.client.connector.simulated_worker import (
    NULL_PAGE,
    SimulatedWorker,
    answer_of,
    content_of,
    kv_values,
    next_token,
    seen,
)
from tests.support.specs import small_spec

STEP_SECONDS = 0.002
MAX_STEPS = 2000

SPEC = small_spec(
    model_name="simulated",
    model_id="simulated",
    kv_dtype="bfloat16",
    layer_count=1,
    head_size=64,
    chunk_size=CHUNK,
    block_size=BLOCK,
    vocab_size=0,
)
ENGINE_KV = EngineKv(
    spec=SPEC, groups=(LayerGroup(part=0, block_size=BLOCK, layer_names=("layer",)),), hash_block_size=BLOCK
)


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
        model: SimulatedModel = PLAIN,
        window: int = 0,
        step_load_tokens: tuple[int, int] = (0, 0),
        **config: Any,
    ) -> None:
        """`window`: tokens that all layers attend to, unknown to the connector; 0: as the model says.

        `step_load_tokens`: most tokens of loads that are part of a step, of a request that is alone and of several.
        """
        self.caches: tuple[KVCacheSpec, ...] = (sliding(window),) if window else model.caches
        caches = kv_cache_config(replace(model, caches=self.caches), vllm_config, block_count)
        fixed: dict[str, Any] = {
            "model_id": "simulated",
            "kv_format": model.kv_format,
            "refuse_slow_fetches": False,
            "audit_rate": 0,
        }
        settings = ConnectorConfig(**({"chunk_size": CHUNK, "save_partial_chunks": False} | fixed | config))
        plain = replace(
            ENGINE_KV,
            spec=replace(
                SPEC,
                weight_version=settings.weight_version,
                hash_scheme=settings.hash_scheme,
                accepts_lossy=settings.accept_lossy,
            ),
        )
        self.kv = plain if model is PLAIN else engine_kv(vllm_config, caches, settings)
        self.node = ScriptedNode(self.kv.spec, credit_limit=credit_limit)
        self.node.on_commit = self._check_commit
        self.clock = Clock()
        ScriptedConnector.node = self.node
        ScriptedConnector.clock = self.clock
        ScriptedConnector.config = settings
        ScriptedConnector.kv = self.kv
        ScriptedConnector.rank_count = rank_count
        ScriptedConnector.step_tokens = step_tokens
        ScriptedConnector.step_loads = StepLoads(
            *(tokens * self.kv.spec.chunk_bytes // self.kv.spec.chunk_size for tokens in step_load_tokens)
        )
        vllm_config.scheduler_config.max_num_batched_tokens = step_tokens
        self.scheduler = make_scheduler(vllm_config, caches)
        connector = self.scheduler.connector
        assert isinstance(connector, ScriptedConnector)
        self.side: SchedulerSide = connector.scheduler
        slots = slots_per_page(self.caches)
        self.workers = [SimulatedWorker(rank, self.node, slots) for rank in range(rank_count)]
        self.said: dict[str, list[int]] = {}
        self.transfer_params: dict[str, dict[str, Any]] = {}
        """The `kv_transfer_params` of answers."""
        self.requests: dict[str, Request] = {}
        self.scheduled_tokens: dict[str, int] = {}
        """Tokens computed for each request, not loaded."""
        self.steps = 0
        self.weights = ""
        """What the KV of all tokens depends on."""
        self.mixed_requests: set[str] = set()
        """Requests that may compute with KV of other weights: they were running when the weights changed."""
        self._weights_by_spec: dict[bytes, str] = {}
        """Earlier weights, by fingerprint."""
        self.during_step: Callable[[], None] = lambda: None
        """Called after the workers have finished a step, before the scheduler gets their output."""
        self._aggregator = KVOutputAggregator(rank_count)
        self._hasher = get_request_block_hasher(self.scheduler.hash_block_size, get_hash_fn_by_name("sha256"))
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
        names: Sequence[str] = (),
        **more: Any,
    ) -> Request:
        """A request has arrived; `transfer` is its `kv_transfer_params`, `images` are contents, begins and lengths,
        `names` are vLLM's for them (default: a counter).

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
                MultiModalFeatureSpec(
                    content_of(content),
                    "image",
                    names[at] if names else f"renderer0-mm-{request_id}-{at}",
                    PlaceholderRange(begin, length),
                )
                for at, (content, begin, length) in enumerate(images)
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
            self.node.release_orphans()
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
        for _ in range(MAX_STEPS):
            waiting = request_ids or tuple(self.requests)
            if all(self.requests[request_id].is_finished() for request_id in waiting):
                return
            self.step()
        raise AssertionError(f"not over after {MAX_STEPS} steps")

    def serve(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        output: int = 2,
        salt: str = "",
        transfer: dict[str, Any] | None = None,
    ) -> int:
        """Answers a prompt, checks the answer, and says how many tokens had to be computed."""
        self.add(request_id, prompt, output=output, salt=salt, transfer=transfer)
        self.run(request_id)
        self.check_answer(request_id)
        return self.scheduled_tokens[request_id]

    def change_weights(self, weights: str) -> None:
        """The weights are others now; calls the connector, as vLLM's calls do. Requests that run may mix them."""
        self._weights_by_spec[self.side._session.spec.fingerprint] = self.weights
        self.weights = weights
        self.mixed_requests |= {request.request_id for request in self.scheduler.running}
        self.side.weights_changed()

    def sleep(self) -> None:
        """Sleeps, as vLLM does from level 1 on: requests are aborted, what runs for them ends, and pages are freed."""
        self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.scheduler.set_pause_state(PauseState.PAUSED_NEW)
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests():
                break
            self.step()
        self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        for worker in self.workers:
            worker.release_pages()

    def wake_up(self) -> None:
        """Continues."""
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

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
        expected = answer_of(prompt, request.max_tokens, self._salt(request))
        assert self.said[request_id] == expected, f"{request_id} got a wrong answer"

    def check_nothing_is_left(self) -> None:
        """No page, hold, ticket, load, write or credit outlives the requests."""
        self.settle()
        assert not self.scheduler.requests
        assert self.free_block_count == self._free_at_start
        assert not any(worker.load_count for worker in self.workers)
        side = self.side
        assert (len(side._states), len(side._session), len(side._loads), len(side._stores)) == (0, 0, 0, 0)
        assert not side._handoffs._finished
        assert len(side._hints) == 0
        in_hand = dict(enumerate(side._session.credits._parts))
        partial = side._session.credits._partial
        ours_of_all = (*in_hand.values(), *partial.values())
        assert all((ours.requested_count, ours.writing_count) == (0, 0) for ours in ours_of_all)
        offsets = {offset: part for part, ours in in_hand.items() for offset in ours._offsets}
        offsets |= {offset: PARTIAL - part for (_, part), ours in partial.items() for offset in ours._offsets}
        if self.node.attached:
            assert not self.node.tickets, "the node still holds chunks for a request"
            assert not self.node.fetches
            assert offsets == self.node.credits_out
        else:
            assert not offsets

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
        groups = range(len(self.caches))
        for block_id in output.new_block_ids_to_zero or ():
            worker.clear_page(block_id)
        for copied in output.kv_cache_block_copies or ():
            worker.copy_page(copied.src_block_id, copied.dst_block_id)
        for request_id in [*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids]:
            worker.state_index.pop(request_id, None)
        for request_id, count in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            if worker.rank == 0:
                self.scheduled_tokens[request_id] += count
            values = list(kv_values(seen(request), self._salt(request)))
            span = range(computed[request_id], computed[request_id] + count)
            block_ids = self.scheduler.kv_cache_manager.get_block_ids(request_id)
            wrong = [
                group for group in groups if not self._reads(worker, group, request_id, block_ids[group], values, span)
            ]
            failed = worker._failed_blocks & set(block_ids[0])
            assert failed or not wrong or request_id in self.mixed_requests, (
                f"{request_id} reads pages of groups {wrong} that hold other bytes than its prompt's"
            )
            for group in groups:
                self._writes(worker, group, block_ids[group], values, span, right=not wrong)
            token = next_token(values[span.stop - 1] + bool(wrong))
            sampled[request_id] = [token] if span.stop == len(values) else []
        return sampled

    def _reads(
        self,
        worker: SimulatedWorker,
        group: int,
        request_id: str,
        block_ids: Sequence[int],
        values: Sequence[int],
        span: range,
    ) -> bool:
        """Whether a group's pages have what its layers read to compute these tokens."""
        cache = self.caches[group]
        if isinstance(cache, MambaSpec):
            return self._moves_state(worker, group, request_id, block_ids, values, span)
        return all(
            worker.page(block_ids[at // cache.block_size], group)[at % cache.block_size] == values[at] + group
            for at in range(oldest_read(cache, span.start), span.start)
        )

    def _moves_state(
        self,
        worker: SimulatedWorker,
        group: int,
        request_id: str,
        block_ids: Sequence[int],
        values: Sequence[int],
        span: range,
    ) -> bool:
        """Copies the state to the page where the step ends, as vLLM's `preprocess_mamba` does; whether it is right."""
        size = self.caches[group].block_size
        index = worker.state_index.setdefault(request_id, {})
        before = index.get(group, (span.start - 1) // size)
        after = index[group] = -(-span.stop // size) - 1
        if before not in (-1, after):
            worker.page(block_ids[after], group)[0] = worker.page(block_ids[before], group)[0]
        return span.start == 0 or worker.page(block_ids[after], group)[0] == values[span.start - 1] + group

    def _writes(
        self,
        worker: SimulatedWorker,
        group: int,
        block_ids: Sequence[int],
        values: Sequence[int],
        span: range,
        *,
        right: bool,
    ) -> None:
        cache = self.caches[group]
        for at in span if not isinstance(cache, MambaSpec) else span[-1:]:
            block_id = block_ids[at // cache.block_size]
            assert block_id != NULL_PAGE
            slot = 0 if isinstance(cache, MambaSpec) else at % cache.block_size
            worker.page(block_id, group)[slot] = values[at] + group if right else SPOILT

    def _check_commit(self, commit: pb.CommitChunk, chunk: Stored) -> None:
        """What becomes visible is what its key says, on every rank and of every group."""
        key = ChunkKey(commit.chunk_key)
        values = self._values_of(key)
        part = self.kv.spec.parts[commit.part]
        count = 1 if part.rule == PART_RULE_END else part.kept_tokens(chunk.token_count)
        groups = [index for index, group in enumerate(self.kv.groups) if group.part == commit.part]
        expected = {
            (worker.rank, group): [value + group for value in values[-count:]]
            for worker in self.workers
            for group in groups
        }
        assert chunk.content == expected, "a chunk holds other bytes than its key says"
        if commit.superseded_key:
            older = self._values_of(ChunkKey(commit.superseded_key))
            assert len(older) < len(values), "a chunk supersedes itself or a later one"
            assert older == values[: len(older)], "a chunk supersedes one of another prompt"

    def _salt(self, request: Request) -> str:
        return (request.cache_salt or "") + self.weights

    def _values_of(self, key: ChunkKey) -> list[int]:
        specs = {self.side._session.spec.fingerprint: self.weights} | self._weights_by_spec
        for fingerprint, weights in specs.items():
            if values := self._values_under(key, fingerprint, weights):
                return values
        raise AssertionError("a key of no request")

    def _values_under(self, key: ChunkKey, fingerprint: bytes, weights: str) -> list[int]:
        """The KV of a chunk and those before it, if it has this key under a spec with these weights; else nothing."""
        for request in self.requests.values():
            salt = request.cache_salt or ""
            tokens = as_tokens(list(request.all_token_ids))
            extras = MediaDigests().extras(request.mm_features, CHUNK)
            chain = KeyChain(root_key(fingerprint, cache_salt=salt), CHUNK, extras)
            if self.kv.spec.has_page_hashes:
                chain = PageKeyChain(root_key(fingerprint), CHUNK, extras, seed=page_seed(salt))
            chain.extend(tokens)
            if key in chain.keys:
                count = (chain.keys.index(key) + 1) * CHUNK
                return list(kv_values(seen(request), salt + weights))[:count]
            for count in range(1, len(tokens) + 1) if not self.kv.spec.has_page_hashes else ():
                index, rest = divmod(count, CHUNK)
                if rest and chain.behind(index, tokens[index * CHUNK : count]) == key:
                    return list(kv_values(seen(request), salt + weights))[:count]
        return []
