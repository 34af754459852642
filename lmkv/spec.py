"""KvSpec: the properties that make the KV bytes of two engines interchangeable, and the size of their chunks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256

from lmkv.errors import BadKvSpec
from lmkv.keys import HASH_SCHEME, KEY_BYTES
from lmkv.packing import pack_fields
from lmkv.v1 import chunk_pb2

TOKEN_MAJOR: chunk_pb2.KvFormat.ValueType = chunk_pb2.KV_FORMAT_TOKEN_MAJOR
NATIVE_TILES: chunk_pb2.KvFormat.ValueType = chunk_pb2.KV_FORMAT_NATIVE_TILES

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes per element, by the engine's name of the KV dtype."""
MAX_SPECS = 64
"""Maximum number of specs of one instance."""
MAX_FIELD_BYTES = 512
"""Maximum size of each text field of a registered spec."""

MAX_SERVED_MODELS = 256
"""Maximum number of served names of one instance, besides the `model_name` of each spec."""
MAX_NAME_BYTES = 256
MAX_IDENTITY_BYTES = 512

_NOT_HASHED = ("model_name", "vocab_size")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServedModel:
    """A name under which an engine serves a model or a LoRA adapter of it; as `lmkv.v1.ServedModel`.

    Raises `BadKvSpec` if a field is empty, too long or not printable.
    """

    name: str
    fingerprint: bytes
    lora_identity: str = ""
    """Identity of a LoRA adapter in chunk keys, `name@digest`; empty for the model itself."""

    def __post_init__(self) -> None:
        _check_text("name", self.name, 1, MAX_NAME_BYTES)
        _check_text("lora_identity", self.lora_identity, 0, MAX_IDENTITY_BYTES)

    def to_proto(self) -> chunk_pb2.ServedModel:
        """Converts to the protobuf message."""
        return chunk_pb2.ServedModel(name=self.name, fingerprint=self.fingerprint, lora_identity=self.lora_identity)


def _check_text(field: str, text: str, low: int, high: int) -> None:
    if not low <= len(text.encode()) <= high or not (text.isprintable() or not text):
        raise BadKvSpec(
            f"served_models: {field} must have {low} to {high} bytes, all printable: {text[:MAX_NAME_BYTES]!r}",
            field=f"served_models.{field}",
        )


@dataclass(frozen=True, kw_only=True)
class KvSpec:
    """Properties of KV bytes. The fields are those of the message `lmkv.v1.KvSpec`, without tensor-parallel size.

    Raises `BadKvSpec` if the fields contradict each other.
    """

    model_name: str
    model_id: str
    kv_dtype: str
    layer_count: int
    kv_head_count: int
    head_size: int
    chunk_size: int
    mla: bool = False
    format: chunk_pb2.KvFormat.ValueType = TOKEN_MAJOR
    tile_backend: str = ""
    tile_isa: str = ""
    block_size: int = 0
    hash_scheme: str = HASH_SCHEME
    vocab_size: int = 0

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "head_size", "chunk_size"):
            if getattr(self, name) <= 0:
                raise BadKvSpec(f"{name} must be positive, not {getattr(self, name)}", field=name)
        if self.kv_dtype not in DTYPE_BYTES:
            raise BadKvSpec(
                f"kv_dtype {self.kv_dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}", field="kv_dtype"
            )
        if self.format not in (TOKEN_MAJOR, NATIVE_TILES):
            raise BadKvSpec(f"format {self.format} is unknown", field="format")
        if self.hash_scheme != HASH_SCHEME:
            raise BadKvSpec(f"hash_scheme {self.hash_scheme!r} is unknown; use {HASH_SCHEME!r}", field="hash_scheme")
        if self.format == NATIVE_TILES and (self.block_size <= 0 or self.chunk_size % self.block_size):
            raise BadKvSpec(
                f"chunk_size {self.chunk_size} must be a multiple of the engine's block size {self.block_size}; "
                f"set chunk_size or the engine's --block-size",
                field="chunk_size",
            )

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes: SHA-256 of names and values of all fields but model name and vocabulary, in alphabetical order."""
        names = sorted(field.name for field in fields(self) if field.name not in _NOT_HASHED)
        pairs = (f"{name}={getattr(self, name)}".encode() for name in names)
        return sha256(b"lmkv.KvSpec" + pack_fields(pairs)).digest()[:KEY_BYTES]

    @property
    def tile_bytes(self) -> int:
        """Bytes of one KV-cache block of one head, the unit of native tiles."""
        return self.block_size * self._bytes_per_head_token

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk."""
        return self.size_bytes(self.chunk_size)

    def block_count(self, token_count: int) -> int:
        """Number of KV-cache blocks for a number of tokens, rounded up."""
        return -(-token_count // self.block_size)

    def size_bytes(self, token_count: int) -> int:
        """Bytes of a chunk of `token_count` tokens."""
        if self.format == NATIVE_TILES:
            per_head = self.block_count(token_count) * self.tile_bytes
        else:
            per_head = token_count * self._bytes_per_head_token
        return self.layer_count * self.kv_head_count * per_head

    @property
    def _bytes_per_head_token(self) -> int:
        return (1 if self.mla else 2) * self.head_size * DTYPE_BYTES[self.kv_dtype]

    def first_difference(self, other: KvSpec) -> str | None:
        """Name of the first field in which two specs differ; None if their chunks are interchangeable."""
        names = (field.name for field in fields(self) if field.name not in _NOT_HASHED)
        return next((name for name in names if getattr(self, name) != getattr(other, name)), None)

    def shown(self, name: str) -> str:
        """The value of a field, as errors show it."""
        value = getattr(self, name)
        return chunk_pb2.KvFormat.Name(value) if name == "format" else str(value)

    def to_proto(self) -> chunk_pb2.KvSpec:
        """Converts to the protobuf message, with the fingerprint."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return chunk_pb2.KvSpec(fingerprint=self.fingerprint, **values)

    @classmethod
    def from_proto(cls, message: chunk_pb2.KvSpec) -> KvSpec:
        """Converts from the message. Raises `BadKvSpec` if its fields contradict each other or the fingerprint."""
        spec = cls(**{field.name: getattr(message, field.name) for field in fields(cls)})
        if message.fingerprint != spec.fingerprint:
            raise BadKvSpec(
                f"fingerprint {message.fingerprint.hex()} is not the digest of the spec, {spec.fingerprint.hex()}; "
                "run the same version of lmkv on both sides",
                field="fingerprint",
            )
        return spec
