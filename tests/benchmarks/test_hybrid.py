"""What the benchmark of models with layers of several kinds compares."""

from __future__ import annotations

from benchmarks.hybrid import SHAPES, PromptBytes, full_attention_bytes
from benchmarks.support.meanings import meaning_of


def test_full_attention_keeps_k_and_v_of_every_layer() -> None:
    token_bytes = 8 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
    assert full_attention_bytes("gpt_oss") == PromptBytes(
        stored=1000 * token_bytes, loaded=1000 * token_bytes, fetched=1000 * token_bytes
    )


def test_every_row_says_what_it_is() -> None:
    whats = ("cold_ttft_ms", "own_ttft_ms", "peer_ttft_ms", "stored_kib", "fetched_kib", "offloading_loaded_kib")
    meanings = {meaning_of(f"{name}_{what}") for name in SHAPES for what in whats}
    assert len(meanings) == len(SHAPES) * len(whats)
