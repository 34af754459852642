"""Which of several equal targets is used after failures."""

from __future__ import annotations

from lmkv.rpc.failover import Failover


def test_after_a_failure_the_next_target_is_used_and_the_first_one_after_the_last() -> None:
    targets = Failover(["a", "b", "c"])
    used = []
    for _ in range(4):
        used.append(targets.current)
        targets.report_failure(targets.current)
    assert used == ["a", "b", "c", "a"]
    assert len(targets) == 3


def test_several_failures_of_one_target_skip_no_other() -> None:
    a, b, c = object(), object(), object()
    targets = Failover([a, b, c])
    for _ in range(5):  # all calls that were in flight fail
        targets.report_failure(a)
    assert targets.current is b
    targets.report_failure(c)
    assert targets.current is b
