"""Values of configuration keys: how they are written, and refusals of invalid ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkv.config import (
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    load,
)
from lmkv.errors import ConfigError
from tests.lmkv.config.files import EMPTY, refusal, written


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
        ("local_disk: a/b\nmax_local_disk_size: 10", "local_disk", (f"{Path.cwd()}/a/b",)),
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
        ("max_local_cpu_size: 0", 'max_local_cpu_size must be a size above 0 such as 5 (GiB) or "512MiB"'),
        ("local_disk: [/a, /a]", "local_disk must be a path"),
        ("local_disk: ~/a", "local_disk must be a path"),
        ("local_disk: s3://a", "local_disk must be a path"),
        ("local_disk: file://", "local_disk must be a path"),
        ("max_local_disk_size: -1", "max_local_disk_size must be a size"),
        ("max_local_cpu_size: 5XB", "not '5XB' (in {file})"),
        ("max_local_cpu_size: 1e400", "max_local_cpu_size must be a size"),
        ("max_local_cpu_size: [5]", "max_local_cpu_size must be a size"),
        ("load_timeout: 0", 'load_timeout must be a time above 0 such as 1.5 (seconds) or "500ms"'),
        ("load_timeout: .inf", "load_timeout must be a time"),
        ("node_linger: -1", 'node_linger must be a time such as 60 (seconds), "2m" or 0'),
        ("lookup_timeout_ms: 3s", "lookup_timeout_ms must be a number of milliseconds above 0, not '3s'"),
        ("cache_policy: LFU", "cache_policy must be LRU or ARC, not 'LFU': lmkv has no such policy"),
        ("cache_policy: 5", "cache_policy must be one of learned, lru, arc, not 5"),
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


def test_a_bad_secret_is_not_logged() -> None:
    message = refusal(flags={"cluster_secret": 12345})
    assert (
        message
        == "--cluster-secret must be text (in quotes, if it looks like a number), not what it is (on the command line)"
    )


def test_a_secret_is_not_shown() -> None:
    assert "hush" not in repr(ConnectorConfig(cluster_secret="hush"))
    assert "hush" not in repr(CoordinatorConfig(cluster_secret="hush"))


def test_a_disk_must_say_how_much_of_it_chunks_may_take() -> None:
    with pytest.raises(ConfigError, match="max_local_disk_size is required with local_disk"):
        NodeConfig(local_disk=("/a",))
    config = NodeConfig(instance_id="n", local_disk=("/a", "/b"), max_local_disk_size=2)
    assert config.disk_folders == [Path("/a/n"), Path("/b/n")]
    assert config.disk_bytes == 2 << 30
    assert NodeConfig().disk_folders == []


LMCACHE_DISK = """\
chunk_size: 256
local_cpu: False
max_local_cpu_size: 5
local_disk: "file://local_disk/"
max_local_disk_size: 5
"""
"""The example of LMCache's page on its disk."""


def test_lmcaches_example_of_a_disk_is_followed(tmp_path: Path) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, LMCACHE_DISK), env=EMPTY)
    assert config.local_disk == (f"{Path.cwd()}/local_disk",)
    assert (config.stores_chunks, config.pool_bytes, config.disk_bytes) == (True, 5 << 30, 5 << 30)
    assert config.notices == ()


@pytest.mark.parametrize("where", ["remote_url: valkey://127.0.0.1:6379/0", "local_disk: /a\nmax_local_disk_size: 1"])
def test_without_a_tier_in_host_memory_chunks_are_stored_where_else_they_can(tmp_path: Path, where: str) -> None:
    config = load(ConnectorConfig, file=written(tmp_path, f"local_cpu: false\n{where}"), env=EMPTY)
    assert config.stores_chunks


def test_a_node_that_would_cache_nothing_is_refused_or_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="local_cpu is false, so that nothing is cached; set local_disk"):
        NodeConfig(local_cpu=False, enable_pd=False)
    (notice,) = load(NodeConfig, file=written(tmp_path, "local_cpu: false"), env=EMPTY).notices
    assert notice.startswith("local_cpu is false: only handoffs are cached; set local_disk or remote_url")
    assert load(NodeConfig, file=written(tmp_path, "local_cpu: false\npd_role: sender"), env=EMPTY).notices == ()
