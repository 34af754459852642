"""What the benchmark of models with layers of several kinds compares."""

from __future__ import annotations

import pytest

from benchmarks.hybrid import SHAPES, PromptBytes, full_attention_bytes, window_spec
from benchmarks.replay.traces import Request, Trace
from benchmarks.replay.windows import count_windows
from benchmarks.support.meanings import meaning_of
from lmkv.keys import ChunkKey


def test_full_attention_keeps_k_and_v_of_every_layer() -> None:
    token_bytes = 8 * 2 * 2 * 64 * 4  # layers, K and V, heads, head size, float32
    assert full_attention_bytes("gpt_oss") == PromptBytes(
        stored=1000 * token_bytes, loaded=1000 * token_bytes, fetched=1000 * token_bytes
    )


def test_every_row_says_what_it_is() -> None:
    whats = ("cold_ttft_ms", "own_ttft_ms", "peer_ttft_ms", "stored_kib", "fetched_kib", "offloading_loaded_kib")
    meanings = {meaning_of(f"{name}_{what}") for name in SHAPES for what in whats}
    assert len(meanings) == len(SHAPES) * len(whats)


def trace_of(*prompts: list[int]) -> Trace:
    """A trace of prompts of whole chunks, by their numbers."""
    keys = [[ChunkKey(number.to_bytes(16, "big")) for number in prompt] for prompt in prompts]
    requests = [Request(keys=each, token_count=512 * len(each), stored=each) for each in keys]
    return Trace(requests=requests, chunk_tokens=512)


def test_a_hit_inside_a_stored_prompt_is_lost_once() -> None:
    spec = window_spec("gemma3", 512)
    assert spec.window_interval == 30
    first, inside = list(range(40)), [*range(20), 100]
    again = [*range(20), 200]
    kept = [
        count_windows(trace_of(first, *others), spec).kept_share for others in ((first,), (inside,), (inside, again))
    ]
    assert kept == [pytest.approx(39 / 40, abs=0.03), 0.0, 0.5]
    ratio = count_windows(trace_of(first), spec).bytes_ratio
    window, chunk = spec.part_bytes(1), spec.part_bytes(0)
    assert ratio == pytest.approx((40 * chunk + 5 * window) / (40 * chunk + 2 * window)), (
        "those before chunk 30, and one for the same prompt again"
    )
