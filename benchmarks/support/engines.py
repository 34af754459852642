"""The engines that benchmarks run: real vLLM with a model heavy enough that a long prompt takes seconds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support import machine
from benchmarks.support.command import BenchmarkRun
from lmkv.errors import LmkvError
from lmkv.spec import DTYPE_BYTES, NATIVE_TILES, KvSpec
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.model import FIRST_BYTE_TOKEN_ID, MID, make_model
from lmkv_client.demo.process import available_memory_bytes

SHAPE = MID
EXACT_DTYPE = "float32"
"""The type in which a prompt has the same answer wherever its computation is cut."""
BLOCK_SIZE = 128
CHUNK_SIZE = 256
OUTPUT_TOKENS = 64
"""Room in the context behind the longest prompt."""
ENGINE_BYTES = 1300 << 20
"""What an engine takes besides its KV cache."""

PATIENCE = {
    # A busy machine makes a benchmark slow, not wrong.
    "LMKV_LOOKUP_TIMEOUT": "2",
    "LMKV_LOAD_TIMEOUT": "20",
    "LMKV_COORDINATOR_TIMEOUT": "2",
    "LMKV_NODE_LINGER": "10",
    "LMKV_CHUNK_SIZE": str(CHUNK_SIZE),
}
"""Settings of every engine with lmkv: the defaults, but for the times that it waits."""


def add_dtype_argument(parser: argparse.ArgumentParser) -> None:
    """Flag `--dtype`."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="type that the engines compute in and cache KV in (auto: float32 where answers are compared, "
        "else bfloat16 where the processor has it)",
    )


def choose_dtype(run: BenchmarkRun, *, compares_answers: bool = False) -> str:
    """The type to compute in, noted in the report's settings.

    Benchmarks that compare answers compute in float32: see `check_identical`.
    """
    dtype: str = run.args.dtype
    if dtype == "auto":
        has_bfloat16 = bool(machine.flags() & machine.BFLOAT16_FLAGS)
        dtype = "bfloat16" if has_bfloat16 and not compares_answers else EXACT_DTYPE
    run.report.settings["dtype"] = dtype
    return dtype


def token_bytes(dtype: str) -> int:
    """Bytes of KV cache per token."""
    return SHAPE.kv_bytes_per_token(DTYPE_BYTES[dtype])


def kv_spec(dtype: str) -> KvSpec:
    """Size and shape of the chunks that these engines make."""
    return KvSpec(
        model_name="mid",
        model_id="mid",
        kv_dtype=dtype,
        layer_count=SHAPE.layer_count,
        kv_head_count=SHAPE.kv_head_count,
        head_size=SHAPE.head_size,
        chunk_size=CHUNK_SIZE,
        format=NATIVE_TILES,
        tile_backend="CPU_ATTN",
        block_size=BLOCK_SIZE,
        vocab_size=SHAPE.vocab_size,
    )


def context_for(prompt_tokens: int, output_tokens: int = OUTPUT_TOKENS) -> int:
    """Length of context that an engine needs, in whole blocks."""
    return -(-(prompt_tokens + output_tokens) // BLOCK_SIZE) * BLOCK_SIZE


def model_of(run: BenchmarkRun) -> Path:
    """The model's folder, made if it is not there."""
    return make_model(run.folder / "mid", SHAPE)


def pool_setting(size_bytes: int) -> dict[str, str]:
    """The setting that gives a node so much memory for chunks."""
    return {"LMKV_MAX_LOCAL_CPU_SIZE": f"{-(-size_bytes >> 20)}MiB"}


def check_memory(needed_bytes: int) -> None:
    """Raises `LmkvError` if there is not so much memory."""
    if needed_bytes > (free_bytes := available_memory_bytes()):
        raise LmkvError(f"this needs {needed_bytes / 1e9:.1f} GB of memory and {free_bytes / 1e9:.1f} GB are free")


class Prompts:
    """Random prompts, no two alike, the same in every run."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def make(self, token_count: int) -> list[int]:
        """A new prompt, which no cache holds."""
        tokens: list[int] = self._random.integers(FIRST_BYTE_TOKEN_ID, SHAPE.vocab_size, token_count).tolist()
        return tokens


def options(dtype: str, context_tokens: int, prompts_in_cache: int = 3) -> dict[str, Any]:
    """Arguments of an `EngineProcess` whose own cache holds this number of prompts of full length."""
    return {
        "dtype": dtype,
        "block_size": BLOCK_SIZE,
        "context_tokens": context_tokens,
        "kv_cache_bytes": prompts_in_cache * context_tokens * token_bytes(dtype),
    }


def full_chunks(token_count: int) -> int:
    """Tokens of a prompt that are in full chunks, which is what every system keeps."""
    return token_count // CHUNK_SIZE * CHUNK_SIZE


def check_hit(what: str, completion: Completion, token_count: int) -> None:
    """Raises `LmkvError` unless this number of tokens was cached: else the time is not comparable."""
    if completion.cached_tokens < token_count:
        raise LmkvError(f"{what}: {completion.cached_tokens} of {token_count} tokens were cached")


def check_identical(run: BenchmarkRun, what: str, same_count: int, count: int) -> None:
    """Makes the run fail if answers differ that must be identical, in float32.

    In bfloat16 the run gets a note instead: sums are rounded, so where a prompt's computation is cut decides between
    tokens of nearly the same probability. A hit in vLLM's own prefix cache cuts it, too, and changes as many answers.
    """
    if same_count == count:
        return
    text = f"{what}: {count - same_count} of {count} answers differ"
    if run.report.settings["dtype"] == EXACT_DTYPE:
        run.fail(text)
    else:
        run.note(f"{text}: in bfloat16 they also do after a hit in vLLM's own prefix cache; compare in float32")


def check_miss(what: str, completion: Completion) -> None:
    """Raises `LmkvError` if anything was taken from a cache."""
    if completion.cached_tokens:
        raise LmkvError(f"{what}: {completion.cached_tokens} tokens of a new prompt were cached")
