"""Responses of an engine to completion requests, parsed from its OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionToken:
    """One event of a streamed completion."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float
    """Time since the request was sent."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """The completion of one prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """`length`, `stop`, or `error` for a request that the engine aborted."""
    ttft_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens that the engine did not compute: from its prefix cache or from lmkv."""
    logprobs: tuple[float, ...] = ()
    """Log probability of each token, if the request has `logprobs`."""


def read_token(choice: Mapping[str, Any], seconds: float) -> CompletionToken:
    """The tokens in one choice of a response or an event."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return CompletionToken(
        token_ids=tuple(choice["token_ids"]), text=choice["text"], seconds=seconds, logprobs=tuple(logprobs)
    )


def make_completion(
    tokens: Sequence[CompletionToken], last: Mapping[str, Any], usage: Mapping[str, Any], total_seconds: float
) -> Completion:
    """Combines streamed tokens, the last choice and the usage."""
    details = usage.get("prompt_tokens_details") or {}
    return Completion(
        token_ids=tuple(token_id for token in tokens for token_id in token.token_ids),
        text="".join(token.text for token in tokens),
        finish_reason=last.get("finish_reason") or "",
        ttft_seconds=tokens[0].seconds if tokens else total_seconds,
        total_seconds=total_seconds,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=details.get("cached_tokens") or 0,
        logprobs=tuple(value for token in tokens for value in token.logprobs),
    )
