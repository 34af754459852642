"""Awaits a unary call so that gRPC frees the memory of one that is cancelled.

gRPC frees what it has allocated for a call when it has received the call's end, and nothing if the task that waits for
the end is cancelled: about 1 KB per call, for ever (https://github.com/grpc/grpc/issues/43360).
"""

from __future__ import annotations

import asyncio
from typing import Any

DETAILS = "cancelled by the client"


async def answer_of(call: Any) -> Any:
    """The answer of a unary call. Raises as the call does; cancelled, it cancels the call."""
    try:
        await call.code()  # of its end; not the call, whose task would be cancelled
    except asyncio.CancelledError:
        cancel(call)
        raise
    return await call


def cancel(call: Any) -> None:
    """Cancels a call at the server, while gRPC's task waits for its end. Idempotent."""
    core = getattr(call, "_cython_call", None)  # without it, memory is lost
    if core is None:
        call.cancel()
    elif not core.done():
        core.cancel(DETAILS)
