"""Delays answers to callers that exceed their limits, so that repeating a refused call is slow."""

from __future__ import annotations

import asyncio
from typing import Any

MAX_DEADLINE_FRACTION = 0.5
"""Fraction of a call's remaining time that a delay takes at most: the client still receives the answer."""


async def delay_refusal(seconds: float, context: Any) -> None:
    """Waits for `LmkvError.delay_seconds` before a call is answered, within the call's deadline."""
    left = context.time_remaining()
    await asyncio.sleep(seconds if left is None else min(seconds, left * MAX_DEADLINE_FRACTION))
