"""Sessions of coding agents, scaled to a machine that computes a thousand tokens per second: of a trace, or made here.

A trace has one JSON object per line: `timestamp`, `session`, `input_length`, `output_length`, and `hash_ids`, one id
for each `TRACE_BLOCK` tokens of the prompt. It has no texts: what a prompt shares with the one before it in its session
shows in the ids.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkv.errors import LmkvError

TRACE_BLOCK = 256
"""Tokens for each id of a trace."""
ANSWER_SCALE = 16
MIN_ANSWER, MAX_ANSWER = 2, 32
"""Answers are computed token by token on every machine, so they are scaled less than prompts, and bounded."""
SYSTEM_TOKENS = 320
"""Of made sessions: instructions and tools, the same for all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRequest:
    """One request of a session; its prompt is some of what was sent and answered before, and new tokens."""

    session: int
    kept_tokens: int | None
    """Tokens of the session so far that the prompt begins with; None: all of them."""
    new_tokens: int
    """New tokens behind them: the results of tools, or a question."""
    answer_tokens: int


def prompt_lengths(requests: Sequence[AgentRequest], shared_tokens: int = 0) -> list[int]:
    """Tokens of each prompt; every session begins with `shared_tokens`."""
    history: dict[int, int] = {}
    lengths = []
    for request in requests:
        before = history.get(request.session, shared_tokens)
        kept = before if request.kept_tokens is None else min(before, request.kept_tokens)
        lengths.append(kept + request.new_tokens)
        history[request.session] = lengths[-1] + request.answer_tokens
    return lengths


def made_sessions(session_count: int, turn_count: int, seed: int = 7) -> list[AgentRequest]:
    """Sessions in the order of their requests: pauses differ widely, and one turn in ten rewrites the history."""
    chance = random.Random(seed)
    timed = []
    for session in range(session_count):
        at = chance.expovariate(1 / 60)
        history = SYSTEM_TOKENS
        for turn in range(turn_count):
            rewrites = turn > 1 and chance.random() < 0.1
            request = AgentRequest(
                session=session,
                kept_tokens=chance.randint(SYSTEM_TOKENS, history) if rewrites else None,
                new_tokens=round(min(600, chance.lognormvariate(5.5 if turn == 0 else 4.6, 0.7))) + 8,
                answer_tokens=chance.randint(MIN_ANSWER, MAX_ANSWER),
            )
            timed.append((at, request))
            history = prompt_lengths([request], history)[0] + request.answer_tokens
            at += chance.lognormvariate(3, 1.2)
    return [request for _, request in sorted(timed, key=lambda one: one[0])]


def traced_sessions(file: Path, session_count: int, turn_count: int, max_tokens: int) -> list[AgentRequest]:
    """The first requests of a trace's first sessions, in order, so scaled that no prompt exceeds `max_tokens`.

    Raises `LmkvError` if the file is no such trace.
    """
    chosen: dict[int, list[dict[str, Any]]] = {}
    try:
        for line in _lines(file):
            session = line["session"]
            if session in chosen or len(chosen) < session_count:
                turns = chosen.setdefault(session, [])
                if len(turns) < turn_count:
                    turns.append(line)
        if not chosen:
            raise ValueError("it has no requests")
        longest = max(line["input_length"] for turns in chosen.values() for line in turns)
        scale = max(1.0, longest / (0.9 * max_tokens))
        timed = [one for number, turns in enumerate(chosen.values()) for one in _scaled(number, turns, scale)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LmkvError(f"--trace: {file} is not a trace of sessions: {error!r}") from None
    return [request for _, request in sorted(timed, key=lambda one: one[0])]


def _scaled(session: int, turns: Sequence[dict[str, Any]], scale: float) -> Iterator[tuple[int, AgentRequest]]:
    before: dict[str, Any] = {"input_length": 0, "output_length": 0, "hash_ids": []}
    for turn in turns:
        shared = 0
        while shared < min(len(turn["hash_ids"]), len(before["hash_ids"])) and (
            turn["hash_ids"][shared] == before["hash_ids"][shared]
        ):
            shared += 1
        continues = (shared + 1) * TRACE_BLOCK > before["input_length"]  # the last block was not full
        known = before["input_length"] + before["output_length"] if continues else shared * TRACE_BLOCK
        request = AgentRequest(
            session=session,
            kept_tokens=None if continues else round(shared * TRACE_BLOCK / scale),
            new_tokens=max(1, round((turn["input_length"] - known) / scale)),
            answer_tokens=min(MAX_ANSWER, max(MIN_ANSWER, turn["output_length"] // ANSWER_SCALE)),
        )
        yield turn["timestamp"], request
        before = turn


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(file, "rt") if file.suffix == ".gz" else file.open() as lines:
        for line in lines:
            yield json.loads(line)
