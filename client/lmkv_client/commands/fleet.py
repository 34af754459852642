"""Commands that show the fleet: `lmkv instances` lists it, `lmkv top` is a live view."""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from lmkv.errors import Unreachable
from lmkv.safe_text import safe_text
from lmkv.units import format_duration
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesResponse, TierUsage
from lmkv_client import Coordinator
from lmkv_client.commands.calls import call
from lmkv_client.commands.operations import OPERATION_COLUMNS, AnyOperation, operation_row
from lmkv_client.commands.output import (
    MAX_CELL_CHARACTERS,
    STANDBY,
    Items,
    Number,
    align,
    engines,
    format_fill,
    in_order,
    print_json,
    print_table,
    seconds_until,
    shorten,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

INSTANCE_COLUMNS = ("INSTANCE", "PEER", Items("MODELS"), Items("TIERS"), Number("ENGINES"))


def instances(args: argparse.Namespace) -> int:
    """Prints the instances; succeeds also without instances."""
    listed = call(args, lambda coordinator: coordinator.instances())
    if args.json:
        print_json(ListInstancesResponse(instances=listed))
        return 0
    if not listed:
        print("no instance is registered")
        return 0
    print_table(INSTANCE_COLUMNS, [instance_row(instance) for instance in in_order(listed)])
    for line in conflicts(listed):
        print(safe_text(line, MAX_CELL_CHARACTERS))
    return 0


def instance_row(instance: Instance) -> tuple[str, ...]:
    """The table instance_row of an instance."""
    models = dict.fromkeys(f"{spec.model_name} ({spec.kv_dtype})" for spec in instance.specs)
    return (
        instance.instance_id if instance.synced else f"{instance.instance_id} (reporting)",
        instance.peer_address or "-",
        ", ".join(models) or ("any, as standby" if engines(instance) == STANDBY else "-"),
        ", ".join(map(_usage, instance.tiers)) or "-",
        engines(instance),
    )


def _usage(tier: TierUsage) -> str:
    """A tier's fill, and the fill of its quota by the salt that uses most: `host 0.63/5.00 GiB (a salt: 0.5/1 GiB)`."""
    if not tier.salt_quota_bytes:
        return f"{tier.tier} {format_fill(tier)}"
    most = TierUsage(used_bytes=tier.max_salt_used_bytes, capacity_bytes=tier.salt_quota_bytes)
    return f"{tier.tier} {format_fill(tier)} (the largest of {tier.salt_count} salts has {format_fill(most)})"


def conflicts(instances: Iterable[Instance]) -> Iterator[str]:
    """One line per pair that serves the same model but cannot share chunks. Both ends report it; it is printed once."""
    printed = set()
    for instance in instances:
        for conflict in instance.conflicts:
            pair = (frozenset((instance.instance_id, conflict.instance_id)), conflict.model_name, conflict.field)
            if pair not in printed:
                printed.add(pair)
                yield (
                    f"{instance.instance_id} and {conflict.instance_id} cannot share {conflict.model_name}: "
                    f"{conflict.field} is {conflict.own_value} on the one, {conflict.other_value} on the other"
                )


TOP_COLUMNS = (
    "INSTANCE",
    "TIER",
    Number("FILL"),
    Number("USED/CAPACITY"),
    Number("CHUNKS"),
    Number("HITS"),
    Number("ENGINES"),
    Number("LEASE"),
)


BAR_CELLS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The content of one frame."""

    instances: Sequence[Instance]
    operations: Sequence[AnyOperation]
    """Running operations, newest first."""

    def instance_rows(self) -> list[tuple[str, ...]]:
        """One row per tier of each instance."""
        return [row for instance in in_order(self.instances) for row in _tier_rows(instance)]

    def operation_rows(self) -> list[tuple[str, ...]]:
        """One row per running operation."""
        return [operation_row(operation) for operation in self.operations]


def top(args: argparse.Namespace) -> int:
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
    """Prints the tables one below the other, fitted to the terminal if there is one."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n".join(_instance_lines(frame, width)))
    if frame.operations:
        print("\n".join(["", *_operation_lines(frame, width)]))


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
    with Live(screen=True, auto_refresh=False) as live:
        live.update(draw(frame, "", live.console.width), refresh=True)
        while True:
            await asyncio.sleep(interval_seconds)
            try:
                frame, seen, trouble = await look(coordinator), time.monotonic(), ""
            except Unreachable as error:
                trouble = f"as it was {format_duration(time.monotonic() - seen)} ago: {error}"
            live.update(draw(frame, trouble, live.console.width), refresh=True)


