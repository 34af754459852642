"""Promises about the layout map: lookups, watches and reports agree at every revision.

One watch states the map at each of its revisions, and a lookup states the revision that it saw, so that a lookup is
compared with the map exactly: it must name all holders, and no others.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from lmkv.tiers import LAYOUT_TIERS
from tests.histories.history import NEVER, History, Record, Violation

LOOKUPS = ("Lookup", "LookupStream")

Holders = dict[str, list[str]]
"""The tiers of the chunks that an instance holds from the first on, by instance: what a lookup states."""


class State:
    """A layout map, built from the changes of a watch."""

    def __init__(self) -> None:
        self._tiers: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.digest = 0
        """Of all chunks with their instances and tiers; independent of the order of changes."""

    def apply(self, change: Mapping[str, Any]) -> None:
        """Applies one `LayoutChange`."""
        instance = change["instance"]
        if change.get("gone"):
            for key, tiers in self._tiers.pop(instance, {}).items():
                for tier in tiers:
                    self.digest ^= hash((instance, key, tier))
            return
        held, tier = self._tiers[instance], change["tier"]
        gained = {key for key in change["gained"] if tier not in held[key]}
        lost = {key for key in change["lost"] if tier in held[key] or key in gained}
        for key in gained:
            held[key].add(tier)
            self.digest ^= hash((instance, key, tier))
        for key in lost:
            held[key].discard(tier)
            self.digest ^= hash((instance, key, tier))

    def holders(self, keys: Iterable[str], excluded: str = "") -> Holders:
        """What a lookup of the keys states."""
        found: Holders = {}
        for instance, held in self._tiers.items():
            for key in keys:
                if not (tiers := held.get(key)):
                    break
                if instance != excluded:
                    found.setdefault(instance, []).append(min(tiers, key=LAYOUT_TIERS.index))
        return found

    def of(self, keys: Iterable[str]) -> State:
        """A copy that has these chunks only."""
        copy = State()
        for instance, held in self._tiers.items():
            for key in set(keys) & held.keys():
                copy._tiers[instance][key] = set(held[key])
        return copy

    def chunks(self) -> set[tuple[str, str, str]]:
        return {
            (instance, key, tier)
            for instance, held in self._tiers.items()
            for key, tiers in held.items()
            for tier in tiers
        }


class Step(NamedTuple):
    """A response of a watch, behind a complete snapshot."""

    response: Record
    before: int
    """The revision before it."""
    exact_from: float
    """The first revision at which the map is known exactly: a snapshot may have later changes already."""


def steps(history: History, watch: Iterable[Record]) -> Iterator[tuple[Step, State]]:
    """The responses of one watcher at one coordinator, over all its streams, each with the map before it."""
    state, revision, stream, exact_from = State(), 0, "", NEVER
    is_complete = False
    for response in watch:
        answer = response.answer
        if response.stream != stream:
            stream, begin = response.stream, response.request["start_revision"]
            if begin == 0:
                state, is_complete = State(), False
            elif begin != revision:
                is_complete = False
        if not answer["snapshot"]:
            if not is_complete and response.request["start_revision"] == 0:
                is_complete, exact_from = True, _revision_after(history, response)
            if is_complete:
                yield Step(response, revision, exact_from), state
            revision = answer["revision"]
        for change in answer["changes"]:
            state.apply(change)


def _revision_after(history: History, response: Record) -> float:
    """A revision that the coordinator reached after it had sent a response."""
    later = (lookup for lookup in history.of(*LOOKUPS) if lookup.server == response.server and response.before(lookup))
    first = next(later, None)
    return NEVER if first is None else float(first.answer["revision"])


def lookups_equal_map(history: History) -> Iterator[Violation]:
    """A lookup names all instances that hold the first chunk and the prefix that each holds, at its revision.

    `LookupResponse.holders`: "all instances that hold the first chunk"; `revision`: "of the layout map at the lookup";
    `WatchResponse`: "all changes up to `revision` were sent". One response has the changes of several revisions: a
    lookup between two responses may see any number of these changes.
    """
    lookups: defaultdict[str, list[Record]] = defaultdict(list)
    for lookup in sorted(history.of(*LOOKUPS), key=lambda lookup: int(lookup.answer["revision"])):
        lookups[lookup.server].append(lookup)
    revisions = {server: [lookup.answer["revision"] for lookup in some] for server, some in lookups.items()}
    for (_, server), watch in by_watcher(history).items():
        for step, state in steps(history, watch):
            response = step.response
            first = bisect.bisect_right(revisions.get(server, []), step.before)
            last = bisect.bisect_right(revisions.get(server, []), response.answer["revision"])
            for lookup in lookups[server][first:last]:
                start, end = min(lookup.start, response.start), max(lookup.end, response.end)
                is_known = lookup.answer["revision"] >= step.exact_from and history.is_one_life(server, start, end)
                legal = _legal_answers(lookup, state, step) if is_known else []
                if legal and lookup.answer["holders"] not in legal:
                    yield Violation(
                        rule="lookups_equal_map",
                        what=f"by a watch, {legal[-1] or 'no instance'} held the chunks at this revision",
                        records=(lookup, response),
                    )


def _legal_answers(lookup: Record, state: State, step: Step) -> list[Holders]:
    """What the lookup may have seen between a step and the one before it, oldest first."""
    keys, excluded = lookup.request["keys"], lookup.request.get("excluded", "")
    seen = state.of(keys)
    legal = [seen.holders(keys, excluded)]
    for change in step.response.answer["changes"]:
        seen.apply(change)
        legal.append(seen.holders(keys, excluded))
    return legal[-1:] if lookup.answer["revision"] == step.response.answer["revision"] else legal


def watches_agree(history: History) -> Iterator[Violation]:
    """Two watches of one coordinator state the same map at the same revision, also if one of them was resumed.

    `WatchResponse.revision`: "a watch with it as `start_revision` continues here".
    """
    known: dict[tuple[str, int], tuple[Record, int]] = {}
    watches = by_watcher(history)
    for (_, server), watch in watches.items():
        for step, state in steps(history, watch):
            if step.before < step.exact_from:
                continue
            response, digest = step.response, state.digest
            other, other_digest = known.setdefault((server, step.before), (response, digest))
            start, end = min(other.start, response.start), max(other.end, response.end)
            if digest != other_digest and history.is_one_life(server, start, end):
                difference = sorted(state.chunks() ^ _before(history, watches[other.actor, server], other))
                yield Violation(
                    rule="watches_agree",
                    what=f"{other.actor} and {response.actor} differ at revision {step.before}: {difference}",
                    records=(other, response),
                )


def _before(history: History, watch: Iterable[Record], response: Record) -> set[tuple[str, str, str]]:
    return next(state.chunks() for step, state in steps(history, watch) if step.response is response)


def watches_converge(history: History) -> Iterator[Violation]:
    """In the end each watch states exactly what the nodes hold."""
    contents = {record.server: record for record in history.of("Contents")}
    for (watcher, coordinator), watch in by_watcher(history).items():
        state, last = State(), None
        for step, current in steps(history, watch):
            state, last = current, step.response
        for node, record in contents.items():
            if last is None or not record.end <= last.end:
                continue
            stated = {chunk for chunk in state.chunks() if chunk[0] == node}
            held = {(node, key, tier) for tier, keys in record.answer["tiers"].items() for key in keys}
            if stated != held:
                yield Violation(
                    rule="watches_converge",
                    what=f"{watcher} of {coordinator} differs from {node}: {sorted(stated ^ held)}",
                    records=(last, record),
                )


def revisions_rise(history: History) -> Iterator[Violation]:
    """Revisions never decrease: not within a watch, nor from any answer to a lookup that starts later."""
    for watch in by_watcher(history).values():
        for one, other in pairwise(watch):
            if one.stream == other.stream and other.answer["revision"] < one.answer["revision"]:
                yield Violation(rule="revisions_rise", what="a watch steps back", records=(one, other))
    answers = sorted(history.of("Watch", *LOOKUPS), key=lambda record: record.end)
    highest: dict[str, Record] = {}
    at = 0
    for lookup in sorted(history.of(*LOOKUPS), key=lambda record: record.start):
        while at < len(answers) and answers[at].before(lookup):
            answer, at = answers[at], at + 1
            known = highest.get(answer.server, answer)
            is_higher = answer.answer["revision"] >= known.answer["revision"]
            if is_higher or not history.is_one_life(answer.server, known.start, answer.end):
                highest[answer.server] = answer
        known = highest.get(lookup.server, lookup)
        is_lower = lookup.answer["revision"] < known.answer["revision"]
        if is_lower and history.is_one_life(lookup.server, known.start, lookup.end):
            yield Violation(rule="revisions_rise", what="a later lookup has a lower revision", records=(known, lookup))


def holders_have_reported(history: History) -> Iterator[Violation]:
    """A lookup names an instance only if that had reported the chunk to the map, and not its loss.

    A report is applied between its arrival and its acknowledgement. Of a map that coordinators share, one of them may
    learn of a loss later than the one that acknowledged it, so that only gains are compared.
    """
    held = _reported(history)
    for lookup in history.of(*LOOKUPS):
        for instance, tiers in lookup.answer["holders"].items():
            for key in lookup.request["keys"][: len(tiers)]:
                spans = [*held[lookup.server, instance, key], *held["", instance, key]]
                if not any(start <= lookup.end and lookup.start <= end for start, end in spans):
                    yield Violation(
                        rule="holders_have_reported",
                        what=f"{instance} did not hold {key} as it has reported",
                        records=(lookup, *_reports_of(history, instance, key)),
                    )
                    break


def _reported(history: History) -> defaultdict[tuple[str, str, str], list[tuple[float, float]]]:
    """When a map may have had a chunk, by coordinator, or "" for a shared map, instance and key."""
    spans: defaultdict[tuple[str, str, str], list[tuple[float, float]]] = defaultdict(list)
    tiers: defaultdict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    staged: dict[str, set[tuple[str, str]]] = {}
    seen: set[tuple[str, str]] = set()

    def lose(place: tuple[str, str, str], tier: str, end: float) -> None:
        if (start := tiers[place].pop(tier, None)) is not None:
            spans[place].append((start, NEVER if place[0] == "" else end))

    for report in history.attempts("Report"):
        request, node = report.request, report.request["instance"]
        if (name := (report.stream, request["sequence"])) in seen:
            continue  # it arrived twice, which changes nothing
        seen.add(name)
        server = "" if request.get("map") else report.server
        for change in request["changes"]:
            for key in change["gained"]:
                tiers[server, node, key].setdefault(change["tier"], report.start)
                if request["snapshot"]:
                    staged.setdefault(report.stream, set()).add((key, change["tier"]))
            for key in change["lost"]:
                lose((server, node, key), change["tier"], report.end)
        if request["snapshot_end"]:
            named = staged.pop(report.stream, set())
            for place in [place for place in tiers if place[:2] == (server, node)]:
                for tier in [tier for tier in tiers[place] if (place[2], tier) not in named]:
                    lose(place, tier, report.end)
    for place, held in tiers.items():
        spans[place].extend((start, NEVER) for start in held.values())
    return spans


def _reports_of(history: History, instance: str, key: str) -> list[Record]:
    return [
        report
        for report in history.attempts("Report")
        if report.request["instance"] == instance
        and any(key in (*change["gained"], *change["lost"]) for change in report.request["changes"])
    ]


def reports_are_acknowledged_once_sent(history: History) -> Iterator[Violation]:
    """`acked_sequence` never exceeds what was sent over the stream, and neither it nor the revision decreases."""
    sent: defaultdict[str, list[Record]] = defaultdict(list)
    for report in history.attempts("Report"):
        sent[report.stream].append(report)
    streams: defaultdict[str, list[Record]] = defaultdict(list)
    for ack in history.of("Acknowledge"):
        streams[ack.stream].append(ack)
    for stream, acks in streams.items():
        for ack in acks:
            highest = max((one.request["sequence"] for one in sent[stream] if one.start <= ack.end), default=0)
            if ack.answer["acked_sequence"] > highest:
                what = (
                    f"report {ack.answer['acked_sequence']} was acknowledged, and {highest} is the last that was sent"
                )
                yield Violation(rule="reports_are_acknowledged_once_sent", what=what, records=(ack,))
        for one, other in pairwise(sorted(acks, key=lambda ack: ack.end)):
            if any(other.answer[name] < one.answer[name] for name in ("acked_sequence", "revision")):
                yield Violation(
                    rule="reports_are_acknowledged_once_sent",
                    what="a later acknowledgement is lower",
                    records=(one, other),
                )


def by_watcher(history: History) -> dict[tuple[str, str], list[Record]]:
    """The responses of all watches, by watcher and coordinator, in the order of their arrival."""
    watches: defaultdict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in sorted(history.of("Watch"), key=lambda record: record.end):
        watches[record.actor, record.server].append(record)
    return dict(watches)
