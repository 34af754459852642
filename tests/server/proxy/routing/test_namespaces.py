"""The keys by which the proxy looks prompts up."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lmkv.keys import (
    KEY_BYTES,
    MEDIA_HASH_SCHEME,
    PAGE_HASH_SCHEME,
    as_tokens,
    chunk_keys,
    join_keys,
    page_keys,
    page_seed,
    root_key,
)
from lmkv.spec import KvSpec
from lmkv.v1 import chunk_pb2
from lmkv.v1.registry_service_pb2 import Instance
from lmkv_server.proxy.routing import key_lookup
from lmkv_server.proxy.routing.key_lookup import MAX_NAMESPACES, GrowingChains, Namespaces, ServedNamespace
from tests.support.specs import make_spec

SPEC = make_spec(model_name="llama", model_id="llama@1", kv_dtype="bfloat16", head_size=64, chunk_size=16)
TOKENS = as_tokens(range(40))


PAGES = replace(SPEC, hash_scheme=PAGE_HASH_SCHEME)


def keys_of(spec: KvSpec, tokens: NDArray[np.uint32], salt: str = "", cuts: tuple[int, ...] = ()) -> bytes:
    """The keys of tokens that arrive in parts, which end at `cuts`."""
    growing = ServedNamespace(spec).growing_keys(salt, b"hush")
    for part in np.split(tokens, cuts):
        growing.add(part)
    return growing.all()


@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_chunks_have_the_keys_of_the_connector(salt: str) -> None:
    root = root_key(SPEC.fingerprint, cache_salt=salt, secret=b"hush")
    assert keys_of(SPEC, TOKENS, salt) == join_keys(chunk_keys(TOKENS, root, 16, partial=True))


@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_pages_that_an_engine_names_itself_have_keys_of_their_digests(salt: str) -> None:
    expected, _ = page_keys(TOKENS, root_key(PAGES.fingerprint, secret=b"hush"), 16, page_seed(salt))
    keys = keys_of(PAGES, TOKENS, salt)
    assert keys == expected
    assert len(keys) == 2 * 16, "the rest of a page has no key"


@pytest.mark.parametrize(
    "spec", [SPEC, PAGES, replace(SPEC, rule=chunk_pb2.PART_RULE_END)], ids=["chunks", "pages", "end"]
)
@given(count=st.integers(0, 90), cuts=st.lists(st.integers(0, 90), max_size=6))
def test_keys_do_not_depend_on_how_the_tokens_arrive(spec: KvSpec, count: int, cuts: list[int]) -> None:
    tokens = as_tokens(range(count))
    assert keys_of(spec, tokens, cuts=tuple(sorted(min(cut, count) for cut in cuts))) == keys_of(spec, tokens)


@pytest.mark.parametrize("cuts", [(), (10, 20), (32,), (40,)])
@pytest.mark.parametrize("spec", [SPEC, PAGES], ids=["chunks", "pages"])
def test_a_longer_prompt_has_as_many_keys_as_a_lookup_may_have(
    monkeypatch: pytest.MonkeyPatch, spec: KvSpec, cuts: tuple[int, ...]
) -> None:
    expected = keys_of(spec, TOKENS[:32])
    monkeypatch.setattr(key_lookup, "MAX_KEYS", 2)
    assert keys_of(spec, TOKENS, cuts=cuts) == expected
    assert len(expected) == 2 * KEY_BYTES


def test_keys_are_of_a_prompt_if_namespaces_salt_and_all_tokens_are_the_same() -> None:
    namespaces = [ServedNamespace(SPEC), ServedNamespace(PAGES, "tuned@1")]
    growing = GrowingChains(namespaces, "salt", b"hush")
    growing.add(TOKENS[:30])
    growing.add(TOKENS[30:])
    assert growing.is_of([ServedNamespace(SPEC), ServedNamespace(PAGES, "tuned@1")], "salt", 40)
    assert not growing.is_of(namespaces[:1], "salt", 40)
    assert not growing.is_of([ServedNamespace(SPEC), ServedNamespace(PAGES, "tuned@2")], "salt", 40)
    assert not growing.is_of(namespaces, "", 40)
    assert not growing.is_of(namespaces, "salt", 41)
    chunks, pages = growing.all()
    assert (chunks.fingerprint, chunks.chunk_size, len(chunks.keys)) == (SPEC.fingerprint, 16, 3 * KEY_BYTES)
    assert (pages.fingerprint, pages.chunk_size, len(pages.keys)) == (PAGES.fingerprint, 16, 2 * KEY_BYTES)


def test_without_a_name_outputs_of_encoders_are_not_meant() -> None:
    encoder = replace(SPEC, model_name="llama encoder", hash_scheme=MEDIA_HASH_SCHEME)
    namespaces = Namespaces([Instance(specs=[spec.to_proto() for spec in (SPEC, encoder)])])
    assert namespaces.of("") == [ServedNamespace(SPEC)]


def test_a_lookup_covers_the_newest_specs_of_a_name() -> None:
    specs = [replace(SPEC, model_id=f"llama@{number}") for number in range(MAX_NAMESPACES + 3)]
    namespaces = Namespaces([Instance(specs=[spec.to_proto() for spec in specs])])
    assert [one.spec for one in namespaces.of("llama")] == specs[-MAX_NAMESPACES:]
