"""Builds the peer side of a node: channels, connections, fetches, both sides of handoffs, and `PeerService`."""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from lmkv import rpc
from lmkv.auth.authenticator import Authenticator, exposure
from lmkv.config import NodeConfig
from lmkv.pool.pool import Pool
from lmkv.telemetry.calls import ServerCalls
from lmkv.transfer import ChannelEnd, Channels
from lmkv.v1 import peer_service_pb2_grpc
from lmkv_kernels import summed_copy
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.fetch.pipeline import TransferPipeline
from lmkv_server.node.fetch.tier import PeerFetcher
from lmkv_server.node.handoff.receiver import HandoffReceiver
from lmkv_server.node.handoff.sender import MAX_SENDERS, HandoffSenders, SenderContext
from lmkv_server.node.handoff.table import HandoffTable
from lmkv_server.node.peers.connection_pool import PeerConnectionPool
from lmkv_server.node.peers.directory import InstanceDirectory
from lmkv_server.node.ports import STOP_GRACE_SECONDS, bind
from lmkv_server.node.serving.service import Inspector, PeerService, ServedNode
from lmkv_server.node.tiers.codec import chunk_codec

logger = logging.getLogger(__name__)

PEER_SERVICE = "lmkv.v1.PeerService"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerSide:
    """The objects that a node with peers has besides its tiers."""

    address: str
    """`host:port` of `PeerService`."""
    channels: Channels
    directory: InstanceDirectory
    """Finds the other nodes of the fleet; `locate` is set when there are coordinators to ask."""
    inspector: Inspector
    connections: PeerConnectionPool
    pipeline: TransferPipeline
    fetcher: PeerFetcher
    receiver: HandoffReceiver
    service: PeerService
    senders: HandoffSenders


async def open_peer_side(
    config: NodeConfig, node: ServedNode, stack: AsyncExitStack, calls: ServerCalls | None = None
) -> PeerSide:
    """Opens it until the stack is closed. Raises `ConfigError` if it cannot start as configured.

    Without `enable_pd`, or in the other role, every handoff is refused.
    """
    tier, pool = node.tier, node.pool
    codec = chunk_codec("peer_codec", config.peer_codec, node.engines)
    node = replace(node, codec=codec)
    channels = _make_channels(config, node.epoch, pool)
    stack.push_async_callback(channels.aclose)
    await channels.start()
    directory = InstanceDirectory(config.runtime_path)
    inspector = await stack.enter_async_context(Inspector(tier, pool))
    pipeline = TransferPipeline(tier, channels, pool, verify=config.verify_transfers, codec=codec)
    stack.push_async_callback(pipeline.aclose)
    connections = PeerConnectionPool(
        instance_id=node.instance_id,
        epoch=node.epoch,
        channels=channels,
        host=config.p2p_host,
        credentials=config.peer_tls,
    )
    stack.push_async_callback(connections.aclose)
    handoffs = _make_handoffs(config, tier)
    receiver = await stack.enter_async_context(
        HandoffReceiver(handoffs, pipeline, connections, node.engines, directory)
    )
    service = await stack.enter_async_context(
        PeerService(node, channels, inspector, receiver, grant_ttl_seconds=config.grant_ttl)
    )
    address = await _serve(config, service, calls, stack)
    directory.publish(node.instance_id, node.epoch, address)
    stack.callback(directory.close)
    context = SenderContext(
        instance_id=node.instance_id,
        epoch=node.epoch,
        tier=tier,
        connections=connections,
        directory=directory,
        grant_reads=service.lending,
        inspect=inspector.inspect,
    )
    sends = config.enable_pd and config.pd_role != "receiver"
    return PeerSide(
        address=address,
        channels=channels,
        directory=directory,
        inspector=inspector,
        connections=connections,
        pipeline=pipeline,
        fetcher=PeerFetcher(pipeline, connections),
        receiver=receiver,
        service=service,
        senders=await stack.enter_async_context(HandoffSenders(context, limit=MAX_SENDERS if sends else 0)),
    )


def _make_channels(config: NodeConfig, epoch: int, pool: Pool) -> Channels:
    end = ChannelEnd(
        name=f"{config.instance_id}:{epoch}",
        pool=pool,
        host=config.p2p_host,
        port=config.transfer_port,
        socket_path=config.transfer_socket,
        summed_copy=summed_copy if config.verify_transfers else None,
        tls=config.transfer_tls,
        require_encryption=config.require_encryption,
        nixl_backends=config.nixl_backends,
        options=config.transfer_options,
    )
    return Channels(config.transfer_channel, end)


def _make_handoffs(config: NodeConfig, tier: HostTier) -> HandoffTable:
    receives = config.enable_pd and config.pd_role != "sender"
    return HandoffTable(
        tier,
        buffer_bytes=config.pd_buffer_bytes if receives else 0,
        timeout_seconds=config.pd_timeout,
        abandon_seconds=config.pd_abandon_timeout,
    )


async def _serve(config: NodeConfig, service: PeerService, calls: ServerCalls | None, stack: AsyncExitStack) -> str:
    """Serves `PeerService` until the stack is closed; returns its address."""
    authenticator = Authenticator(config.auth_tokens, config.credentials.token)
    if warning := exposure(config.p2p_host, authenticator, config.peer_tls):
        logger.warning(warning)
    server = await rpc.make_server([PEER_SERVICE], calls, authenticator)
    peer_service_pb2_grpc.add_PeerServiceServicer_to_server(service, server)
    port = bind(server, f"{config.p2p_host}:{config.p2p_port}", "p2p_port", config.peer_tls, config.runtime_path)
    await server.start()
    stack.push_async_callback(server.stop, STOP_GRACE_SECONDS)
    return f"{config.p2p_host}:{port}"
