"""The kinds of configuration values: parsing from YAML, environment and flags, formatting, JSON schema.

A kind parses its own values unchanged, what it has formatted, and what its schema accepts.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NoReturn, TypeVar

from lmkv.config.remote_url import parse_remote_url
from lmkv.plugins import CHANNELS, TIERS, plugin_names
from lmkv.units import GIB, parse_gib, parse_seconds

T = TypeVar("T")

OFF = -1
"""Value of a port that is disabled."""
BUILT_IN_CHANNELS = ("auto", "shm", "nixl", "tcp")
MAX_NUMA_NODE = 1023
MAX_SECONDS = 31_536_000.0
"""A year: every timeout is bounded."""
MAX_GIB = float(1 << 20)
"""A petabyte: more is a typing error."""


class _InvalidValue(ValueError):
    """An error with a message of its own, instead of what the kind expects."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(Generic[T]):
    """One kind of configuration value."""

    metavar: str
    """Name of the value in `--help`."""
    expects: str
    """Description of valid values; follows "must be" in messages."""
    parse: Callable[[object], T]
    """Parses a raw value. Raises `ValueError`, `TypeError` or `OverflowError` if it is invalid."""
    schema: Mapping[str, Any]
    """JSON schema of values in YAML. It accepts only valid values, in the spellings that the docs name."""
    write: Callable[[T], str] = str
    """Formats a value for the environment."""
    secret: bool = False
    """Whether values are omitted from messages, flags and `repr`."""
    repeatable: bool = False
    """Whether the flag may be given several times; `parse` then gets a list."""

    def read(self, raw: object) -> T:
        """Parses a raw value. Raises `ValueError` with a message that follows the key's name."""
        try:
            return self.parse(raw)
        except _InvalidValue:
            raise
        except (ValueError, TypeError, OverflowError, RecursionError):  # the last one of nested JSON
            may_hold_password = self.secret or "@" in str(raw)  # such as a URL that was set at the wrong key
            shown = "what it is" if may_hold_password else repr(raw)
            raise ValueError(f"must be {self.expects}, not {shown}") from None


def _reject() -> NoReturn:
    raise ValueError


def _text(raw: object) -> str:
    return raw if isinstance(raw, str) and "\0" not in raw else _reject()


def _matching(pattern: str) -> Callable[[object], str]:
    compiled = re.compile(pattern)
    return lambda raw: text if compiled.fullmatch(text := _text(raw)) else _reject()


def _whole(raw: object, low: int, high: int) -> int:
    if isinstance(raw, str):
        raw = int(raw)
    return raw if isinstance(raw, int) and not isinstance(raw, bool) and low <= raw <= high else _reject()


def _port_if_any(raw: object) -> int | None:
    if raw is None or raw == "":
        return None
    return OFF if raw is False or raw == "off" else _whole(raw, OFF, 65535)  # YAML reads a bare off as false


_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


def _flag(raw: object) -> bool:
    word = str(raw).lower() if isinstance(raw, bool | int | str) else _reject()
    return word in _TRUE if word in _TRUE + _FALSE else _reject()


def _size(raw: object) -> float:
    return size if 1 / GIB <= (size := parse_gib(raw)) <= MAX_GIB else _reject()


def _size_or_zero(raw: object) -> float:
    return size if 0 <= (size := parse_gib(raw)) <= MAX_GIB else _reject()


def _buffer_bytes(raw: object) -> int:
    text = str(raw).strip()
    size = float(text) if text.replace(".", "", 1).isdigit() else parse_gib(raw) * GIB
    return round(size) if 0 <= size <= MAX_GIB * GIB else _reject()


def _seconds_or_zero(raw: object) -> float:
    return seconds if 0 <= (seconds := parse_seconds(raw)) <= MAX_SECONDS else _reject()


def _seconds(raw: object) -> float:
    return _seconds_or_zero(raw) or _reject()


def _milliseconds(raw: object) -> float:
    if not isinstance(raw, int | float | str) or isinstance(raw, bool):
        raise ValueError
    return milliseconds if 0 < (milliseconds := float(raw)) <= MAX_SECONDS * 1000 else _reject()


def _share(raw: object) -> float:
    if not isinstance(raw, int | float | str) or isinstance(raw, bool):
        raise ValueError
    return share if 0 <= (share := float(raw)) <= 1 else _reject()


