"""Of a long history, exactly the records that show the violation are left."""

from __future__ import annotations

import random

from tests.histories.checker import check
from tests.histories.history import History, Record
from tests.histories.minimise import minimise
from tests.histories.test_checker import (
    ILLEGAL,
    call,
    find,
    gain,
    hold,
    lookup,
    lose,
    read,
    watch,
    write,
)


def test_what_does_not_matter_is_left_out() -> None:
    chance = random.Random(7)
    noise = [write(at, f"{at}/0", f"d{at}") for at in range(10, 90)]
    noise += [read(at + 2, f"{at}/0", f"d{at}", generation=at) for at in range(10, 90)]
    records = [*noise, write(0), read(95, digest="other"), *(find(at) for at in range(30))]
    chance.shuffle(records)
    history = History(records)
    (violation,) = check(history)
    assert minimise(history, violation) == [write(0), read(95, digest="other")]


def test_a_write_into_a_held_extent_is_left_with_the_hold() -> None:
    noise = [write(at, f"{at}/0", offset=at) for at in range(10, 90)]
    noise += [hold(at + 1, at + 9, at) for at in range(10, 90)]
    history = History([*noise, hold(40, 60, 4096), write(50, "1/0", offset=4096), read(52, "1/0", offset=4096)])
    (violation,) = check(history)
    assert minimise(history, violation) == [hold(40, 60, 4096), write(50, "1/0", offset=4096)]


def test_the_changes_that_lead_to_a_state_are_kept() -> None:
    changes = [
        watch(1, 5, gain("1/0"), snapshot=True),
        watch(2, 5),
        watch(4, 6, gain("1/1", "1/2")),
        watch(5, 7, gain("3/0", instance="node-2")),
        watch(6, 8, lose("1/2")),
        watch(7, 9, lose("1/0")),
    ]
    asked = [lookup(3, 5, {"node-1": ["host"]}), lookup(8, 9, {"node-1": ["host", "host"]})]
    history = History([*changes, *asked, call("Contents", 9, 10, answer={"tiers": {}})])
    (violation,) = (one for one in check(history) if one.rule == "lookups_equal_map")
    kept = minimise(history, violation)
    assert set(map(str, kept)) <= set(map(str, history.records))
    assert {str(record) for record in violation.records} <= set(map(str, kept))
    assert str(changes[3]) not in map(str, kept)
    assert all(violation not in check(History(without(kept, record))) for record in kept)


def test_an_illegal_history_stays_illegal() -> None:
    for rule, histories in ILLEGAL.items():
        for records in histories:
            history = History(records)
            (violation,) = (one for one in check(history) if one.rule == rule)
            kept = minimise(history, violation)
            assert all(record in kept for record in violation.records)
            assert rule in [one.rule for one in check(History(kept))]


def without(records: list[Record], left_out: Record) -> list[Record]:
    return [record for record in records if record is not left_out]
