"""How fast an engine computes prompts, as measured. Pure."""

from __future__ import annotations

from collections import deque

KEPT = 0.8
"""Factor by which each new step reduces the weight of earlier steps in the average."""
MAX_STEPS = 8
"""Most planned steps that have not ended; vLLM plans one or two ahead."""


class PrefillRate:
    """Tokens per second, averaged over steps of at least `least_tokens`: small ones only wait for weights.

    A step lasts from its plan, or the end of the one before it, to its end. Times are on any one clock, in seconds.
    """

    def __init__(self, least_tokens: int) -> None:
        self._least_tokens = least_tokens
        self._planned: deque[tuple[float, int]] = deque(maxlen=MAX_STEPS)
        self._ended_at = float("-inf")
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def tokens_per_second(self) -> int:
        """The average; 0 if nothing has been measured."""
        return round(self._tokens / self._seconds) if self._seconds else 0

    def planned(self, token_count: int, now: float) -> None:
        """Records the plan of a step."""
        if token_count:
            self._planned.append((now, token_count))

    def ended(self, now: float) -> None:
        """Records the end of the oldest planned step. Steps without tokens are never planned."""
        if not self._planned:
            return
        planned_at, token_count = self._planned.popleft()
        seconds = now - max(planned_at, self._ended_at)
        self._ended_at = now
        self.add(token_count, seconds)

    def add(self, token_count: int, seconds: float) -> None:
        """Records the time in which this number of tokens was computed."""
        if token_count >= self._least_tokens and seconds > 0:
            self._tokens = KEPT * self._tokens + token_count
            self._seconds = KEPT * self._seconds + seconds
