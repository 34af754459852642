"""Measured speeds: how fast an engine computes prompts, how long loads take, and which is faster. Pure.

docs/concepts/load-or-compute.md explains the choice."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

KEPT = 0.8
"""Factor by which each new load or step reduces the weight of earlier loads or steps in the average."""
DOUBT = 0.9
"""Each refused load lowers the expected time by this factor, so that a load is tried and measured again some time."""

LITTLE_SPREAD = 0.01
"""Squared variation of sizes at which the measured loads show half of what a token takes."""


MAX_STEPS = 8
"""Most planned steps that have not ended; vLLM plans one or two ahead."""


class PrefillRate:
    """Tokens per second, averaged over steps of at least `least_tokens`: small steps only wait for weights.

    A step lasts from its plan, or the end of the step before it, to its end. Times are of any clock, in seconds.
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


SLOW, SLOW_SHARE = 2.0, 0.25
"""A load whose rest takes `SLOW` times as long as computing is abandoned after this share of the time of computing."""
ARRIVAL_SECONDS = 60.0
"""Time after which a third of a request still counts as one that has come lately."""


class PrefillQueue:
    """The tokens that requests have still to compute of their prompts, in the order in which the requests came."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._arrivals = 0.0
        self._arrived_at = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    def add(self, request_id: str, token_count: int, now: float) -> None:
        """A request has come; all of its prompt is to be computed until `expect` says less."""
        self._arrivals, self._arrived_at = 1 + self._recent(now), now
        self._tokens[request_id] = token_count

    def expect(self, request_id: str, token_count: int) -> None:
        """This number of tokens is to be computed of a request; ignored if its turn was already."""
        if request_id in self._tokens:
            self._tokens[request_id] = token_count

    def planned(self, token_counts: Mapping[str, int]) -> None:
        """These requests compute in the next step: they wait for no other any more. What is left of a prompt that does
        not fit into one step still counts for those behind it."""
        for request_id in self._tokens.keys() & token_counts.keys():
            left = self._tokens[request_id] - token_counts[request_id]
            if left > 0:
                self._tokens[request_id] = left
            else:
                del self._tokens[request_id]

    def remove(self, request_id: str) -> None:
        """The request is over."""
        self._tokens.pop(request_id, None)

    def seconds(self, request_id: str, token_count: int, tokens_per_second: int, now: float) -> float:
        """The seconds that computing this number of a request's tokens costs; 0 if the rate is not known.

        Until the engine has computed the prompts that came before and these tokens; and for each request that waits
        behind, or comes meanwhile if as many come as lately, the time that these tokens take. To load costs those
        nothing: the engine computes them meanwhile. A request that is not known is behind all others.
        """
        if not tokens_per_second:
            return 0.0
        before = behind = 0
        is_before = True
        for other, count in self._tokens.items():
            if other == request_id:
                is_before = False
            elif is_before:
                before += count
            else:
                behind += 1
        own_seconds = (before + token_count) / tokens_per_second
        others = max(0.0, self._recent(now) - (not is_before))
        delayed = behind + own_seconds * others / ARRIVAL_SECONDS
        return own_seconds + delayed * token_count / tokens_per_second

    def _recent(self, now: float) -> float:
        """Requests that have come lately, each the less, the longer ago that was."""
        return self._arrivals * math.exp((self._arrived_at - now) / ARRIVAL_SECONDS)


def seconds_left(waited_seconds: float, arrived_count: int, missing_count: int) -> float:
    """The expected seconds until the rest of a load is there, by the pace of what has arrived.

    While nothing has, as long again as it has taken: the longer a load has been silent, the longer it is silent still.
    """
    return waited_seconds * missing_count / arrived_count if arrived_count else waited_seconds


def is_too_late(
    waited_seconds: float,
    arrived_count: int,
    missing_count: int,
    computing_seconds: float,
    steady_seconds: float = 0.0,
) -> bool:
    """Whether computing the missing tokens now, which costs `computing_seconds`, is better than to wait for them.

    Only after a wait as long as that: so a load that is judged too early costs nothing, and one that hangs costs no
    more than twice what computing costs. After a part of it if the rest takes much longer by `steady_seconds`, the pace
    since the first arrival (0: not known): behind a slow link the whole wait would be lost.
    """
    if steady_seconds > SLOW * computing_seconds:
        return waited_seconds >= SLOW_SHARE * computing_seconds
    left = seconds_left(waited_seconds, arrived_count, missing_count)
    return waited_seconds >= computing_seconds and left > computing_seconds


class LoadTimes:
    """The time of a load: a part that every load takes, and a part for each token, fitted to the measured loads.

    The first load connects and maps memory: it is not measured. Loads of nearly one size do not separate the parts.
    Then loads of other sizes are expected to be as fast as they can be, so that they are tried: larger ones take
    as long as those, and smaller ones as much less as they are smaller.
    """

    def __init__(self) -> None:
        self._is_connected = False
        self._count = 0.0
        self._tokens = 0.0
        self._seconds = 0.0
        self._squared_tokens = 0.0
        self._products = 0.0

    def add(self, token_count: int, seconds: float) -> None:
        """Records a load that has ended."""
        if not self._is_connected:
            self._is_connected = True
            return
        self._count = KEPT * self._count + 1
        self._tokens = KEPT * self._tokens + token_count
        self._seconds = KEPT * self._seconds + seconds
        self._squared_tokens = KEPT * self._squared_tokens + token_count**2
        self._products = KEPT * self._products + token_count * seconds

    def refused(self) -> None:
        """Records that a load was not made because of its expected time."""
        self._seconds *= DOUBT
        self._products *= DOUBT

    def seconds(self, token_count: int) -> float:
        """The expected time of a load; 0 if none has been measured, or nothing is loaded."""
        if not self._tokens or not token_count:
            return 0.0
        proportional = self._seconds / self._tokens
        spread = max(0.0, self._count * self._squared_tokens - self._tokens**2)
        slope = 0.0
        if spread:
            slope = (self._count * self._products - self._tokens * self._seconds) / spread
        slope = min(max(slope, 0.0), proportional)
        larger_by = token_count - self._tokens / self._count
        known = spread / (spread + LITTLE_SPREAD * self._tokens**2)
        slope = known * slope + (1 - known) * (0.0 if larger_by > 0 else proportional)
        return self._seconds / self._count + slope * larger_by


class LoadCosts:
    """Chooses what to load of a hit: its first tokens are in the own pool, the others must be fetched first."""

    def __init__(self) -> None:
        self.own = LoadTimes()
        self.fetched = LoadTimes()

    def seconds(self, own_count: int, fetched_count: int) -> float:
        """The expected time of a load; 0 if none like it has been measured."""
        return self.fetched.seconds(own_count + fetched_count) if fetched_count else self.own.seconds(own_count)

    def choose(self, own_count: int, fetched_count: int, tokens_per_second: int) -> int:
        """Tokens to load: all, those in the own pool, or none, whichever is expected to be over first with the rest
        computed. All, while the rate of computing is not known."""
        total = own_count + fetched_count
        if not tokens_per_second:
            return total
        own_seconds = self.own.seconds(own_count)
        if fetched_count and self.fetched.seconds(total) > own_seconds + fetched_count / tokens_per_second:
            self.fetched.refused()
            total = own_count
        if total == own_count and own_seconds > own_count / tokens_per_second:
            self.own.refused()
            return 0
        return total
