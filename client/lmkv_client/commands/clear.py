"""`lmkv clear`: has instances drop chunks."""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial

from lmkv.cli import Command
from lmkv.errors import ConfigError
from lmkv.v1.cache_service_pb2 import ClearResult
from lmkv_client import Coordinator
from lmkv_client.commands import FAILED, add_common_arguments, call, count
from lmkv_client.commands.chunks import add_chunk_arguments, names_chunks, read_chunks
from lmkv_client.commands.following import (
    EXIT_CODES,
    AnyOperation,
    add_waiting_arguments,
    show_operation,
    start,
    wait_for,
)

EXAMPLES = f"""\
  lmkv clear --tokens 128000,849,21435,279              one prompt, wherever it is
  lmkv clear --model llama --dry-run                    how much of a model there is
  lmkv clear --model llama --weight-version 41          what old weights have computed
  lmkv clear --model llama --keep-weight-version 42     what all other weights have computed
  lmkv clear --all --instance lmkv-1 --tier disk        one tier of one instance
  lmkv clear --all --yes                                everything, without asking

More than one prompt's chunks are cleared only after you have confirmed it, on the terminal or with --yes. Pinned chunks
stay.

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv clear`."""
    parser.add_argument("--instance", metavar="INSTANCE", default="", help="only this instance (default: all)")
    parser.add_argument("--tier", metavar="TIER", default="", help="only this tier (default: all)")
    add_chunk_arguments(parser, required=False)
    versions = parser.add_mutually_exclusive_group()
    versions.add_argument(
        "--weight-version", metavar="VERSION", default="", help="with --model: only this version of the weights"
    )
    versions.add_argument(
        "--keep-weight-version",
        metavar="VERSION",
        default="",
        help="with --model: all versions of the weights but this one",
    )
    parser.add_argument("--all", action="store_true", help="all chunks, of any model")
    parser.add_argument("--dry-run", action="store_true", help="only report what would be dropped")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="do not ask for confirmation; required without a terminal to clear more than one prompt's chunks",
    )
    add_waiting_arguments(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Asks for confirmation unless the chunks are named; then starts the operation and waits for it.

    Raises `ConfigError` if it cannot ask.
    """
    if not (names_chunks(args) or args.model or args.all):
        raise ConfigError("nothing is selected: name a prompt with --tokens, a model with --model, or --all")
    if (args.weight_version or args.keep_weight_version) and (names_chunks(args) or not args.model):
        raise ConfigError("a version of the weights is of a model: add --model, and name no prompt")
    tokens, chunks = read_chunks(args)
    is_broad = args.all or not names_chunks(args)
    asks_first = is_broad and not (args.yes or args.dry_run)
    if asks_first and not sys.stdin.isatty():
        raise ConfigError(
            "this clears more than one prompt's chunks, and there is no terminal to ask on: add --yes to clear them, "
            "or --dry-run to count them"
        )

    async def order(coordinator: Coordinator) -> AnyOperation | None:
        clear = partial(
            coordinator.clear,
            tokens,
            instance_id=args.instance,
            tier=args.tier,
            everything=args.all,
            weight_version=args.weight_version,
            kept_weight_version=args.keep_weight_version,
            **chunks,
        )
        if asks_first:
            would = await (await clear(dry_run=True)).wait(args.timeout)
            if not await asyncio.to_thread(_confirm, would):
                return None
        operation = await start(clear(dry_run=args.dry_run))
        if not args.no_wait:
            await wait_for(operation, args.timeout)
        return operation

    operation = call(args, order)
    if operation is None:
        print("nothing was dropped", file=sys.stderr)
        return FAILED
    return show_operation(operation, as_json=args.json)


def _confirm(would: ClearResult) -> bool:
    question = f"drop {count(would.chunk_count, 'chunk')} ({count(would.token_count, 'token')})? [y/N] "
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


command = Command(
    name="clear",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
