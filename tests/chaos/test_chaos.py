"""Chaos: a fleet under load is killed, frozen, cut apart, filled up and lied to; no byte is wrong, and nothing is left.

Once its coordinators have a layout map each, once they share one: LMKV_CHAOS_SHARED, 0 or 1, has only one of both.
`make chaos` runs it for ten minutes, every run of the tests for some seconds. LMKV_CHAOS_SECONDS says for how long
altogether, LMKV_CHAOS_SEED by which schedule; a failure says all, and what had been done by then
(tests/README.md).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.actor import act
from tests.chaos.asker import AskActor
from tests.chaos.calm import calm, ready
from tests.chaos.engine_actor import EngineActor
from tests.chaos.fleet import COORDINATORS, WITH_DISK, Fleet
from tests.chaos.havoc import Havoc
from tests.chaos.kept_logs import kept_logs
from tests.chaos.operators import MoveActor, PinActor
from tests.chaos.schedule import schedule
from tests.chaos.watchers import LayoutWatcher, MetricsWatcher
from tests.waiting import until

SHARED = {"": (False, True), "0": (False,), "1": (True,)}[os.environ.get("LMKV_CHAOS_SHARED", "")]
SECONDS = float(os.environ.get("LMKV_CHAOS_SECONDS", "12")) / len(SHARED)
"""For each of both."""
SEED = int(os.environ.get("LMKV_CHAOS_SEED", random.SystemRandom().randrange(1 << 32)))
ENGINES = 2
"""At each node."""
REST_SECONDS = 900.0
"""What the beginning and the end may take besides, on a slow machine."""


@pytest.mark.timeout(SECONDS + REST_SECONDS)
@pytest.mark.parametrize("shares_map", SHARED, ids=lambda shares_map: "shared-map" if shares_map else "own-maps")
async def test_whatever_is_done_to_the_fleet_no_byte_is_wrong_and_nothing_is_left(
    shares_map: bool,
    tmp_path: Path,
    short_folder: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Callable[[str, object], None],
) -> None:
    run = f"LMKV_CHAOS_SHARED={shares_map:d} LMKV_CHAOS_SEED={SEED} LMKV_CHAOS_SECONDS={SECONDS:g}"
    with capsys.disabled():
        print(f"\n{run}")
    counts: Counter[str] = Counter()
    name = f"chaos-{'shared-map' if shares_map else 'own-maps'}-{SEED}"
    with kept_logs(name, run, tmp_path, capsys):
        async with Fleet(short_folder, tmp_path, shares_map=shares_map) as fleet:
            for node in fleet.nodes:
                await ready(node)
            names = [node.name for node in fleet.nodes]
            stores = [store.name for store in fleet.stores]
            havoc = Havoc(fleet, schedule(SEED, names, COORDINATORS, WITH_DISK, stores), SEED, counts)
            engines = [EngineActor(node, number, SEED, counts) for node in fleet.nodes for number in range(ENGINES)]
            operators = [actor(fleet.nodes, fleet.coordinators, SEED, counts) for actor in (MoveActor, PinActor)]
            askers = [AskActor(coordinator, SEED, counts) for coordinator in fleet.coordinators]
            watchers = [LayoutWatcher(coordinator, SEED, counts) for coordinator in fleet.coordinators]

            async def long_enough() -> None:
                await asyncio.sleep(SECONDS)
                await until(
                    lambda: counts["chunks fetched"] and counts["questions answered"], "engines fetch, others ask"
                )

            async def ordeal() -> None:
                await act([*engines, *operators, *askers, havoc], long_enough())
                ended = time.monotonic()
                counts["chunks compared"] += await calm(fleet, watchers)
                counts["seconds until calm"] = round(time.monotonic() - ended)

            try:
                await act([*watchers, MetricsWatcher(fleet, SEED, counts)], ordeal())
                await fleet.end()
            except Exception as error:
                done = "\n".join(map(str, havoc.done))
                error.add_note(f"{run}; what was done:\n{done}")
                raise
    with capsys.disabled():
        print(", ".join(f"{count} {what}" for what, count in sorted(counts.items())))
    for what, value in {"run": run, **counts}.items():
        record_property(what, value)
    assert counts["chunks fetched"] > 0
    assert counts["chunks compared"] > 0
    assert counts["questions answered"] > 0
