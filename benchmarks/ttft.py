"""Time to the first token: cold, from vLLM's own prefix cache, from the own pool, from a peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import engines
from benchmarks.command import Run
from benchmarks.engines import Prompts
from benchmarks.rows import Row, compare
from lmkv_client.demo.cluster import Coordinator
from lmkv_client.demo.engine import Engine

NAMED_TOKENS = 4000
"""The length that rows without one in their name speak of."""
LENGTHS = (2000, NAMED_TOKENS, 4096)
"""The last is a whole number of chunks: nothing of it is left to compute."""
OUTPUT_TOKENS = 4
STORE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One prompt, asked several times: TTFT in seconds of each."""

    cold: float
    prefix_hit: float | None
    """None where vLLM's prefix cache has less of the prompt than lmkv, which would then help it."""
    own: float
    peer: float
    identical: bool


def measure(run: Run, coordinator: Coordinator, first: Engine, second: Engine, *, partial: bool = False) -> None:
    """Adds rows for each length of prompt. `second` has never seen the prompts when it takes them from `first`.

    `partial` says that the engines keep the last part of a prompt too, and marks the rows.
    """
    prompts = Prompts(seed=1)
    measure_round(coordinator, first, second, prompts.make(4 * engines.CHUNK_SIZE), partial=partial)  # warms up
    for token_count in LENGTHS[:2] if run.quick or partial else LENGTHS:
        rounds = []
        count = (2 if token_count == NAMED_TOKENS else 1) if run.quick else 7
        for number in range(1, count + 1):
            prompt = prompts.make(token_count)
            rounds.append(measure_round(coordinator, first, second, prompt, partial=partial))
            run.say(f"{token_count} tokens, {number} of {count}: {_in_words(rounds[-1])}")
        run.add(*rows_of(rounds, token_count, "_partial" if partial else ""))


def measure_round(
    coordinator: Coordinator, first: Engine, second: Engine, prompt: Sequence[int], *, partial: bool
) -> Round:
    """Asks one prompt. Raises `LmkvError` if a hit is none, or the cold run is one."""
    held = len(prompt) if partial else engines.full_chunks(len(prompt))
    cold = first.complete(prompt, OUTPUT_TOKENS)
    engines.check_miss("cold", cold)
    prefix_hit = None
    if held <= (in_blocks := (len(prompt) - 1) // engines.BLOCK_SIZE * engines.BLOCK_SIZE):
        prefix_hit = first.complete(prompt, OUTPUT_TOKENS)
        engines.check_hit("vLLM's prefix cache", prefix_hit, in_blocks)
    coordinator.wait_for_holder(prompt, first.name, held, STORE_SECONDS)
    peer = second.complete(prompt, OUTPUT_TOKENS)
    engines.check_hit("from the peer", peer, held - 1)
    first.reset_prefix_cache()
    own = first.complete(prompt, OUTPUT_TOKENS)
    engines.check_hit("from the own pool", own, held - 1)
    return Round(
        cold=cold.ttft_seconds,
        prefix_hit=prefix_hit.ttft_seconds if prefix_hit else None,
        own=own.ttft_seconds,
        peer=peer.ttft_seconds,
        identical=all(hit.token_ids == cold.token_ids for hit in (prefix_hit, own, peer) if hit),
    )


def rows_of(rounds: Sequence[Round], token_count: int, mark: str) -> Iterator[Row]:
    """What the rounds of one length say; names end with `mark`."""
    cold_ms = 1e3 * statistics.median(round_.cold for round_ in rounds)
    suffix = mark if token_count == NAMED_TOKENS else f"_{token_count}{mark}"
    for name in ("peer", "own"):
        ratio = statistics.median(getattr(round_, name) / round_.cold for round_ in rounds)
        yield Row(
            name=f"{name}_ttft_ratio{suffix}",
            value=ratio,
            unit="of cold",
            baseline="cold TTFT, ms",
            baseline_value=cold_ms,
            ratio=ratio,
        )
    yield Row(name=f"ttft_cold_ms_{token_count}{mark}", value=cold_ms, unit="ms")
    baseline, baseline_ms = "cold", cold_ms
    if prefix_hits := [round_.prefix_hit for round_ in rounds if round_.prefix_hit is not None]:
        prefix_ms = 1e3 * statistics.median(prefix_hits)
        yield compare(f"ttft_prefix_hit_ms_{token_count}{mark}", prefix_ms, "ms", "cold", cold_ms)
        baseline, baseline_ms = "vLLM's own prefix hit", prefix_ms
    for name in ("own", "peer"):
        value_ms = 1e3 * statistics.median(getattr(round_, name) for round_ in rounds)
        yield compare(f"ttft_{name}_ms_{token_count}{mark}", value_ms, "ms", baseline, baseline_ms)
    identical = sum(round_.identical for round_ in rounds) / len(rounds)
    yield Row(name=f"ttft_identical_{token_count}{mark}", value=100 * identical, unit="%")


def _in_words(round_: Round) -> str:
    times = {"cold": round_.cold, "prefix hit": round_.prefix_hit, "own pool": round_.own, "peer": round_.peer}
    words = ", ".join(f"{1e3 * seconds:.0f} ms {what}" for what, seconds in times.items() if seconds is not None)
    return words if round_.identical else f"{words}, DIFFERENT COMPLETIONS"
