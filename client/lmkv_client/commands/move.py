"""`lmkv move` and `lmkv copy`: transfer chunks from one position to another."""

from __future__ import annotations

import argparse
from functools import partial

from lmkv.cli import Command
from lmkv_client import Coordinator
from lmkv_client.commands import add_common_arguments, call, read_position
from lmkv_client.commands.chunks import add_chunk_arguments, read_chunks
from lmkv_client.commands.following import (
    EXIT_CODES,
    AnyOperation,
    add_waiting_arguments,
    show_operation,
    start,
    wait_for,
)

EXAMPLES = f"""\
  lmkv %(verb)s --from lmkv-1 --to lmkv-2 --tokens 128000,849,21435,279
  lmkv %(verb)s --from lmkv-1/disk --to lmkv-2/host --prompt "Explain KV cache." --model /models/llama
  lmkv %(verb)s --from lmkv-1/host --to lmkv-2 --tokens-file prompt.json --no-wait --json

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of both commands."""
    position = "instance, and perhaps its tier: host (default), disk, remote, gpu"
    parser.add_argument(
        "--from", dest="source", metavar="INSTANCE[/TIER]", type=read_position, required=True, help=position
    )
    parser.add_argument(
        "--to", dest="destination", metavar="INSTANCE[/TIER]", type=read_position, required=True, help="as --from"
    )
    add_chunk_arguments(parser)
    add_waiting_arguments(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace, *, copy: bool) -> int:
    """Starts the operation, waits for it unless `--no-wait`, and prints it."""
    tokens, chunks = read_chunks(args)

    async def order(coordinator: Coordinator) -> AnyOperation:
        operation = await start(
            coordinator.move(tokens, source=args.source, destination=args.destination, copy=copy, **chunks)
        )
        if not args.no_wait:
            await wait_for(operation, args.timeout)
        return operation

    return show_operation(call(args, order), as_json=args.json)


move_command = Command(
    name="move",
    add_arguments=add_arguments,
    run=partial(run, copy=False),
    examples=EXAMPLES % {"verb": "move"},
)
copy_command = Command(
    name="copy",
    add_arguments=add_arguments,
    run=partial(run, copy=True),
    examples=EXAMPLES % {"verb": "copy"},
)
