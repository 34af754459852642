"""What is behind a name: every address that it stands for, as the headless services of Kubernetes have several."""

from __future__ import annotations

import asyncio
import socket

from lmkv.errors import Unreachable

TIMEOUT_SECONDS = 2.0


async def resolve(address: str) -> list[str]:
    """`host:port` as the same port at each of the host's IP addresses, sorted: IPv4 ones, IPv6 if there are no others.

    Raises `Unreachable` if the name is unknown, or nobody says in time.
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
    # Of one host's addresses of both kinds, one kind is enough: a node is a member at each coordinator once.
    four = {f"{place[0]}:{port}" for family, *_, place in found if family == socket.AF_INET}
    six = {f"[{place[0]}]:{port}" for family, *_, place in found if family == socket.AF_INET6}
    return sorted(four or six)
