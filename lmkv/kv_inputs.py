"""The inputs of an engine's KV by name: those that the keys of its chunks name, and others.

Two engines whose chunks have the same keys agree on the inputs that the keys name. If one finds that a chunk of the
other is wrong, an input that the keys lack is among the others in which both differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice

from lmkv.safe_text import safe_text
from lmkv.v1 import engine_service_pb2

MAX_INPUTS = 512
"""Most inputs of one kind."""
MAX_CHARACTERS = 256
"""Characters of a name, and of a value; a longer value is its digest."""

MAX_WRITERS = 4
"""Maximum number of engines of one spec, with different inputs, whose inputs a node remembers and sends to a peer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KvInputs:
    """The inputs of one engine."""

    named: Mapping[str, str] = field(default_factory=dict)
    """Inputs that the keys of its chunks name."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Others that are known, such as versions."""

    @classmethod
    def from_proto(cls, message: engine_service_pb2.KvInputs) -> KvInputs:
        """Takes a message within the bounds of this module; further inputs are left out."""
        return cls(named=_bounded(message.named.items()), others=_bounded(message.others.items()))

    def to_proto(self) -> engine_service_pb2.KvInputs:
        """Converts to the protobuf message, within the same bounds."""
        return engine_service_pb2.KvInputs(named=_bounded(self.named.items()), others=_bounded(self.others.items()))

    def __bool__(self) -> bool:
        return bool(self.named or self.others)

    def differences(self, writer: KvInputs) -> dict[str, tuple[str, str]]:
        """The inputs in which this engine differs from another one: the value there, and the value here; `-` if a
        side has none."""
        own, theirs = {**self.named, **self.others}, {**writer.named, **writer.others}
        found = {name: (theirs.get(name, "-"), own.get(name, "-")) for name in sorted({*own, *theirs})}
        return {name: values for name, values in found.items() if values[0] != values[1]}


NO_INPUTS = KvInputs()


def _bounded(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {safe_text(name, MAX_CHARACTERS): _short(value) for name, value in islice(sorted(items), MAX_INPUTS)}


def _short(value: str) -> str:
    if len(value) > MAX_CHARACTERS:
        return f"sha256:{sha256(value.encode()).hexdigest()[:16]}"
    return safe_text(value, MAX_CHARACTERS)
