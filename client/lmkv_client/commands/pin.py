"""`lmkv pin`, `lmkv pins` and `lmkv unpin`: protect chunks from eviction."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from lmkv.cli import Command
from lmkv.tiers import format_position
from lmkv.units import format_duration
from lmkv.v1.cache_service_pb2 import ListPinsResponse, PinResponse, UnpinResponse
from lmkv.v1.chunk_pb2 import PinnedChunks
from lmkv_client.commands import (
    add_common_arguments,
    call,
    count,
    print_json,
    read_position,
    read_seconds,
    seconds_until,
)
from lmkv_client.commands.chunks import add_chunk_arguments, read_chunks
from lmkv_client.commands.tables import Number, print_table

COLUMNS = ("PIN", "POSITION", Number("CHUNKS"), Number("TOKENS"), Number("ENDS IN"))


def add_pin_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv pin`."""
    parser.add_argument(
        "--at",
        metavar="INSTANCE[/TIER]",
        type=read_position,
        required=True,
        help="instance that holds the chunks, and optionally the tier: host (default), disk",
    )
    parser.add_argument(
        "--ttl", metavar="TIME", type=read_seconds, default=300.0, help="duration, such as 10m (default: 5m)"
    )
    add_chunk_arguments(parser)
    add_common_arguments(parser)


def run_pin(args: argparse.Namespace) -> int:
    """Pins the chunks, and prints those that are held and pinned."""
    tokens, chunks = read_chunks(args)
    pin = call(args, lambda coordinator: coordinator.pin(tokens, position=args.at, ttl_seconds=args.ttl, **chunks))
    if args.json:
        print_json(PinResponse(pin=pin))
    else:
        kept = f"{count(pin.chunk_count, 'chunk')} ({count(pin.token_count, 'token')})"
        print(f"{pin.pin_id}: {kept} on {format_position(pin.position)} for {_rest(pin)}")
    return 0


def run_pins(args: argparse.Namespace) -> int:
    """Lists the pins; succeeds also without pins."""
    pins = call(args, lambda coordinator: coordinator.pins())
    if args.json:
        print_json(ListPinsResponse(pins=pins))
    elif pins:
        print_table(COLUMNS, rows(pins))
    else:
        print("nothing is pinned")
    return 0


def rows(pins: Iterable[PinnedChunks]) -> list[tuple[str, ...]]:
    """The table rows: one per pin."""
    return [
        (pin.pin_id, format_position(pin.position), str(pin.chunk_count), str(pin.token_count), _rest(pin))
        for pin in pins
    ]


def add_unpin_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv unpin`."""
    parser.add_argument("pin_id", metavar="PIN", help="id of the pin, as `lmkv pin` and `lmkv pins` print it")
    add_common_arguments(parser)


def run_unpin(args: argparse.Namespace) -> int:
    """Releases the pin, or again one that has ended; fails if there was none."""
    call(args, lambda coordinator: coordinator.unpin(args.pin_id))
    if args.json:
        print_json(UnpinResponse())
    else:
        print(f"{args.pin_id}: ended")
    return 0


def _rest(pin: PinnedChunks) -> str:
    return format_duration(max(seconds_until(pin.expire_time), 0.0))


pin_command = Command(
    name="pin",
    add_arguments=add_pin_arguments,
    run=run_pin,
    examples="""\
  lmkv pin --at lmkv-1 --tokens 128000,849,21435,279
  lmkv pin --at lmkv-1/host --ttl 10m --prompt "You are a helpful assistant." --model /models/llama
  lmkv pin --at lmkv-1 --tokens-file system-prompt.json --json | jq -r .pin.pin_id""",
)
pins_command = Command(
    name="pins",
    add_arguments=add_common_arguments,
    run=run_pins,
    examples="  lmkv pins\n  lmkv pins --json | jq -r '.pins[].pin_id'",
)
unpin_command = Command(
    name="unpin",
    add_arguments=add_unpin_arguments,
    run=run_unpin,
    examples="  lmkv unpin lmkv-1/0123456789abcdef",
)
