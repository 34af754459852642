"""Prompts looked up by the engine API at real nodes: hits to the last stored token, reasons of misses, spans."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import grpc
import numpy as np
import pytest

from lmkv import telemetry
from lmkv.keys import ChunkKey
from lmkv.misses import MissReason, describe
from lmkv.rpc.endpoints import CHANNEL_OPTIONS
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import RequestReport
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.engine import Engine, Written
from tests.client.engine.engines import SPEC, Attach, content, load, prompt, store, words
from tests.client.engine.nodes import kill, node_pid, until
from tests.lmkv.telemetry.receiver import receiving
from tests.waiting import WAIT_SECONDS

CHUNK = SPEC.chunk_size
REST = 10
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def store_partial(engine: Engine, tokens: list[int]) -> None:
    """Stores a prompt whose last chunk has `REST` tokens."""
    *full, last = engine.keys(tokens, partial=True)
    store(engine, full)
    (extent,) = engine.reserve(1, timeout=WAIT_SECONDS)
    words(extent)[: SPEC.size_bytes(REST) // 8] = content(last, SPEC.size_bytes(REST))
    parent = full[-1] if full else engine.root()
    engine.commit([Written(key=last, extent=extent, token_count=REST, parent=parent)])


@pytest.mark.parametrize("full_count", [0, 2])
def test_a_longer_prompt_hits_to_the_last_token_that_was_stored(attach: Attach, full_count: int) -> None:
    engine = attach()
    tokens = prompt(full_count + 1)[: full_count * CHUNK + REST]
    store_partial(engine, tokens)
    longer = [*tokens, *prompt(2, first=9)]
    keys = engine.keys(longer, partial=True)
    with engine.lookup(keys, tokens=longer, timeout=WAIT_SECONDS) as held:
        assert (held.hit_count, held.token_count) == (full_count + 1, len(tokens))
        assert list(held.keys) == engine.keys(tokens, partial=True)
        last = list(held.load(timeout=WAIT_SECONDS))[-1]
        assert last.token_count == REST
        assert np.array_equal(words(last), content(held.keys[-1], SPEC.size_bytes(REST)))
    assert (engine.counters.hit_tokens, engine.counters.loaded_tokens) == (len(tokens), len(tokens))
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        assert held.hit_count == full_count, "without tokens only chunks of the prompt itself are found"


def test_tokens_are_not_shown_if_partial_chunks_are_not_stored(attach: Attach) -> None:
    engine = attach()
    tokens = prompt(3)[: 2 * CHUNK + REST]
    store_partial(engine, tokens)
    other = attach(save_partial_chunks=False)
    with other.lookup(other.keys([*tokens, 1, 2], partial=True), tokens=[*tokens, 1, 2], timeout=WAIT_SECONDS) as held:
        assert held.hit_count == 2


def test_each_missed_token_has_a_reason(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(5))
    store(engine, keys[:2])
    assert load(engine, keys) == 2
    counters = engine.counters
    assert (counters.asked_tokens, counters.hit_tokens) == (5 * CHUNK, 2 * CHUNK)
    assert dict(counters.tier_tokens) == {"own": 2 * CHUNK}
    assert dict(counters.miss_tokens) == {"never_stored": 3 * CHUNK}
    tokens = prompt(3, first=8)[: 2 * CHUNK + REST]
    engine.lookup(engine.keys(tokens), tokens=tokens, timeout=WAIT_SECONDS).release()
    assert dict(engine.counters.miss_tokens) == {"never_stored": 5 * CHUNK, "uncacheable": REST}
    engine.lookup([], tokens=tokens[:REST]).release()
    assert engine.counters.miss_tokens["uncacheable"] == 2 * REST
    engine.close()
    engine.lookup(keys).release()
    assert engine.counters.miss_tokens["node_lost"] == 5 * CHUNK


def test_a_hit_that_is_refused_is_below_the_minimum(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(3))
    store(engine, keys[:1])
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        held.refuse()
    assert dict(engine.counters.miss_tokens) == {"below_minimum": CHUNK, "never_stored": 2 * CHUNK}
    assert dict(engine.counters.tier_tokens) == {}


def test_what_is_refused_behind_the_first_chunks_counts_for_its_reason(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(3))
    store(engine, keys)
    with engine.lookup(keys, timeout=WAIT_SECONDS) as held:
        held.refuse(1, reason=MissReason.SLOWER)
        assert len(list(held.load(1, timeout=WAIT_SECONDS))) == 1
    assert dict(engine.counters.miss_tokens) == {"slower": 2 * CHUNK}
    assert dict(engine.counters.tier_tokens) == {"own": CHUNK}


def test_a_prompt_that_was_looked_up_before_counts_only_what_it_fails_to_bring(attach: Attach) -> None:
    engine = attach()
    keys = engine.keys(prompt(4))
    store(engine, keys[:3])
    engine.lookup(keys[:3], timeout=WAIT_SECONDS).release()
    with engine.lookup(keys[:3], is_continued=True, timeout=WAIT_SECONDS) as held:
        assert len(list(held.load())) == 3
    counters = engine.counters
    assert (dict(counters.tier_tokens), dict(counters.miss_tokens)) == ({"own": 3 * CHUNK}, {})
    engine.lookup(keys, is_continued=True, timeout=WAIT_SECONDS).release()
    assert dict(engine.counters.miss_tokens) == {"never_stored": CHUNK}


def test_chunks_that_are_lost_before_they_are_loaded_are_missed(attach: Attach, tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator:
        one, other = (
            attach(instance_id=name, enable_p2p=True, coordinator_address=(coordinator.address,))
            for name in ("one", "other")
        )
        keys = one.keys(prompt(4))
        store(one, keys)

        def has_found() -> bool:
            held = other.lookup(keys, timeout=WAIT_SECONDS)
            if held.hit_count < 4:
                held.release()
                return False
            with held:
                kill(node_pid(one.config))
                assert list(held.load(timeout=WAIT_SECONDS)) == []
            return True

        until(has_found)
        missed = dict(other.counters.miss_tokens)
        missed.pop("never_stored", None)  # until the coordinator knew of the chunks
        assert sum(missed.values()) == 4 * CHUNK
        assert missed.keys() <= {"peer_unreachable", "load_failed"}


def reports(coordinator: CoordinatorProcess, engine_request_id: str) -> list[RequestReport]:
    with grpc.insecure_channel(coordinator.address, options=CHANNEL_OPTIONS) as channel:
        request = pb.ExplainRequest(engine_request_id=engine_request_id)
        response = CacheServiceStub(channel).Explain(request, timeout=WAIT_SECONDS, wait_for_ready=True)
    return [report for one in response.explanations for report in one.explanation.requests]


def test_the_node_keeps_a_report_of_each_prompt(attach: Attach, tmp_path: Path) -> None:
    with CoordinatorProcess(tmp_path) as coordinator:
        engine = attach(enable_p2p=True, coordinator_address=(coordinator.address,))
        keys = engine.keys(prompt(3))
        store(engine, keys[:1])

        def peers_are_asked() -> bool:
            engine.lookup(keys, engine_request_id="before", timeout=WAIT_SECONDS).release()
            return "never_stored" in engine.counters.miss_tokens

        until(peers_are_asked)
        engine.lookup(keys, engine_request_id="chat-7", timeout=WAIT_SECONDS).release()
        engine.lookup(keys, timeout=WAIT_SECONDS).release()
        until(lambda: len(coordinator.instances()) == 1 and len(reports(coordinator, "/")) == 1)
        (named,), (other,) = reports(coordinator, "chat-7"), reports(coordinator, "/")
        assert describe(named.spans) == describe(other.spans) == f"{CHUNK} host, {2 * CHUNK} never_stored"


def test_lookups_and_loads_have_spans(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        with telemetry.trace_process("engine-of-tests", "here"):
            engine = attach()
            keys = engine.keys(prompt(3))
            store(engine, keys[:2])
            traceparent = f"00-{TRACE_ID}-{PARENT_ID}-01"
            with engine.lookup(keys, traceparent=traceparent, timeout=WAIT_SECONDS) as held:
                assert len(list(held.load())) == 2
        lookup = receiver.span("engine-of-tests", "lmkv.lookup", trace_id=TRACE_ID)
        loading = receiver.span("engine-of-tests", "lmkv.load", trace_id=TRACE_ID)
        at_node = receiver.span("lmkv-node", "lmkv.lookup", trace_id=TRACE_ID)
    assert (lookup.parent_id, loading.parent_id, at_node.parent_id) == (PARENT_ID, lookup.span_id, lookup.span_id)
    assert lookup.attributes["lmkv.asked_tokens"] == 3 * CHUNK
    assert lookup.attributes["lmkv.own_tokens"] == 2 * CHUNK
    assert lookup.attributes["lmkv.miss_reasons"] == ("never_stored",)
    assert (loading.attributes["lmkv.asked_tokens"], loading.failed) == (2 * CHUNK, False)


def test_counters_are_a_snapshot(attach: Attach) -> None:
    engine = attach()
    before = engine.counters
    load(engine, engine.keys(prompt(1)))
    assert (before.lookups, dict(before.miss_tokens)) == (0, {})
    assert dataclasses.replace(engine.counters).miss_tokens == {"never_stored": CHUNK}


def test_a_salt_that_floods_evicts_no_chunk_of_another(attach: Attach) -> None:
    """Both name the owner of what they store, of which the node keeps a quota."""
    engine = attach(max_local_cpu_size=f"{64 * SPEC.chunk_bytes}B", max_salt_size=f"{16 * SPEC.chunk_bytes}B")

    def put(salt: str, first: int) -> list[ChunkKey]:
        keys = engine.keys(prompt(4, first), salt=salt)
        extents = engine.reserve(len(keys), timeout=WAIT_SECONDS)
        engine.commit(Written.chain(keys, extents, owner=engine.root(salt=salt)))
        return keys

    kept = put("one", 0)
    for first in range(20):
        put("other", first)
    assert engine.missing(kept, timeout=WAIT_SECONDS) == []
