"""The keys by which the proxy looks prompts up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmkv.keys import PAGE_HASH_SCHEME, as_tokens, chunk_keys, join_keys, page_keys, page_seed, root_key
from lmkv.spec import KvSpec
from lmkv_server.proxy.routing.namespaces import ServedNamespace

SPEC = KvSpec(
    model_name="llama",
    model_id="llama@1",
    kv_dtype="bfloat16",
    layer_count=2,
    kv_head_count=2,
    head_size=64,
    chunk_size=16,
)
TOKENS = as_tokens(range(40))


@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_chunks_have_the_keys_of_the_connector(salt: str) -> None:
    root = root_key(SPEC.fingerprint, cache_salt=salt, secret=b"hush")
    assert ServedNamespace(SPEC).keys(TOKENS, salt, b"hush") == join_keys(chunk_keys(TOKENS, root, 16, partial=True))


@pytest.mark.parametrize("salt", ["", "tenant-a"])
def test_pages_that_an_engine_names_itself_have_keys_of_their_digests(salt: str) -> None:
    spec = replace(SPEC, hash_scheme=PAGE_HASH_SCHEME)
    expected, _ = page_keys(TOKENS, root_key(spec.fingerprint, secret=b"hush"), 16, page_seed(salt))
    keys = ServedNamespace(spec).keys(TOKENS, salt, b"hush")
    assert keys == expected
    assert len(keys) == 2 * 16, "the rest of a page has no key"
