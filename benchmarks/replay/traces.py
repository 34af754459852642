"""Prompts generated from published statistics of production traces, the same in every run.

- `conversation` and `tool_agent` have the shape of the traces of Mooncake (Qin et al., FAST '25, and `FAST25-release`
  of its repository): an hour with 12,031 requests of 12,035 tokens and answers of 343 on average, of whose tokens 40 %
  were sent before; and one with 23,608 requests of 8,596 tokens and answers of 182, 59 % of them sent before, most of
  those in prompts that many requests begin with.
- `api` has the shape of trace B of "KVCache Cache in the Wild" (Wang et al., USENIX ATC '25, with the Qwen-Bailian
  traces): programs ask, without a second turn, each with a prompt's beginning of its own, most of it again within
  seconds; 54 % of the tokens were sent before.
- `scan` is `conversation` with batch jobs between that read long documents once: these are never requested again.
- `loop` asks for the same documents round and round, more of them than fit: the worst case of LRU.

Arrivals, turns, pauses and lengths are drawn so that counts, mean lengths and the share that was sent before are those;
what was not published, such as how long people pause, is a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random

from lmkv.keys import ChunkKey

CHUNK_TOKENS = 256
HOUR = 3600.0
MAX_PROMPT_CHUNKS = 500
"""128,000 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A prompt, and what is stored once it is answered."""

    keys: Sequence[ChunkKey]
    """Of its full chunks."""
    token_count: int
    stored: Sequence[ChunkKey]
    """`keys`, and the chunks that the answer fills."""
    arrival_seconds: float = 0.0
    """Since the beginning of a recorded trace."""
    answer_tokens: int = 0
    """Of a recorded trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """Requests in the order of their arrival."""

    requests: Sequence[Request]
    chunk_tokens: int
    """Tokens of a chunk; the last chunk of a recorded prompt can have fewer."""


def found_tokens(trace: Trace, request: Request, hit_count: int) -> int:
    """Tokens of a prompt whose first `hit_count` chunks are found."""
    return min(hit_count * trace.chunk_tokens, request.token_count)


class _Text:
    """Text that grows, in whole chunks and the tokens beyond them."""

    def __init__(self, fresh: Iterator[int], before: Sequence[ChunkKey] = ()) -> None:
        self._fresh = fresh
        self._keys = list(before)
        self._rest = 0

    def grow(self, token_count: int) -> None:
        self._rest += token_count
        while self._rest >= CHUNK_TOKENS and len(self._keys) < MAX_PROMPT_CHUNKS:
            self._keys.append(ChunkKey(next(self._fresh).to_bytes(16, "big")))
            self._rest -= CHUNK_TOKENS
        self._rest = min(self._rest, CHUNK_TOKENS - 1)

    def ask(self, answer_tokens: int) -> Request:
        """Sends all of it, and adds the answer."""
        keys, token_count = tuple(self._keys), len(self._keys) * CHUNK_TOKENS + self._rest
        self.grow(answer_tokens)
        return Request(keys=keys, token_count=token_count, stored=tuple(self._keys))


def _about(random: Random, mean: float, spread: float) -> int:
    """A log-normal count of tokens."""
    return max(1, round(random.lognormvariate(math.log(mean) - spread**2 / 2, spread)))


def _texts(random: Random, fresh: Iterator[int], number: int, mean: float, spread: float) -> list[Request]:
    """Requests with new texts of about `mean` tokens, which are answered with none."""
    texts = []
    for _ in range(number):
        text = _Text(fresh)
        text.grow(_about(random, mean, spread))
        texts.append(text.ask(0))
    return texts


def _zipf(random: Random, size: int, exponent: float) -> Callable[[], int]:
    """Numbers below `size`, the small ones far more often."""
    weights = list(accumulate(1 / (rank + 1) ** exponent for rank in range(size)))
    return lambda: random.choices(range(size), cum_weights=weights)[0]


def _in_order(events: Iterator[tuple[float, Request]]) -> list[Request]:
    return [request for _, request in sorted(events, key=lambda event: event[0])]


def conversation(scale: float = 1.0, seed: int = 1, document_share: float = 0.0) -> list[Request]:
    """Conversations, half of them with one turn only, with texts of very different lengths."""
    random, fresh = Random(seed), count()

    def events() -> Iterator[tuple[float, Request]]:
        left = round(12_031 * scale)
        while left > 0:
            at = random.uniform(0, HOUR * scale)
            text = _Text(fresh)
            text.grow(_about(random, 11_900, 1.2))
            while left > 0:
                yield at, text.ask(_about(random, 343, 0.8))
                left -= 1
                if random.random() < 0.6:
                    break
                at += random.lognormvariate(math.log(60), 1.2)
                text.grow(_about(random, 900, 1.3))
        for _ in range(round(12_031 * scale * document_share)):
            text = _Text(fresh)
            text.grow(_about(random, 60_000, 0.4))
            yield random.uniform(0, HOUR * scale), text.ask(100)

    return _in_order(events())


def tool_agent(scale: float = 1.0, seed: int = 2) -> list[Request]:
    """Agents that begin with one of many descriptions of tools, some far more popular than others."""
    random, fresh = Random(seed), count()
    tools = [text.keys for text in _texts(random, fresh, 400, 3_900, 0.7)]
    choose = _zipf(random, len(tools), 0.9)

    def events() -> Iterator[tuple[float, Request]]:
        left = round(23_608 * scale)
        while left > 0:
            at = random.uniform(0, HOUR * scale)
            text = _Text(fresh, tools[choose()])
            text.grow(_about(random, 3_550, 1.2))
            while left > 0:
                yield at, text.ask(_about(random, 182, 0.8))
                left -= 1
                if random.random() < 0.95:
                    break
                at += random.lognormvariate(math.log(15), 1.0)
                text.grow(_about(random, 600, 1.0))

    return _in_order(events())


def api(scale: float = 1.0, seed: int = 3) -> list[Request]:
    """Programs that send one prompt's beginning with ever new ends, in bursts, and then fall silent for a while."""
    random, fresh = Random(seed), count()
    users = [text.keys for text in _texts(random, fresh, 3_000, 2_000, 0.9)]
    choose = _zipf(random, len(users), 0.6)

    def events() -> Iterator[tuple[float, Request]]:
        left = round(30_000 * scale)
        while left > 0:
            at = random.uniform(0, HOUR * scale)
            user = choose()
            while left > 0:
                text = _Text(fresh, users[user])
                text.grow(_about(random, 1_300, 1.2))
                yield at, text.ask(_about(random, 150, 0.8))
                left -= 1
                if random.random() < 0.12:
                    break
                at += random.expovariate(1 / 4)

    return _in_order(events())


def scan(scale: float = 1.0) -> list[Request]:
    """`conversation`, and one request in ten more that reads a long document once."""
    return conversation(scale, seed=4, document_share=0.1)


def loop(scale: float = 1.0, seed: int = 5) -> list[Request]:
    """The same 300 documents of 10,000 tokens, 3 million in all, one after the other."""
    return _texts(Random(seed), count(), 300, 10_000, 0.2) * round(12 * scale + 1)


TRACES: Mapping[str, Callable[[float], list[Request]]] = {
    "conversation": conversation,
    "tool_agent": tool_agent,
    "api": api,
    "scan": scan,
    "loop": loop,
}
