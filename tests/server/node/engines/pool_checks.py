"""The size of the nodes' pool, and whether it is as before."""

from __future__ import annotations

from lmkv_server.node.node import Node
from lmkv_server.node.sessions.sessions import CREDIT_SHARE
from tests.server.node.cases import small_spec

SPEC = small_spec()
CAPACITY = 30
LIMIT = CAPACITY // CREDIT_SHARE


def is_clean(node: Node) -> bool:
    """Whether no chunk is held or reserved."""
    node.tier.check()
    return not node.tier.reserved_count and not any(chunk.holds for chunk in node.tier)


# ---- what a well-behaved engine gets
