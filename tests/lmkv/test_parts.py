"""Which parts of which chunks a hit needs, against the tokens that each kind of layer reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import BadKvSpec
from lmkv.keys import ChunkKey, part_key
from lmkv.parts import KvPart, PartItem
from lmkv.spec import NATIVE_TILES, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE

FULL = KvPart(layer_count=2, kv_head_count=2, head_size=16, kv_dtype="float32")
STATE = replace(FULL, rule=PART_RULE_END, kv_head_count=1, head_size=4096, kv_dtype="int8")
HYBRID = KvSpec(
    model_name="m",
    model_id="i",
    kv_dtype="float32",
    layer_count=2,
    kv_head_count=2,
    head_size=16,
    chunk_size=32,
    format=NATIVE_TILES,
    tile_backend="CPU_ATTN",
    tile_isa="vec",
    block_size=16,
    layers="of full attention",
    more_parts=(
        replace(FULL, rule=PART_RULE_LAST, span=20, block_size=16, tile_isa="vec", layers="that slide"),
        replace(STATE, layers="with states"),
    ),
)


def window(span: int) -> KvPart:
    return replace(FULL, rule=PART_RULE_LAST, span=span)


def chunked(span: int) -> KvPart:
    return replace(FULL, rule=PART_RULE_SINCE_MULTIPLE, span=span)


def read_tokens(part: KvPart, end: int) -> set[int]:
    """The tokens before `end` that computing token `end` reads, by the definition of the layers."""
    if part.rule == PART_RULE_LAST:
        return {token for token in range(end) if token > end - part.span}
    if part.rule == PART_RULE_SINCE_MULTIPLE:
        return {token for token in range(end) if token // part.span == end // part.span}
    return {end - 1} if part.rule == PART_RULE_END else set(range(end))


PARTS = st.one_of(
    st.just(FULL), st.just(STATE), st.builds(window, st.integers(2, 40)), st.builds(chunked, st.integers(2, 40))
)


@given(part=PARTS, end=st.integers(1, 140), chunk_size=st.integers(1, 12))
def test_a_hit_needs_exactly_the_chunks_whose_tokens_are_read(part: KvPart, end: int, chunk_size: int) -> None:
    tokens = read_tokens(part, end)
    needed = part.needed(end, chunk_size)
    assert set(needed) == {token // chunk_size for token in tokens}
    if tokens:
        assert part.first_token(end) == min(tokens)
    first = int(part.first_needed(np.array([end]), chunk_size)[0])
    assert first == (needed.start if needed else -(-end // chunk_size))


@given(part=PARTS, chunk=st.integers(0, 12), chunk_size=st.integers(1, 12))
def test_a_chunk_is_stored_if_any_hit_needs_it(part: KvPart, chunk: int, chunk_size: int) -> None:
    needed = any(chunk in part.needed(count * chunk_size, chunk_size) for count in range(1, 100))
    assert part.is_needed(chunk, chunk_size) == needed


@given(part=PARTS, end=st.integers(1, 140), chunk_size=st.integers(1, 12), block_size=st.sampled_from([0, 1, 2, 4]))
def test_the_kept_tokens_of_a_chunk_are_all_that_any_hit_reads(
    part: KvPart, end: int, chunk_size: int, block_size: int
) -> None:
    part = replace(part, block_size=block_size)
    last = (end - 1) // chunk_size
    for token in read_tokens(part, end) if part.rule != PART_RULE_END else ():
        chunk = token // chunk_size
        stored = end - chunk * chunk_size if chunk == last else chunk_size
        assert token % chunk_size >= part.first_kept(stored)
        assert part.kept_tokens(stored) + part.first_kept(stored) == stored


def test_items_are_listed_part_by_part() -> None:
    assert HYBRID.items(0) == []
    assert HYBRID.items(3) == [PartItem(0, 0), PartItem(0, 1), PartItem(0, 2), PartItem(1, 2), PartItem(2, 2)]


def test_a_part_has_a_key_of_its_own() -> None:
    keys = [ChunkKey(bytes([index] * 16)) for index in range(3)]
    assert HYBRID.item_keys([PartItem(0, 1), PartItem(1, 1)], keys) == [keys[1], part_key(keys[1], 1)]
    assert part_key(keys[1], 1).hex() == "ff5a51a65ed0412e35a105b0c9d745e3"


def test_sizes_of_parts() -> None:
    tile = 16 * 2 * 16 * 4
    assert HYBRID.part_bytes(0) == 2 * 2 * 2 * tile
    assert HYBRID.part_bytes(1) == 2 * 2 * 2 * tile  # 19 tokens are two blocks
    assert replace(HYBRID, chunk_size=64).part_bytes(1) == 2 * 2 * 2 * tile
    assert HYBRID.part_bytes(2) == 2 * 4096
    assert HYBRID.chunk_bytes == sum(HYBRID.part_bytes(part) for part in range(3))
    assert HYBRID.fits(2 * 4096, 32)
    assert not HYBRID.fits(2 * 4096, 31)
    assert not HYBRID.fits(4096, 32)


def test_the_fingerprint_covers_every_field_of_every_part() -> None:
    assert KvSpec.from_proto(HYBRID.to_proto()) == HYBRID
    window_part, state = HYBRID.more_parts
    others = [replace(HYBRID, layers="of other layers"), replace(HYBRID, more_parts=(window_part,))]
    others += [
        replace(HYBRID, more_parts=(changed, state))
        for changed in (
            replace(window_part, span=21),
            replace(window_part, rule=PART_RULE_SINCE_MULTIPLE),
            replace(window_part, layer_count=3),
            replace(window_part, kv_head_count=1),
            replace(window_part, head_size=32),
            replace(window_part, kv_dtype="bfloat16"),
            replace(window_part, mla=True),
            replace(window_part, tile_isa="amx"),
            replace(window_part, block_size=32),
            replace(window_part, layers="others"),
        )
    ]
    assert len({HYBRID.fingerprint, *(other.fingerprint for other in others)}) == 1 + len(others)


def test_a_spec_of_one_kind_of_layers_has_plain_parts_and_the_fingerprint_of_before() -> None:
    plain = replace(HYBRID, more_parts=(), layers="")
    assert plain.has_plain_parts
    assert plain.items(2) == [PartItem(0, 0), PartItem(0, 1)]
    assert not replace(plain, rule=PART_RULE_LAST, span=100).has_plain_parts
    assert not HYBRID.has_plain_parts


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("span", {"rule": PART_RULE_LAST}),
        ("span", {"rule": PART_RULE_ALL, "span": 5}),
        ("rule", {"rule": 99}),
        ("layer_count", {"layer_count": 0}),
        ("kv_dtype", {"kv_dtype": "int3"}),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(field: str, bad: dict[str, Any]) -> None:
    with pytest.raises(BadKvSpec) as error:
        replace(FULL, **bad)
    assert error.value.metadata["field"] == field


def test_a_spec_of_too_many_parts_is_refused() -> None:
    with pytest.raises(BadKvSpec, match="9 parts"):
        replace(HYBRID, more_parts=(STATE,) * 8)
    message = HYBRID.to_proto()
    message.more_parts.extend([message.more_parts[0]] * 100)
    with pytest.raises(BadKvSpec, match="parts"):
        KvSpec.from_proto(message)


def test_an_extent_of_a_window_has_the_tokens_that_the_next_one_reads() -> None:
    part = window(17)
    assert (part.kept_tokens(8), part.kept_tokens(16), part.kept_tokens(100)) == (8, 16, 16)
    assert part.size_bytes(100) == 2 * 2 * 16 * 2 * 16 * 4
    blocks = replace(part, block_size=32)
    assert (blocks.kept_tokens(96), blocks.kept_tokens(24)) == (32, 24)
    assert replace(part, block_size=16).kept_tokens(96) == 16
    assert blocks.kept_tokens(100) == 36, "an extent begins with a block"


def test_sizes_of_partial_chunks_states_and_latents() -> None:
    assert FULL.size_bytes(5) == 2 * 2 * 5 * 2 * 16 * 4
    assert replace(FULL, mla=True).size_bytes(5) == 2 * 2 * 5 * 16 * 4
    assert replace(FULL, block_size=4).size_bytes(5) == 2 * 2 * 8 * 2 * 16 * 4
    assert STATE.size_bytes(5) == STATE.size_bytes(8) == 2 * 1 * 4096
    tiled = replace(FULL, block_size=4)
    assert (tiled.tile_bytes, replace(tiled, mla=True).tile_bytes, FULL.tile_bytes) == (4 * 2 * 16 * 4, 4 * 16 * 4, 0)
