"""The state of one move, copy, clear or drain, whichever coordinator runs it, and of an attempt at it. Used by
`Operations`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from google.protobuf.internal.containers import RepeatedCompositeFieldContainer
from google.protobuf.message import Message
from google.rpc import status_pb2

from lmkv.errors import LmkvError, OperationCancelled, OperationTakenOver
from lmkv.operation_records import begin_quorum, end_quorum, end_rank, rank
from lmkv.v1 import cache_service_pb2, chunk_pb2
from lmkv.v1 import registry_service_pb2 as registry_pb

Request: TypeAlias = cache_service_pb2.MoveRequest | cache_service_pb2.ClearRequest | cache_service_pb2.DrainRequest
Progress: TypeAlias = cache_service_pb2.MoveProgress | cache_service_pb2.ClearProgress | cache_service_pb2.DrainProgress
Failures: TypeAlias = "RepeatedCompositeFieldContainer[chunk_pb2.ChunkFailure]"

OPERATION_BYTES = 2048
"""Approximate size of an operation without its messages."""


@dataclass(frozen=True, kw_only=True, eq=False)
class End:
    """How an operation ends, or would end if the holders of its record accept it."""

    progress: Progress
    """The last progress, with the time of the end."""
    result: Message | None
    """Set if it has succeeded, completely or in part."""
    error: LmkvError | None
    """Set if it did nothing, or was stopped."""

    @classmethod
    def now(cls, progress: Progress, result: Message | None, error: LmkvError | None) -> Self:
        """An end at this time."""
        last = deepcopy(progress)
        last.end_time.FromNanoseconds(time.time_ns())
        return cls(progress=last, result=result, error=error)


class Attempt:
    """One attempt of this coordinator at an operation: what the holders of its record answer, and what follows.

        beginning ──more than half keep its record──► working ──► proposing ──at least half keep its end──► ended
            │ (the first attempt skips this)             │            │
            └──────────────────────────────────── a holder keeps a later record ──► superseded

    `lmkv.v1.OperationRecord` states the rules.
    """

    def __init__(self, number: int, holder_ids: Collection[str], *, is_sole: bool = False) -> None:
        """`is_sole`: the holders report to this coordinator only, so that no other one can take the operation over."""
        self.newer: registry_pb.OperationRecord | None = None
        """A record that supersedes this attempt."""
        self.accepted_end: registry_pb.ProposedEnd | None = None
        """The end to propose instead of doing the work, because it may be the operation's end already."""
        self._is_first = number == 1
        self._holder_ids = frozenset(holder_ids)
        self._is_sole = is_sole
        self._begun: set[str] = set()
        self._ended: set[str] = set()
        self._silent: dict[bool, set[str]] = {False: set(), True: set()}
        """Holders that did not answer, by whether they were to keep a proposed end."""
        self._gone: set[str] = set()

    def answered(
        self, holder_id: str, sent: registry_pb.OperationRecord, kept: registry_pb.OperationRecord | None
    ) -> None:
        """An instance keeps what was sent, or refuses it or adds an accepted end: then `kept`."""
        if kept is not None and rank(kept) > rank(sent):
            if self.newer is None or rank(kept) > rank(self.newer):
                self.newer = kept
        elif holder_id not in self._holder_ids - self._gone:
            return
        elif sent.HasField("proposed_end"):
            self._ended.add(holder_id)
        else:
            self._begun.add(holder_id)
            if kept is not None and kept.HasField("proposed_end"):
                best = self.accepted_end
                if best is None or end_rank(kept.proposed_end) > end_rank(best):
                    self.accepted_end = kept.proposed_end

    def unanswered(self, holder_id: str, sent: registry_pb.OperationRecord) -> None:
        """An instance did not answer."""
        self._silent[sent.HasField("proposed_end")].add(holder_id)

    def is_gone(self, holder_id: str) -> None:
        """A holder has restarted, and so lost the record."""
        self._gone.add(holder_id)

    @property
    def may_begin(self) -> bool:
        """Whether the work may begin, or the accepted end be proposed."""
        return (
            self._is_first
            or not self._holder_ids  # a coordinator of an earlier version started it
            or len(self._begun) >= begin_quorum(len(self._holder_ids))
            or self._is_alone(self._begun, self._silent[False])
        )

    @property
    def has_ended(self) -> bool:
        """Whether the proposed end is the end of the operation."""
        return len(self._ended) >= end_quorum(len(self._holder_ids)) or self._is_alone(self._ended, self._silent[True])

    @property
    def is_hopeless(self) -> bool:
        """Whether too many holders have restarted for what this attempt still needs."""
        if self._is_sole:
            return False
        needed = end_quorum if self.may_begin else begin_quorum
        return len(self._holder_ids - self._gone) < needed(len(self._holder_ids))

    def _is_alone(self, agreed: set[str], silent: set[str]) -> bool:
        """Whether the coordinator decides by itself: the only one there is has asked each holder once."""
        return self._is_sole and self.newer is None and self._holder_ids <= agreed | silent | self._gone


