"""What instances hold of a prompt, and will hold soon. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmkv_server.proxy.routing.growing_chains import PromptKeys


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMatch:
    """A prompt that was looked up."""

    held: Mapping[str, int]
    """The number of leading tokens that each instance holds, as the coordinator reports it."""
    cached: Mapping[str, int]
    """The same, with what instances will hold soon."""
    at_most: Mapping[str, int]
    """The most that `cached` may be after a lookup of the whole prompt."""
    is_open: bool
    """Whether instances may hold more than `held`."""
    chains: Sequence[PromptKeys]
    token_count: int


NO_MATCH = PrefixMatch(held={}, cached={}, at_most={}, is_open=False, chains=(), token_count=0)
