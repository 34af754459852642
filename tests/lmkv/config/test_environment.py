"""The environment in which a child process loads the same configuration."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.config import (
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    load,
    to_environment,
)

text = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


seconds = st.floats(min_value=1e-9, max_value=31_536_000.0)


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "instance_id": st.from_regex(r"\A(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,64}\Z"),
    "coordinator_address": st.sampled_from([(), ("localhost:8300",), ("[::1]:9",), ("a.b-c.example:65535", "b:1")]),
    "p2p_host": st.sampled_from(["localhost", "10.0.0.1", "fd00::1", "[fd00::1]"]),
    "p2p_port": st.integers(0, 65535),
    "nixl_backends": st.lists(text.filter(bool), min_size=1, max_size=3).map(tuple),
    "max_local_cpu_size": st.floats(min_value=2**-30, max_value=2**20),
    "pool_path": text,
    "pool_huge_pages": st.sampled_from(["auto", "always", "never"]),
    "numa_node": st.sampled_from(["auto", "none", "0", "1023"]),
    "runtime_dir": text,
    "node_linger": st.floats(min_value=0, max_value=31_536_000.0),
    "grant_ttl": seconds,
    "coordinator_timeout": seconds,
    "lookup_timeout": seconds,
    "log_level": st.sampled_from(["debug", "info", "warning", "error"]),
    "enable_p2p": st.booleans(),
    "local_cpu": st.booleans(),
    "save_partial_chunks": st.booleans(),
    "hash_scheme": st.sampled_from(["sha256-16", "sha256-pages"]),
    "chunk_size": st.integers(1, 1 << 20),
    "node_address": st.sampled_from(["", "/run/a b.sock"]),
    "cluster_secret": text,
    "model_id": text,
    "weight_version": text,
}


@settings(deadline=None, max_examples=30)
@given(st.fixed_dictionaries({}, optional=VALUES))
def test_a_child_process_gets_exactly_the_same_configuration(values: dict[str, Any]) -> None:
    config = ConnectorConfig(**values)
    environment = to_environment(config)
    assert load(ConnectorConfig, env=environment) == config
    node = config.node_config()
    assert type(node) is NodeConfig
    assert load(NodeConfig, env=to_environment(node)) == node
    assert load(NodeConfig, env=environment) == node


@settings(deadline=None)
@given(
    st.dictionaries(text, st.integers(1, 65535), max_size=3), st.integers(0, 65535), st.none() | st.integers(-1, 65535)
)
def test_a_coordinators_configuration_survives_the_environment_too(
    ports: dict[str, int], port: int, http_port: int | None
) -> None:
    config = CoordinatorConfig(monitor_ports=ports, port=port, http_port=http_port)
    assert load(CoordinatorConfig, env=to_environment(config)) == config


def test_a_child_inherits_everything_but_our_own_variables() -> None:
    inherited = {"PATH": "/bin", "UCX_TLS": "tcp", "LMKV_CONFIG_FILE": "x.yaml", "LMKV_P2P_INIT_PORTS": "7"}
    inherited |= {"LMCACHE_CONFIG_FILE": "y.yaml", "LMCACHE_P2P_INIT_PORTS": "9"}
    environment = to_environment(NodeConfig(p2p_port=8), inherited)
    assert (environment["PATH"], environment["UCX_TLS"]) == ("/bin", "tcp")
    assert environment["LMKV_P2P_PORT"] == "8"
    assert not {"LMKV_CONFIG_FILE", "LMKV_P2P_INIT_PORTS"} & environment.keys()
    assert not any(name.startswith("LMCACHE_") for name in environment)
    assert inherited["LMKV_CONFIG_FILE"] == "x.yaml"


def test_the_cluster_secret_does_not_reach_the_node() -> None:
    node = ConnectorConfig(cluster_secret="hush").node_config()
    assert "hush" not in to_environment(node).values()
