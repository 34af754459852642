"""What the time to a first token is made of, from what engine and connector count."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from benchmarks.support.rows import Row, compare
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess

COUNTS = {
    "lookup": "lmkv:lookup_seconds_total",
    "fetch": "lmkv:peer_seconds_total",
    "load": "lmkv:load_seconds_total",
    "compute": "vllm:request_prefill_time_seconds_sum",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """The steps of one request up to its first token, in seconds; they add up to its TTFT."""

    lookup: float
    """Waiting for the node to say what there is."""
    fetch: float
    """Peer's pool to own pool, checksums included."""
    load: float
    """Own pool to pages, beyond the fetch: both run side by side."""
    compute: float
    """From the first step that computes to the first token."""
    rest: float
    """HTTP, text to tokens and back, vLLM's loop."""


class StepWatch:
    """Reads an engine's counters before and after a request."""

    def __init__(self, engine: EngineProcess) -> None:
        self._engine = engine
        self._before = engine.metrics()

    def steps(self, completion: Completion) -> Steps:
        """The steps of the one request that the engine has answered since."""
        after = self._engine.metrics()
        grown = {step: after.get(name, 0.0) - self._before.get(name, 0.0) for step, name in COUNTS.items()}
        load = max(0.0, grown["load"] - grown["fetch"])
        named = {"lookup": grown["lookup"], "fetch": grown["fetch"], "load": load, "compute": grown["compute"]}
        return Steps(**named, rest=max(0.0, completion.ttft_seconds - sum(named.values())))


def rows_of(steps: Mapping[str, Sequence[Steps]], suffix: str) -> Iterator[Row]:
    """Rows for each kind of request: the median of every step that takes any time, and its share."""
    for kind, several in steps.items():
        medians = {f.name: 1e3 * statistics.median(getattr(one, f.name) for one in several) for f in fields(Steps)}
        whole = sum(medians.values())
        for step, value in medians.items():
            if value:
                yield compare(f"step_{kind}_{step}_ms{suffix}", value, "ms", "all steps", whole)
