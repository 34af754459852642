"""A coordinator that answers late: a long prompt is worth the wait, a short one is computed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.config import ConnectorConfig
from tests.engines.llm import LlmFleet, Nursery, make_prompt
from tests.support.slow_wire import SlowWire
from tests.waiting import WAIT_SECONDS

pytestmark = pytest.mark.engine

CHUNK = 128
LONG, SHORT = make_prompt(1, 28 * CHUNK), make_prompt(2, CHUNK)
"""The first takes seconds to compute, the second a small part of one."""
LATE_SECONDS = 0.5
SETTINGS = {"chunk_size": str(CHUNK), "max_local_cpu_size": "512MiB"}
KV_BYTES = 320 << 20
SLOW = SETTINGS | {
    "lookup_timeout": str(ConnectorConfig().lookup_timeout),
    "coordinator_timeout": str(ConnectorConfig().coordinator_timeout),
}
"""As users have it, not as patient as other tests."""


def test_a_long_prompt_hits_and_a_short_one_is_computed(nursery: Nursery, mid_model: Path, tmp_path: Path) -> None:
    with (
        LlmFleet(nursery, mid_model, tmp_path, coordinator=True) as fleet,
        SlowWire(fleet.coordinator.port) as wire,
    ):
        holder = fleet.add("holder", SETTINGS, kv_cache_memory_bytes=KV_BYTES)
        asker = fleet.add("asker", SLOW | {"coordinator_address": wire.address}, kv_cache_memory_bytes=KV_BYTES)
        fleet.start()
        expected = holder.ask(LONG, SHORT, max_tokens=4)
        for prompt in (LONG, SHORT):
            fleet.coordinator.wait_for_holder(prompt, "holder", len(prompt), WAIT_SECONDS)
        asker.ask(make_prompt(3, len(LONG)), max_tokens=1)  # it learns how fast it computes

        wire.seconds = LATE_SECONDS
        short = asker.ask(SHORT, max_tokens=4)
        long = asker.ask(LONG, max_tokens=4)
        assert (short.peer_tokens, long.peer_tokens) == (0, len(LONG))
        assert [*long.token_ids, *short.token_ids] == expected.token_ids
