"""Opens listening sockets, with errors that name the configuration key."""

from __future__ import annotations

import errno
import socket

from lmkv.errors import ConfigError


def address(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def listen(host: str, port: int, key: str, host_key: str = "host") -> socket.socket:
    """Opens a listening socket; port 0 selects a free port.

    Raises `ConfigError` that names the configuration key that set the port or the host, and the fix.
    """
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"host {host!r} is unknown ({error.strerror}); set {host_key}", key=host_key) from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _refusal(error, host, port, key, host_key) from None
    return listener


def _refusal(error: OSError, host: str, port: int, key: str, host_key: str) -> ConfigError:
    if error.errno == errno.EADDRNOTAVAIL:
        return ConfigError(f"host {host} is not an address of this machine; set {host_key}", key=host_key)
    if error.errno == errno.EADDRINUSE:
        fix = f"{key} {port} on {host} is in use; set {key} to a free port, or stop the process that uses it"
    else:
        fix = f"{key} {port} on {host} cannot be used ({error.strerror}); set {key} to another port"
    return ConfigError(fix, key=key)
