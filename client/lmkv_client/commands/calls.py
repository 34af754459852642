"""Calls the coordinator for the commands: retries, errors in terms of flags, and the chunks that flags name."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from lmkv import tokenizer
from lmkv.auth.credentials import Credentials
from lmkv.config import ClientConfig, load
from lmkv.errors import ConfigError, LmkvError, Unreachable
from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv_client.chunks import Chunks
from lmkv_client.coordinator import Coordinator
from lmkv_client.operation import RETRY_SECONDS

Response = TypeVar("Response")

COMPLETION_SECONDS = 1.0
"""Time in which a coordinator must answer while a shell completes an instance."""


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


def names_chunks(args: argparse.Namespace) -> bool:
    """Whether the flags name chunks."""
    return any(given is not None for given in (args.tokens, args.tokens_file, args.keys, args.prompt))


def read_chunks(args: argparse.Namespace) -> tuple[Sequence[int], Chunks]:
    """The tokens and other fields that name the chunks. Raises `ConfigError`."""
    keys = parse_keys(args.keys) if args.keys is not None else []
    tokens = _read_tokens(args) if names_chunks(args) and args.keys is None else []
    # A folder that only says which tokenizer to use need not be the name under which the model is served.
    only_folder = args.prompt is not None and not args.tokenizer
    model_name = "" if only_folder else args.model or ""
    return tokens, Chunks(keys=keys, model_name=model_name, cache_salt=args.cache_salt, lora_name=args.lora)


def _read_tokens(args: argparse.Namespace) -> Sequence[int]:
    if args.tokens is not None:
        return parse_tokens(args.tokens)
    if args.tokens_file is not None:
        return read_tokens_file(args.tokens_file)
    return tokenize(args.prompt, args.tokenizer or args.model)


def parse_tokens(text: str) -> list[int]:
    """Parses comma-separated token ids, with or without brackets. Raises `ConfigError`."""
    try:
        return [int(token) for token in text.strip().removeprefix("[").removesuffix("]").split(",")]
    except ValueError:
        raise ConfigError(f"--tokens must be token ids such as 128000,849,21435, not {text!r}") from None


def read_tokens_file(name: str) -> list[int]:
    """Reads a JSON list of token ids from a file or standard input. Raises `ConfigError`."""
    try:
        tokens = json.loads(sys.stdin.read() if name == "-" else Path(name).read_text())
    except OSError as error:
        raise ConfigError(f"--tokens-file: cannot read {name}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"--tokens-file: {name} is not JSON: {error}") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ConfigError(f"--tokens-file: {name} must hold one JSON list of token ids, such as [128000, 849]")
    return tokens


def parse_keys(text: str) -> list[ChunkKey]:
    """Parses comma-separated chunk keys in hex. Raises `ConfigError`."""
    try:
        keys = [ChunkKey(bytes.fromhex(key)) for key in text.split(",")]
    except ValueError:
        raise ConfigError(f"--keys must be chunk keys in hex, not {text!r}") from None
    if any(len(key) != KEY_BYTES for key in keys):
        raise ConfigError(f"--keys must be chunk keys of {2 * KEY_BYTES} hex digits each, not {text!r}")
    return keys


def tokenize(prompt: str, folder: str | None) -> list[int]:
    """Tokenizes a prompt as vLLM does. Raises `ConfigError` if there is no tokenizer."""
    if folder is None:
        raise ConfigError("--prompt needs the model's folder: add --model FOLDER")
    try:
        return tokenizer.load(folder).encode(prompt)
    except ConfigError as error:
        raise ConfigError(f"--prompt: {error}; or give token ids with --tokens") from None


TIMEOUT_SECONDS = 2.0
MAX_ANSWER_BYTES = 4096


def find_grpc(address: str, credentials: Credentials) -> str:
    """`host:port` of the gRPC service behind a coordinator's HTTP address; empty if no coordinator responds there."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, ValueError, KeyError, TypeError, http.client.HTTPException):
        connection: http.client.HTTPConnection
        if credentials.ca:
            context = credentials.client_contexts().get()
            context.check_hostname = not credentials.name
            connection = http.client.HTTPSConnection(
                host.strip("[]"), int(port), timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/grpc_port")
            answer = json.loads(connection.getresponse().read(MAX_ANSWER_BYTES))
            return f"{host}:{int(answer['grpc_port'])}"
        finally:
            connection.close()
    return ""