def draw(frame: Frame, trouble: str, width: int) -> RenderableType:
    """The screen for one frame."""
    from rich.console import Group
    from rich.text import Text

    title = f"lmkv top  {time.strftime('%H:%M:%S')}  {len(frame.instances)} instances  Ctrl-C stops"
    tables = [*_instance_lines(frame, width), "", *_operation_lines(frame, width)]
    lines = (Text(line, no_wrap=True, overflow="crop") for line in tables)
    return Group(Text(title, style="dim"), *lines, Text(trouble, style="red"))


def _instance_lines(frame: Frame, width: int | None) -> list[str]:
    """A line per tier of each instance; if that is too wide, a line per instance and below it one per tier."""
    if not frame.instances:
        return ["no instance is registered"]
    rows = frame.instance_rows()
    lines = align(TOP_COLUMNS, rows)
    if width is None or max(map(len, lines)) <= width:
        return lines
    name, tier, fill, used, chunks, *rest = TOP_COLUMNS
    heads = align((name, *rest), [(row[0], *row[5:]) for row in rows], width)
    details = align((f"  {tier}", fill, used, chunks), [(f"  {row[1]}", *row[2:5]) for row in rows], width)
    stacked = [heads[0], details[0]]
    instances = [instance.instance_id for instance in frame.instances for _ in instance.tiers or "-"]
    for index, (head, detail) in enumerate(zip(heads[1:], details[1:], strict=True)):
        if index == 0 or instances[index] != instances[index - 1]:
            stacked.append(head)
        stacked.append(detail)
    return stacked


def _operation_lines(frame: Frame, width: int | None) -> list[str]:
    """A line per operation; if that is too wide, no state, which is `running` for all, and a second line."""
    if not frame.operations:
        return ["no operation runs"]
    rows = frame.operation_rows()
    lines = align(OPERATION_COLUMNS, rows)
    if width is None or max(map(len, lines)) <= width:
        return lines
    name, subject, _, *rest = OPERATION_COLUMNS
    heads = align((name, *rest), [(row[0], *row[3:]) for row in rows], width)
    subjects = [shorten(text, width - 2) for text in (subject, *(row[1] for row in rows))]
    return [line for head, text in zip(heads, subjects, strict=True) for line in (head, f"  {text}")]


def _tier_rows(instance: Instance) -> Iterator[tuple[str, ...]]:
    name = instance.instance_id if instance.synced else f"{instance.instance_id} (reporting)"
    lease = f"{seconds_until(instance.expire_time):.1f} s"
    if not instance.tiers:
        yield (name, "-", "-", "-", "0", _hits(instance), engines(instance), lease)
    for tier in instance.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        cells = round(min(share, 1.0) * BAR_CELLS)
        yield (
            name,
            tier.tier,
            f"{'█' * cells}{'░' * (BAR_CELLS - cells)} {share:4.0%}",
            format_fill(tier),
            str(tier.chunk_count),
            _hits(instance),
            engines(instance),
            lease,
        )


def _hits(instance: Instance) -> str:
    """Hit rates of lookups: chunks found at the node, and at peers."""
    asked = instance.stats.asked_chunks
    if not asked:
        return "-"
    return f"{instance.stats.own_chunks / asked:.0%} + {instance.stats.peer_chunks / asked:.0%}"
