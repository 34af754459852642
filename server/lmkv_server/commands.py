"""Runs the servers: `lmkv coordinator`, `node`, `proxy`, `picker` and `webhook`, each until a stop signal.

Servers are imported when they are served: threads of libraries, such as NumPy's, inherit the mask of
`hold_stop_signals`.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lmkv import telemetry
from lmkv.auth.authenticator import Authenticator, exposure
from lmkv.config import CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig, WebhookConfig, from_arguments
from lmkv.config.resolve import follow_logging
from lmkv.runtime.signals import fast_loop, first_of, hold_stop_signals, raise_file_limit, stop_on_signals

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

logger = logging.getLogger(__name__)

LARGE_REQUEST_BYTES = 4 << 20
"""Upper limit of a coordinator's request buffers, up to which freed memory is kept for the next request."""

C = TypeVar("C", CoordinatorConfig, NodeConfig, PickerConfig, ProxyConfig, WebhookConfig)


class ServerProcess(Generic[C]):
    """A process that serves: its configuration, logs, telemetry and stop signals."""

    def __init__(self, args: argparse.Namespace, config_class: type[C], service: str) -> None:
        """`service` is the name in logs, and in telemetry unless `OTEL_SERVICE_NAME` is set. Raises `ConfigError`."""
        self.config: C = from_arguments(args, config_class)
        self.service = service
        self._args = args
        self._instance_id = self.config.instance_id if isinstance(self.config, NodeConfig) else ""
        self._set_up_logging(self.config)
        for notice in self.config.notices:
            logger.warning("%s", notice)

    def run(self, serving: Coroutine[Any, Any, None], *, is_fast: bool = True) -> int:
        """Serves in an event loop, of uvloop if it is to be fast; returns the exit status."""
        hold_stop_signals()
        loop = fast_loop() if is_fast else None
        with telemetry.trace_process(self.service, self._instance_id), asyncio.Runner(loop_factory=loop) as runner:
            runner.run(serving)
        return 0

    def export(self, metrics: CollectorRegistry) -> AbstractAsyncContextManager[object]:
        """A context that exports metrics, if that is configured."""
        return telemetry.export_metrics(metrics, self.service, self._instance_id)

    async def wait(self, stop: asyncio.Event, *ends: Coroutine[Any, Any, object]) -> None:
        """Waits for a stop signal, or for one of the other ends; the log level follows the configuration file."""
        await first_of(stop.wait(), follow_logging(self._args, type(self.config), self._set_up_logging), *ends)

    def _set_up_logging(self, config: C) -> None:
        always = {"instance_id": self._instance_id} if self._instance_id else {}
        telemetry.set_up_logging(config.log_level, config.log_format, service=self.service, **always)


def coordinator(args: argparse.Namespace) -> int:
    """Runs a coordinator."""
    process = ServerProcess(args, CoordinatorConfig, "lmkv-coordinator")
    if process.config.port_is_for_http:
        logger.info(
            "monitor_ports are set: port %d speaks HTTP, and gRPC is at %s; set http_port to have gRPC at port too",
            process.config.port,
            " and ".join(str(port) for port in process.config.monitor_ports.values()),
        )
    _keep_freed_memory()
    raise_file_limit()
    return process.run(_serve_coordinator(process))


def _keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory of one large request; by default each request maps its pages again."""
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, LARGE_REQUEST_BYTES)
        mallopt(m_trim_threshold, 8 * LARGE_REQUEST_BYTES)


async def _serve_coordinator(process: ServerProcess[CoordinatorConfig]) -> None:
    from lmkv_server.coordinator.coordinator import Coordinator
    from lmkv_server.coordinator.operations.audit import write_audit_to

    stop, config = stop_on_signals(), process.config
    write_audit_to(config.audit_log)
    coordinator = Coordinator(config)
    if warning := exposure(config.host, coordinator.authenticator, config.credentials):
        logger.warning(warning)
    async with coordinator, process.export(coordinator.metrics):
        logger.info("Ready on %s", coordinator.address)
        if coordinator.url:
            logger.info("HTTP on %s", coordinator.url)
        await process.wait(stop, coordinator.wait())
    logger.info("Stopped")


def node(args: argparse.Namespace) -> int:
    """Runs a node; with `--linger`, until no engine uses it."""
    process = ServerProcess(args, NodeConfig, "lmkv-node")
    if args.linger:  # a connector started it: engines pin their threads, and the node would inherit that and compete
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    return process.run(_serve_node(process, args), is_fast=False)


async def _serve_node(process: ServerProcess[NodeConfig], args: argparse.Namespace) -> None:
    from lmkv_server.node.node import Node

    stop = stop_on_signals()
    node = Node(process.config, started_by_connector=args.started_by_connector)
    async with node, process.export(node.metrics.registry):
        lingers = [node.linger()] if args.linger else []
        await process.wait(stop, node.wait(), node.replaced(), *lingers)


def proxy(args: argparse.Namespace) -> int:
    """Runs a proxy."""
    process = ServerProcess(args, ProxyConfig, "lmkv-proxy")
    raise_file_limit()
    return process.run(_serve_proxy(process))


async def _serve_proxy(process: ServerProcess[ProxyConfig]) -> None:
    from lmkv_server.proxy.proxy import Proxy

    stop = stop_on_signals()
    proxy = Proxy(process.config)
    async with proxy, process.export(proxy.metrics):
        logger.info("Ready on %s", proxy.url)
        await process.wait(stop, proxy.wait())
    logger.info("Stopped")


def picker(args: argparse.Namespace) -> int:
    """Runs an endpoint picker."""
    process = ServerProcess(args, PickerConfig, "lmkv-picker")
    raise_file_limit()
    return process.run(_serve_picker(process))


async def _serve_picker(process: ServerProcess[PickerConfig]) -> None:
    from lmkv_server.proxy.picker.picker import Picker

    stop, config = stop_on_signals(), process.config
    if warning := exposure(config.host, Authenticator(config.auth_tokens), config.client_tls):
        logger.warning(warning)
    picker = Picker(config)
    async with picker, process.export(picker.metrics):
        gc.freeze()  # a collection of what start-up made takes tens of milliseconds
        logger.info("Ready on %s", picker.address)
        await process.wait(stop, picker.wait())
    logger.info("Stopped")


def webhook(args: argparse.Namespace) -> int:
    """Runs a webhook, which adds lmkv to the pods of engines that others create."""
    process = ServerProcess(args, WebhookConfig, "lmkv-webhook")
    process.config.check_complete()
    return process.run(_serve_webhook(process))


async def _serve_webhook(process: ServerProcess[WebhookConfig]) -> None:
    from lmkv_server.http.server import HttpOptions, HttpServer, address
    from lmkv_server.webhook.app import make_app
    from lmkv_server.webhook.injection import read_additions

    stop, config = stop_on_signals(), process.config
    additions = read_additions(config.pod_additions)
    options = HttpOptions(host=config.host, port=config.port, credentials=config.credentials, name=process.service)
    server = HttpServer(make_app(additions), options)
    await server.start()
    try:
        logger.info("Ready on https://%s", address(config.host, server.port))
        await process.wait(stop)
    finally:
        await server.aclose()
    logger.info("Stopped")
