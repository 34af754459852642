from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import BadKvSpec
from lmkv.keys import ChunkKey, part_key
from lmkv.spec import (
    DTYPE_BYTES,
    LEAST_INTERVAL,
    MAX_FIELD_BYTES,
    MAX_IDENTITY_BYTES,
    MAX_NAME_BYTES,
    NATIVE_TILES,
    PRIVATE_VERSION,
    TOKEN_MAJOR,
    WINDOW_SHARE,
    KvPart,
    KvSpec,
    PartItem,
    ServedModel,
)
from lmkv.v1 import chunk_pb2
from lmkv.v1.chunk_pb2 import PART_RULE_ALL, PART_RULE_END, PART_RULE_LAST, PART_RULE_SINCE_MULTIPLE

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text(encoding="utf-8"))
LLAMA = KvSpec(
    model_name="llama",
    model_id="llama@1",
    kv_dtype="bfloat16",
    layer_count=32,
    kv_head_count=8,
    head_size=128,
    chunk_size=256,
    vocab_size=128_256,
)
TILES = replace(LLAMA, format=NATIVE_TILES, tile_backend="CPU_ATTN", tile_isa="amx", block_size=128)

CHANGES: dict[str, Any] = {
    "model_id": "llama@2",
    "kv_dtype": "float32",
    "layer_count": 31,
    "kv_head_count": 4,
    "head_size": 64,
    "chunk_size": 512,
    "mla": True,
    "format": TOKEN_MAJOR,
    "tile_backend": "OTHER",
    "tile_isa": "vec",
    "block_size": 64,
    "rule": PART_RULE_END,
    "layers": "others",
    "weight_version": "step-2",
    "accepts_lossy": True,
    "more_parts": (KvPart(layer_count=1, kv_head_count=1, head_size=1, kv_dtype="int8", rule=PART_RULE_END),),
}
"""A change of each field that decides, but of `span`, which changes with `rule`."""
FREE: dict[str, Any] = {"model_name": "alias", "vocab_size": 1}
"""A change of each field that does not."""


@pytest.mark.parametrize("case", GOLDEN["specs"], ids=lambda case: str(case["spec"]["model_name"]))
def test_golden_fingerprints_hold(case: dict[str, Any]) -> None:
    assert KvSpec(**case["spec"]).fingerprint.hex() == case["fingerprint"]


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3", "fp8_e5m2"])
def test_only_elements_that_a_codec_can_round_may_be_rounded(kv_dtype: str) -> None:
    with pytest.raises(BadKvSpec, match=f"has elements of {kv_dtype}, and codecs round .* accept_lossy") as raised:
        replace(LLAMA, kv_dtype=kv_dtype, accepts_lossy=True)
    assert raised.value.metadata == {"field": "accepts_lossy"}


def test_every_field_is_known_to_decide_or_not() -> None:
    assert {field.name for field in fields(KvSpec)} == {*CHANGES, *FREE, "hash_scheme", "span"}
    assert {field.name for field in chunk_pb2.KvSpec.DESCRIPTOR.fields} == {
        *CHANGES,
        *FREE,
        "hash_scheme",
        "span",
        "fingerprint",
    }


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_decides_changes_the_fingerprint(name: str) -> None:
    other = replace(TILES, **{name: CHANGES[name]})
    assert other.fingerprint != TILES.fingerprint
    assert TILES.first_difference(other) == name


def test_pages_that_an_engine_names_itself_have_a_fingerprint_of_their_own() -> None:
    pages = replace(LLAMA, hash_scheme="sha256-pages")
    assert pages.has_page_hashes
    assert not LLAMA.has_page_hashes
    assert pages.fingerprint != LLAMA.fingerprint
    assert LLAMA.first_difference(pages) == "hash_scheme"
    assert KvSpec.from_proto(pages.to_proto()) == pages


def test_a_difference_of_a_further_part_is_named_with_its_field() -> None:
    window = KvPart(layer_count=1, kv_head_count=1, head_size=1, kv_dtype="int8", rule=PART_RULE_LAST, span=16)
    state = KvPart(layer_count=1, kv_head_count=1, head_size=1, kv_dtype="int8", rule=PART_RULE_END)
    spec = replace(TILES, format=TOKEN_MAJOR, more_parts=(window, state))
    for other, name, own_value, other_value in (
        (replace(spec, more_parts=(window, replace(state, head_size=2))), "more_parts[1].head_size", "1", "2"),
        (replace(spec, more_parts=(state, state)), "more_parts[0].rule", "PART_RULE_LAST", "PART_RULE_END"),
        (replace(spec, more_parts=()), "more_parts", "PART_RULE_LAST, PART_RULE_END", "none"),
        (replace(spec, rule=PART_RULE_LAST, span=16), "rule", "PART_RULE_ALL", "PART_RULE_LAST"),
        (replace(spec, format=NATIVE_TILES, more_parts=(replace(window, block_size=16), state)),
         "format", "KV_FORMAT_TOKEN_MAJOR", "KV_FORMAT_NATIVE_TILES"),
    ):  # fmt: skip
        assert spec.first_difference(other) == name
        assert (spec.shown(name), other.shown(name)) == (own_value, other_value)


