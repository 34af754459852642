"""`lmkv lookup`: which instances hold how much of a prompt."""

from __future__ import annotations

import argparse
from contextlib import suppress

from lmkv.cli import Command
from lmkv.errors import LmkvError
from lmkv.v1.cache_service_pb2 import LookupResponse
from lmkv_client import Coordinator
from lmkv_client.commands import add_common_arguments, call, print_json
from lmkv_client.commands.chunks import add_chunk_arguments, read_chunks
from lmkv_client.commands.tables import Number, print_table

EXAMPLES = """\
  lmkv lookup --tokens 128000,849,21435,279
  lmkv lookup --prompt "Explain the significance of KV cache." --model /models/llama
  curl -s localhost:8000/tokenize -d '{"prompt": "Hi"}' | jq .tokens | lmkv lookup --tokens-file -
  lmkv lookup --tokens-file prompt.json --model llama --coordinator 10.0.0.5:9000 --json"""


COLUMNS = ("INSTANCE", "TIER", Number("TOKENS"), Number("CHUNKS"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv lookup`."""
    add_chunk_arguments(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the holders; succeeds also on a miss."""
    tokens, chunks = read_chunks(args)

    async def look_up(coordinator: Coordinator) -> tuple[LookupResponse, bool]:
        """The response, and whether any engine has registered."""
        response = await coordinator.lookup(tokens, **chunks)
        if response.is_complete and not (response.holders or args.json):
            with suppress(LmkvError):  # a token may be good for lookups only
                return response, any(instance.specs for instance in await coordinator.instances())
        return response, True

    response, has_engines = call(args, look_up)
    if args.json:
        print_json(response)
    elif not has_engines:
        print("no instance holds any of it: no engine has registered yet (`lmkv instances` lists the fleet)")
    else:
        print_holders(response)
    return 0


def rows(response: LookupResponse) -> list[tuple[str, ...]]:
    """The table rows: one per run of chunks in one tier of one instance."""
    return [
        (holder.instance_id, run.tier, str(run.token_count), str(run.chunk_count))
        for holder in response.holders
        for run in holder.runs
    ]


def print_holders(response: LookupResponse) -> None:
    """Prints one line per run of chunks in one tier of one instance."""
    if held := rows(response):
        print_table(COLUMNS, held)
    else:
        print("no instance holds any of it")
    if not response.is_complete:
        print("instances are still reporting what they hold: ask again for the whole answer")


command = Command(
    name="lookup",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
