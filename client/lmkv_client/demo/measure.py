"""Measures a prompt for `lmkv demo`: computed by one engine, loaded from it by another, and loaded by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from lmkv.units import GIB, format_bytes, format_rate
from lmkv_client.commands.output import count
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.endpoint import Completion, Endpoint
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.model import FIRST_BYTE_TOKEN_ID
from lmkv_client.demo.process import POLL_SECONDS
from lmkv_client.demo.sglang_engine import SglangEngine

COMPLETION_TOKENS = 16
WARM_UP_TOKENS = 1024
STORE_TIMEOUT_SECONDS = 60.0
COUNT_TIMEOUT_SECONDS = 60.0
"""Deadline for metrics: an engine exports those of a request after its response, some only with its next step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTransfer:
    """The tokens that one request loaded instead of computing them."""

    tokens: int
    size_bytes: int
    seconds: float
    """Duration of the transfer: from the peer, or from the node's own pool into the engine. 0: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRound:
    """One prompt, completed three times."""

    cold: Completion
    """Engine 1 computes the prompt, without a cache hit."""
    peer: Completion
    """Engine 2 has a hit at its peer."""
    own: Completion
    """Engine 1 has a hit in its host pool, after its prefix cache was reset."""
    from_peer: CacheTransfer
    from_own: CacheTransfer

    @property
    def identical(self) -> bool:
        """Whether all three completions have the same tokens."""
        return self.cold.token_ids == self.peer.token_ids == self.own.token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """Medians of the rounds. There is at least one round."""

    rounds: Sequence[DemoRound]
    engines: tuple[str, str] = ("vLLM", "vLLM")
    """The kinds of engine 1 and engine 2."""

    @property
    def cold_ttft_ms(self) -> float:
        """Median TTFT without a cache hit."""
        return 1e3 * statistics.median(round_.cold.ttft_seconds for round_ in self.rounds)

    @property
    def peer_ttft_ms(self) -> float:
        """Median TTFT with a hit at a peer."""
        return 1e3 * statistics.median(round_.peer.ttft_seconds for round_ in self.rounds)

    @property
    def own_ttft_ms(self) -> float:
        """Median TTFT with a hit in the own host pool."""
        return 1e3 * statistics.median(round_.own.ttft_seconds for round_ in self.rounds)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of each prompt."""
        return self.rounds[0].cold.prompt_tokens

    @property
    def from_peer(self) -> CacheTransfer:
        """Medians of what was loaded from the peer, one per field."""
        return _median([round_.from_peer for round_ in self.rounds])

    @property
    def from_own(self) -> CacheTransfer:
        """Medians of what was loaded from the own host pool, one per field."""
        return _median([round_.from_own for round_ in self.rounds])

    @property
    def identical(self) -> bool:
        """Whether the completions are identical in every round."""
        return all(round_.identical for round_ in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The medians and all rounds. Other programs read these names."""
        return {
            "engines": list(self.engines),
            "cold_ttft_ms": round(self.cold_ttft_ms, 3),
            "peer_ttft_ms": round(self.peer_ttft_ms, 3),
            "own_ttft_ms": round(self.own_ttft_ms, 3),
            "prompt_tokens": self.prompt_tokens,
            "peer_tokens": self.from_peer.tokens,
            "own_tokens": self.from_own.tokens,
            "peer_gib_per_s": round(gib_per_s(self.from_peer), 3),
            "identical": self.identical,
            "own_gib_per_s": round(gib_per_s(self.from_own), 3),
            "peer_bytes": self.from_peer.size_bytes,
            "own_bytes": self.from_own.size_bytes,
            "peer_ttft_ratio": round(self.peer_ttft_ms / self.cold_ttft_ms, 4),
            "own_ttft_ratio": round(self.own_ttft_ms / self.cold_ttft_ms, 4),
            "rounds": [asdict(round_) for round_ in self.rounds],
        }


def gib_per_s(taken: CacheTransfer) -> float:
    """Throughput in GiB per second; 0 if nothing was loaded."""
    return taken.size_bytes / taken.seconds / GIB if taken.seconds else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredKv:
    """The chunks that the engines store of a prompt."""

    token_bytes: int
    """Bytes of a token's KV."""
    page_size: int = 1
    """Only whole pages of as many tokens are stored; 1: all tokens."""

    def token_count(self, prompt_tokens: int) -> int:
        return prompt_tokens // self.page_size * self.page_size


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoPrompts:
    """Random prompts, a new one for each round."""

    token_count: int
    vocab_size: int
    rounds: int
    seed: int


DemoEngine = EngineProcess | SglangEngine


def measure(
    coordinator: CoordinatorProcess,
    engines: tuple[DemoEngine, DemoEngine],
    kv: StoredKv,
    prompts: DemoPrompts,
    progress: Callable[[str], None],
) -> DemoResult:
    """Measures a round for each prompt, after a short warm-up round.

    Raises `LmkvError` if an engine fails, or if the coordinator does not learn what engine 1 stored.
    """
    random = np.random.default_rng(prompts.seed)

    def measure_prompt(count: int) -> DemoRound:
        prompt = random.integers(FIRST_BYTE_TOKEN_ID, prompts.vocab_size, count).tolist()
        return measure_round(coordinator, engines, kv, prompt)

    measure_prompt(min(prompts.token_count, WARM_UP_TOKENS))
    progress("warmed up; engine 2 is connected to engine 1's node")
    measured = []
    for number in range(1, prompts.rounds + 1):
        measured.append(measure_prompt(prompts.token_count))
        progress(f"round {number} of {prompts.rounds}: {_in_words(measured[-1])}")
    return DemoResult(rounds=measured, engines=(engines[0].kind, engines[1].kind))


def measure_round(
    coordinator: CoordinatorProcess, engines: tuple[DemoEngine, DemoEngine], kv: StoredKv, prompt: Sequence[int]
) -> DemoRound:
    """Measures one prompt cold, from the peer, and from the own pool. Instances have the names of engines."""
    first, second = engines
    cold = first.complete(prompt, COMPLETION_TOKENS)
    coordinator.wait_for_holder(prompt, first.name, kv.token_count(len(prompt)), STORE_TIMEOUT_SECONDS)
    peer, from_peer = _complete(second, prompt, kv, "peer")
    first.reset_prefix_cache()
    own, from_own = _complete(first, prompt, kv, "load")
    return DemoRound(cold=cold, peer=peer, own=own, from_peer=from_peer, from_own=from_own)


def _complete(engine: DemoEngine, prompt: Sequence[int], kv: StoredKv, act: str) -> tuple[Completion, CacheTransfer]:
    """The completion of a prompt, and what was loaded for it. SGLang does not measure its loads."""
    if isinstance(engine, SglangEngine):
        answer = engine.complete(prompt, COMPLETION_TOKENS)
        size_bytes = answer.cached_tokens * kv.token_bytes
        return answer, CacheTransfer(tokens=answer.cached_tokens, size_bytes=size_bytes, seconds=0.0)
    before = engine.metrics()
    answer = engine.complete(prompt, COMPLETION_TOKENS)
    return answer, taken(engine, before, answer, act)


def taken(engine: Endpoint, before: dict[str, float], answer: Completion, act: str) -> CacheTransfer:
    """Reads from the engine's metrics what a request has loaded; `before` has those from before the request.

    If the response has cached tokens, waits for the metrics of their bytes, and triggers steps of the engine for them.
    """
    deadline = time.monotonic() + COUNT_TIMEOUT_SECONDS
    while True:
        counted = _taken(before, engine.metrics(), act)
        if (counted.tokens and counted.size_bytes) or not answer.cached_tokens or time.monotonic() > deadline:
            return counted
        engine.complete([FIRST_BYTE_TOKEN_ID], 1)
        time.sleep(POLL_SECONDS)


def _taken(before: dict[str, float], after: dict[str, float], act: str) -> CacheTransfer:
    what, tokens = ("loaded", "loaded_tokens_total") if act == "load" else (act, 'tier_tokens_total{tier="peers"}')

    def grown(name: str) -> float:
        return after.get(f"lmkv:{name}", 0.0) - before.get(f"lmkv:{name}", 0.0)

    return CacheTransfer(
        tokens=round(grown(tokens)),
        size_bytes=round(grown(f"{what}_bytes_total")),
        seconds=grown(f"{act}_seconds_total"),
    )


def _median(parts: Sequence[CacheTransfer]) -> CacheTransfer:
    return CacheTransfer(
        tokens=round(statistics.median(part.tokens for part in parts)),
        size_bytes=round(statistics.median(part.size_bytes for part in parts)),
        seconds=statistics.median(part.seconds for part in parts),
    )


def _in_words(round_: DemoRound) -> str:
    cold, peer, own = (f"{1e3 * part.ttft_seconds:.0f} ms" for part in (round_.cold, round_.peer, round_.own))
    same = "identical completions" if round_.identical else "DIFFERENT COMPLETIONS"
    return f"{cold} cold, {peer} from the peer, {own} from the own host pool; {same}"


def make_table(result: DemoResult) -> Table:
    """TTFT, and what was loaded instead of computed; fits into 80 columns."""
    table = Table(
        title=f"A prompt of {result.prompt_tokens:,} tokens, medians of {count(len(result.rounds), 'round')}",
        caption=_caption(*result.engines),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.add_column("KV cache", no_wrap=True)
    for heading in ("TTFT", "of cold", "tokens", "size", "speed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("answer", no_wrap=True)
    rounds = result.rounds
    peer_same = all(round_.peer.token_ids == round_.cold.token_ids for round_ in rounds)
    own_same = all(round_.own.token_ids == round_.cold.token_ids for round_ in rounds)
    cold_ms = result.cold_ttft_ms
    table.add_row("cold", *_times(cold_ms, cold_ms), "0", "-", "-", "-")
    table.add_row("from peer", *_times(result.peer_ttft_ms, cold_ms), *_amounts(result.from_peer), _same(peer_same))
    table.add_row("own host pool", *_times(result.own_ttft_ms, cold_ms), *_amounts(result.from_own), _same(own_same))
    return table


def _caption(first: str, second: str) -> str:
    own = "own host pool: engine 1 again, after a reset of its prefix cache"
    if first == second == "vLLM":
        return f"cold: engine 1 computes it · from peer: engine 2 loads it from engine 1\n{own}"
    peer = f"from peer: engine 2, {second}, loads it from engine 1"
    return f"cold: engine 1, {first}, computes it\n{peer}\n{own}"


def _times(ttft_ms: float, cold_ms: float) -> tuple[str, str]:
    return f"{ttft_ms:,.0f} ms", f"{100 * ttft_ms / cold_ms:.1f} %"


def _amounts(taken: CacheTransfer) -> tuple[str, str, str]:
    if not taken.tokens:
        return "0", "-", "-"
    return f"{taken.tokens:,}", format_bytes(taken.size_bytes), format_rate(taken.size_bytes, taken.seconds)


def _same(same: bool) -> str:
    return "same" if same else "DIFFERS"
