"""Chats of many users whose owners pause to think: `python -m benchmarks.multi_turn`, docs/performance/multi-turn.md.

A user's next turn comes when every other user has had one: in these minutes, which no clock has to wait for, their
prompts take the user's pages out of the engine's own cache. What the next turn costs depends on who has kept them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.hybrid import SHAPES, full_attention_bytes
from benchmarks.support import engines
from benchmarks.support.command import Benchmark, BenchmarkRun
from benchmarks.support.engines import Prompts
from benchmarks.support.rows import Row, compare
from benchmarks.systems import chats
from benchmarks.systems.chats import ALONE, ChatPlan
from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion
from lmkv_client.demo.engine import EngineProcess
from tests.support.models import make_architecture

ANSWER_TOKENS = 24
MESSAGE_TOKENS = 200
WINDOWED = "gemma3"
"""The architecture of the model with sliding windows."""
CHATS_IN_CACHE = 2
"""The number of complete chats that fit into the engine's own cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The users' messages: distinct per user, and the same for every system."""

    first_tokens: int
    """Length of a user's first prompt, the instructions to the model included."""
    user_count: int
    turn_count: int

    @property
    def context_tokens(self) -> int:
        """Length of context that a whole chat needs."""
        later = (self.turn_count - 1) * (ANSWER_TOKENS + MESSAGE_TOKENS)
        return engines.context_for(self.first_tokens + later, ANSWER_TOKENS)

    def messages(self) -> list[list[list[int]]]:
        """By turn and user."""
        prompts = Prompts(seed=5)
        lengths = [self.first_tokens] + (self.turn_count - 1) * [MESSAGE_TOKENS]
        return [[prompts.make(length) for _ in range(self.user_count)] for length in lengths]


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of all users."""

    completions: Sequence[Completion]

    @property
    def ttft_ms(self) -> float:
        """Median time to the first token."""
        return 1e3 * statistics.median(completion.ttft_seconds for completion in self.completions)

    @property
    def cached_tokens(self) -> int:
        """Tokens that were not computed."""
        return sum(completion.cached_tokens for completion in self.completions)

    @property
    def prompt_tokens(self) -> int:
        return sum(completion.prompt_tokens for completion in self.completions)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    engines.add_dtype_argument(parser)
    parser.add_argument("--users", type=int, metavar="N", help="chats at a time (5; 4 with --quick)")
    parser.add_argument("--turns", type=int, metavar="N", help="turns of each (5; 3 with --quick)")
    parser.add_argument(
        "--first-tokens", type=int, metavar="N", help="tokens of each first prompt (1024; 512 with --quick)"
    )
    parser.add_argument("--lmcache-python", type=Path, metavar="PATH", help="Python of an environment with LMCache 0.5")


def measure(run: BenchmarkRun) -> None:
    """Every system that is there, side by side."""
    args = run.args
    dtype = engines.choose_dtype(run, compares_answers=True)
    workload = Workload(
        first_tokens=args.first_tokens or (512 if run.quick else 1024),
        user_count=args.users or (4 if run.quick else 5),
        turn_count=args.turns or (3 if run.quick else 5),
    )
    chat_bytes = workload.context_tokens * engines.token_bytes(dtype)
    plan = ChatPlan(
        run=run,
        model=engines.model_of(run),
        dtype=dtype,
        context_tokens=workload.context_tokens,
        chats_in_cache=CHATS_IN_CACHE,
        pool_bytes=(workload.user_count + 2) * chat_bytes,
    )
    run.report.settings |= {
        "users": workload.user_count,
        "turns": workload.turn_count,
        "first_tokens": workload.first_tokens,
        "message_tokens": MESSAGE_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "chats_in_cache": CHATS_IN_CACHE,
    }
    systems = chats.systems(run, plan, args.lmcache_python, fine=True)
    if run.quick and args.lmcache_python:  # five engines do not start and talk in three minutes
        run.note("LMCache was not measured: --quick leaves it out")
        systems = {name: system for name, system in systems.items() if not name.startswith("lmcache")}
    count = len(systems)
    engines.check_memory(count * (engines.ENGINE_BYTES + CHATS_IN_CACHE * chat_bytes) + (count - 1) * plan.pool_bytes)
    with ExitStack() as stack:
        talking = start(run, stack, systems)
        spoken = talk(run, talking, workload)
        run.add(*rows_of(spoken, MESSAGE_TOKENS))
    same, count = identical(spoken["lmkv"], spoken[ALONE])
    engines.check_identical(run, "lmkv and the engine alone", same, count)
    if dtype == engines.EXACT_DTYPE:
        measure_windows(run, workload)


def measure_windows(run: BenchmarkRun, workload: Workload) -> None:
    """The same chats with a model most of whose layers slide: a hit ends where a prompt or an answer has ended, too."""
    model = make_architecture(run.folder / WINDOWED, WINDOWED, **SHAPES[WINDOWED])
    chat_bytes = round(workload.context_tokens * full_attention_bytes(WINDOWED).stored / 1000)
    plan = ChatPlan(
        run=run,
        model=model,
        dtype=engines.EXACT_DTYPE,
        context_tokens=workload.context_tokens,
        chats_in_cache=CHATS_IN_CACHE,
        pool_bytes=(workload.user_count + 2) * chat_bytes,
        cache_bytes=CHATS_IN_CACHE * chat_bytes,
    )
    systems = {ALONE: partial(chats.alone, plan), "lmkv": partial(chats.lmkv, plan, "windows")}
    with ExitStack() as stack:
        spoken = talk(run, start(run, stack, systems), workload)
    run.add(*(replace(row, name=f"windows_{row.name}") for row in rows_of(spoken, MESSAGE_TOKENS)))
    same, count = identical(spoken["lmkv"], spoken[ALONE])
    engines.check_identical(run, "lmkv and the engine alone, with windows", same, count)


def start(
    run: BenchmarkRun, stack: ExitStack, systems: Mapping[str, Callable[[], AbstractContextManager[EngineProcess]]]
) -> dict[str, EngineProcess]:
    """The engines of all systems that come up, started at once; the engine alone and lmkv's must."""
    run.say(f"starting {len(systems)} engines, {run.report.settings['dtype']}; half a minute or more")
    starting = {name: stack.enter_context(system()) for name, system in systems.items()}
    ready = {}
    for name, engine in starting.items():
        try:
            engine.wait_ready()
            engine.complete(Prompts(seed=6).make(2 * engines.CHUNK_SIZE), 2)  # warms up
        except LmkvError as error:
            if name in (ALONE, "lmkv"):
                raise
            run.note(f"{name} could not be measured: {error}")
        else:
            ready[name] = engine
            run.say(f"{name} is ready")
    return ready


