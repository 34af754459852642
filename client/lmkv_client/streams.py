"""Streams of a coordinator: many lookups over one call, and the layout map's changes. Used by `Coordinator`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Self, Unpack

import grpc

from lmkv.errors import RevisionCompacted, Unreachable, WatcherTooSlow
from lmkv.rpc import coordinator_client
from lmkv.rpc.coordinator_client import CoordinatorClient
from lmkv.v1.cache_service_pb2 import LayoutChange, LookupRequest, LookupResponse, WatchRequest
from lmkv_client.chunks import Chunks, make_request
from lmkv_client.operation import RetryDeadline


class LookupStream:
    """Looks prompts up over a stream. Opens it at the first lookup, and again after a failure, with failover.

    Created by `Coordinator.lookup_stream`.
    """

    def __init__(self, stream: coordinator_client.LookupStream) -> None:
        self._stream = stream

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the stream; lookups in flight raise `Unreachable`. Idempotent."""
        await self._stream.aclose()

    async def lookup(self, tokens: Sequence[int] = (), **chunks: Unpack[Chunks]) -> LookupResponse:
        """As `Coordinator.lookup`. Several may be in flight; cancelling one does not affect the others.

        Rejects a request that is larger than a message may be: the coordinator would end the stream, and with it all
        other lookups.
        """
        return await self._stream.lookup(make_request(LookupRequest, tokens, chunks))


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutUpdate:
    """One update of a watch. Without changes it is a bookmark: there is no other change up to `revision`."""

    revision: int
    """Start revision that resumes the watch after this update; not valid within a snapshot."""
    reset: bool
    """Whether a snapshot starts with this update and replaces all earlier state."""
    snapshot: bool
    """Whether the changes are part of a snapshot."""
    changes: tuple[LayoutChange, ...]


async def watch(
    client: CoordinatorClient, start_revision: int, fingerprint: bytes, deadline: RetryDeadline
) -> AsyncGenerator[LayoutUpdate, None]:
    """Yields updates until the coordinators do not respond before the deadline, then raises `Unreachable`."""
    revision, source = start_revision, client.current
    while True:
        connection = client.current
        if connection is not source:  # each coordinator has its own revisions
            revision, source = 0, connection
        reset = revision == 0
        call = connection.cache.Watch(WatchRequest(start_revision=revision, fingerprint=fingerprint))
        try:
            async for response in call:
                deadline.extend()
                yield LayoutUpdate(
                    revision=response.revision,
                    reset=reset,
                    snapshot=response.snapshot,
                    changes=tuple(response.changes),
                )
                reset = False
                if not response.snapshot:  # an incomplete snapshot cannot be resumed
                    revision = response.revision
            ended = Unreachable(f"the coordinator at {connection.address} ended the watch", address=connection.address)
            client.report_failure(connection)
            await deadline.wait_to_retry(ended)
        except grpc.RpcError as rpc_error:
            error = connection.to_error(rpc_error)
            if isinstance(error, RevisionCompacted | WatcherTooSlow):
                revision = 0
            elif isinstance(error, Unreachable):
                client.report_failure(connection)
                await deadline.wait_to_retry(error)
            else:
                raise error from None
        finally:
            call.cancel()
