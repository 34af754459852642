"""Engines whose KV differs share nothing and report why; engines with an invalid configuration do not start.

All serve a model named `tiny`: `plain` in float32; `narrow` in bfloat16, `other` with other weights, `fine` with
smaller blocks.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import LmkvError
from tests.engines.llm import LlmFleet, Nursery, make_prompt

pytestmark = [pytest.mark.engine, pytest.mark.in_order]

REPORT_TIMEOUT_SECONDS = 60.0
PROMPT = make_prompt(1, 1000)
DIFFERENCES = {
    "narrow": ("kv_dtype", "float32", "bfloat16"),
    "other": ("model_id", "", ""),
    "fine": ("block_size", "128", "64"),
}
"""Field that keeps each engine apart from `plain`, and its values where they are known."""


@pytest.fixture(scope="module")
def fleet(
    nursery: Nursery, tiny_model: Path, other_tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LlmFleet]:
    """All engines and a coordinator, ready."""
    with LlmFleet(nursery, tiny_model, tmp_path_factory.mktemp("logs"), coordinator=True) as fleet:
        fleet.add("narrow", dtype="bfloat16")
        fleet.add("other", model=other_tiny_model)
        fleet.add("fine", block_size=64)
        fleet.start()
        fleet.add("plain")
        fleet.start()  # last: an instance that joins later learns of conflicts at once, the others some seconds later
        yield fleet


def instances(fleet: LlmFleet) -> dict[str, dict[str, Any]]:
    """What `lmkv instances --json` prints, by id."""
    command = [sys.executable, "-m", "lmkv", "instances", "--json", "--coordinator", fleet.coordinator.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return {instance["instance_id"]: instance for instance in json.loads(done.stdout)["instances"]}


def chunk_counts(fleet: LlmFleet) -> dict[str, int]:
    """Chunks that each instance has reported."""
    return {
        name: sum(int(tier["chunk_count"]) for tier in instance["tiers"]) for name, instance in instances(fleet).items()
    }


def test_engines_of_different_kv_never_exchange_a_chunk(fleet: LlmFleet) -> None:
    for name, engine in fleet.engines.items():
        answers = engine.ask(PROMPT)
        assert (answers.cached_tokens, answers.stored_tokens) == (0, 768), name
    deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
    while (counts := chunk_counts(fleet)) != dict.fromkeys(fleet.engines, 3):
        assert time.monotonic() < deadline, counts
    for name, engine in fleet.engines.items():
        again = engine.ask_again(PROMPT)
        assert (again.loaded_tokens, again.peer_tokens) == (768, 0), f"{name} has its own"
        assert engine.metrics()["lmkv:peer_bytes_total"] == 0
    for name, engine in fleet.engines.items():
        engine.forget(external=True)
        answers = engine.ask(PROMPT)
        assert (answers.cached_tokens, answers.peer_tokens) == (0, 0), f"{name} loads no chunks of others"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_an_instance_shows_its_conflicts_and_their_reasons(fleet: LlmFleet, name: str) -> None:
    field, own_value, other_value = DIFFERENCES[name]
    deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
    while len(conflicts := instances(fleet)["plain"]["conflicts"]) < 3:
        assert time.monotonic() < deadline, conflicts
    (conflict,) = [conflict for conflict in conflicts if conflict["instance_id"] == name]
    assert (conflict["model_name"], conflict["field"]) == ("tiny", field)
    assert conflict["own_value"] != conflict["other_value"]
    if own_value:
        assert (conflict["own_value"], conflict["other_value"]) == (own_value, other_value)
    (seen_from_there,) = [
        conflict for conflict in instances(fleet)[name]["conflicts"] if conflict["instance_id"] == "plain"
    ]
    assert (seen_from_there["field"], seen_from_there["other_value"]) == (field, conflict["own_value"])


def test_an_engine_logs_and_counts_with_whom_it_shares_nothing(fleet: LlmFleet) -> None:
    engine = fleet.engines["plain"]
    deadline = time.monotonic() + REPORT_TIMEOUT_SECONDS
    while engine.metrics()["lmkv:spec_conflicts"] < 3 and time.monotonic() < deadline:
        engine.ask(PROMPT, max_tokens=1)  # what the node says is taken in while the engine works
    assert engine.metrics()["lmkv:spec_conflicts"] == 3
    log = engine.log()
    for name, (field, _, _) in DIFFERENCES.items():
        assert f"shares nothing with instance {name}, which also serves tiny: {field} is " in log


@pytest.mark.parametrize(
    ("key", "settings", "extra_config"),
    [
        ("chunk_sise", {}, {"chunk_sise": 256}),
        ("chunk_size", {}, {"chunk_size": 200}),
        ("max_local_cpu_size", {"max_local_cpu_size": "5 bushels"}, {}),
        ("enable_async_loading", {}, {"enable_async_loading": "maybe"}),
        ("max_local_cpu_size", {"instance_id": "plain", "max_local_cpu_size": "128MiB"}, {}),
    ],
    ids=["unknown key", "chunks that are not whole blocks", "bad unit", "bad switch", "instance of another engine"],
)
def test_nonsense_ends_the_start_in_one_line_that_names_the_key(
    fleet: LlmFleet, key: str, settings: dict[str, str], extra_config: dict[str, object]
) -> None:
    transfer_config = {
        "kv_connector": "LMKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra_config,
    }
    engine = fleet.add("fool", settings, transfer_config=transfer_config)
    try:
        engine.start()
        with pytest.raises(LmkvError) as refused:
            engine.wait_ready()
    finally:
        engine.kill()
        del fleet.engines["fool"]
    message = str(refused.value)
    assert key in message.lower(), "by its own name or by that of its variable"
    assert "\n" not in message
    assert fleet.engines["plain"].ask_again(PROMPT).loaded_tokens == 768, "other engines are not affected"


def test_an_engine_that_was_configured_for_lmcache_takes_what_lmkvs_own_keys_leave_open(
    fleet: LlmFleet, tmp_path: Path
) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nlmcache_instance_id: lmcache_instance_1\nlmcache_worker_ports: 8500\n")
    environment = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_CHUNK_SIZE": "128", "LMCACHE_USE_EXPERIMENTAL": "True"}
    engine = fleet.add("moved-in", {}, environment)
    try:
        fleet.start()
        assert engine.ask(PROMPT).stored_tokens == len(PROMPT) // 128 * 128
        assert instances(fleet)["moved-in"], "lmkv's own instance_id wins"
        for notice in (
            "using LMCache's configuration where lmkv's own sets nothing: LMCACHE_CHUNK_SIZE in the environment",
            f"lmkv's own configuration overrides LMCache's: lmcache_instance_id in {file}",
            f"lmcache_worker_ports in {file} is ignored: one node serves all ranks, at p2p_port",
            "LMCACHE_USE_EXPERIMENTAL in the environment is ignored: lmkv has no such key",
        ):
            assert notice in engine.log()
        node_log = (fleet.runtime_dir / "moved-in" / "node.log").read_text()
        assert "LMCACHE" not in node_log, "the engine passes on the result, not LMCache's variables"
    finally:
        engine.kill()
        del fleet.engines["moved-in"]
