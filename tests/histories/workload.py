"""What the actors of the chaos tests leave out: streams of lookups, repeated calls, results of operations, handoffs."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.longrunning import operations_pb2

from lmkv.keys import ChunkKey, join_keys
from lmkv.rpc.messages import by_keys
from lmkv.v1 import cache_service_pb2 as cache_pb
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv.v1.chunk_pb2 import Position
from tests.chaos.actor import TROUBLE, Actor
from tests.chaos.engine import PROMPTS, SPEC, Engine
from tests.chaos.operators import Line
from tests.chaos.victim import PATIENCE_SECONDS, Coordinator, Node
from tests.chaos.watchers import LayoutWatcher
from tests.server.node.engine_client import absent_count

OPERATION_SECONDS = 10.0
"""How long an operator follows an operation: with faults it may take longer."""
HANDOFF_CHUNKS = 6
HANDOFF_PATIENCE = 2
"""How often an engine waits for the end of a handoff, which calls another node several times."""
FIRST_HANDOFF = 1000
"""Prompts from this number on are handed off; no actor looks them up afterwards."""


class ResumingWatcher(LayoutWatcher):
    """A watcher that leaves every few seconds, and resumes at the revision that it has reached."""

    def __init__(self, coordinator: Coordinator, seed: int, counts: Counter[str]) -> None:
        super().__init__(coordinator, seed, counts)
        self.name = f"resuming {self.name}"

    async def _follow(self, call: Any) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self.chance.uniform(0.2, 3.0)):
                await super()._follow(call)


class StreamActor(Actor):
    """A router: looks up several prompts with each message of a stream."""

    def __init__(self, coordinator: Coordinator, seed: int, counts: Counter[str]) -> None:
        super().__init__(f"router of {coordinator.name}", seed, counts)
        self._coordinator = coordinator

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            async with Line(self._coordinator) as line:
                call: Any = line.cache.LookupStream()
                with suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
                    while True:
                        await asyncio.sleep(self.chance.uniform(0.02, 0.2))
                        await self._ask(call)
            await asyncio.sleep(self.chance.uniform(0.1, 0.5))

    async def _ask(self, call: Any) -> None:
        prompts = self.chance.sample(PROMPTS, self.chance.randint(1, 4))
        await call.write(
            cache_pb.LookupStreamRequest(
                requests=[cache_pb.LookupRequest(prompt=by_keys(prompt)) for prompt in prompts]
            )
        )
        answered = 0
        while answered < len(prompts):
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await call.read()
            if not isinstance(answer, cache_pb.LookupStreamResponse):
                raise asyncio.InvalidStateError
            answered += len(answer.results)
        self.counts["lookups by stream"] += answered


class ResultActor(Actor):
    """An operator that repeats its calls, follows each operation to its end, and then looks at the nodes."""

    def __init__(self, nodes: Sequence[Node], coordinators: Sequence[Coordinator], seed: int, counts: Counter[str]):
        super().__init__("operator", seed, counts)
        self._nodes = nodes
        self._coordinators = coordinators

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            await asyncio.sleep(self.chance.uniform(0.05, 0.3))
            async with Line(self.chance.choice(self._coordinators)) as line:
                with suppress(grpc.RpcError):
                    (act,) = self.chance.choices((self._clear, self._move, self._pin), weights=(3, 3, 1))
                    await act(line)

    async def _clear(self, line: Line) -> None:
        node, prompt = self.chance.choice(self._nodes), self.chance.choice(PROMPTS)
        request = cache_pb.ClearRequest(
            prompt=by_keys(prompt), instance_id=node.name, request_id=uuid.UUID(int=self._bits()).hex
        )
        if await self._follow(line, await self._repeated(line, line.cache.Clear, request)):
            with suppress(*TROUBLE):
                async with node.engine() as engine:
                    for start in range(len(prompt)):
                        await engine.client.lookup("cleared", prompt[start : start + 1])
                        await engine.client.release("cleared")
            self.counts["clears followed"] += 1

    async def _move(self, line: Line) -> None:
        source, destination = self.chance.sample(self._nodes, 2)
        request = cache_pb.MoveRequest(
            prompt=by_keys(self.chance.choice(PROMPTS)),
            old_position=Position(instance_id=source.name),
            new_position=Position(instance_id=destination.name),
            copy=self.chance.random() < 0.3,
            request_id=uuid.UUID(int=self._bits()).hex,
        )
        await self._follow(line, await self._repeated(line, line.cache.Move, request))
        self.counts["moves followed"] += 1

    async def _pin(self, line: Line) -> None:
        position = Position(instance_id=self.chance.choice(self._nodes).name)
        prompt = self.chance.choice(PROMPTS)
        request = cache_pb.PinRequest(prompt=by_keys(prompt), position=position, request_id=f"{self._bits():x}")
        request.ttl.FromSeconds(2)
        pinned = await self._repeated(line, line.cache.Pin, request)
        if self.chance.random() < 0.5:
            await line.ask(line.cache.Unpin, cache_pb.UnpinRequest(pin_id=pinned.pin.pin_id))
        self.counts["pins repeated"] += 1

    async def _repeated(self, line: Line, method: Any, request: Any) -> Any:
        """The answer to a call that may be repeated, here or elsewhere: then two coordinators do the same at a time."""
        answer = await line.ask(method, request)
        if self.chance.random() < 0.3:
            await line.ask(method, request)
        if self.chance.random() < 0.3:
            async with Line(self.chance.choice(self._coordinators)) as other:
                with suppress(grpc.RpcError):
                    await other.ask(getattr(other.cache, request.DESCRIPTOR.name.removesuffix("Request")), request)
        return answer

    async def _follow(self, line: Line, operation: operations_pb2.Operation) -> bool:
        """Asks for an operation until it has ended; whether it has."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OPERATION_SECONDS):
                get = operations_pb2.GetOperationRequest(name=operation.name)
                while True:
                    done = (await line.ask(line.operations.GetOperation, get)).done
                    await asyncio.sleep(0.05)
                    if done:
                        await line.ask(line.operations.GetOperation, get)
                        return True
        return False

    def _bits(self) -> int:
        return self.chance.getrandbits(64)


