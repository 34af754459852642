"""A lookup of a prompt whose chunks have several parts: in the pool, then in tier after tier.

The longest hit is found where it is known which items are there. A count of chunks from the first on, which is all that
tiers return for chunks of one part, does not show which hits are possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey
from lmkv.spec import ALL, KvSpec
from lmkv.tiers import HANDOFF, OWN, Run
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.cache.prompt_items import PromptItems
from lmkv_server.node.tiers import item_grid
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier, deadline_at
from lmkv_server.node.tiers.hit import Hit, ItemHit
from lmkv_server.node.tiers.item_grid import ItemGrid


class ItemLookup:
    """One lookup: `ask` the tiers if it is not complete, then take the `result`. One event loop owns it."""

    def __init__(self, tier: HostTier, spec: KvSpec, chunk_keys: Sequence[ChunkKey], max_items: int) -> None:
        """`max_items` bounds the items of the prompt; the chunks behind them are not found."""
        self.spec = spec
        self._tier = tier
        self._keys = chunk_keys[: max_items // len(spec.parts)]
        self._asked: list[tuple[SecondaryTier, Presence]] = []
        self._grid = ItemGrid(PromptItems.of_prompt(spec, self._keys))
        self._own_count = self._longest_own()
        self.is_complete = self._own_count == len(self._keys)
        """Whether the pool has every item of a hit of the whole prompt."""

    def handed(self, budget_bytes: int) -> ItemHit:
        """The hit of the whole prompt, whose items that the pool lacks a handoff brings; none if it has too many bytes.

        Counts as a use of its items in the pool. The lookup must not be complete.
        """
        items = PromptItems.of_hit(self.spec, self._keys, len(self._keys))
        if sum(items.sizes) > budget_bytes:
            return ItemHit()
        found = [self._tier.get(key) for key in items.keys]
        own = {index: chunk for index, chunk in enumerate(found) if chunk and items.fits(index, chunk)}
        self._tier.use(list(own.values()))
        own_count = next(index for index in range(len(items)) if index not in own)
        tiers = [OWN if index in own else HANDOFF for index in range(own_count, len(items))]
        return ItemHit(
            chunk_count=len(self._keys),
            own=[own[index] for index in range(own_count)],
            behind=[chunk for index, chunk in own.items() if index > own_count],
            rest=Hit(runs=tuple(Run(tier=tier, chunk_count=len([*run])) for tier, run in groupby(tiers)), items=items),
        )

    async def ask(self, tiers: Sequence[SecondaryTier], budget_bytes: int, *, deadline: float | None = None) -> None:
        """Asks each tier for the items that a longer hit needs and those before it do not hold. Raises nothing.

        Longer than the present hit whose items fit into the budget.
        """
        self._place_own(budget_bytes)
        for at, tier in enumerate(tiers):
            wanted = self._grid.wanted(budget_bytes)
            if not wanted:
                break
            if not tier.usable:
                continue
            items = self._grid.items
            needs = Needs(
                spec=self.spec,
                keys=items.keys,
                indices=wanted,
                in_order=False,
                items=items,
                deadline=deadline_at(tiers, at, deadline),
            )
            presence = await tier.lookup(needs)
            self._asked.append((tier, presence))
            self._grid.place(len(self._asked), presence.indices)

    def result(self, budget_bytes: int, tokens_per_second: float = 0.0) -> ItemHit:
        """The longest hit whose items fit into the budget and are not slower to bring than to compute.

        Counts as a use of its items in the pool. `tokens_per_second` is the engine's prefill rate, 0 if unknown.
        """
        if not self._asked:  # nothing has changed since this lookup began
            is_small = self._grid.hit_bytes(self._own_count) <= budget_bytes
            return self._located(self._own_count if is_small else self._longest_own(budget_bytes), 0)
        own_count = self._place_own(budget_bytes)
        most = count = self._grid.longest(budget_bytes=budget_bytes)
        for last in range(len(self._asked), -1, -1):
            count = self._grid.longest(last, budget_bytes)
            if not self._is_slow(count, count - own_count, tokens_per_second):
                break
        return self._located(count, most - count)

    def _is_slow(self, chunk_count: int, gained_count: int, tokens_per_second: float) -> bool:
        """Whether bringing a hit's items takes longer than computing what it has more than the pool's own."""
        if tokens_per_second <= 0 or not gained_count:
            return False
        items = PromptItems.of_hit(self.spec, self._keys, chunk_count)
        sources = self._grid.sources_of_hit(chunk_count)
        total = 0.0
        for number, (tier, presence) in enumerate(self._asked, start=1):
            size_bytes = sum(items.sizes[index] for index in np.flatnonzero(sources == number))
            total += (tier.expected_seconds(presence, size_bytes) or 0.0) if size_bytes else 0.0
        return total > gained_count * self.spec.chunk_size / tokens_per_second

    def _located(self, chunk_count: int, refused_count: int) -> ItemHit:
        unanswered = [tier.name for tier, presence in self._asked if not presence.is_answered]
        if not chunk_count:
            return ItemHit(refused_count=refused_count, unanswered=unanswered)
        items = PromptItems.of_hit(self.spec, self._keys, chunk_count)
        sources = self._grid.sources_of_hit(chunk_count) if self._asked else np.full(len(items), item_grid.OWN)
        chunks = [self._tier.get(items.keys[index]) for index in np.flatnonzero(sources == item_grid.OWN)]
        own = [chunk for chunk in chunks if chunk]
        self._tier.use(own)
        elsewhere = np.flatnonzero(sources != item_grid.OWN)
        own_count = int(elsewhere[0]) if elsewhere.size else len(items)
        return ItemHit(
            chunk_count=chunk_count,
            own=own[:own_count],
            behind=own[own_count:],
            rest=Hit(runs=self._runs(sources[own_count:]), presences=self._presences(sources), items=items),
            refused_count=refused_count,
            unanswered=unanswered,
        )

    def _runs(self, sources: NDArray[np.int64]) -> tuple[Run, ...]:
        names = [OWN, *(tier.name for tier, _ in self._asked)]
        return tuple(Run(tier=names[source], chunk_count=len([*run])) for source, run in groupby(sources.tolist()))

    def _presences(self, sources: NDArray[np.int64]) -> dict[str, Presence]:
        """What each tier said, by indices of the hit's items."""
        return {
            tier.name: replace(
                presence,
                asked=np.flatnonzero(sources >= number).tolist(),
                indices=np.flatnonzero(sources == number).tolist(),
            )
            for number, (tier, presence) in enumerate(self._asked, start=1)
        }

    # --- The pool ------------------------------------------------------------------------------------------------

    def _place_own(self, budget_bytes: int) -> int:
        """Notes what the pool has of its longest hit that fits into the budget, and of longer ones; its chunks."""
        count = self._longest_own(budget_bytes)
        items = self._grid.items
        own = np.flatnonzero(items.in_hit(count)).tolist()
        self._grid.place_own([*own, *(index for index in self._grid.beyond(count) if self._has(items, index))])
        return count

    def _longest_own(self, budget_bytes: int | None = None) -> int:
        """Chunks of the longest hit of items in the pool. From the end on, so that few keys are computed."""
        end = len(self._keys)
        for number, part in enumerate(self.spec.parts):
            if part.rule == ALL:
                end = next((chunk for chunk in range(end) if not self._has_part(number, chunk)), end)
        while end > 0:
            if budget_bytes is not None and self._grid.hit_bytes(end) > budget_bytes:
                end -= 1
                continue
            missing = self._missing_chunk(end)
            if missing is None:
                break
            end = missing  # each hit that ends behind it needs it
        return end

    def _missing_chunk(self, chunk_count: int) -> int | None:
        """A chunk that a hit needs of some windows or states, and the pool lacks."""
        for number, part in enumerate(self.spec.parts):
            if part.rule != ALL:
                for chunk in reversed(part.needed(chunk_count * self.spec.chunk_size, self.spec.chunk_size)):
                    if not self._has_part(number, chunk):
                        return chunk
        return None

    def _has_part(self, part: int, chunk: int) -> bool:
        return self._has(self._grid.items, part * len(self._keys) + chunk)

    def _has(self, items: PromptItems, index: int) -> bool:
        chunk = self._tier.get(items.keys[index])
        return chunk is not None and items.fits(index, chunk)
