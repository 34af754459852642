"""What hits of short prompts cost, where there is least to save: TTFT against the same engine without a connector."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.engine import EngineProcess

LENGTHS = {"own": (10, 64, 272), "peer": (18, 64, 272)}
"""From the shortest hits that are loaded at all (`min_retrieve_tokens`, `min_fetch_tokens`) to a chunk and a little."""
COMPUTED_TOKENS = 32
"""Prompts up to this length may be computed: on a fast processor that is expected to be faster."""
STORE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortHitRound:
    """One prompt, by TTFT in seconds: computed by the engine without a connector, and taken from where it lies."""

    computed: float
    own: float
    peer: float
    is_computed_by: tuple[str, ...]
    """The sources that the engine did not load from, because to compute so few tokens was faster."""


def measure(
    run: BenchmarkRun,
    coordinator: CoordinatorProcess,
    first: EngineProcess,
    second: EngineProcess,
    plain: EngineProcess,
) -> None:
    """Adds rows for each length. `second` has never seen the prompts when it takes them from `first`."""
    prompts = Prompts(seed=3)
    lengths = sorted({length for lengths in LENGTHS.values() for length in lengths})
    for token_count in lengths * 2:  # warms up
        _measure_round(coordinator, first, second, plain, prompts.make(token_count), is_odd=True)
    worst = -1e9
    for token_count in lengths:
        rounds = [
            _measure_round(coordinator, first, second, plain, prompts.make(token_count), is_odd=bool(number % 2))
            for number in range(6 if run.quick else 40)
        ]
        for source in (source for source, of_source in LENGTHS.items() if token_count in of_source):
            added = _added_ms(rounds, source)
            worst = max(worst, added)
            run.add(
                compare(
                    f"{source}_hit_ttft_ms_{token_count}",
                    1e3 * statistics.median(getattr(one, source) for one in rounds),
                    "ms",
                    "no connector: computed",
                    1e3 * statistics.median(one.computed for one in rounds),
                )
            )
            run.say(f"{token_count} tokens from the {source} pool: {added:+.1f} ms against computing them")
            if computed_count := sum(source in one.is_computed_by for one in rounds):
                run.note(
                    f"{computed_count} of {len(rounds)} prompts of {token_count} tokens were computed instead of "
                    f"loaded from the {source} pool: the engine expected that to be faster"
                )
    run.add(Row(name="hit_vs_cold_overhead_ms", value=worst, unit="ms"))


def _measure_round(
    coordinator: CoordinatorProcess,
    first: EngineProcess,
    second: EngineProcess,
    plain: EngineProcess,
    prompt: Sequence[int],
    *,
    is_odd: bool,
) -> ShortHitRound:
    """Sends one prompt to every engine. Raises `LmkvError` if a hit ends before the prompt does."""
    first.complete(prompt, 1)
    coordinator.wait_for_holder(prompt, first.name, len(prompt), STORE_SECONDS)
    first.reset_prefix_cache()

    def computed() -> float:
        return plain.complete(prompt, 1).ttft_seconds

    before = computed() if is_odd else 0.0
    own = first.complete(prompt, 1)
    peer = second.complete(prompt, 1)
    may_compute = len(prompt) <= COMPUTED_TOKENS
    is_computed_by = tuple(
        source for source, one in (("own", own), ("peer", peer)) if may_compute and not one.cached_tokens
    )
    if "own" not in is_computed_by:
        engines.check_hit("from the own pool", own, len(prompt) - 1)
    if "peer" not in is_computed_by and len(prompt) in LENGTHS["peer"]:
        engines.check_hit("from the peer", peer, len(prompt) - 1)
    return ShortHitRound(
        computed=before or computed(), own=own.ttft_seconds, peer=peer.ttft_seconds, is_computed_by=is_computed_by
    )


def _added_ms(rounds: Sequence[ShortHitRound], source: str) -> float:
    return 1e3 * float(statistics.median(getattr(one, source) - one.computed for one in rounds))
