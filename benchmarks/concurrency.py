"""Hits, loads and misses when many requests run at once: `python -m benchmarks.concurrency`.

Questions about documents, in a closed loop of some clients, in an open loop at a share of what the engine alone can do,
and beside streams that decode all the time. The systems run one after the other, with the same prompts. See
docs/performance/concurrency.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.support import clients, engines, machine
from benchmarks.support.clients import Measured
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.systems import places
from benchmarks.systems.chats import ALONE
from benchmarks.systems.pairs import EnginePair, lmcache_problem
from benchmarks.systems.places import LMKV, OWN, PlacePlan
from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.process import session_pids

DOCUMENT_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 1536, 64, 16
IN_CACHE = 18
"""Prompts that the engine's own cache has room for; at most 16 run at once."""
IN_POOL = 20
"""Prompts in the memory of an engine whose documents are elsewhere, behind it."""
STREAM_TOKENS, STREAM_PROMPT_TOKENS, STREAM_COUNT = 200, 64, 2
CAPACITY = "c16"
"""The level at which the engine alone shows what it can do: open loops ask for shares of that."""
MISSES = "misses"
MISSES_FACTOR = 3
"""New prompts at the level `c16`, of its requests: what is asked there is a difference of some per cent."""
CELLS = (OWN, MISSES, places.SHM, places.TCP, places.TCP_10, places.TCP_1, places.DISK, places.REDIS)
ALONE_WORDS = "the engine alone"


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """How requests come."""

    request_count: int
    clients: int = 0
    """Each of these clients sends its next request when its last one is answered; 0: the loop is open."""
    share: float = 0.0
    """An open loop sends this share of the requests per second that the engine alone answers at level `c16`."""
    has_streams: bool = False
    """Whether other requests decode all the time."""


LEVELS: Mapping[str, Level] = {
    "c1": Level(request_count=16, clients=1),
    "c4": Level(request_count=40, clients=4),
    "c16": Level(request_count=80, clients=16),
    "c64": Level(request_count=128, clients=64),
    "o50": Level(request_count=48, share=0.5),
    "o80": Level(request_count=64, share=0.8),
    "o95": Level(request_count=64, share=0.95),
    "streams": Level(request_count=40, clients=4, has_streams=True),
}
QUICK_LEVELS = ("c4", "c16")
QUICK_SHARE = 0.3
"""A quick run sends this share of a level's requests."""
QUICK_CELLS, QUICK_SYSTEMS = (OWN,), (LMKV,)
DOCUMENTS, QUICK_DOCUMENTS = 40, 30


@dataclass(kw_only=True)
class Workload:
    """The prompts of one cell, the same for every system."""

    is_new: bool = False
    """Whether no prompt has been seen before."""
    in_order: bool = False
    """Whether the documents are asked for in the order in which they were computed, which a small memory forgets."""
    document_count: int = DOCUMENTS
    documents: list[list[int]] = field(init=False)
    _next: int = field(init=False, default=0)
    """The document that is next in order."""

    def __post_init__(self) -> None:
        prompts = Prompts(seed=11)
        self.documents = [] if self.is_new else [prompts.make(DOCUMENT_TOKENS) for _ in range(self.document_count)]

    def prompts(self, level: str, count: int) -> list[list[int]]:
        number = list(LEVELS).index(level)
        made = Prompts(seed=100 + number)
        if self.is_new:
            return [made.make(DOCUMENT_TOKENS + QUESTION_TOKENS) for _ in range(count)]
        order = [self.documents[at % len(self.documents)] for at in range(self._next, self._next + count)]
        if self.in_order:
            self._next += count
        else:
            random.Random(number).shuffle(order)
        return [document + made.make(QUESTION_TOKENS) for document in order]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--only", action="append", choices=CELLS, help="where the chunks are; may be repeated (all)")
    parser.add_argument(
        "--system",
        action="append",
        choices=places.SYSTEMS[1:],
        help="measure this one beside the engine alone; may be repeated (all; with --quick: lmkv)",
    )
    parser.add_argument("--level", action="append", choices=LEVELS, help="how requests come; may be repeated (all)")
    parser.add_argument("--requests", type=float, default=1.0, metavar="F", help="factor of each level's requests (1)")
    parser.add_argument("--lmcache-python", type=Path, metavar="PATH", help="Python of an environment with LMCache 0.5")


