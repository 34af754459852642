from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lmkv.errors import BadKvSpec
from lmkv.parts import DTYPE_BYTES, KvPart
from lmkv.spec import (
    MAX_FIELD_BYTES,
    MAX_IDENTITY_BYTES,
    MAX_NAME_BYTES,
    NATIVE_TILES,
    PRIVATE_VERSION,
    TOKEN_MAJOR,
    KvSpec,
    ServedModel,
)
from lmkv.v1 import chunk_pb2
from lmkv.v1.chunk_pb2 import PART_RULE_END, PART_RULE_LAST

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
    "more_parts": (KvPart(layer_count=1, kv_head_count=1, head_size=1, kv_dtype="int8", rule=PART_RULE_END),),
}
"""A change of each field that decides, but of `span`, which changes with `rule`: test_parts.py."""
FREE: dict[str, Any] = {"model_name": "alias", "vocab_size": 1}
"""A change of each field that does not."""


@pytest.mark.parametrize("case", GOLDEN["specs"], ids=lambda case: str(case["spec"]["model_name"]))
def test_golden_fingerprints_hold(case: dict[str, Any]) -> None:
    assert KvSpec(**case["spec"]).fingerprint.hex() == case["fingerprint"]


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
