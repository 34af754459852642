"""Codecs of tiers: what is encoded how, and bytes that are no chunk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.keys import ChunkKey
from lmkv.spec import KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END, PART_RULE_LAST
from lmkv_server.node.tiers.codec import (
    HEADER_BYTES,
    RAW,
    CodecHeader,
    lossy_format,
    most_encoded_bytes,
    parse_codec_header,
)
from tests.server.node.cases import chunk_key
from tests.server.node.encoded_parts import EXACT, LOSSY, codec, numbers
from tests.support.specs import make_spec

CODECS = ("fp8", "int8", "int4", "zstd")
HEADER = CodecHeader(
    code="int8", element="float32", plane_elements=128, group_elements=128, size_bytes=8192, code_bytes=2112
)


@dataclass(frozen=True, kw_only=True)
class Described:
    """A chunk."""

    fingerprint: bytes
    size_bytes: int
    token_count: int
    key: ChunkKey
    parent: ChunkKey | None = None
    checksum: int = 0


def full(spec: KvSpec) -> Described:
    return Described(
        fingerprint=spec.fingerprint, size_bytes=spec.chunk_bytes, token_count=spec.chunk_size, key=chunk_key(1)
    )


def encoded(name: str, spec: KvSpec = LOSSY, content: bytes | None = None) -> bytearray:
    chunk = full(spec)
    memory = memoryview(numbers(1, chunk.size_bytes) if content is None else content)
    pages, size_bytes = codec(name, spec).encode(chunk, memory)
    assert size_bytes <= most_encoded_bytes(chunk.size_bytes)
    assert bytes(pages[size_bytes:]) == bytes(len(pages) - size_bytes)
    return bytearray(pages[:size_bytes])


def decoded(name: str, data: bytes | bytearray, spec: KvSpec = LOSSY) -> bytes | None:
    memory = memoryview(bytearray(spec.chunk_bytes))
    size = codec(name, spec).decode(spec.fingerprint, memoryview(bytes(data)), memory)
    return None if size is None else bytes(memory[:size])


def test_a_header_says_what_is_stored() -> None:
    assert parse_codec_header(HEADER.packed()) == HEADER
    assert len(HEADER.packed()) == HEADER_BYTES


@pytest.mark.parametrize("at", range(40))
def test_a_header_with_a_changed_byte_is_none(at: int) -> None:
    packed = bytearray(HEADER.packed())
    if at in (10, 11):
        return  # padding, which the seal covers, too
    packed[at] ^= 1
    assert parse_codec_header(bytes(packed)) is None


@settings(max_examples=200, deadline=None)
@given(
    header=st.builds(
        CodecHeader,
        code=st.sampled_from(["raw", *CODECS]),
        element=st.sampled_from(["bytes", "bfloat16", "float16", "float32"]),
        plane_elements=st.integers(0, 2**32 - 1),
        group_elements=st.integers(0, 2**32 - 1),
        size_bytes=st.integers(0, 2**63),
        code_bytes=st.one_of(st.integers(0, 9000), st.integers(0, 2**63)),
    ),
    data=st.binary(max_size=9000),
    name=st.sampled_from(CODECS),
)
def test_sealed_headers_with_any_content_decode_to_a_chunk_or_to_none(
    header: CodecHeader, data: bytes, name: str
) -> None:
    data = data.ljust(-(-len(data) // 8) * 8, b"\0")
    found = decoded(name, header.packed() + data)
    assert found is None or len(found) == header.size_bytes


@pytest.mark.parametrize(("mine", "theirs"), [pair for pair in product(CODECS, CODECS) if pair[0] != pair[1]])
def test_codes_of_another_codec_are_not_decoded(mine: str, theirs: str) -> None:
    assert decoded(theirs, encoded(theirs)) is not None
    assert decoded(mine, encoded(theirs)) is None


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_rounded_bytes_are_not_decoded_for_engines_that_want_exact_ones(name: str) -> None:
    data = encoded(name)
    memory = memoryview(bytearray(LOSSY.chunk_bytes))
    assert codec(name).decode(EXACT.fingerprint, memoryview(bytes(data)), memory) is None
    assert codec(name).decode(b"?" * 16, memoryview(bytes(data)), memory) is None
    assert codec(name).decode(LOSSY.fingerprint, memoryview(bytes(data)), memory) == LOSSY.chunk_bytes


def test_the_bytes_of_an_unknown_spec_are_stored_as_they_are() -> None:
    content = numbers(1, LOSSY.chunk_bytes)
    pages, size_bytes = codec("int8", EXACT).encode(full(LOSSY), memoryview(content))
    header = parse_codec_header(bytes(pages[:HEADER_BYTES]))
    assert header
    assert (header.code, bytes(pages[HEADER_BYTES:size_bytes])) == (RAW, content)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32", "fp8_e4m3", "int8"])
def test_zstd_is_lossless_and_smaller_where_there_is_something_to_gain(kv_dtype: str) -> None:
    spec = make_spec(kv_dtype=kv_dtype)
    random = np.random.default_rng(1).bytes(spec.chunk_bytes)
    assert decoded("zstd", encoded("zstd", spec, random), spec) == random
    assert len(encoded("zstd", spec, random)) == most_encoded_bytes(spec.chunk_bytes)
    zeros = bytes(spec.chunk_bytes)
    assert decoded("zstd", encoded("zstd", spec, zeros), spec) == zeros
    assert len(encoded("zstd", spec, zeros)) < spec.chunk_bytes // 4


def test_zstd_finds_the_exponents_of_bfloat16() -> None:
    spec = make_spec(kv_dtype="bfloat16", chunk_size=256)
    halves = np.frombuffer(numbers(3, 2 * spec.chunk_bytes), "<u2")[1::2]
    assert len(encoded("zstd", spec, halves.tobytes())) < 0.85 * spec.chunk_bytes


@pytest.mark.parametrize(
    ("spec", "tokens", "planes"),
    [
        (LOSSY, 32, 16 * 8),
        (LOSSY, 7, 16 * 8),
        (make_spec(accepts_lossy=True), 32, 32 * 8),
        (make_spec(accepts_lossy=True), 7, 7 * 8),
        (make_spec(accepts_lossy=True, mla=True, kv_head_count=1, head_size=72), 32, 32 * 72),
    ],
)
def test_planes_are_the_keys_or_values_of_one_head(spec: KvSpec, tokens: int, planes: int) -> None:
    form = lossy_format(spec, "int8", spec.size_bytes(tokens), tokens)
    assert form
    assert (form.plane_elements, form.group_elements) == (planes, 16 * spec.head_size)
    assert lossy_format(replace(spec, accepts_lossy=False), "int8", spec.size_bytes(tokens), tokens) is None


def test_states_and_parts_of_one_size_that_differ_are_stored_as_they_are() -> None:
    window = KvPart(layer_count=2, kv_head_count=2, head_size=8, kv_dtype="float32", rule=PART_RULE_LAST, span=64)
    state = KvPart(layer_count=1, kv_head_count=1, head_size=96, kv_dtype="float32", rule=PART_RULE_END)
    other = replace(window, kv_head_count=4, head_size=4)
    same = make_spec(accepts_lossy=True, more_parts=(window, state))
    assert lossy_format(same, "int8", same.part_bytes(0), 32) == lossy_format(same, "int8", same.part_bytes(1), 32)
    assert lossy_format(same, "int8", same.part_bytes(2), 32) is None
    differing = make_spec(accepts_lossy=True, more_parts=(other,))
    assert lossy_format(differing, "int8", differing.part_bytes(0), 32) is None
