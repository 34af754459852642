"""`lmkv doctor`: runs the checks of a role and prints their findings."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import sys
from collections.abc import Iterator

from lmkv.config import ClientConfig, Config, ConnectorConfig, CoordinatorConfig, load
from lmkv.errors import ConfigError
from lmkv_client.commands.doctor.finding import (
    Finding,
    Level,
    check_encryption,
    check_remote,
    check_tls,
    fail,
    ok,
    warn,
)
from lmkv_client.commands.doctor.fleet import check_fleet, check_instances, check_keys
from lmkv_client.commands.doctor.host import (
    check_coordinator_ports,
    check_folder,
    check_kernels,
    check_memory,
    check_metrics_port,
    check_peer_port,
    check_pool,
)
from lmkv_client.commands.doctor.transfer import check_transfer

_STYLES: dict[Level, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def run(args: argparse.Namespace) -> int:
    """Runs the checks and prints each finding immediately."""
    findings = []
    for finding in examine(args):
        findings.append(finding)
        if not args.json:
            show(finding)
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    """Yields the findings of the role; only one if the configuration is invalid."""
    if args.fleet:
        yield from _examine_fleet(args)
        return
    kind: type[Config] = CoordinatorConfig if args.role == "coordinator" else ConnectorConfig
    flags = {"coordinator": args.coordinator} if kind is ConnectorConfig else {}
    try:
        config = load(kind, file=args.config, flags=flags)
    except ConfigError as error:
        yield fail("config", str(error))
        return
    yield _say_where(args)
    yield from (warn("config", notice) for notice in config.notices)
    yield from check_keys()
    if isinstance(config, CoordinatorConfig):
        yield from check_tls(config)
        yield from check_coordinator_ports(config)
        return
    assert isinstance(config, ConnectorConfig)
    yield from check_memory(config)
    yield from check_pool(config)
    yield from check_kernels(config)
    yield from check_folder(config)
    yield from check_peer_port(config)
    yield from check_metrics_port(config)
    yield from check_transfer(config)
    yield from check_remote(config)
    yield from check_encryption(config)
    trouble = False
    for finding in check_tls(config):
        trouble = trouble or (finding.check == "tls" and finding.level == "fail")
        yield finding
    if not trouble:  # else there is no way to speak to it
        yield from asyncio.run(_collect(config))


def _examine_fleet(args: argparse.Namespace) -> Iterator[Finding]:
    try:
        config = load(ClientConfig, file=args.config, flags={"coordinator": args.coordinator})
        yield from asyncio.run(check_instances(config))
    except ConfigError as error:
        yield fail("config", str(error))


def show(finding: Finding) -> None:
    """Prints one line, coloured on a terminal."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.text import Text

        mark = (f"{finding.level:<5}", _STYLES[finding.level])
        Console(soft_wrap=True).print(Text.assemble(mark, (f" {finding.check:<12} ", "bold"), finding.text))
    else:
        print(f"{finding.level:<5} {finding.check:<12} {finding.text}", flush=True)


async def _collect(config: ConnectorConfig) -> list[Finding]:
    return [finding async for finding in check_fleet(config)]


def _say_where(args: argparse.Namespace) -> Finding:
    file = args.config or os.environ.get("LMKV_CONFIG_FILE") or "no file"
    variables = [name for name in os.environ if name.startswith("LMKV_") and name != "LMKV_CONFIG_FILE"]
    return ok("config", f"read from {file} and {len(variables)} variable{'' if len(variables) == 1 else 's'} LMKV_...")
