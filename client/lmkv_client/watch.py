"""Following the layout map: a snapshot, then every change, through restarts and losses. Used by `Coordinator.watch`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

import grpc

from lmkv.errors import RevisionCompacted, Unreachable, WatcherTooSlow
from lmkv.v1.cache_service_pb2 import LayoutChange, WatchRequest
from lmkv_client.connection import Patience
from lmkv_client.connections import Connections


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutUpdate:
    """What a watcher learns at once. Without changes it is a bookmark: nothing happened up to `revision`."""

    revision: int
    """What to give `watch` to go on from here; not from within a snapshot."""
    reset: bool
    """Whether a snapshot begins with this update: all that was known before is void."""
    snapshot: bool
    """Whether the changes are part of a snapshot."""
    changes: tuple[LayoutChange, ...]


async def watch(
    connections: Connections, start_revision: int, fingerprint: bytes, patience: Patience
) -> AsyncGenerator[LayoutUpdate, None]:
    """See `Coordinator.watch`."""
    revision, told_by = start_revision, connections.current
    while True:
        connection = connections.current
        if connection is not told_by:  # revisions are a coordinator's own
            revision, told_by = 0, connection
        reset = revision == 0
        call = connection.cache.Watch(WatchRequest(start_revision=revision, fingerprint=fingerprint))
        try:
            async for response in call:
                patience.renew()
                yield LayoutUpdate(
                    revision=response.revision,
                    reset=reset,
                    snapshot=response.snapshot,
                    changes=tuple(response.changes),
                )
                reset = False
                if not response.snapshot:  # a snapshot that breaks off is worth nothing
                    revision = response.revision
            ended = Unreachable(f"the coordinator at {connection.address} ended the watch", address=connection.address)
            connections.failed(connection)
            await patience.endure(ended)
        except grpc.RpcError as rpc_error:
            error = connection.meaning_of(rpc_error)
            if isinstance(error, RevisionCompacted | WatcherTooSlow):
                revision = 0
            elif isinstance(error, Unreachable):
                connections.failed(connection)
                await patience.endure(error)
            else:
                raise error from None
        finally:
            call.cancel()
