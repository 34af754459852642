from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.config import (
    ClientConfig,
    Config,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    ProxyConfig,
    add_arguments,
    as_written,
    from_arguments,
    keys,
    load,
    to_environment,
)
from lmkv.config.spellings import REPLACED
from lmkv.errors import ConfigError

PROCESSES = (NodeConfig, ConnectorConfig, CoordinatorConfig, ProxyConfig, ClientConfig)
EMPTY: Mapping[str, str] = {}

SEED_P2P = """\
chunk_size: 256
local_cpu: True
max_local_cpu_size: 100
enable_async_loading: True
# P2P configurations
enable_p2p: True
p2p_host: "localhost"
p2p_init_ports: 8200
p2p_lookup_ports: 8201
transfer_channel: "nixl"
# Controller configurations
enable_controller: True
lmcache_instance_id: "lmcache_instance_1"
controller_pull_url: "localhost:8300"
controller_reply_url: "localhost:8400"
lmcache_worker_ports: 8500
extra_config:
lookup_backoff_time: 0.001
"""
SEED_PREFILL = """\
local_cpu: False
enable_pd: True
transfer_channel: "nixl"
pd_role: "sender"
pd_proxy_host: "localhost"
pd_proxy_port: 7500
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
"""
SEED_DECODE = """\
local_cpu: False
enable_pd: True
transfer_channel: "nixl"
pd_role: "receiver"
pd_peer_host: "localhost"
pd_peer_init_port: 7300
pd_peer_alloc_port: 7400
pd_buffer_size: 1073741824
pd_buffer_device: "cuda"
"""
SEED_LOOKUP = """\
chunk_size: 256
local_cpu: True
max_local_cpu_size: 5
enable_controller: True
lmcache_instance_id: "lmcache_default_instance"
controller_url: "localhost:9001"
distributed_url: "localhost:8002"
lmcache_worker_port: 8001
"""


def written(folder: Path, text: str) -> Path:
    file = folder / "lmkv.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def refusal(cls: type[Config] = ConnectorConfig, **places: Any) -> str:
    """The one line that a configuration is refused with."""
    with pytest.raises(ConfigError) as raised:
        load(cls, **{"env": EMPTY, **places})
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = load(ConnectorConfig, env=EMPTY)
    assert config == ConnectorConfig()
    assert (config.p2p_host, config.p2p_port, config.transfer_channel) == ("127.0.0.1", 0, "auto")
    assert config.nixl_backends == ("UCX",)
    assert config.pool_bytes == 5 << 30
    assert (config.node_linger, config.grant_ttl) == (60.0, 30.0)
    assert (config.lookup_timeout, config.load_timeout, config.coordinator_timeout) == (0.1, 1.0, 0.05)
    assert (config.chunk_size, config.save_partial_chunks, config.save_decode_cache) == (256, True, True)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,64}", config.instance_id)
    coordinator = load(CoordinatorConfig, env=EMPTY)
    assert (coordinator.host, coordinator.port, coordinator.lease_ttl) == ("127.0.0.1", 9000, 3.0)
    assert coordinator.monitor_ports == {}
    assert (coordinator.grpc_ports, coordinator.http_ports) == ({"port": 9000}, {"http_port": 9001})


def test_flags_win_over_environment_over_file_over_defaults(tmp_path: Path) -> None:
    file = written(tmp_path, "chunk_size: 1\nload_timeout: 1.5\nnode_linger: 2\n")
    env = {"LMKV_CHUNK_SIZE": "2", "LMKV_LOAD_TIMEOUT": "2500ms"}
    config = load(ConnectorConfig, file=file, env=env, flags={"chunk_size": "3", "p2p_port": None})
    assert (config.chunk_size, config.load_timeout, config.node_linger, config.grant_ttl) == (3, 2.5, 2.0, 30.0)


def test_an_alias_wins_over_the_key_of_a_weaker_place(tmp_path: Path) -> None:
    file = written(tmp_path, "p2p_port: 1\n")
    assert load(NodeConfig, file=file, env={"LMKV_P2P_INIT_PORTS": "2"}).p2p_port == 2


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "port: 1234\n")
    assert load(CoordinatorConfig, env={"LMKV_CONFIG_FILE": str(file)}).port == 1234
    other = tmp_path / "other.yaml"
    other.write_text("port: 5\n")
    assert load(CoordinatorConfig, file=other, env={"LMKV_CONFIG_FILE": str(file)}).port == 5
    assert load(CoordinatorConfig, env={"LMKV_CONFIG_FILE": ""}).port == 9000


