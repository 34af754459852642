"""Sources of a configuration, their order, and refusals of unknown keys and broken files."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from lmkv.config import (
    ClientConfig,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    as_written,
    load,
)
from lmkv.config.sources import MAX_VALUES
from lmkv.errors import ConfigError
from tests.lmkv.config.files import EMPTY, refusal, written


def test_the_defaults_are_those_of_the_documentation() -> None:
    config = load(ConnectorConfig, env=EMPTY)
    assert config == ConnectorConfig()
    assert (config.p2p_host, config.p2p_port, config.transfer_channel) == ("127.0.0.1", 0, "auto")
    assert config.nixl_backends == ("UCX",)
    assert config.pool_bytes == 5 << 30
    assert (config.node_linger, config.grant_ttl) == (900.0, 30.0)
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


@pytest.mark.parametrize(("count", "reason"), [(MAX_VALUES - 1, "must hold keys"), (MAX_VALUES, "has more than")])
def test_a_file_has_a_bounded_number_of_values(tmp_path: Path, count: int, reason: str) -> None:
    file = written(tmp_path, f"[{', '.join('0' * count)}]\n")
    with pytest.raises(ConfigError, match=reason):
        load(NodeConfig, file=file, env=EMPTY)


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


def test_notices_do_not_make_configurations_differ(tmp_path: Path) -> None:
    file = written(tmp_path, "enable_controller: true\n")
    assert load(NodeConfig, file=file, env=EMPTY).notices
    assert load(NodeConfig, file=file, env=EMPTY) == NodeConfig()


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


def test_a_configuration_never_changes() -> None:
    config = NodeConfig()
    with pytest.raises(FrozenInstanceError):
        config.p2p_port = 1  # type: ignore[misc]


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
    with pytest.raises(ConfigError, match=rf"^max_local_disk_size is required with {shown};"):
        load(NodeConfig, env=env, flags=flags)


def test_words_of_a_message_are_not_taken_for_keys() -> None:
    written = {"port": "--port", "p2p_port": "LMKV_P2P_PORT"}
    said = "port 1 is in use; set port and p2p_port (LMKV_P2P_PORT) to a free port"
    expected = "--port 1 is in use; set port and LMKV_P2P_PORT (LMKV_P2P_PORT) to a free port"
    assert as_written(said, written) == expected
