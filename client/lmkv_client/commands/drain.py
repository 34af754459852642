"""`lmkv drain`: copies what only one instance holds to other instances, so that it can be stopped."""

from __future__ import annotations

import argparse
import uuid

from lmkv.cli import Command
from lmkv_client import Coordinator
from lmkv_client.commands import add_common_arguments, call, read_seconds
from lmkv_client.commands.following import AnyOperation, show_operation, start, wait_for
from lmkv_client.operation import RETRY_TIMEOUT_SECONDS, WAIT_SECONDS

EXAMPLES = """\
  lmkv drain engine-1                            to the instances with most free memory
  lmkv drain engine-1 --to engine-2 engine-3     to engine-2, and to engine-3 once that is full
  lmkv drain engine-1 --timeout 2m --evict       destinations may evict other chunks to make room

The chunks are copied: engine-1 keeps them and continues to serve. What its engines store after the drain is not copied,
so stop their traffic first. While no coordinator responds, the command tries again for 30 s.

exit codes:
  0  safe to stop        1  rejected, failed, or nothing was copied     2  bad usage or configuration
  3  some chunks are held by this instance only                       130  interrupted; the operation continues"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv drain`."""
    parser.add_argument("instance", metavar="INSTANCE", help="the instance that is to be stopped")
    parser.add_argument(
        "--to",
        dest="destinations",
        metavar="INSTANCE",
        nargs="+",
        default=[],
        help="destinations in order of preference (default: all others, the one with most free memory first)",
    )
    parser.add_argument(
        "--evict", action="store_true", help="destinations may evict other chunks (default: they use free memory only)"
    )
    parser.add_argument(
        "--timeout",
        metavar="TIME",
        type=read_seconds,
        default=600.0,
        help="deadline of the drain, such as 2m (default and maximum: 10m)",
    )
    parser.add_argument("--no-wait", action="store_true", help="return as soon as the operation is started")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Starts the drain, waits for it unless `--no-wait`, and prints whether the instance may be stopped.

    Tries again while no coordinator responds: Kubernetes runs the hook of a pod that stops only once.
    """
    request_id = str(uuid.uuid4())  # the same for all attempts, which start one operation

    async def order(coordinator: Coordinator) -> AnyOperation:
        operation = await start(
            coordinator.drain(
                args.instance,
                destinations=args.destinations,
                evict=args.evict,
                deadline_seconds=args.timeout,
                request_id=request_id,
            )
        )
        if not args.no_wait:
            await wait_for(operation, WAIT_SECONDS)
        return operation

    operation = call(args, order, retry_seconds=min(RETRY_TIMEOUT_SECONDS, args.timeout))
    return show_operation(operation, as_json=args.json)


command = Command(
    name="drain",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
