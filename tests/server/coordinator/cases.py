"""Specs, a prompt and its keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lmkv.keys import ChunkKey, as_tokens, chunk_keys, root_key
from lmkv.spec import KvPart, KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_END, PART_RULE_LAST
from tests.support.specs import LLAMA

LLAMA_FLOAT = dataclasses.replace(LLAMA, kv_dtype="float32")
QWEN = dataclasses.replace(LLAMA, model_name="qwen", model_id="qwen@1", chunk_size=32, vocab_size=1000)
HYBRID = dataclasses.replace(
    LLAMA,
    model_name="gpt-oss",
    model_id="gpt-oss@1",
    layers="full",
    more_parts=(
        KvPart(rule=PART_RULE_LAST, span=20, layer_count=2, kv_head_count=2, head_size=64, kv_dtype="bfloat16"),
        KvPart(rule=PART_RULE_END, layer_count=1, kv_head_count=1, head_size=4096, kv_dtype="int8"),
    ),
)
"""Full attention, a window that needs the last two chunks, and states."""
MISTRAL = dataclasses.replace(LLAMA, model_name="mistral", model_id="mistral@1", rule=PART_RULE_LAST, span=20)
"""All layers slide: a hit needs its last two chunks only."""
PROMPT = list(range(100, 140))  # two chunks of 16 tokens and one of 8


def keys_of(
    tokens: Sequence[int], spec: KvSpec = LLAMA, *, secret: bytes = b"hush", cache_salt: str = "", lora: str = ""
) -> list[ChunkKey]:
    root = root_key(spec.fingerprint, cache_salt=cache_salt, lora=lora, secret=secret)
    return chunk_keys(as_tokens(tokens), root, spec.chunk_size, partial=True)


KEYS = keys_of(PROMPT)
CHUNKS = dict(zip(KEYS, (16, 16, 8), strict=True))
"""The prompt's chunks with their tokens."""
