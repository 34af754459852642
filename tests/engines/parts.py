"""What a node holds of a prompt, part by part: read, dropped and damaged by a second engine of the same spec."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lmkv.keys import ChunkKey, as_tokens, chunk_keys, root_key
from lmkv.spec import KvSpec, PartItem
from lmkv.v1.chunk_pb2 import Extent
from tests.engines.faults import eventually
from tests.engines.llm import LlmFleet, poison
from tests.server.node.engine_client import EngineClient

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldItem:
    """An item of a hit in a node's pool."""

    item: PartItem
    key: bytes
    extent: Extent


class NodeParts:
    """The parts of prompts at the node of one engine of a fleet with a coordinator."""

    def __init__(self, fleet: LlmFleet, name: str) -> None:
        self._fleet = fleet
        self._name = name

    @property
    def spec(self) -> KvSpec:
        """The spec of the engine's chunks, as the coordinator knows it."""
        (spec,) = self._fleet.coordinator.instances()[self._name].specs
        return KvSpec.from_proto(spec)

    def held(self, prompt: Sequence[int]) -> list[HeldItem]:
        """The items of the longest hit that the node's own pool has for a prompt."""
        return self._attached(lambda engine: _held(engine, prompt))

    def drop(self, prompt: Sequence[int], part: int) -> None:
        """Has the node drop the latest item of one part of the longest hit."""

        async def dropped(engine: EngineClient) -> None:
            (*_, last) = [held for held in await _held(engine, prompt) if held.item.part == part]
            await engine.say(drop_damaged=[last.key])
            assert last.key not in [held.key for held in await _held(engine, prompt)]

        self._attached(dropped)

    def drop_key(self, key: bytes) -> None:
        """Has the node drop one chunk."""

        async def dropped(engine: EngineClient) -> None:
            await engine.say(drop_damaged=[key])
            assert not (await engine.lookup("dropped", [ChunkKey(key)])).own

        self._attached(dropped)

    def wait_on_disk(self, prompt: Sequence[int], folder: Path, item_count: int = 1) -> None:
        """Waits until the node has written the longest hit to its disk.

        The hit has `item_count` items or more: an engine may answer before it has stored all of them.
        """
        keys: set[str] = set()

        def is_held() -> bool:
            keys.update(held.key.hex() for held in self.held(prompt))
            return len(keys) >= item_count

        def is_written() -> bool:
            return keys <= {file.name.partition("-")[0] for file in folder.rglob("*.chunk")}

        eventually(is_held, "the prompt is in the pool")
        eventually(is_written, "the prompt is on disk")

    @contextmanager
    def poisoned(self, prompt: Sequence[int], part: int) -> Iterator[None]:
        """Changes all bytes of one part of the longest hit; makes them right again afterwards."""
        extents = [(held.extent.offset, held.extent.size_bytes) for held in self.held(prompt) if held.item.part == part]
        assert extents
        poison(self._fleet.node_pid(self._name), extents)
        try:
            yield
        finally:
            poison(self._fleet.node_pid(self._name), extents)

    def _attached(self, act: Callable[[EngineClient], Coroutine[Any, Any, Result]]) -> Result:
        async def run() -> Result:
            socket = self._fleet.runtime_dir / self._name / "engine.sock"
            async with EngineClient(socket, "parts", self.spec) as engine:
                return await act(engine)

        return asyncio.run(run())


async def _held(engine: EngineClient, prompt: Sequence[int]) -> list[HeldItem]:
    spec = engine.spec
    keys = chunk_keys(as_tokens(prompt), root_key(spec.fingerprint), spec.chunk_size)
    found = await engine.lookup("held", keys)
    await engine.release("held")
    chunk_count = len(found.own) if spec.has_plain_parts else found.hit_chunk_count
    items = spec.items(chunk_count)
    item_keys = spec.item_keys(items, keys)
    return [
        HeldItem(item=item, key=key, extent=chunk.extent)
        for item, key, chunk in zip(items, item_keys, found.own, strict=False)
    ]
