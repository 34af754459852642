"""The command `lmkv node`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os

from lmkv import config as configuration
from lmkv import telemetry
from lmkv.config import NodeConfig
from lmkv.config.resolve import follow_logging
from lmkv.runtime.signals import first_of, hold_stop_signals, stop_on_signals

SERVICE_NAME = "lmkv-node"
"""Service name in exported telemetry, unless `OTEL_SERVICE_NAME` is set."""


def run(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or SIGHUP; with --linger, until no engine uses it."""
    config = configuration.from_arguments(args, NodeConfig)
    _set_up_logging(config)
    for notice in config.notices:
        logging.getLogger(__name__).warning("%s", notice)
    if args.linger:  # a connector started it
        with_all_processors()
    hold_stop_signals()
    with telemetry.trace_process(SERVICE_NAME, config.instance_id):
        asyncio.run(serve(config, args))
    return 0


def _set_up_logging(config: NodeConfig) -> None:
    telemetry.set_up_logging(config.log_level, config.log_format, service=SERVICE_NAME, instance_id=config.instance_id)


async def serve(config: NodeConfig, args: argparse.Namespace) -> None:
    """Serves until a signal, until an engine replaces the node, or with `--linger` until no engine uses it."""
    # Imported late: threads of libraries, such as NumPy's, inherit the mask of hold_stop_signals.
    from lmkv_server.node.node import Node

    stop = stop_on_signals()
    async with (
        Node(config, started_by_connector=args.started_by_connector) as node,
        telemetry.export_metrics(node.metrics.registry, SERVICE_NAME, config.instance_id),
    ):
        lingers = [node.linger()] if args.linger else []
        follows = follow_logging(args, NodeConfig, _set_up_logging)
        await first_of(stop.wait(), node.wait(), node.replaced(), follows, *lingers)


def with_all_processors() -> None:
    """Resets the CPU affinity: an engine pins its threads, and its node would inherit that and compete with them."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
