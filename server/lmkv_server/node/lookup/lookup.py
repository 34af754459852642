"""A lookup of one prompt: in the pool, then in tier after tier.

The longest hit is found where it is known which items are there. Of a prompt of one part of which hits need every
chunk, the first chunks without a gap are the hit; a count of chunks does not show which other hits are possible.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from lmkv.keys import part_key
from lmkv.prompt import Hit, Prompt, Tail, first_missing, match, prefix_count
from lmkv.tiers import HANDOFF, OWN, Run
from lmkv_server.node.cache.events import PartialChunks
from lmkv_server.node.cache.host import Chunk, HostTier
from lmkv_server.node.lookup.found import Found
from lmkv_server.node.tiers.base import Needs, Presence, SecondaryTier, deadline_at

MIN_GAIN_TOKENS = 16
"""A tail is brought into the pool only if it has this many tokens more than the best one that is nearer."""
MAX_CANDIDATES = 1024
"""Maximum number of tails that a tier is asked for, the longest first."""
POOL = 0
"""The source of items in the pool; tiers have the numbers from 1 on, in the order in which they were asked."""
ABSENT = 255
_HELD_UP_TO = [bytes(source <= last for source in range(256)) for last in range(ABSENT)]
"""A translation table for each last source that counts: 1 for sources up to it, 0 for the others."""


class PoolHeld:
    """The items of a prompt that the pool holds."""

    def __init__(self, pool: HostTier, index: PartialChunks, prompt: Prompt) -> None:
        self._pool = pool
        self._index = index
        self._prompt = prompt

    def prefix(self, part: int, count: int) -> int:
        if not part:
            return self._pool.prefix_length(self._prompt.keys[:count], self._prompt.spec.fingerprint)
        return next((chunk for chunk in range(count) if not self._has(part, chunk)), count)

    def flags(self, part: int, start: int, stop: int) -> bytes:
        prompt = self._prompt
        keys = [prompt.key(part, chunk) for chunk in range(start, stop)] if part else prompt.keys[start:stop]
        return self._pool.flags(keys, prompt.spec.fingerprint)

    def tails(self, chunk_count: int) -> Iterable[Tail]:
        for tail in self._prompt.tails(chunk_count, self._index.index):
            chunks = self.chunks_of(chunk_count, tail)
            if all(chunk is not None and chunk.token_count == tail.stored_token_count for chunk in chunks):
                yield tail

    def chunks_of(self, chunk_count: int, tail: Tail) -> list[Chunk | None]:
        """The parts of a tail behind the first chunks, each None if the pool does not have it."""
        keys = (part_key(tail.key, part) for part in self._prompt.tail_parts(chunk_count, tail))
        found = [self._pool.get(key) for key in keys]
        return [chunk if chunk and chunk.fingerprint == self._prompt.spec.fingerprint else None for chunk in found]

    def _has(self, part: int, chunk: int) -> bool:
        found = self._pool.get(self._prompt.key(part, chunk))
        return found is not None and found.fingerprint == self._prompt.spec.fingerprint


@dataclass(frozen=True, kw_only=True, slots=True)
class _TierTail:
    chunk_count: int
    tail: Tail
    source: int
    presence: Presence


class _Grid:
    """The place of each item of a prompt: the pool, a tier, or none."""

    def __init__(self, pool: PoolHeld, prompt: Prompt) -> None:
        self._pool = pool
        self.prompt = prompt
        self.items = prompt.all_items()
        self._sources = bytearray([ABSENT]) * len(self.items)
        self.last_source = ABSENT - 1
        """Sources behind this one do not count."""
        self.tier_tail: _TierTail | None = None

    def place(self, source: int, indices: Iterable[int]) -> None:
        """These items are in a source. An earlier source stays."""
        sources = self._sources
        for index in indices:
            if sources[index] > source:
                sources[index] = source

    def place_pool(self, hit: Hit) -> None:
        """Notes what the pool has: of its own longest hit, which has all of its items, and of longer ones."""
        self._sources[:] = self._sources.replace(bytes([POOL]), bytes([ABSENT]))
        for part in range(len(self.prompt.spec.parts)):
            own, beyond = self.prompt.chunks_in(hit, part), self.prompt.chunks_beyond(hit.chunk_count, part)
            self._sources[self._at(part, own.start) : self._at(part, own.stop)] = bytes(len(own))
            asked = beyond[bisect_left(beyond, own.stop) :]
            held = self._pool.flags(part, asked[0], asked[-1] + 1) if asked else b""
            if 1 in held:
                self.place(POOL, [self._at(part, chunk) for chunk in asked if held[chunk - asked[0]]])

    def absent(self, chunk_count: int) -> list[int]:
        """The items that hits of more chunks than these need, and that no source has."""
        found: list[int] = []
        for part in range(len(self.prompt.spec.parts)):
            first, sources = self._at(part, 0), self._sources
            needed = self.prompt.chunks_beyond(chunk_count, part)
            found += [first + chunk for chunk in needed if sources[first + chunk] == ABSENT]
        return found

    def sources(self, hit: Hit) -> bytes:
        """The source of each item of a hit without its tail."""
        return b"".join(self._row(part, hit) for part in range(len(self.prompt.spec.parts)))

    def size_bytes(self, source: int, hit: Hit) -> int:
        """Bytes of the items of a hit without its tail that a source has."""
        spec, total = self.prompt.spec, 0
        for part in range(len(spec.parts)):
            row, item_bytes = self._row(part, hit), spec.part_bytes(part)
            total += row.count(source) * item_bytes
            if row.endswith(bytes([source])):  # the last chunk may have fewer tokens
                total += spec.part_bytes(part, self.prompt.tokens_of(hit.chunk_count - 1, hit)) - item_bytes
        return total

    def sources_of_chunks(self, start: int, stop: int, part: int = 0) -> bytes:
        return bytes(self._sources[self._at(part, start) : self._at(part, stop)])

    def _row(self, part: int, hit: Hit) -> bytes:
        needed = self.prompt.chunks_in(hit, part)
        return self.sources_of_chunks(needed.start, needed.stop, part)

    def _at(self, part: int, chunk: int) -> int:
        return part * len(self.prompt) + chunk

    # --- As `Held` ---

    def prefix(self, part: int, count: int) -> int:
        """As `Held.prefix`."""
        absent = self.flags(part, 0, count).find(0)
        return absent if absent >= 0 else count

    def flags(self, part: int, start: int, stop: int) -> bytes:
        """As `Held.flags`."""
        return self.sources_of_chunks(start, stop, part).translate(_HELD_UP_TO[self.last_source])

    def tails(self, chunk_count: int) -> Iterable[Tail]:
        """As `Held.tails`: those in the pool, and the one that a tier has."""
        found = list(self._pool.tails(chunk_count))
        if self.tier_tail and self.tier_tail.chunk_count == chunk_count:
            found.append(self.tier_tail.tail)
        return sorted(found, key=lambda one: -one.token_count)


class PromptLookup:
    """One lookup: `ask` the tiers if it is not complete, then take the `result`. One event loop owns it."""

    def __init__(self, pool: HostTier, index: PartialChunks, prompt: Prompt, most_bytes: int) -> None:
        """`most_bytes`: the items of a hit have at most this many together."""
        self.prompt = prompt
        self.most_bytes = most_bytes
        self._tier = pool
        self._index = index
        self._pool = PoolHeld(pool, index, prompt)
        self._grid: _Grid | None = None
        self._asked: list[tuple[SecondaryTier, Presence]] = []
        self._refused: tuple[Run, ...] = ()
        self._used: set[Chunk] | None = None
        """The chunks that this lookup has used."""
        self._own = match(prompt, self._pool, most_bytes)
        end = prompt.end(self._own)
        self.is_complete = end == prompt.end(Hit(len(prompt))) and not prompt.may_end_behind(len(prompt))
        """Whether the pool has every item of a hit of the whole prompt."""
        if prompt.tokens is not None and prompt.tokens.size == end:
            self.is_complete = True

    @property
    def own_bytes(self) -> int:
        """Bytes of the hit that the pool had when this lookup began."""
        return self.prompt.size_bytes(self._own)

    # --- Handoffs ------------------------------------------------------------------------------------------------

    def first_absent(self) -> tuple[int, int]:
        """The first item of a hit of all chunks that the pool lacks, and the number of its items."""
        if self.prompt.spec.matches_prefixes:
            return self._own.chunk_count, len(self.prompt)
        items = self.prompt.items(Hit(len(self.prompt)))
        first = next((at for at in range(len(items)) if not self._pool_has(*items.at(at))), len(items))
        return first, len(items)

    def handed(self, count: int) -> Found | None:
        """The hit that the pool and the next `count` items make, which a handoff brings; None if they make none.

        Counts as a use of its items in the pool.
        """
        first, total = self.first_absent()
        prompt = self.prompt
        if prompt.spec.matches_prefixes:
            hit = Hit(first + count)
        elif first + count == total and prompt.size_bytes(Hit(len(prompt))) <= self.most_bytes:
            hit = Hit(len(prompt))
        else:
            return None
        items = prompt.items(hit)
        others = () if prompt.spec.matches_prefixes else range(first + 1, total)
        own = {*range(first), *(at for at in others if self._pool_has(*items.at(at)))}
        sources = bytes(POOL if at in own else ABSENT for at in range(len(items)))
        return self._located(Found(prompt=prompt, hit=hit), sources, {ABSENT: HANDOFF})

    def _pool_has(self, part: int, chunk: int) -> bool:
        return self._pool.flags(part, chunk, chunk + 1)[0] == 1

    # --- Tiers ---------------------------------------------------------------------------------------------------

    async def ask(
        self, tiers: Sequence[SecondaryTier], tokens_per_second: float = 0.0, *, deadline: float | None = None
    ) -> None:
        """Asks each tier for the items that a longer hit needs and those before it do not hold, then for longer tails.

        A hit that takes longer to bring than to compute is left out, if the engine's prefill rate is known: not 0.
        Raises nothing but for cancellation.
        """
        prompt = self.prompt
        grid = self._grid = _Grid(self._pool, prompt)
        grid.place_pool(self._own)
        for at, tier in enumerate(tiers):
            wanted = self._wanted(grid)
            if not wanted:
                break
            if not tier.usable:
                continue
            needs = Needs(
                spec=prompt.spec,
                keys=grid.items.keys,
                indices=wanted,
                in_order=prompt.spec.matches_prefixes,
                root=prompt.root if prompt.may_end_behind(0) else None,
                items=grid.items,
                deadline=deadline_at(tiers, at, deadline),
            )
            presence = await tier.lookup(needs)
            self._asked.append((tier, presence))
            grid.place(len(self._asked), presence.indices)
        self._choose(grid, tokens_per_second)
        await self._ask_for_tails(grid, tiers, tokens_per_second, deadline)

    def _wanted(self, grid: _Grid) -> list[int]:
        """The absent items that hits longer than the present one would need, unless that has the most bytes."""
        present = match(self.prompt, grid, self.most_bytes)
        if self._limited_count(grid, present):
            return []
        return grid.absent(present.chunk_count)

    def _choose(self, grid: _Grid, tokens_per_second: float) -> None:
        """Leaves out the tiers behind the last tier that saves time."""
        if tokens_per_second <= 0:
            return
        best, best_hit, saved = 0, Hit(), float("-inf")
        most = Hit()
        for last in range(len(self._asked) + 1):
            grid.last_source = last
            most = match(self.prompt, grid, self.most_bytes)
            seconds = self._expected_seconds(grid, most)
            gained = self.prompt.end(most) / tokens_per_second - seconds
            if gained >= saved:
                best, best_hit, saved = last, most, gained
        grid.last_source = best if most != best_hit else ABSENT - 1
        if most.chunk_count > best_hit.chunk_count:
            names = self._tiers_of_chunks(grid, best_hit.chunk_count, most.chunk_count)
            self._refused = tuple(Run(tier=name, chunk_count=len([*run])) for name, run in groupby(names))

    def _tiers_of_chunks(self, grid: _Grid, start: int, stop: int) -> list[str]:
        """The tiers of the refused chunks; empty names if chunks have several parts, whose tiers differ."""
        if not self.prompt.spec.matches_prefixes:
            return [""] * (stop - start)
        return [self._asked[source - 1][0].name if source else OWN for source in grid.sources_of_chunks(start, stop)]

    def _expected_seconds(self, grid: _Grid, hit: Hit) -> float:
        """Estimates the seconds that bringing the items of a hit takes, of tiers where that is known."""
        sizes = [grid.size_bytes(number, hit) for number in range(1, len(self._asked) + 1)]
        return sum(
            tier.expected_seconds(presence, size_bytes) or 0.0
            for (tier, presence), size_bytes in zip(self._asked, sizes, strict=True)
            if size_bytes
        )

    async def _ask_for_tails(
        self, grid: _Grid, tiers: Sequence[SecondaryTier], tokens_per_second: float, deadline: float | None
    ) -> None:
        """Asks the tiers for longer tails, each after those before it.

        Behind the chunks that are there of parts of which hits need every one, and behind the present hit: of windows
        the one may be there and not the other.
        """
        prompt = self.prompt
        if prompt.tokens is None:
            return
        for end in dict.fromkeys((prefix_count(prompt, grid), match(prompt, grid, self.most_bytes).chunk_count)):
            for at, tier in enumerate(tiers):
                hit = match(prompt, grid, self.most_bytes)
                if prompt.end(hit) == prompt.tokens.size or not prompt.may_end_behind(end):
                    break
                if tier.usable:
                    least = prompt.end(hit) - prompt.end(Hit(end)) + MIN_GAIN_TOKENS
                    until = deadline_at(tiers, at, deadline)
                    await self._ask_for_tail(grid, tier, Hit(end), least, tokens_per_second, until)

    async def _ask_for_tail(
        self,
        grid: _Grid,
        tier: SecondaryTier,
        full: Hit,
        least_count: int,
        tokens_per_second: float,
        deadline: float | None,
    ) -> None:
        """Asks one tier for a tail of at least this many tokens behind full chunks."""
        prompt, end = self.prompt, full.chunk_count
        candidates: Sequence[Tail] = prompt.tails(end, self._index.index) if tier.is_local else ()
        digests = b""
        known = next((presence for one, presence in self._asked if one is tier), Presence())
        if known.partial_lengths and known.end == end:
            candidates = prompt.partials(end, known.partial_lengths)
            if min(known.partial_lengths[-1], prompt.next_tokens(end).size) >= least_count:
                digests = prompt.prefixes(end)
        longer = [one for one in candidates if one.token_count >= least_count and self._has_windows(grid, end, one)]
        longer = longer[:MAX_CANDIDATES]
        if not longer and not digests:
            return
        needs = Needs(
            spec=prompt.spec,
            keys=[one.key for one in longer],
            indices=range(len(longer)),
            in_order=False,
            any_of=True,
            root=prompt.parent(end),
            prefix_digests=digests,
            deadline=deadline,
        )
        presence = await tier.lookup(needs)
        tail = presence.beginning or (longer[presence.indices[0]] if presence.indices else None)
        if tail is None or tail.token_count < least_count or not prompt.can_end_in(end, tail):
            return
        if not self._has_windows(grid, end, tail):
            return
        parts = prompt.tail_parts(end, tail)
        size_bytes = sum(prompt.spec.part_bytes(part, tail.stored_token_count) for part in parts)
        seconds = tier.expected_seconds(presence, size_bytes)
        gained_count = tail.token_count - (least_count - MIN_GAIN_TOKENS)
        if tokens_per_second > 0 and seconds is not None and seconds > gained_count / tokens_per_second:
            return
        if prompt.size_bytes(Hit(end, tail)) > self.most_bytes:
            return
        if all(one is not tier for one, _ in self._asked):
            self._asked.append((tier, Presence(is_answered=presence.is_answered)))
        source = next(number for number, (one, _) in enumerate(self._asked, start=1) if one is tier)
        grid.tier_tail = _TierTail(chunk_count=end, tail=tail, source=source, presence=presence)

    def _has_windows(self, grid: _Grid, chunk_count: int, tail: Tail) -> bool:
        """Whether the full chunks are there that a hit with this tail needs of windows."""
        return first_missing(self.prompt, grid, Hit(chunk_count, tail)) is None

    # --- The result ----------------------------------------------------------------------------------------------

    def result(self, *, is_use: bool = True) -> Found:
        """The longest hit. Counts as a use of its items in the pool, if it `is_use`."""
        unanswered = [tier.name for tier, presence in self._asked if not presence.is_answered]
        grid = self._grid
        if grid is None:  # nothing has changed since this lookup began
            return self._in_pool(is_use=is_use)
        grid.place_pool(match(self.prompt, self._pool, self.most_bytes))
        hit = match(self.prompt, grid, self.most_bytes)
        found = Found(
            prompt=self.prompt,
            hit=hit,
            refused=self._refused if hit.chunk_count < len(self.prompt) else (),
            unanswered=unanswered,
            limited_count=self._limited_count(grid, hit) if hit.chunk_count < len(self.prompt) else 0,
            prefix_count=self._prefix_count(grid, hit),
        )
        sources = self._with_tail_sources(grid, hit) if hit.tail else grid.sources(hit)
        names = {number: one.name for number, (one, _) in enumerate(self._asked, start=1)}
        return self._located(found, sources, names, is_use=is_use)

    def _in_pool(self, *, is_use: bool) -> Found:
        """The hit in the pool."""
        prompt, hit, get = self.prompt, self._own, self._tier.get
        limited_count = self._limited_count(self._pool, hit) if hit.chunk_count < len(prompt) else 0
        prefix = self._prefix_count(self._pool, hit)
        found = Found(prompt=prompt, hit=hit, limited_count=limited_count, prefix_count=prefix)
        found.own = [chunk for key in found.items.keys if (chunk := get(key))]
        if is_use:
            self._use(found)
        return found

    def _use(self, found: Found) -> None:
        """Notes a use of the chunks in the pool, once for each."""
        chunks = [*found.own, *found.behind] if found.behind else found.own
        if self._used is None:
            prompt = self.prompt
            absent = prompt.keys[found.hit.chunk_count :] if prompt.spec.matches_prefixes else ()
            self._tier.use(chunks, absent)
            self._used = set(chunks)
        elif more := [chunk for chunk in chunks if chunk not in self._used]:
            self._tier.use(more)
            self._used.update(more)

    def _limited_count(self, held: PoolHeld | _Grid, hit: Hit) -> int:
        """Counts the chunks by which `most_bytes` shortens a hit. A prefix that has room for one more is not matched
        again."""
        if self.prompt.spec.matches_prefixes and self.prompt.size_bytes(Hit(hit.chunk_count + 1)) <= self.most_bytes:
            return 0
        return max(0, match(self.prompt, held).chunk_count - hit.chunk_count)

    def _prefix_count(self, held: PoolHeld | _Grid, hit: Hit) -> int:
        """Counts the chunks that the hit would have if all windows were there; 0 if it has them."""
        if self.prompt.spec.window_interval == 1:  # engines store all windows
            return 0
        count = prefix_count(self.prompt, held)
        return count if count > hit.chunk_count else 0

    def _with_tail_sources(self, grid: _Grid, hit: Hit) -> bytes:
        """The sources of the items of a hit with a tail, whose parts are all in one place."""
        assert hit.tail
        one = grid.tier_tail
        is_from_tier = one is not None and one.tail is hit.tail
        source = one.source if one is not None and is_from_tier else POOL
        full, items = iter(grid.sources(hit)), self.prompt.items(hit)
        return bytes(source if items.at(at)[1] == hit.chunk_count else next(full) for at in range(len(items)))

    def _located(self, found: Found, sources: bytes, names: dict[int, str], *, is_use: bool = True) -> Found:
        """The hit with its chunks in the pool and the runs of its other items."""
        keys = found.items.keys
        chunks = {at: self._tier.get(keys[at]) for at, source in enumerate(sources) if source == POOL}
        own_count = next((at for at, source in enumerate(sources) if source != POOL), len(sources))
        own = [chunk for at in range(own_count) if (chunk := chunks[at])]
        behind = [chunk for at, chunk in chunks.items() if at >= own_count and chunk]
        runs = tuple(
            Run(tier=OWN if source == POOL else names[source], chunk_count=len([*run]))
            for source, run in groupby(sources[own_count:])
        )
        found.own, found.behind, found.runs = own, behind, runs
        found.sources, found.answers = sources, self._answers(found.hit)
        if is_use:
            self._use(found)
        return found

    def _answers(self, hit: Hit) -> dict[str, Presence]:
        """Returns the answer of each tier, about the tail of the hit too."""
        tail = self._grid.tier_tail if self._grid else None
        answers = {tier.name: presence for tier, presence in self._asked}
        if tail and tail.tail is hit.tail:
            tier, presence = self._asked[tail.source - 1]
            answers[tier.name] = presence.with_tail(tail.presence, hit.chunk_count)
        return answers
