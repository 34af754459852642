"""lmkv beside vLLM's `NixlConnector` in one `MultiConnector`: it keeps the cache, and NIXL hands prompts to decodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.process import free_port
from tests.engines.llm import CALM, make_prompt
from tests.support.plain_nixl import plain_nixl

PROMPT_TOKENS = 1100
HELD_TOKENS = PROMPT_TOKENS // 256 * 256
TO_BE_DECODED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The parameters that vLLM's proxies send to a prefill engine."""


def both(role: str) -> dict[str, Any]:
    """lmkv first, NIXL second."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "LMKVConnector", "kv_role": "kv_both"},
                {"kv_connector": "NixlConnector", "kv_role": role, "kv_buffer_device": "cpu"},
            ]
        },
    }


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Engines `prefill` and `decode`, both ready."""
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(
            Path(folder), tiny_model, logs=tmp_path_factory.mktemp("logs"), settings=settings, coordinator=False
        ) as cluster,
    ):
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            cluster.add_engine(
                name,
                transfer_config=both(role),
                environment={
                    "PYTHONPATH": str(plain_nixl(Path(folder))),
                    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                },
            )
        cluster.start_engines()
        yield cluster


def disaggregated(cluster: Cluster, prompt: list[int]) -> Completion:
    """The decode's answer to a prompt that the prefill has computed, the way vLLM's own proxies ask."""
    prefilled = cluster.engines["prefill"].answer(prompt, 1, kv_transfer_params=TO_BE_DECODED)
    params: Mapping[str, object] = prefilled["kv_transfer_params"]
    assert params["do_remote_prefill"]
    return cluster.engines["decode"].complete(prompt, extra={"kv_transfer_params": params})


def grown(engine: EngineProcess, before: Mapping[str, float], name: str) -> float:
    """By how much a counter has grown."""
    return engine.metrics()[name] - before[name]


def test_nixl_transfers_what_lmkv_does_not_have(cluster: Cluster) -> None:
    prompt = make_prompt(1, PROMPT_TOKENS)
    decode = cluster.engines["decode"]
    before = decode.metrics()
    answer = disaggregated(cluster, prompt)
    assert grown(decode, before, "vllm:external_prefix_cache_hits_total") >= PROMPT_TOKENS - 1
    assert grown(decode, before, "lmkv:loaded_tokens_total") == 0
    assert answer.token_ids == decode.complete(prompt, extra={"cache_salt": "alone"}).token_ids


def test_lmkv_gives_what_it_has_before_nixl_is_asked(cluster: Cluster) -> None:
    prompt = make_prompt(2, PROMPT_TOKENS)
    prefill, decode = cluster.engines["prefill"], cluster.engines["decode"]
    expected = disaggregated(cluster, prompt)
    for engine in (prefill, decode):
        engine.reset_prefix_cache()
    before, before_prefill = decode.metrics(), prefill.metrics()
    again = disaggregated(cluster, prompt)
    assert again.token_ids == expected.token_ids
    assert grown(prefill, before_prefill, "lmkv:loaded_tokens_total") == HELD_TOKENS
    assert grown(decode, before, "lmkv:loaded_tokens_total") == HELD_TOKENS


def test_no_page_stays_in_use_whatever_the_source_of_the_prompt(cluster: Cluster) -> None:
    prompt = make_prompt(4, PROMPT_TOKENS)
    for _ in ("by NIXL", "by lmkv"):
        disaggregated(cluster, prompt)
        for engine in cluster.engines.values():
            engine.reset_prefix_cache()  # refused for as long as a request, finished or not, has pages


def test_the_stats_of_both_are_seen(cluster: Cluster) -> None:
    names = cluster.engines["decode"].metrics().keys()
    assert "lmkv:loaded_tokens_total" in names
    assert any(name.startswith("vllm:nixl") for name in names)


def test_a_load_that_fails_is_computed(cluster: Cluster) -> None:
    prompt = make_prompt(3, PROMPT_TOKENS)
    engine = cluster.engines["prefill"]
    expected = engine.complete(prompt).token_ids
    engine.reset_prefix_cache()
    cluster.kill_node("prefill")
    assert engine.complete(prompt).token_ids == expected
