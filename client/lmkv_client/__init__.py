"""Clients of lmkv: an SDK for the coordinator, the commands, the engine API, and vLLM's connector.

    from lmkv_client import Coordinator

    async with Coordinator("head:9000") as coordinator:
        answer = await coordinator.lookup(tokens)

`lmkv_client.sync` has the same API for code without an event loop. `lmkv_client.engine` is the API for
engines. Modules are imported at first use, since vLLM loads this package in each of its processes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lmkv.auth.credentials import Credentials
    from lmkv_client.chunks import Chunks
    from lmkv_client.coordinator import Coordinator, LayoutUpdate, LookupStream
    from lmkv_client.operation import ClearOperation, DrainOperation, MoveOperation, Operation

__all__ = [
    "Chunks",
    "ClearOperation",
    "Coordinator",
    "Credentials",
    "DrainOperation",
    "LayoutUpdate",
    "LookupStream",
    "MoveOperation",
    "Operation",
]

_MODULES = {
    "Chunks": "lmkv_client.chunks",
    "ClearOperation": "lmkv_client.operation",
    "DrainOperation": "lmkv_client.operation",
    "Coordinator": "lmkv_client.coordinator",
    "LayoutUpdate": "lmkv_client.coordinator",
    "LookupStream": "lmkv_client.coordinator",
    "MoveOperation": "lmkv_client.operation",
    "Operation": "lmkv_client.operation",
    "Credentials": "lmkv.auth.credentials",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
