"""`lmkv config`: converts LMCache's configuration to lmkv's, and prints the configuration of a process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields

from lmkv.config import (
    ClientConfig,
    Config,
    ConnectorConfig,
    CoordinatorConfig,
    NodeConfig,
    PickerConfig,
    ProxyConfig,
    WebhookConfig,
    keys,
    lmcache,
    load,
)
from lmkv.config.sources import read_file
from lmkv.errors import ConfigError
from lmkv_client.commands.flags import CONFIGURED_PROCESSES

_CONFIGS: Sequence[type[Config]] = (
    ConnectorConfig,
    NodeConfig,
    CoordinatorConfig,
    ProxyConfig,
    PickerConfig,
    WebhookConfig,
    ClientConfig,
)
PROCESSES = dict(zip(CONFIGURED_PROCESSES, _CONFIGS, strict=True))


def run(args: argparse.Namespace) -> int:
    """Runs the action."""
    return _check(args, PROCESSES[args.process]) if args.action == "check" else _import(args)


def _import(args: argparse.Namespace) -> int:
    """Writes the file, and on standard error what happened to each key. Raises `ConfigError` if it is not valid."""
    imported = lmcache.translate(read_file(args.file, "the command line"))
    text = lmcache.render(imported, args.file.name)
    for one in imported:
        print(one.notice, file=sys.stderr)
    if args.output is None:
        print(text, end="")
        return 0
    try:
        with args.output.open("w" if args.force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{args.output} exists; --force overwrites it", path=args.output) from None
    except OSError as error:
        raise ConfigError(f"cannot write {args.output}: {error.strerror}", path=args.output) from None
    return 0


def _check(args: argparse.Namespace, cls: type[Config]) -> int:
    """Prints a process's keys and values, and where each was set. Raises `ConfigError` as the process would."""
    config = load(cls, file=args.file)
    for notice in config.notices:
        print(notice, file=sys.stderr)
    defaults = {item.name: item.default_factory() for item in fields(cls) if callable(item.default_factory)}
    for name, declared in keys(cls).items():
        value = getattr(config, name)
        if args.changed and (name not in config.places or value == declared.kind.read(defaults[name])):
            continue
        shown = lmcache.as_yaml(value) if isinstance(value, str) else declared.kind.write(value)
        source = f"  # {config.written[name]} {config.places[name]}" if name in config.places else ""
        print(f"{name}: {'(hidden)' if declared.kind.secret and value else shown}{source}")
    config.check_complete()
    return 0