def measure(run: BenchmarkRun) -> None:
    """Every cell, with every system that can have chunks there."""
    args = run.args
    dtype = engines.choose_dtype(run)
    levels: Sequence[str] = args.level or (QUICK_LEVELS if run.quick else tuple(LEVELS))
    cells: Sequence[str] = args.only or (QUICK_CELLS if run.quick else CELLS)
    systems: Sequence[str] = args.system or (QUICK_SYSTEMS if run.quick else places.SYSTEMS)
    if any(LEVELS[level].share for level in levels) and CAPACITY not in levels:
        levels = (CAPACITY, *levels)
    scale = args.requests * (QUICK_SHARE if run.quick else 1)
    chosen = {name: replace(level, request_count=scaled(level, scale)) for name, level in LEVELS.items()}
    plan = PlacePlan(
        run=run,
        model=engines.model_of(run),
        dtype=dtype,
        context_tokens=engines.context_for(DOCUMENT_TOKENS + QUESTION_TOKENS, ANSWER_TOKENS),
        document_count=QUICK_DOCUMENTS if run.quick else DOCUMENTS,
        prompts_in_cache=IN_CACHE,
        prompts_in_pool=IN_POOL,
    )
    run.report.settings |= {
        "documents": plan.document_count,
        "document_tokens": DOCUMENT_TOKENS,
        "question_tokens": QUESTION_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "prompts_in_cache": IN_CACHE,
        "prompts_in_pool": IN_POOL,
    }
    lmcache: Path | None = args.lmcache_python
    if problem := lmcache_problem(lmcache):
        run.note(problem)
        lmcache = None
    engines.check_memory(2 * engines.ENGINE_BYTES + plan.bytes_of(plan.all_prompts + IN_POOL + 2 * IN_CACHE))
    alone: dict[str, dict[str, Measured]] = {}
    for place in dict.fromkeys(OWN if cell == MISSES else cell for cell in cells):
        of_place = [cell for cell in cells if cell == place or (place == OWN and cell == MISSES)]
        for system, open_pair in places.openers(plan, place, lmcache).items():
            if system not in (ALONE, *systems):
                continue
            left = [cell for cell in of_place if system != ALONE or _kind(cell) not in alone]
            if not left:
                continue
            run.say(f"{place}, {system}: starting, {dtype}; half a minute or more")
            try:
                with open_pair() as pair:
                    for cell in left:
                        found = _measure_cell(run, cell, system, pair, {name: chosen[name] for name in levels}, alone)
                        if system == ALONE:
                            alone[_kind(cell)] = found
                        _report(run, cell, system, found, alone[_kind(cell)])
            except LmkvError as error:
                if system in (ALONE, LMKV):
                    raise
                run.note(f"{place}: {system} could not be measured: {error}")


def scaled(level: Level, scale: float) -> int:
    """Requests of a level: at least one for each client."""
    return max(level.clients, round(scale * level.request_count), 1)


def _kind(cell: str) -> str:
    """Cells of one kind are the same to an engine that keeps nothing."""
    return cell if cell in (OWN, MISSES) else "behind"


def workload_of(cell: str, document_count: int = DOCUMENTS) -> Workload:
    """The prompts of a cell."""
    return Workload(is_new=cell == MISSES, in_order=_kind(cell) == "behind", document_count=document_count)


