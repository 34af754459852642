"""What one instance holds, as another coordinator publishes it. Pure; fed with what the log says and what is loaded.

    wanted ──► loading ──► read to where the log was when all was loaded ──► installed, and kept up by the log
       ^______________________________________________________________________________|  a newer term, a doubt

A load walks over what changes meanwhile, so it sees some changes and some not. What the log tells from before the load
until after it is therefore applied on top, in order: of a chunk that it names the last word counts, of any other the
walk was right.
"""

from __future__ import annotations

from collections.abc import Callable

from lmkv.errors import LmkvError
from lmkv_server.coordinator.core.instances import Instance
from lmkv_server.coordinator.core.layout_map import LayoutMap, Snapshot
from lmkv_server.coordinator.layout_store.content import OPENING, Change, admissions
from lmkv_server.coordinator.layout_store.entry import Entry, EntryKind, Position

MAX_KEPT_BYTES = 8 << 20
"""Of changes that wait for the end of a load; beyond it another load follows."""


class Load:
    """One walk over what an instance holds."""

    def __init__(self) -> None:
        self.term = 0
        """Of what is loaded; 0 until it is known."""
        self.until: Position | None = None
        """Where the log was when the walk was over."""
        self.staged: Snapshot | None = None
        self.kept: list[Entry] = []
        self.kept_bytes = 0
        self.is_opened = False
        """Whether the hash's opening was seen: else the hash is not there."""
        self.is_stale = False
        """Whether changes are missing, so that another load has to follow."""

    def keep(self, entry: Entry) -> None:
        """Notes what the log says meanwhile."""
        self.kept_bytes += 64 + sum(change.size_bytes for change in entry.changes)
        if entry.kind is EntryKind.RELOAD or self.kept_bytes > MAX_KEPT_BYTES:
            self.is_stale = True
            self.kept.clear()
        elif not self.is_stale:
            self.kept.append(entry)


