"""`lmkv instances`: the registered instances, what they hold, and which pairs cannot share chunks."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator

from lmkv.cli import Command
from lmkv.safe_text import safe_text
from lmkv.v1.registry_service_pb2 import Instance, ListInstancesResponse, TierUsage
from lmkv_client.commands import STANDBY, add_common_arguments, call, engines, format_fill, print_json
from lmkv_client.commands.tables import MAX_CELL_CHARACTERS, Number, print_table

EXAMPLES = """\
  lmkv instances
  lmkv instances --coordinator 10.0.0.5:9000
  lmkv instances --json | jq '.instances[].instance_id'"""


COLUMNS = ("INSTANCE", "PEER", "MODELS", "TIERS", Number("ENGINES"))


def run(args: argparse.Namespace) -> int:
    """Prints the instances; succeeds also without instances."""
    instances = call(args, lambda coordinator: coordinator.instances())
    if args.json:
        print_json(ListInstancesResponse(instances=instances))
        return 0
    if not instances:
        print("no instance is registered")
        return 0
    print_table(COLUMNS, [row(instance) for instance in instances])
    for line in conflicts(instances):
        print(safe_text(line, MAX_CELL_CHARACTERS))
    return 0


def row(instance: Instance) -> tuple[str, ...]:
    """The table row of an instance."""
    models = dict.fromkeys(f"{spec.model_name} ({spec.kv_dtype})" for spec in instance.specs)
    return (
        instance.instance_id if instance.synced else f"{instance.instance_id} (reporting)",
        instance.peer_address or "-",
        ", ".join(models) or ("any, as standby" if engines(instance) == STANDBY else "-"),
        ", ".join(map(_usage, instance.tiers)) or "-",
        engines(instance),
    )


def _usage(tier: TierUsage) -> str:
    return f"{tier.tier} {tier.chunk_count} chunks {format_fill(tier)}"


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


command = Command(
    name="instances",
    add_arguments=add_common_arguments,
    run=run,
    examples=EXAMPLES,
)
