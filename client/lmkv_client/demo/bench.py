"""`lmkv bench`: measures what repeated prompts take at running endpoints, which other clients may use meanwhile.

Two workloads: long documents, each asked about twice, and chats whose turns repeat all turns before them. Requests of a
document or chat visit the endpoints in turn, so that a later one hits only what the fleet shares.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import ssl
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import Progress

from lmkv.errors import ConfigError, LmkvError
from lmkv.units import format_duration
from lmkv_client.commands.output import Number, print_table
from lmkv_client.demo.endpoint import Completion, Endpoint

API_KEY = "OPENAI_API_KEY"
"""Environment variable with the token of the endpoints."""
DEFAULT_URL = "http://127.0.0.1:8000"
"""The address at which vLLM serves by default."""
CALIBRATION_WORDS = 200
SETTLE_SECONDS = 30.0
"""Longest wait for what the engines still store when the first round has ended."""
SETTLE_POLL_SECONDS = 0.5
QUESTION_WORDS = 12
SYLLABLES = ("ba", "co", "di", "fu", "ge", "ha", "ki", "lo", "mu", "ne", "po", "ri", "sa", "tu", "ve", "wo")


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchRound:
    """Requests of one kind. There is at least one."""

    name: str
    completions: Sequence[Completion]
    seconds: float
    loaded_tokens: float | None
    """Prompt tokens that lmkv's connectors loaded meanwhile; None: the endpoints export no such metric."""

    @property
    def prompt_tokens(self) -> int:
        return sum(one.prompt_tokens for one in self.completions)

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of all prompts that no engine computed; None if the answers do not have their number, as those of vLLM
        without `--enable-prompt-tokens-details`."""
        count = sum(one.cached_tokens for one in self.completions)
        return None if not count and self.loaded_tokens else count

    def ttft_seconds(self, percent: int) -> float:
        """A percentile of the time to the first token, by nearest rank."""
        ordered = sorted(one.ttft_seconds for one in self.completions)
        return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]

    def to_json(self) -> dict[str, Any]:
        """Other programs read these names."""
        return {
            "name": self.name,
            "requests": len(self.completions),
            "seconds": round(self.seconds, 3),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "loaded_tokens": self.loaded_tokens,
            "ttft_mean_ms": round(1e3 * statistics.fmean(one.ttft_seconds for one in self.completions), 3),
            "ttft_p50_ms": round(1e3 * self.ttft_seconds(50), 3),
            "ttft_p99_ms": round(1e3 * self.ttft_seconds(99), 3),
        }


class Texts:
    """Texts that no earlier run has sent, of about as many tokens as asked for."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # no secret
        self.tokens_per_word = 1.0

    def make(self, token_count: int) -> str:
        """A text of about that many tokens."""
        return self.words(max(1, round(token_count / self.tokens_per_word)))

    def words(self, count: int) -> str:
        """A text of that many words."""
        choose = self._random.choice
        return " ".join(choose(SYLLABLES) + choose(SYLLABLES) for _ in range(count)) + " "


def run(args: argparse.Namespace) -> int:
    """Returns 0 once all requests are answered. Raises `ConfigError` for bad flags, `LmkvError` if a request fails."""
    for name in ("documents", "document_tokens", "chats", "turns", "output_tokens", "in_flight"):
        if getattr(args, name) < (0 if name in ("documents", "chats") else 1):
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0")
    if args.documents + args.chats == 0:
        raise ConfigError("--documents and --chats are both 0: there is nothing to measure")
    endpoints = [make_endpoint(url, args.model) for url in args.url or [DEFAULT_URL]]
    if not args.model:
        for endpoint in endpoints:
            endpoint.model_name = endpoints[0].models()[0]
    texts = Texts(secrets.randbits(64) if args.seed is None else args.seed)
    sent = endpoints[0].complete(texts.words(CALIBRATION_WORDS), 1)
    texts.tokens_per_word = max(sent.prompt_tokens, 1) / CALIBRATION_WORDS
    total = 2 * args.documents + args.chats * args.turns
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("requests", total=total)
        bench = Bench(endpoints, texts, args, lambda: progress.advance(task))
        rounds = [*bench.documents(), *bench.chats()]
    if args.json:
        print(json.dumps({"model": endpoints[0].model_name, "rounds": [one.to_json() for one in rounds]}, indent=2))
    else:
        show(rounds)
    return 0


