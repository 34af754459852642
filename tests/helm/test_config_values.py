"""Values such as `node.config` and what the processes make of them: what Helm renders, they read."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from helm.generate import PROCESSES, allowed_keys
from lmkv.config import keys, load
from lmkv.config.kinds import Kind
from tests.helm.chart import CHART, Manifest, find, render, rendered_or_refused, variable
from tests.lmkv.config.test_schemas import AMOUNTS, NUMBERS, OTHERS, TEXTS

ENGINES = {"node": {"mode": "sidecar"}, "engines": {"groups": [{"name": "a", "model": "/models/m"}]}}
VARIABLES = {"LMKV_NODE_ADDRESS": "/run/lmkv/a/engine.sock", "LMKV_CLUSTER_SECRET": "s"}
"""What the pods of all processes have besides files."""
ENCRYPTED = {
    "tls": {"enabled": True, "mutual": True, "serverSecret": "s", "clientSecret": "c"},
    "auth": {"tokensSecret": "t", "engineSecret": "e", "readerSecret": "r"},
    "clusterSecret": {"existingSecret": "fleet"},
}


def values_with(path: str, config: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Values of a fleet with all processes, and with these keys of one."""
    component = path.removesuffix(".config")
    values = {**ENGINES, "proxy": {"enabled": True}, **others}
    return {**values, component: {**values.get(component, {}), "config": config}}


def read_by_process(path: str, manifests: list[Manifest], folder: Path) -> Any:
    """The configuration that the process of a component reads. Raises `ConfigError` if it would exit."""
    component = {"engines.config": "engine"}.get(path, path.removesuffix(".config"))
    file = folder / "lmkv.yaml"
    file.write_text(find(manifests, f"ConfigMap/demo-lmkv-{component}")["data"]["lmkv.yaml"])
    return load(PROCESSES[path], file=file, env=VARIABLES)


def is_read(kind: Kind[Any], raw: object) -> bool:
    """Whether a process reads a value of a key."""
    try:
        kind.read(raw)
    except ValueError:
        return False
    return True


@pytest.mark.timeout(300)  # some 160 renders
@pytest.mark.parametrize("path", PROCESSES)
def test_a_value_of_each_key_is_rendered_or_refused_as_the_process_reads_or_refuses_it(
    path: str, tmp_path: Path
) -> None:
    unread = 0
    for name in allowed_keys(path):
        declared = keys(PROCESSES[path])[name]
        tried = [raw for raw in (*TEXTS, *AMOUNTS, *NUMBERS, *OTHERS) if raw is not None and "\0" not in str(raw)]
        wrong = [raw for raw in tried if not is_read(declared.kind, raw)]
        for raw in wrong[::40]:
            _, refusal = rendered_or_refused(values_with(path, {name: raw}))
            assert f"at '/{path.replace('.', '/')}/{name}" in refusal, f"{path}.{name}: {raw!r} is rendered: {refusal}"
            unread += 1
        default = declared.kind.schema.get("enum", [None])[-1]
        raw = getattr(PROCESSES[path](), name) if default is None else default
        raw = list(raw) if isinstance(raw, tuple) else raw if isinstance(raw, str | int | float) else dict(raw)
        values = values_with(path, {name: raw}, **ENCRYPTED)
        manifests = render(values)
        read = getattr(read_by_process(path, manifests, tmp_path), name)
        assert declared.kind.write(read) == declared.kind.write(declared.kind.read(raw)), name
    assert unread > len(allowed_keys(path)) / 2  # any text will do for some


