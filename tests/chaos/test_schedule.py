"""The schedule: repeatable, in order, and with a place for every kind of fault."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, pairwise

from tests.chaos.schedule import DELAYS, LAST_SECONDS, Fault, Kind, schedule

NODES, COORDINATORS, DISKS, STORES = ("a", "b"), ("x", "y"), ("b",), ("s",)


def drawn(seed: int, count: int = 1000, stores: Sequence[str] = ()) -> list[Fault]:
    """The first faults of a schedule."""
    return list(islice(schedule(seed, NODES, COORDINATORS, DISKS, stores), count))


def targets(faults: Sequence[Fault]) -> dict[Kind, set[str]]:
    """What each kind was drawn for."""
    return {kind: {fault.target for fault in faults if fault.kind is kind} for kind in Kind}


def test_a_seed_is_a_schedule() -> None:
    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1, 10) == drawn(1, 20)[:10]


def test_faults_come_in_order_of_every_kind_and_end() -> None:
    faults = drawn(3)
    assert all(one.at < other.at for one, other in pairwise(faults))
    assert {fault.kind for fault in faults} == set(Kind)
    assert all(LAST_SECONDS[0] <= fault.seconds <= LAST_SECONDS[1] for fault in faults)


def test_each_kind_finds_all_its_targets_and_no_other() -> None:
    found = targets(drawn(4, 5000))
    reports = {"a>x", "a>y", "b>x", "b>y"}
    assert found[Kind.KILL] == found[Kind.FREEZE] == found[Kind.CLOCK] == {"a", "b", "x", "y"}
    assert found[Kind.PARTITION] == found[Kind.CROWD] == {"a", "b"}
    assert found[Kind.FILL] == {"b"}
    assert found[Kind.REPEAT] == found[Kind.REORDER] == reports
    assert found[Kind.CUT] == found[Kind.RESET] == found[Kind.DELAY] == reports | {"a>b", "b>a"}


def test_a_store_is_a_process_with_links_of_its_own() -> None:
    without, found = targets(drawn(4, 5000)), targets(drawn(4, 5000, STORES))
    for kind in Kind:
        is_of_processes = kind in (Kind.KILL, Kind.FREEZE, Kind.CLOCK)
        is_of_nodes = kind in (Kind.FILL, Kind.CROWD, Kind.PARTITION, Kind.REPEAT, Kind.REORDER)
        own = {"s"} if is_of_processes else set() if is_of_nodes else {"x>s", "y>s"}
        assert found[kind] - without[kind] == own


def test_a_fault_says_what_it_is_in_a_line() -> None:
    fault = Fault(at=1.5, kind=Kind.DELAY, target="a>x", seconds=0.25, amount=DELAYS[0])
    assert str(fault) == "    1.50 s  delay a>x by 0.01 s for 0.25 s"
