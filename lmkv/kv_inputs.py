"""The inputs of an engine's KV by name: those that the keys of its chunks name, and others.

Two engines whose chunks have the same keys agree on the inputs that the keys name. If one finds that a chunk of the
other is wrong, an input that the keys lack is among the others in which both differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from itertools import islice

from google.protobuf.message import DecodeError

from lmkv.keys import KEY_BYTES, ChunkKey
from lmkv.safe_text import safe_text
from lmkv.v1 import engine_service_pb2

MAX_INPUTS = 512
"""Most inputs of one kind."""
MAX_CHARACTERS = 256
"""Characters of a name, and of a value; a longer value is its digest."""

MAX_WRITERS = 4
"""Maximum number of engines of one spec, with different inputs, whose inputs a node remembers and sends to a peer."""
WRITER_BYTES = 8
"""Bytes of the id of inputs, by which a chunk names those of the engine that has stored it."""
LENGTH_BYTES = 8
MAX_PACKED_BYTES = 4 << 20
"""More bytes than packed inputs within these bounds have."""


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def packed(self) -> bytes:
        """The inputs as a tier stores them: the length of the message, the message, and zeros up to whole words."""
        message = self.to_proto().SerializeToString(deterministic=True)
        return len(message).to_bytes(LENGTH_BYTES, "little") + message + bytes(-len(message) % LENGTH_BYTES)

    @cached_property
    def id(self) -> bytes:
        """The id of these inputs."""
        return sha256(b"lmkv.KvInputs" + self.packed).digest()[:WRITER_BYTES]

    @classmethod
    def from_packed(cls, data: memoryview) -> KvInputs | None:
        """Takes packed inputs; None if they are none."""
        length = int.from_bytes(data[:LENGTH_BYTES], "little")
        try:
            return cls.from_proto(engine_service_pb2.KvInputs.FromString(data[LENGTH_BYTES:][:length].tobytes()))
        except DecodeError:
            return None

    def differences(self, writer: KvInputs) -> dict[str, tuple[str, str]]:
        """The inputs in which this engine differs from another one: the value there, and the value here; `-` if a
        side has none."""
        own, theirs = {**self.named, **self.others}, {**writer.named, **writer.others}
        found = {name: (theirs.get(name, "-"), own.get(name, "-")) for name in sorted({*own, *theirs})}
        return {name: values for name, values in found.items() if values[0] != values[1]}


NO_INPUTS = KvInputs()


def inputs_key(writer: bytes) -> ChunkKey:
    """The key under which a tier stores the inputs of this id, as if they were a chunk."""
    return ChunkKey(writer.ljust(KEY_BYTES, b"\0"))


def _bounded(items: Iterable[tuple[str, str]]) -> dict[str, str]:
    return {safe_text(name, MAX_CHARACTERS): _short(value) for name, value in islice(sorted(items), MAX_INPUTS)}


def _short(value: str) -> str:
    if len(value) > MAX_CHARACTERS:
        return f"sha256:{sha256(value.encode()).hexdigest()[:16]}"
    return safe_text(value, MAX_CHARACTERS)
