"""The time that a lookup may take. It depends on what its answer is worth: a share of the prefill that a hit may save.

An engine that knows its prefill rate sends the time that an answer is worth (`LookupChunks.budget`); its node spends
what is left of it on coordinators and stores. The configured `lookup_timeout`, `coordinator_timeout` and
`remote_lookup_timeout` are the time that a lookup may take if it saves little, or nothing is known of what it saves.
"""

from __future__ import annotations

import math

SHARE = 0.5
"""Share of the estimated prefill that a lookup may take: one in vain delays the first token by that, at most."""
MOST_SECONDS = 2.0
"""Longest time that an answer is worth by default, and after which silence concerns every lookup."""
NODE_SHARE = 0.8
"""Share of that time which the node has: the rest is for messages, so that what it holds itself arrives in time."""
MAX_BUDGET_SECONDS = 60.0
"""Longest time that a node lets an engine give a lookup."""
TIMEOUTS_UNTIL_SUSPECT = 3
SUSPECT_SECONDS = 1.0
"""After `TIMEOUTS_UNTIL_SUSPECT` lookups in a row without an answer, no lookups are sent for this time, except those
that are worth more time than the node has been silent."""


def worth_seconds(token_count: int, tokens_per_second: float, most: float = MOST_SECONDS) -> float:
    """The time that a lookup is worth which may save the prefill of these tokens; 0 if the rate is not known (0)."""
    if tokens_per_second <= 0 or token_count <= 0:
        return 0.0
    return min(SHARE * token_count / tokens_per_second, most)


class Silence:
    """Measures for how long a node, a coordinator or a store has not answered. One answer ends it.

    Who has been silent for a time is not asked for answers that are worth less: those would hardly come in time.
    """

    def __init__(self) -> None:
        self._since = math.inf

    def __bool__(self) -> bool:
        """Whether the last answer is missing."""
        return self._since < math.inf

    def begin(self, asked_at: float) -> None:
        """Records that a question of that time was not answered. The earliest counts."""
        self._since = min(self._since, asked_at)

    def broken(self) -> None:
        """Records that no answer can come: the connection is lost."""
        self._since = -math.inf

    def end(self) -> None:
        """Records an answer."""
        self._since = math.inf

    def outlasts(self, seconds: float, now: float) -> bool:
        """Whether the silence has lasted for at least this time."""
        return now - self._since >= seconds


class Suspicion:
    """Whether an engine asks its node. A node that does not answer is suspect for a while, or until it answers."""

    def __init__(self) -> None:
        self._silence = Silence()
        self._timeouts = 0
        """Lookups in a row that were not answered in time."""
        self._suspect_until = 0.0

    def concerns(self, worth_seconds: float, now: float) -> bool:
        """Whether a lookup that is worth this time would wait in vain."""
        return now < self._suspect_until and self._silence.outlasts(worth_seconds, now)

    def timed_out(self, asked_at: float, now: float) -> None:
        """Records that a lookup was not answered in time."""
        self._timeouts += 1
        self._silence.begin(asked_at)
        if self._timeouts >= TIMEOUTS_UNTIL_SUSPECT:
            self._suspect_until = now + SUSPECT_SECONDS

    def end(self) -> None:
        """Ends it: the node has answered, in time or late, or another one takes its place."""
        self._timeouts = 0
        self._suspect_until = 0.0
        self._silence.end()
