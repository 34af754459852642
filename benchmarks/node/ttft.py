"""Time to the first token: cold, from vLLM's own prefix cache, from the own pool, from a peer."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.node import steps
from benchmarks.node.steps import Steps, StepWatch
from benchmarks.support import engines
from benchmarks.support.command import BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from lmkv_client.demo.cluster import CoordinatorProcess
from lmkv_client.demo.engine import EngineProcess

NAMED_TOKENS = 4000
"""The length that rows without one in their name speak of."""
LENGTHS = (2000, NAMED_TOKENS)
OUTPUT_TOKENS = 4
STORE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftRound:
    """TTFT in seconds of several requests with one prompt."""

    cold: float
    prefix_hit: float
    own: float
    peer: float
    identical: bool
    """Whether the cold run and both hits have the same completion."""
    hits_identical: bool
    """Whether both hits have, which were computed from the same token on."""
    steps: dict[str, Steps]
    """Of the hits."""


def measure(run: BenchmarkRun, coordinator: CoordinatorProcess, first: EngineProcess, second: EngineProcess) -> None:
    """Adds rows for each length of prompt. `second` has never seen the prompts when it takes them from `first`."""
    prompts = Prompts(seed=1)
    measure_round(coordinator, first, second, prompts.make(4 * engines.CHUNK_SIZE))  # warms up
    count = 2 if run.quick else 5
    for token_count in (NAMED_TOKENS,) if run.quick else LENGTHS:
        rounds = []
        for number in range(1, count + 1):
            prompt = prompts.make(token_count)
            rounds.append(measure_round(coordinator, first, second, prompt))
            run.say(f"{token_count} tokens, {number} of {count}: {_in_words(rounds[-1])}")
        run.add(*rows_of(rounds, token_count))
        check_answers(run, rounds, token_count)


def measure_round(
    coordinator: CoordinatorProcess, first: EngineProcess, second: EngineProcess, prompt: Sequence[int]
) -> TtftRound:
    """Asks one prompt. Raises `LmkvError` if a hit is none, or the cold run is one."""
    cold = first.complete(prompt, OUTPUT_TOKENS)
    engines.check_miss("cold", cold)
    # vLLM's own cache keeps whole blocks. The prompt is cut behind its last one, where lmkv has nothing to add.
    in_blocks = (len(prompt) - 1) // engines.BLOCK_SIZE * engines.BLOCK_SIZE
    watch = StepWatch(first)
    prefix_hit = first.complete(prompt[: in_blocks + 1], OUTPUT_TOKENS)
    prefix_steps = watch.steps(prefix_hit)
    engines.check_hit("vLLM's prefix cache", prefix_hit, in_blocks)
    held = coordinator.wait_for_holder(prompt, first.name, len(prompt), STORE_SECONDS)
    watch = StepWatch(second)
    peer = second.complete(prompt, OUTPUT_TOKENS)
    peer_steps = watch.steps(peer)
    engines.check_hit("from the peer", peer, held - 1)
    first.reset_prefix_cache()
    watch = StepWatch(first)
    own = first.complete(prompt, OUTPUT_TOKENS)
    own_steps = watch.steps(own)
    engines.check_hit("from the own pool", own, held - 1)
    return TtftRound(
        cold=cold.ttft_seconds,
        prefix_hit=prefix_hit.ttft_seconds,
        own=own.ttft_seconds,
        peer=peer.ttft_seconds,
        identical=cold.token_ids == own.token_ids == peer.token_ids,
        hits_identical=own.token_ids == peer.token_ids,
        steps={"prefix": prefix_steps, "own": own_steps, "peer": peer_steps},
    )


def check_answers(run: BenchmarkRun, rounds: Sequence[TtftRound], token_count: int) -> None:
    """Makes the run fail if the hits' completions differ from each other, or, in float32, from the cold run's."""
    identical = sum(round_.identical for round_ in rounds)
    engines.check_identical(run, f"{token_count} tokens, cold and hits", identical, len(rounds))
    if different := sum(not round_.hits_identical for round_ in rounds):
        run.fail(f"{token_count} tokens: own and peer hit differ in {different} of {len(rounds)} rounds")


def rows_of(rounds: Sequence[TtftRound], token_count: int) -> Iterator[Row]:
    """What the rounds of one length say."""
    cold_ms, prefix_ms = (_median_ms(rounds, name) for name in ("cold", "prefix_hit"))
    suffix = "" if token_count == NAMED_TOKENS else f"_{token_count}"
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
    yield Row(name=f"ttft_cold_ms_{token_count}", value=cold_ms, unit="ms")
    yield compare(f"ttft_prefix_hit_ms_{token_count}", prefix_ms, "ms", "cold", cold_ms)
    for name in ("own", "peer"):
        value_ms = _median_ms(rounds, name)
        yield compare(f"ttft_{name}_ms_{token_count}", value_ms, "ms", "vLLM's own prefix hit", prefix_ms)
    yield from steps.rows_of({kind: [round_.steps[kind] for round_ in rounds] for kind in rounds[0].steps}, suffix)
    identical = sum(round_.identical for round_ in rounds) / len(rounds)
    yield Row(name=f"ttft_identical_{token_count}", value=100 * identical, unit="%")


def _median_ms(rounds: Sequence[TtftRound], name: str) -> float:
    return 1e3 * float(statistics.median(getattr(round_, name) for round_ in rounds))


def _in_words(round_: TtftRound) -> str:
    times = {"cold": round_.cold, "prefix hit": round_.prefix_hit, "own pool": round_.own, "peer": round_.peer}
    words = ", ".join(f"{1e3 * seconds:.0f} ms {what}" for what, seconds in times.items())
    return words if round_.identical else f"{words}, DIFFERENT COMPLETIONS"