def test_all_processes_may_share_one_file(tmp_path: Path) -> None:
    file = written(tmp_path, "chunk_size: 64\nport: 9001\np2p_port: 8200\nlog_level: debug\n")
    assert load(NodeConfig, file=file, env=EMPTY).log_level == "debug"
    assert load(ConnectorConfig, file=file, env=EMPTY).chunk_size == 64
    assert load(CoordinatorConfig, file=file, env=EMPTY).port == 9001
    assert load(ClientConfig, file=file, env=EMPTY) == ClientConfig()


def test_the_p2p_configuration_of_lmcache_works_as_it_stands(tmp_path: Path) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, SEED_P2P), env=EMPTY)
    assert config.instance_id == "lmcache_instance_1"
    assert (config.p2p_host, config.p2p_port) == ("localhost", 8200)
    assert config.coordinator_address == ("localhost:8300",)
    assert config.pool_bytes == 100 << 30
    assert {notice.split()[0] for notice in config.notices} == {
        "p2p_lookup_ports",
        "enable_controller",
        "controller_reply_url",
        "lmcache_worker_ports",
        "lookup_backoff_time",
    }
    assert f"enable_controller in {tmp_path}/lmkv.yaml is ignored: a coordinator is used if" in "\n".join(
        config.notices
    )


def test_the_lookup_configuration_of_lmcache_works_as_it_stands(tmp_path: Path) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, SEED_LOOKUP), env=EMPTY)
    assert config.instance_id == "lmcache_default_instance"
    assert len(config.notices) == 3
    assert config.coordinator_address == ("localhost:9001",)


@pytest.mark.parametrize(
    ("seed", "role", "ignored"),
    [
        (SEED_PREFILL, "sender", ["pd_proxy_host", "pd_proxy_port"]),
        (SEED_DECODE, "receiver", ["pd_peer_alloc_port"]),
    ],
)
def test_the_disaggregated_configuration_of_lmcache_works_as_it_stands(
    tmp_path: Path, seed: str, role: str, ignored: list[str]
) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, seed), env=EMPTY)
    assert (config.enable_pd, config.pd_role, config.pd_buffer_device) == (True, role, "cuda")
    assert config.instance_id.endswith(f"-{role}"), "both may be on one host"
    assert config.pool_bytes == config.pd_buffer_bytes == 1 << 30, "without a cache the pool is the buffer"
    assert (config.p2p_host, config.p2p_port) == (("localhost", 7300) if role == "receiver" else ("127.0.0.1", 0))
    assert [notice.split()[0] for notice in config.notices] == ignored


def test_the_buffer_of_handoffs_is_part_of_the_pool() -> None:
    assert NodeConfig(max_local_cpu_size=4).pd_buffer_bytes == 2 << 30
    assert NodeConfig(max_local_cpu_size=4, pd_buffer_size=3 << 30).pd_buffer_bytes == 3 << 30
    assert NodeConfig(max_local_cpu_size=4, pd_buffer_size=5 << 30).pd_buffer_bytes == 4 << 30
    assert load(NodeConfig, env={"LMKV_PD_BUFFER_SIZE": "3GB"}).pd_buffer_size == 3 << 30
    assert NodeConfig(max_local_cpu_size=4, local_cpu=False).pool_bytes == 4 << 30


def test_the_extra_config_of_an_engine_works_as_it_stands() -> None:
    extra = {"discard_partial_chunks": False, "lmcache_rpc_port": "producer1"}
    config = load(ConnectorConfig, env=EMPTY, flags=extra, flags_place="kv_connector_extra_config")
    assert config.save_partial_chunks
    assert config.notices == (
        "lmcache_rpc_port in kv_connector_extra_config is ignored: engine and node use a unix socket in runtime_dir",
    )


def test_the_environment_of_an_engine_in_a_cluster_works_as_it_stands() -> None:
    env = {
        "LMKV_LOCAL_CPU": "True",
        "LMKV_CHUNK_SIZE": "256",
        "LMKV_MAX_LOCAL_CPU_SIZE": "100",
        "LMKV_PD_PROXY_PORT": "7500",
    }
    config = load(ConnectorConfig, env=env)
    assert (config.local_cpu, config.chunk_size, config.pool_bytes) == (True, 256, 100 << 30)
    assert config.notices == (f"LMKV_PD_PROXY_PORT in the environment is ignored: {REPLACED['pd_proxy_port']}",)
    passed_on = to_environment(config, env)
    assert "LMKV_PD_PROXY_PORT" not in passed_on
    assert load(ConnectorConfig, env=passed_on) == config


