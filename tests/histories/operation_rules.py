"""Promises about moves, clears, pins and handoffs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from tests.histories.history import NEVER, History, Record, Violation

STARTS = ("Move", "Clear")
SETTLE_SECONDS = 5.0
"""How long bytes of a load that was given up, or of a node's other tier, may still arrive."""


def moves_drop_what_has_arrived(history: History) -> Iterator[Violation]:
    """No move loses the last copy.

    `Move`: "the destination fetches, verifies and commits; only then does the source drop its copy".
    """
    arrived: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for fetch in history.of("Fetch"):
        for key in set(fetch.request["keys"]) - set(fetch.answer["failed"]):
            arrived[fetch.request["operation"], key].append(fetch)
    for drop in history.attempts("Drop"):
        operation = drop.request["operation"]
        if not operation.startswith("move-"):
            continue
        early = [
            key
            for key in drop.request["keys"]
            if not any(fetch.before(drop) and fetch.server != drop.server for fetch in arrived[operation, key])
        ]
        if early:
            fetches = (one for one in history.attempts("Fetch") if one.request["operation"] == operation)
            yield Violation(
                rule="moves_drop_what_has_arrived",
                what=f"{drop.server} is to drop {early}, which no other instance has committed",
                records=(drop, *fetches),
            )


def copies_drop_nothing(history: History) -> Iterator[Violation]:
    """`MoveRequest.copy`: "whether the source keeps its copy"."""
    for drop in history.attempts("Drop"):
        if drop.request["operation"].startswith(("copy-", "drain-")):
            yield Violation(rule="copies_drop_nothing", what="a copy drops chunks", records=(drop,))


def pinned_chunks_stay(history: History) -> Iterator[Violation]:
    """`Pin`: "protects chunks from eviction for a time": a prompt that is pinned is found until the pin ends.

    Until its node is killed, or an `Unpin` starts, or the lifetime is over, counted from the start of the call.
    """
    unpins = {unpin.request["pin"]: unpin.start for unpin in reversed(list(history.attempts("Unpin")))}
    finds: defaultdict[str, list[Record]] = defaultdict(list)
    for find in history.of("Find"):
        finds[find.server].append(find)
    for pin in history.of("Pin"):
        node, ttl = pin.request["instance"], pin.request["ttl"]
        until = min(pin.start + ttl, unpins.get(pin.answer["pin"], NEVER))
        pinned = pin.request["keys"][: pin.answer["chunks"]]
        for find in finds[node]:
            asked = find.request["keys"]
            count = len(pinned) if asked[: len(pinned)] == pinned else 0
            count = count or (len(asked) if pinned[: len(asked)] == asked else 0)
            is_in_force = pin.before(find) and find.end <= until
            is_missing = is_in_force and len(find.answer["own"]) < count
            if is_missing and history.is_one_life(node, pin.start, find.end):
                yield Violation(
                    rule="pinned_chunks_stay",
                    what=f"of {count} pinned chunks {len(find.answer['own'])} are found",
                    records=(pin, find),
                )


def cleared_chunks_are_gone(history: History) -> Iterator[Violation]:
    """A chunk that was cleared is not found at its node after the operation has ended, unless it came again.

    It may have come by a store, a load, a move or a handoff that ran at some time since the call of `Clear` started.
    Clears of one tier are left out: another one may have the chunk.
    """
    ended = _first_ends(history)
    sources: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in history.attempts("Write", "Load", "Fetch", "Handoff"):
        node = record.request["to"] if record.call == "Handoff" else record.server
        for key in record.request["keys"] if "keys" in record.request else [record.request["key"]]:
            sources[node, key].append(record)
    clears: defaultdict[tuple[str, str], list[tuple[Record, Record]]] = defaultdict(list)
    for clear in history.of("Clear"):
        end = ended.get(clear.answer["operation"])
        if end is not None and clear.request["instance"] and not clear.request["tier"] and _is_complete(end):
            for key in clear.request["keys"]:
                clears[clear.request["instance"], key].append((clear, end))
    for find in history.of("Find"):
        for key in {*find.answer["own"], *find.answer["disk"]}:
            for clear, end in clears[find.server, key]:
                if not end.before(find):
                    continue
                came = (
                    one
                    for one in sources[find.server, key]
                    if one.start <= find.end and clear.start <= one.end + SETTLE_SECONDS
                )
                if next(came, None) is None:
                    yield Violation(
                        rule="cleared_chunks_are_gone",
                        what=f"{key} is found at {find.server}",
                        records=(clear, end, find),
                    )


def operations_end_once(history: History) -> Iterator[Violation]:
    """An operation that has ended has ended for good: all later answers of its coordinator state the same result."""
    observed: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in history.of("GetOperation"):
        observed[record.request["operation"], record.server].append(record)
    for (name, server), records in observed.items():
        first = min((one for one in records if one.answer["done"]), key=lambda one: one.end, default=None)
        for record in records:
            if first is None or not first.before(record) or not history.is_one_life(server, first.start, record.end):
                continue
            if not record.answer["done"] or record.answer["result"] != first.answer["result"]:
                what = f"{name} had ended with {first.answer['result']}"
                yield Violation(rule="operations_end_once", what=what, records=(first, record))


