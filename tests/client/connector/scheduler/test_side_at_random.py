"""Whatever happens to an engine, its workers and its node, in any order: answers stay right, nothing is left."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from vllm.config import VllmConfig

from lmkv.v1.engine_service_pb2 import HeldChunk
from tests.client.connector.simulated_engine import SimulatedEngine
from tests.client.connector.simulated_models import BLOCK, CHUNK, MODELS, PLAIN, SimulatedModel

TRUNK = [(7 * i) % 491 for i in range(6 * CHUNK)]


class RandomLife(RuleBasedStateMachine):
    """Each rule is one thing that can happen between two steps of the engine."""

    vllm_config: ClassVar[VllmConfig]
    model: ClassVar[SimulatedModel] = PLAIN

    @initialize(
        asynchronous=st.booleans(),
        partial=st.booleans(),
        rank_count=st.integers(1, 2),
        block_count=st.sampled_from([20, 40]),
        step_tokens=st.sampled_from([96, 1024]),
        credit_limit=st.sampled_from([1, 4, 64]),
        step_load_tokens=st.sampled_from([(0, 0), (4 * CHUNK, CHUNK), (1000, 1000)]),
    )
    def start(
        self,
        asynchronous: bool,
        partial: bool,
        rank_count: int,
        block_count: int,
        step_tokens: int,
        credit_limit: int,
        step_load_tokens: tuple[int, int],
    ) -> None:
        self.engine = SimulatedEngine(
            self.vllm_config,
            rank_count=rank_count,
            model=self.model,
            block_count=block_count * len(self.model.caches),
            step_tokens=step_tokens,
            credit_limit=credit_limit,
            step_load_tokens=step_load_tokens,
            enable_async_loading=asynchronous,
            save_partial_chunks=partial,
        )
        self.node = self.engine.node
        self.live: list[str] = []
        self.aborted: set[str] = set()

    @rule(
        shared=st.sampled_from([0, 10, CHUNK, 2 * CHUNK, 3 * CHUNK, 3 * CHUNK + BLOCK, 5 * CHUNK]),
        own=st.integers(0, 40),
        output=st.integers(1, 3 * BLOCK),
        salt=st.sampled_from(["", "", "tenant"]),
    )
    def add(self, shared: int, own: int, output: int, salt: str) -> None:
        request_id = f"r{len(self.engine.requests)}"
        self.live.append(request_id)
        self.engine.add(request_id, [*TRUNK[:shared], *range(own, own + own + 1)], output=output, salt=salt)

    @rule(data=st.data(), cut=st.sampled_from([0, 0, 0, 1, 7]), own=st.integers(1, 40), output=st.integers(1, 40))
    def continues(self, data: st.DataObject, cut: int, own: int, output: int) -> None:
        """The next turn of a chat, or another branch of it a few tokens before its end."""
        over = sorted(one for one, request in self.engine.requests.items() if request.is_finished())
        if not over:
            return
        request = self.engine.requests[data.draw(st.sampled_from(over))]
        said = list(request.all_token_ids)[: request.num_tokens - cut]
        request_id = f"r{len(self.engine.requests)}"
        self.live.append(request_id)
        prompt = [*said, *range(own)][: 10 * CHUNK]
        self.engine.add(request_id, prompt, output=output, salt=request.cache_salt or "")

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(self.live))
        self.live.remove(request_id)
        self.aborted.add(request_id)
        self.engine.abort(request_id)

    @precondition(lambda self: self.node.attached)
    @rule()
    def lose(self) -> None:
        self.node.lose()

    @precondition(lambda self: not self.node.attached)
    @rule(restarted=st.booleans())
    def attach(self, restarted: bool) -> None:
        self.node.attach(restarted=restarted)

    @rule(prompt=st.booleans())
    def answers(self, prompt: bool) -> None:
        self.node.prompt = prompt
        if prompt:
            self.node.answer()

    @rule(generous=st.booleans(), at_once=st.booleans())
    def changes_its_mind(self, generous: bool, at_once: bool) -> None:
        self.node.generous = generous
        self.node.fetches_at_once = at_once

    @precondition(lambda self: self.node.fetches)
    @rule(count=st.integers(0, 2), fails=st.booleans())
    def delivers(self, count: int, fails: bool) -> None:
        if fails:
            self.node.fail()
        else:
            self.node.deliver(count or None)

    @rule(to_peer=st.booleans(), part=st.sampled_from([None, 0, 1]))
    def evicts(self, to_peer: bool, part: int | None) -> None:
        if to_peer:
            self.node.move_to_peer(part)
        else:
            self.node.evict(part)

    @precondition(lambda self: any(not chunk.holds for chunk in self.node.chunks.values()))
    @rule(data=st.data())
    def drops(self, data: st.DataObject) -> None:
        free = sorted(key for key, chunk in self.node.chunks.items() if not chunk.holds)
        self.node.drop(data.draw(st.sampled_from(free)))

    @rule(full=st.booleans(), grants_partial=st.booleans())
    def pool_fills(self, full: bool, grants_partial: bool) -> None:
        self.node.pool_is_full, self.node.grants_partial = full, grants_partial

    @precondition(lambda self: len(self.model.caches) > 1)
    @rule(parts=st.sets(st.integers(0, 1)))
    def grudges(self, parts: set[int]) -> None:
        self.node.grudged_parts = parts

    @precondition(lambda self: self.model is not PLAIN)
    @rule(wrong=st.booleans())
    def sizes_become_wrong(self, wrong: bool) -> None:
        self.node.alters = halve if wrong else keep

    @rule(seconds=st.sampled_from([0.05, 0.2, 1.5, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.engine.clock.now += seconds

    @rule(
        rank=st.integers(0, 1),
        fails_loads=st.booleans(),
        skips_stores=st.booleans(),
        reports_late=st.booleans(),
        steps_per_load=st.integers(0, 3),
    )
    def worker_changes(
        self, rank: int, fails_loads: bool, skips_stores: bool, reports_late: bool, steps_per_load: int
    ) -> None:
        worker = self.engine.workers[rank % len(self.engine.workers)]
        worker.fails_loads = fails_loads
        worker.skips_stores = skips_stores
        worker.reports_late = reports_late
        worker.steps_per_load = steps_per_load

    @rule()
    def pages_are_forgotten(self) -> None:
        self.engine.scheduler.reset_prefix_cache()

    @rule(data=st.data())
    def vllm_loses_pages(self, data: st.DataObject) -> None:
        manager = self.engine.scheduler.kv_cache_manager
        count = manager.block_pool.num_gpu_blocks
        manager.evict_blocks(data.draw(st.sets(st.integers(1, count - 1), max_size=count // 2)))

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.node.alters = keep
        for worker in self.engine.workers:
            worker.fails_loads = worker.skips_stores = False
        self.engine.check_nothing_is_left()
        for request_id in self.engine.requests:
            if request_id not in self.aborted:
                self.engine.check_answer(request_id)


def keep(chunk: HeldChunk) -> None:
    """As it is."""


def halve(chunk: HeldChunk) -> None:
    """An extent of no part."""
    chunk.extent.size_bytes //= 2


@pytest.mark.timeout(600)
def test_whatever_happens_answers_are_right_and_nothing_is_left(scripted_config: VllmConfig) -> None:
    run(scripted_config, PLAIN, 40)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_happens_with_several_groups_answers_are_right_and_nothing_is_left(
    scripted_config: VllmConfig, name: str
) -> None:
    run(scripted_config, MODELS[name], 12)


def run(vllm_config: VllmConfig, model: SimulatedModel, examples: int) -> None:
    RandomLife.vllm_config = vllm_config
    RandomLife.model = model
    run_state_machine_as_test(
        RandomLife,
        settings=settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
