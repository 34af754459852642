"""Serves `EngineService` on the node's unix socket."""

from __future__ import annotations

from contextlib import AsyncExitStack

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.telemetry.calls import ServerCalls
from lmkv.v1 import engine_service_pb2_grpc
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.ports import STOP_GRACE_SECONDS, bind

ENGINE_SERVICE = "lmkv.v1.EngineService"


async def serve_engines(config: NodeConfig, service: EngineService, calls: ServerCalls, stack: AsyncExitStack) -> None:
    """Serves until the stack is closed. Raises `ConfigError` if the socket cannot be bound."""
    server = await rpc.make_server([ENGINE_SERVICE], calls)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(service, server)
    bind(server, f"unix:{config.engine_socket}", "runtime_dir")
    await server.start()
    stack.push_async_callback(server.stop, STOP_GRACE_SECONDS)