def test_lmcaches_variables_count_where_lmkvs_own_set_nothing(tmp_path: Path) -> None:
    file = tmp_path / "lmcache.yaml"
    file.write_text("chunk_size: 64\nlocal_cpu: False\nenable_xpyd: True\nextra_config: {lookup_timeout_ms: 70}\n")
    env = {"LMCACHE_CONFIG_FILE": str(file), "LMCACHE_CHUNK_SIZE": "128", "LMCACHE_NIXL_ROLE": "sender"}
    config = load(ConnectorConfig, env=env)
    assert (config.chunk_size, config.local_cpu, config.enable_pd, config.pd_role) == (128, False, True, "sender")
    assert config.lookup_timeout == 0.07
    assert config.notices == (
        "using LMCache's configuration where lmkv's own sets nothing: LMCACHE_CHUNK_SIZE, LMCACHE_NIXL_ROLE in the "
        f"environment; local_cpu, enable_xpyd, lookup_timeout_ms in {file}",
    )


def test_lmkvs_own_configuration_wins_over_lmcaches_wherever_it_is_written(tmp_path: Path) -> None:
    lmcaches, own = tmp_path / "lmcache.yaml", written(tmp_path, "local_cpu: true\n")
    lmcaches.write_text("local_cpu: False\nmax_local_cpu_size: 3\np2p_init_ports: 8200\n")
    env = {"LMCACHE_CONFIG_FILE": str(lmcaches), "LMKV_CONFIG_FILE": str(own)}
    env |= {"LMCACHE_CHUNK_SIZE": "64", "LMKV_CHUNK_SIZE": "128", "LMCACHE_MAX_LOCAL_CPU_SIZE": "4"}
    config = load(ConnectorConfig, env=env, flags={"p2p_port": "7"})
    assert (config.local_cpu, config.chunk_size, config.max_local_cpu_size, config.p2p_port) == (True, 128, 4.0, 7)
    assert config.notices == (
        "using LMCache's configuration where lmkv's own sets nothing: LMCACHE_MAX_LOCAL_CPU_SIZE in the environment",
        f"lmkv's own configuration overrides LMCache's: local_cpu, p2p_init_ports in {lmcaches}; LMCACHE_CHUNK_SIZE in "
        "the environment",
    )


def test_what_lmkv_cannot_take_of_lmcaches_variables_is_named_and_stops_nothing() -> None:
    env = {
        "LMCACHE_REMOTE_URL": "lm://store:65432",
        "LMCACHE_USE_EXPERIMENTAL": "True",
        "LMCACHE_ENABLE_CONTROLLER": "True",
        "LMCACHE_CHUNK_SIZE": "",
        "LMCACHE_CONTROLLER_PORT": "tcp://10.0.0.1:9000",
        "LMCACHE_CONTROLLER_SERVICE_HOST": "10.0.0.1",
    }
    config = load(ConnectorConfig, env=env)
    assert config == ConnectorConfig()
    url, experimental, controller = config.notices
    assert url.startswith("LMCACHE_REMOTE_URL in the environment is ignored: must be valkey://")
    assert experimental == "LMCACHE_USE_EXPERIMENTAL in the environment is ignored: lmkv has no such key"
    assert controller == f"LMCACHE_ENABLE_CONTROLLER in the environment is ignored: {REPLACED['enable_controller']}"
    assert load(CoordinatorConfig, env=env).notices == ()


def test_keys_of_lmcaches_controller_are_the_coordinators_alone() -> None:
    env = {"LMCACHE_CONTROLLER_PORT": "9123"}
    assert load(CoordinatorConfig, env=env).port == 9123
    assert load(ProxyConfig, env=env) == ProxyConfig()


def test_a_file_of_lmcaches_that_cannot_be_read_is_refused_with_its_variable(tmp_path: Path) -> None:
    line = refusal(env={"LMCACHE_CONFIG_FILE": str(tmp_path / "none.yaml")})
    assert line.startswith(f"cannot read the configuration file {tmp_path / 'none.yaml'}")
    assert line.endswith("it is set by LMCACHE_CONFIG_FILE")