def _address(raw: object) -> str:
    text = _text(raw)
    match = re.fullmatch(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]@]+):([0-9]{1,5})", text)
    return text if not text or (match and 1 <= int(match[1]) <= 65535) else _reject()


def _addresses(raw: object) -> tuple[str, ...]:
    """Addresses from a list or from comma-separated text."""
    parts = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else [raw]
    addresses = tuple(_address(part.strip() if isinstance(part, str) else part) for part in parts if part != "")
    return addresses if len(set(addresses)) == len(addresses) else _reject()


def _host(raw: object) -> str:
    """A name or an IPv4 address unchanged, an IPv6 address in brackets, so that `:port` can follow."""
    text = _text(raw)
    if re.fullmatch(r"[^\s/\[\]@:]+", text):
        return text
    match = re.fullmatch(r"\[?((?=.*:.*:)[0-9A-Fa-f:.]+)\]?", text)
    return f"[{match[1]}]" if match else _reject()


def _reachable_host(raw: object) -> str:
    if raw in ("0.0.0.0", "::", "[::]"):  # noqa: S104 # refused, not bound
        raise _InvalidValue(f"must be an address that peers can reach, not {raw}: name one of this machine's own")
    return _host(raw)


def _host_names(raw: object) -> tuple[str, ...]:
    """Addresses from a list or from comma-separated text."""
    parts = raw.split(",") if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else [raw]
    names = tuple(_host_name(_text(part).strip()) for part in parts if part != "")
    return names if len(set(names)) == len(names) else _reject()


def _host_name(text: str) -> str:
    is_name = re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*\.?", text)
    return text.lower().removesuffix(".") if is_name else _reject()


def _names(raw: object) -> tuple[str, ...]:
    if isinstance(raw, str):
        raw = json.loads(raw) if raw.lstrip().startswith("[") else [name.strip() for name in raw.split(",")]
    if not isinstance(raw, list | tuple) or not raw:
        raise ValueError
    return tuple(_text(name) or _reject() for name in raw)


def _disk_folders(raw: object) -> tuple[str, ...]:
    """Distinct absolute paths. LMCache writes them as file URLs; a relative one begins at the working directory."""
    if raw in ("", [], ()):
        return ()
    paths = tuple(_absolute(path.removeprefix("file://")) for path in _names(raw))
    if len(set(map(os.path.normpath, paths))) < len(paths):
        raise ValueError
    return paths


def _absolute(path: str) -> str:
    if not path or path.startswith("~") or "://" in path:
        raise ValueError
    return path if path.startswith("/") else str(Path.cwd() / path)


def _remote_url(raw: object) -> str:
    text = _text(raw)
    if text:
        parse_remote_url(text)
    return text


def _valkey_url(raw: object) -> str:
    text = _remote_url(raw)
    return text if not text or parse_remote_url(text).host else _reject()


def _ports(raw: object) -> Mapping[str, int]:
    if isinstance(raw, str):
        raw = json.loads(raw)
    if not isinstance(raw, Mapping):
        raise ValueError
    return MappingProxyType({_text(name): _whole(port, 1, 65535) for name, port in raw.items()})


def _texts_by_name(raw: object) -> Mapping[str, str]:
    if isinstance(raw, str):
        raw = json.loads(raw)
    if not isinstance(raw, Mapping):
        raise ValueError
    return MappingProxyType({_text(name): _text(text) for name, text in raw.items()})


def _tiers(raw: object) -> tuple[Mapping[str, str], ...]:
    """Plug-ins by name, each with the options of its own, as text."""
    if isinstance(raw, str):
        raw = json.loads(raw) if raw else []
    if not isinstance(raw, list | tuple):
        raise ValueError
    tiers = tuple(_scalars_by_name(tier) for tier in raw)
    names = [tier["name"] if "name" in tier else _reject() for tier in tiers]
    if len(set(names)) < len(names):
        raise _InvalidValue("must not name a tier twice")
    known = plugin_names(TIERS)
    if unknown := [name for name in names if name not in known]:
        offered = f"installed packages offer {', '.join(known)}" if known else "no installed package offers one"
        raise _InvalidValue(f"names {unknown[0]!r}, which is no tier: {offered} by an entry point {TIERS}")
    return tiers


