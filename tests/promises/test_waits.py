"""Tests wait for conditions. None asserts that something is fast: it would fail on a busy host, and then be ignored.

What is to be fast is measured in `benchmarks`. A test that something ends long before its timeout gives it a timeout of
minutes and waits for it as for any condition (tests/waiting.py).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

CLOCKS = {"monotonic", "perf_counter", "process_time", "thread_time", "time", "cpu_seconds"}
ALLOWED: dict[str, str] = {}
"""Files that bound a time from above, and why that does not fail on a busy host."""


def reads_clock(node: ast.AST) -> bool:
    """Whether an expression calls a clock that measures durations; the time of day is compared with time stamps."""
    calls = [ast.unparse(call.func) for call in ast.walk(node) if isinstance(call, ast.Call)]
    return any(call.rpartition(".")[2] in CLOCKS and call != "time.time" for call in calls)


def upper_bounds(function: ast.AST) -> Iterator[int]:
    """Lines of the asserts in a function that something took less than so long."""
    moments: set[str] = set()
    durations: set[str] = set()

    def is_moment(node: ast.AST) -> bool:
        return reads_clock(node) or any(isinstance(name, ast.Name) and name.id in moments for name in ast.walk(node))

    def is_duration(node: ast.AST) -> bool:
        return any(
            (isinstance(part, ast.BinOp) and isinstance(part.op, ast.Sub) and is_moment(part.left))
            or (isinstance(part, ast.Name) and part.id in durations)
            for part in ast.walk(node)
        )

    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and reads_clock(node.value):
            names = {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            (durations if is_duration(node.value) else moments).update(names)
    for node in ast.walk(function):
        if not isinstance(node, ast.Assert):
            continue
        for compare in (part for part in ast.walk(node.test) if isinstance(part, ast.Compare)):
            sides = [compare.left, *compare.comparators]
            for small, order, large in zip(sides, compare.ops, sides[1:], strict=False):
                if isinstance(order, ast.Gt | ast.GtE):
                    small, large = large, small
                if isinstance(order, ast.Lt | ast.LtE | ast.Gt | ast.GtE) and is_duration(small):
                    yield node.lineno


def test_no_test_asserts_that_something_is_fast(root: Path) -> None:
    found = [
        f"{name}:{line}"
        for file in sorted((root / "tests").rglob("*.py"))
        if (name := str(file.relative_to(root / "tests"))) not in ALLOWED
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for line in upper_bounds(function)
    ]
    assert not found, f"wait for a condition with a deadline of tests/waiting.py instead: {found}"


@pytest.mark.parametrize(
    ("body", "is_found"),
    [
        ("began = time.monotonic(); act(); assert time.monotonic() - began < 0.5", True),
        ("began = time.monotonic(); assert 0.1 < time.monotonic() - began < 0.5", True),
        ("began = time.monotonic(); assert 0.5 > time.monotonic() - began", True),
        ("before = time.process_time(); spent = time.process_time() - before; assert spent <= 0.03", True),
        ("before = cpu_seconds(pid); assert cpu_seconds(pid) - before < 0.1", True),
        ("began = time.monotonic(); assert time.monotonic() - began >= 0.3", False),
        ("deadline = time.monotonic() + 20; assert time.monotonic() < deadline", False),
        ("began = loop.time(); assert count <= 1 + (loop.time() - began)", False),
    ],
)
def test_upper_bounds_of_times_are_found(body: str, is_found: bool) -> None:
    assert bool(list(upper_bounds(ast.parse(body)))) is is_found
