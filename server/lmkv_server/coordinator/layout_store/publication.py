"""What a coordinator publishes of one instance that tells it its chunks. Pure; called by its report stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmkv_server.coordinator.layout_store.content import Change
from lmkv_server.coordinator.layout_store.entry import Entry, EntryKind
from lmkv_server.coordinator.layout_store.owner import Owner


@dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """One thing to publish."""

    entry: Entry
    is_logged: bool = True
    """Whether others are told at once: parts of a snapshot are not."""

    @property
    def owner(self) -> Owner:
        """Whose chunks they are."""
        return self.entry.owner

    @property
    def size_bytes(self) -> int:
        """About what it takes."""
        return 128 + sum(change.size_bytes for change in self.entry.changes)


class Publication:
    """One term of one instance. `tell` is given each note, in order; it must not wait."""

    def __init__(self, owner: Owner, epoch: int, term: int, tell: Callable[[Note], None]) -> None:
        self.owner = owner
        self.epoch = epoch
        self.term = term
        self.is_complete = False
        """Whether the snapshot has been told."""
        self._tell: Callable[[Note], None] | None = tell

    def changed(self, changes: Sequence[Change], digests: Sequence[tuple[int, int, int]] = ()) -> None:
        """Chunks came and went; before `completed`, these are part of the snapshot."""
        if changes or (digests and self.is_complete):
            self._note(EntryKind.CHANGES, changes, digests)

    def completed(self) -> None:
        """The snapshot is in."""
        self.is_complete = True
        self._note(EntryKind.COMPLETE)

    def gone(self) -> None:
        """The instance left; nothing is published afterwards."""
        self._note(EntryKind.GONE)
        self.close()

    def close(self) -> None:
        """Publishes nothing any more. Repeating it is safe."""
        self._tell = None

    def _note(
        self, kind: EntryKind, changes: Sequence[Change] = (), digests: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        if self._tell is None:
            return
        tenant, instance_id = self.owner
        entry = Entry(kind, tenant, instance_id, self.epoch, self.term, list(changes), list(digests))
        self._tell(Note(entry=entry, is_logged=kind is not EntryKind.CHANGES or self.is_complete))
