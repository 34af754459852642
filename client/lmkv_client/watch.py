"""Watches the layout map: a snapshot, then every change, across restarts and failures. Used by `Coordinator.watch`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc

from lmkv.errors import RevisionCompacted, Unreachable, WatcherTooSlow
from lmkv.v1.cache_service_pb2 import LayoutChange, WatchRequest
from lmkv_client.connection import CoordinatorConnections, RetryDeadline


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
    connections: CoordinatorConnections, start_revision: int, fingerprint: bytes, deadline: RetryDeadline
) -> AsyncGenerator[LayoutUpdate, None]:
    """Yields updates until the coordinators do not respond before the deadline, then raises `Unreachable`."""
    revision, source = start_revision, connections.current
    while True:
        connection = connections.current
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
            connections.report_failure(connection)
            await deadline.wait_to_retry(ended)
        except grpc.RpcError as rpc_error:
            error = connection.to_error(rpc_error)
            if isinstance(error, RevisionCompacted | WatcherTooSlow):
                revision = 0
            elif isinstance(error, Unreachable):
                connections.report_failure(connection)
                await deadline.wait_to_retry(error)
            else:
                raise error from None
        finally:
            call.cancel()
