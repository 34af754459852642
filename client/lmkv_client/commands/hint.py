"""`lmkv hint`: asks an instance to share, prefetch, pin, retain, demote or evict the chunks of a prompt."""

from __future__ import annotations

import argparse

from lmkv.cli import Command
from lmkv.hints import HintAction, HintOutcome
from lmkv.rpc.messages import OUTCOMES_BY_NUMBER, REASONS_BY_NUMBER
from lmkv.units import format_duration
from lmkv.v1.cache_service_pb2 import HintResponse
from lmkv_client.commands import add_common_arguments, call, count, print_json, read_seconds
from lmkv_client.commands.chunks import add_chunk_arguments, read_chunks

UNDONE = (HintOutcome.REJECTED, HintOutcome.MISSING)
"""Outcomes of hints that did nothing."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv hint`."""
    parser.add_argument("action", choices=[action.value for action in HintAction], help="what to do with the chunks")
    parser.add_argument("--at", metavar="INSTANCE", required=True, help="instance that carries it out")
    parser.add_argument(
        "--ttl", metavar="TIME", type=read_seconds, help="pin, retain: duration, such as 10m (default: 5m)"
    )
    parser.add_argument(
        "--priority",
        metavar="NUMBER",
        type=int,
        default=0,
        help="retain: 1 to 100 (default: 50); chunks of lower priority are evicted first",
    )
    add_chunk_arguments(parser)
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Sends the hint and prints its outcome; 1 if nothing was done."""
    tokens, chunks = read_chunks(args)
    response = call(
        args,
        lambda coordinator: coordinator.hint(
            args.action, tokens, instance=args.at, ttl_seconds=args.ttl, priority=args.priority, **chunks
        ),
        instance_flag="--at",
    )
    if args.json:
        print_json(response)
    else:
        print(describe(args.action, args.at, response))
    outcome = OUTCOMES_BY_NUMBER.get(response.result.outcome, HintOutcome.REJECTED)
    return 1 if outcome in UNDONE else 0


def describe(action: str, instance_id: str, response: HintResponse) -> str:
    """The line that is printed."""
    result = response.result
    outcome = OUTCOMES_BY_NUMBER.get(result.outcome, HintOutcome.REJECTED)
    text = f"{action} on {instance_id}: {outcome}, {count(result.chunk_count, 'chunk')}"
    if result.ttl.ToNanoseconds():
        text += f" for {format_duration(result.ttl.ToNanoseconds() / 1e9)}"
    if response.pin_id:
        text += f", pin {response.pin_id}"
    if result.reason:
        text += f"; {REASONS_BY_NUMBER.get(result.reason, result.reason)}: {result.detail}"
    return text


command = Command(
    name="hint",
    add_arguments=add_arguments,
    run=run,
    examples="""\
  lmkv hint prefetch --at lmkv-1 --tokens-file session.json
  lmkv hint retain --at lmkv-1 --ttl 10m --priority 80 --tokens-file session.json
  lmkv hint evict --at lmkv-1 --prompt "You are a helpful assistant." --model /models/llama --json""",
)
