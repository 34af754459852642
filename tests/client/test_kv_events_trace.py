"""An index built from the batches of `lmkv events` alone equals the layout map over a recorded trace.

Nodes with small pools store the prompts of the trace as fast as they can, so that they evict all the time; nodes, the
coordinator and `lmkv events` restart meanwhile. `make kv-events TRACE=FILE` replays a whole trace; without a trace, the
beginning of the committed excerpt.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import count
from pathlib import Path
from signal import SIGTERM

import pytest

from benchmarks.replay.files import read_trace
from benchmarks.replay.traces import Request
from tests.client.event_consumers import Index, Subscriber
from tests.client.layout_fleet import Fleet, drift, has
from tests.server.node.cases import chunk_key
from tests.waiting import eventually

EXCERPT = Path(__file__).parents[2] / "benchmarks" / "replay" / "data" / "conversation_excerpt.jsonl.gz"
TRACE = os.environ.get("LMKV_EVENTS_TRACE", "")
NAMES = ("one", "two")
PARTS = 12 if TRACE else 2
"""Each ends with a checkpoint; of an hour, each is five minutes."""
SHORT_REQUESTS = 120
CAPACITY = 400 if TRACE else 60
"""Chunks in each pool."""
STORED_AT_ONCE = 16
FIRST_MARKER = 1 << 40
"""Beyond all ids of a trace."""


class EventsCommand:
    """A process of `lmkv events`, which ends and starts again at the same endpoints."""

    def __init__(self, coordinator: str, endpoint: str, replay_endpoint: str) -> None:
        self._argv = ["events", "--coordinator", coordinator, "--endpoint", endpoint]
        self._argv += ["--replay-endpoint", replay_endpoint, "--hashes", "bytes", "--buffer", "50"]
        self._process: Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(sys.executable, "-m", "lmkv", *self._argv, stderr=PIPE)
        assert self._process.stderr
        assert b"publishing at" in await self._process.stderr.readline()

    async def stop(self) -> None:
        if self._process:
            process, self._process = self._process, None
            if process.returncode is None:
                process.terminate()
            _, errors = await process.communicate()
            assert process.returncode in {0, 130, -SIGTERM, 128 + SIGTERM}, errors.decode()


class Replay:
    """Requests of a trace at the nodes of a fleet, with restarts."""

    def __init__(self, fleet: Fleet, command: EventsCommand, consumers: Sequence[Subscriber]) -> None:
        self.counts: Counter[str] = Counter()
        self.loses_batches = False
        self.consumers = list(consumers)
        self._fleet = fleet
        self._command = command
        self._draw = random.Random(11)
        self._marker = count(FIRST_MARKER)

    async def part(self, requests: Sequence[Request]) -> None:
        """Replays requests, and restarts everything among them."""
        first, second, third, fourth = (requests[at::4] for at in range(4))
        restarted, other = self._draw.sample(NAMES, 2)
        await self._send(first)
        await asyncio.gather(self._restart_node(restarted), self._send(second, only=other))
        await self._command.stop()
        await self._restart_node(other)
        await self._send(third)  # no node publishes what changes now
        await self._command.start()
        self.counts["restarts of lmkv events"] += 1
        await asyncio.gather(self._restart_coordinator(), self._send(fourth))

    async def checkpoint(self) -> None:
        """Waits until each consumer's index equals the map, while nothing changes."""
        self.loses_batches = False
        for name in NAMES:  # every store is in the map once a later one is
            key = chunk_key(next(self._marker))
            await self._fleet.engines[name].store([key])
            await eventually(partial(has, self._fleet, (f"kv@{name}@small", "CPU", key)), True)
        for consumer in self.consumers:
            await eventually(partial(drift, self._fleet, consumer), Index())
        self.counts["checkpoints"] += 1
        self.counts["chunks compared"] += len(self.consumers[0].index)
        self.loses_batches = True

    async def _send(self, requests: Sequence[Request], only: str = "") -> None:
        queues: dict[str, list[Request]] = {name: [] for name in NAMES}
        for request in requests:
            queues[only or self._draw.choice(NAMES)].append(request)
        await asyncio.gather(*(self._serve(name, queue) for name, queue in queues.items()))

    async def _serve(self, name: str, requests: Sequence[Request]) -> None:
        """Stores what the node does not have of each prompt, as an engine does that has computed it."""
        engine = self._fleet.engines[name]
        for request in requests:
            keys = list(request.keys)
            found = await engine.lookup("request", keys)
            await engine.release("request")
            new = keys[len(found.own) :]
            for start in range(0, len(new), STORED_AT_ONCE):
                await engine.store(new[start : start + STORED_AT_ONCE])
            self.counts["requests"] += 1
            self.counts["chunks found"] += len(found.own)
            self.counts["chunks computed"] += len(new)

    async def _restart_node(self, name: str) -> None:
        await self._fleet.restart(name)
        self.counts["restarts of nodes"] += 1

    async def _restart_coordinator(self) -> None:
        await self._fleet.restart_coordinator()
        self.counts["restarts of the coordinator"] += 1


@pytest.mark.timeout(3600 if TRACE else 400)
async def test_an_index_built_from_events_equals_the_map_over_a_trace(short_folder: Path) -> None:
    requests = [one for one in read_trace(Path(TRACE or EXCERPT)).requests if one.keys]
    requests = requests if TRACE else requests[:SHORT_REQUESTS]
    size = -(-len(requests) // PARTS)
    draw = random.Random(5)
    ends = f"ipc://{short_folder}/kv", f"ipc://{short_folder}/kv-replay"
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet(short_folder, NAMES, CAPACITY))
        command = EventsCommand(fleet.address, *ends)
        stack.push_async_callback(command.stop)
        await command.start()
        replay: Replay
        steady = await stack.enter_async_context(Subscriber(*ends))
        lossy = await stack.enter_async_context(
            Subscriber(*ends, misses=lambda: replay.loses_batches and draw.random() < 0.2)
        )
        replay = Replay(fleet, command, [steady, lossy])
        await replay.checkpoint()
        for number in range(1, PARTS + 1):
            await replay.part(requests[(number - 1) * size : number * size])
            if number == (PARTS + 1) // 2:
                replay.consumers.append(await stack.enter_async_context(Subscriber(*ends)))
            await replay.checkpoint()
            print(f"part {number} of {PARTS}: {dict(replay.counts)}", flush=True)
        for name, consumer in zip(("steady", "lossy", "late"), replay.consumers, strict=True):
            print(
                f"{name}: {consumer.stored_count} blocks stored, {consumer.removed_count} removed, "
                f"{consumer.cleared_count} cleared, {consumer.missed_count} batches missed, "
                f"{consumer.replay_count} replays, {len(consumer.index)} in the index, drift 0",
                flush=True,
            )
        assert steady.removed_count > CAPACITY, "hardly anything was evicted"
        assert lossy.missed_count
        assert steady.replay_count >= PARTS, "the restarts of lmkv events were not noticed"
        assert {medium for _, medium, _ in steady.index} == {"CPU", "STORAGE"}
