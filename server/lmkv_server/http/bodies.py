"""Discards the rest of a body once its request is rejected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

DRAIN_SECONDS = 5.0
DRAIN_BYTES = 256 << 20
"""Limits of what is read and discarded of a body that is too large."""


async def drain(body: AsyncIterator[bytes]) -> None:
    """Discards the rest of a body, within bounds.

    A client reads no response before it has sent its body, and a server that closes with unread bytes resets the
    connection, which discards the response.
    """
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_SECONDS):
            async for part in body:
                size += len(part)
                if size > DRAIN_BYTES:
                    return
