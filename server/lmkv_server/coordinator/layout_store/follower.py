"""The chunks of one instance as another coordinator publishes them. Pure; fed with log entries and loaded records.

    load requested ──► loading ──► catching up with the log ──► installed, and updated by the log
           ^_____________________________________________________________|  a newer term, a wrong digest

A load scans records that change meanwhile, so it sees some of the changes and misses others. Log entries from before
the load until after it are therefore applied on top, in order: for a chunk that they name the last entry counts, for
any other chunk the scan was right.
"""

from __future__ import annotations

from typing import Protocol

from lmkv.errors import LmkvError
from lmkv_server.coordinator.core.instances import Instance, Instances
from lmkv_server.coordinator.core.layout_map import Change, LayoutMap, Snapshot
from lmkv_server.coordinator.layout_store.records import (
    EntryKind,
    LogEntry,
    LogPosition,
    admissions,
    has_marker,
    size_of,
)

MAX_BUFFERED_BYTES = 8 << 20
"""Size of the changes that wait for the end of a load; more of them make another load necessary."""


class SnapshotLoad:
    """One scan of an instance's records, and the log entries read meanwhile."""

    def __init__(self) -> None:
        self.term = 0
        """The term that is loaded; 0 until it is known."""
        self.end_position: LogPosition | None = None
        """Position of the log when the scan ended."""
        self.staged: Snapshot | None = None
        self.buffered: list[LogEntry] = []
        self.buffered_bytes = 0
        self.has_marker = False
        """Whether the hash's marker was seen; without it the hash does not exist."""
        self.is_stale = False
        """Whether changes are missing, so that another load has to follow."""

    def buffer(self, entry: LogEntry) -> None:
        """Keeps an entry that was read during the load."""
        self.buffered_bytes += 64 + sum(size_of(change) for change in entry.changes)
        if entry.kind is EntryKind.RELOAD or self.buffered_bytes > MAX_BUFFERED_BYTES:
            self.is_stale = True
            self.buffered.clear()
        elif not self.is_stale:
            self.buffered.append(entry)


class ChunkLoader(Protocol):
    """Loads the chunks of followed instances; a `LayoutStore` is one."""

    def load(self, follower: InstanceFollower) -> None:
        """Schedules a load of an instance's chunks."""


