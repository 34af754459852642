"""LMCache's configuration files and variables, read by lmkv's processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.config import (
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    ProxyConfig,
    load,
    to_environment,
)
from lmkv.config.sources import REPLACED
from tests.lmkv.config.files import (
    EMPTY,
    LMCACHE_DECODE,
    LMCACHE_LOOKUP,
    LMCACHE_P2P,
    LMCACHE_PREFILL,
    refusal,
    written,
)


def test_the_p2p_configuration_of_lmcache_works_as_it_stands(tmp_path: Path) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, LMCACHE_P2P), env=EMPTY)
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
    config = load(ConnectorConfig, file=written(tmp_path, LMCACHE_LOOKUP), env=EMPTY)
    assert config.instance_id == "lmcache_default_instance"
    assert len(config.notices) == 3
    assert config.coordinator_address == ("localhost:9001",)


@pytest.mark.parametrize(
    ("seed", "role", "ignored"),
    [
        (LMCACHE_PREFILL, "sender", ["pd_proxy_host", "pd_proxy_port"]),
        (LMCACHE_DECODE, "receiver", ["pd_peer_alloc_port"]),
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


def test_a_notice_names_the_variable_that_a_key_was_in() -> None:
    env = {"LMCACHE_EXTRA_CONFIG": '{"remote_serde": "cachegen", "min_retrieve_tokens": 9}'}
    config = load(ConnectorConfig, env=env)
    assert config.min_retrieve_tokens == 9
    taken, ignored = config.notices
    assert taken.endswith("min_retrieve_tokens of LMCACHE_EXTRA_CONFIG in the environment")
    assert ignored.startswith("remote_serde of LMCACHE_EXTRA_CONFIG in the environment is ignored: ")


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
        f"environment; local_cpu, enable_xpyd, lookup_timeout_ms of extra_config in {file}",
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
