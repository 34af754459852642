"""Which engine a session is with. No IO: time is passed in."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 100_000
"""The one that was quiet for longest gives way to a new one."""


class Sessions:
    """Engines by session, forgotten `ttl_seconds` after the last request."""

    def __init__(self, ttl_seconds: float, limit: int = MAX_SESSIONS) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()  # in order of their last request

    def __len__(self) -> int:
        return len(self._places)

    def recall(self, session: str, now: float) -> str | None:
        """The URL of the session's engine; None if it has none, or had none for too long."""
        url, expiry = self._places.get(session, (None, 0.0))
        return url if now < expiry else None

    def remember(self, session: str, url: str, now: float) -> None:
        """The session is with this engine from now on."""
        if self._ttl_seconds <= 0:
            return
        self._places[session] = (url, now + self._ttl_seconds)
        self._places.move_to_end(session)
        while len(self._places) > self._limit or next(iter(self._places.values()))[1] <= now:
            self._places.popitem(last=False)
