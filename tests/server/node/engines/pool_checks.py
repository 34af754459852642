"""The size of the nodes' pool, whether it is as before, and a channel that breaks the limit of a message."""

from __future__ import annotations

from typing import Any

import grpc

from lmkv_server.node.node import Node
from lmkv_server.node.sessions.sessions import CREDIT_SHARE
from tests.support.specs import small_spec

SPEC = small_spec()
CAPACITY = 30
LIMIT = CAPACITY // CREDIT_SHARE


def is_clean(node: Node) -> bool:
    """Whether no chunk is held or reserved."""
    node.tier.check()
    return not node.tier.reserved_count and not any(chunk.holds for chunk in node.tier)


def unlimited(address: str) -> Any:
    """A channel that sends messages of any size."""
    return grpc.aio.insecure_channel(address, options=[("grpc.max_send_message_length", -1)])