def talk(run: BenchmarkRun, systems: Mapping[str, EngineProcess], workload: Workload) -> dict[str, list[Turn]]:
    """All chats, turn by turn, with every system: each prompt is all that was said before, and a message.

    One request is under way at a time, and the systems take turns, in changing order: what else the machine does then
    meets all of them.
    """
    chats: dict[str, list[list[int]]] = {name: [[] for _ in range(workload.user_count)] for name in systems}
    turns: dict[str, list[Turn]] = {name: [] for name in systems}
    order = list(systems)
    for number, messages in enumerate(workload.messages(), 1):
        completions: dict[str, list[Completion]] = {name: [] for name in systems}
        for user, message in enumerate(messages):
            for name in order:
                chat = chats[name][user]
                chat += message
                completions[name].append(systems[name].complete(chat, ANSWER_TOKENS))
                chat += completions[name][-1].token_ids
            order.append(order.pop(0))
        for name in systems:
            turn = Turn(completions=completions[name])
            turns[name].append(turn)
            cached = f"{turn.cached_tokens} of {turn.prompt_tokens} tokens cached"
            run.say(f"turn {number}, {name}: {turn.ttft_ms:.0f} ms, {cached}")
    return turns


def rows_of(spoken: Mapping[str, Sequence[Turn]], message_tokens: int) -> Iterator[Row]:
    """What the systems took for each turn, beside the engine alone, and how much they had kept of what was sent and
    answered before: all of a later turn but its message."""
    without = spoken[ALONE]
    for name, turns in spoken.items():
        for number, (turn, other) in enumerate(zip(turns, without, strict=True), 1):
            row = Row(name=f"{name}_turn_{number}_ms", value=turn.ttft_ms, unit="ms")
            yield row if turn is other else compare(row.name, row.value, "ms", "the engine alone", other.ttft_ms)
        later = turns[1:]
        known = sum(turn.prompt_tokens - message_tokens * len(turn.completions) for turn in later)
        kept = sum(turn.cached_tokens for turn in later) / known
        yield Row(name=f"{name}_kept", value=100 * kept, unit="% of tokens")
        if turns is not without:
            same, count = identical(turns, without)
            yield Row(name=f"{name}_identical", value=100 * same / count, unit="% of answers")


def identical(turns: Sequence[Turn], others: Sequence[Turn]) -> tuple[int, int]:
    """The number of answers that are the same in both, and the number of all."""
    pairs = [
        own.token_ids == theirs.token_ids
        for turn, other in zip(turns, others, strict=True)
        for own, theirs in zip(turn.completions, other.completions, strict=True)
    ]
    return sum(pairs), len(pairs)


BENCHMARK = Benchmark(
    name="multi_turn",
    description="Measures the time to the first token, turn by turn, of chats that an engine's own cache cannot hold.",
    measure=measure,
    add_arguments=add_arguments,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
