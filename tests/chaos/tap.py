"""Where a fleet's calls can be observed; `tests/histories` records them."""

from __future__ import annotations

from contextvars import ContextVar

import grpc

from lmkv import rpc
from lmkv.pool.pool import Pool
from tests.chaos.engine import Engine
from tests.server.node.engine_client import EngineClient

ACTOR: ContextVar[str] = ContextVar("actor", default="test")
"""Name of the actor whose task this is."""


class Tap:
    """Opens the channels and engines of a test. This one observes nothing."""

    def client_channel(self, address: str, server: str) -> grpc.aio.Channel:
        """A channel by which a client calls the server."""
        return rpc.open_channel(address)

    def relay_channel(self, address: str, server: str) -> grpc.aio.Channel:
        """A channel by which a relay passes calls on to the server."""
        return rpc.open_channel(address)

    def engine(self, client: EngineClient, pool: Pool, node: str) -> Engine:
        """An engine that has attached to the node."""
        return Engine(client, pool)
