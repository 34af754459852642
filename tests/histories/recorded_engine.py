"""Records what an engine sends, receives, writes and reads at its node."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from lmkv.keys import ChunkKey, split_keys
from lmkv.pool.pool import Pool
from lmkv.v1 import engine_service_pb2 as engine_pb
from lmkv.v1.chunk_pb2 import Extent
from tests.attach import events
from tests.chaos.engine import SPEC, Engine
from tests.histories import summaries
from tests.histories.summaries import Summary
from tests.server.node.engine_client import EngineClient

if TYPE_CHECKING:
    from tests.histories.recorder import Call, Recorder


class RecordedEngine(Engine):
    """Records what an engine says, hears, writes and reads. It judges nothing: the checker does."""

    def __init__(self, client: EngineClient, pool: Pool, recorder: Recorder, node: str) -> None:
        super().__init__(client, pool)
        self._recorder = recorder
        self._node = node
        self._prompts: dict[str, list[ChunkKey]] = {}
        self._held: dict[str, tuple[ChunkKey, engine_pb.HeldChunk]] = {}
        """The last chunk of each lookup: it is read again before the release."""
        self._finds: dict[str, Call] = {}
        self._loads: dict[str, Call] = {}
        self._loaded: dict[str, list[str]] = {}
        self._handoffs: dict[str, Call] = {}
        self._writes: list[Call] = []
        self._holds: defaultdict[str, list[Call]] = defaultdict(list)
        """The extents of each lookup, by the answers that brought them."""
        self._released: list[tuple[Call, float]] = []
        """Holds that were released, with the time: known to have lasted until then once the node answers again."""
        self._say, self._read = client.say, client._read
        client.say = self._recorded_say  # type: ignore[method-assign]
        client._read = self._recorded_read  # type: ignore[method-assign]

    def write(self, key: ChunkKey, extent: Extent) -> int:
        """See `Engine`."""
        start = self._recorder.now()
        checksum = super().write(key, extent)
        asked = {"key": summaries.key_name(key), "digest": self._digest(extent)}
        self._writes.append(self._open("Write", asked | {"offset": extent.offset} | self._pool_name(), start))
        return checksum

    def check(self, key: ChunkKey, chunk: engine_pb.HeldChunk) -> None:
        place = {"key": summaries.key_name(key), "offset": chunk.extent.offset, "generation": chunk.generation}
        self._open("Read", place).end({"digest": self._digest(chunk.extent)})

    def close(self) -> None:
        """Records what has no answer."""
        holds = [*(hold for held in self._holds.values() for hold in held), *(hold for hold, _ in self._released)]
        calls = (*self._finds.values(), *self._loads.values(), *self._handoffs.values(), *self._writes, *holds)
        for call in calls:
            call.fail("CANCELLED")

    def _open(self, call: str, asked: Summary, start: float | None = None) -> Call:
        return self._recorder.open(call, self._node, asked, self.client.engine_id, start=start)

    def _pool_name(self) -> Summary:
        """Which of the node's pools an extent belongs to: each process of a node has its own."""
        return {"epoch": self.client.welcomed.epoch}

    def _digest(self, extent: Extent) -> str:
        size = extent.size_bytes or SPEC.chunk_bytes
        return hashlib.blake2b(memoryview(self._pool.buffer)[extent.offset : extent.offset + size]).hexdigest()[:16]

    async def _recorded_say(self, **acts: Any) -> None:
        for release in acts.get("release", ()):
            self._release(release.lookup_id)
        for lookup in acts.get("lookup", ()):
            keys = split_keys(lookup.chunk_keys)
            self._prompts[lookup.lookup_id] = keys
            self._finds[lookup.lookup_id] = self._open("Find", {"keys": summaries.key_names(lookup.chunk_keys)})
        for load in acts.get("load", ()):
            keys = self._prompts[load.lookup_id][load.first_chunk : load.first_chunk + load.chunk_count]
            asked = {"keys": [summaries.key_name(key) for key in keys]}
            asked |= {"timeout": load.timeout.ToNanoseconds() / 1e9}
            self._loads[load.lookup_id], self._loaded[load.lookup_id] = self._open("Load", asked), []
        for handoff in acts.get("hand", ()):
            asked = {"id": handoff.handoff_id, "keys": summaries.key_names(handoff.chunk_keys)}
            self._handoffs[handoff.handoff_id] = self._open("Handoff", asked | {"to": handoff.decode_instance_id})
        await self._say(**acts)

    async def _recorded_read(self) -> engine_pb.AttachResponse:
        answer = await self._read()
        for found in events(answer, "found"):
            prompt = self._prompts[found.lookup_id]
            names = [summaries.key_name(key) for key in prompt]
            at, disk = len(found.own), []
            for run in found.runs:
                disk += names[at : at + run.chunk_count] if run.tier == "disk" else []
                at += run.chunk_count
            self._finds.pop(found.lookup_id).end({"own": names[: len(found.own)], "disk": disk})
            self._hold(found.lookup_id, 0, found.own)
            for hold, released_at in self._released:
                hold.end({}, released_at)
            self._released.clear()
            for call in self._writes:  # acts are carried out in order: their commits were before this lookup
                call.end({})
            self._writes.clear()
        for loaded in events(answer, "loaded"):
            if loaded.lookup_id in self._loads:
                self._hold(loaded.lookup_id, loaded.first_chunk, loaded.chunks)
                names = self._loaded[loaded.lookup_id]
                prompt = self._prompts[loaded.lookup_id][loaded.first_chunk :]
                names += [summaries.key_name(key) for key, _ in zip(prompt, loaded.chunks, strict=False)]
                if loaded.done:
                    self._loads.pop(loaded.lookup_id).end({"loaded": names, "status": loaded.status.code})
        for handed in events(answer, "handed"):
            asked: Summary = {"id": handed.handoff_id, "keys": [], "to": ""}
            handoff = self._handoffs.pop(handed.handoff_id, None) or self._open("Handoff", asked)
            handoff.end({"chunks": handed.chunk_count, "error": handed.status.message})
        return answer

    def _hold(self, lookup_id: str, first: int, chunks: Any) -> None:
        for key, chunk in zip(self._prompts[lookup_id][first:], chunks, strict=False):
            self._held[lookup_id] = key, chunk
        if chunks:
            asked = {"id": lookup_id, "offsets": [chunk.extent.offset for chunk in chunks]} | self._pool_name()
            self._holds[lookup_id].append(self._open("Hold", asked))

    def _release(self, lookup_id: str) -> None:
        if held := self._held.pop(lookup_id, None):
            self.check(*held)
        released_at = self._recorder.now()
        self._released += [(hold, released_at) for hold in self._holds.pop(lookup_id, ())]
        self._prompts.pop(lookup_id, None)
        if load := self._loads.pop(lookup_id, None):
            load.end({"loaded": self._loaded.pop(lookup_id), "released": True})