def test_notices_do_not_make_configurations_differ(tmp_path: Path) -> None:
    file = written(tmp_path, "enable_controller: true\n")
    assert load(NodeConfig, file=file, env=EMPTY).notices
    assert load(NodeConfig, file=file, env=EMPTY) == NodeConfig()


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("p2p_init_ports: [8200]", "p2p_port", 8200),
        ("p2p_port: 65535", "p2p_port", 65535),
        ("save_unfull_chunk: true", "save_partial_chunks", True),
        ("discard_partial_chunks: true", "save_partial_chunks", False),
        ("discard_partial_chunks: 'off'", "save_partial_chunks", True),
        ("lookup_timeout_ms: 3000", "lookup_timeout", 3.0),
        ("lookup_timeout_ms: '250'", "lookup_timeout", 0.25),
        ("lookup_timeout: 250ms", "lookup_timeout", 0.25),
        ("node_linger: 2m", "node_linger", 120.0),
        ("node_linger: 0", "node_linger", 0.0),
        ("max_local_cpu_size: 512MB", "max_local_cpu_size", 0.5),
        ("local_disk: /a\nmax_local_disk_size: 1TB", "local_disk", ("/a",)),
        ('local_disk: "file:///a/,/b"\nmax_local_disk_size: 10', "local_disk", ("/a/", "/b")),
        ("local_disk: [/a, /b]\nmax_local_disk_size: 512MB", "max_local_disk_size", 0.5),
        ("nixl_backends: [UCX, GDS]", "nixl_backends", ("UCX", "GDS")),
        ("nixl_backends: UCX, GDS", "nixl_backends", ("UCX", "GDS")),
        ("node_address: unix:/run/lmkv/engine.sock", "node_address", "/run/lmkv/engine.sock"),
        ("coordinator_address: '[::1]:9000'", "coordinator_address", ("[::1]:9000",)),
        ("coordinator: lmkv.example:9000", "coordinator_address", ("lmkv.example:9000",)),
        ("coordinator_address: a:9000, b:9001", "coordinator_address", ("a:9000", "b:9001")),
        ("coordinator_address: [a:9000, b:9001]", "coordinator_address", ("a:9000", "b:9001")),
        ("p2p_host: fd00::7", "p2p_host", "[fd00::7]"),
        ("p2p_host: '[fd00::7]'", "p2p_host", "[fd00::7]"),
        ("log_level: WARNING", "log_level", "warning"),
        ("transfer_channel: NIXL", "transfer_channel", "nixl"),
        ("local_cpu: 0", "local_cpu", False),
        ("eviction_policy: ARC", "eviction_policy", "arc"),
        ("cache_policy: LRU", "eviction_policy", "lru"),
        ("pool_path: null", "pool_path", ""),
        ("pool_huge_pages: Always", "pool_huge_pages", "always"),
        ("numa_node: 1", "numa_node", "1"),
        ("numa_node: None", "numa_node", "none"),
        ("", "chunk_size", 256),
    ],
)
def test_values_are_read_as_people_write_them(tmp_path: Path, text: str, name: str, value: object) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, text), env=EMPTY)
    assert getattr(config, name) == value
    assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("flag", "ports"),
    [("monitor_ports", '{"pull": 8300, "reply": 8400}'), ("monitor_ports", {"pull": 8300, "reply": 8400})],
)
def test_the_coordinator_takes_lmcaches_monitor_ports(flag: str, ports: object) -> None:
    assert load(CoordinatorConfig, env=EMPTY, flags={flag: ports}).monitor_ports == {"pull": 8300, "reply": 8400}
    assert load(CoordinatorConfig, env=EMPTY, flags={"monitor_port": "9001"}).monitor_ports == {"pull": 9001}


@pytest.mark.parametrize(
    ("flags", "grpc_ports", "http_ports"),
    [
        ({"port": "9100"}, {"port": 9100}, {"http_port": 9101}),
        ({"port": "0"}, {"port": 0}, {"http_port": 0}),
        ({"port": "65535"}, {"port": 65535}, {"http_port": 0}),
        ({"http_port": "0"}, {"port": 9000}, {"http_port": 0}),
        ({"http_port": "off"}, {"port": 9000}, {}),
        ({"http_port": "-1"}, {"port": 9000}, {}),
        ({"monitor_port": "9001"}, {"monitor_ports['pull']": 9001}, {"port": 9000}),
        ({"monitor_ports": {"pull": 1, "reply": 2}, "http_port": 3},
         {"port": 9000, "monitor_ports['pull']": 1, "monitor_ports['reply']": 2}, {"http_port": 3}),
        ({"monitor_port": "8300", "http_port": "off"}, {"port": 9000, "monitor_ports['pull']": 8300}, {}),
    ],
)  # fmt: skip
def test_the_coordinators_ports_follow_from_its_keys(
    flags: dict[str, Any], grpc_ports: dict[str, int], http_ports: dict[str, int]
) -> None:
    config = load(CoordinatorConfig, env=EMPTY, flags=flags)
    assert (config.grpc_ports, config.http_ports) == (grpc_ports, http_ports)


