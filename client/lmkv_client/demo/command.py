"""`lmkv demo`: measures how much two engines on this machine save by sharing a prompt."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType

from rich.console import Console

from lmkv.errors import ConfigError, LmkvError
from lmkv.keys import PAGE_HASH_SCHEME
from lmkv.runtime.signals import stop_signals
from lmkv.units import format_bytes
from lmkv_client.demo.cluster import Cluster
from lmkv_client.demo.measure import (
    COMPLETION_TOKENS,
    DemoEngine,
    DemoPrompts,
    DemoResult,
    StoredKv,
    make_table,
    measure,
)
from lmkv_client.demo.model import SHAPES, make_model
from lmkv_client.demo.process import available_memory_bytes
from lmkv_client.demo.sglang_engine import check_sglang

CHUNK_SIZE = 256
BLOCK_SIZE = 128
PAGE_SIZE = 128
"""Tokens of a chunk if an engine is of SGLang: a page."""
VLLM, SGLANG = "vllm", "sglang"
ENGINES = (VLLM, SGLANG)
FLOAT32_BYTES = 4
ENGINE_BYTES = {VLLM: 1300 << 20, SGLANG: 2600 << 20}
"""Memory of an engine besides its model and its KV cache; SGLang's has three processes."""
FEWEST_PROMPT_TOKENS = 2 * CHUNK_SIZE
MOST_PROMPT_TOKENS = 16_000


def run(args: argparse.Namespace) -> int:
    """Returns 0 if engine 2 loaded the prompts from engine 1 and all completions are identical, otherwise 1.

    Raises `ConfigError` if the flags are invalid.
    """
    _check(args)
    console = Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="lmkv-demo-"))
    logs = (args.keep_logs or folder / "logs").absolute()
    handlers = {number: signal.signal(number, _interrupt) for number in stop_signals()}
    try:
        result = _demonstrate(args, folder, logs, _Progress(console))
        console.print(make_table(result))
        if args.json:
            args.json.write_text(json.dumps(result.to_json(), indent=2) + "\n")
        failure = _failure(result)
    except (LmkvError, OSError) as error:
        failure = str(error)
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # the terminal may be closed
            console.print("lmkv demo: interrupted; all its processes have exited")
        return 130
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for part in ("model", "run") if failure and not args.keep_logs else ("",):
        shutil.rmtree(folder / part, ignore_errors=True)
    if failure:
        console.print(f"lmkv demo: {failure}; the logs are in {logs}", soft_wrap=True, markup=False)
        return 1
    return 0