@dataclass(kw_only=True, eq=False)
class Operation:
    """One operation. Times are in seconds since 1970."""

    name: str
    kind: str
    """`move`, `copy`, `clear` or `drain`."""
    progress: Progress
    """Updated by the work."""
    request: Request | None
    """None if it was too large for the record."""
    create_time: float
    expire_time: float
    """Deadline."""
    known_since: float = field(default_factory=time.monotonic)
    """When this coordinator learned of it, by the monotonic clock."""
    attempt: int = 1
    """Increases with each coordinator that takes it over."""
    coordinator_id: str = ""
    """The coordinator that makes the attempt."""
    holders: Mapping[str, int] = field(default_factory=dict)
    """Ids of the instances that decide its end, with their epochs when it started; see `lmkv.v1.OperationRecord`."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a client cancels it; the work checks it."""
    result: Message | None = None
    """Set once it has succeeded, completely or in part."""
    error: LmkvError | None = None
    """Set if it did nothing, or was stopped."""
    end_time: float | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    """The task that runs it, if it runs here."""
    answers: Attempt | None = None
    """What the holders answer to the attempt of this coordinator."""
    proposal: End | None = None
    """The end that this coordinator proposes."""
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each answer."""
    record_holders: set[str] = field(default_factory=set)
    """Ids of the instances that store its record, or are to."""
    reporters: dict[str, int] = field(default_factory=dict)
    """Instances that have reported its record to this coordinator, with their epochs; restarted ones have lost it."""
    is_lost: bool = False
    """Whether it was ended because nothing reports it any more; any report of it is newer than this end."""
    is_unknown: bool = False
    """Whether it was ended here without knowing its end, which no instance stores as its end."""
    size_bytes: int = 0
    """Approximate size in memory."""
    reporter: str = ""
    """Id of the instance that first reported its record; empty if it was started here."""
    replicated: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once an instance stores its record."""

    def measure(self, work_bytes: int = 0) -> int:
        """Approximate size in memory, with `work_bytes` for the work."""
        parts = (self.progress, self.request, self.result)
        return OPERATION_BYTES + work_bytes + sum(part.ByteSize() for part in parts if part is not None)

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self.end_time is not None

    @property
    def runs_here(self) -> bool:
        """Whether this coordinator runs it."""
        return self.task is not None and not self.done

    @property
    def rank(self) -> tuple[bool, int, str]:
        """The state with the highest rank wins where coordinators differ; see `lmkv.operation_records`."""
        if self.is_unknown:
            return False, self.attempt - 1, ""
        return self.done, self.attempt, self.coordinator_id

    @property
    def start_key(self) -> str:
        """Sorts operations by start time."""
        return self.name.rpartition("-")[2]

    @property
    def state(self) -> str:
        """`running`, `done`, `failed` or `cancelled`."""
        if not self.done:
            return "running"
        if isinstance(self.error, OperationCancelled):
            return "cancelled"
        return "failed" if self.error else "done"

    async def until_answered(self, is_enough: Callable[[Attempt], bool], seconds: float) -> None:
        """Waits until the holders have answered enough to the attempt of this coordinator.

        Raises `OperationTakenOver` if a holder keeps a later record, `TimeoutError` if there are not enough after
        `seconds`, or if there will never be: too many holders have restarted.
        """
        answers = self.answers
        assert answers is not None, "it runs here"
        async with asyncio.timeout(seconds):
            while not is_enough(answers):
                if answers.newer:
                    raise OperationTakenOver(
                        f"attempt {self.attempt} at {self.name} has ended: an instance keeps the record of attempt "
                        f"{answers.newer.attempt}",
                        name=self.name,
                        attempt=answers.newer.attempt,
                    )
                if answers.is_hopeless:
                    raise TimeoutError
                self.answered.clear()
                await self.answered.wait()

    async def wait(self, timeout_seconds: float) -> bool:
        """Waits until it has ended; returns whether it has."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.ended.wait()
        except TimeoutError:
            pass
        return self.done


def add_failure(failures: Failures, chunk_keys: bytes, status: status_pb2.Status) -> None:
    """Adds chunks to the failures of an operation; chunks with equal status share one entry."""
    for known in failures:
        if known.status == status:
            known.chunk_keys += chunk_keys
            return
    if chunk_keys:
        failures.add(chunk_keys=chunk_keys, status=status)
