"""A LoRA adapter, and each name of a model, is known to coordinator, command line and proxy as the engine serves it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmkv.auth.cache_salts import TENANT, CacheSalts
from lmkv_client.demo.cluster import Cluster
from tests.engines.conftest import SETTINGS
from tests.engines.faults import eventually
from tests.support.models import make_adapter
from tests.support.proxy import ProxyProcess
from tests.support.tokens import entry, write

STORED = 768
"""Tokens in the whole chunks of a prompt of 1,000."""


class RoutingProxy(ProxyProcess):
    """A proxy before engines that do everything, which it chooses by what they hold."""

    def __init__(self, folder: Path, cluster: Cluster, *arguments: str, **environment: str) -> None:
        assert cluster.coordinator is not None
        engines = list(cluster.engines.values())
        super().__init__(folder, [], engines, environment=os.environ | environment if environment else None)
        self.command = [sys.executable, "-m", "lmkv", "proxy", "--port", str(self.port), "--mode", "route"]
        self.command += [f"--engine=http://127.0.0.1:{engine.port}" for engine in engines]
        self.command += ["--policy", "kv_aware", "--coordinator", cluster.coordinator.address, "--lookup-timeout", "10"]
        self.command += arguments


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two LoRA adapters; the engines know the first when they start."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: make_adapter(folder / name, seed) for seed, name in enumerate(("early", "late"))}


@pytest.fixture(scope="module")
def cluster(tiny_model: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two engines that serve a model under two names, and an adapter. The first schedules in a process of its own."""
    arguments = ("--served-model-name", tiny_model.name, "nickname", "--enable-lora", "--max-lora-rank", "8")
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Cluster(Path(folder), tiny_model, logs=tmp_path_factory.mktemp("logs"), settings=SETTINGS) as cluster,
    ):
        for number in (1, 2):
            cluster.add_engine(
                f"engine-{number}",
                extra_arguments=(
                    *arguments,
                    "--lora-modules",
                    f"early={adapters['early']}",
                    "--distributed-executor-backend",
                    "uni",
                ),
                environment={
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if number == 1 else "0",
                },
                kv_cache_bytes=64 << 20,
            )
        cluster.start_engines()
        yield cluster