class Follower:
    """One instance. `wants` is called when it wants to be loaded, `unsettles` when what is known may be less than is.

    Every entry of the instance that the log has is to be told to `hear`, and every position to `reach`.
    """

    def __init__(
        self,
        layout: LayoutMap,
        instance: Instance,
        *,
        wants: Callable[[Follower], None],
        unsettles: Callable[[Instance], None],
    ) -> None:
        self.instance = instance
        self.term = 0
        """Of what is installed and kept up; 0 if nothing is."""
        self.is_wanting = False
        """Whether a load shall begin."""
        self.is_closed = False
        self.failure_count = 0
        """Loads in a row that came to nothing: after the second, the next one should not come at once."""
        self.is_hopeless = False
        """Whether what was loaded was wrong again: the instance has to tell it anew."""
        self.difference = ""
        """How what is known differed from the digests the last time that it did."""
        self._layout = layout
        self._wants = wants
        self._unsettles = unsettles
        self._load: Load | None = None
        self._is_behind = True
        """Whether a load has yet to bring what is missing, or found nothing that could."""
        self._announced_term = 0
        """The newest that is said to be complete."""
        self._ended_term = 0
        """The newest that is over, and was not followed by another one yet."""
        self._doubted_term = 0
        self._given_up_term = 0
        """The newest that was hopeless; nobody needs to be told so twice."""

    @property
    def is_settled(self) -> bool:
        """Whether it has all that is published."""
        return not self._is_behind and self.term != self._ended_term

    @property
    def is_reading_on(self) -> bool:
        """Whether all is loaded, and only the log has yet to be read up to there."""
        return self._load is not None and self._load.until is not None

    def want(self) -> None:
        """Gives up what is being loaded and begins anew; what is installed stays until then."""
        if self.is_closed:
            return
        self._abandon()
        self._unsettle()
        self._is_behind = self.is_wanting = True
        self._wants(self)

    def close(self) -> None:
        """Follows no longer. What is installed stays. Repeating it is safe."""
        self.is_closed, self.is_wanting = True, False
        self._abandon()

    # --- What is loaded ------------------------------------------------------------------------------------------

    def begin(self) -> Load:
        """Begins a load; hand it to the other methods, which ignore one that has been given up."""
        self._abandon()
        self.is_wanting = False
        self._load = Load()
        return self._load

    def is_loading(self, load: Load) -> bool:
        """Whether a load still goes on."""
        return self._load is load

    def found(self, load: Load, current: tuple[int, int] | None) -> bool:
        """Takes in which term and epoch are complete; returns whether there is anything to load."""
        if self._load is not load:
            return False
        term, epoch = current or (0, 0)
        if epoch != self.instance.said.epoch or term == self._ended_term:
            term = 0
        if term < self._announced_term and self._announced_term != self._ended_term:
            self._fail()  # the log was quicker than the answer, or the answer is lost
            return False
        if not term:
            self._abandon()  # the log will say when there is something
            return False
        load.term = term
        load.staged = self._layout.stage(self.instance.said.instance_id)
        load.kept = [entry for entry in load.kept if entry.term == term]
        return True

    def loaded(self, load: Load, records: bytes) -> None:
        """Takes in a part of what is held."""
        if self._load is not load or load.staged is None:
            return
        try:
            load.is_opened = load.is_opened or any(
                records[at : at + len(OPENING)] == OPENING for at in range(0, len(records), len(OPENING))
            )
            for change in admissions(records):
                self._apply(change, load.staged)
        except (LmkvError, ValueError):
            self._fail()

    def ended(self, load: Load, until: Position) -> None:
        """All has been loaded; `until` is where the log was afterwards. Call `reach` next."""
        if self._load is not load:
            return
        if load.is_opened:
            load.until = until
        else:  # what was there is gone
            self._fail()

    def reach(self, position: Position) -> None:
        """The log was read up to here, with all entries before it."""
        load = self._load
        if load is None or load.until is None or position < load.until:
            return
        assert load.staged is not None
        try:
            for entry in load.kept:
                for change in entry.changes:
                    self._apply(change, load.staged)
        except (LmkvError, ValueError):
            self._fail()
            return
        self._load = None
        self._layout.install(load.staged)
        self.term, self.failure_count = load.term, 0
        if load.is_stale:
            self.want()
        else:
            self._is_behind, self.instance.synced = False, True

    # --- What the log says ---------------------------------------------------------------------------------------

    def hear(self, entry: Entry) -> bool:
        """Takes in what is said of the instance; returns whether that changed what is known of it."""
        if self.is_closed or entry.epoch != self.instance.said.epoch:
            return False
        if entry.kind is EntryKind.COMPLETE:
            self._hear_complete(entry.term)
            return False
        load = self._load
        if entry.kind is EntryKind.GONE:
            self._hear_gone(entry.term)
            return False
        if load is not None and entry.term == (load.term or entry.term):
            load.keep(entry)
        if entry.term != self.term:
            return False
        if entry.kind is EntryKind.CHANGES:
            return self._apply_entry(entry)
        if load is None:
            self.want()
        return False

    def _hear_complete(self, term: int) -> None:
        if term > self._announced_term:
            self._announced_term, self.is_hopeless = term, False
        known = max(self.term, self._load.term if self._load else 0)
        if term > known and not (self._load is not None and not self._load.term):
            self.want()

    def _hear_gone(self, term: int) -> None:
        self._ended_term = max(self._ended_term, term)
        if self._load is not None and self._load.term == term:
            self._abandon()
        if self.term == term:  # the instance may have gone to another coordinator, so what it held stays
            self._unsettle()

    def _apply_entry(self, entry: Entry) -> bool:
        try:
            for change in entry.changes:
                self._apply(change)
        except (LmkvError, ValueError):
            self._fail()
            return True
        if self._load is None and not self.is_wanting:
            self._compare(entry)
        return True

    def _compare(self, entry: Entry) -> None:
        instance_id = self.instance.said.instance_id
        for tier, digest in entry.digest_by_tier().items():
            known = self._layout.digest(instance_id, tier)
            if known != digest:
                self.difference = (
                    f"instance {instance_id} holds {digest.chunk_count} chunks in tier {tier}, the layout map has "
                    f"{known.chunk_count} or other ones"
                )
                if self._doubted_term == entry.term != self._given_up_term:
                    self.is_hopeless, self._given_up_term = True, entry.term
                self._doubted_term = entry.term
                self.want()
                return

    # --- Inside --------------------------------------------------------------------------------------------------

    def _apply(self, change: Change, staged: Snapshot | None = None) -> None:
        where = (change.tier, change.admitted, change.evicted, change.partial_token_counts)
        chunk_size, fingerprint = change.chunk_size, change.fingerprint
        if staged is not None:
            self._layout.apply_staged(staged, *where, chunk_size=chunk_size, fingerprint=fingerprint)
        else:
            instance_id = self.instance.said.instance_id
            self._layout.apply(instance_id, *where, chunk_size=chunk_size, fingerprint=fingerprint)

    def _fail(self) -> None:
        self.failure_count += 1
        self.want()

    def _unsettle(self) -> None:
        self.instance.synced = False
        self._unsettles(self.instance)

    def _abandon(self) -> None:
        load, self._load = self._load, None
        if load is not None and load.staged is not None:
            self._layout.discard(load.staged)