def _measure_cell(
    run: BenchmarkRun,
    cell: str,
    system: str,
    pair: EnginePair,
    levels: Mapping[str, Level],
    alone: Mapping[str, Mapping[str, Measured]],
) -> dict[str, Measured]:
    workload, prompts = workload_of(cell, run.report.settings["documents"]), Prompts(seed=6)

    def ask(prompt: Sequence[int]) -> Completion:
        return pair.second.complete(prompt, ANSWER_TOKENS, extra=pair.direction())

    warm = prompts.make(2 * engines.CHUNK_SIZE)
    pair.first.complete(warm, 2)
    pair.wait_until_stored(warm)
    pair.second.complete(warm, 2, extra=pair.direction())
    if system != ALONE or _kind(cell) == OWN:
        # An engine alone forgets all but the last of them.
        for document in workload.documents[-IN_CACHE if system == ALONE else 0 :]:
            pair.first.complete(document, 1)
        for document in workload.documents[-1:]:
            pair.wait_until_stored(document)
    found: dict[str, Measured] = {}
    for name, level in levels.items():
        factor = MISSES_FACTOR if cell == MISSES and name == CAPACITY else 1
        asked = workload.prompts(name, factor * level.request_count)
        pids = session_pids(pair.second.pid)
        before, steps = machine.process_seconds(pids), _steps(pair)
        if level.share:
            capacity = (found if system == ALONE else alone[_kind(cell)])[CAPACITY].requests_per_second
            found[name] = clients.open_loop(ask, asked, level.share * capacity)
        elif level.has_streams:
            ahead = [prompts.make(STREAM_PROMPT_TOKENS) for _ in range(STREAM_COUNT)]
            with clients.streams(pair.second, ahead, STREAM_TOKENS) as decoding:
                found[name] = clients.closed_loop(ask, asked, level.clients)
            found[name] = replace(found[name], stream_gaps=decoding.gaps)
        else:
            found[name] = clients.closed_loop(ask, asked, level.clients)
        found[name] = replace(
            found[name], engine_seconds=machine.process_seconds(pids) - before, engine_steps=_steps(pair) - steps
        )
        run.say(f"{cell}, {system}, {name}: {_in_words(found[name])}")
    return found


def _steps(pair: EnginePair) -> float:
    """Steps that the asked engine has made and reported: those in which it computed tokens."""
    return pair.second.metrics().get("vllm:iteration_tokens_total_count", 0.0)


def _report(
    run: BenchmarkRun, cell: str, system: str, found: Mapping[str, Measured], alone: Mapping[str, Measured]
) -> None:
    """Adds the rows of a cell, and checks lmkv's answers."""
    for level, measured in found.items():
        other = None if system == ALONE else alone[level]
        name = f"{cell if system != ALONE else _kind(cell)}_{system}_{level}"
        run.add(*measured.rows(name, ALONE_WORDS, other))
        if other and system == LMKV:
            count = len(measured.completions)
            same = round(measured.identical_to(other) * count / 100)
            engines.check_identical(run, f"{cell}, {level}: lmkv and the engine alone", same, count)


def _in_words(measured: Measured) -> str:
    ms = {row.name: row.value for row in measured.rows("")}
    words = f"TTFT p50 {ms['_ttft_p50_ms']:.0f}, p99 {ms['_ttft_p99_ms']:.0f} ms, ITL p99 {ms['_itl_p99_ms']:.0f} ms"
    words += f", {measured.requests_per_second:.2f} requests/s, hit {measured.hit_rate:.1f} %"
    words += f", {ms['_engine_cpu_ms']:.0f} ms of the engine's processor time each"
    if measured.engine_steps:
        words += f", {ms['_engine_steps']:.2f} steps each"
    if measured.stream_gaps:
        words += f", streams' gaps p50 {ms['_stream_gap_p50_ms']:.0f}, p99 {ms['_stream_gap_p99_ms']:.0f} ms"
    return words


BENCHMARK = Benchmark(
    name="concurrency",
    description="Measures requests that run at once, with what keeps their prompts: lmkv, other systems, and nothing.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
