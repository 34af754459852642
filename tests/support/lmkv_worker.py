"""Imports what `lmkv node`, `lmkv coordinator` and `lmkv proxy` import, then forks them. Run by `forked_commands`.

gRPC is imported and never used here: a process that has used it cannot be forked.
"""

from __future__ import annotations

import sys

import uvloop  # noqa: F401
import yaml  # noqa: F401

import lmkv_server.commands
import lmkv_server.coordinator.coordinator
import lmkv_server.coordinator.operations.audit
import lmkv_server.node.node
import lmkv_server.proxy.proxy  # noqa: F401
from tests.support.fork_server import run_module, serve

if __name__ == "__main__":
    serve(sys.argv[1], lambda request, _: run_module(request))