@pytest.mark.parametrize("name", FREE)
def test_a_field_for_people_does_not(name: str) -> None:
    other = replace(TILES, **{name: FREE[name]})
    assert other.fingerprint == TILES.fingerprint
    assert TILES.first_difference(other) is None


@pytest.mark.parametrize("spec", [LLAMA, TILES, replace(LLAMA, mla=True, kv_head_count=1, head_size=576)])
def test_a_spec_survives_the_wire(spec: KvSpec) -> None:
    message = chunk_pb2.KvSpec.FromString(spec.to_proto().SerializeToString())
    assert KvSpec.from_proto(message) == spec
    assert message.fingerprint == spec.fingerprint
    assert len(message.fingerprint) == 16


def test_a_model_with_one_kind_of_layers_has_no_field_of_others_on_the_wire() -> None:
    assert not {field.name for field, _ in LLAMA.to_proto().ListFields()} & {"rule", "span", "layers", "more_parts"}


def test_a_spec_that_lies_is_refused() -> None:
    message = LLAMA.to_proto()
    message.head_size = 64
    with pytest.raises(BadKvSpec, match="is not the digest of the spec") as raised:
        KvSpec.from_proto(message)
    assert raised.value.metadata == {"field": "fingerprint"}


def test_a_spec_may_be_renamed_on_the_way() -> None:
    message = LLAMA.to_proto()
    message.model_name = "another-name"
    assert KvSpec.from_proto(message).model_name == "another-name"


def test_sizes_of_token_major_chunks() -> None:
    assert LLAMA.chunk_bytes == 32 * 8 * 256 * 2 * 128 * 2
    assert LLAMA.size_bytes(1) * 256 == LLAMA.chunk_bytes
    latent = replace(LLAMA, mla=True, kv_head_count=1, head_size=576, layer_count=61)
    assert latent.chunk_bytes == 61 * 256 * 576 * 2


def test_sizes_of_native_tiles_are_whole_blocks() -> None:
    assert TILES.parts[0].tile_bytes == 128 * 2 * 128 * 2
    assert TILES.chunk_bytes == LLAMA.chunk_bytes
    assert TILES.size_bytes(1) == TILES.size_bytes(128) == TILES.chunk_bytes // 2
    assert TILES.size_bytes(129) == TILES.chunk_bytes


