"""KvSpec: the properties that make the KV bytes of two engines interchangeable, and the size and parts of their chunks.

A part is what the layers of one kind hold of a chunk. A hit that ends at token E needs of each part the chunks from
`start` on, where C is the chunk size:

    rule              kind of layers              start
    ALL               full attention, MLA         0
    LAST(w)           sliding window              floor(max(0, E - (w - 1)) / C)
    SINCE_MULTIPLE(a) chunked local attention     floor(floor(E / a) * a / C)
    END               recurrent states            floor((E - 1) / C)

The needed chunks of all parts, part by part and in prompt order, are the *items* of the hit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadKvSpec
from lmkv.keys import HASH_SCHEME, HASH_SCHEMES, KEY_BYTES, MEDIA_HASH_SCHEME, PAGE_HASH_SCHEME, ChunkKey, part_key
from lmkv.packing import pack_fields
from lmkv.v1 import chunk_pb2
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes per element, by the engine's name of the KV dtype."""
LOSSY_DTYPES = ("bfloat16", "float16", "float32")
"""KV dtypes that a codec of a tier may round (docs/guides/codecs.md)."""
MAX_PARTS = 8
"""Maximum number of parts of a chunk."""
WINDOW_SHARE = 3
"""Windows that are stored whatever prompts end there take at most 1/3 of the bytes of full attention."""
LEAST_INTERVAL = 4
"""Least number of chunks from one of their ends to the next."""


