"""Records of operations that this node keeps for all coordinators. Time is passed in. Used by `OrderRunner`.

    put ──► owned ──disconnected──► due ──timeout──► due at the next coordinator ...
              ▲                      └──────put──────────┘
              └──────────────────────────────┘

The coordinator that puts a record owns its operation while it is connected. Afterwards the record is sent to it as
orphaned when it is back, which may be after a restart, and after a timeout to the next coordinator, until one of them
puts it again. The record of an operation that is done has no owner, and is kept until `KEPT_SECONDS` after its
`expire_time`. Beyond `MAX_RECORDS` or `MAX_RECORD_BYTES` the oldest ones that are done are forgotten first.

The node is one of the holders that decide how the operation ends: `put` is its vote. See `OperationRecord`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from lmkv.errors import OperationTakenOver
from lmkv.operation_records import MAX_RECORD_BYTES, MAX_RECORDS, rank
from lmkv.v1 import registry_service_pb2 as pb

KEPT_SECONDS = 60.0
"""How long a record whose `expire_time` has passed is still kept. That time is of a coordinator's clock: if it was set
back, the record of an end is expired when it arrives, and no other coordinator knows that end yet."""
_NO_OWNER = ""
"""The owner of a forwarded record, until a coordinator puts it or it is due."""


@dataclass(kw_only=True, slots=True)
class _Entry:
    record: pb.OperationRecord
    revision: int
    owner: str
    """The coordinator that runs the operation, or is asked to."""
    forget_at: float | None = None
    """When it is forgotten; None until its `expire_time` was seen to have passed."""
    due: float | None = None
    """When another coordinator is asked to, unless the owner puts it again; None while the owner is connected, and
    once the operation is done."""


class OperationLog:
    """The newest record of each operation. Coordinators are named by their addresses."""

    def __init__(self) -> None:
        self._revision = 0
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by the time of their last change
        self._size_bytes = 0

    @property
    def revision(self) -> int:
        """Incremented with every change."""
        return self._revision

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, record: pb.OperationRecord, coordinator: str, forwarded_until: float | None = None
    ) -> pb.OperationRecord | None:
        """Keeps a record unless a newer one is kept; the coordinator owns the operation unless it is done.

        With `forwarded_until` it does not: the one that does has until then to put the record itself.
        Returns what is kept if the record was refused, or if the coordinator is to propose the end in it again.
        """
        name, is_proposal = record.operation.name, record.HasField("proposed_end")
        known = self._entries.get(name)
        if known and rank(known.record) > rank(record):
            return known.record
        kept = pb.OperationRecord()
        kept.CopyFrom(record)
        if known:
            kept.cancelled = record.cancelled or known.record.cancelled
            if known.record.HasField("proposed_end") and not is_proposal and not record.operation.done:
                kept.proposed_end.CopyFrom(known.record.proposed_end)  # only another end replaces it
        if known and rank(known.record) == rank(record) and known.record.proposed_end == kept.proposed_end:
            if forwarded_until is None:
                known.owner, known.due = coordinator, None
            if known.record.cancelled != kept.cancelled:
                self.cancel(name)
        else:
            self._keep(kept, coordinator if forwarded_until is None else _NO_OWNER)
            if not kept.operation.done:
                self._entries[name].due = forwarded_until
        return kept if kept.HasField("proposed_end") and not is_proposal else None

    def _keep(self, record: pb.OperationRecord, coordinator: str) -> None:
        self._forget(record.operation.name)
        self._revision += 1
        self._entries[record.operation.name] = _Entry(record=record, revision=self._revision, owner=coordinator)
        self._size_bytes += record.ByteSize()
        while len(self._entries) > 1 and (len(self._entries) > MAX_RECORDS or self._size_bytes > MAX_RECORD_BYTES):
            self._forget(self._first_to_forget())

    def cancel(self, name: str) -> None:
        """Marks an operation as cancelled, which is reported to its owner. Ignores unknown names."""
        entry = self._entries.get(name)
        if entry and not entry.record.cancelled:
            self._size_bytes -= entry.record.ByteSize()
            entry.record.cancelled = True
            self._size_bytes += entry.record.ByteSize()
            self._changed(name, entry)

    def check_current(self, name: str, attempt: int) -> None:
        """Raises `OperationTakenOver` if the record of a later attempt is kept, or the operation is done."""
        entry = self._entries.get(name)
        if entry and (entry.record.operation.done or entry.record.attempt > attempt):
            raise OperationTakenOver(
                f"attempt {attempt} at {name} has ended: the record of attempt {entry.record.attempt} is kept here",
                name=name,
                attempt=entry.record.attempt,
            )

    def since(self, revision: int, reader: str) -> list[pb.OperationRecord]:
        """Records that changed after a revision, in that order, as they are to be sent to a coordinator."""
        found = []
        for entry in reversed(self._entries.values()):
            if entry.revision <= revision:
                break
            sent = pb.OperationRecord()
            sent.CopyFrom(entry.record)
            sent.orphaned = entry.due is not None and entry.owner == reader
            found.append(sent)
        return found[::-1]

    # --- Owners --------------------------------------------------------------------------------------------------

    def disconnected(self, coordinator: str, until: float) -> None:
        """The reports to a coordinator ended: its operations are due at another one unless it puts them in time."""
        for entry in self._entries.values():
            if entry.owner == coordinator and entry.due is None and not entry.record.operation.done:
                entry.due = until

    def reassign(self, now: float, until: float, coordinators: Sequence[str]) -> None:
        """Makes the next connected coordinator the owner of each record that is due; it has until then to put it."""
        for name, entry in list(self._entries.items()):
            if entry.due is not None and entry.due <= now:
                entry.due = until
                if coordinators:
                    entry.owner = _next(entry.owner, coordinators)
                    self._changed(name, entry)

    def next_due(self) -> float | None:
        """When a record is to be reassigned."""
        return min((entry.due for entry in self._entries.values() if entry.due is not None), default=None)

    def expire(self, now_ns: int, now: float) -> None:
        """Forgets records of done operations whose `expire_time` has passed by the wall clock, `now_ns`, `KEPT_SECONDS`
        after the first call that finds it passed, by the monotonic clock, `now`."""
        for name, entry in list(self._entries.items()):
            if not entry.record.operation.done or entry.record.expire_time.ToNanoseconds() > now_ns:
                continue
            if entry.forget_at is None:
                entry.forget_at = now + KEPT_SECONDS
            elif entry.forget_at <= now:
                self._forget(name)

    def check(self) -> None:
        """Asserts that the bounds are kept, and that no done operation is due."""
        revisions = [entry.revision for entry in self._entries.values()]
        assert revisions == sorted(set(revisions)), "entries are in order of their last change"
        assert all(revision <= self._revision for revision in revisions)
        assert all(entry.due is None for entry in self._entries.values() if entry.record.operation.done)
        assert self._size_bytes == sum(entry.record.ByteSize() for entry in self._entries.values())
        assert len(self._entries) <= MAX_RECORDS

    # --- Inside --------------------------------------------------------------------------------------------------

    def _changed(self, name: str, entry: _Entry) -> None:
        self._revision += 1
        entry.revision = self._revision
        self._entries.move_to_end(name)

    def _first_to_forget(self) -> str:
        older = list(self._entries.items())[:-1]  # the newest stays
        return next((name for name, entry in older if entry.record.operation.done), older[0][0])

    def _forget(self, name: str) -> None:
        if entry := self._entries.pop(name, None):
            self._size_bytes -= entry.record.ByteSize()


def without_request(record: pb.OperationRecord | None) -> pb.OperationRecord | None:
    """A copy for the outcome of an order: the coordinator that sent the order knows the request."""
    if record is None:
        return None
    copied = pb.OperationRecord()
    copied.CopyFrom(record)
    if request := record.WhichOneof("request"):
        copied.ClearField(request)
    return copied


def _next(after: str, coordinators: Sequence[str]) -> str:
    """The coordinator after another one in the order of addresses, which is the same at every node."""
    ordered = sorted(coordinators)
    return next((one for one in ordered if one > after), ordered[0])
