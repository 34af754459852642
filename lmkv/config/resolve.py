"""Loads a configuration from its sources and flags, applies changes of its file, and passes it to child processes."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lmkv.config import lmcache
from lmkv.config.schema import Config, Key, keys
from lmkv.config.sources import (
    FILE_VARIABLE,
    LMCACHE_PREFIX,
    PREFIX,
    REPLACED,
    SourceEntry,
    flag,
    known_spellings,
    read_environment,
    read_file,
    read_flags,
    read_lmcache,
    spellings,
    variable,
)
from lmkv.errors import ConfigError, suggestion
from lmkv.runtime.reload import Reloadable

C = TypeVar("C", bound=Config)


def load(
    cls: type[C],
    *,
    file: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] = os.environ,
    flags: Mapping[str, Any] | None = None,
    flags_place: str = "",
) -> C:
    """Loads the configuration of a process. Flags override the environment, then the file, LMCache's, the defaults.

    The file is `file`, or what `LMKV_CONFIG_FILE` names, or none. `flags` are raw values by key, aliases included; a
    value of None is not set. `flags_place` names them in messages if they are not flags of a command line. LMCache's
    configuration (`LMCACHE_CONFIG_FILE` and `LMCACHE_*`) sets only keys that none of the others sets; notices name it.

    Raises `ConfigError` with the key and the fix for an unknown key, an invalid value, and two spellings of a key with
    different values in one source; if there are several such errors, with the others as `further`. Values that do not
    fit each other are found once each is valid.
    """
    sources = [read_environment(env), read_flags(flags or {}, flags_place)]
    if path := file or env.get(FILE_VARIABLE):
        sources.insert(0, read_file(Path(path), "--config" if file else FILE_VARIABLE))
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    places: dict[str, str] = {}
    notices: list[str] = []
    errors: list[ConfigError] = []
    for entries in sources:
        for name, (value, entry) in _resolve(cls, entries, errors).items():
            values[name], written[name], places[name] = value, entry.shown, entry.place
        notices += _notices(entries)
    ConfigError.raise_all(errors)
    if foreign := read_lmcache(env):
        adopted = lmcache.adopt(cls, foreign, own=values)
        values |= adopted.values
        written |= adopted.written
        places |= adopted.places
        notices += adopted.notices
    try:
        return cls(**values, notices=tuple(notices), written=written, places=places)
    except ConfigError as error:
        found = (error, *error.further)
    ConfigError.raise_all(ConfigError(as_written(str(error), written), **error.metadata) for error in found)
    raise AssertionError("an error is raised")


def as_written(text: str, written: Mapping[str, str]) -> str:
    """Replaces names of keys in a message by the spellings of the user.

    A name that is also a word (`port`, `mode`) is replaced only at the beginning of the message.
    """

    def shown(found: re.Match[str]) -> str:
        word = found[0]
        name = word.removeprefix(PREFIX).lower() if word.startswith(PREFIX) else word
        is_word = "_" not in word and found.start() > 0
        return word if is_word else written.get(name, name)

    names = (form for name in sorted(written, key=len, reverse=True) for form in (variable(name), name))
    known = "|".join(map(re.escape, names))
    variables = rf"{PREFIX}[A-Z0-9_]+(?=: the engine expects)"  # of a key that was not set
    return re.sub(rf"(?<![\w.-])(?:{known + '|' if known else ''}{variables})(?![\w-])", shown, text)


def to_environment(config: Config, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment in which a child process loads exactly this configuration.

    It is `inherited` without `LMKV_*` and `LMCACHE_*` variables, plus one variable per key. It has no `notices`.
    """
    configuring = (PREFIX, LMCACHE_PREFIX)
    environment = {name: value for name, value in (inherited or {}).items() if not name.startswith(configuring)}
    for name, declared in keys(type(config)).items():
        environment[variable(name)] = declared.kind.write(getattr(config, name))
    return environment


def to_comparison(config: Config) -> dict[str, str]:
    """`to_environment` with digests instead of secrets, for comparing the configurations of two processes."""
    compared = to_environment(config)
    for name, declared in keys(type(config)).items():
        if declared.kind.secret and (secret := compared[variable(name)]):
            compared[variable(name)] = f"sha256:{hashlib.sha256(secret.encode()).hexdigest()[:16]}"
    return compared


def _resolve(
    cls: type[Config], entries: Iterable[SourceEntry], errors: list[ConfigError]
) -> dict[str, tuple[Any, SourceEntry]]:
    """The values of the keys of `cls` in one source, with their entries. Adds to `errors` what is wrong with others."""
    known, own, declared = known_spellings(), spellings(cls), keys(cls)
    found: dict[str, tuple[Any, SourceEntry]] = {}
    for entry in entries:
        if entry.spelling not in known:
            hint = suggestion(entry.shown, map(entry.show, known - REPLACED.keys()))
            errors.append(ConfigError(f"unknown key {entry.shown} {entry.place}{hint}", key=entry.spelling))
        if entry.raw is None or entry.spelling not in own:
            continue
        name, alias = own[entry.spelling]
        try:
            value = declared[name].kind.read(alias.convert(entry.raw))
        except ValueError as error:
            errors.append(ConfigError(f"{entry.shown} {error} ({entry.place})", key=name))
            continue
        if name in found and found[name][0] != value:
            errors.append(
                ConfigError(
                    f"{found[name][1].shown} and {entry.shown} contradict each other {entry.place}: both set {name}; "
                    "keep one",
                    key=name,
                )
            )
        found[name] = (value, entry)
    return found


def _notices(entries: Iterable[SourceEntry]) -> list[str]:
    return [
        f"{entry.shown} {entry.place} is ignored: {REPLACED[entry.spelling]}"
        for entry in entries
        if entry.raw is not None and entry.spelling in REPLACED
    ]


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


CHECK_SECONDS = 5.0
"""Interval at which the file is checked for a change. Kubernetes updates a mounted ConfigMap within about a minute."""


async def follow_logging(
    args: argparse.Namespace, cls: type[C], set_up: Callable[[C], None], *, env: Mapping[str, str] = os.environ
) -> None:
    """Calls `set_up` with the configuration each time its file changes. Never returns; cancel it.

    Environment and flags still override the file. An invalid file is logged, and logging stays as it was. Does nothing
    if no regular file is configured: a pipe can be read only once.
    """
    import asyncio  # help and completion import this module, and asyncio is slow to import

    path = file_from_arguments(args, env)
    file = (
        Reloadable([path], lambda: set_up(from_arguments(args, cls, env=env))) if path and _is_regular(path) else None
    )
    while True:
        await asyncio.sleep(CHECK_SECONDS)
        if file:
            file.get()


def _is_regular(path: str) -> bool:
    return Path(path).is_file()
