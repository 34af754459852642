"""Each rule accepts a legal history, and reports an illegal one that differs from it in one thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from lmkv.tiers import DISK, GPU, HOST
from tests.histories.checker import RULES, check
from tests.histories.history import NEVER, History, Outcome, Record

OPERATION = "move-1"
KEYS = ["1/0", "1/1"]
TIMEOUT = 20.0
LEASE = 10.0


def call(call: str, start: float, end: float = NEVER, **fields: Any) -> Record:
    at_coordinator = ("Lookup", "Watch", "Report", "Acknowledge", "Register", "GetOperation", "Move", "Clear", "Pin")
    server = fields.pop("server", "coordinator" if call in at_coordinator else "node-1")
    outcome = fields.pop("outcome", Outcome.UNKNOWN if end == NEVER else Outcome.OK)
    return Record(
        call=call, actor=fields.pop("actor", "client"), server=server, start=start, end=end, outcome=outcome, **fields
    )


def write(start: float, key: str = "1/0", digest: str = "d1", offset: int = 0, epoch: int = 1) -> Record:
    request = {"key": key, "digest": digest, "offset": offset, "epoch": epoch}
    return call("Write", start, start + 1, actor="writer", request=request)


def hold(start: float, end: float, *offsets: int) -> Record:
    """Until its release."""
    return call("Hold", start, end, request={"id": "1", "offsets": list(offsets), "epoch": 1})


def read(start: float, key: str = "1/0", digest: str = "d1", generation: int = 1, offset: int = 0) -> Record:
    request = {"key": key, "offset": offset, "generation": generation}
    return call("Read", start, start + 1, request=request, answer={"digest": digest})


def acquire(start: float, grant: str = "g1", present: Iterable[int] = (0, 1), extents: int = 2) -> Record:
    answer = {"grant": grant, "present": list(present), "extents": extents}
    return call("Acquire", start, start + 1, request={"keys": KEYS}, answer=answer)


def lookup(start: float, revision: int, holders: dict[str, list[str]], end: float = 0, **fields: Any) -> Record:
    answer = {"revision": revision, "partial": False, "holders": holders}
    return call("Lookup", start, end or start + 1, request={"keys": KEYS} | fields, answer=answer)


def gain(*keys: str, instance: str = "node-1", tier: str = HOST) -> dict[str, Any]:
    return {"instance": instance, "tier": tier, "gained": list(keys), "lost": []}


def lose(*keys: str, instance: str = "node-1", tier: str = HOST) -> dict[str, Any]:
    return {"instance": instance, "tier": tier, "gained": [], "lost": list(keys)}


def watch(
    at: float,
    revision: int,
    *changes: dict[str, Any],
    start_revision: int = 0,
    snapshot: bool = False,
    stream: str = "w1",
    actor: str = "watcher",
) -> Record:
    return call(
        "Watch",
        at - 1,
        at,
        actor=actor,
        stream=stream,
        request={"start_revision": start_revision},
        answer={"revision": revision, "snapshot": snapshot, "changes": list(changes)},
    )


def other_watch(revision: int, *changes: dict[str, Any]) -> list[Record]:
    """A response to another watcher, behind one that states the map of `SNAPSHOT`."""
    if revision > 5:
        return [watch(10 + revision, revision, *changes, actor="other", stream="w2")]
    snapshot = watch(3, 5, gain(*KEYS), snapshot=True, actor="other", stream="w2")
    return [snapshot, watch(3, 5, actor="other", stream="w2"), lookup(4, 5, HELD)]


def report(start: float, end: float, sequence: int, *changes: dict[str, Any], **fields: Any) -> Record:
    request = {"instance": "node-1", "epoch": 1, "sequence": sequence, "snapshot": False, "snapshot_end": False}
    request |= {"changes": list(changes), "map": ""} | fields
    return call("Report", start, end, stream="r1", request=request)


def acknowledge(at: float, sequence: int, revision: int) -> Record:
    answer = {"acked_sequence": sequence, "revision": revision}
    return call("Acknowledge", at, at, stream="r1", answer=answer)


def fetch(start: float, end: float = NEVER, failed: Iterable[str] = (), order: str = "o1", **fields: Any) -> Record:
    request = {"id": order, "operation": fields.pop("operation", OPERATION), "keys": KEYS}
    return call("Fetch", start, end, server="node-2", request=request, answer={"failed": list(failed)}, **fields)


def drop(start: float, operation: str = OPERATION, order: str = "o2") -> Record:
    request = {"id": order, "operation": operation, "keys": KEYS}
    return call("Drop", start, start + 1, request=request, answer={"failed": []})


def pin(start: float, ttl: float = 10.0, name: str = "p1", request_id: str = "") -> Record:
    request = {"instance": "node-1", "keys": KEYS, "ttl": ttl, "request_id": request_id}
    return call("Pin", start, start + 1, request=request, answer={"pin": name, "chunks": 2})


def find(start: float, *own: str, disk: Iterable[str] = ()) -> Record:
    return call("Find", start, start + 1, request={"keys": KEYS}, answer={"own": list(own), "disk": list(disk)})


def clear(start: float, operation: str = "clear-1", tier: str = "", request_id: str = "") -> Record:
    request = {"instance": "node-1", "keys": KEYS, "tier": tier, "request_id": request_id}
    return call("Clear", start, start + 1, request=request, answer={"operation": operation})


def state(start: float, *, done: bool, operation: str = "clear-1", **result: Any) -> Record:
    answer = {"done": done, "result": result}
    return call("GetOperation", start, start + 1, request={"operation": operation}, answer=answer)


def register(start: float, epoch: int) -> Record:
    request = {"instance": "node-1", "epoch": epoch}
    return call("Register", start, start + 1, request=request, answer={"lease": LEASE})


def handoff(start: float, chunks: int = 2, name: str = "h1") -> Record:
    request = {"id": name, "keys": KEYS, "to": "node-2"}
    return call("Handoff", start, start + 1, request=request, answer={"chunks": chunks, "error": ""})


def fault(start: float, end: float, kind: str = "kill", target: str = "node-1") -> Record:
    return call("Fault", start, end, actor="havoc", server=target, request={"kind": kind})


HELD = {"node-1": ["host", "host"]}
SNAPSHOT = (watch(1, 5, gain(*KEYS), snapshot=True), watch(2, 5), lookup(3, 5, HELD))
CONTENTS = call("Contents", 3, 4, answer={"tiers": {HOST: KEYS}})
WHOLE = (report(0, 1, 1, gain(*KEYS), snapshot=True), report(2, 3, 2, snapshot=True, snapshot_end=True))
TIMED = {"timeout": TIMEOUT}
EXCEEDED = {"seconds": TIMEOUT, "error": "DEADLINE_EXCEEDED"}

LEGAL: dict[str, list[list[Record]]] = {
    "loads_equal_commits": [
        [write(0), read(2)],
        [write(0), write(0, digest="d2"), read(2, digest="d2")],
        [replace(write(0), end=NEVER, outcome=Outcome.UNKNOWN), read(2)],
    ],
    "extents_have_one_chunk": [
        [read(0), read(2), read(4, key="1/1", generation=2)],
        [read(0), fault(2, 3), read(4, key="1/1")],
    ],
    "held_extents_are_not_written": [
        [write(0), hold(1, 4, 0, 256), read(1), read(3), write(5), write(2, offset=512)],
        [hold(1, 4, 0), write(2, epoch=2)],
        [hold(1, NEVER, 0), write(2)],
        [hold(1, 4, 0), read(1), read(4, digest="d2")],
    ],
    "grants_match_requests": [[acquire(0)], [acquire(0, present=[1], extents=1)], [acquire(0, "", [], 0)]],
    "lookups_equal_map": [
        [*SNAPSHOT, watch(6, 6, lose("1/1")), lookup(7, 6, {"node-1": ["host"]})],
        [*SNAPSHOT, lookup(4, 6, {"node-1": ["host"]}), watch(6, 7, lose("1/1"), lose("1/0")), lookup(7, 7, {})],
        [*SNAPSHOT, watch(6, 6, gain("1/0", tier=DISK), gain("1/1", tier=GPU)), lookup(7, 6, {"node-1": [HOST, GPU]})],
        [*SNAPSHOT, lookup(4, 5, {}, excluded="node-1")],
        [*SNAPSHOT, watch(6, 6, {"instance": "node-1", "gone": True}), lookup(7, 6, {})],
        [*SNAPSHOT, watch(6, 6, lose("1/1"), start_revision=5, stream="w2"), lookup(7, 6, {"node-1": ["host"]})],
        [*SNAPSHOT, watch(6, 8, start_revision=7, stream="w2"), lookup(7, 8, {})],
        [*SNAPSHOT, fault(4, 5, target="coordinator"), watch(6, 6), lookup(7, 6, {})],
    ],
    "holders_have_reported": [
        [report(0, 1, 1, gain(*KEYS)), lookup(2, 5, HELD)],
        [report(0, NEVER, 1, gain(*KEYS)), lookup(2, 5, HELD)],
        [*WHOLE, replace(WHOLE[-1], start=4, end=5), lookup(6, 5, HELD)],
        [report(0, 1, 1, gain(*KEYS)), report(2, 9, 2, lose("1/1")), lookup(3, 5, HELD)],
        [report(0, 1, 1, gain(*KEYS), map="m"), report(2, 3, 2, lose("1/1"), map="m"), lookup(4, 5, HELD)],
    ],
    "watches_agree": [
        [*SNAPSHOT, *other_watch(5), watch(6, 6, lose("1/1")), watch(7, 7, lose("1/0")), watch(8, 8),
         *other_watch(7, lose("1/1"), lose("1/0")), *other_watch(8)],
    ],
    "watches_converge": [[*SNAPSHOT, CONTENTS, watch(9, 5)], [*SNAPSHOT, CONTENTS, watch(9, 6), watch(10, 6)]],
    "revisions_rise": [
        [lookup(0, 5, {}), lookup(2, 5, {}), lookup(4, 6, {})],
        [lookup(0, 6, {}, end=9), lookup(2, 5, {})],
        [lookup(0, 6, {}), fault(2, 3, target="coordinator"), lookup(4, 1, {})],
        [watch(1, 5), watch(2, 6), lookup(3, 6, {})],
    ],
    "reports_are_acknowledged_once_sent": [
        [report(0, 2, 1), report(1, 3, 2), acknowledge(2, 1, 5), acknowledge(3, 2, 6)],
    ],
    "moves_drop_what_has_arrived": [
        [fetch(0, 2), drop(3)],
        [fetch(0), fetch(1, 2, order="o3"), drop(3)],
        [drop(0, "clear-1")],
    ],
    "copies_drop_nothing": [[fetch(0, 2, operation="copy-1")], [fetch(0, 2), drop(3)]],
    "pinned_chunks_stay": [
        [pin(0), find(2, *KEYS)],
        [pin(0), find(20)],
        [pin(0, ttl=2.5), find(2)],
        [pin(0), fault(2, 3), find(4)],
        [pin(0), call("Unpin", 2, request={"pin": "p1"}), find(4)],
    ],
    "cleared_chunks_are_gone": [
        [clear(0), state(2, done=True), find(4)],
        [clear(0), state(2, done=True), write(4), find(6, "1/0")],
        [clear(0), state(2, done=False), find(4, "1/0")],
        [clear(0), state(2, done=True, failures=1), find(4, "1/0")],
        [clear(0, tier="host"), state(2, done=True), find(4, disk=["1/0"])],
        [clear(0), state(2, done=True), call("Load", 1, request={"keys": KEYS}), find(4, *KEYS)],
    ],
    "operations_end_once": [
        [state(0, done=False), state(2, done=True, chunks=1), state(4, done=True, chunks=1)],
        [state(0, done=True), fault(2, 3, target="coordinator"), state(4, done=False)],
        [replace(state(0, done=True), end=9), state(2, done=False)],
    ],
    "coordinators_state_one_end": [
        [state(0, done=True, chunks=1), replace(state(2, done=True, chunks=1), server="other")],
        [state(0, done=True, chunks=1), replace(state(2, done=False), server="other")],
        [
            state(0, done=True, chunks=1),
            fault(2, 3, target="coordinator"),
            replace(state(4, done=True, error="OPERATION_NOT_FOUND"), server="other"),
        ],
    ],
    "operations_end": [
        [state(0, done=False), state(2, done=True)],
        [state(0, done=False), fault(2, 3, target="coordinator")],
    ],
    "repeats_return_the_first": [[clear(0, request_id="i"), clear(2, request_id="i")], [clear(0), clear(2, "clear-2")]],
    "names_are_unique": [
        [clear(0), clear(2, "clear-2"), acquire(0), acquire(2, "g2"), fetch(0, 2), drop(3)],
        [clear(0, request_id="i"), clear(2, request_id="i"), pin(0), pin(2, name="p2")],
    ],
    "epochs_rise": [
        [register(0, 1), register(2, 1), register(4, 2)],
        [register(0, 2), fault(2, 3, target="coordinator"), register(4, 1)],
        [register(0, 2), register(LEASE, 1)],
        [register(0, 2), call("RegistryService/Deregister", 2, 3, server="coordinator"), register(4, 1)],
    ],
    "handoffs_end_once": [[handoff(0), handoff(0, name="h2", chunks=0)]],
    "calls_end_in_time": [
        [call("Pin", 0, 1, request=TIMED, outcome=Outcome.FAILED, answer={"seconds": 1.0})],
        [call("Lookup", 0, request=TIMED, answer={"seconds": 2.0})],
        [fault(4, 5, "freeze", "coordinator"), call("Lookup", 0, request=TIMED, answer=EXCEEDED)],
    ],
    "nothing_is_held": [[call("Rest", 0, 1, answer={"left": {}})]],
}  # fmt: skip
ILLEGAL: dict[str, list[list[Record]]] = {
    "loads_equal_commits": [
        [write(0), read(2, digest="d2")],
        [read(0), write(2)],
        [write(0, key="1/1"), read(2)],
        [read(0)],
    ],
    "extents_have_one_chunk": [[read(0), read(2, key="1/1")], [fault(0, 1), read(2), read(4, key="1/1")]],
    "held_extents_are_not_written": [
        [hold(1, 4, 256, 0), write(2)],
        [hold(1, 4, 0), replace(write(2), end=NEVER, outcome=Outcome.UNKNOWN)],
        [write(0), write(0, digest="d2"), hold(1, 9, 0), read(2), read(4, digest="d2")],
    ],
    "grants_match_requests": [[acquire(0, present=[1, 0])], [acquire(0, present=[0, 2])], [acquire(0, extents=1)]],
    "lookups_equal_map": [
        [*SNAPSHOT, watch(6, 6, lose("1/1")), lookup(7, 6, HELD)],
        [*SNAPSHOT, lookup(4, 6, {}), watch(6, 7, lose("1/1"))],
        [*SNAPSHOT, lookup(4, 5, {})],
        [*SNAPSHOT, watch(6, 6, gain(*KEYS, instance="node-2")), lookup(7, 6, HELD)],
        [*SNAPSHOT, watch(6, 6, lose("1/1"), start_revision=5, stream="w2"), lookup(7, 6, HELD)],
    ],
    "holders_have_reported": [
        [lookup(2, 5, HELD), report(9, 10, 1, gain(*KEYS))],
        [report(0, 1, 1, gain("1/0")), lookup(2, 5, HELD)],
        [report(0, 1, 1, gain(*KEYS)), report(2, 3, 2, lose("1/1")), lookup(4, 5, HELD)],
        [report(0, 1, 1, gain(*KEYS)), report(2, 3, 2, snapshot=True, snapshot_end=True), lookup(4, 5, HELD)],
    ],
    "watches_agree": [
        [*SNAPSHOT, *other_watch(5), watch(6, 6), watch(7, 7), *other_watch(6, lose("1/0")), *other_watch(7)],
        [*SNAPSHOT, *other_watch(5), watch(6, 6, lose("1/1")), watch(7, 7), *other_watch(6), *other_watch(7)],
    ],
    "watches_converge": [[*SNAPSHOT, CONTENTS, watch(9, 6, gain("1/2"))], [*SNAPSHOT[1:], CONTENTS, watch(9, 5)]],
    "revisions_rise": [
        [lookup(0, 6, {}), lookup(2, 5, {})],
        [watch(1, 6), watch(2, 5)],
        [watch(1, 6), lookup(3, 5, {})],
        [fault(0, 1, target="coordinator"), lookup(2, 6, {}), lookup(4, 5, {})],
    ],
    "reports_are_acknowledged_once_sent": [
        [report(0, 2, 1), acknowledge(2, 2, 5)],
        [report(0, 2, 1), acknowledge(2, 1, 5), acknowledge(3, 1, 4)],
        [acknowledge(2, 1, 5), report(3, 4, 1)],
    ],
    "moves_drop_what_has_arrived": [
        [drop(0)],
        [fetch(0), drop(3)],
        [fetch(0, 4), drop(3)],
        [fetch(0, 2, ["1/1"]), drop(3)],
    ],
    "copies_drop_nothing": [[fetch(0, 2, operation="copy-1"), drop(3, "copy-1")]],
    "pinned_chunks_stay": [
        [pin(0), find(2, "1/0")],
        [pin(0), fault(2, 3, "freeze"), find(4)],
        [fault(0, 1), pin(2), find(4)],
    ],
    "cleared_chunks_are_gone": [
        [clear(0), state(2, done=True), find(4, "1/0")],
        [write(-9), clear(0), state(2, done=True), find(4, disk=["1/0"])],
        [clear(0), state(2, done=True), find(4, "1/0"), write(6)],
    ],
    "operations_end_once": [
        [state(0, done=True), state(2, done=False)],
        [state(0, done=True, chunks=1), state(2, done=True, chunks=2)],
    ],
    "coordinators_state_one_end": [
        [state(0, done=True, error="INSTANCE_NOT_FOUND"), replace(state(2, done=True, chunks=1), server="other")],
        [state(0, done=True, chunks=1), replace(state(2, done=True, error="OPERATION_NOT_FOUND"), server="other")],
    ],
    "operations_end": [[state(0, done=False)]],
    "repeats_return_the_first": [[clear(0, request_id="i"), clear(2, "clear-2", request_id="i")]],
    "names_are_unique": [
        [clear(0), clear(2)],
        [pin(0), pin(2)],
        [acquire(0), acquire(2)],
        [fetch(0, 2), drop(3, order="o1")],
    ],
    "epochs_rise": [
        [register(0, 2), register(2, 1)],
        [register(0, 2), report(LEASE, LEASE + 1, 1, epoch=2), register(LEASE + 2, 1)],
    ],
    "handoffs_end_once": [[handoff(0), handoff(2)], [handoff(0, chunks=3)]],
    "calls_end_in_time": [
        [call("Pin", 0, 90, request=TIMED, outcome=Outcome.FAILED, answer={"seconds": 90.0})],
        [call("Lookup", 0, request=TIMED, answer=EXCEEDED)],
        [call("Lookup", 0, request=TIMED)],
        [fault(4, 5, "cut", "node-1>coordinator"), call("Lookup", 0, request=TIMED, answer=EXCEEDED)],
    ],
    "nothing_is_held": [[call("Rest", 0, 1, answer={"left": {"read_grants": 1}})]],
}  # fmt: skip


def cases(of: dict[str, list[list[Record]]]) -> Callable[[Any], Any]:
    named = [(rule, records) for rule, histories in of.items() for records in histories]
    return pytest.mark.parametrize(("rule", "records"), named, ids=lambda part: part if isinstance(part, str) else "")


def test_each_rule_has_legal_and_illegal_histories() -> None:
    names = {rule.__name__ for rule in RULES}
    assert names == LEGAL.keys() == ILLEGAL.keys()


@cases(LEGAL)
def test_a_rule_accepts_a_legal_history(rule: str, records: list[Record]) -> None:
    assert [violation for violation in check(History(records)) if violation.rule == rule] == []


@cases(ILLEGAL)
def test_a_rule_reports_an_illegal_history(rule: str, records: list[Record]) -> None:
    (violation,) = (violation for violation in check(History(records)) if violation.rule == rule)
    assert violation.records
    assert all(record in records for record in violation.records)


@cases(ILLEGAL)
def test_a_refused_call_proves_nothing(rule: str, records: list[Record]) -> None:
    refused = [replace(record, outcome=Outcome.FAILED) for record in records]
    is_timed = rule == "calls_end_in_time"  # a refusal is an answer, and has a deadline, too
    assert bool(check(History(refused))) <= is_timed
