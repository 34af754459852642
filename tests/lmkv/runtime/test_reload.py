"""Values that follow their files."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv.runtime.reload import Reloadable


def number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{path.name} holds no number") from None


def test_a_value_is_reloaded_only_when_its_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    made: list[int] = []

    def make() -> int:
        made.append(number(path))
        return made[-1]

    fresh = Reloadable([str(path)], make)
    assert [fresh.get(), fresh.get()] == [1, 1]
    path.write_text("22")
    assert [fresh.get(), fresh.get()] == [22, 22]
    assert made == [1, 22]


def test_an_invalid_value_keeps_the_last_one_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "number"
    path.write_text("1")
    fresh = Reloadable([str(path)], lambda: number(path))
    with caplog.at_level(logging.WARNING):
        path.write_text("many")
        assert [fresh.get(), fresh.get()] == [1, 1]
        path.unlink()
        assert fresh.get() == 1
    assert [record.message for record in caplog.records] == ["keeping the previous value: number holds no number"] * 2
    path.write_text("3")
    assert fresh.get() == 3


def test_links_that_are_swapped_are_followed(tmp_path: Path) -> None:
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "number").write_text(name)
    data = tmp_path / "data"  # as Kubernetes does it
    data.symlink_to("1")
    fresh = Reloadable([str(data / "number")], lambda: number(data / "number"))
    assert fresh.get() == 1
    (tmp_path / "new").symlink_to("2")
    (tmp_path / "new").replace(data)
    assert fresh.get() == 2


def test_the_first_value_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no number"):
        Reloadable([], lambda: number(tmp_path / "none"))
