"""People who move, copy, clear and pin, at either coordinator."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc
from google.longrunning import operations_pb2, operations_pb2_grpc

from lmkv.keys import ChunkKey
from lmkv.rpc.messages import by_keys
from lmkv.tiers import DISK, HOST
from lmkv.v1 import cache_service_pb2 as pb
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from tests.chaos.actor import TROUBLE, Actor
from tests.chaos.engine import PROMPTS, Engine
from tests.chaos.victim import PATIENCE_SECONDS, Coordinator, Node

PIN_SECONDS = 8.0
LOOK_SECONDS = 0.2
"""Between two looks at what is pinned."""

Answer = TypeVar("Answer")


class PinBroken(Exception):
    """A pin was in force, and a chunk of it gone."""


class Line:
    """One coordinator, as an operator calls it. A context manager."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self._channel = coordinator.open_channel()
        self.cache: Any = CacheServiceStub(self._channel)
        self.operations: Any = operations_pb2_grpc.OperationsStub(self._channel)

    async def __aenter__(self) -> Line:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close(None)

    async def ask(self, method: Any, request: object) -> Any:
        """One call. Raises `grpc.RpcError`; `Hangs` if the coordinator let it wait though it was left alone."""
        try:
            return await method(request, timeout=PATIENCE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.coordinator.overdue(error)
            raise

    async def running(self) -> list[str]:
        listed = await self.ask(self.operations.ListOperations, operations_pb2.ListOperationsRequest(page_size=1000))
        return [operation.name for operation in listed.operations if not operation.done]

    async def pins(self) -> list[str]:
        """The pins that are in force."""
        listed = await self.ask(self.cache.ListPins, pb.ListPinsRequest(page_size=1000))
        return [pin.pin_id for pin in listed.pins]


class MoveActor(Actor):
    """An operator that moves, copies and clears prompts, and cancels some of these operations."""

    def __init__(self, nodes: Sequence[Node], coordinators: Sequence[Coordinator], seed: int, counts: Counter[str]):
        super().__init__("mover", seed, counts)
        self._names = [node.name for node in nodes]
        self._coordinators = coordinators

    async def run(self) -> None:
        """See `Actor`."""
        lines = [Line(coordinator) for coordinator in self._coordinators]
        try:
            while True:
                await asyncio.sleep(self.chance.uniform(0.05, 0.4))
                line = self.chance.choice(lines)
                (act,) = self.chance.choices((self._move, self._clear), weights=(9, 1))
                booked = act(line)
                is_called_off, after = self.chance.random() < 0.3, self.chance.uniform(0, 0.05)
                with suppress(grpc.RpcError):  # the prompt is cached nowhere, or its node is away
                    operation = await booked
                    if is_called_off:
                        await asyncio.sleep(after)
                        cancel = operations_pb2.CancelOperationRequest(name=operation.name)
                        await line.ask(line.operations.CancelOperation, cancel)
                        self.counts["operations called off"] += 1
        finally:
            for line in lines:
                await line.__aexit__()

    def _move(self, line: Line) -> Awaitable[Any]:
        source, destination = self.chance.sample(self._names, 2)
        request = pb.MoveRequest(
            prompt=by_keys(self.chance.choice(PROMPTS)),
            old_position=Position(instance_id=source),
            new_position=Position(instance_id=destination),
            copy=self.chance.random() < 0.3,
        )
        return self._counted(line.ask(line.cache.Move, request), "copies" if request.copy else "moves")

    def _clear(self, line: Line) -> Awaitable[Any]:
        request = pb.ClearRequest(
            prompt=by_keys(self.chance.choice(PROMPTS)),
            instance_id=self.chance.choice(("", *self._names)),
            tier=self.chance.choice(("", HOST, DISK)),
        )
        return self._counted(line.ask(line.cache.Clear, request), "clears")

    async def _counted(self, call: Awaitable[Answer], what: str) -> Answer:
        answer = await call
        self.counts[what] += 1
        return answer


class PinActor(Actor):
    """An operator that pins prompts and checks that they stay. Raises `PinBroken` if one does not."""

    def __init__(self, nodes: Sequence[Node], coordinators: Sequence[Coordinator], seed: int, counts: Counter[str]):
        super().__init__("pinner", seed, counts)
        self._nodes = nodes
        self._coordinators = coordinators

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.1, 0.5))
            node, prompts = self.chance.choice(self._nodes), self.chance.sample(PROMPTS, len(PROMPTS))
            seconds = self.chance.uniform(1, PIN_SECONDS)
            async with Line(self.chance.choice(self._coordinators)) as line:
                with suppress(*TROUBLE):
                    async with node.engine() as engine:
                        await self._pin(line, node, engine, await self._held(engine, prompts), seconds)

    async def _held(self, engine: Engine, prompts: Sequence[list[ChunkKey]]) -> list[ChunkKey]:
        """The first prompt of which the node has something; at worst the last."""
        for prompt in prompts:
            found = await engine.client.lookup("held", prompt)
            await engine.client.release("held")
            if found.own:
                break
        return prompt

    async def _pin(self, line: Line, node: Node, engine: Engine, prompt: list[ChunkKey], seconds: float) -> None:
        request = pb.PinRequest(prompt=by_keys(prompt), position=Position(instance_id=node.name))
        request.ttl.FromNanoseconds(round(seconds * 1e9))
        life, until = node.life, time.monotonic() + seconds
        pin = (await line.ask(line.cache.Pin, request)).pin
        self.counts["pins"] += 1
        while True:
            found = await engine.client.lookup("pinned", prompt)
            if node.life != life or time.monotonic() > until:
                return
            if len(found.own) < pin.chunk_count:
                raise PinBroken(f"{pin.pin_id} keeps {pin.chunk_count} chunks, and {len(found.own)} are there")
            for key, extent in zip(prompt, found.own, strict=False):
                engine.check(key, extent)
            self.counts["looks at pinned chunks"] += 1
            await engine.client.release("pinned")
            await asyncio.sleep(LOOK_SECONDS)
