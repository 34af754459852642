"""What an engine answers to a completion request, read from its OpenAI API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionToken:
    """One step of a streamed completion, as it arrived."""

    token_ids: tuple[int, ...]
    text: str
    seconds: float
    """Time since the request was sent."""
    logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What an engine answered to one prompt."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    """`length`, `stop`, or `error` for a request that the engine gave up."""
    ttft_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    """Tokens of the prompt that the engine did not compute: from its own prefix cache or from lmkv."""
    logprobs: tuple[float, ...] = ()
    """Logarithm of the probability of each token, where the request asked for `logprobs`."""


def read_token(choice: Mapping[str, Any], seconds: float) -> CompletionToken:
    """The token or tokens in one choice of an answer or of an event."""
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or ()
    return CompletionToken(
        token_ids=tuple(choice["token_ids"]), text=choice["text"], seconds=seconds, logprobs=tuple(logprobs)
    )


def make_completion(
    tokens: Sequence[CompletionToken], last: Mapping[str, Any], usage: Mapping[str, Any], total_seconds: float
) -> Completion:
    """What streamed tokens, the last choice and the usage say together."""
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
