"""The answers of RPCs that are part of the contract but not of this version."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc


def unimplemented(rpc: str) -> Any:
    """A handler that ends each call with `UNIMPLEMENTED`."""

    async def refuse(_self: object, _request: object, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"{rpc} is not implemented by this version of lmkv")

    return refuse


def unimplemented_stream(rpc: str) -> Any:
    """As `unimplemented`, for a call that would answer with a stream."""
    refuse = unimplemented(rpc)

    async def refuse_stream(self: object, request: object, context: Any) -> AsyncIterator[None]:
        await refuse(self, request, context)
        yield

    return refuse_stream