def coordinators_state_one_end(history: History) -> Iterator[Violation]:
    """An operation belongs to one coordinator: no other one states another end.

    Unless it is lost: its coordinator was killed, which may be before others could read the end.
    """
    stated: dict[str, Record] = {}
    for record in history.of("GetOperation"):
        if record.answer["done"]:
            first = stated.setdefault(record.request["operation"], record)
            is_lost = record.answer["result"].get("error") == "OPERATION_NOT_FOUND"
            if is_lost and not history.is_one_life(first.server, first.start, record.end):
                continue
            if first.answer["result"] != record.answer["result"]:
                what = f"{record.request['operation']} ended with {first.answer['result']} too"
                yield Violation(rule="coordinators_state_one_end", what=what, records=(first, record))


def operations_end(history: History) -> Iterator[Violation]:
    """Every operation ends: it does not run at the end of the history, unless its coordinator was killed meanwhile."""
    last: dict[str, Record] = {}
    for record in sorted(history.of("GetOperation"), key=lambda record: record.end):
        last[record.request["operation"]] = record
    for name, record in last.items():
        if not record.answer["done"] and history.is_one_life(record.server, record.start, NEVER):
            yield Violation(rule="operations_end", what=f"{name} does not end", records=(record,))


def repeats_return_the_first(history: History) -> Iterator[Violation]:
    """`request_id`: "a repeat returns the first call's operation", or its pin; another one returns another."""
    calls: dict[tuple[str, str, str], Record] = {}
    for record in history.of(*STARTS, "Pin"):
        if request_id := record.request.get("request_id", ""):
            first = calls.setdefault((record.call, record.server, request_id), record)
            is_one_life = history.is_one_life(record.server, first.start, record.end)
            if is_one_life and _name_of(first) != _name_of(record):
                what = f"{request_id} has two results"
                yield Violation(rule="repeats_return_the_first", what=what, records=(first, record))


def names_are_unique(history: History) -> Iterator[Violation]:
    """Ids are never reused: not for two operations, pins, orders or grants."""
    yield from _reused(history.of(*STARTS, "Pin"), lambda one: (one.call, _name_of(one)), _identity)
    yield from _reused(history.attempts("Fetch", "Drop"), lambda one: one.request["id"], _content)
    grants = (one for one in history.of("Acquire") if one.answer["grant"])
    yield from _reused(grants, lambda one: (one.server, one.answer["grant"]), id)


def epochs_rise(history: History) -> Iterator[Violation]:
    """`Register`: an older epoch of an id is refused while a newer one is registered (`STALE_EPOCH`).

    That is at least for the lease after the last message of the newer one, unless it may have deregistered.
    """
    seen: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    leases: dict[tuple[str, str], float] = {}
    for record in sorted(history.of("Register", "Report"), key=lambda record: record.start):
        place, epoch = (record.server, record.request["instance"]), record.request["epoch"]
        if record.call == "Register":
            leases[place] = record.answer["lease"]
            newer = [one for one in seen[place] if one.request["epoch"] > epoch and one.before(record)]
            last = max(newer, key=lambda one: one.start, default=None)
            if last is not None and record.end < last.start + leases[place]:
                ends = (end for end in history.attempts("RegistryService/Deregister") if end.server == record.server)
                has_ended = any(end.start <= record.end and last.start <= end.end for end in ends)
                if not has_ended and history.is_one_life(record.server, last.start, record.end):
                    what = f"an older {place[1]} was registered"
                    yield Violation(rule="epochs_rise", what=what, records=(last, record))
        seen[place].append(record)


def handoffs_end_once(history: History) -> Iterator[Violation]:
    """A handoff ends exactly once, and not with more chunks than were announced."""
    ended: dict[tuple[str, str], Record] = {}
    for handoff in history.of("Handoff"):
        first = ended.setdefault((handoff.actor, handoff.request["id"]), handoff)
        if first is not handoff:
            yield Violation(rule="handoffs_end_once", what="a handoff ended twice", records=(first, handoff))
        if handoff.answer["chunks"] > len(handoff.request["keys"]):
            yield Violation(rule="handoffs_end_once", what="more chunks than announced", records=(handoff,))


def _first_ends(history: History) -> dict[str, Record]:
    """For each operation the first answer that states its end."""
    ends: dict[str, Record] = {}
    for record in sorted(history.of("GetOperation"), key=lambda record: record.end):
        if record.answer["done"]:
            ends.setdefault(record.request["operation"], record)
    return ends


def _is_complete(end: Record) -> bool:
    result = end.answer["result"]
    return not result.get("error") and not result.get("failures")


def _name_of(record: Record) -> str:
    return str(record.answer["pin" if record.call == "Pin" else "operation"])


def _identity(record: Record) -> object:
    """What distinguishes a call from the repeat of another."""
    return record.request.get("request_id") or id(record)


def _content(order: Record) -> object:
    return order.call, tuple(order.request["keys"]), order.request["operation"], order.server


def _reused(
    records: Iterable[Record], name_of: Callable[[Record], object], content_of: Callable[[Record], object]
) -> Iterator[Violation]:
    known: dict[object, Record] = {}
    for record in records:
        first = known.setdefault(name_of(record), record)
        if content_of(first) != content_of(record):
            what = f"{name_of(record)} names two things"
            yield Violation(rule="names_are_unique", what=what, records=(first, record))
