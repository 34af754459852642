"""What `lmkv demo` measures: one prompt, computed by one engine, then taken from it by another and by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lmkv.units import GB
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.completion import Completion
from lmkv_client.demo.endpoint import Endpoint
from lmkv_client.demo.engine import EngineProcess
from lmkv_client.demo.model import FIRST_BYTE_TOKEN_ID
from lmkv_client.demo.process import POLL_SECONDS

COMPLETION_TOKENS = 16
WARM_UP_TOKENS = 1024
STORE_TIMEOUT_SECONDS = 10.0
COUNT_TIMEOUT_SECONDS = 10.0
"""An engine publishes counts with its steps: those of a request may follow its answer, some with the next step only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheTransfer:
    """What one request took instead of computing it."""

    tokens: int
    size_bytes: int
    seconds: float
    """Time that the bytes were under way: from the peer, or from the node's own pool into the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoRound:
    """One prompt, asked three times."""

    cold: Completion
    """By engine 1, which has never seen it."""
    peer: Completion
    """By engine 2, which has never seen it either."""
    own: Completion
    """By engine 1 again, after its prefix cache was emptied."""
    from_peer: CacheTransfer
    from_own: CacheTransfer

    @property
    def identical(self) -> bool:
        """Whether all three completions are the same, token by token."""
        return self.cold.token_ids == self.peer.token_ids == self.own.token_ids


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoResult:
    """What the rounds say together. There is at least one."""

    rounds: Sequence[DemoRound]

    @property
    def cold_ttft_ms(self) -> float:
        """Median time to the first token of a prompt that nobody holds."""
        return 1e3 * statistics.median(round_.cold.ttft_seconds for round_ in self.rounds)

    @property
    def peer_ttft_ms(self) -> float:
        """Median time to the first token of a prompt that a peer holds."""
        return 1e3 * statistics.median(round_.peer.ttft_seconds for round_ in self.rounds)

    @property
    def own_ttft_ms(self) -> float:
        """Median time to the first token of a prompt that the own host pool holds."""
        return 1e3 * statistics.median(round_.own.ttft_seconds for round_ in self.rounds)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of each prompt."""
        return self.rounds[0].cold.prompt_tokens

    @property
    def from_peer(self) -> CacheTransfer:
        """What a median round took from the peer, each number for itself."""
        return _median([round_.from_peer for round_ in self.rounds])

    @property
    def from_own(self) -> CacheTransfer:
        """What a median round took from the own host pool, each number for itself."""
        return _median([round_.from_own for round_ in self.rounds])

    @property
    def identical(self) -> bool:
        """Whether the completions of every round are the same."""
        return all(round_.identical for round_ in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """The numbers under the names that others compare by, and every round as it was."""
        return {
            "cold_ttft_ms": round(self.cold_ttft_ms, 3),
            "peer_ttft_ms": round(self.peer_ttft_ms, 3),
            "own_ttft_ms": round(self.own_ttft_ms, 3),
            "prompt_tokens": self.prompt_tokens,
            "peer_tokens": self.from_peer.tokens,
            "own_tokens": self.from_own.tokens,
            "peer_gb_per_s": round(gb_per_s(self.from_peer), 3),
            "identical": self.identical,
            "own_gb_per_s": round(gb_per_s(self.from_own), 3),
            "peer_bytes": self.from_peer.size_bytes,
            "own_bytes": self.from_own.size_bytes,
            "peer_ttft_ratio": round(self.peer_ttft_ms / self.cold_ttft_ms, 4),
            "own_ttft_ratio": round(self.own_ttft_ms / self.cold_ttft_ms, 4),
            "rounds": [asdict(round_) for round_ in self.rounds],
        }


def gb_per_s(taken: CacheTransfer) -> float:
    """Speed in GB (2^30 bytes, as in log lines) a second; 0 where nothing was taken."""
    return taken.size_bytes / taken.seconds / GB if taken.seconds else 0.0


def measure(
    coordinator: CoordinatorProcess,
    engines: tuple[EngineProcess, EngineProcess],
    *,
    prompt_tokens: int,
    vocab_size: int,
    rounds: int,
    seed: int,
    progress: Callable[[str], None],
) -> DemoResult:
    """Measures so many rounds, each with a random prompt of its own, after a short one that is thrown away.

    Raises `LmkvError` if an engine fails, or if what engine 1 computes never becomes known to the coordinator.
    """
    random = np.random.default_rng(seed)

    def ask(count: int) -> DemoRound:
        prompt = random.integers(FIRST_BYTE_TOKEN_ID, vocab_size, count).tolist()
        return measure_round(coordinator, engines, prompt)

    ask(min(prompt_tokens, WARM_UP_TOKENS))
    progress("warmed up; engine 2 has met engine 1's node")
    measured = []
    for number in range(1, rounds + 1):
        measured.append(ask(prompt_tokens))
        progress(f"round {number} of {rounds}: {_in_words(measured[-1])}")
    return DemoResult(rounds=measured)


def measure_round(
    coordinator: CoordinatorProcess, engines: tuple[EngineProcess, EngineProcess], prompt: Sequence[int]
) -> DemoRound:
    """One prompt cold, from the peer, and from the own pool. The instances are named as the engines are."""
    first, second = engines
    cold = first.complete(prompt, COMPLETION_TOKENS)
    coordinator.wait_for_holder(prompt, first.name, len(prompt), STORE_TIMEOUT_SECONDS)

    before = second.metrics()
    peer = second.complete(prompt, COMPLETION_TOKENS)
    from_peer = taken(second, before, peer, "peer")

    first.reset_prefix_cache()
    before = first.metrics()
    own = first.complete(prompt, COMPLETION_TOKENS)
    from_own = taken(first, before, own, "load")
    return DemoRound(cold=cold, peer=peer, own=own, from_peer=from_peer, from_own=from_own)


def taken(engine: Endpoint, before: dict[str, float], answer: Completion, act: str) -> CacheTransfer:
    """What a request took, by the engine's counters; `before` are those from before it.

    Where the answer has cached tokens it waits for the counts of their bytes, and has the engine take a step for them.
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
