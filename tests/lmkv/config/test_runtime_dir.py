"""The runtime directory of a node, its sockets, and who may use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lmkv.config import (
    NodeConfig,
)
from lmkv.errors import ConfigError


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
    with pytest.raises(ConfigError, match=r"runtime_dir: .* is writable for all users"):
        NodeConfig().make_instance_dir()
    (tmp_path / "lmkv").chmod(0o750)
    with pytest.raises(ConfigError, match=r"runtime_dir: .* must be accessible to this user only: run `chmod 700`"):
        NodeConfig().make_instance_dir()
    (tmp_path / "lmkv").rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    (tmp_path / "lmkv").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="runtime_dir"):
        NodeConfig().make_instance_dir()


def test_a_configured_runtime_dir_that_others_may_replace_or_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path)
    for name, reason in (("open", r"run `chmod o-w` or `chmod \+t` on it"), ("link", "a symbolic link: use .* itself")):
        with pytest.raises(ConfigError, match=rf"^runtime_dir: {tmp_path / name} .*{reason}, or set runtime_dir to"):
            NodeConfig(runtime_dir=str(tmp_path / name)).make_instance_dir()
    (tmp_path / "open").chmod(0o1777)
    NodeConfig(runtime_dir=str(tmp_path / "open")).make_instance_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_a_configured_runtime_dir_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, -1)
    with pytest.raises(ConfigError, match=rf"^runtime_dir: {tmp_path} belongs to user 12345 .*: run `chown 0` on it"):
        NodeConfig(runtime_dir=str(tmp_path), instance_id="a-1").make_instance_dir()


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives folders away")
def test_an_instance_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    config = NodeConfig(runtime_dir=str(tmp_path), instance_id="a-1")
    os.chown(config.make_instance_dir(), 12345, -1)
    with pytest.raises(ConfigError, match=r"runtime_dir: .*a-1 belongs to user 12345"):
        config.make_instance_dir()


def test_an_instance_folder_that_any_user_may_write_to_or_a_link_is_refused(tmp_path: Path) -> None:
    config = NodeConfig(runtime_dir=str(tmp_path), instance_id="a-1")
    config.make_instance_dir().chmod(0o777)
    with pytest.raises(ConfigError, match="is writable for all users"):
        config.make_instance_dir()
    (tmp_path / "a-1").rename(tmp_path / "elsewhere")
    (tmp_path / "a-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is no folder"):
        config.make_instance_dir()


def test_a_runtime_dir_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"runtime_dir: cannot create .*file"):
        NodeConfig(runtime_dir=str(tmp_path / "file" / "dir")).make_instance_dir()


def test_a_socket_path_that_is_too_long_is_refused() -> None:
    config = NodeConfig(runtime_dir="/" + "x" * 90, instance_id="a-1")
    with pytest.raises(ConfigError, match=r"runtime_dir makes the socket path .* 107 bytes long; at most 100 work"):
        _ = config.engine_socket
