"""How long a coordinator remembers operations that have ended."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from lmkv.v1.cache_service_pb2 import ClearProgress
from lmkv_server.coordinator.operations import operations as operations_module
from lmkv_server.coordinator.operations.operations import Operation, OperationTable

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
    monkeypatch.setattr(operations_module, "time", clock)
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
