"""`lmkv events`: publishes the layout map as vLLM's KV events, for routers that read those."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from lmkv.cli import Command
from lmkv.errors import ConfigError
from lmkv_client import Coordinator
from lmkv_client.commands import add_common_arguments, call
from lmkv_client.commands.watch import find_fingerprint
from lmkv_client.kv_event_publisher import EventPublisher
from lmkv_client.kv_events import LayoutEvents

TOPIC = "kv@{instance}@{model}"
BUFFER_BATCHES = 10_000
MAX_TOKEN_BYTES = 256
"""ZMQ's limit of a password."""
ENDLESS_SECONDS = 10 * 365 * 86_400.0

EXAMPLES = """\
  lmkv events                                      publish on port 5557 of this host, replay on port 5558
  lmkv events --endpoint 'tcp://*:5557' --replay-endpoint 'tcp://*:5558' --token-file /etc/lmkv/events-token
  lmkv events --instance node-1 --topic kv-events  one node, as one vLLM engine would publish it
  lmkv events --endpoint tcp://router:5557         connect to a router that collects events of many publishers
  lmkv events --endpoint ipc:///run/kv --replay-endpoint ipc:///run/kv-replay

Every chunk is one block: its hash is the chunk's key, its size the tokens of a chunk, its medium CPU (host memory) or
STORAGE (disk). Token ids and parents are empty, since the layout map does not have them: compute the keys of a prompt
and look them up, or read the events of the engines, which have vLLM's blocks and tokens.

Numbers of batches rise across restarts. A consumer that sees a gap sends the first number that it misses (8 bytes, big
endian; a second frame may name the topic) to the replay endpoint. If that is too old, it gets AllBlocksCleared and all
that is held. By default only this host can connect. With --token-file consumers authenticate by ZMQ's PLAIN mechanism,
as user `lmkv` with the token as password; the token and the events are not encrypted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv events`."""
    parser.add_argument(
        "--endpoint", metavar="ZMQ", default="tcp://127.0.0.1:5557", help="publishes here (default: %(default)s)"
    )
    parser.add_argument(
        "--replay-endpoint",
        metavar="ZMQ",
        default="tcp://127.0.0.1:5558",
        help="answers requests for missed batches here; empty: nowhere (default: %(default)s)",
    )
    parser.add_argument(
        "--token-file", metavar="PATH", type=Path, help="only consumers with the token in this file are served"
    )
    parser.add_argument(
        "--topic", default=TOPIC, help="topic of an instance and a model (default: kv@{instance}@{model})"
    )
    parser.add_argument(
        "--instance", metavar="INSTANCE", default="", help="only chunks of this instance (default: all)"
    )
    parser.add_argument("--model", metavar="NAME", help="only chunks of this model (default: all)")
    parser.add_argument(
        "--buffer", metavar="BATCHES", type=int, default=BUFFER_BATCHES, help="batches kept for replay (default: 10000)"
    )
    parser.add_argument(
        "--hashes",
        choices=("int", "bytes"),
        default="int",
        help="keys as vLLM shortens its hashes, the last 8 bytes as an integer, or whole (default: int)",
    )
    add_common_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Publishes until interrupted."""
    events = LayoutEvents(
        topic=args.topic,
        instance_id=args.instance,
        first_sequence=time.time_ns() // 1_000_000,
        buffer_batches=max(1, args.buffer),
        integers=args.hashes == "int",
    )

    token = read_token(args.token_file) if args.token_file else ""

    async def publish(coordinator: Coordinator) -> int:
        async with EventPublisher(events, args.endpoint, args.replay_endpoint, token) as publisher:
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


command = Command(
    name="events",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
