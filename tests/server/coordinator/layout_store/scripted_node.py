"""A node among several coordinators, by script: who its home is, and what it holds, is up to the test."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc

from lmkv import rpc
from lmkv.internal.v1 import report_service_pb2 as report_pb
from lmkv.keys import ChunkKey, digest, join_keys
from lmkv.spec import KvSpec
from lmkv.tiers import HOST
from lmkv.v1 import registry_service_pb2 as pb
from tests.support.node_stub import NodeStub, registration
from tests.support.specs import LLAMA

PART = 500
"""Chunks in each part of a snapshot."""
RETRY_SECONDS = 0.05
_EPOCHS = itertools.count(1)


class ScriptedNode:
    """Registers at every coordinator and reports there, again and again, as nodes do.

    Of the coordinators that share a map, it reports its chunks to the first in `order` that answers.
    """

    def __init__(
        self,
        instance_id: str,
        coordinators: Sequence[str],
        chunks: Mapping[ChunkKey, int] | None = None,
        *,
        spec: KvSpec = LLAMA,
        token: str = "",
    ) -> None:
        self.instance_id = instance_id
        self.epoch = next(_EPOCHS)
        self.spec = spec
        self.chunks = dict(chunks or {})
        self.order = list(coordinators)
        self.stream_kinds: dict[str, list[str]] = {address: [] for address in coordinators}
        """What streams were about at each, in order: `own`, `home` or `elsewhere`."""
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        self._map_ids: dict[str, str] = {}
        """Of those that answer."""
        self._streams: dict[str, _Stream] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._stay(address)) for address in self.order]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends as a process that is killed does."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def home(self) -> str:
        """The coordinator that receives the chunks; empty if no map is shared."""
        return next((address for address in self.order if self._map_ids.get(address)), "")

    def prefer(self, address: str) -> None:
        """Makes another one the home."""
        self.order.remove(address)
        self.order.insert(0, address)
        self._choose()

    def admit(self, chunks: Mapping[ChunkKey, int]) -> None:
        """Holds more."""
        self.chunks.update(chunks)
        self._report_changes(admitted=chunks)

    def evict(self, keys: Iterable[ChunkKey]) -> None:
        """Holds less."""
        gone = [key for key in keys if self.chunks.pop(key, None) is not None]
        self._report_changes(evicted=gone)

    def report_digests(self) -> None:
        """Says what it should be known to hold."""
        for stream in self._streams.values():
            if stream.has_chunks:
                part = digest(list(self.chunks))
                message = report_pb.TierDigest(tier=HOST, chunk_count=part.chunk_count, key_sum=part.key_sum)
                stream.add(report_pb.ReportRequest(digests=[message]))

    def _report_changes(self, admitted: Mapping[ChunkKey, int] | None = None, evicted: Iterable[ChunkKey] = ()) -> None:
        change = self._change(admitted or {}, evicted)
        for stream in self._streams.values():
            if stream.has_chunks:
                stream.add(report_pb.ReportRequest(changes=[change]))

    def _change(self, admitted: Mapping[ChunkKey, int], evicted: Iterable[ChunkKey] = ()) -> report_pb.ChunkChange:
        return report_pb.ChunkChange(
            tier=HOST,
            fingerprint=self.spec.fingerprint,
            admitted_keys=join_keys(admitted),
            partial_token_counts={
                index: tokens for index, tokens in enumerate(admitted.values()) if tokens != self.spec.chunk_size
            },
            evicted_keys=join_keys(evicted),
        )

    def _choose(self) -> None:
        """Ends the streams of those that have become home, or ceased to be it."""
        for address, stream in self._streams.items():
            if self._map_ids.get(address) and stream.has_chunks != (address == self.home):
                stream.call.cancel()

    async def _stay(self, address: str) -> None:
        while True:
            with suppress(grpc.RpcError, asyncio.InvalidStateError):
                async with rpc.open_channel(address) as channel:
                    await self._report(address, NodeStub(channel))
            await asyncio.sleep(RETRY_SECONDS)

    async def _report(self, address: str, registry: Any) -> None:
        said = pb.Instance(
            instance_id=self.instance_id,
            epoch=self.epoch,
            peer_address="127.0.0.1:7000",
            specs=[self.spec.to_proto()],
        )
        try:
            while True:
                answer = await registry.Register(
                    registration(said), timeout=60, wait_for_ready=True, metadata=self._metadata
                )
                self._map_ids[address] = answer.layout_map_id
                self._choose()
                has_chunks = not answer.layout_map_id or address == self.home
                self.stream_kinds[address].append(
                    "own" if not answer.layout_map_id else "home" if has_chunks else "elsewhere"
                )
                stream = _Stream(registry.Report(metadata=self._metadata), has_chunks)
                await self._run(address, stream, answer.lease_ttl.ToNanoseconds() / 3e9)
        finally:
            self._map_ids.pop(address, None)
            self._choose()

    async def _run(self, address: str, stream: _Stream, beat_seconds: float) -> None:
        if stream.has_chunks:
            held = list(self.chunks.items())
            parts = [dict(held[start : start + PART]) for start in range(0, len(held), PART)]
            for part in parts:
                stream.add(report_pb.ReportRequest(snapshot=True, changes=[self._change(part)]))
            stream.add(report_pb.ReportRequest(snapshot=True, snapshot_end=True))
        else:
            stream.add(report_pb.ReportRequest(reported_elsewhere=True))
        self._streams[address] = stream
        writing = asyncio.create_task(stream.write(self.instance_id, self.epoch, beat_seconds))
        try:
            with suppress(asyncio.CancelledError):
                while await stream.call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    pass
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise asyncio.CancelledError
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
        finally:
            self._streams.pop(address, None)
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            stream.call.cancel()


class _Stream:
    """One call, and what is on its way."""

    def __init__(self, call: Any, has_chunks: bool) -> None:
        self.call = call
        self.has_chunks = has_chunks
        self._waiting: list[report_pb.ReportRequest] = []
        self._wake = asyncio.Event()

    def add(self, report: report_pb.ReportRequest) -> None:
        self._waiting.append(report)
        self._wake.set()

    async def write(self, instance_id: str, epoch: int, beat_seconds: float) -> None:
        sequence = 0
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(beat_seconds):
                    await self._wake.wait()
            self._wake.clear()
            waiting, self._waiting = self._waiting or [report_pb.ReportRequest()], []
            for report in waiting:
                sequence += 1
                report.instance_id, report.epoch, report.sequence = instance_id, epoch, sequence
                await self.call.write(report)