class _Progress:
    """Prints the progress of the demo, with the time since its start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begin = time.monotonic()

    def __call__(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._begin:5.1f} s  {line}", soft_wrap=True, markup=False)


def _demonstrate(args: argparse.Namespace, folder: Path, logs: Path, progress: Callable[[str], None]) -> DemoResult:
    """Runs the demo. Ends all processes, also after an error."""
    shape = SHAPES[args.model_size]
    prompt_bytes = shape.kv_bytes_per_token(FLOAT32_BYTES) * args.prompt_tokens
    context_tokens = -(-(args.prompt_tokens + COMPLETION_TOKENS) // BLOCK_SIZE) * BLOCK_SIZE
    model = make_model(folder / "model", shape, args.seed)
    token_kib = shape.kv_bytes_per_token(FLOAT32_BYTES) // 1024
    progress(f"created a Llama model with random weights, {token_kib} KiB of KV cache per token")
    kinds = _kinds(args.engines)
    has_pages = SGLANG in kinds
    settings = {
        "LMKV_CHUNK_SIZE": str(PAGE_SIZE if has_pages else CHUNK_SIZE),
        "LMKV_MAX_LOCAL_CPU_SIZE": f"{_pool_mib(args.rounds, prompt_bytes)}MiB",
        "LMKV_NODE_LINGER": "5",
        # A busy machine makes the demo slow, but must not make it fail.
        "LMKV_LOOKUP_TIMEOUT": "5",
        "LMKV_COORDINATOR_TIMEOUT": "2",
        "LMKV_LOAD_TIMEOUT": "10",
        "LMKV_REFUSE_SLOW_FETCHES": "false",
    }
    if has_pages:
        settings |= {"LMKV_SHARE_ACROSS_ENGINES": "true", "LMKV_HASH_SCHEME": PAGE_HASH_SCHEME}
    with Cluster(folder, model, logs=logs, settings=settings) as cluster:
        assert cluster.coordinator is not None
        address, page = cluster.coordinator.address, cluster.coordinator.http_address
        progress(f"coordinator ready at {address}, its page at http://{page}")
        progress(f"starting {_in_words(kinds)}, which takes half a minute or more")

        def add(name: str, kind: str) -> DemoEngine:
            if kind == SGLANG:
                return cluster.add_sglang_engine(
                    name,
                    python=args.sglang_python or sys.executable,
                    page_size=PAGE_SIZE,
                    context_tokens=context_tokens + PAGE_SIZE,  # SGLang never fills the last tokens
                )
            return cluster.add_engine(
                name,
                dtype="float32",  # makes completions comparable: bfloat16 ties too often
                block_size=BLOCK_SIZE,
                context_tokens=context_tokens,
                kv_cache_bytes=2 * shape.kv_bytes_per_token(FLOAT32_BYTES) * context_tokens,
            )

        first, second = (add(f"engine-{number}", kind) for number, kind in enumerate(kinds, 1))
        cluster.start_engines(
            lambda engine: progress(f"{engine.name} ready at http://127.0.0.1:{engine.port} ({engine.kind})")
        )
        result = measure(
            cluster.coordinator,
            (first, second),
            StoredKv(token_bytes=shape.kv_bytes_per_token(FLOAT32_BYTES), page_size=PAGE_SIZE if has_pages else 1),
            DemoPrompts(
                token_count=args.prompt_tokens, vocab_size=shape.vocab_size, rounds=args.rounds, seed=args.seed
            ),
            progress,
        )
        progress("stopping engines, nodes and coordinator")
    return result


def _check(args: argparse.Namespace) -> None:
    if not FEWEST_PROMPT_TOKENS <= args.prompt_tokens <= MOST_PROMPT_TOKENS:
        raise ConfigError(
            f"--prompt-tokens must be {FEWEST_PROMPT_TOKENS} to {MOST_PROMPT_TOKENS}, not {args.prompt_tokens}"
        )
    if not 1 <= args.rounds <= 100:
        raise ConfigError(f"--rounds must be 1 to 100, not {args.rounds}")
    if args.seed < 0:
        raise ConfigError(f"--seed must not be negative: {args.seed}")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"--json: the folder does not exist: {args.json.absolute().parent}")
    kinds = _kinds(args.engines)
    if args.sglang_python and SGLANG not in kinds:
        raise ConfigError("--sglang-python is for --engines with sglang, such as vllm,sglang")
    if VLLM in kinds and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "the demo needs vLLM; install it with: pip install '.[cpu]' (or '.[vllm]' with a GPU) in a clone of lmkv"
        )
    if SGLANG in kinds:
        check_sglang(args.sglang_python or sys.executable)
    token_bytes = SHAPES[args.model_size].kv_bytes_per_token(FLOAT32_BYTES)
    prompt_bytes = token_bytes * args.prompt_tokens
    engine_bytes = sum(ENGINE_BYTES[kind] for kind in kinds)
    needed_bytes = engine_bytes + 2 * (3 * prompt_bytes + (_pool_mib(args.rounds, prompt_bytes) << 20))
    if needed_bytes > (free_bytes := available_memory_bytes()):
        raise ConfigError(
            f"the demo needs {format_bytes(needed_bytes)} of memory and {format_bytes(free_bytes)} are free; "
            "set --model-size tiny, or fewer --rounds or --prompt-tokens"
        )


def _kinds(text: str) -> tuple[str, str]:
    """The kinds of the two engines. Raises `ConfigError` if they are not two that are known."""
    kinds = [kind.strip().lower() for kind in text.split(",")]
    if len(kinds) != 2 or not set(kinds) <= set(ENGINES):
        raise ConfigError(
            f"--engines must be two of {' and '.join(ENGINES)}, such as vllm,sglang, or one twice, not {text!r}"
        )
    return kinds[0], kinds[1]


def _in_words(kinds: tuple[str, str]) -> str:
    names = {VLLM: "vLLM", SGLANG: "SGLang"}
    first, second = (names[kind] for kind in kinds)
    return f"two {first} engines" if first == second else f"a {first} and a {second} engine"


def _pool_mib(rounds: int, prompt_bytes: int) -> int:
    """Size of each node's pool: all prompts, including the warm-up, with their completions."""
    return 64 + (rounds + 1) * (prompt_bytes * 5 // 4 >> 20)


def _failure(result: DemoResult) -> str | None:
    """Returns the reason why the demo has failed; None if it has not."""
    if not result.identical:
        return "the engines returned different completions of the same prompt"
    if not all(round_.from_peer.tokens for round_ in result.rounds):
        return "engine 2 loaded nothing from engine 1"
    if not all(round_.from_own.tokens for round_ in result.rounds):
        return "engine 1 loaded nothing from its own host pool"
    return None


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    """Ends the demo; ignores further signals."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt
