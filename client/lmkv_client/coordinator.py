"""Client of the coordinator, for the commands and for programs.

    async with Coordinator("head:9000") as coordinator:
        answer = await coordinator.lookup(tokens)
        move = await coordinator.move(tokens, source="lmkv-1", destination="lmkv-2")
        result = await move.wait()

Responses are messages of `lmkv.v1`, documented in `protos/lmkv/v1`. Chunks are named by a prompt's tokens, or by what
`Chunks` lists; positions by `INSTANCE` or `INSTANCE/TIER`.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self, Unpack

import grpc
from google.longrunning.operations_pb2 import GetOperationRequest, ListOperationsRequest
from google.protobuf.duration_pb2 import Duration

from lmkv.auth.credentials import BearerToken, Credentials
from lmkv.errors import BadSelection, RevisionCompacted, Unreachable, WatcherTooSlow
from lmkv.hints import HintAction
from lmkv.rpc import coordinator_client
from lmkv.rpc.coordinator_client import CoordinatorClient, CoordinatorConnection
from lmkv.rpc.endpoints import PLAINTEXT
from lmkv.rpc.messages import ACTIONS
from lmkv.tiers import parse_position
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    DrainRequest,
    ExplainRequest,
    ExplainResponse,
    HintRequest,
    HintResponse,
    LayoutChange,
    ListPinsRequest,
    LookupRequest,
    LookupResponse,
    MoveRequest,
    PinRequest,
    UnpinRequest,
    WatchRequest,
)
from lmkv.v1.chunk_pb2 import PinnedChunks, Position
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_client.chunks import Chunks, ClearScope, make_request
from lmkv_client.operation import (
    RETRY_TIMEOUT_SECONDS,
    ClearOperation,
    DrainOperation,
    MoveOperation,
    Operation,
    RetryDeadline,
)


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


MAX_DURATION_SECONDS = 315_576_000_000
"""Longest `Duration`; instances grant far less."""


class Coordinator:
    """Client of the coordinator at `host:port`, or of several. Connects at the first call, and again after a failure.

    With several, a call that a coordinator does not answer is repeated at the next.

    Every call ends within `timeout_seconds`, the start of an operation within twice that. Calls raise the coordinator's
    errors (`lmkv.errors`), each with its `reason`, and `Unreachable` if it does not respond. Operations with the same
    `request_id`, by default a random one, are carried out once. Closing is final and idempotent.
    """

    def __init__(
        self,
        address: str,
        *other_addresses: str,
        timeout_seconds: float = 5.0,
        credentials: Credentials = PLAINTEXT,
        token: str = "",
    ) -> None:
        """`token` authenticates every call; a token in a file belongs into `credentials`."""
        if token:
            credentials = replace(credentials, token=BearerToken(text=token))
        self._client = CoordinatorClient((address, *other_addresses), credentials, timeout_seconds)

    @property
    def address(self) -> str:
        """`host:port` of the coordinator that receives the next call."""
        return self._client.current.address

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Closes the connections and cancels calls in flight."""
        await self._client.aclose()

    async def lookup(self, tokens: Sequence[int] = (), **chunks: Unpack[Chunks]) -> LookupResponse:
        """The instances that hold a prefix of a prompt, and how much; empty on a miss.

        Raises `BadTokens`, `BadChunkKey`, `ModelAmbiguous`, `ModelNotFound`.
        """
        return await self._client.call(lambda to: to.cache.Lookup, make_request(LookupRequest, tokens, chunks))

    async def explain(
        self,
        tokens: Sequence[int] = (),
        *,
        instance_id: str = "",
        engine_request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> ExplainResponse:
        """Explains for each instance, or one, where the parts of a prompt are, and why others are missing.

        With an `engine_request_id` and no chunks: what engines have reported of recent requests whose ids contain it.

        Raises what `lookup` raises, `InstanceNotFound`, `BadSelection`.
        """
        if not engine_request_id:
            request = make_request(ExplainRequest, tokens, chunks, instance_id=instance_id)
        elif len(tokens) or chunks.get("keys"):
            raise BadSelection("name a prompt or an engine_request_id, not both", field="engine_request_id")
        else:
            request = ExplainRequest(engine_request_id=engine_request_id, instance_id=instance_id)
        return await self._client.call(lambda to: to.cache.Explain, request)

    def lookup_stream(self) -> LookupStream:
        """A stream for many lookups, which cost less than unary calls. An async context manager."""
        return LookupStream(self._client.lookup_stream())

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
        """Starts an operation: the destination fetches the chunks, then the source drops them, unless it is a copy.

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
        return await self._start_operation(lambda to: to.cache.Move, request)

    async def copy(
        self,
        tokens: Sequence[int] = (),
        *,
        source: str | Position,
        destination: str | Position,
        request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> MoveOperation:
        """As `move`, but the source keeps its chunks."""
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
        """Protects chunks from eviction until the TTL ends; returns the chunks that are held and pinned.

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
        return (await self._client.call(lambda to: to.cache.Pin, request)).pin

    async def unpin(self, pin_id: str) -> None:
        """Releases a pin before its TTL. Idempotent."""
        await self._client.call(lambda to: to.cache.Unpin, UnpinRequest(pin_id=pin_id))

    async def pins(self) -> list[PinnedChunks]:
        """All active pins, ordered by id."""
        return await self._client.pages(lambda to: to.cache.ListPins, ListPinsRequest, "pins")

    async def hint(
        self,
        action: HintAction | str,
        tokens: Sequence[int] = (),
        *,
        instance: str,
        ttl_seconds: float | None = None,
        priority: int = 0,
        request_id: str = "",
        **chunks: Unpack[Chunks],
    ) -> HintResponse:
        """Asks an instance to share, prefetch, pin, retain, demote or evict chunks; the response has the outcome.

        What the instance cannot do is an outcome and not an error. Raises what `lookup` raises, `InstanceNotFound`,
        `KvSpecMismatch`, `BadSelection`, `Full`.
        """
        try:
            number = ACTIONS[HintAction(action)]
        except ValueError:
            raise BadSelection(
                f"action {action!r} is unknown; known are {', '.join(HintAction)}", field="action"
            ) from None
        ttl = None
        if ttl_seconds is not None:
            ttl = Duration()
            ttl.FromNanoseconds(round(min(ttl_seconds, MAX_DURATION_SECONDS) * 1e9))
        request = make_request(
            HintRequest,
            tokens,
            chunks,
            instance_id=instance,
            action=number,
            ttl=ttl,
            priority=priority,
            request_id=request_id or str(uuid.uuid4()),
        )
        return await self._client.call(lambda to: to.cache.Hint, request)

    async def clear(
        self,
        tokens: Sequence[int] = (),
        *,
        dry_run: bool = False,
        request_id: str = "",
        **scope: Unpack[ClearScope],
    ) -> ClearOperation:
        """Starts an operation: instances drop the named chunks, those of a model, or all. Pinned chunks stay.

        A `model_name` without tokens and keys names all chunks of that model. `dry_run` only reports what would be
        dropped. Raises what `lookup` raises, `InstanceNotFound`, `BadSelection`, `Full`.
        """
        fields: dict[str, Any] = {**scope, "all": scope.get("everything", False)}
        fields.pop("everything", None)
        names = set(Chunks.__annotations__)
        if not (len(tokens) or scope.get("keys")):
            names.remove("model_name")
        chunks: Any = {name: fields.pop(name) for name in names if name in fields}
        request = make_request(
            ClearRequest, tokens, chunks, dry_run=dry_run, request_id=request_id or str(uuid.uuid4()), **fields
        )
        return await self._start_operation(lambda to: to.cache.Clear, request)

    async def drain(
        self,
        instance_id: str,
        *,
        destinations: Sequence[str] = (),
        evict: bool = False,
        deadline_seconds: float = 600.0,
        request_id: str = "",
    ) -> DrainOperation:
        """Starts an operation: other instances fetch the chunks that only this one holds, so that it can be stopped.

        They are those in `destinations`, in order, else all others, and use free memory only unless they may `evict`.
        The result's `remaining_chunk_count` is 0 if it is safe to stop the instance. The drain ends at the deadline,
        600 s at most. Raises `InstanceNotFound`, `P2pDisabled`, `BadSelection`, `Full`.
        """
        timeout = Duration()
        timeout.FromNanoseconds(round(deadline_seconds * 1e9))
        request = DrainRequest(
            instance_id=instance_id,
            destination_instance_ids=destinations,
            evict=evict,
            timeout=timeout,
            request_id=request_id or str(uuid.uuid4()),
        )
        return await self._start_operation(lambda to: to.cache.Drain, request)

    async def operations(self, *, running: bool = False) -> list[Operation[Any, Any]]:
        """Running operations and, unless `running`, recently completed ones; newest first."""
        request = partial(ListOperationsRequest, filter="done=false" if running else "")

        messages = await self._client.all_pages(lambda to: to.operations.ListOperations, request, "operations")
        by_name: dict[str, Operation[Any, Any]] = {}
        for message in messages:
            operation: Operation[Any, Any] = Operation(self._client, message)
            if message.name not in by_name or not operation.progress.coordinator:  # the one that runs it knows best
                by_name[message.name] = operation
        return sorted(by_name.values(), key=lambda operation: operation.name.rpartition("-")[2], reverse=True)

    async def operation(self, name: str) -> Operation[Any, Any]:
        """The operation of this name, of any client. Raises `OperationNotFound`."""
        request = GetOperationRequest(name=name)
        message = await self._client.find(lambda to: to.call(to.operations.GetOperation, request))
        return Operation(self._client, message)

    async def instances(self) -> list[Instance]:
        """All registered instances, ordered by id."""
        return await self._client.instances()

    def watch(
        self, start_revision: int = 0, *, fingerprint: bytes = b"", retry_seconds: float = RETRY_TIMEOUT_SECONDS
    ) -> AsyncGenerator[LayoutUpdate, None]:
        """Watches the layout map: yields a snapshot, or the changes after `start_revision`, then every later change.

        Resumes after a failure. If changes were missed, it starts with a new snapshot, whose first update has `reset`.
        `fingerprint` selects the chunks of one spec.

        Raises `Unreachable` if the coordinator does not respond for `retry_seconds`.
        """
        return watch(self._client, start_revision, fingerprint, RetryDeadline(retry_seconds))

    async def _start_operation(
        self, method: Callable[[CoordinatorConnection], Any], request: object
    ) -> Operation[Any, Any]:
        """The operation that a call starts.

        While an instance has not reported what it holds yet, as after a restart of the coordinator, the call is
        repeated within `timeout_seconds`. The request's id makes that safe.
        """

        async def start() -> Any:
            return await self._client.call(method, request)

        deadline = RetryDeadline(self._client.timeout_seconds)
        while True:
            try:
                return Operation(self._client, await start(), start)
            except Unreachable as error:
                if "instance_id" not in error.metadata:
                    raise
                await deadline.wait_to_retry(error)


def _position(position: str | Position) -> Position:
    """Raises `BadRequest` if the text is not a position."""
    return parse_position(position) if isinstance(position, str) else position