@dataclass(frozen=True, kw_only=True)
class KvPart:
    """The KV of a chunk in all layers of one kind. The fields are those of the message `lmkv.v1.KvPart`.

    Raises `BadKvSpec` if the fields contradict each other.
    """

    rule: chunk_pb2.PartRule.ValueType = PART_RULE_ALL
    span: int = 0
    layer_count: int
    kv_head_count: int
    head_size: int
    kv_dtype: str
    mla: bool = False
    tile_isa: str = ""
    block_size: int = 0
    layers: str = ""

    def __post_init__(self) -> None:
        for name in ("layer_count", "kv_head_count", "head_size"):
            if getattr(self, name) <= 0:
                raise BadKvSpec(f"{name} must be positive, not {getattr(self, name)}", field=name)
        if self.kv_dtype not in DTYPE_BYTES:
            raise BadKvSpec(
                f"kv_dtype {self.kv_dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}", field="kv_dtype"
            )
        if self.rule not in (PART_RULE_ALL, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE, PART_RULE_END):
            raise BadKvSpec(f"rule {self.rule} is unknown; run the same version of lmkv on both sides", field="rule")
        has_span = self.rule in (PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE)
        if self.span < 2 if has_span else self.span:
            raise BadKvSpec(f"span {self.span} does not fit {chunk_pb2.PartRule.Name(self.rule)}", field="span")

    def __str__(self) -> str:
        """Names and values of the fields in alphabetical order: what the fingerprint of a spec is computed from."""
        return ",".join(sorted(f"{field.name}={getattr(self, field.name)}" for field in fields(self)))

    @property
    def tile_bytes(self) -> int:
        """Bytes of one KV-cache block of one head, the unit of native tiles."""
        return self.block_size * (1 if self.mla else 2) * self.head_size * DTYPE_BYTES[self.kv_dtype]

    @property
    def begins_at_multiples(self) -> bool:
        """Whether hits read this part from a multiple of `span` on, so that some need no chunk of it."""
        return self.rule == PART_RULE_SINCE_MULTIPLE

    def first_token(self, end: int) -> int:
        """The oldest token of this part that a hit ending at token `end` reads."""
        if self.rule == PART_RULE_LAST:
            return max(0, end - (self.span - 1))
        if self.rule == PART_RULE_SINCE_MULTIPLE:
            return end // self.span * self.span
        return end - 1 if self.rule == PART_RULE_END else 0

    def needed(self, end: int, chunk_size: int) -> range:
        """The chunks of this part that a hit that ends at token `end` needs: none if it reads no tokens of it."""
        first, stop = self.first_token(end), -(-end // chunk_size)
        return range(first // chunk_size if 0 <= first < end else stop, stop)

    def first_needed(self, ends: NDArray[np.int64], chunk_size: int) -> NDArray[np.int64]:
        """The first chunk of this part that hits with these ends need. It never decreases with the end."""
        if self.rule == PART_RULE_ALL:
            return np.zeros_like(ends)
        if self.rule == PART_RULE_LAST:
            return np.maximum(ends - (self.span - 1), 0) // chunk_size
        if self.rule == PART_RULE_SINCE_MULTIPLE:
            firsts = ends // self.span * self.span
            return np.where(firsts == ends, -(-ends // chunk_size), firsts // chunk_size)
        return np.maximum(ends - 1, 0) // chunk_size

    def is_needed(self, chunk: int, chunk_size: int) -> bool:
        """Whether any hit needs a full chunk of this part: if none does, it is not stored."""
        return chunk in self.needed((chunk + 1) * chunk_size, chunk_size)

    def first_kept(self, token_count: int) -> int:
        """The first token of a chunk of `token_count` tokens that its extent has: those before it no hit reads that
        ends behind them, where a window is shorter than a chunk."""
        if self.rule != PART_RULE_LAST:
            return 0
        first = max(0, token_count - (self.span - 1))
        return first // self.block_size * self.block_size if self.block_size else first

    def kept_tokens(self, token_count: int) -> int:
        """Number of tokens, the last of a chunk of `token_count` tokens, that its extent has."""
        return token_count - self.first_kept(token_count)

    def size_bytes(self, token_count: int) -> int:
        """Bytes of an extent of a chunk of `token_count` tokens."""
        element_bytes = DTYPE_BYTES[self.kv_dtype]
        if self.rule == PART_RULE_END:
            return self.layer_count * self.kv_head_count * self.head_size * element_bytes
        tokens = self.kept_tokens(token_count)
        if self.block_size:  # whole tiles
            tokens = -(-tokens // self.block_size) * self.block_size
        return self.layer_count * self.kv_head_count * tokens * (1 if self.mla else 2) * self.head_size * element_bytes


@dataclass(frozen=True, slots=True)
class PartItem:
    """One part of one chunk of a prompt."""

    part: int
    chunk: int


def items_of_hit(parts: Sequence[KvPart], end: int, chunk_size: int) -> list[PartItem]:
    """The items of a hit that ends at token `end`."""
    return [PartItem(index, chunk) for index, part in enumerate(parts) for chunk in part.needed(end, chunk_size)]


TOKEN_MAJOR: chunk_pb2.KvFormat.ValueType = chunk_pb2.KV_FORMAT_TOKEN_MAJOR
NATIVE_TILES: chunk_pb2.KvFormat.ValueType = chunk_pb2.KV_FORMAT_NATIVE_TILES

ALL: chunk_pb2.PartRule.ValueType = chunk_pb2.PART_RULE_ALL

MAX_SPECS = 64
"""Maximum number of specs of one instance."""
MAX_FIELD_BYTES = 512
"""Maximum size of each text field of a registered spec."""

MAX_SERVED_MODELS = 256
"""Maximum number of served names of one instance, besides the `model_name` of each spec."""
PRIVATE_VERSION = "private:"
"""Beginning of the `weight_version` of weights without a name: one engine has them."""

MAX_NAME_BYTES = 256
MAX_IDENTITY_BYTES = 512

_NOT_HASHED = ("model_name", "vocab_size")
_UNSET: dict[str, object] = {
    "rule": ALL,
    "span": 0,
    "layers": "",
    "more_parts": "",
    "weight_version": "",
    "accepts_lossy": False,
}
"""Fields that are hashed only with other values than these: models with one kind of layers, whose weights never change,
and whose engines want exact chunks, have none of them."""
_PART_FIELDS = tuple(field.name for field in fields(KvPart))


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

    Code that a chunk's parts do not concern uses `parts`, `part_bytes` and `items`: a model with one kind of layers has
    one part, and the items of a hit are then its chunks. Raises `BadKvSpec` if the fields contradict each other.
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
    rule: chunk_pb2.PartRule.ValueType = ALL
    span: int = 0
    layers: str = ""
    more_parts: tuple[KvPart, ...] = ()
    weight_version: str = ""
    accepts_lossy: bool = False

    def __post_init__(self) -> None:
        if self.chunk_size <= 0:
            raise BadKvSpec(f"chunk_size must be positive, not {self.chunk_size}", field="chunk_size")
        if len(self.more_parts) >= MAX_PARTS:
            raise BadKvSpec(
                f"a chunk has {len(self.more_parts) + 1} parts, at most {MAX_PARTS} are allowed", field="more_parts"
            )
        assert self.parts  # checks part 0
        if self.format not in (TOKEN_MAJOR, NATIVE_TILES):
            raise BadKvSpec(f"format {self.format} is unknown", field="format")
        if self.hash_scheme not in HASH_SCHEMES:
            raise BadKvSpec(
                f"hash_scheme {self.hash_scheme!r} is unknown; use {' or '.join(HASH_SCHEMES)}",
                field="hash_scheme",
            )
        if self.has_page_hashes and not self.has_plain_parts:
            raise BadKvSpec(f"hash_scheme {PAGE_HASH_SCHEME}: chunks have one part", field="hash_scheme")
        if len(self.weight_version.encode()) > MAX_FIELD_BYTES:
            raise BadKvSpec(f"weight_version has more than {MAX_FIELD_BYTES} bytes", field="weight_version")
        if self.accepts_lossy and (exact := {part.kv_dtype for part in self.parts} - {*LOSSY_DTYPES}):
            raise BadKvSpec(
                f"accepts_lossy: the KV cache has elements of {', '.join(sorted(exact))}, and codecs round only "
                f"{', '.join(LOSSY_DTYPES)}; set accept_lossy to false",
                field="accepts_lossy",
            )
        for part in self.parts if self.format == NATIVE_TILES else ():
            is_state = part.rule == chunk_pb2.PART_RULE_END
            if not is_state and (part.block_size <= 0 or self.chunk_size % part.block_size):
                raise BadKvSpec(
                    f"chunk_size {self.chunk_size} must be a multiple of the engine's block size {part.block_size}; "
                    f"set chunk_size or the engine's --block-size",
                    field="chunk_size",
                )

    @cached_property
    def fingerprint(self) -> bytes:
        """16 bytes: SHA-256 of names and values of the fields but model name and vocabulary, in alphabetical order.

        Fields of models with several kinds of layers, and the version of the weights, are left out where not set.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _NOT_HASHED}
        values["more_parts"] = "|".join(map(str, self.more_parts))
        pairs = (f"{name}={values[name]}".encode() for name in sorted(values) if _UNSET.get(name) != values[name])
        return sha256(b"lmkv.KvSpec" + pack_fields(pairs)).digest()[:KEY_BYTES]

    @cached_property
    def parts(self) -> tuple[KvPart, ...]:
        """The parts of a chunk; part 0 has the spec's own fields."""
        return (KvPart(**{name: getattr(self, name) for name in _PART_FIELDS}), *self.more_parts)

    @cached_property
    def has_plain_parts(self) -> bool:
        """Whether a hit needs every chunk, each has one part, and vLLM keeps all layers in one group: its items are its
        chunks, and a part of it is a hit, too."""
        return self.rule == ALL and not self.layers and not self.more_parts

    @property
    def has_page_hashes(self) -> bool:
        """Whether the engine names its pages by digests of its own; chunks are then full pages."""
        return self.hash_scheme == PAGE_HASH_SCHEME

    @property
    def has_tokens(self) -> bool:
        """Whether chunks are of tokens: others are what an encoder has made of a medium."""
        return self.hash_scheme != MEDIA_HASH_SCHEME

    @property
    def is_private(self) -> bool:
        """Whether one engine alone has these weights: their version has no name."""
        return self.weight_version.startswith(PRIVATE_VERSION)

    @cached_property
    def chunk_bytes(self) -> int:
        """Bytes of a full chunk, all parts together."""
        return sum(self._full_bytes)

    def part_bytes(self, part: int, token_count: int = 0) -> int:
        """Bytes of one part of a chunk of `token_count` tokens, by default of a full one."""
        if token_count in (0, self.chunk_size):
            return self._full_bytes[part]
        return self.parts[part].size_bytes(token_count)

    @cached_property
    def _full_bytes(self) -> tuple[int, ...]:
        """Bytes of the parts of a full chunk."""
        return tuple(part.size_bytes(self.chunk_size) for part in self.parts)

    def size_bytes(self, token_count: int) -> int:
        """Bytes of part 0 of a chunk of `token_count` tokens: of the whole chunk, if it has one part."""
        return self.part_bytes(0, token_count)

    @cached_property
    def ends_anywhere(self) -> bool:
        """Whether a hit may end inside a chunk: pages are full, and states are offered at the ends of chunks only."""
        return not self.has_page_hashes and all(part.rule != chunk_pb2.PART_RULE_END for part in self.parts)

    @cached_property
    def matches_prefixes(self) -> bool:
        """Whether the first chunks of a hit are a hit: there is one part, of which hits need every chunk."""
        return self.rule == ALL and not self.more_parts

    @cached_property
    def window_interval(self) -> int:
        """The multiples of this number of chunks have their windows stored, whatever prompts end there.

        1 if all have: where nothing is stored of every chunk, where windows are little beside it, or where only the
        engine knows which states are there.
        """
        always = sum(self._full_bytes[number] for number, part in enumerate(self.parts) if part.rule == ALL)
        windows = sum(
            len(part.needed(part.span * self.chunk_size, self.chunk_size)) * self._full_bytes[number]
            for number, part in enumerate(self.parts)
            if part.rule == PART_RULE_LAST
        )
        has_states = any(part.rule == PART_RULE_END for part in self.parts)
        interval = 1 if has_states or not always else max(1, -(-WINDOW_SHARE * windows // always))
        return interval if interval == 1 else max(LEAST_INTERVAL, interval)

    def shared_ends(self, full_count: int, parted: Collection[int]) -> set[int]:
        """The chunks that hits of other prompts are expected to end after; `parted`: where such prompts part."""
        interval = self.window_interval
        return {*range(interval, full_count + 1, interval), *parted}

    def expected_ends(self, full_count: int, token_count: int, parted: Collection[int]) -> set[int]:
        """The chunks that any hit is expected to end after. The same prompt again hits a token less than all."""
        return {*self.shared_ends(full_count, parted), full_count, (token_count - 1) // self.chunk_size}

    def fits(self, size_bytes: int, token_count: int) -> bool:
        """Whether some part of a chunk of `token_count` tokens has this size."""
        if token_count == self.chunk_size:
            return size_bytes in self._full_bytes
        if not 0 < token_count < self.chunk_size or not self.ends_anywhere:
            return False
        return any(self.part_bytes(part, token_count) == size_bytes for part in range(len(self.parts)))

    def items(self, chunk_count: int, rest_count: int = 0) -> list[PartItem]:
        """Returns the items, part by part, of a hit of `chunk_count` full chunks and `rest_count` further tokens."""
        return items_of_hit(self.parts, chunk_count * self.chunk_size + rest_count, self.chunk_size)

    def item_keys(self, items: Sequence[PartItem], chunk_keys: Sequence[ChunkKey]) -> list[ChunkKey]:
        """The keys of items of a prompt whose chunks have these keys."""
        return [part_key(chunk_keys[item.chunk], item.part) for item in items]

    def first_difference(self, other: KvSpec) -> str | None:
        """Name of the first field in which two specs differ; None if their chunks are interchangeable.

        The name of a field of part 1 is `more_parts[0].span`, for example. `model_id` comes last: it is a digest that
        most other differences change, too, and says least to a reader.
        """
        names = [field.name for field in fields(self) if field.name not in (*_NOT_HASHED, "model_id")]
        if len(self.more_parts) == len(other.more_parts):
            names.remove("more_parts")
            names += [f"more_parts[{index}].{name}" for index in range(len(self.more_parts)) for name in _PART_FIELDS]
        return next((name for name in (*names, "model_id") if self._value(name) != other._value(name)), None)

    def shown(self, name: str) -> str:
        """The value of a field, as errors show it; `name` is as `first_difference` returns it."""
        value = self._value(name)
        if name == "more_parts":
            return ", ".join(chunk_pb2.PartRule.Name(part.rule) for part in self.more_parts) or "none"
        if name == "weight_version":
            return str(value) or "none"
        if name.endswith("rule"):
            return chunk_pb2.PartRule.Name(value)
        return chunk_pb2.KvFormat.Name(value) if name == "format" else str(value)

    def _value(self, name: str) -> Any:
        part, _, field = name.rpartition(".")
        owner = self.more_parts[int(part.removeprefix("more_parts[").removesuffix("]"))] if part else self
        return getattr(owner, field)

    def to_proto(self) -> chunk_pb2.KvSpec:
        """Converts to the protobuf message, with the fingerprint. `rule` is set only if it is needed."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "more_parts"}
        if self.has_plain_parts:
            del values["rule"]
        more = [chunk_pb2.KvPart(**{name: getattr(part, name) for name in _PART_FIELDS}) for part in self.more_parts]
        return chunk_pb2.KvSpec(fingerprint=self.fingerprint, more_parts=more, **values)

    @classmethod
    def from_proto(cls, message: chunk_pb2.KvSpec) -> KvSpec:
        """Converts from the message. Raises `BadKvSpec` if its fields contradict each other or the fingerprint."""
        values = {field.name: getattr(message, field.name) for field in fields(cls)}
        values["rule"] = message.rule or ALL
        values["more_parts"] = tuple(_part(more) for more in message.more_parts[:MAX_PARTS])
        spec = cls(**values)
        if message.fingerprint != spec.fingerprint:
            raise BadKvSpec(
                f"fingerprint {message.fingerprint.hex()} is not the digest of the spec, {spec.fingerprint.hex()}; "
                "run the same version of lmkv on both sides",
                field="fingerprint",
            )
        return spec


def _part(message: chunk_pb2.KvPart) -> KvPart:
    values = {name: getattr(message, name) for name in _PART_FIELDS}
    return KvPart(**(values | {"rule": message.rule or ALL}))
