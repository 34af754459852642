"""Resolves a host name to all of its addresses, such as those of a headless service of Kubernetes."""

from __future__ import annotations

import asyncio
import socket

from lmkv.errors import Unreachable

TIMEOUT_SECONDS = 2.0


async def resolve(address: str) -> list[str]:
    """The addresses of `host:port`, sorted: IPv4 addresses, or IPv6 ones if there are no others.

    Raises `Unreachable` if the name is unknown or not resolved in time.
    """
    host, _, port = address.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except TimeoutError:
        raise Unreachable(f"the name {host} was not resolved within {TIMEOUT_SECONDS:g} s", address=address) from None
    except OSError as error:
        raise Unreachable(f"the name {host} is unknown: {error.strerror}", address=address) from None
    # One address family only: a node registers once at each coordinator.
    four = {f"{place[0]}:{port}" for family, *_, place in found if family == socket.AF_INET}
    six = {f"[{place[0]}]:{port}" for family, *_, place in found if family == socket.AF_INET6}
    return sorted(four or six)