class InstanceFollower:
    """Follows one instance: pass every log entry of it to `handle_entry`, and every position of its log to `advance`.

    It requests loads from `loader`, and marks the instance in `instances` while the layout map may hold fewer chunks
    than the instance.
    """

    def __init__(self, instances: Instances, layout: LayoutMap, instance: Instance, loader: ChunkLoader) -> None:
        self.instance = instance
        self.term = 0
        """The term that is installed and updated; 0 if none is."""
        self.needs_load = False
        """Whether a load is requested and has not begun."""
        self.is_closed = False
        self.failure_count = 0
        """Failed loads in a row: after the second, the next one is delayed."""
        self.needs_resync = False
        """Whether a load did not repair a wrong digest: the instance has to send a new snapshot."""
        self.difference = ""
        """Describes how the layout map differed from the last wrong digest."""
        self._instances = instances
        self._layout = layout
        self._loader = loader
        self._load: SnapshotLoad | None = None
        self._is_behind = True
        """Whether a load has yet to install missing chunks, or found none that it could."""
        self._complete_term = 0
        """The newest term with a complete snapshot."""
        self._ended_term = 0
        """The newest term that ended and was not followed by another one yet."""
        self._doubted_term = 0
        """The last term with a wrong digest."""
        self._resynced_term = 0
        """The last term for which `needs_resync` was set: it is set once per term."""

    @property
    def is_current(self) -> bool:
        """Whether all that is published is installed."""
        return not self._is_behind and self.term != self._ended_term

    @property
    def is_catching_up(self) -> bool:
        """Whether the scan has ended, and the log has yet to be read up to its end."""
        return self._load is not None and self._load.end_position is not None

    def request_load(self) -> None:
        """Abandons the current load and requests another one; installed chunks stay until it ends."""
        if self.is_closed:
            return
        self._abandon()
        self._instances.mark_unsynced(self.instance)
        self._is_behind = self.needs_load = True
        self._loader.load(self)

    def close(self) -> None:
        """Stops following. Installed chunks stay. Idempotent."""
        self.is_closed, self.needs_load = True, False
        self._abandon()

    # --- Loading -------------------------------------------------------------------------------------------------

    def begin_load(self) -> SnapshotLoad:
        """Begins a load, which the methods below take. They ignore an abandoned load."""
        self._abandon()
        self.needs_load = False
        self._load = SnapshotLoad()
        return self._load

    def is_loading(self, load: SnapshotLoad) -> bool:
        """Whether the load was not abandoned."""
        return self._load is load

    def set_term(self, load: SnapshotLoad, current: tuple[int, int] | None) -> bool:
        """Sets term and epoch of the complete snapshot; returns whether there is one to load."""
        if self._load is not load:
            return False
        term, epoch = current or (0, 0)
        if epoch != self.instance.info.epoch or term == self._ended_term:
            term = 0
        if term < self._complete_term and self._complete_term != self._ended_term:
            self._fail()  # the log was faster than the answer, or the answer is lost
            return False
        if not term:
            self._abandon()  # a log entry will announce the next snapshot
            return False
        load.term = term
        load.staged = self._layout.stage(self.instance.info.instance_id)
        load.buffered = [entry for entry in load.buffered if entry.term == term]
        return True

    def add_records(self, load: SnapshotLoad, records: bytes) -> None:
        """Stages a part of the records."""
        if self._load is not load or load.staged is None:
            return
        try:
            load.has_marker = load.has_marker or has_marker(records)
            for change in admissions(records):
                self._apply(change, load.staged)
        except (LmkvError, ValueError):
            self._fail()

    def finish_scan(self, load: SnapshotLoad, end_position: LogPosition) -> None:
        """Ends the scan: all records are staged, and the log is at `end_position`. Call `advance` next."""
        if self._load is not load:
            return
        if load.has_marker:
            load.end_position = end_position
        else:  # the hash was lost
            self._fail()

    def advance(self, position: LogPosition) -> None:
        """The log was read up to `position`, and all entries before it were handled; installs a load that ends here."""
        load = self._load
        if load is None or load.end_position is None or position < load.end_position:
            return
        assert load.staged is not None
        try:
            for entry in load.buffered:
                for change in entry.changes:
                    self._apply(change, load.staged)
        except (LmkvError, ValueError):
            self._fail()
            return
        self._load = None
        self._layout.install(load.staged)
        self.term, self.failure_count = load.term, 0
        if load.is_stale:
            self.request_load()
        else:
            self._is_behind, self.instance.synced = False, True

    # --- Log entries ---------------------------------------------------------------------------------------------

    def handle_entry(self, entry: LogEntry) -> bool:
        """Applies or buffers a log entry of the instance; returns whether it changed installed chunks."""
        if self.is_closed or entry.epoch != self.instance.info.epoch:
            return False
        if entry.kind is EntryKind.COMPLETE:
            self._handle_complete(entry.term)
            return False
        load = self._load
        if entry.kind is EntryKind.GONE:
            self._handle_gone(entry.term)
            return False
        if load is not None and entry.term == (load.term or entry.term):
            load.buffer(entry)
        if entry.term != self.term:
            return False
        if entry.kind is EntryKind.CHANGES:
            return self._apply_entry(entry)
        if load is None:
            self.request_load()
        return False

    def _handle_complete(self, term: int) -> None:
        if term > self._complete_term:
            self._complete_term, self.needs_resync = term, False
        known = max(self.term, self._load.term if self._load else 0)
        if term > known and not (self._load is not None and not self._load.term):
            self.request_load()

    def _handle_gone(self, term: int) -> None:
        self._ended_term = max(self._ended_term, term)
        if self._load is not None and self._load.term == term:
            self._abandon()
        if self.term == term:  # the instance may report to another coordinator now, so its chunks stay
            self._instances.mark_unsynced(self.instance)

    def _apply_entry(self, entry: LogEntry) -> bool:
        try:
            for change in entry.changes:
                self._apply(change)
        except (LmkvError, ValueError):
            self._fail()
            return True
        if self._load is None and not self.needs_load:
            self._compare(entry)
        return True

    def _compare(self, entry: LogEntry) -> None:
        instance_id = self.instance.info.instance_id
        for tier, digest in entry.digest_by_tier().items():
            known = self._layout.digest(instance_id, tier)
            if known != digest:
                self.difference = (
                    f"instance {instance_id} holds {digest.chunk_count} chunks in tier {tier}, the layout map has "
                    f"{known.chunk_count}, or other keys"
                )
                if self._doubted_term == entry.term != self._resynced_term:
                    self.needs_resync, self._resynced_term = True, entry.term
                self._doubted_term = entry.term
                self.request_load()
                return

    # --- Inside --------------------------------------------------------------------------------------------------

    def _apply(self, change: Change, staged: Snapshot | None = None) -> None:
        self._layout.apply(staged or self.instance.info.instance_id, change)

    def _fail(self) -> None:
        self.failure_count += 1
        self.request_load()

    def _abandon(self) -> None:
        load, self._load = self._load, None
        if load is not None and load.staged is not None:
            self._layout.discard(load.staged)