def _scalars_by_name(raw: object) -> Mapping[str, str]:
    if not isinstance(raw, Mapping):
        raise ValueError
    return _texts_by_name({key: _scalar(value) for key, value in raw.items()})


def _scalar(raw: object) -> str:
    if isinstance(raw, bool):
        return "true" if raw else "false"
    return str(raw) if isinstance(raw, str | int | float) else _reject()


def _transfer_channel(raw: object) -> str:
    name = _text(raw).lower()
    if name not in BUILT_IN_CHANNELS and name not in plugin_names(CHANNELS):
        known = ", ".join((*BUILT_IN_CHANNELS, *plugin_names(CHANNELS)))
        raise _InvalidValue(f"must be one of {known}, not {raw!r}")
    return name


def one_port(raw: object) -> object:
    """The port in LMCache's list of one port per rank. Raises `ValueError` if there are several."""
    if not isinstance(raw, list | tuple):
        return raw
    if len(raw) != 1:
        raise ValueError(f"must be one port, not {list(raw)}: one node serves all ranks with it")
    return raw[0]


def _numa_node(raw: object) -> str:
    if isinstance(raw, int):
        return str(_whole(raw, 0, MAX_NUMA_NODE))
    word = _text(raw).lower()
    return word if word in ("auto", "none") else str(_whole(word, 0, MAX_NUMA_NODE))


_TEXT_SCHEMA = {"type": "string", "pattern": r"^[^\x00]*$"}
_SOME_PORT = r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_SOME_HOST = r"(\[[0-9A-Fa-f:.]+\]|[^\s\x00:/?#\[\]@,]+)"
_HOST_SCHEMA = {"type": "string", "pattern": r"^([^\s\x00/\[\]@:]+|\[?[0-9A-Fa-f.]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*\]?)$"}
_VALKEY = rf"(valkeys?|rediss?)://([^\s/?#@]*@)?{_SOME_HOST}(:{_SOME_PORT})?(/[0-9]*)?"
_FOLDER = r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+"
_SIZE_DIGITS = {"([KMGT]i?B?)?": 3, "(Gi?B?)?": 6, "Mi?B?": 9, "Ki?B?": 12}
_TIME_DIGITS = {"(d|h|m|s|ms|us)?": 2, "(h|m|s|ms|us)?": 3, "(m|s|ms|us)?": 5, "s?": 7, "ms": 10, "us": 13}
"""Digits before the point, by unit: a number with no more stays below `MAX_GIB` and `MAX_SECONDS`."""
_OR_ZERO = {"minimum": 0}


def one_or_several(pattern: str) -> Mapping[str, Any]:
    """Schema of a list of distinct texts, of one alone, or of none."""
    item = {"type": "string", "pattern": f"^{pattern}$"}
    return {"type": ["array", "string"], "items": item, "uniqueItems": True, "pattern": f"^({pattern})?$"}


def _amount(digits: Mapping[str, int], lowest: Mapping[str, float], maximum: float) -> Mapping[str, Any]:
    """Schema of a number, or of one with a unit."""
    or_zero = lowest == _OR_ZERO
    number = r"[0-9]{1,%d}(\.[0-9]{1,6})?" if or_zero else r"([1-9][0-9]{0,%d}(\.[0-9]{1,6})?|0\.[0-9]{0,2}[1-9])"
    forms = (number % (count - (not or_zero)) + f" ?{unit}" for unit, count in digits.items())
    return {"type": ["number", "string"], **lowest, "maximum": maximum, "pattern": f"^({'|'.join(forms)})$"}


def choice(*values: str) -> Kind[str]:
    """One of several lower-case words, parsed case-insensitively."""
    return Kind(
        metavar="|".join(values),
        expects=f"one of {', '.join(values)}" if len(values) > 1 else f"{values[0]!r}, the only one so far",
        parse=lambda raw: word if (word := _text(raw).lower()) in values else _reject(),
        schema={"enum": list(values)},
    )


def whole(low: int, high: int, expects: str, metavar: str = "N") -> Kind[int]:
    """An integer between two inclusive bounds."""
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(metavar=metavar, expects=expects, parse=lambda raw: _whole(raw, low, high), schema=schema)


