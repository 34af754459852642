"""Session affinity: which engine serves a session. Pure: time is passed in."""

from __future__ import annotations

from collections import OrderedDict

MAX_SESSIONS = 100_000
"""A new session beyond this number replaces the least recently used one."""


class SessionAffinity:
    """Maps sessions to engine URLs. An entry expires `ttl_seconds` after the session's last request."""

    def __init__(self, ttl_seconds: float, limit: int = MAX_SESSIONS) -> None:
        self._ttl_seconds = ttl_seconds
        self._limit = limit
        self._entries: OrderedDict[str, tuple[str, float]] = OrderedDict()  # URL and expiry, in order of last use

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, session: str, now: float) -> str | None:
        """The URL of the session's engine; None if it has none or its entry has expired."""
        url, expiry = self._entries.get(session, (None, 0.0))
        return url if now < expiry else None

    def assign(self, session: str, url: str, now: float) -> None:
        """Assigns the session to an engine, and removes expired entries."""
        if self._ttl_seconds <= 0:
            return
        self._entries[session] = (url, now + self._ttl_seconds)
        self._entries.move_to_end(session)
        while len(self._entries) > self._limit or next(iter(self._entries.values()))[1] <= now:
            self._entries.popitem(last=False)
