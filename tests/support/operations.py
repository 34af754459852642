"""Waits for operations of coordinators."""

from __future__ import annotations

from typing import Any

from google.longrunning import operations_pb2

from tests.waiting import WAIT_SECONDS


async def wait_for_operation(operations: Any, name: str) -> operations_pb2.Operation:
    """The operation once it is done; `operations` is a stub of a coordinator."""
    request = operations_pb2.WaitOperationRequest(name=name)
    done: operations_pb2.Operation = await operations.WaitOperation(request, timeout=WAIT_SECONDS)
    assert done.done
    return done
