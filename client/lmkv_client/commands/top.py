"""`lmkv top`: a live view of the fleet."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from lmkv.cli import Command
from lmkv.errors import Unreachable
from lmkv.safe_text import safe_text
from lmkv.units import format_duration
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_client import Coordinator
from lmkv_client.commands import (
    MAX_CELL_CHARACTERS,
    add_common_arguments,
    call,
    format_fill,
    ops,
    print_table,
    read_seconds,
    seconds_until,
)
from lmkv_client.commands.following import AnyOperation

if TYPE_CHECKING:
    from rich.console import RenderableType

EXAMPLES = """\
  lmkv top                    until Ctrl-C
  lmkv top --interval 5s
  lmkv top --once             one frame, as without a terminal"""

INSTANCE_COLUMNS = ("INSTANCE", "TIER", "FILL", "USED/CAPACITY", "CHUNKS", "HITS", "ENGINES", "LEASE")
BAR_CELLS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The content of one frame."""

    instances: Sequence[Instance]
    operations: Sequence[AnyOperation]
    """Running operations, newest first."""

    def instance_rows(self) -> list[tuple[str, ...]]:
        """One row per tier of each instance."""
        return [row for instance in self.instances for row in _rows(instance)]

    def operation_rows(self) -> list[tuple[str, ...]]:
        """One row per running operation."""
        return [ops.row(operation) for operation in self.operations]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv top`."""
    parser.add_argument(
        "--interval", metavar="TIME", type=read_seconds, default=1.0, help="time between frames (default: 1s)"
    )
    parser.add_argument("--once", action="store_true", help="show one frame and exit")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Shows one frame, or frames until interrupted."""
    if args.once or args.json or not sys.stdout.isatty():
        frame = call(args, look)
        print_frame_json(frame) if args.json else print_frame(frame)
        return 0
    return call(args, lambda coordinator: show(coordinator, args.interval))


async def look(coordinator: Coordinator) -> Frame:
    """The current state of the fleet."""
    instances = await coordinator.instances()
    return Frame(instances=instances, operations=await coordinator.operations(running=True))


def print_frame(frame: Frame) -> None:
    """Prints the tables one below the other."""
    if frame.instances:
        print_table(INSTANCE_COLUMNS, frame.instance_rows())
    else:
        print("no instance is registered")
    if frame.operations:
        print()
        print_table(ops.COLUMNS, frame.operation_rows())


def print_frame_json(frame: Frame) -> None:
    """Prints instances and operations with the field names of the API."""

    def as_dict(message: Message) -> object:
        return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)

    shown = {
        "instances": [as_dict(instance) for instance in frame.instances],
        "operations": [as_dict(operation.message) for operation in frame.operations],
    }
    print(json.dumps(shown, indent=2))


async def show(coordinator: Coordinator, interval_seconds: float) -> int:
    """Draws frames until interrupted. Raises `Unreachable` if the first one fails; shows later failures."""
    from rich.live import Live

    frame = await look(coordinator)
    seen = time.monotonic()
    with Live(_draw(frame, ""), screen=True, auto_refresh=False) as live:
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                frame, seen, trouble = await look(coordinator), time.monotonic(), ""
            except Unreachable as error:
                trouble = f"as it was {format_duration(time.monotonic() - seen)} ago: {error}"
            live.update(_draw(frame, trouble), refresh=True)


def _draw(frame: Frame, trouble: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        drawn = Table(*columns, box=None, header_style="bold", pad_edge=False)
        for row in rows:
            drawn.add_row(*map(Text, row))
        return drawn

    parts: list[RenderableType] = [
        Text(f"lmkv top  {time.strftime('%H:%M:%S')}  {len(frame.instances)} instances  Ctrl-C stops", style="dim"),
        table(INSTANCE_COLUMNS, frame.instance_rows()),
        Text(""),
        table(ops.COLUMNS, frame.operation_rows()) if frame.operations else Text("no operation runs", "dim"),
    ]
    return Group(*parts, Text(trouble, style="red"))


def _rows(instance: Instance) -> Iterator[tuple[str, ...]]:
    name = instance.instance_id if instance.synced else f"{instance.instance_id} (reporting)"
    lease = f"{seconds_until(instance.expire_time):.1f} s"
    if not instance.tiers:
        yield (name, "-", "-", "-", "0", _hits(instance), str(instance.engine_count), lease)
    for tier in instance.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        cells = round(min(share, 1.0) * BAR_CELLS)
        yield (
            name,
            safe_text(tier.name, MAX_CELL_CHARACTERS),
            f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {share:4.0%}",
            format_fill(tier),
            str(tier.chunk_count),
            _hits(instance),
            str(instance.engine_count),
            lease,
        )


def _hits(instance: Instance) -> str:
    """Hit rates of lookups: chunks found at the node, and at peers."""
    asked = instance.stats.asked_chunks
    if not asked:
        return "-"
    return f"{instance.stats.own_chunks / asked:.0%} + {instance.stats.peer_chunks / asked:.0%}"


command = Command(
    name="top",
    help="show a live view of the fleet: tiers, usage, engines, running operations",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
