"""What instances hold of a prompt that has not arrived as a whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FIRST_KEYS = 16
"""Number of keys of the first lookup of an arriving prompt. Each further one has at least twice as many."""
MAX_AGE_SECONDS = 1.0
"""Older matches are not used: the layout map has changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyMatch:
    """The answers to a lookup of the first chunks, at least one in each namespace."""

    held: Mapping[str, int]
    """The number of tokens that each instance holds of them."""
    open_ids: frozenset[str]
    """The instances that hold all of them, and so may hold more of the prompt; others do not."""
    time: float
    """When the lookup began."""

    def at_most(self, token_count: int) -> Mapping[str, int]:
        """The most tokens that each instance may hold of a prompt of `token_count` tokens."""
        return {**self.held, **dict.fromkeys(self.open_ids, token_count)}
