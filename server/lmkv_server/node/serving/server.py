"""Composes the peer side of a node: channels, connections, fetches, both sides of handoffs, and `PeerService`."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from lmkv import rpc
from lmkv.auth.authenticator import Authenticator
from lmkv.auth.exposure import exposure
from lmkv.config import NodeConfig
from lmkv.pool.pool import Pool
from lmkv.telemetry.calls import ServerCalls
from lmkv.transfer import Channels, End
from lmkv.v1 import peer_service_pb2_grpc
from lmkv_kernels import summed_copy
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fetch.fetcher import PeerFetcher
from lmkv_server.node.fetch.pipeline import TransferPipeline
from lmkv_server.node.handoff.receiver import Receiver
from lmkv_server.node.handoff.sender import SenderContext
from lmkv_server.node.handoff.senders import MAX_SENDERS, Senders
from lmkv_server.node.handoff.table import HandoffTable
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.peers.directory import InstanceDirectory
from lmkv_server.node.ports import STOP_GRACE_SECONDS, bind
from lmkv_server.node.serving.inspector import Inspector
from lmkv_server.node.serving.service import PeerService
from lmkv_server.node.sessions.sessions import EngineSessions
from lmkv_server.node.tiers.disk.tier import DiskTier

logger = logging.getLogger(__name__)

PEER_SERVICE = "lmkv.v1.PeerService"


class PeerServer:
    """To be used as an async context manager. Raises `ConfigError` from `__aenter__` if it cannot start as configured.

    Without `enable_pd`, or in the other role, every handoff is refused.
    """

    def __init__(
        self,
        config: NodeConfig,
        *,
        epoch: int,
        tier: HostTier,
        pool: Pool,
        engines: EngineSessions,
        disk: DiskTier | None = None,
        calls: ServerCalls | None = None,
    ) -> None:
        self.address = ""
        """`host:port` of `PeerService`, once started."""
        receives = config.enable_pd and config.pd_role != "sender"
        self.channels = Channels(
            config.transfer_channel,
            End(
                name=f"{config.instance_id}:{epoch}",
                pool=pool,
                host=config.p2p_host,
                port=config.transfer_port,
                socket_path=config.transfer_socket,
                summed_copy=summed_copy if config.verify_transfers else None,
                nixl_backends=config.nixl_backends,
                options=config.transfer_options,
            ),
        )
        self.directory = InstanceDirectory(config.runtime_path)
        """Finds the other nodes of the fleet; `locate` is set when there are coordinators to ask."""
        self.inspector = Inspector(tier, pool)
        self.connections = PeerConnectionPool(
            instance_id=config.instance_id,
            epoch=epoch,
            channels=self.channels,
            host=config.p2p_host,
            credentials=config.peer_tls,
        )
        self.pipeline = TransferPipeline(tier, self.channels, pool, verify=config.verify_transfers)
        self.fetcher = PeerFetcher(self.pipeline, self.connections)
        self.receiver = Receiver(
            HandoffTable(
                tier,
                buffer_bytes=config.pd_buffer_bytes if receives else 0,
                timeout_seconds=config.pd_timeout,
                abandon_seconds=config.pd_abandon_timeout,
            ),
            self.pipeline,
            self.connections,
            engines,
            self.directory,
            config.instance_id,
        )
        self.service = PeerService(
            instance_id=config.instance_id,
            epoch=epoch,
            tier=tier,
            specs=engines,
            channels=self.channels,
            region_address=pool.address,
            grant_ttl_seconds=config.grant_ttl,
            inspector=self.inspector,
            receiver=self.receiver,
            disk=disk,
        )
        self.senders = Senders(
            SenderContext(
                instance_id=config.instance_id,
                epoch=epoch,
                tier=tier,
                connections=self.connections,
                directory=self.directory,
                grant_reads=self.service.lending,
                inspect=self.inspector.inspect,
            ),
            limit=MAX_SENDERS if config.enable_pd and config.pd_role != "receiver" else 0,
        )
        self._config = config
        self._epoch = epoch
        self._calls = calls
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> PeerServer:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        stack, config = self._stack, self._config
        stack.push_async_callback(self.channels.aclose)
        await self.channels.start()
        await stack.enter_async_context(self.inspector)
        stack.push_async_callback(self.pipeline.aclose)
        stack.push_async_callback(self.connections.aclose)
        await stack.enter_async_context(self.receiver)
        await stack.enter_async_context(self.service)
        authenticator = Authenticator(config.auth_tokens, config.credentials.token)
        if warning := exposure(config.p2p_host, authenticator, config.peer_tls):
            logger.warning(warning)
        server = await rpc.make_server([PEER_SERVICE], self._calls, authenticator)
        peer_service_pb2_grpc.add_PeerServiceServicer_to_server(self.service, server)
        port = bind(server, f"{config.p2p_host}:{config.p2p_port}", "p2p_port", config.peer_tls, config.runtime_path)
        await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_SECONDS)
        self.address = f"{config.p2p_host}:{port}"
        self.directory.publish(config.instance_id, self._epoch, self.address)
        stack.callback(self.directory.close)
        await stack.enter_async_context(self.senders)
