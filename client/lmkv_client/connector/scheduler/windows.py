"""Chooses the chunks of a prompt whose windows are stored: those that a hit reads with an end that is expected.

chunk          0   1   2   3   4   5   6   7   8   9  10  11
full         │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │ ▒ │
window               │ ▒ │ ▒ │               │ ▒ │ ▒ │ ▒ │ ▒ │
                             └─ another prompt       │       └─ answer
                                had these, too       └─ end of the prompt

Hits are expected to end with a prompt, in its answer, where the node or a hint says that prompts part, and at multiples
of `KvSpec.window_interval`. Where a hit is shorter for want of a window, the engine computes the rest and stores it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from lmkv.spec import KvSpec
from lmkv.v1.chunk_pb2 import PART_RULE_LAST
from lmkv_client.connector.scheduler.request_state import RequestState, WindowChunks


class Windows:
    """The parts of one spec of which not every chunk is stored."""

    def __init__(self, spec: KvSpec) -> None:
        self._spec = spec
        is_sparse = spec.window_interval > 1
        self.parts = [index for index, part in enumerate(spec.parts) if part.rule == PART_RULE_LAST and is_sparse]

    def stored(self, state: RequestState, part: int, stop: int) -> Iterable[int]:
        """The chunks that have not been passed, before `stop`, whose windows are stored: also all that are decoded, and
        those that an audit compares."""
        first = state.store.passed_count
        decoded = range(max(first, state.full_count), stop)
        audited = {index for number, index in state.store.held if number == part and first <= index < stop}
        return sorted(audited.union(self._of_prompt(state, part).between(first, stop), decoded))

    def is_lasting(self, state: RequestState, part: int, chunk: int) -> bool:
        """Whether a window is not superseded by those behind it: it is also that of other prompts."""
        return part in self.parts and chunk in self._of_prompt(state, part).lasting

    def wanted_count(self, state: RequestState, part: int) -> int:
        """Windows that are still to be stored of a prompt, and the one that the answer to its lookup may name."""
        if not state.store.may_store:
            return 0
        first = state.store.passed_count
        wanted = len(self._of_prompt(state, part).between(first, state.full_count))
        return wanted if first or state.store.expected_ends else wanted + self._length(part)

    def _length(self, part: int) -> int:
        """The most chunks of a window that a hit reads which ends with a chunk."""
        kind, size = self._spec.parts[part], self._spec.chunk_size
        return len(kind.needed(kind.span * size, size))

    def _of_prompt(self, state: RequestState, part: int) -> WindowChunks:
        """The chunks of a prompt whose windows are stored."""
        found = state.store.windows.get(part)
        if found is None:
            full, parted = state.full_count, state.store.expected_ends
            lasting = self._before(part, self._spec.shared_ends(full, parted))
            windows = self._before(part, self._spec.expected_ends(full, state.token_count, parted))
            found = WindowChunks(chunks=sorted(chunk for chunk in windows if chunk < full), lasting=lasting)
            state.store.windows[part] = found
        return found

    def _before(self, part: int, ends: Collection[int]) -> frozenset[int]:
        """The chunks whose windows a hit reads that ends after one of these numbers of chunks."""
        kind, size = self._spec.parts[part], self._spec.chunk_size
        return frozenset(chunk for end in ends if end > 0 for chunk in kind.needed(end * size, size))
