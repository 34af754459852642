"""Statistics of orders. Returned by `OrderRunner`, read by metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderStats:
    """Orders since the start, and now."""

    done_counts: Mapping[str, int]
    """Executed orders, by kind; single chunks may have failed."""
    failed_counts: Mapping[str, int]
    """Refused or stopped orders, by kind."""
    chunk_counts: Mapping[str, int]
    """Chunks that orders were executed for, by kind."""
    failed_chunks: Mapping[str, int]
    """Chunks for which an order failed, by reason."""
    transferred_bytes: int
    """Bytes fetched from peers."""
    running_count: int
    """Orders that run or wait now."""
    fetching_count: int
    """Fetches that run now."""