class HandoffActor(Actor):
    """A prefill engine at one node and a decode engine at another: computes prompts here, and loads them there."""

    def __init__(self, prefill: Node, decode: Node, seed: int, counts: Counter[str]) -> None:
        super().__init__(f"handoffs from {prefill.name} to {decode.name}", seed, counts)
        self._prefill = prefill
        self._decode = decode
        self._prompt = FIRST_HANDOFF

    async def run(self) -> None:
        """See `Actor`."""
        while True:
            with suppress(*TROUBLE):
                async with self._prefill.engine() as prefill, self._decode.engine() as decode:
                    while True:
                        await asyncio.sleep(self.chance.uniform(0.3, 1.0))
                        try:
                            await self._hand(prefill, decode)
                        except TimeoutError as error:  # of one of both: the other one is not to blame
                            raise asyncio.InvalidStateError from error
            await asyncio.sleep(self.chance.uniform(0.1, 0.5))

    async def _hand(self, prefill: Engine, decode: Engine) -> None:
        self._prompt += 1
        name = f"{self.name} {self._prompt}"
        keys = [ChunkKey(self._prompt.to_bytes(8, "big") + index.to_bytes(8, "big")) for index in range(HANDOFF_CHUNKS)]
        handoff = engine_pb.HandChunks(
            handoff_id=name,
            decode_instance_id=self._decode.name,
            chunk_keys=join_keys(keys),
            token_count=HANDOFF_CHUNKS * SPEC.chunk_size,
        )
        await prefill.client.say(hand=[handoff])
        computing = asyncio.create_task(self._compute(prefill, name, keys))
        try:
            await self._load(decode, name, keys)
            await computing
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)
        self.counts["handoffs"] += 1

    async def _compute(self, engine: Engine, name: str, keys: list[ChunkKey]) -> None:
        extents = await engine.client.reserve(len(keys))
        for key, extent in zip(keys, extents, strict=False):
            await engine.client.say(commit=[engine.client.commit(key, extent, checksum=engine.write(key, extent))])
        await engine.client.say(end_handoff=name)
        for patience in range(HANDOFF_PATIENCE, 0, -1):
            try:
                while name not in [handed.handoff_id for handed in await engine.client.hear("handed")]:
                    pass
                return
            except TimeoutError as error:
                if patience == 1:
                    self._prefill.overdue(error)
        raise asyncio.InvalidStateError(f"{name} does not end")

    async def _load(self, engine: Engine, name: str, keys: list[ChunkKey]) -> None:
        lookup = engine_pb.LookupChunks(lookup_id=name, chunk_keys=join_keys(keys), handoff_id=name)
        await engine.client.say(lookup=[lookup])
        (found,) = await engine.client.hear("found")
        done = not absent_count(found)
        load = engine_pb.LoadChunks(lookup_id=name, first_chunk=len(found.own), chunk_count=absent_count(found))
        load.timeout.FromSeconds(3)
        if not done:
            await engine.client.say(load=[load])
        while not done:
            for loaded in await engine.client.hear("loaded"):
                done |= loaded.done
                for index, chunk in enumerate(loaded.chunks):
                    engine.check(keys[loaded.first_chunk + index], chunk)
                self.counts["chunks handed off"] += len(loaded.chunks)
        await engine.client.release(name)
