"""Serves `EngineService` on the node's unix sockets: by gRPC, and `Attach` alone as frames too."""

from __future__ import annotations

from contextlib import AsyncExitStack

from lmkv import rpc
from lmkv.config import NodeConfig
from lmkv.telemetry.calls import ServerCalls
from lmkv.v1 import engine_service_pb2_grpc
from lmkv_server.node.engines.attach_socket import AttachSocket
from lmkv_server.node.engines.service import EngineService
from lmkv_server.node.ports import STOP_GRACE_SECONDS, bind

ENGINE_SERVICE = "lmkv.v1.EngineService"


async def serve_engines(config: NodeConfig, service: EngineService, calls: ServerCalls, stack: AsyncExitStack) -> None:
    """Serves until the stack is closed. Raises `ConfigError` if a socket cannot be bound."""
    # First: an engine that finds the socket of gRPC attaches here.
    await stack.enter_async_context(AttachSocket(config.attach_socket, service.attach))
    server = await rpc.make_server([ENGINE_SERVICE], calls)
    engine_service_pb2_grpc.add_EngineServiceServicer_to_server(service, server)
    bind(server, f"unix:{config.engine_socket}", "runtime_dir")
    await server.start()
    stack.push_async_callback(server.stop, STOP_GRACE_SECONDS)
