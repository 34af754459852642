"""`lmkv config`: converts LMCache's configuration to lmkv's, and prints the configuration of a process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from lmkv.cli import Command
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

PROCESSES: Mapping[str, type[Config]] = {
    "connector": ConnectorConfig,
    "node": NodeConfig,
    "coordinator": CoordinatorConfig,
    "proxy": ProxyConfig,
    "picker": PickerConfig,
    "webhook": WebhookConfig,
    "client": ClientConfig,
}

EXAMPLES = """\
  lmkv config import lmcache.yaml                       print it as lmkv's, and what became of each key
  lmkv config import lmcache.yaml --output lmkv.yaml    write it there, unless there is such a file
  lmkv config check lmkv.yaml                           print what an engine's connector makes of it
  lmkv config check lmkv.yaml --process coordinator     what a coordinator does
  lmkv config check --changed                           only what file, environment and LMCache's files set
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `lmkv config`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    importing = actions.add_parser("import", help="convert LMCache's YAML to lmkv's", allow_abbrev=False)
    importing.add_argument("file", metavar="FILE", type=Path, help="LMCache's configuration")
    importing.add_argument("--output", metavar="FILE", type=Path, help="output file (default: standard output)")
    importing.add_argument("--force", action="store_true", help="overwrite the output file")
    checking = actions.add_parser("check", help="print all keys with their sources, or all errors", allow_abbrev=False)
    checking.add_argument("file", metavar="FILE", type=Path, nargs="?", help="lmkv's YAML (default: $LMKV_CONFIG_FILE)")
    checking.add_argument("--process", choices=PROCESSES, default="connector", help="its process (default: connector)")
    checking.add_argument("--changed", action="store_true", help="print only keys that are not at their default")


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


command = Command(
    name="config",
    add_arguments=add_arguments,
    run=run,
    examples=EXAMPLES,
)
