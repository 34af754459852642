"""Finished requests whose last tokens are not stored yet: their pages stay until there are write credits for these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lmkv_client.connector.scheduler.block_copies import BlockIds
from lmkv_client.connector.scheduler.request_state import RequestState
from lmkv_client.engine.write_credits import PartCredits

WAIT_SECONDS = 1.0
"""Longest time that the pages of a finished request wait for the node's answer."""
GRACE_SECONDS = 0.005
"""Time that a step that computes nothing waits for it."""


@dataclass(kw_only=True, slots=True, eq=False)
class EndedRequest:
    """A finished request, and what of it is to be stored."""

    state: RequestState
    full_count: int
    """Full chunks; those behind `state.store.stored_count` are not stored yet."""
    rest_count: int
    """Tokens behind them to store as a partial chunk; 0 if it has none."""
    block_ids: BlockIds
    ended_at: float
    is_discarded: bool = False
    """Whether nothing of it is of use any more."""

    @property
    def missing_count(self) -> int:
        """Full chunks that are not stored yet."""
        return 0 if self.is_discarded else max(0, self.full_count - self.state.store.stored_count)


class EndedRequests:
    """The finished requests of one engine, in the order of their ends."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._requests: list[EndedRequest] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, state: RequestState) -> bool:
        return any(request.state is state for request in self._requests)

    @property
    def missing_count(self) -> int:
        """Full chunks that are to be stored."""
        return sum(request.missing_count for request in self._requests)

    @property
    def rest_counts(self) -> Counter[int]:
        """The partial chunks that are to be stored, by number of tokens."""
        return Counter(one.rest_count for one in self._requests if one.rest_count and not one.is_discarded)

    def add(self, state: RequestState, full_count: int, rest_count: int, block_ids: BlockIds) -> None:
        """Adds a request that has just finished."""
        self._requests.append(
            EndedRequest(
                state=state, full_count=full_count, rest_count=rest_count, block_ids=block_ids, ended_at=self._clock()
            )
        )

    def discard(self) -> None:
        """Nothing of these requests is of use any more: `take_ready` returns them at once."""
        for request in self._requests:
            request.is_discarded = True

    def grace_seconds(self, own: PartCredits) -> float:
        """How long a step that computes nothing may still wait for write credits. 0 or less: not at all."""
        waits = [one.ended_at for one in self._requests if self._waits(one, own)]
        return max(waits) + GRACE_SECONDS - self._clock() if waits else 0.0

    def take_ready(self, own: PartCredits) -> Iterator[EndedRequest]:
        """Removes and yields, one by one, the requests for which the node has answered, or has not in time.

        The caller takes the credits of each before it asks for the next one.
        """
        now = self._clock()
        for request in list(self._requests):
            if not self._waits(request, own) or now >= request.ended_at + WAIT_SECONDS:
                self._requests.remove(request)
                yield request

    def _waits(self, request: EndedRequest, own: PartCredits) -> bool:
        """Whether credits that the request needs are requested and not there."""
        if request.is_discarded:
            return False
        if len(own[0]) < request.missing_count and own[0].requested_count:
            return True
        rest = own.partial(request.rest_count) if request.rest_count else None
        return rest is not None and not len(rest) and rest.requested_count > 0
