"""Records of operations that this node keeps for all coordinators. Pure: time is passed in. Used by `Orders`.

    put ──► attended ──lost──► due ──its time is up──► due at the next coordinator ...
               ▲                └──────────put─────────────┘
               └───────────────────────────┘

Who puts a record sees its operation through, until its reports end. Then it is told to it as orphaned when it is back,
which may be after a restart, and after a while to the next coordinator, until one of them puts it again. A record of
an operation that is over is nobody's, and kept until its `expire_time`. Beyond `MAX_RECORDS` or `MAX_RECORD_BYTES`
those that are over give way first, and the oldest of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lmkv.errors import OperationTakenOver
from lmkv.operation_records import MAX_RECORD_BYTES, MAX_RECORDS, rank
from lmkv.v1 import registry_service_pb2 as pb


@dataclass(kw_only=True, slots=True)
class _Entry:
    record: pb.OperationRecord
    revision: int
    attendant: str
    """Who sees it through, or shall."""
    due: float | None = None
    """When another one shall unless the attendant puts it again; None while it attends, and once it is over."""


class OperationLog:
    """The newest record of each operation. Coordinators are named by their addresses."""

    def __init__(self) -> None:
        self.revision = 0
        """Rises with every change."""
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by the time of their last change
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, record: pb.OperationRecord, giver: str) -> None:
        """Keeps a record unless a newer one is kept; who gave it sees the operation through, unless it is over."""
        name = record.operation.name
        known = self._entries.get(name)
        if known and rank(known.record) > rank(record):
            return
        is_cancelled = record.cancelled or bool(known and known.record.cancelled)
        if known and rank(known.record) == rank(record):
            known.attendant, known.due = giver, None
            if known.record.cancelled != is_cancelled:
                self.cancel(name)
            return
        self._forget(name)
        kept = pb.OperationRecord()
        kept.CopyFrom(record)
        kept.cancelled = is_cancelled
        self.revision += 1
        self._entries[name] = _Entry(record=kept, revision=self.revision, attendant=giver)
        self._size_bytes += kept.ByteSize()
        while len(self._entries) > 1 and (len(self._entries) > MAX_RECORDS or self._size_bytes > MAX_RECORD_BYTES):
            self._forget(self._first_to_go())

    def cancel(self, name: str) -> None:
        """Somebody wants an operation to stop: whoever sees it through shall hear of it. None of that name: nothing."""
        entry = self._entries.get(name)
        if entry and not entry.record.cancelled:
            self._size_bytes -= entry.record.ByteSize()
            entry.record.cancelled = True
            self._size_bytes += entry.record.ByteSize()
            self._changed(name, entry)

    def check_current(self, name: str, attempt: int) -> None:
        """Raises `OperationTakenOver` if the record of a later attempt is kept, or this one is over."""
        entry = self._entries.get(name)
        if entry and rank(entry.record) > (attempt, False):
            raise OperationTakenOver(
                f"attempt {attempt} at {name} is over: the record of attempt {entry.record.attempt} is kept here",
                name=name,
                attempt=entry.record.attempt,
            )

    def since(self, revision: int, reader: str) -> list[pb.OperationRecord]:
        """Records that changed after a revision, in that order, as they are to be told to a coordinator."""
        found = []
        for entry in reversed(self._entries.values()):
            if entry.revision <= revision:
                break
            told = pb.OperationRecord()
            told.CopyFrom(entry.record)
            told.orphaned = entry.due is not None and entry.attendant == reader
            found.append(told)
        return found[::-1]

    # --- Who sees them through -----------------------------------------------------------------------------------

    def lost(self, coordinator: str, until: float) -> None:
        """The reports to a coordinator ended: what it saw through is due for another one, unless it is back by then."""
        for entry in self._entries.values():
            if entry.attendant == coordinator and entry.due is None and not entry.record.operation.done:
                entry.due = until

    def pass_on(self, now: float, until: float, coordinators: Sequence[str]) -> None:
        """Has the next of those that are connected see through what is due; each has until then to put it again."""
        for name, entry in list(self._entries.items()):
            if entry.due is not None and entry.due <= now:
                entry.due = until
                if coordinators:
                    entry.attendant = _next(entry.attendant, coordinators)
                    self._changed(name, entry)

    def next_due(self) -> float | None:
        """When something is to be passed on."""
        return min((entry.due for entry in self._entries.values() if entry.due is not None), default=None)

    def expire(self, now_ns: int) -> None:
        """Forgets what is over and has expired, by the time since 1970."""
        for name, entry in list(self._entries.items()):
            if entry.record.operation.done and entry.record.expire_time.ToNanoseconds() <= now_ns:
                self._forget(name)

    def check(self) -> None:
        """Asserts that the bounds are kept, and what is over is nobody's."""
        revisions = [entry.revision for entry in self._entries.values()]
        assert revisions == sorted(set(revisions)), "by the time of their last change"
        assert all(revision <= self.revision for revision in revisions)
        assert all(entry.due is None for entry in self._entries.values() if entry.record.operation.done)
        assert self._size_bytes == sum(entry.record.ByteSize() for entry in self._entries.values())
        assert len(self._entries) <= MAX_RECORDS

    # --- Inside --------------------------------------------------------------------------------------------------

    def _changed(self, name: str, entry: _Entry) -> None:
        self.revision += 1
        entry.revision = self.revision
        self._entries.move_to_end(name)

    def _first_to_go(self) -> str:
        older = list(self._entries.items())[:-1]  # what was just put stays
        return next((name for name, entry in older if entry.record.operation.done), older[0][0])

    def _forget(self, name: str) -> None:
        if entry := self._entries.pop(name, None):
            self._size_bytes -= entry.record.ByteSize()


def _next(after: str, coordinators: Sequence[str]) -> str:
    """The one that comes after another in the order of addresses, which is the same at every node."""
    ordered = sorted(coordinators)
    return next((one for one in ordered if one > after), ordered[0])