@pytest.mark.timeout(300)  # some 350 renders
def test_keys_and_values_that_contradict_each_other_do_not_reach_a_node(tmp_path: Path) -> None:
    rendered = refused = 0
    disk = {"maxLocalDiskSize": 2, "diskVolume": {"emptyDir": {}}}
    places: list[dict[str, Any]] = [{}, disk, {"remote": {"url": "redis://v:6379"}}, {"remote": {"url": "s3://bucket"}}]
    configs: list[dict[str, Any]] = [
        {"local_cpu": False},
        {"local_cpu": False, "enable_pd": False},
        {"local_disk_io": "nixl"},
        {"local_disk_io": "nixl", "local_disk_codec": "int8"},
        {"remote_ttl": "1h"},
        {"max_salt_size": "1 GiB", "max_salt_disk_size": 2},
        {"max_salt_size": 1000},
        {"max_salt_disk_size": "2.1"},
        {"max_salt_remote_size": "2MB"},
        {"require_encryption": True},
        {"require_encryption": True, "transfer_encryption": False},
    ]
    secrets: list[dict[str, Any]] = [{}, {"encryptionKeysSecret": "k"}]
    channels: list[dict[str, Any]] = [{}, {"transferChannel": "nixl"}]
    for place, config, secret, channel, tls in itertools.product(places, configs, secrets, channels, ({}, ENCRYPTED)):
        node = {"mode": "sidecar", **place, **secret, **channel, "config": config}
        manifests, refusal = rendered_or_refused({**tls, "node": node})
        if refusal:
            assert "execution error at" in refusal, refusal
            refused += 1
        else:
            read_by_process("node.config", manifests, tmp_path)
            rendered += 1
    assert min(rendered, refused) > 30


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"node": {"config": {"eviction_policy": "fifo"}}}, "value must be one of 'learned', 'lru', 'arc'"),
        ({"coordinator": {"config": {"lease_ttl": "5 y"}}}, "at '/coordinator/config/lease_ttl': '5 y' does not match"),
        ({"engines": {"config": {"chunk_size": 0}}}, "at '/engines/config/chunk_size': minimum: got 0, want 1"),
        ({"proxy": {"config": {"stop_timeout": -1}}}, "at '/proxy/config/stop_timeout': minimum: got -1, want 0"),
        (
            {"node": {"config": {"verify_transfers": "yes"}}},
            "at '/node/config/verify_transfers': got string, want ",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_path_by_helm_and_its_linter(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(helm_python.HelmValuesError) as refusal:
        render(values)
    assert sentence in str(refusal.value)
    assert sentence in str(helm_python.lint(CHART, values, strict=True))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"coordinator": {"config": {"lease_tll": 3}}},
            "coordinator.config has lease_tll, which is no key of lmkv; did you mean lease_ttl?",
        ),
        ({"node": {"config": {"evict_policy": "lru"}}}, "did you mean eviction_policy?"),
        ({"node": {"config": {"x": 3}}}, "is no key of lmkv; docs/reference/configuration.md lists them"),
        (
            {"coordinator": {"config": {"port": 3}}},
            "coordinator.config has port, which follows from coordinator.port: set that",
        ),
        (
            {"node": {"config": {"chunk_size": 3}}},
            "node.config has chunk_size, which is a key of engines.config: set it there",
        ),
        ({"engines": {"config": {"p2p_port": 3}}}, "engines.config has p2p_port, which follows from node.p2pPort"),
        ({"engines": {"config": {"eviction_policy": "lru"}}}, "which is a key of node.config: set it there"),
        ({"node": {"config": {"encryption_key_file": "/k"}}}, "follows from node.encryptionKeysSecret: set that"),
        ({"proxy": {"config": {"engine_api_key": "k"}}}, "follows from proxy.engineApiKey.existingSecret: set that"),
        ({"node": {"config": {"cache_policy": "LRU"}}}, "is another spelling of eviction_policy: write that"),
        ({"node": {"config": {"remote_url": "s3://b"}}}, "node.config has remote_url, which follows from node.remote"),
        ({"node": {"config": {"remote_serde": "naive"}}}, "has no counterpart in lmkv, because remote_codec has"),
        (
            {"node": {"extraEnv": [{"name": "LMKV_EVICTION_POLICY", "value": "fifo"}]}},
            "node.extraEnv has LMKV_EVICTION_POLICY, whose value nothing would check: set node.config.eviction_policy",
        ),
        (
            {"coordinator": {"extraEnv": [{"name": "LMKV_HTTP_PORT", "value": "1"}]}},
            "coordinator.extraEnv has LMKV_HTTP_PORT, which follows from coordinator.httpPort: set that",
        ),
        (
            {"webhook": {"extraEnv": [{"name": "LMKV_LOG_LEVLE", "value": "debug"}]}},
            "webhook.extraEnv has LMKV_LOG_LEVLE, which is no key of lmkv; did you mean log_level?",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_key_that_is_unknown_or_follows_from_a_value_names_what_is_meant(
    values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(helm_python.HelmRenderError) as refusal:
        render(values)
    assert sentence in str(refusal.value)
    assert sentence in str(helm_python.lint(CHART, values, strict=True))


def test_the_store_of_nodes_is_a_key_of_theirs_or_a_secret_that_they_read(tmp_path: Path) -> None:
    named = render({"node": {"remote": {"url": "redis://valkey.cache.svc:6379/0"}}})
    assert read_by_process("node.config", named, tmp_path).remote_url == "redis://valkey.cache.svc:6379/0"
    secret = render({"node": {"remote": {"existingSecret": "store"}}})
    assert read_by_process("node.config", secret, tmp_path).remote_url == ""
    (node,) = find(secret, "DaemonSet/demo-lmkv-node")["spec"]["template"]["spec"]["containers"]
    reference = {"secretKeyRef": {"name": "store", "key": "url"}}
    assert variable(node, "LMKV_REMOTE_URL") == {"valueFrom": reference}
    additions = yaml.safe_load(
        find(
            render({"node": {"mode": "sidecar", "remote": {"existingSecret": "store"}}, "webhook": {"enabled": True}}),
            "ConfigMap/demo-lmkv-webhook",
        )["data"]["pods.yaml"]
    )
    assert variable(additions["both"]["init_containers"][0], "LMKV_REMOTE_URL") == {"valueFrom": reference}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"max_salt_size": "5000MB"}, "max_salt_size is 5000MB, more than the 4 GiB of node.maxLocalCpuSize: lower it"),
        (
            {"max_salt_disk_size": "1T"},
            "max_salt_disk_size is 1T, more than the 100 GiB of node.maxLocalDiskSize: lower",
        ),
        ({"max_salt_remote_size": 1}, "max_salt_remote_size is for a store that nodes share, and there is none: set"),
        ({"max_salt_size": 4, "max_salt_disk_size": "102400Mi", "max_salt_remote_size": 0}, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_quota_that_is_larger_than_its_tier_is_refused_with_its_name(config: dict[str, Any], sentence: str) -> None:
    node = {"maxLocalCpuSize": 4, "maxLocalDiskSize": 100, "diskVolume": {"emptyDir": {}}, "config": config}
    _, refusal = rendered_or_refused({"node": node})
    assert sentence in refusal
    assert bool(sentence) == bool(refusal)


@pytest.mark.parametrize(("stop", "grace"), [(5, 30), (60, 70), ("2m", 130)])
def test_a_proxy_has_the_time_to_stop_that_its_configuration_promises(stop: int | str, grace: int) -> None:
    manifests = render(values_with("proxy.config", {"stop_timeout": stop}))
    assert (
        find(manifests, "Deployment/demo-lmkv-proxy")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        == grace
    )
