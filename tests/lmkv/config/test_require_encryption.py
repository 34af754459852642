"""`require_encryption`: what is refused, by which key, and what remains allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkv.config import ConnectorConfig, CoordinatorConfig, NodeConfig
from lmkv.config.schema import Config
from lmkv.errors import ConfigError
from tests.support.certificates import issue

TLS = {"tls_cert": "/c.pem", "tls_key": "/k.pem", "tls_ca": "/ca.pem"}
DISK = {"local_disk": "/d", "max_local_disk_size": 1}

REFUSED: list[tuple[type[Config], dict[str, Any], str, str]] = [
    (NodeConfig, {**TLS, "tls_cert": ""}, "tls_cert", "set tls_cert"),
    (NodeConfig, {**TLS, "tls_key": ""}, "tls_key", "set tls_key"),
    (NodeConfig, {**TLS, "tls_ca": ""}, "tls_ca", "set tls_ca"),
    (NodeConfig, {**TLS, "transfer_channel": "nixl"}, "transfer_channel", "set transfer_channel to tcp or auto"),
    (NodeConfig, {**TLS, "transfer_channel": "ucx"}, "transfer_channel", "set transfer_channel to tcp or auto"),
    (NodeConfig, {**TLS, "transfer_channel": "mooncake"}, "transfer_channel", "set transfer_channel to tcp or auto"),
    (NodeConfig, {**TLS, "transfer_encryption": False}, "transfer_encryption", "remove it"),
    (NodeConfig, {"enable_p2p": False, "coordinator_address": "c:9000"}, "tls_ca", "set tls_ca"),
    (NodeConfig, {**TLS, **DISK}, "encryption_key_file", "set it, or remove local_disk"),
    (NodeConfig, {**TLS, "remote_url": "valkey://v"}, "encryption_key_file", "set it, or remove remote_url"),
    (NodeConfig, {**TLS, "remote_url": "s3://bucket"}, "encryption_key_file", "set it, or remove remote_url"),
    (ConnectorConfig, {**TLS, **DISK}, "encryption_key_file", "set it, or remove local_disk"),
    (ConnectorConfig, {}, "tls_cert", "set tls_cert"),
    (ConnectorConfig, {**TLS, "pd_buffer_device": "cuda"}, "pd_buffer_device", "set it to cpu"),
    (CoordinatorConfig, {}, "tls_cert", "set tls_cert"),
    (CoordinatorConfig, {"tls_cert": "/c.pem"}, "tls_key", "set tls_key"),
    (CoordinatorConfig, {**TLS, "tls_ca": None, "layout_map_url": "redis://v"}, "layout_map_url", "rediss://"),
]
ALLOWED: list[tuple[type[Config], dict[str, Any]]] = [
    (NodeConfig, TLS),
    (NodeConfig, {**TLS, "transfer_channel": "tcp", "coordinator_address": "c:9000"}),
    (NodeConfig, {**TLS, "transfer_channel": "shm", "persist_pool": True}),
    (NodeConfig, {"enable_p2p": False}),
    (NodeConfig, {**TLS, **DISK, "remote_url": "s3://bucket", "encryption_key_file": "/keys"}),
    (NodeConfig, {"enable_p2p": False, "coordinator_address": "c:9000", "tls_ca": "/ca.pem"}),
    (ConnectorConfig, {"node_address": "/run/lmkv/engine.sock"}),
    (CoordinatorConfig, {"tls_cert": "/c.pem", "tls_key": "/k.pem", "layout_map_url": "rediss://v"}),
]


def configured(process: type[Config], values: dict[str, Any], require: bool) -> Config:
    given = {key: value for key, value in values.items() if value is not None}
    return process(**given | {"require_encryption": require})


@pytest.mark.parametrize(("process", "values", "key", "fix"), REFUSED)
def test_what_does_not_encrypt_is_refused_by_one_line_that_names_key_and_fix(
    process: type[Config], values: dict[str, Any], key: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(process, values, require=True)
    assert caught.value.metadata["key"] == key
    assert str(caught.value).startswith(f"require_encryption: {key}: ")
    assert fix in str(caught.value)
    assert "\n" not in str(caught.value)
    configured(process, values, require=False)


@pytest.mark.parametrize(("process", "values"), ALLOWED)
def test_what_encrypts_or_stays_on_the_host_is_allowed(process: type[Config], values: dict[str, Any]) -> None:
    configured(process, values, require=True)


def test_tcp_encrypts_where_nodes_have_certificates_unless_that_is_turned_off(tmp_path: Path) -> None:
    issued = issue(tmp_path)
    files: dict[str, Any] = {"tls_cert": issued.cert, "tls_key": issued.key, "tls_ca": issued.ca}
    assert NodeConfig().transfer_tls is None
    assert NodeConfig(tls_ca=issued.ca).transfer_tls is None
    assert NodeConfig(**files, transfer_encryption=False).transfer_tls is None
    tls = NodeConfig(**files, tls_peer_name="lmkv-node").transfer_tls
    assert tls
    assert (tls.cert, tls.ca, tls.client_ca, tls.name) == (issued.cert, issued.ca, issued.ca, "lmkv-node")