def test_http_may_be_off_in_a_file_too(tmp_path: Path) -> None:
    assert load(CoordinatorConfig, file=written(tmp_path, "http_port: off\n"), env=EMPTY).http_ports == {}
    assert load(CoordinatorConfig, file=written(tmp_path, "http_port:\n"), env=EMPTY).http_ports == {"http_port": 9001}
    assert "http_port must be a port from 0 to 65535 (0: a free one), or off, not 'on'" in refusal(
        CoordinatorConfig, flags={"http_port": "on"}
    ).replace("--http-port", "http_port")


@pytest.mark.parametrize("word", ["True", "true", "1", "yes", "on", "ON"])
def test_many_words_mean_true(word: str) -> None:
    assert load(ConnectorConfig, env={"LMKV_VERIFY_LOADS": word}).verify_loads


@pytest.mark.parametrize("word", ["False", "false", "0", "no", "off", "OFF"])
def test_many_words_mean_false(word: str) -> None:
    assert not load(ConnectorConfig, env={"LMKV_LOCAL_CPU": word}).local_cpu


def test_an_unknown_key_is_refused_with_the_place_and_a_guess(tmp_path: Path) -> None:
    file = written(tmp_path, "chunk_sise: 256\n")
    assert refusal(file=file) == f"unknown key chunk_sise in {file}; did you mean chunk_size?"
    assert refusal(env={"LMKV_CHUNKSIZE": "2"}) == (
        "unknown key LMKV_CHUNKSIZE in the environment; did you mean LMKV_CHUNK_SIZE?"
    )
    assert (
        refusal(flags={"chunk_sise": 2}) == "unknown key --chunk-sise on the command line; did you mean --chunk-size?"
    )
    assert refusal(flags={"zzz": 2}, flags_place="kv_connector_extra_config") == (
        "unknown key zzz in kv_connector_extra_config"
    )


