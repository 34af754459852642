"""An engine as its node sees it: a real `Attach` stream over a real unix socket."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from lmkv import rpc
from lmkv.errors import LmkvError
from lmkv.keys import ChunkKey, join_keys
from lmkv.kv_inputs import NO_INPUTS, KvInputs
from lmkv.spec import KvSpec
from lmkv.v1 import engine_service_pb2 as pb
from lmkv.v1.chunk_pb2 import Extent
from lmkv.v1.engine_service_pb2_grpc import EngineServiceStub
from lmkv_server.node.node import Node
from tests.attach import Heard, events, request
from tests.support.specs import small_spec

ANSWER_SECONDS = 40.0


def runs(found: pb.FoundChunks | pb.EngineServiceLookupResponse) -> dict[str, int]:
    """The chunks behind those in the pool, by the tier that has them."""
    return {run.tier: run.chunk_count for run in found.runs}


def absent_count(found: pb.FoundChunks | pb.EngineServiceLookupResponse) -> int:
    """Chunks that can be brought into the pool, by any tier."""
    return sum(runs(found).values())


class EngineClient:
    """One attached engine of the node, or of another server at a socket. `heard` has what was not read."""

    def __init__(
        self,
        node: Node | Path,
        engine_id: str = "engine",
        spec: KvSpec | None = None,
        config: dict[str, str] | None = None,
        worker_count: int = 1,
        answer_seconds: float = ANSWER_SECONDS,
        *,
        wants_tier_changes: bool = False,
        inputs: KvInputs = NO_INPUTS,
    ) -> None:
        socket = node if isinstance(node, Path) else node.config.engine_socket
        self.spec = spec or small_spec()
        self.engine_id = engine_id
        self.heard = Heard()
        self._config = config or {}
        self._worker_count = worker_count
        self._answer_seconds = answer_seconds
        self._wants_tier_changes = wants_tier_changes
        self._inputs = inputs
        self._channel: Any = rpc.open_channel(f"unix:{socket}")
        self.stub: Any = EngineServiceStub(self._channel)
        self.call: Any = self.stub.Attach()  # type: ignore[call-arg]

    async def __aenter__(self) -> Self:
        hello = pb.Hello(
            engine_id=self.engine_id,
            spec=self.spec.to_proto(),
            worker_count=self._worker_count,
            expected_config=self._config,
            wants_tier_changes=self._wants_tier_changes,
            kv_inputs=self._inputs.to_proto(),
        )
        try:
            await self.say(hello=hello)
            self.welcomed = await self.welcome()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Breaks the stream, as an engine does that ends."""
        self.call.cancel()
        await self._channel.close()

    async def say(self, **acts: Any) -> None:
        """Sends one message."""
        await self.call.write(request(**acts))

    async def hear(self, kind: str) -> list[Any]:
        """What `Heard.take` has of a kind of events, as soon as there is one."""
        async with asyncio.timeout(self._answer_seconds):
            while kind not in self.heard:
                self.heard.add(await self._read())
        return self.heard.take(kind)

    async def welcome(self) -> pb.Welcome:
        """What the node says first."""
        async with asyncio.timeout(self._answer_seconds):
            answer = await self._read()
        (welcome,) = events(answer, "welcome")
        assert isinstance(welcome, pb.Welcome)
        return welcome

    async def _read(self) -> pb.AttachResponse:
        answer = await self.call.read()
        assert isinstance(answer, pb.AttachResponse), "the node ended the stream"
        return answer

    async def lookup(
        self,
        ticket: str,
        keys: list[ChunkKey],
        reserve_count: int = 0,
        *,
        prefill_tokens_per_second: int = 0,
        budget_seconds: float = 0.0,
    ) -> pb.FoundChunks:
        """Looks a prompt up. `budget_seconds`: what the answer is worth; 0: the engine does not know."""
        lookup = pb.LookupChunks(
            lookup_id=ticket,
            chunk_keys=join_keys(keys),
            reserve_count=reserve_count,
            prefill_tokens_per_second=prefill_tokens_per_second,
        )
        if budget_seconds:
            lookup.budget.FromNanoseconds(int(budget_seconds * 1e9))
        await self.say(lookup=[lookup])
        (found,) = await self.hear("found")
        assert found.lookup_id == ticket
        assert isinstance(found, pb.FoundChunks)
        return found

    async def reserve(self, count: int) -> list[Extent]:
        """Asks for write credits."""
        await self.say(reserve=count)
        assert await self.hear("settled") == [count]
        return [credit.extent for credit in self.heard.take("credits")]

    async def store(self, keys: list[ChunkKey]) -> None:
        """Stores chunks whose bytes mean nothing."""
        credits_ = await self.reserve(len(keys))
        await self.say(commit=[self.commit(key, one) for key, one in zip(keys, credits_, strict=True)])

    def commit(
        self, key: ChunkKey, extent: Extent, *, checksum: int = 0, parent: bytes = b"", owner: bytes = b""
    ) -> pb.CommitChunk:
        """A full chunk that was written into a credit."""
        return pb.CommitChunk(
            chunk_key=key,
            offset=extent.offset,
            size_bytes=self.spec.chunk_bytes,
            checksum=checksum,
            token_count=self.spec.chunk_size,
            parent_key=parent,
            owner_key=owner,
        )

    async def release(self, ticket: str) -> None:
        """Ends a lookup."""
        await self.say(release=[pb.ReleaseChunks(lookup_id=ticket)])

    async def ending(self) -> LmkvError | None:
        """Why the node ends the stream; None if it does so without complaint."""
        try:
            async with asyncio.timeout(self._answer_seconds):
                while isinstance(await self.call.read(), pb.AttachResponse):
                    pass
        except grpc.RpcError as error:
            return rpc.from_rpc_error(error)
        return None
