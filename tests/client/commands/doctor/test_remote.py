"""`lmkv doctor` and the store that nodes share."""

from __future__ import annotations

import socket

from lmkv.config import NodeConfig
from lmkv_client.commands.doctor.finding import Finding, check_remote


def found(**values: object) -> Finding:
    """The one finding."""
    (finding,) = check_remote(NodeConfig(**values))  # type: ignore[arg-type]
    return finding


def test_without_a_store_there_is_nothing_to_say() -> None:
    assert not list(check_remote(NodeConfig()))


def test_a_store_that_answers_is_fine_and_its_password_is_not_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = found(remote_url=f"redis://:hush@127.0.0.1:{port}/0")
        assert finding.level == "ok"
        assert f"127.0.0.1:{port}" in finding.text
        assert "hush" not in finding.text
        assert found(remote_url="s3://bucket", remote_endpoint_url=f"http://127.0.0.1:{port}").level == "ok"


def test_a_store_that_is_not_there_names_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = found(remote_url=f"valkey://127.0.0.1:{port}")
    assert finding.level == "fail"
    assert "set remote_url" in finding.text
    finding = found(remote_url="s3://bucket", remote_endpoint_url=f"http://127.0.0.1:{port}")
    assert "remote_endpoint_url" in finding.text