def test_what_kubernetes_says_of_services_is_no_configuration() -> None:
    """A service called lmkv puts LMKV_PORT=tcp://... into every container."""
    env = {
        "LMKV_PORT": "tcp://10.0.0.1:9000",
        "LMKV_SERVICE_HOST": "10.0.0.1",
        "LMKV_SERVICE_PORT": "9000",
        "LMKV_SERVICE_PORT_GRPC": "9000",
        "LMKV_PORT_9000_TCP": "tcp://10.0.0.1:9000",
        "LMKV_PORT_9000_TCP_ADDR": "10.0.0.1",
        "LMKV_COORDINATOR_PORT": "tcp://10.0.0.1:9000",
        "LMKV_COORDINATOR_SERVICE_HOST": "10.0.0.1",
        "LMKV_COORDINATOR_PORT_9000_TCP_PROTO": "tcp",
    }
    assert load(CoordinatorConfig, env=env) == CoordinatorConfig()
    assert load(CoordinatorConfig, env={"LMKV_PORT": "8000"}).port == 8000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_size: 0", "chunk_size must be a number of tokens above 0, not 0 (in {file})"),
        ("chunk_size: many", "chunk_size must be a number of tokens above 0, not 'many' (in {file})"),
        ("chunk_size: 2.5", "chunk_size must be a number of tokens above 0, not 2.5 (in {file})"),
        ("chunk_size: true", "chunk_size must be a number of tokens above 0, not True (in {file})"),
        ("p2p_port: 65536", "p2p_port must be a port from 0 to 65535 (0: a free one), not 65536 (in {file})"),
        ("p2p_port: -1", "p2p_port must be a port from 0 to 65535 (0: a free one), not -1 (in {file})"),
        (
            "p2p_init_ports: [8200, 8201]",
            "p2p_init_ports must be one port, not [8200, 8201]: one node serves all ranks",
        ),
        ("p2p_init_ports: []", "p2p_init_ports must be one port, not []"),
        ("p2p_host: ''", "p2p_host must be a host name or an address, without port, not ''"),
        ("p2p_host: '10.0.0.1:8200'", "p2p_host must be a host name or an address, without port, not '10.0.0.1:8200'"),
        ("p2p_host: 0.0.0.0", "p2p_host must be an address that peers can reach, not 0.0.0.0: name one of"),
        (
            "transfer_channel: carrier-pigeon",
            "transfer_channel must be one of auto, shm, nixl, tcp, ucx, mooncake, not 'carrier-pigeon'",
        ),
        ("log_level: loud", "log_level must be one of debug, info, warning, error, not 'loud'"),
        ("max_local_cpu_size: 0", 'max_local_cpu_size must be a size above 0 such as 5 (GB) or "512MB"'),
        ("local_disk: a/b", "local_disk must be an absolute path"),
        ("local_disk: [/a, /a]", "local_disk must be an absolute path"),
        ("max_local_disk_size: -1", "max_local_disk_size must be a size"),
        ("max_local_cpu_size: 5XB", "not '5XB' (in {file})"),
        ("max_local_cpu_size: 1e400", "max_local_cpu_size must be a size"),
        ("max_local_cpu_size: [5]", "max_local_cpu_size must be a size"),
        ("load_timeout: 0", 'load_timeout must be a time above 0 such as 1.5 (seconds) or "500ms"'),
        ("load_timeout: .inf", "load_timeout must be a time"),
        ("node_linger: -1", 'node_linger must be a time such as 60 (seconds), "2m" or 0'),
        ("lookup_timeout_ms: 3s", "lookup_timeout_ms must be a number of milliseconds above 0, not '3s'"),
        ("cache_policy: LFU", "cache_policy must be LRU or ARC, not 'LFU': lmkv has no such policy"),
        ("cache_policy: 5", "cache_policy must be one of lru, arc, not 5"),
        ("local_cpu: maybe", "local_cpu must be true or false, not 'maybe'"),
        ("discard_partial_chunks: 2", "discard_partial_chunks must be true or false, not 2"),
        (
            "coordinator_address: localhost",
            "coordinator_address must be host:port, such as 10.0.0.5:9000, or several with commas between, each "
            "another one, not 'localhost'",
        ),
        ("controller_pull_url: tcp://localhost:1", "controller_pull_url must be host:port, such as 10.0.0.5:9000"),
        ("coordinator_address: localhost:0", "coordinator_address must be host:port"),
        ("coordinator_address: localhost:65536", "coordinator_address must be host:port"),
        ("coordinator_address: a:9000,a:9000", "several with commas between, each another one, not 'a:9000,a:9000'"),
        ("instance_id: a b", "instance_id must be 1 to 64 letters, digits, dots, dashes or underscores"),
        ("instance_id: ..", "instance_id must be 1 to 64 letters"),
        ("instance_id: 7", "(in quotes, if it looks like a number), not 7"),
        ("nixl_backends: []", 'nixl_backends must be a list of names, such as ["UCX"], not []'),
        ("nixl_backends: [1]", "nixl_backends must be a list of names"),
        ("nixl_backends: '[UCX'", "nixl_backends must be a list of names"),
        ("node_address: engine.sock", "node_address must be the absolute path of a unix socket, not 'engine.sock'"),
        ("model_id: 8", "model_id must be text (in quotes, if it looks like a number), not 8"),
        ("copy_threads: -1", "copy_threads must be a number of threads from 0 to 1024 (0: lmkv decides), not -1"),
    ],
)
def test_a_bad_value_is_refused_with_key_fix_and_place(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    assert message.format(file=file) in refusal(file=file)
    assert refusal(file=file).endswith(f"(in {file})")


@pytest.mark.parametrize("ports", ['{"pull": 0}', "8300", '{"pull"', '["pull"]', {"pull": "x"}, {1: 2}])
def test_bad_further_ports_are_refused(ports: object) -> None:
    assert '--monitor-ports must be names with ports from 1 to 65535, such as {"pull": 8300}' in refusal(
        CoordinatorConfig, flags={"monitor_ports": ports}
    )


def test_a_bad_value_names_the_variable_or_the_flag() -> None:
    assert refusal(env={"LMKV_CHUNK_SIZE": ""}) == (
        "LMKV_CHUNK_SIZE must be a number of tokens above 0, not '' (in the environment)"
    )
    assert refusal(flags={"load_timeout": "soon"}).startswith("--load-timeout must be a time above 0")


def test_a_bad_secret_is_not_told() -> None:
    message = refusal(flags={"cluster_secret": 12345})
    assert (
        message
        == "--cluster-secret must be text (in quotes, if it looks like a number), not what it is (on the command line)"
    )


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(ConnectorConfig(cluster_secret="hush"))
    assert "hush" not in repr(CoordinatorConfig(cluster_secret="hush"))


def test_two_spellings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "p2p_port: 1\np2p_init_ports: 2\n")
    assert refusal(file=file) == (
        f"p2p_port and p2p_init_ports contradict each other in {file}: both set p2p_port; keep one"
    )
    both = {"LMKV_SAVE_UNFULL_CHUNK": "true", "LMKV_DISCARD_PARTIAL_CHUNKS": "true"}
    assert refusal(env=both) == (
        "LMKV_SAVE_UNFULL_CHUNK and LMKV_DISCARD_PARTIAL_CHUNKS contradict each other in the environment: "
        "both set save_partial_chunks; keep one"
    )