def make_endpoint(url: str, model: str | None) -> Endpoint:
    """A client of an OpenAI API at `http(s)://HOST:PORT`. Raises `ConfigError` for any other URL."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path not in ("", "/", "/v1"):
        raise ConfigError(f"--url {url} must be http://HOST:PORT or https://HOST:PORT of an OpenAI API")
    return Endpoint(
        url,
        port or (443 if parts.scheme == "https" else 80),
        model or "",
        parts.hostname,
        tls=ssl.create_default_context() if parts.scheme == "https" else None,
        token=os.environ.get(API_KEY, ""),
    )


class Bench:
    """The workloads, at endpoints that are used in turn."""

    def __init__(
        self, endpoints: Sequence[Endpoint], texts: Texts, args: argparse.Namespace, on_request: Callable[[], object]
    ) -> None:
        self._endpoints = endpoints
        self._texts = texts
        self._args = args
        self._on_request = on_request

    def documents(self) -> Iterator[BenchRound]:
        """Each document with a question, then the same document with another one at the next endpoint."""
        if not self._args.documents:
            return
        documents = [self._texts.make(self._args.document_tokens) for _ in range(self._args.documents)]
        for turn, name in enumerate(("documents, first time", "documents, again")):
            prompts = [document + self._texts.words(QUESTION_WORDS) for document in documents]
            yield self._round(name, prompts, turn)

    def chats(self) -> Iterator[BenchRound]:
        """The first turns, then all later ones: each is sent with everything before it, answers included."""
        if not self._args.chats:
            return
        share = max(1, self._args.document_tokens // self._args.turns)
        prompts = [self._texts.make(share) for _ in range(self._args.chats)]
        first = self._round("chats, first turn", prompts, 0)
        yield first
        later: list[BenchRound] = []
        answers = first.completions
        for turn in range(1, self._args.turns):
            said = zip(prompts, answers, strict=True)
            prompts = [f"{prompt}{answer.text} {self._texts.make(share)}" for prompt, answer in said]
            later.append(self._round("", prompts, turn))
            answers = later[-1].completions
        if later:
            loaded = [one.loaded_tokens for one in later if one.loaded_tokens is not None]
            yield BenchRound(
                name="chats, later turns",
                completions=[one for round_ in later for one in round_.completions],
                seconds=sum(one.seconds for one in later),
                loaded_tokens=sum(loaded) if loaded else None,
            )

    def _round(self, name: str, prompts: Sequence[str], turn: int) -> BenchRound:
        """Sends each prompt to an endpoint; a prompt's endpoint is the next one in each turn."""

        def send(index: int) -> Completion:
            endpoint = self._endpoints[(index + turn) % len(self._endpoints)]
            completion = endpoint.complete(prompts[index], self._args.output_tokens)
            self._on_request()
            return completion

        self._settle()
        before, begin = self._counted("lmkv:loaded_tokens_total"), time.perf_counter()
        with ThreadPoolExecutor(self._args.in_flight) as pool:
            completions = list(pool.map(send, range(len(prompts))))
        seconds = time.perf_counter() - begin
        self._settle()
        after = self._counted("lmkv:loaded_tokens_total")
        loaded = after - before if before is not None and after is not None else None
        return BenchRound(name=name, completions=completions, seconds=seconds, loaded_tokens=loaded)

    def _settle(self) -> None:
        """Waits until the engines have counted what they store."""
        deadline = time.monotonic() + SETTLE_SECONDS
        stored = self._counted("lmkv:stored_tokens_total")
        while stored is not None and time.monotonic() < deadline:
            time.sleep(SETTLE_POLL_SECONDS)
            if (now := self._counted("lmkv:stored_tokens_total")) == stored:
                return
            stored = now

    def _counted(self, name: str) -> float | None:
        """A metric, summed over the endpoints; None if none exports it."""
        found = []
        for endpoint in self._endpoints:
            try:
                found.append(endpoint.metrics().get(name))
            except (LmkvError, ValueError):  # the endpoint exports no metrics
                continue
        known = [value for value in found if value is not None]
        return sum(known) if known else None


def show(rounds: Sequence[BenchRound]) -> None:
    """Prints the table, and in a sentence for each workload what repeated prompts save."""
    columns = ("workload", *map(Number, ("requests", "tokens", "cached", "by lmkv", "TTFT p50", "TTFT p99", "time")))
    print_table(columns, [_cells(one) for one in rounds])
    for first, again in zip(rounds[::2], rounds[1::2], strict=False):
        before, after = first.ttft_seconds(50), again.ttft_seconds(50)
        kind = first.name.partition(",")[0]
        print(f"{kind}: median TTFT {format_duration(after)} instead of {format_duration(before)}")
        if not again.cached_tokens and not again.loaded_tokens:
            print("  no prompt token was cached: `lmkv explain` says why, docs/operate/troubleshooting.md what to do")
    if any(one.cached_tokens is None for one in rounds):
        print("cached: unknown, as vLLM reports it with --enable-prompt-tokens-details only")


def _cells(one: BenchRound) -> tuple[str, ...]:
    def share(tokens: float | None) -> str:
        return "-" if tokens is None else f"{tokens / max(1, one.prompt_tokens):.0%}"

    return (
        one.name,
        str(len(one.completions)),
        f"{one.prompt_tokens:,}",
        share(one.cached_tokens),
        share(one.loaded_tokens),
        format_duration(one.ttft_seconds(50)),
        format_duration(one.ttft_seconds(99)),
        format_duration(one.seconds),
    )
