"""Clients that ask at the same time: a closed loop, an open loop, and streams that decode beside them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from benchmarks.support.rows import Row, compare
from benchmarks.support.timing import percentile
from lmkv_client.demo.endpoint import Completion, Endpoint

PERCENTILES = (50, 90, 99)

Prompt = Sequence[int]
Ask = Callable[[Prompt], Completion]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The answers to requests that ran at the same time, and how long they took."""

    completions: Sequence[Completion]
    """In the order of their prompts."""
    seconds: float
    """From the first request to the last answer."""
    engine_seconds: float = 0.0
    """Processor time of the engine meanwhile; 0 where it was not measured."""
    engine_steps: float = 0.0
    """Steps of the engine meanwhile; 0 where they were not counted."""
    stream_gaps: Sequence[float] = ()
    """Seconds between the tokens of streams that decoded meanwhile."""

    @property
    def requests_per_second(self) -> float:
        """Answered requests."""
        return len(self.completions) / self.seconds

    @property
    def hit_rate(self) -> float:
        """Percent of the prompts' tokens that were not computed."""
        cached = sum(completion.cached_tokens for completion in self.completions)
        return 100 * cached / sum(completion.prompt_tokens for completion in self.completions)

    @property
    def times(self) -> Mapping[str, Sequence[float]]:
        """Seconds by what they are the time of; nothing is left out but what was not measured."""
        times = {
            "ttft": [completion.ttft_seconds for completion in self.completions],
            "itl": [gap for completion in self.completions for gap in completion.gaps],
            "stream_gap": self.stream_gaps,
        }
        return {name: values for name, values in times.items() if values}

    def identical_to(self, other: Measured) -> float:
        """Percent of the answers that are the same in both."""
        pairs = zip(self.completions, other.completions, strict=True)
        return 100 * sum(own.token_ids == theirs.token_ids for own, theirs in pairs) / len(self.completions)

    def rows(self, name: str, baseline: str = "", other: Measured | None = None) -> Iterator[Row]:
        """Rows whose names begin with `name`, each compared with that of `other`, which is called `baseline`."""
        values = {
            f"{what}_p{percent}_ms": (1e3 * percentile(seconds, percent), "ms")
            for what, seconds in self.times.items()
            for percent in PERCENTILES
        }
        values |= {"requests_per_s": (self.requests_per_second, "1/s"), "hit_rate": (self.hit_rate, "% of tokens")}
        if self.engine_seconds:
            values["engine_cpu_ms"] = (1e3 * self.engine_seconds / len(self.completions), "ms")
        if self.engine_steps:
            values["engine_steps"] = (self.engine_steps / len(self.completions), "steps")
        others = {row.name.removeprefix(name): row.value for row in other.rows(name)} if other else {}
        for what, (value, unit) in values.items():
            if base := others.get(f"_{what}"):
                yield compare(f"{name}_{what}", value, unit, baseline, base)
            else:
                yield Row(name=f"{name}_{what}", value=value, unit=unit)
        if other:
            yield Row(name=f"{name}_identical", value=self.identical_to(other), unit="% of answers")


def closed_loop(ask: Ask, prompts: Sequence[Prompt], client_count: int) -> Measured:
    """Each client sends its next prompt when the one before is answered. Raises the error of a request."""
    started = time.perf_counter()
    with ThreadPoolExecutor(client_count) as clients:
        completions = list(clients.map(ask, prompts))
    return Measured(completions=completions, seconds=time.perf_counter() - started)


def arrivals(count: int, per_second: float, seed: int) -> list[float]:
    """The seconds at which requests come, independently of each other (a Poisson process), the first one at 0."""
    chance, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + chance.expovariate(per_second))
    return times


def open_loop(ask: Ask, prompts: Sequence[Prompt], per_second: float, seed: int = 1) -> Measured:
    """Prompts come at times that do not depend on the answers; a request's time begins when it was to be sent."""
    started = time.perf_counter()

    def late(prompt: Prompt, due: float) -> Completion:
        lateness = time.perf_counter() - started - due
        done = ask(prompt)
        return replace(done, ttft_seconds=done.ttft_seconds + lateness, total_seconds=done.total_seconds + lateness)

    waiting: list[Future[Completion]] = []
    with ThreadPoolExecutor(len(prompts)) as clients:
        for prompt, due in zip(prompts, arrivals(len(prompts), per_second, seed), strict=True):
            time.sleep(max(0.0, started + due - time.perf_counter()))
            waiting.append(clients.submit(late, prompt, due))
        completions = [one.result() for one in waiting]
    return Measured(completions=completions, seconds=time.perf_counter() - started)


@dataclass(kw_only=True)
class Streams:
    """Requests that decode all the time, each followed by the next. A closed connection ends them."""

    gaps: list[float] = field(default_factory=list)
    """Seconds between tokens of one stream."""


@contextmanager
def streams(engine: Endpoint, prompts: Sequence[Prompt], token_count: int) -> Iterator[Streams]:
    """A stream for each prompt, whose answers have `token_count` tokens. Raises the error of a stream at the end."""
    measured, stopped = Streams(), threading.Event()
    decode = threading.Barrier(len(prompts) + 1)

    def follow(prompt: Prompt) -> None:
        decodes = False
        while not stopped.is_set():
            last: float | None = None
            answer = engine.stream(prompt, token_count)
            for token in answer:
                if not decodes:
                    decodes = True
                    decode.wait()
                if last is not None:
                    measured.gaps.append(token.seconds - last)
                last = token.seconds
                if stopped.is_set():
                    break
            answer.close()

    def follow_or_abort(prompt: Prompt) -> None:
        try:
            follow(prompt)
        finally:
            decode.abort()

    with ThreadPoolExecutor(len(prompts)) as threads:
        running = [threads.submit(follow_or_abort, prompt) for prompt in prompts]
        try:
            decode.wait()
            yield measured
        except threading.BrokenBarrierError:
            pass
        finally:
            stopped.set()
        for one in running:
            one.result()
