"""`lmkv doctor` and the keys that encrypt chunks at rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmkv.config import NodeConfig
from lmkv_client.commands.doctor.finding import Finding, check_encryption
from tests.support.encryption_keys import key_line, write_keys


def found(path: str) -> Finding:
    """The one finding."""
    (finding,) = check_encryption(NodeConfig(encryption_key_file=path))
    return finding


def test_without_keys_there_is_nothing_to_check() -> None:
    assert not list(check_encryption(NodeConfig()))


def test_the_key_for_writing_is_named_and_none_is_shown(tmp_path: Path) -> None:
    finding = found(write_keys(tmp_path / "keys", "new", "old"))
    assert finding.level == "ok"
    assert finding.text.endswith("new chunks are encrypted with key new; readable are those of new, old")
    assert key_line("new").split()[1] not in finding.text


def test_a_file_that_others_may_read_fails_with_the_fix(tmp_path: Path) -> None:
    finding = found(write_keys(tmp_path / "keys", "new", mode=0o644))
    assert finding.level == "fail"
    assert "chmod it to 600" in finding.text


def test_a_missing_package_fails_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkv_client.commands.doctor.finding.find_spec", lambda _name: None)
    finding = found(write_keys(tmp_path / "keys", "new"))
    assert finding.level == "fail"
    assert "pip install '.[encryption]'" in finding.text
