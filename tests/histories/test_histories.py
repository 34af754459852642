"""A fleet under faults answers as the protos promise: every call is recorded, and the history is checked.

`make histories` runs it for an hour, in rounds of a minute; every run of the tests has one short round.
LMKV_HISTORIES_SECONDS is the time of all rounds, LMKV_HISTORIES_SEED the seed of the first. A failure states the seed
of its round and the fewest records that show it; the whole history and all logs stay in `build/failures`.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from google.longrunning import operations_pb2

from lmkv.tiers import DISK, HOST
from tests.chaos.actor import act
from tests.chaos.asker import AskActor
from tests.chaos.calm import NOTHING_LEFT, calm, ready
from tests.chaos.engine_actor import EngineActor
from tests.chaos.fleet import COORDINATORS, WITH_DISK, Fleet
from tests.chaos.havoc import Havoc
from tests.chaos.kept_logs import kept_logs
from tests.chaos.operators import Line, MoveActor, PinActor
from tests.chaos.schedule import Fault, schedule
from tests.chaos.victim import Node
from tests.chaos.watchers import LayoutWatcher, MetricsWatcher
from tests.histories.checker import RULES, check
from tests.histories.history import History, load
from tests.histories.minimise import minimise
from tests.histories.recorder import Recorder
from tests.histories.summaries import key_names
from tests.histories.workload import HandoffActor, ResultActor, ResumingWatcher, StreamActor
from tests.waiting import until

SECONDS = float(os.environ.get("LMKV_HISTORIES_SECONDS", "30"))
SEED = int(os.environ.get("LMKV_HISTORIES_SEED", random.SystemRandom().randrange(1 << 32)))
ROUND_SECONDS = min(SECONDS, 60.0)
ENGINES = 2
"""At each node."""
REST_SECONDS = 900.0
"""What the beginning, the end and the check may take besides, on a slow machine."""


class RecordedHavoc(Havoc):
    """Records each fault, from before its beginning until after its end."""

    recorder: Recorder

    @asynccontextmanager
    async def _trouble(self, fault: Fault) -> AsyncIterator[None]:
        with self.recorder.fault(fault.kind, fault.target):
            async with super()._trouble(fault):
                yield


@pytest.mark.timeout(ROUND_SECONDS + REST_SECONDS)
@pytest.mark.parametrize("number", range(math.ceil(SECONDS / ROUND_SECONDS)))
async def test_every_answer_is_one_that_the_protos_promise(
    number: int,
    tmp_path: Path,
    short_folder: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    seed = SEED + number
    shares_map = seed % 2 == 1
    run = f"LMKV_HISTORIES_SEED={seed} LMKV_HISTORIES_SECONDS={ROUND_SECONDS:g}"
    path = tmp_path / "history.jsonl"
    counts: Counter[str] = Counter()
    with capsys.disabled():
        print(f"\n{run} ({'one map' if shares_map else 'a map per coordinator'})", flush=True)
    with kept_logs(f"histories-{seed}", run, tmp_path, capsys):
        with Recorder(path) as recorder:
            async with Fleet(short_folder, tmp_path, shares_map=shares_map, tap=recorder) as fleet:
                await record(fleet, recorder, seed, counts)
        history = await asyncio.to_thread(lambda: History(load(path)))
        violations = await asyncio.to_thread(check, history)
        with capsys.disabled():
            print(
                f"{recorder.count} records, {len(RULES)} rules; "
                + ", ".join(f"{n} {what}" for what, n in counts.items())
            )
        for name, value in {"run": run, "records": recorder.count, **counts}.items():
            record_property(name, value)
        for violation in violations:
            kept = await asyncio.to_thread(minimise, history, violation)
            shown = "\n".join(f"  {record}" for record in kept[-40:])
            pytest.fail(f"{run}: {violation.rule}: {violation.what}\n{shown}\nall records: {path.name}")
    path.unlink()


async def record(fleet: Fleet, recorder: Recorder, seed: int, counts: Counter[str]) -> None:
    """Runs all actors under faults, waits until the fleet is calm, and records what is left."""
    nodes, coordinators = fleet.nodes, fleet.coordinators
    for node in nodes:
        await ready(node)
    names = [node.name for node in nodes]
    stores = [store.name for store in fleet.stores]
    havoc = RecordedHavoc(fleet, schedule(seed, names, COORDINATORS, WITH_DISK, stores), seed, counts)
    havoc.recorder = recorder
    watchers = [LayoutWatcher(coordinator, seed, counts) for coordinator in coordinators]
    actors = [
        havoc,
        *(EngineActor(node, number, seed, counts) for node in nodes for number in range(ENGINES)),
        *(actor(nodes, coordinators, seed, counts) for actor in (MoveActor, PinActor, ResultActor)),
        *(actor(coordinator, seed, counts) for actor in (AskActor, StreamActor) for coordinator in coordinators),
        *(HandoffActor(*pair, seed, counts) for pair in ((nodes[0], nodes[1]), (nodes[2], nodes[0]))),
    ]

    async def ordeal() -> None:
        await act(actors, asyncio.sleep(ROUND_SECONDS))
        await calm(fleet, watchers)
        await rest(fleet, recorder)
        end = recorder.now()
        complete = [watcher.name for watcher in watchers]
        await until(
            lambda: all(at > end for (name, _), at in recorder.watched.items() if name in complete),
            "each watch states what is left",
        )

    resuming = [ResumingWatcher(coordinator, seed, counts) for coordinator in coordinators]
    await act([*watchers, *resuming, MetricsWatcher(fleet, seed, counts)], ordeal())
    await fleet.end()


async def rest(fleet: Fleet, recorder: Recorder) -> None:
    """Records what each process holds when all calls have ended, and how all operations did."""
    for coordinator in fleet.coordinators:
        async with Line(coordinator) as line:
            await line.ask(line.operations.ListOperations, operations_pb2.ListOperationsRequest(page_size=1000))
    for node in fleet.nodes:
        metrics = await node.metrics()
        left = {name: metrics[name] for name in NOTHING_LEFT if metrics.get(name)}
        recorder.open("Rest", node.name, {}).end({"left": left})
        call = recorder.open("Contents", node.name, {})
        call.end({"tiers": await contents(node)})


async def contents(node: Node) -> dict[str, list[str]]:
    """The chunks that the node holds, by tier, as it reports to an engine that wants to know."""
    metrics = await node.metrics()
    expected = {HOST: metrics["chunks"]} | ({DISK: metrics["tier_chunks/disk"]} if node.has_disk else {})
    held: defaultdict[str, set[str]] = defaultdict(set)
    async with node.engine(wants_tier_changes=True) as engine:
        while {tier: len(held[tier]) for tier in expected} != expected:
            for change in await engine.client.hear("tier_change"):
                held[change.tier] |= _names(change.stored_keys)
                held[change.tier] -= _names(change.removed_keys)
    return {tier: sorted(keys) for tier, keys in held.items()}


def _names(keys: Sequence[bytes]) -> set[str]:
    return set(key_names(b"".join(keys)))
