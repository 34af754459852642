"""A load that becomes too slow: what has arrived is used, the rest is computed, and the metrics say so."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.engines.faults import eventually
from tests.engines.llm import LlmFleet, Nursery, make_prompt
from tests.support.redis_server import RedisServer
from tests.support.slow_wire import SlowWire

pytestmark = pytest.mark.engine

CHUNK, CHUNK_COUNT = 128, 28
CHUNK_BYTES = 8 << 20
"""Of the model of the tests that takes seconds to compute a prompt, in float32."""
PROMPT = make_prompt(1, CHUNK_COUNT * CHUNK + 10)
OTHERS = [make_prompt(seed, 16 * CHUNK) for seed in range(10, 14)]
POOL_CHUNKS = 48
"""Room for one prompt and some chunks."""
HELD = CHUNK_COUNT * CHUNK
SLOWER = 2
"""The load would take this multiple of the time of computing. With 4 no chunk has arrived when it is given up."""
SETTINGS = {
    "chunk_size": str(CHUNK),
    "refuse_slow_fetches": "true",
    "remote_lookup_timeout": "5",
    "remote_timeout": "300",  # of a chunk: the wire is slower, the longer a busy host computes
    "load_timeout": "300",
    "eviction_policy": "lru",  # a prompt that was asked for twice leaves the pool, too
}


def test_of_a_load_that_becomes_too_slow_what_has_arrived_is_used_and_the_rest_computed(
    nursery: Nursery, mid_model: Path, tmp_path: Path
) -> None:
    with (
        RedisServer() as redis,
        SlowWire(redis.port) as wire,
        LlmFleet(nursery, mid_model, tmp_path) as fleet,
    ):
        pool = f"{POOL_CHUNKS * CHUNK_BYTES >> 20}MiB"
        own = {"remote_url": f"redis://{wire.address}", "max_local_cpu_size": pool}
        engine = fleet.add("engine", SETTINGS | own, kv_cache_memory_bytes=400 << 20)
        fleet.start()
        began = time.monotonic()
        expected = engine.ask(PROMPT, max_tokens=4)
        cold_seconds = time.monotonic() - began
        # In the steps of another prompt the last chunks are committed.
        stored = expected.stored_tokens + engine.ask(make_prompt(4, 50), max_tokens=8).stored_tokens
        while stored < HELD:  # a third of the pool had no room for all at once
            stored += engine.ask_again(PROMPT, max_tokens=8).stored_tokens
        eventually(lambda: len(redis.names()) > CHUNK_COUNT, "the prompt and the inputs of its KV are in the store")
        for other in OTHERS:  # the pool forgets the prompt
            engine.ask(other, max_tokens=1)
        engine.forget()

        wire.bytes_per_second = CHUNK_COUNT * CHUNK_BYTES / (SLOWER * cold_seconds)
        answer = engine.ask(PROMPT, max_tokens=4)
        wire.bytes_per_second = float("inf")
        grown = answer.grown
        assert answer.token_ids == expected.token_ids
        abandoned = grown["lmkv:abandoned_tokens_total"]
        assert abandoned > 0
        assert grown['lmkv:tier_tokens_total{tier="remote"}'] > 0
        assert answer.loaded_tokens + abandoned <= HELD
        assert answer.missed_tokens["slower"] >= abandoned
        assert grown["lmkv:load_failures_total"] == 0

        engine.forget()
        again = engine.ask(PROMPT, max_tokens=4)
        assert again.token_ids == expected.token_ids