def run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert cluster.coordinator is not None
    command = [sys.executable, "-m", "lmkv", *arguments, "--json", "--coordinator", cluster.coordinator.address]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def lmkv(cluster: Cluster, *arguments: str) -> Any:
    """What a command prints as JSON."""
    done = run(cluster, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def held(cluster: Cluster, prompt: list[int], *names: str) -> dict[str, int]:
    """Tokens that each instance holds of a prompt by `lmkv lookup`; none while a name is unknown."""
    done = run(cluster, "lookup", "--tokens", ",".join(map(str, prompt)), *names)
    if "no engine has registered" in done.stderr:
        return {}
    answer = json.loads(done.stdout)
    return {holder["instance_id"]: holder["matched_token_count"] for holder in answer["holders"]}


def ask(cluster: Cluster, name: str, prompt: list[int], model: str, **more: Any) -> None:
    body = {"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    cluster.engines[name]._request("POST", "/v1/completions", body, timeout_seconds=120)


def success_count(cluster: Cluster, name: str) -> float:
    """Requests that an engine has answered."""
    return cluster.engines[name].metrics()["vllm:request_success_total"]


def wait_held(cluster: Cluster, prompt: list[int], expected: dict[str, int], *names: str) -> None:
    eventually(lambda: held(cluster, prompt, *names) == expected, f"{expected} under {names}")


@pytest.mark.parametrize("name", ["engine-1", "engine-2"])
def test_every_name_of_a_model_finds_it(cluster: Cluster, tiny_model: Path, prompt: list[int], name: str) -> None:
    ask(cluster, name, prompt, "nickname")
    for model in (tiny_model.name, "nickname"):
        wait_held(cluster, prompt, {name: STORED}, "--model", model)


def test_an_adapter_is_looked_up_pinned_moved_and_cleared_by_its_name(cluster: Cluster, prompt: list[int]) -> None:
    tokens = ("--tokens", ",".join(map(str, prompt)), "--model", "early")
    ask(cluster, "engine-1", prompt, "early")
    wait_held(cluster, prompt, {"engine-1": STORED}, "--model", "early")
    assert held(cluster, prompt, "--lora", "early") == {"engine-1": STORED}
    assert held(cluster, prompt, "--model", "nickname", "--lora", "early") == {"engine-1": STORED}
    assert held(cluster, prompt, "--model", "nickname") == {}, "the model without the adapter has other chunks"
    assert lmkv(cluster, "pin", *tokens, "--at", "engine-1")["pin"]["token_count"] == STORED
    assert lmkv(cluster, "copy", *tokens, "--from", "engine-1", "--to", "engine-2")["done"]
    wait_held(cluster, prompt, {"engine-1": STORED, "engine-2": STORED}, "--model", "early")
    assert lmkv(cluster, "clear", *tokens, "--instance", "engine-2")["done"]
    wait_held(cluster, prompt, {"engine-1": STORED}, "--model", "early")


def test_an_adapter_that_was_loaded_while_the_engine_ran_is_known_by_its_name(
    cluster: Cluster, adapters: dict[str, Path], prompt: list[int]
) -> None:
    body = {"lora_name": "late", "lora_path": str(adapters["late"])}
    cluster.engines["engine-1"]._request("POST", "/v1/load_lora_adapter", body, timeout_seconds=60)
    ask(cluster, "engine-1", prompt, "late")
    wait_held(cluster, prompt, {"engine-1": STORED}, "--model", "late")
    assert cluster.coordinator is not None
    served = cluster.coordinator.instances()["engine-1"].served_models
    assert {(one.name, one.lora_identity.partition("@")[0]) for one in served} >= {("nickname", ""), ("late", "late")}


def test_the_proxy_routes_by_adapter_alias_and_salt_to_the_engine_that_holds_the_prompt(
    cluster: Cluster, tiny_model: Path, prompt: list[int], tmp_path: Path
) -> None:
    cases: list[tuple[str, dict[str, str], str, str]] = [
        ("early", {}, "early", "engine-2"),
        ("nickname", {}, tiny_model.name, "engine-1"),
        ("nickname", {"cache_salt": "tenant"}, tiny_model.name, "engine-2"),
        ("early", {"cache_salt": "tenant"}, "early", "engine-1"),
    ]
    for model, more, _, holder in cases:
        ask(cluster, holder, prompt, model, **more)
    for _, more, model, holder in cases:
        salt = ("--cache-salt", more["cache_salt"]) if more else ()
        wait_held(cluster, prompt, {holder: STORED}, "--model", model, *salt)
    with RoutingProxy(tmp_path, cluster) as proxy:
        for model, more, _, holder in cases:
            before = success_count(cluster, holder)
            body = {"model": model, "prompt": prompt, "max_tokens": 4} | more
            proxy._request("POST", "/v1/completions", body, timeout_seconds=120)
            eventually(
                lambda holder=holder, before=before: success_count(cluster, holder) > before,  # type: ignore[misc]
                f"{holder} has answered {(model, more)}",
            )


def test_a_proxy_that_salts_by_tenant_shares_prompts_within_a_tenant_only(
    cluster: Cluster, tiny_model: Path, prompt: list[int], tmp_path: Path
) -> None:
    tokens = write(tmp_path / "tokens.yaml", entry("client", "team-a"), entry("client", "team-b"))
    salting = ("--auth-tokens", tokens, "--cache-salt-policy", TENANT)

    def cached_tokens(tenant: str, **extra: str) -> int:
        proxy.headers["Authorization"] = f"Bearer client-of-{tenant}-token"
        return proxy.complete(prompt, 4, extra=extra).cached_tokens

    def wait_stored(tenant: str) -> None:
        salt = CacheSalts(TENANT, "hush").derive(tenant)
        find = ("--model", tiny_model.name, "--cache-salt", salt)
        eventually(lambda: list(held(cluster, prompt, *find).values()) == [STORED], f"the chunks of {tenant}")
        for engine in cluster.engines.values():
            engine.reset_prefix_cache()  # what is cached now is loaded by lmkv

    with RoutingProxy(tmp_path, cluster, *salting, LMKV_CLUSTER_SECRET="hush") as proxy:
        assert cached_tokens("team-a") == 0
        wait_stored("team-a")
        assert cached_tokens("team-b") == 0, "another tenant's prompt is a new one"
        wait_stored("team-b")
        guess = CacheSalts(TENANT, "hush").derive("team-a")
        assert cached_tokens("team-b", cache_salt=guess) == 0, "also if it knows the other's salt"
        assert cached_tokens("team-a") == STORED
        assert cached_tokens("team-b") == STORED
        assert cached_tokens("team-a", cache_salt="a part of its own") == 0
