"""`lmkv node`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os

from lmkv import config as configuration
from lmkv import telemetry
from lmkv.cli import Command
from lmkv.config import NodeConfig
from lmkv.serving import first_of, stop_on_signals
from lmkv_server.node.node import Node

SERVICE_NAME = "lmkv-node"
"""What it is called where it exports to, unless `OTEL_SERVICE_NAME` says otherwise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `lmkv node`."""
    configuration.add_arguments(parser, NodeConfig)
    parser.add_argument(
        "--linger", action="store_true", help="end by itself once no engine has been attached for node_linger seconds"
    )


def run(args: argparse.Namespace) -> int:
    """Runs until SIGTERM, SIGINT or, with --linger, until nobody needs it."""
    config = configuration.from_arguments(args, NodeConfig)
    telemetry.set_up_logging(
        config.log_level,
        config.log_format,
        "%(asctime)s lmkv node %(levelname)s %(message)s",
        service=SERVICE_NAME,
        instance_id=config.instance_id,
    )
    for notice in config.notices:
        logging.getLogger(__name__).warning("%s", notice)
    if args.linger:  # started by an engine
        with_all_processors()
    with telemetry.trace_process(SERVICE_NAME, config.instance_id):
        asyncio.run(serve(config, linger=args.linger))
    return 0


async def serve(config: NodeConfig, *, linger: bool) -> None:
    """Serves until told to stop, or until nobody needs the node."""
    stop = stop_on_signals()
    async with (
        Node(config) as node,
        telemetry.export_metrics(node.metrics.registry, SERVICE_NAME, config.instance_id),
    ):
        await first_of(stop.wait(), node.wait(), *([node.linger()] if linger else []))


def with_all_processors() -> None:
    """An engine pins its threads to processors; its node must not inherit that and compete for the very same one."""
    os.sched_setaffinity(0, range(os.cpu_count() or 1))


command = Command(
    name="node",
    help="run one host's cache: engines attach to it, peers fetch from it",
    add_arguments=add_arguments,
    run=run,
)
