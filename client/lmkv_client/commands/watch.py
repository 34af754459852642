"""`lmkv watch`: prints changes of the layout map as they occur."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator

from google.protobuf.json_format import MessageToDict

from lmkv.cli import Command
from lmkv.errors import ModelNotFound
from lmkv.v1.cache_service_pb2 import LayoutChange
from lmkv_client import Coordinator, LayoutUpdate
from lmkv_client.commands import add_common_arguments, call

EXAMPLES = """\
  lmkv watch                          current chunks, then every change; Ctrl-C stops
  lmkv watch --model llama            of one model only
  lmkv watch --json | jq -c '.changes[] | select(.instance_gone)'
  lmkv watch --from-revision 1793254412345678 --json

The watch resumes after a restart of the coordinator. If changes were missed, it prints that and starts with all chunks
that are held; in JSON that update has `reset`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv watch`."""
    parser.add_argument("--from-revision", metavar="N", type=int, default=0, help="only changes after this revision")
    parser.add_argument("--model", metavar="NAME", help="only chunks of this model (default: all)")
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Prints changes until interrupted."""

    async def follow(coordinator: Coordinator) -> int:
        fingerprint = await find_fingerprint(coordinator, args.model) if args.model else b""
        began = False
        async for update in coordinator.watch(args.from_revision, fingerprint=fingerprint):
            if args.json:
                print(to_json(update), flush=True)
            else:
                if update.reset and began:
                    print("changes were missed; what follows is all that is held now", flush=True)
                for line in describe(update):
                    print(line, flush=True)
            began = True
        return 0

    return call(args, follow)


async def find_fingerprint(coordinator: Coordinator, model_name: str) -> bytes:
    """The first spec of a model, by any of its names. Raises `ModelNotFound`."""
    fingerprints: dict[str, bytes] = {}
    for instance in await coordinator.instances():
        for spec in instance.specs:
            fingerprints.setdefault(spec.model_name, spec.fingerprint)
        for model in instance.served_models:
            fingerprints.setdefault(model.name, model.fingerprint)
    if model_name in fingerprints:
        return fingerprints[model_name]
    known = f"served are: {', '.join(sorted(fingerprints))}" if fingerprints else "no engine has registered yet"
    raise ModelNotFound(f"no instance serves {model_name!r}; {known}", model_name=model_name)


def to_json(update: LayoutUpdate) -> str:
    """One JSON line with the field names of the API."""
    changes = [
        MessageToDict(change, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for change in update.changes
    ]
    # As a string, as JSON has all 64-bit integers of the API.
    fields = {"revision": str(update.revision), "reset": update.reset, "snapshot": update.snapshot}
    return json.dumps({**fields, "changes": changes})


def describe(update: LayoutUpdate) -> Iterator[str]:
    """One line per change; none for a bookmark."""
    now = time.strftime("%H:%M:%S")
    what = "held" if update.snapshot else "changed"
    for change in update.changes:
        if change.instance_gone:
            yield f"{now}  gone     {change.instance_id}"
        else:
            yield f"{now}  {what:<7}  {change.instance_id}/{change.tier}  {_describe_keys(change)}"


def _describe_keys(change: LayoutChange) -> str:
    admitted, evicted = len(change.admitted_keys), len(change.evicted_keys)
    counts = [text for number, text in ((admitted, f"+{admitted:,}"), (evicted, f"-{evicted:,}")) if number]
    first = next(iter(change.admitted_keys or change.evicted_keys), b"").hex()
    return f"{' '.join(counts) or 'nothing'}  {first}{' ...' if admitted + evicted > 1 else ''}".rstrip()


command = Command(
    name="watch",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
