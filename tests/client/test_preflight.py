"""What ends the start of an engine before it loads its model: mistakes that its connector or node would find later."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import ConfigError
from lmkv_client import preflight
from lmkv_client.commands.doctor import finding


def check(extra: dict[str, object], *, nested: bool = False) -> None:
    """Checks an engine with the connector, or with vLLM's `MultiConnector` around it."""
    config: dict[str, Any] = {"kv_connector": "LMKVConnector", "kv_connector_extra_config": extra}
    if nested:
        config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [config]}}
    (found,) = preflight.configs(config, None)
    preflight.check(found)


@pytest.fixture(autouse=True)
def runtime_dir(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKV_RUNTIME_DIR", str(short_folder))
    monkeypatch.setenv("LMKV_MAX_LOCAL_CPU_SIZE", "64MiB")


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        ({"chunk_sise": 256}, "unknown key chunk_sise in kv_connector_extra_config; did you mean chunk_size[?]"),
        ({"chunk_size": "many"}, "chunk_size must be a number of tokens above 0, not 'many'"),
        ({"max_local_cpu_size": "900TiB"}, "max_local_cpu_size is 900.00 TiB, .*; set max_local_cpu_size to less"),
        (
            {"max_local_cpu_size": "900TiB", "pool_path": "/dev/shm/pool"},
            "max_local_cpu_size is 900.00 TiB, ",
        ),
        ({"pool_huge_pages": "always", "max_local_cpu_size": "900TiB"}, ".*max_local_cpu_size"),
        ({"numa_node": 1023}, "numa_node: node 1023 does not exist"),
        (
            {"p2p_host": "192.0.2.1"},
            "p2p_host: 192.0.2.1 cannot be bound .*; set p2p_host to an address of this machine",
        ),
        ({"runtime_dir": "/dev/null/lmkv"}, "runtime_dir: cannot create /dev/null"),
        ({"runtime_dir": f"/tmp/{'long' * 30}"}, "runtime_dir makes the socket path .* at most"),
        ({"tls_ca": "/dev/null/ca"}, "tls_ca: cannot read /dev/null/ca"),
        ({"auth_token_file": "/dev/null/token"}, "auth_token_file: cannot read /dev/null/token"),
        ({"auth_tokens": "/dev/null/tokens"}, "auth_tokens: cannot read /dev/null/tokens"),
        ({"encryption_key_file": "/dev/null/keys"}, "encryption_key_file: "),
        ({"nixl_backends": "CARRIER", "transfer_channel": "nixl"}, "nixl_backends: CARRIER did not start"),
    ],
)
def test_a_mistake_is_one_error_with_its_key(extra: dict[str, object], error: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{error}"):
        check(extra)


def test_a_connector_inside_another_one_is_checked() -> None:
    with pytest.raises(ConfigError, match="unknown key chunk_sise"):
        check({"chunk_sise": 256}, nested=True)


@pytest.mark.parametrize("key", ["p2p_port", "metrics_port"])
def test_a_port_that_is_taken_is_an_error_in_the_spelling_of_the_user(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv(f"LMKV_{key.upper()}", str(taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=f"^LMKV_{key.upper()}: .* cannot be bound"):
            check({})


def test_missing_packages_of_stores_and_channels_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"^remote_url: valkey://.* needs valkey, which is not installed"):
        check({"remote_url": "valkey://127.0.0.1:1/0"})


def test_what_may_change_until_the_model_is_loaded_passes(tmp_path: Path) -> None:
    check({"coordinator_address": "127.0.0.1:1", "remote_url": "valkey://127.0.0.1:1/0"})
    (config,) = preflight.configs(None, {"ec_connector": "LMKVECConnector", "ec_connector_extra_config": {}})
    preflight.check(config)
    assert preflight.waits_for_node(config) == ""
    socket_path = str(tmp_path / "engine.sock")
    (config,) = preflight.configs(
        {"kv_connector": "LMKVConnector", "kv_connector_extra_config": {"node_address": socket_path}}, None
    )
    preflight.check(config)
    assert preflight.waits_for_node(config) == socket_path


def test_other_connectors_are_not_read() -> None:
    assert list(preflight.configs({"kv_connector": "NixlConnector", "kv_connector_extra_config": {"a": 1}}, None)) == []
    assert list(preflight.configs(None, None)) == []