@pytest.mark.parametrize(
    ("kv_dtype", "size_bytes"),
    [("float32", 4), ("bfloat16", 2), ("float16", 2), ("fp8_e4m3", 1), ("fp8_e5m2", 1), ("int8", 1)],
)
def test_every_dtype_has_a_size(kv_dtype: str, size_bytes: int) -> None:
    assert replace(LLAMA, kv_dtype=kv_dtype).chunk_bytes == 32 * 8 * 256 * 2 * 128 * size_bytes
    assert len(DTYPE_BYTES) == 6


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("layer_count", {"layer_count": 0}),
        ("kv_head_count", {"kv_head_count": -1}),
        ("head_size", {"head_size": 0}),
        ("chunk_size", {"chunk_size": 0}),
        ("kv_dtype", {"kv_dtype": "int3"}),
        ("hash_scheme", {"hash_scheme": "md5"}),
        ("hash_scheme", {"hash_scheme": "sha256-pages", "layers": "full"}),
        ("chunk_size", {"format": NATIVE_TILES, "block_size": 96}),
        ("chunk_size", {"format": NATIVE_TILES, "block_size": 0}),
    ],
)
def test_a_spec_that_contradicts_itself_is_refused_by_field(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(BadKvSpec, match=field) as raised:
        replace(LLAMA, **changes)
    assert raised.value.metadata == {"field": field}


def test_a_size_fits_a_number_of_tokens_only() -> None:
    assert LLAMA.fits(LLAMA.chunk_bytes, 256)
    assert LLAMA.fits(LLAMA.size_bytes(1), 1)
    assert LLAMA.fits(LLAMA.size_bytes(255), 255)
    assert not LLAMA.fits(LLAMA.size_bytes(1), 2)
    assert not LLAMA.fits(LLAMA.chunk_bytes, 255)
    assert not LLAMA.fits(LLAMA.size_bytes(257), 257)
    assert not LLAMA.fits(0, 0)


def test_partial_chunks_with_several_parts_have_no_size() -> None:
    state = KvPart(layer_count=1, kv_head_count=1, head_size=1, kv_dtype="int8", rule=PART_RULE_END)
    spec = replace(LLAMA, more_parts=(state,))
    assert [spec.fits(spec.part_bytes(part), 256) for part in (0, 1)] == [True, True]
    assert not spec.fits(spec.chunk_bytes, 256), "its parts are stored apart"
    assert not spec.fits(spec.size_bytes(5), 5)


def test_a_version_of_weights_is_bounded_and_shown() -> None:
    longest = replace(LLAMA, weight_version="v" * MAX_FIELD_BYTES)
    assert longest.shown("weight_version") == "v" * MAX_FIELD_BYTES
    assert LLAMA.shown("weight_version") == "none"
    with pytest.raises(BadKvSpec, match="weight_version has more than") as raised:
        replace(LLAMA, weight_version="v" * (MAX_FIELD_BYTES + 1))
    assert raised.value.metadata == {"field": "weight_version"}
    assert replace(LLAMA, weight_version=f"{PRIVATE_VERSION}x").is_private
    assert not longest.is_private


@pytest.mark.parametrize(
    ("name", "lora_identity", "field"),
    [
        ("m", "", ""),
        ("m" * MAX_NAME_BYTES, "a" * MAX_IDENTITY_BYTES, ""),
        ("", "", "name"),
        ("m" * (MAX_NAME_BYTES + 1), "", "name"),
        ("é" * MAX_NAME_BYTES, "", "name"),
        ("m\n", "", "name"),
        ("m", "a" * (MAX_IDENTITY_BYTES + 1), "lora_identity"),
        ("m", "a\0", "lora_identity"),
    ],
)
def test_served_names_are_bounded_and_printable(name: str, lora_identity: str, field: str) -> None:
    if not field:
        served = ServedModel(name=name, fingerprint=LLAMA.fingerprint, lora_identity=lora_identity)
        assert (served.to_proto().name, served.to_proto().lora_identity) == (name, lora_identity)
        return
    with pytest.raises(BadKvSpec, match=f"served_models: {field} must have") as raised:
        ServedModel(name=name, fingerprint=LLAMA.fingerprint, lora_identity=lora_identity)
    assert raised.value.metadata == {"field": f"served_models.{field}"}


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


@pytest.mark.parametrize(
    ("layers", "sliding_layers", "span", "interval"),
    [
        (10, 52, 32, 16),  # a window of one chunk
        (10, 52, 4 * 32, 63),
        (12, 12, 16, LEAST_INTERVAL),
        (90, 10, 32, 1),
    ],
)
def test_windows_that_are_stored_wherever_prompts_end_take_a_share_of_full_attention(
    layers: int, sliding_layers: int, span: int, interval: int
) -> None:
    sliding = replace(FULL, rule=PART_RULE_LAST, span=span, layer_count=sliding_layers)
    spec = replace(HYBRID, format=TOKEN_MAJOR, block_size=0, tile_isa="", layer_count=layers, more_parts=(sliding,))
    assert spec.window_interval == interval
    if interval > LEAST_INTERVAL:
        windows = len(sliding.needed(span * spec.chunk_size, spec.chunk_size)) * spec.part_bytes(1)
        assert windows / interval <= spec.part_bytes(0) / WINDOW_SHARE < windows / (interval - 1)


def test_models_without_full_attention_or_with_states_store_all_windows() -> None:
    assert HYBRID.window_interval == 1
    assert replace(HYBRID, rule=PART_RULE_LAST, span=64, more_parts=HYBRID.more_parts[:1]).window_interval == 1


def test_sizes_of_partial_chunks_states_and_latents() -> None:
    assert FULL.size_bytes(5) == 2 * 2 * 5 * 2 * 16 * 4
    assert replace(FULL, mla=True).size_bytes(5) == 2 * 2 * 5 * 16 * 4
    assert replace(FULL, block_size=4).size_bytes(5) == 2 * 2 * 8 * 2 * 16 * 4
    assert STATE.size_bytes(5) == STATE.size_bytes(8) == 2 * 1 * 4096
    tiled = replace(FULL, block_size=4)
    assert (tiled.tile_bytes, replace(tiled, mla=True).tile_bytes, FULL.tile_bytes) == (4 * 2 * 16 * 4, 4 * 16 * 4, 0)
