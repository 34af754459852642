"""The commands of the coordinator's clients, and what they share: connection, arguments, output.

Exit codes: 0 done, 1 rejected or failed, 2 bad usage or configuration, 3 partly done, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from google.protobuf.json_format import MessageToJson
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from lmkv import tiers
from lmkv.auth.credentials import Credentials
from lmkv.config import ClientConfig, load
from lmkv.errors import BadRequest, LmkvError, Unreachable
from lmkv.units import format_bytes, format_duration, parse_seconds
from lmkv.v1.chunk_pb2 import Position
from lmkv.v1.registry_service_pb2 import Instance, TierUsage
from lmkv_client.coordinator import Coordinator
from lmkv_client.http_port import find_grpc
from lmkv_client.operation import RETRY_SECONDS

Response = TypeVar("Response")

COMPLETION_SECONDS = 1.0
"""Time in which a coordinator must answer while a shell completes an instance."""

DONE, FAILED, PARTLY_DONE = 0, 1, 3
"""Exit codes of commands that start operations."""


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the coordinator's address and the output format. Shells complete instances among the arguments so far."""
    for action in parser._actions:
        if str(action.metavar).startswith("INSTANCE"):
            vars(action)["completer"] = instance_ids
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="the coordinator (default: coordinator_address of the configuration, else 127.0.0.1:9000)",
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file to read (default: $LMKV_CONFIG_FILE)")
    parser.add_argument("--json", action="store_true", help="print JSON with the field names of the API")


def call(
    args: argparse.Namespace,
    request: Callable[[Coordinator], Awaitable[Response]],
    *,
    instance_flag: str = "INSTANCE",
    retry_seconds: float = 0.0,
) -> Response:
    """The coordinator's response. Raises its errors, and `Unreachable` with the fix if it does not respond.

    `instance_flag` is the flag that names an instance, for errors. With `retry_seconds`, an idempotent request is
    repeated for this time while no coordinator responds.
    """
    config = load(ClientConfig, file=args.config, flags={"coordinator": args.coordinator})
    for notice in config.notices:
        print(f"lmkv: notice: {notice}", file=sys.stderr)
    addresses = config.coordinator_address or ClientConfig().coordinator_address

    deadline = time.monotonic() + retry_seconds
    retrying = False
    while True:
        try:
            return _call_at(addresses, config.credentials, request, instance_flag)
        except Unreachable as error:
            if error.metadata.get("address") not in addresses:  # the coordinator could not reach an instance
                raise
            unreachable = error
        if behind := [found for address in addresses if (found := find_grpc(address, config.credentials))]:
            notice = f"{', '.join(addresses)} is an HTTP port; using the coordinator's gRPC port, {', '.join(behind)}"
            print(f"lmkv: notice: {notice}", file=sys.stderr)
            return _call_at(behind, config.credentials, request, instance_flag)
        problem = f"no coordinator responds at {' or '.join(addresses)}"
        cause = unreachable.metadata.get("cause", str(unreachable))
        if time.monotonic() >= deadline:
            fix = "start one with `lmkv coordinator`, or name another with --coordinator HOST:PORT"
            raise Unreachable(f"{problem}; {fix} ({cause})", address=unreachable.metadata["address"]) from unreachable
        if not retrying:
            print(f"lmkv: notice: {problem} ({cause}); trying again for {retry_seconds:g} s", file=sys.stderr)
            retrying = True
        time.sleep(RETRY_SECONDS)


def _call_at(
    addresses: Sequence[str],
    credentials: Credentials,
    request: Callable[[Coordinator], Awaitable[Response]],
    instance_flag: str,
) -> Response:
    async def connect_and_call() -> Response:
        async with Coordinator(*addresses, credentials=credentials) as coordinator:
            return await request(coordinator)

    try:
        return asyncio.run(connect_and_call())
    except Unreachable:
        raise
    except LmkvError as error:
        raise in_flags(error, instance_flag) from None


FLAGS = {
    "old_position": "--from",
    "new_position": "--to",
    "position": "--at",
    "tier": "--tier",
    "destination_instance_ids": "--to",
}
"""Flags by request field, replaced at the start of an error message."""
ANYWHERE = {"model_name": "--model", "lora_name": "--lora", "cache_salt": "--cache-salt", "chunk_keys": "--keys"}
"""Flags by request field, replaced anywhere in an error message."""


def in_flags(error: LmkvError, instance_flag: str) -> LmkvError:
    """The error with the names of flags in place of request fields."""
    field, colon, rest = str(error).partition(":")
    flags = {**FLAGS, "instance_id": instance_flag}
    text = f"{flags[field]}{colon}{rest}" if field in flags else str(error)
    text = re.sub(rf"\b({'|'.join(ANYWHERE)})\b", lambda found: ANYWHERE[found[0]], text)
    return error if text == str(error) else type(error)(text, **error.metadata)


def instance_ids(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """The ids of instances, or nothing if no coordinator answers while the user waits."""
    with suppress(LmkvError, TimeoutError):
        config = load(ClientConfig, file=parsed_args.config, flags={"coordinator": parsed_args.coordinator})

        async def ask() -> list[str]:
            async with (
                asyncio.timeout(COMPLETION_SECONDS),
                Coordinator(*config.coordinator_address, credentials=config.credentials) as coordinator,
            ):
                return [instance.instance_id for instance in await coordinator.instances()]

        return [found for found in asyncio.run(ask()) if found.startswith(prefix)]
    return []


def read_position(text: str) -> Position:
    """Argument type: `INSTANCE` or `INSTANCE/TIER`."""
    try:
        return tiers.parse_position(text)
    except BadRequest as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def read_seconds(text: str) -> float:
    """Argument type: a duration above 0."""
    try:
        seconds = parse_seconds(text)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be a time above 0, such as 30 (seconds) or 10m, not {text!r}")
    return seconds


def seconds_until(moment: Timestamp) -> float:
    """Seconds until `moment`; negative if it has passed."""
    return moment.ToNanoseconds() / 1e9 - time.time()


STANDBY = "0, standby"
"""The engines of a node that stays without any: it takes copies of the chunks of every registered spec."""


def engines(instance: Instance) -> str:
    """Its attached engines; without any, also when the node ends unless one attaches, or that it is a standby node."""
    if instance.engine_count:
        return str(instance.engine_count)
    if not instance.HasField("end_time"):
        return STANDBY
    return f"0, ends in {format_duration(max(1, round(seconds_until(instance.end_time))))}"


def count(number: int, noun: str) -> str:
    """`1 chunk`, `1,024 chunks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(message: Message) -> None:
    """Prints a message with the field names of its proto, including empty fields."""
    print(MessageToJson(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True))


def format_fill(tier: TierUsage) -> str:
    """Used bytes of a tier, and its capacity if it has a limit: `0.63 GiB/5.00 GiB`."""
    used = format_bytes(tier.used_bytes)
    return f"{used}/{format_bytes(tier.capacity_bytes)}" if tier.capacity_bytes else used