def test_two_spellings_that_agree_are_fine(tmp_path: Path) -> None:
    file = written(tmp_path, "p2p_port: 8200\np2p_init_ports: [8200]\nlookup_timeout: 100ms\nlookup_timeout_ms: 100\n")
    assert load(ConnectorConfig, file=file, env=EMPTY).p2p_port == 8200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_size: [", "{file} is not valid YAML: line 1: "),
        ("a: b: c", "{file} is not valid YAML: line 1: mapping values are not allowed here"),
        (
            "chunk_size: 1\nlocal_cpu: true\nchunk_size: 2\n",
            "{file} is not valid YAML: line 3: chunk_size is set twice",
        ),
        ("- chunk_size", "{file} must hold keys with values, such as `chunk_size: 256`"),
        ("chunk_size", "{file} must hold keys with values"),
        ("chunk_size: !!python/object/apply:os.system ['true']", "{file} is not valid YAML: line 1: "),
        ("7: 8", "unknown key 7 in {file}"),
        ("\x00", "{file} is not valid YAML"),
    ],
)
def test_a_broken_file_is_refused_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = written(tmp_path, text)
    assert message.format(file=file) in refusal(file=file)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "lmkv.yaml"
    file.write_bytes(b"\xff\xfe\xfa\xfa\xfa")
    assert "is not valid YAML" in refusal(file=file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.yaml"
    assert refusal(file=missing) == (
        f"cannot read the configuration file {missing}: No such file or directory; it is set by --config"
    )
    assert refusal(env={"LMKV_CONFIG_FILE": str(tmp_path)}).endswith("Is a directory; it is set by LMKV_CONFIG_FILE")


def test_a_configuration_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="p2p_port must be a port from 0 to 65535") as raised:
        NodeConfig(p2p_port=70_000)
    assert raised.value.metadata == {"key": "p2p_port"}


def test_a_disk_must_say_how_much_of_it_chunks_may_take() -> None:
    with pytest.raises(ConfigError, match="max_local_disk_size must be set where local_disk is"):
        NodeConfig(local_disk=("/a",))
    config = NodeConfig(instance_id="n", local_disk=("/a", "/b"), max_local_disk_size=2)
    assert config.disk_folders == [Path("/a/n"), Path("/b/n")]
    assert config.disk_bytes == 2 << 30
    assert NodeConfig().disk_folders == []


def test_a_configuration_never_changes() -> None:
    config = NodeConfig()
    with pytest.raises(FrozenInstanceError):
        config.p2p_port = 1  # type: ignore[misc]


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
    "chunk_size": st.integers(1, 1 << 20),
    "node_address": st.sampled_from(["", "/run/a b.sock"]),
    "cluster_secret": text,
    "model_id": text,
}


@settings(deadline=None)
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


def parsed(cls: type[Config], *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser, cls)
    return parser.parse_args(argv)


def test_every_key_is_a_flag() -> None:
    args = parsed(
        ConnectorConfig,
        "--max-local-cpu-size",
        "512MB",
        "--enable-p2p",
        "false",
        "--verify-loads",
        "--p2p-init-ports",
        "9",
    )
    config = from_arguments(args, ConnectorConfig, env={"LMKV_P2P_PORT": "7"})
    assert (config.max_local_cpu_size, config.enable_p2p, config.verify_loads, config.p2p_port) == (0.5, False, True, 9)


def test_the_command_lines_of_lmcache_work_as_they_stand() -> None:
    ports = '{"pull": 8300, "reply": 8400, "heartbeat": 8082}'
    args = parsed(CoordinatorConfig, "--host", "localhost", "--port", "9000", "--monitor-ports", ports)
    assert from_arguments(args, CoordinatorConfig, env=EMPTY).monitor_ports == {
        "pull": 8300,
        "reply": 8400,
        "heartbeat": 8082,
    }
    args = parsed(CoordinatorConfig, "--host", "localhost", "--port", "9000", "--monitor-port", "9001")
    assert from_arguments(args, CoordinatorConfig, env=EMPTY).monitor_ports == {"pull": 9001}


def test_a_flag_names_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "p2p_port: 4\n")
    assert from_arguments(parsed(NodeConfig, "--config", str(file)), NodeConfig, env=EMPTY).p2p_port == 4


def test_flags_that_contradict_each_other_are_refused() -> None:
    args = parsed(NodeConfig, "--p2p-port", "1", "--p2p-init-ports", "2")
    with pytest.raises(ConfigError, match="--p2p-port and --p2p-init-ports contradict each other on the command line"):
        from_arguments(args, NodeConfig, env=EMPTY)


@pytest.mark.parametrize("cls", PROCESSES)
def test_help_explains_every_key(cls: type[Config]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser, cls)
    shown = " ".join(parser.format_help().split())
    for name, declared in keys(cls).items():
        assert declared.doc.endswith(".")
        if declared.kind.secret:
            assert f"--{name.replace('_', '-')} " not in shown
        else:
            assert f"--{name.replace('_', '-')} " in shown
            assert declared.doc in shown


