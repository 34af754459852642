"""Histories: what lmkv's processes answered under faults, checked against what the protos promise.

Jepsen and etcd's robustness tests check a system from outside: record every call with its start, its end and its
answer while faults are injected, then search the record for an answer that no correct system could have given. These
tests do the same to lmkv:

    fleet of the chaos tests ──► recorder.py ──► JSON lines ──► checker.py ──► violations ──► minimise.py
    (real processes, faults)     interceptors    Record         one function              the records that matter
                                 and relays                     per promise

- `history.py`: a record, and what "before" and "concurrent" mean. Calls without an answer may or may not have happened.
- `byte_rules.py`, `layout_rules.py`, `operation_rules.py`, `end_rules.py`: the promises, each with the words of the
  proto that make it. A rule reports only what is illegal in every order of concurrent calls.
- `workload.py`: calls besides those of the chaos tests. `test_histories.py` runs everything; `make histories` does so
  for an hour, in rounds of a minute with a fleet, a seed and a history each.

A violation is printed with the fewest records that show it, and with the seed that repeats its schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.histories import byte_rules, end_rules, layout_rules, operation_rules
from tests.histories.history import History, Violation

Rule = Callable[[History], Iterator[Violation]]

RULES: tuple[Rule, ...] = (
    byte_rules.loads_equal_commits,
    byte_rules.extents_have_one_chunk,
    byte_rules.held_extents_are_not_written,
    byte_rules.grants_match_requests,
    layout_rules.lookups_equal_map,
    layout_rules.holders_have_reported,
    layout_rules.watches_agree,
    layout_rules.watches_converge,
    layout_rules.revisions_rise,
    layout_rules.reports_are_acknowledged_once_sent,
    operation_rules.moves_drop_what_has_arrived,
    operation_rules.copies_drop_nothing,
    operation_rules.pinned_chunks_stay,
    operation_rules.cleared_chunks_are_gone,
    operation_rules.operations_end_once,
    operation_rules.coordinators_state_one_end,
    operation_rules.operations_end,
    operation_rules.repeats_return_the_first,
    operation_rules.names_are_unique,
    operation_rules.epochs_rise,
    operation_rules.handoffs_end_once,
    end_rules.calls_end_in_time,
    end_rules.nothing_is_held,
)


def check(history: History) -> list[Violation]:
    """The first violation of each rule, in the order of the rules; none if the history is legal."""
    first = (next(rule(history), None) for rule in RULES)
    return [violation for violation in first if violation is not None]
