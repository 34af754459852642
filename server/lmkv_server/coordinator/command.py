"""`lmkv coordinator`: runs a coordinator until a stop signal."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import logging
from contextlib import suppress

from lmkv import telemetry
from lmkv.auth.authenticator import exposure
from lmkv.config import CoordinatorConfig, from_arguments
from lmkv.config.resolve import follow_logging
from lmkv.runtime.signals import fast_loop, first_of, hold_stop_signals, raise_file_limit, stop_on_signals

logger = logging.getLogger(__name__)

SERVICE_NAME = "lmkv-coordinator"
"""Service name of its telemetry unless `OTEL_SERVICE_NAME` is set."""
LARGE_REQUEST_BYTES = 4 << 20
"""Upper limit of request buffers, up to which freed memory is kept for the next request."""


def run(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or SIGHUP."""
    config = from_arguments(args, CoordinatorConfig)
    _set_up_logging(config)
    for notice in config.notices:
        logger.warning(notice)
    if config.port_is_for_http:
        monitors = " and ".join(str(port) for port in config.monitor_ports.values())
        logger.info(
            "monitor_ports are set: port %d speaks HTTP, and gRPC is at %s; set http_port to have gRPC at port too",
            config.port,
            monitors,
        )
    _keep_freed_memory()
    raise_file_limit()
    hold_stop_signals()
    with telemetry.trace_process(SERVICE_NAME, ""), asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(serve(config, args))
    return 0


def _keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory of one large request; by default each request maps its pages again."""
    m_trim_threshold, m_mmap_threshold = -1, -3  # malloc.h
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(m_mmap_threshold, LARGE_REQUEST_BYTES)
        mallopt(m_trim_threshold, 8 * LARGE_REQUEST_BYTES)


def _set_up_logging(config: CoordinatorConfig) -> None:
    telemetry.set_up_logging(config.log_level, config.log_format, service=SERVICE_NAME)


async def serve(config: CoordinatorConfig, args: argparse.Namespace) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP. Raises `ConfigError` if a port cannot be bound."""
    # Imported late: threads of libraries, such as NumPy's, inherit the mask of hold_stop_signals.
    from lmkv_server.coordinator.coordinator import Coordinator
    from lmkv_server.coordinator.operations.audit import write_audit_to

    stop = stop_on_signals()
    write_audit_to(config.audit_log)
    coordinator = Coordinator(config)
    if warning := exposure(config.host, coordinator.authenticator, config.credentials):
        logger.warning(warning)
    async with coordinator, telemetry.export_metrics(coordinator.metrics, SERVICE_NAME, ""):
        logger.info("Ready on %s", coordinator.address)
        if coordinator.url:
            logger.info("HTTP on %s", coordinator.url)
        await first_of(stop.wait(), coordinator.wait(), follow_logging(args, CoordinatorConfig, _set_up_logging))
    logger.info("Stopped")
