"""Declaration of configuration keys, and the base class of configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """Converts a value of the alias to one of the key. Raises `ValueError` with a message for the alias."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """The declaration of a key: metadata of its dataclass field."""

    doc: str
    kind: Kind[Any]
    default: str
    """The default, for help texts and documentation."""
    aliases: tuple[Alias, ...]


def key(kind: Kind[T], default: T | Callable[[], T], doc: str, *aliases: str | Alias, shown_default: str = "") -> Any:
    """A dataclass field for a key. `--help` and `docs/reference/configuration.md` show `doc`."""
    make: Callable[[], Any] = default if callable(default) else lambda: default
    spellings = tuple(Alias(name=alias) if isinstance(alias, str) else alias for alias in aliases)
    shown = shown_default or kind.write(make()) or "empty"
    metadata = {"key": Key(doc=doc, kind=kind, default=shown, aliases=spellings)}
    return field(default_factory=make, repr=not kind.secret, metadata=metadata)


def keys(cls: type[Config]) -> Mapping[str, Key]:
    """The keys of a configuration class by name, in order of declaration: its own, then those of its base."""
    declared = {item.name: item.metadata["key"] for item in fields(cls) if "key" in item.metadata}
    own = [name for name in cls.__annotations__ if name in declared]
    return {name: declared[name] for name in [*own, *declared]}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Base of configurations. Raises `ConfigError` if a value is invalid."""

    replaced_flags: ClassVar[Sequence[str]] = ()
    """Keys in `REPLACED` that this process accepts as flags."""

    notices: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Messages about the configuration, which the process logs."""

    written: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The spelling of each key that was set: `p2p_port`, `LMKV_P2P_PORT`, `--p2p-port`, or a name of LMCache's."""

    places: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The source of each key that was set: `in lmkv.yaml`, `in the environment`, `on the command line`."""

    def __post_init__(self) -> None:
        ConfigError.raise_all(self._read_values())
        self._complete()
        ConfigError.raise_all(self.contradictions())

    def contradictions(self) -> Iterator[ConfigError]:
        """An error for each key whose value, valid in itself, does not fit the others."""
        return iter(())

    def missing(self) -> Iterator[ConfigError]:
        """An error for each key that the process needs at its start and that has no value."""
        return iter(())

    def check_complete(self) -> None:
        """Raises `ConfigError` if a key is missing that the process needs at its start."""
        ConfigError.raise_all(self.missing())

    def _complete(self) -> None:
        """Derives values of keys that are not set from those of others."""

    def _read_values(self) -> Iterator[ConfigError]:
        """Converts the values. Yields an error for each that is invalid."""
        for name, declared in keys(type(self)).items():
            try:
                object.__setattr__(self, name, declared.kind.read(getattr(self, name)))
            except ValueError as error:
                yield ConfigError(f"{name} {error}", key=name)
