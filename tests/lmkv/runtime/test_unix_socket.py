"""Listening unix sockets: for this user alone, and the file of a dead process is replaced."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from lmkv.errors import ConfigError
from lmkv.runtime.unix_socket import UnixListener


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_only_its_user_can_open_it(short_folder: Path) -> None:
    listener = UnixListener(short_folder / "one.sock")
    assert stat.S_IMODE(listener.path.stat().st_mode) == 0o600
    connect(listener.path)
    listener.close()
    assert not listener.path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")
def test_another_user_is_refused_by_the_kernel(short_folder: Path) -> None:
    short_folder.chmod(0o755)
    listener = UnixListener(short_folder / "one.sock")
    try:
        os.seteuid(12345)
        with pytest.raises(PermissionError):
            connect(listener.path)
    finally:
        os.seteuid(0)
        listener.close()


def test_a_socket_at_which_a_process_listens_is_not_replaced(short_folder: Path) -> None:
    first = UnixListener(short_folder / "one.sock")
    with pytest.raises(ConfigError, match="another node listens at"):
        UnixListener(first.path)
    connect(first.path)
    first.close()


def test_the_socket_of_a_dead_process_is_replaced(short_folder: Path) -> None:
    path = short_folder / "one.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listener = UnixListener(path)
    connect(path)
    listener.close()


def test_the_file_of_a_newer_listener_stays(short_folder: Path) -> None:
    first = UnixListener(short_folder / "one.sock")
    first.path.rename(short_folder / "moved.sock")
    second = UnixListener(first.path)
    first.close()
    connect(second.path)
    second.close()