@pytest.mark.parametrize("cls", PROCESSES)
def test_the_documentation_lists_every_key_with_default_and_aliases(cls: type[Config]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, declared in keys(cls).items():
        aliases = ", ".join(f"`{alias.name}`" for alias in declared.aliases) or "-"
        assert f"| `{name}` | {declared.default} | {declared.doc} | {aliases} |" in page


def test_the_documentation_lists_every_key_that_was_replaced() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
    for name, instead in REPLACED.items():
        assert f"| `{name}` | {instead} |" in page


def test_paths_meet_in_the_runtime_dir(short_folder: Path) -> None:
    config = NodeConfig(runtime_dir=str(short_folder), instance_id="a-1")
    assert config.runtime_path == short_folder
    assert config.engine_socket == short_folder / "a-1" / "engine.sock"
    assert config.pool_socket == short_folder / "a-1" / "pool.sock"
    assert config.lock_path == short_folder / "a-1" / "lock"
    assert not (short_folder / "a-1").exists()


def test_the_runtime_dir_is_for_this_user_only(tmp_path: Path) -> None:
    config = NodeConfig(runtime_dir=str(tmp_path / "new"), instance_id="a-1")
    assert config.make_instance_dir() == tmp_path / "new" / "a-1"
    assert config.make_instance_dir().stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_a_shared_runtime_dir_stays_as_open_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    NodeConfig(runtime_dir=str(tmp_path)).make_instance_dir()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_the_default_runtime_dir_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert NodeConfig().runtime_path == tmp_path / "lmkv"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert NodeConfig().runtime_path == Path(f"/tmp/lmkv-{os.getuid()}")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert NodeConfig().runtime_path == Path(f"/tmp/lmkv-{os.getuid()}")


def test_a_default_runtime_dir_that_is_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "lmkv").mkdir()
    (tmp_path / "lmkv").chmod(0o777)
    with pytest.raises(ConfigError, match=r"runtime_dir: .* is not this user's alone"):
        NodeConfig().make_instance_dir()
    (tmp_path / "lmkv").rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "lmkv").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="runtime_dir"):
        NodeConfig().make_instance_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_an_instance_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    config = NodeConfig(runtime_dir=str(tmp_path), instance_id="a-1")
    os.chown(config.make_instance_dir(), 12345, -1)
    with pytest.raises(ConfigError, match=r"runtime_dir: .*a-1 belongs to user 12345"):
        config.make_instance_dir()


def test_an_instance_folder_that_any_user_may_write_to_or_a_link_is_refused(tmp_path: Path) -> None:
    config = NodeConfig(runtime_dir=str(tmp_path), instance_id="a-1")
    config.make_instance_dir().chmod(0o777)
    with pytest.raises(ConfigError, match="any user may write to it"):
        config.make_instance_dir()
    (tmp_path / "a-1").rename(tmp_path / "elsewhere")
    (tmp_path / "a-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is no folder"):
        config.make_instance_dir()


def test_a_runtime_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"runtime_dir: cannot make .*file"):
        NodeConfig(runtime_dir=str(tmp_path / "file" / "dir")).make_instance_dir()


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    config = NodeConfig(runtime_dir="/" + "x" * 90, instance_id="a-1")
    with pytest.raises(ConfigError, match=r"runtime_dir makes the socket path .* 107 bytes long; at most 100 work"):
        _ = config.engine_socket


@pytest.mark.parametrize(
    ("env", "flags", "shown"),
    [
        ({"LMKV_LOCAL_DISK": "/tmp/disk"}, {}, "LMKV_LOCAL_DISK"),
        ({"LMCACHE_LOCAL_DISK": "/tmp/disk"}, {}, "LMCACHE_LOCAL_DISK"),
        ({}, {"local_disk": "/tmp/disk"}, "--local-disk"),
    ],
)
def test_a_conflict_of_two_keys_names_them_as_they_were_written(
    env: dict[str, str], flags: dict[str, str], shown: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^max_local_disk_size must be set where {shown} is"):
        load(NodeConfig, env=env, flags=flags)


def test_words_of_a_message_are_not_taken_for_keys() -> None:
    written = {"port": "--port", "p2p_port": "LMKV_P2P_PORT"}
    said = "port 1 is in use; set port and p2p_port (LMKV_P2P_PORT) to a free port"
    expected = "--port 1 is in use; set port and LMKV_P2P_PORT (LMKV_P2P_PORT) to a free port"
    assert as_written(said, written) == expected
