"""Command-line flags for configuration keys."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from lmkv.config.resolve import load
from lmkv.config.schema import Config, Key, keys
from lmkv.config.sources import FILE_VARIABLE, flag, variable

C = TypeVar("C", bound=Config)

_DEST = "config."  # no other argument's name has a dot
_FILE = "config_file"


def add_arguments(parser: argparse.ArgumentParser, cls: type[Config]) -> None:
    """Adds `--config FILE` and a flag per key of `cls`, except secrets: command lines are visible to all users."""
    group = parser.add_argument_group(
        "configuration",
        f"Each key may also be set in the YAML file (max_local_cpu_size: 5) or in the environment "
        f"({variable('max_local_cpu_size')}=5); flags override the environment, which overrides the file.",
    )
    group.add_argument(
        "--config", dest=_FILE, metavar="FILE", help=f"YAML file with any of these keys (default: ${FILE_VARIABLE})"
    )
    for name, declared in keys(cls).items():
        if not declared.kind.secret:
            _add(group, name, declared)
    for name in cls.replaced_flags:
        group.add_argument(flag(name), dest=_DEST + name, help=argparse.SUPPRESS)


def from_arguments(args: argparse.Namespace, cls: type[C], *, env: Mapping[str, str] = os.environ) -> C:
    """The configuration from a parsed command line, the environment and the file. Raises as `load` does."""
    flags = {name.removeprefix(_DEST): raw for name, raw in vars(args).items() if name.startswith(_DEST)}
    return load(cls, file=getattr(args, _FILE, None), env=env, flags=flags)


def file_from_arguments(args: argparse.Namespace, env: Mapping[str, str] = os.environ) -> str | None:
    """The configuration file that a parsed command line or the environment names; None without one."""
    return getattr(args, _FILE, None) or env.get(FILE_VARIABLE)


def _add(group: Any, name: str, declared: Key) -> None:
    text = f"{declared.doc} (default: {declared.default})".replace("%", "%%")
    _add_spelling(group, name, declared, text)
    for alias in declared.aliases:
        _add_spelling(group, alias.name, declared, argparse.SUPPRESS)


def _add_spelling(group: Any, name: str, declared: Key, text: str) -> None:
    is_switch = declared.kind.metavar == "BOOL"  # --enable-p2p alone means true
    group.add_argument(
        flag(name),
        dest=_DEST + name,
        metavar=declared.kind.metavar,
        help=text,
        **({"nargs": "?", "const": "true"} if is_switch else {}),
        **({"action": "append"} if declared.kind.repeatable else {}),
    )
