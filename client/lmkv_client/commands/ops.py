"""`lmkv ops`: lists, shows, waits for and cancels operations (moves, copies, clears and drains)."""

from __future__ import annotations

import argparse

from google.longrunning.operations_pb2 import ListOperationsResponse

from lmkv.cli import Command
from lmkv.errors import ConfigError
from lmkv.units import format_duration
from lmkv_client import Coordinator
from lmkv_client.commands import DONE, add_common_arguments, call, print_json
from lmkv_client.commands.following import (
    EXIT_CODES,
    AnyOperation,
    add_timeout_argument,
    age_seconds,
    describe_progress,
    describe_subject,
    show_operation,
    wait_for,
)
from lmkv_client.commands.tables import Number, print_table

EXAMPLES = f"""\
  lmkv ops                                  list them, newest first
  lmkv ops --running                        only those that run
  lmkv ops show move-1879f0c2a3b4c5d6       what one did, or how far it is
  lmkv ops wait move-1879f0c2a3b4c5d6 --timeout 30s
  lmkv ops cancel move-1879f0c2a3b4c5d6     what it has done so far stays done

{EXIT_CODES}"""


COLUMNS = ("OPERATION", "SUBJECT", "STATE", Number("PROGRESS"), Number("AGE"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv ops`."""
    parser.add_argument(
        "action", nargs="?", choices=("list", "show", "wait", "cancel"), default="list", help="(default: list)"
    )
    parser.add_argument("operation", nargs="?", metavar="ID", help="the operation; not for list")
    parser.add_argument("--running", action="store_true", help="list only running operations")
    add_timeout_argument(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the action. Raises `ConfigError` if the operation is missing or not allowed."""
    if args.action == "list":
        if args.operation:
            raise ConfigError(f"`lmkv ops list` takes no ID; `lmkv ops show {args.operation}` shows one")
        return print_list(call(args, lambda coordinator: coordinator.operations(running=args.running)), args.json)
    if not args.operation:
        raise ConfigError(f"`lmkv ops {args.action}` needs the ID of an operation; `lmkv ops` lists them")

    async def act(coordinator: Coordinator) -> AnyOperation:
        operation = await coordinator.operation(args.operation)
        if args.action == "cancel":
            await operation.cancel()
        if args.action in ("wait", "cancel"):  # a cancelled one takes a moment
            await wait_for(operation, args.timeout)
        return operation

    operation = call(args, act)
    if args.action == "cancel" and operation.state == "cancelled" and not args.json:
        print(f"{operation.name}: {operation.error}")  # that is no failure now
        return DONE
    return show_operation(operation, as_json=args.json)


def print_list(operations: list[AnyOperation], as_json: bool) -> int:
    """Prints one line per operation; succeeds also without operations."""
    if as_json:
        print_json(ListOperationsResponse(operations=[operation.message for operation in operations]))
    elif operations:
        print_table(COLUMNS, [row(operation) for operation in operations])
    else:
        print("there are no operations")
    return DONE


def row(operation: AnyOperation) -> tuple[str, ...]:
    """The table row of an operation."""
    age = age_seconds(operation)
    return (
        operation.name,
        describe_subject(operation.progress),
        operation.state,
        describe_progress(operation.progress),
        "-" if age is None else format_duration(max(age, 0.0)),
    )


command = Command(
    name="ops",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
