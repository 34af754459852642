"""`lmkv doctor`, the keys that encrypt chunks at rest, and the store that nodes share."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lmkv.config import NodeConfig
from lmkv_client.commands.doctor.finding import Finding, check_encryption, check_remote
from tests.support.encryption_keys import key_line, write_keys
from tests.support.hanging_folder import HangingFolder


def remote_finding(**values: object) -> Finding:
    (finding,) = check_remote(NodeConfig(**values))  # type: ignore[arg-type]
    return finding


def test_without_a_store_there_is_nothing_to_say() -> None:
    assert not list(check_remote(NodeConfig()))


def test_a_store_that_answers_is_fine_and_its_password_is_not_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        finding = remote_finding(remote_url=f"redis://:hush@127.0.0.1:{port}/0")
        assert finding.level == "ok"
        assert f"127.0.0.1:{port}" in finding.text
        assert "hush" not in finding.text
        assert remote_finding(remote_url="s3://bucket", remote_endpoint_url=f"http://127.0.0.1:{port}").level == "ok"


def test_a_store_that_is_not_there_names_the_fix() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    finding = remote_finding(remote_url=f"valkey://127.0.0.1:{port}")
    assert finding.level == "fail"
    assert "set remote_url" in finding.text
    finding = remote_finding(remote_url="s3://bucket", remote_endpoint_url=f"http://127.0.0.1:{port}")
    assert "remote_endpoint_url" in finding.text


def test_a_shared_folder_is_looked_at(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/kv"
    assert "mount it, or make it" in remote_finding(remote_url=url, max_remote_size=1).text
    (tmp_path / "kv").mkdir()
    assert remote_finding(remote_url=url, max_remote_size=1).level == "ok"
    (tmp_path / "kv").chmod(0o777)
    finding = remote_finding(remote_url=url, max_remote_size=1)
    assert (finding.level, "is writable for all users" in finding.text) == ("fail", True)


def test_a_shared_folder_that_hangs_ends_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_client.commands.doctor.finding.CONNECT_SECONDS", 0.2)
    with HangingFolder() as folder:
        folder.freeze()
        assert "does not answer" in remote_finding(remote_url=folder.url, max_remote_size=1).text


def encryption_finding(path: str) -> Finding:
    (finding,) = check_encryption(NodeConfig(encryption_key_file=path))
    return finding


def test_without_keys_there_is_nothing_to_check() -> None:
    assert not list(check_encryption(NodeConfig()))


def test_the_key_for_writing_is_named_and_none_is_shown(tmp_path: Path) -> None:
    finding = encryption_finding(write_keys(tmp_path / "keys", "new", "old"))
    assert finding.level == "ok"
    assert finding.text.endswith("new chunks are encrypted with key new; readable are those of new, old")
    assert key_line("new").split()[1] not in finding.text


def test_a_file_that_others_may_read_fails_with_the_fix(tmp_path: Path) -> None:
    finding = encryption_finding(write_keys(tmp_path / "keys", "new", mode=0o644))
    assert finding.level == "fail"
    assert "chmod it to 600" in finding.text


def test_a_missing_package_fails_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_client.commands.doctor.finding.find_spec", lambda _name: None)
    finding = encryption_finding(write_keys(tmp_path / "keys", "new"))
    assert finding.level == "fail"
    assert "pip install '.[encryption]'" in finding.text
