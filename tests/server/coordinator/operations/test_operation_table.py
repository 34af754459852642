"""What a coordinator remembers of operations that it evicted: their names, while instances may still report them."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from lmkv.v1.cache_service_pb2 import ClearProgress
from lmkv_server.coordinator.operations import operation_table
from lmkv_server.coordinator.operations.operation import Operation
from lmkv_server.coordinator.operations.operation_table import LATE_SECONDS, OperationTable

TTL_SECONDS = 60.0


def ended(number: int) -> Operation:
    now = time.time()
    return Operation(
        name=f"clear-{number:016x}",
        kind="clear",
        progress=ClearProgress(),
        request=None,
        create_time=now,
        expire_time=now,
        end_time=now,
    )


def test_a_jump_of_the_wall_clock_loses_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(wall=time.time(), monotonic=0.0)
    clock = SimpleNamespace(time=lambda: now.wall, monotonic=lambda: now.monotonic)
    monkeypatch.setattr(operation_table, "time", clock)
    table = OperationTable(TTL_SECONDS)
    table.store(operation := ended(1))
    now.wall += 3600.0
    now.monotonic += TTL_SECONDS - 1.0
    table.store(operation)  # filed again: it is not kept for longer
    table.expire()
    assert table.find(operation.name) is operation
    now.wall -= 7200.0
    now.monotonic += 2.0
    table.expire()
    assert table.find(operation.name) is None
    assert table.is_forgotten(operation.name)


def test_names_of_evicted_operations_are_kept_until_no_instance_reports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    passed = SimpleNamespace(seconds=0.0)
    clock = SimpleNamespace(time=time.time, monotonic=lambda: passed.seconds)
    monkeypatch.setattr(operation_table, "time", clock)
    table = OperationTable(TTL_SECONDS)
    begun = [ended(number) for number in range(100)]
    for operation in begun:
        table.store(operation)
        table.forget(operation)
        passed.seconds += 1
    passed.seconds = TTL_SECONDS + LATE_SECONDS
    table.expire()
    assert all(table.is_forgotten(operation.name) for operation in begun)
    passed.seconds += 50.5
    table.expire()
    assert [table.is_forgotten(operation.name) for operation in begun] == [False] * 51 + [True] * 49
