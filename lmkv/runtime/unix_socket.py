"""Listening unix sockets that only this user can open."""

from __future__ import annotations

import socket
from contextlib import suppress
from pathlib import Path

from lmkv.errors import ConfigError

BACKLOG = 128


class UnixListener:
    """A listening unix socket. The kernel refuses connections of other users, except root: its mode is 600."""

    def __init__(self, path: Path) -> None:
        """Listens; the stale socket of a dead process is removed.

        Raises `ConfigError` if another process listens there or the path cannot be bound.
        """
        self.path = path
        self.socket = _listen(path)
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Stops listening and removes the socket's file."""
        self.socket.close()
        with suppress(OSError):
            if self.path.stat().st_ino == self._inode:  # else it belongs to a newer process
                self.path.unlink()


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        _remove_stale(path)
        listener.bind(str(path))
        path.chmod(0o600)  # before a process can connect
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise ConfigError(
            f"runtime_dir: cannot listen at {path}: {reason}; name another directory", path=path
        ) from None
    except BaseException:
        listener.close()
        raise
    return listener


def _remove_stale(path: Path) -> None:
    if not path.is_socket():
        return  # no file, or one that bind refuses to replace
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # a full backlog means that a process listens
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass
    raise ConfigError(
        f"runtime_dir: another node listens at {path}; give this one another instance_id or runtime_dir", path=path
    )
