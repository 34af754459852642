"""The parts of a chunk: what the layers of one kind hold of it, and which of them a hit needs.

A hit that ends at token E needs of each part the chunks from `start` on, where C is the chunk size:

    rule              kind of layers              start
    ALL               full attention, MLA         0
    LAST(w)           sliding window              floor(max(0, E - (w - 1)) / C)
    SINCE_MULTIPLE(a) chunked local attention     floor(floor(E / a) * a / C)
    END               recurrent states            floor((E - 1) / C)

The needed chunks of all parts, part by part and in prompt order, are the *items* of the hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from lmkv.errors import BadKvSpec
from lmkv.v1 import chunk_pb2
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1}
"""Bytes per element, by the engine's name of the KV dtype."""
MAX_PARTS = 8
"""Maximum number of parts of a chunk."""


@dataclass(frozen=True, kw_only=True)
class KvPart:
    """What all layers of one kind hold of a chunk. The fields are those of the message `lmkv.v1.KvPart`.

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
        """Tokens of a chunk of `token_count` tokens that its extent has: the last ones."""
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
