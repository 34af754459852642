"""Commands that follow the layout map: `lmkv watch` prints it, `lmkv events` publishes it as vLLM's KV events."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.json_format import MessageToDict

from lmkv.errors import ConfigError, ModelNotFound
from lmkv.v1.cache_service_pb2 import LayoutChange
from lmkv_client import Coordinator, LayoutUpdate
from lmkv_client.commands.calls import call
from lmkv_client.kv_event_publisher import EventPublisher
from lmkv_client.kv_events import LayoutEvents


def watch(args: argparse.Namespace) -> int:
    """Prints changes until interrupted."""

    async def follow(coordinator: Coordinator) -> int:
        fingerprint = await find_fingerprint(coordinator, args.model) if args.model else b""
        began = False
        async for update in coordinator.watch(args.from_revision, fingerprint=fingerprint):
            if args.json:
                print(update_as_json(update), flush=True)
            else:
                if update.reset and began:
                    print("changes were missed; what follows is all that is held now", flush=True)
                for line in describe_update(update):
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


def update_as_json(update: LayoutUpdate) -> str:
    """One JSON line with the field names of the API."""
    changes = [
        MessageToDict(change, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        for change in update.changes
    ]
    # As a string, as JSON has all 64-bit integers of the API.
    fields = {"revision": str(update.revision), "reset": update.reset, "snapshot": update.snapshot}
    return json.dumps({**fields, "changes": changes})


def describe_update(update: LayoutUpdate) -> Iterator[str]:
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


MAX_TOKEN_BYTES = 256
"""ZMQ's limit of a password."""


ENDLESS_SECONDS = 10 * 365 * 86_400.0


def events(args: argparse.Namespace) -> int:
    """Publishes until interrupted."""
    layout_events = LayoutEvents(
        topic=args.topic,
        instance_id=args.instance,
        first_sequence=time.time_ns() // 1_000_000,
        buffer_batches=max(1, args.buffer),
        integers=args.hashes == "int",
    )

    token = read_token(args.token_file) if args.token_file else ""

    async def publish(coordinator: Coordinator) -> int:
        async with EventPublisher(layout_events, args.endpoint, args.replay_endpoint, token) as publisher:
            fingerprint = await find_fingerprint(coordinator, args.model) if args.model else b""
            if args.json:
                print(json.dumps({"endpoint": args.endpoint, "replay_endpoint": args.replay_endpoint}), flush=True)
            else:
                print(f"publishing at {args.endpoint}, replays at {args.replay_endpoint or 'none'}", file=sys.stderr)
            updates = coordinator.watch(fingerprint=fingerprint, retry_seconds=ENDLESS_SECONDS)
            await publisher.follow(coordinator, updates)
        return 0

    return call(args, publish)


def read_token(path: Path) -> str:
    """The token in a file. Raises `ConfigError`."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token-file: cannot read {path}: {error}") from None
    if not 0 < len(token.encode()) < MAX_TOKEN_BYTES:
        raise ConfigError(f"--token-file: {path} must hold one token of less than {MAX_TOKEN_BYTES} bytes")
    return token