TEXT = Kind(
    metavar="TEXT",
    expects="text (in quotes, if it looks like a number)",
    parse=_text,
    schema=_TEXT_SCHEMA,
)
SECRET = Kind(
    metavar="TEXT",
    expects="text (in quotes, if it looks like a number)",
    parse=_text,
    schema=_TEXT_SCHEMA,
    secret=True,
)
PATH = Kind(metavar="PATH", expects="a path", parse=_text, schema=_TEXT_SCHEMA)
SOCKET_PATH = Kind(
    metavar="PATH",
    expects="the absolute path of a unix socket",
    parse=lambda raw: _matching(r"|/.+")(_text(raw).removeprefix("unix:")),
    schema={"type": "string", "pattern": "^((unix:)?/.+)?$"},
)
INSTANCE_ID_IF_ANY = Kind(
    metavar="NAME",
    expects="1 to 64 letters, digits, dots, dashes or underscores (in quotes, if it looks like a number)",
    parse=_matching(r"(?!\.{1,2}$)[A-Za-z0-9._-]{0,64}"),  # also the name of a folder
    schema={"type": "string", "pattern": "^([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})?$"},
)
HOST = Kind(
    metavar="HOST",
    expects="a host name or an address, without port",
    parse=_host,
    schema=_HOST_SCHEMA,
)
REACHABLE_HOST = Kind(
    metavar="HOST",
    expects=HOST.expects,
    parse=_reachable_host,
    schema={**_HOST_SCHEMA, "not": {"enum": ["0.0.0.0", "::", "[::]"]}},  # noqa: S104 # refused, not bound
)
ADDRESS = Kind(
    metavar="HOST:PORT",
    expects="host:port, such as 10.0.0.5:9000",
    parse=_address,
    schema={"type": "string", "pattern": f"^({_SOME_HOST}:{_SOME_PORT})?$"},
)
HOST_NAMES = Kind(
    metavar="NAMES",
    expects="host names such as lmkv.example.com or *.example.com, without ports, each another one",
    parse=_host_names,
    schema=one_or_several(r"(\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*)"),
    write=",".join,
)
ADDRESSES = Kind(
    metavar="HOST:PORT",
    expects="host:port, such as 10.0.0.5:9000, or several with commas between, each another one",
    parse=_addresses,
    schema=one_or_several(f"{_SOME_HOST}:{_SOME_PORT}"),
    write=",".join,
)
PORT = whole(0, 65535, "a port from 0 to 65535 (0: a free one)", "PORT")
PORT_IF_ANY: Kind[int | None] = Kind(
    metavar="PORT|off",
    expects="a port from 0 to 65535 (0: a free one), or off",
    parse=_port_if_any,
    schema={"anyOf": [{"type": "integer", "minimum": 0, "maximum": 65535}, {"enum": ["off", False]}]},
    write=lambda port: "" if port is None else "off" if port == OFF else str(port),
)
PORTS = Kind(
    metavar="JSON",
    expects='names with ports from 1 to 65535, such as {"pull": 8300}',
    parse=_ports,
    schema={"type": "object", "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 65535}},
    write=lambda ports: json.dumps(dict(ports)),
)
FOLDERS = Kind(
    metavar="JSON",
    expects='names with folders, such as {"llama": "/models/llama"}',
    parse=_texts_by_name,
    schema={"type": "object", "additionalProperties": _TEXT_SCHEMA},
    write=lambda folders: json.dumps(dict(folders)),
)
OPTIONS = Kind(
    metavar="JSON",
    expects='names with text, such as {"protocol": "rdma"}',
    parse=_texts_by_name,
    schema={"type": "object", "additionalProperties": _TEXT_SCHEMA},
    write=lambda options: json.dumps(dict(options)),
)
TIER_PLUGINS = Kind(
    metavar="JSON",
    expects='a list of tiers with their options, such as [{"name": "example", "folder": "/mnt/example"}]',
    parse=_tiers,
    schema={
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
            "additionalProperties": {"type": ["string", "number", "boolean"]},
        },
    },
    write=lambda tiers: json.dumps([dict(tier) for tier in tiers]) if tiers else "",
)
TRANSFER_CHANNEL = Kind(
    metavar="NAME",
    expects="the name of a transfer channel",
    parse=_transfer_channel,
    schema={"type": "string", "minLength": 1},
)
NAMES = Kind(
    metavar="NAMES",
    expects='a list of names, such as ["UCX"]',
    parse=_names,
    schema={
        "type": ["array", "string"],
        "items": {**_TEXT_SCHEMA, "minLength": 1},
        "minItems": 1,
        "pattern": r"^[^\s,\[\x00]+$",
    },
    write=lambda names: json.dumps(list(names)),
)
DISK_FOLDERS = Kind(
    metavar="PATHS",
    expects="a path such as /mnt/nvme/lmkv, or a list of them, each another one",
    parse=_disk_folders,
    schema=one_or_several(_FOLDER),
    write=lambda paths: json.dumps(list(paths)) if paths else "",
)
REMOTE_URL = Kind(
    metavar="URL",
    expects="valkey://HOST:PORT/DB, redis:// or rediss:// the same, s3://BUCKET/PREFIX, or file:///FOLDER",
    parse=_remote_url,
    schema={
        "type": "string",
        "pattern": rf"^({_VALKEY}|s3://[A-Za-z0-9][A-Za-z0-9._-]{{1,62}}(/[^\s?#]*)?|file://{_FOLDER})?$",
    },
    secret=True,  # it may hold a password
)
VALKEY_URL = Kind(
    metavar="URL",
    expects="valkey://HOST:PORT/DB, redis:// or rediss:// the same",
    parse=_valkey_url,
    schema={"type": "string", "pattern": f"^({_VALKEY})?$"},
    secret=True,  # it may hold a password
)
HTTP_URL = Kind(
    metavar="URL",
    expects="http://HOST:PORT or https://",
    parse=_matching(r"|https?://[^\s/@]+/?"),
    schema={"type": "string", "pattern": r"^(https?://[^\s\x00/@]+/?)?$"},
)
NUMA_NODE = Kind(
    metavar="NODE",
    expects="auto, none or the number of a NUMA node",
    parse=_numa_node,
    schema={
        "type": ["integer", "string"],
        "minimum": 0,
        "maximum": MAX_NUMA_NODE,
        "pattern": "^(auto|none|[0-9]{1,3})$",
    },
)
FLAG = Kind(
    metavar="BOOL",
    expects="true or false",
    parse=_flag,
    schema={"type": "boolean"},
    write=lambda value: "true" if value else "false",
)
MILLISECONDS = Kind(
    metavar="N",
    expects="a number of milliseconds above 0",
    parse=_milliseconds,
    schema={"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS * 1000},
)
SHARE = Kind(
    metavar="SHARE",
    expects="a number from 0 to 1",
    parse=_share,
    schema={"type": "number", "minimum": 0, "maximum": 1},
    write=repr,
)
SIZE = Kind(
    metavar="SIZE",
    expects='a size above 0 such as 5 (GiB) or "512MiB", at most 1024TiB',
    parse=_size,
    schema=_amount(_SIZE_DIGITS, {"minimum": 0.001}, MAX_GIB),
    write=repr,
)
SIZE_OR_ZERO = Kind(
    metavar="SIZE",
    expects='a size such as 100 (GiB) or "512MiB", or 0',
    parse=_size_or_zero,
    schema=_amount(_SIZE_DIGITS, _OR_ZERO, MAX_GIB),
    write=repr,
)
BUFFER_BYTES = Kind(
    metavar="SIZE",
    expects='a number of bytes, or a size with its unit such as "1GiB"',
    parse=_buffer_bytes,
    schema=_amount(_SIZE_DIGITS, _OR_ZERO, MAX_GIB * GIB),
    write=repr,
)
SECONDS = Kind(
    metavar="TIME",
    expects='a time above 0 such as 1.5 (seconds) or "500ms", at most a year',
    parse=_seconds,
    schema=_amount(_TIME_DIGITS, {"exclusiveMinimum": 0}, MAX_SECONDS),
    write=repr,
)
SECONDS_OR_ZERO = Kind(
    metavar="TIME",
    expects='a time such as 60 (seconds), "2m" or 0, at most a year',
    parse=_seconds_or_zero,
    schema=_amount(_TIME_DIGITS, _OR_ZERO, MAX_SECONDS),
    write=repr,
)
