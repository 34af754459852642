"""How a configuration class declares its keys, and what all such classes share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from lmkv.config.kinds import Kind
from lmkv.errors import ConfigError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """Another spelling of a key."""

    name: str
    convert: Callable[[object], object] = lambda raw: raw
    """Turns the alias's value into the key's. Raises `ValueError` with a message that follows the alias's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key: metadata of the dataclass field that holds its value."""

    doc: str
    kind: Kind[Any]
    default: str
    """The default, for people."""
    aliases: tuple[Alias, ...]


def key(kind: Kind[T], default: T | Callable[[], T], doc: str, *aliases: str | Alias, shown_default: str = "") -> Any:
    """A dataclass field that holds a key. `doc` is what `--help` and `docs/configuration.md` say."""
    make: Callable[[], Any] = default if callable(default) else lambda: default
    spellings = tuple(Alias(name=alias) if isinstance(alias, str) else alias for alias in aliases)
    shown = shown_default or kind.write(make()) or "empty"
    metadata = {"key": Key(doc=doc, kind=kind, default=shown, aliases=spellings)}
    return field(default_factory=make, repr=not kind.secret, metadata=metadata)


def keys(cls: type[Config]) -> Mapping[str, Key]:
    """The keys of a configuration class by name, in order of declaration."""
    return {item.name: item.metadata["key"] for item in fields(cls) if "key" in item.metadata}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What configurations share. Raises `ConfigError` if a value is none of its key's kind."""

    replaced_flags: ClassVar[Sequence[str]] = ()
    """Keys in `REPLACED` that people give this process as flags."""

    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """What whoever wrote the configuration should know; the process logs each on a line of its own."""

    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Keys that were set, as they were written: `p2p_port`, `LMKV_P2P_PORT`, `--p2p-port`, or a name of LMCache's."""

    def __post_init__(self) -> None:
        for name, declared in keys(type(self)).items():
            try:
                object.__setattr__(self, name, declared.kind.read(getattr(self, name)))
            except ValueError as error:
                raise ConfigError(f"{name} {error}", key=name) from None
