"""The coordinator as plain Python: what the commands, and tools of your own, ask and order with.

    async with Coordinator("head:9000") as coordinator:
        answer = await coordinator.lookup(tokens)
        move = await coordinator.move(tokens, source="lmkv-1", destination="lmkv-2")
        result = await move.wait()

Answers are the messages of `lmkv.v1` themselves; `protos/lmkv/v1` says what they hold. Chunks are named by a prompt's
tokens, or by what `Chunks` lists; positions as `INSTANCE` or `INSTANCE/TIER`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

from google.longrunning.operations_pb2 import GetOperationRequest, ListOperationsRequest
from google.protobuf.duration_pb2 import Duration

from lmkv.auth.credentials import Credentials
from lmkv.auth.token import BearerToken
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv.tiers import parse_position
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    ListPinsRequest,
    LookupRequest,
    LookupResponse,
    MoveRequest,
    PinRequest,
    UnpinRequest,
)
from lmkv.v1.chunk_pb2 import TIER_UNSPECIFIED, PinnedChunks, Position, Tier
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesRequest
from lmkv_client.chunks import Chunks, make_request
from lmkv_client.connection import PATIENCE_SECONDS, Connection, Patience
from lmkv_client.connections import Connections
from lmkv_client.lookup_stream import LookupStream
from lmkv_client.operation import ClearOperation, MoveOperation, Operation
from lmkv_client.watch import LayoutUpdate, watch


class Coordinator:
    """A connection to the coordinator at `host:port`, or to several. It connects when first used, again after a loss.

    Of several, one is asked; the next takes its place when there is no answer, and the call is made again.

    Every call ends within `timeout_seconds`. Calls raise the coordinator's own errors (`lmkv.errors`), each with its
    `reason`, and `Unreachable` if it does not answer. Orders may be repeated: those with the same `request_id`, which
    is made up if none is given, are carried out once. Closing is final and may be repeated.
    """

    def __init__(
        self,
        address: str,
        *other_addresses: str,
        timeout_seconds: float = 5.0,
        credentials: Credentials = PLAINTEXT,
        token: str = "",
    ) -> None:
        """`token` is shown with every call, where the coordinator asks for one; a file's goes into `credentials`."""
        if token:
            credentials = replace(credentials, token=BearerToken(text=token))
        self._connections = Connections((address, *other_addresses), timeout_seconds, credentials)

    @property
    def address(self) -> str:
        """`host:port` of the coordinator that is asked now."""
        return self._connections.current.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connection; calls still running are cancelled."""
        await self._connections.aclose()

    async def lookup(self, tokens: Sequence[int] = (), **chunks: Unpack[Chunks]) -> LookupResponse:
        """Who holds how much of a prompt; nobody is an empty answer.

        Raises `BadTokens`, `BadChunkKey`, `ModelAmbiguous`, `ModelNotFound`.
        """
        return await self._connections.call(lambda to: to.cache.Lookup, make_request(LookupRequest, tokens, chunks))

    def lookup_stream(self) -> LookupStream:
        """A standing call for many lookups, which cost less over it. An async context manager."""
        return LookupStream(self._connections)

    async def move(
        self,
        tokens: Sequence[int] = (),
        *,
        source: str | Position,
        destination: str | Position,
        copy: bool = False,
        request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> MoveOperation:
        """Has chunks fetched by the destination and then, unless it is a copy, dropped by the source.

        Raises what `lookup` raises, `InstanceNotFound`, `TierUnsupported`, `KvSpecMismatch`, `BadSelection`, `Full`.
        """
        request = make_request(
            MoveRequest,
            tokens,
            chunks,
            old_position=_position(source),
            new_position=_position(destination),
            copy=copy,
            request_id=request_id or str(uuid.uuid4()),
        )
        return await self._booked(lambda to: to.cache.Move, request)

    async def copy(
        self,
        tokens: Sequence[int] = (),
        *,
        source: str | Position,
        destination: str | Position,
        request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> MoveOperation:
        """As `move`, and the source keeps what it has."""
        return await self.move(
            tokens, source=source, destination=destination, copy=True, request_id=request_id, **chunks
        )

    async def pin(
        self,
        tokens: Sequence[int] = (),
        *,
        position: str | Position,
        ttl_seconds: float = 300.0,
        request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> PinnedChunks:
        """Keeps chunks from eviction for a while; answers which are really held, and kept.

        Raises what `lookup` raises, `InstanceNotFound`, `TierUnsupported`, `BadSelection`, `Full`.
        """
        ttl = Duration()
        ttl.FromNanoseconds(round(ttl_seconds * 1e9))
        request = make_request(
            PinRequest,
            tokens,
            chunks,
            position=_position(position),
            ttl=ttl,
            request_id=request_id or str(uuid.uuid4()),
        )
        return (await self._connections.call(lambda to: to.cache.Pin, request)).pin

    async def unpin(self, pin_id: str) -> None:
        """Ends a pin early; one that is gone is no error."""
        await self._connections.call(lambda to: to.cache.Unpin, UnpinRequest(pin_id=pin_id))

    async def pins(self) -> list[PinnedChunks]:
        """Every pin in force, ordered by id."""
        return await self._connections.pages(lambda to: to.cache.ListPins, ListPinsRequest, "pins")

    async def clear(
        self,
        tokens: Sequence[int] = (),
        *,
        instance_id: str = "",
        tier: Tier.ValueType = TIER_UNSPECIFIED,
        everything: bool = False,
        dry_run: bool = False,
        request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> ClearOperation:
        """Has instances, or one, forget chunks: those named, a model's, or everything. Pinned chunks stay.

        With `dry_run` the result only says what would be dropped. Raises what `lookup` raises, `InstanceNotFound`,
        `BadSelection`, `Full`.
        """
        request = make_request(
            ClearRequest,
            tokens,
            chunks,
            instance_id=instance_id,
            tier=tier,
            all=everything,
            dry_run=dry_run,
            request_id=request_id or str(uuid.uuid4()),
        )
        return await self._booked(lambda to: to.cache.Clear, request)

    async def operations(self, *, running: bool = False) -> list[Operation[Any, Any]]:
        """Every operation that runs or, unless only those are asked for, ended not too long ago; newest first."""
        request = partial(ListOperationsRequest, filter="done=false" if running else "")

        messages = await self._connections.pages(lambda to: to.operations.ListOperations, request, "operations")
        return [Operation(self._connections, message) for message in messages]

    async def operation(self, name: str) -> Operation[Any, Any]:
        """The operation of this name, whoever began it. Raises `OperationNotFound`."""
        request = GetOperationRequest(name=name)
        message = await self._connections.call(lambda to: to.operations.GetOperation, request)
        return Operation(self._connections, message)

    async def instances(self) -> list[Instance]:
        """Every registered instance, ordered by id."""
        return await self._connections.pages(lambda to: to.registry.ListInstances, ListInstancesRequest, "instances")

    def watch(
        self, start_revision: int = 0, *, fingerprint: bytes = b"", patience_seconds: float = PATIENCE_SECONDS
    ) -> AsyncGenerator[LayoutUpdate, None]:
        """Yields what changes in the layout map, for ever: what is held now first, or what changed after a revision.

        After a loss it goes on from where it was; where that cannot be, because changes were missed, it begins anew
        with an update that says `reset`. `fingerprint` leaves out the chunks of all specs but one.

        Raises `Unreachable` if the coordinator stays away longer than `patience_seconds`.
        """
        return watch(self._connections, start_revision, fingerprint, Patience(patience_seconds))

    async def _booked(self, method: Callable[[Connection], Any], request: object) -> Operation[Any, Any]:
        """The operation that a call begins."""
        return Operation(self._connections, await self._connections.call(method, request))


def _position(position: str | Position) -> Position:
    """Raises `BadRequest` if the text names none."""
    return parse_position(position) if isinstance(position, str) else position
