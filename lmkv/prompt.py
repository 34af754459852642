"""Prompts, their items, and their hits: the one model that engines, nodes and coordinators match prompts by. Pure.

An *item* is one part of one chunk of a prompt (`lmkv.spec`), under a key of its own; of a model with one kind of
layers the items are the chunks. A hit ends behind some full chunks of the prompt, or inside the chunk behind these: in
its *tail*, a chunk that begins with the prompt's next tokens. `match` finds the longest hit all of whose items are
held.

                      chunk 0     chunk 1     chunk 2   tail
    full attention  │ ▒▒▒▒▒▒▒▒▒ │ ▒▒▒▒▒▒▒▒▒ │ ▒▒▒▒▒▒▒▒▒ │ ▒▒▒ │
    sliding window                          │     ▒▒▒▒▒ │ ▒▒▒ │   ▒ what the hit reads: its items have that
                                                              └─ end
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from lmkv.end_index import EndIndex
from lmkv.keys import (
    KEY_BYTES,
    ChunkKey,
    Tokens,
    join_keys,
    part_key,
    partial_keys,
    prefix_digests,
    split_keys,
)
from lmkv.spec import ALL, KvSpec

MAX_BEGINNINGS = 256
"""Maximum number of chunks that begin as a prompt does and that a lookup considers, by most tokens in common."""
MAX_JUMPS = 16
"""Hits that `match` tries one by one before it tries all others at once."""

_NO_EXTRAS: Mapping[int, bytes] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """A chunk that begins with a prompt's next tokens behind full chunks of it."""

    key: ChunkKey
    token_count: int
    """The prompt's tokens that it begins with."""
    stored_token_count: int


class Hit(NamedTuple):
    """The end of a hit."""

    chunk_count: int = 0
    """Chunks of the prompt, from the first one on."""
    tail: Tail | None = None
    """A chunk behind them, which the prompt itself does not have."""


NO_HIT = Hit()


class Prompt:
    """The chunks of a prompt under one spec. Keys of parts are computed when they are first asked for."""

    def __init__(
        self,
        spec: KvSpec,
        keys: bytes | Sequence[ChunkKey],
        *,
        token_count: int = 0,
        root: ChunkKey | None = None,
        tokens: Tokens | None = None,
        extras: Mapping[int, bytes] = _NO_EXTRAS,
    ) -> None:
        """`keys` are those of the prompt's chunks, 16 bytes each or in a list; the last one may be partial.

        They have `token_count` tokens; 0 if all are full. `tokens`, the first ones of the prompt or all, `root` and
        `extras` are what keys are computed from, if they are known: hits may then have tails.
        """
        self.spec = spec
        self.root = root
        self.tokens = tokens
        self._packed = keys if isinstance(keys, bytes) else None
        self._listed = None if isinstance(keys, bytes) else keys
        self._count = len(keys) // KEY_BYTES if isinstance(keys, bytes) else len(keys)
        self._token_count = token_count or self._count * spec.chunk_size
        self._extras = extras
        self._part_keys: dict[int, list[ChunkKey | None]] = {}

    def __len__(self) -> int:
        """Chunks that have keys."""
        return self._count

    def first(self, chunk_count: int) -> Prompt:
        """This prompt without the keys behind its first chunks."""
        if chunk_count >= self._count:
            return self
        keys = self.keys[:chunk_count]
        return Prompt(self.spec, keys, root=self.root, tokens=self.tokens, extras=self._extras)

    def ending_with(self, key: ChunkKey) -> Prompt:
        """The same prompt, with another chunk that has its last tokens."""
        keys = self.packed[:-KEY_BYTES] + key
        return Prompt(
            self.spec,
            keys,
            token_count=self._token_count,
            root=self.root,
            tokens=self.tokens,
            extras=self._extras,
        )

    @property
    def packed(self) -> bytes:
        """The keys of the chunks, 16 bytes each."""
        if self._packed is None:
            self._packed = join_keys(self._listed or ())
        return self._packed

    @property
    def keys(self) -> Sequence[ChunkKey]:
        if self._listed is None:
            self._listed = split_keys(self._packed or b"", limit=self._count)
        return self._listed

    def key(self, part: int, chunk: int) -> ChunkKey:
        if not part:
            return self._key(chunk)
        keys = self._part_keys.get(part)
        if keys is None:
            keys = self._part_keys[part] = [None] * self._count
        key = keys[chunk]
        if key is None:
            key = keys[chunk] = part_key(self._key(chunk), part)
        return key

    def _key(self, chunk: int) -> ChunkKey:
        """The key of a chunk; the others need not be split for it."""
        if self._listed is not None:
            return self._listed[chunk]
        return ChunkKey((self._packed or b"")[chunk * KEY_BYTES : (chunk + 1) * KEY_BYTES])

    def has_keys(self, part: int, start: int, stop: int) -> bool:
        """Whether the keys of one part of the chunks from `start` to `stop` are computed."""
        return not part or (part in self._part_keys and None not in self._part_keys[part][start:stop])

    def packed_keys(self, part: int, start: int, stop: int) -> bytes:
        """The keys of one part of the chunks from `start` to `stop`, 16 bytes each."""
        if not part:
            return self.packed[start * KEY_BYTES : stop * KEY_BYTES]
        return b"".join([self.key(part, chunk) for chunk in range(start, stop)])

    def end(self, hit: Hit) -> int:
        """The tokens of a hit."""
        if hit.tail is None:
            return min(hit.chunk_count * self.spec.chunk_size, self._token_count)
        return hit.chunk_count * self.spec.chunk_size + hit.tail.token_count

    def items(self, hit: Hit) -> Items:
        """The items of a hit, part by part."""
        end, size = self.end(hit), self.spec.chunk_size
        return Items(self, [part.needed(end, size) for part in self.spec.parts], hit)

    def chunks_in(self, hit: Hit, part: int) -> range:
        """The chunks of one part that a hit needs, without its tail."""
        needed = self.spec.parts[part].needed(self.end(hit), self.spec.chunk_size)
        return range(min(needed.start, hit.chunk_count), min(needed.stop, hit.chunk_count))

    def chunks_beyond(self, chunk_count: int, part: int) -> Sequence[int]:
        """The chunks of one part that hits of more chunks than these need, ascending."""
        rule, size = self.spec.parts[part], self.spec.chunk_size
        if chunk_count >= self._count:
            return range(0)
        needed = range(rule.needed(self.end(Hit(chunk_count + 1)), size).start, self._count)
        if not rule.begins_at_multiples:
            return needed  # each of these hits needs the last one of its chunks
        return [chunk for chunk in needed if chunk in rule.needed(self.end(Hit(chunk + 1)), size)]

    def item_count(self, hit: Hit) -> int:
        """The number of items of a hit."""
        if self.spec.matches_prefixes:
            return hit.chunk_count + (hit.tail is not None)
        end, size = self.end(hit), self.spec.chunk_size
        return sum(len(part.needed(end, size)) for part in self.spec.parts)

    def all_items(self) -> Items:
        """All parts of all chunks."""
        return Items(self, [range(self._count)] * len(self.spec.parts), Hit(self._count))

    def size_bytes(self, hit: Hit) -> int:
        """Bytes of the items of a hit."""
        end, spec, total = self.end(hit), self.spec, 0
        if end == hit.chunk_count * spec.chunk_size and spec.matches_prefixes:
            return hit.chunk_count * spec.chunk_bytes
        for number, part in enumerate(spec.parts):
            if needed := part.needed(end, spec.chunk_size):
                last = spec.part_bytes(number, self.tokens_of(needed.stop - 1, hit))
                total += (len(needed) - 1) * spec.part_bytes(number) + last
        return total

    def tokens_of(self, chunk: int, hit: Hit) -> int:
        """Tokens of a chunk of a hit, as it is stored."""
        if hit.tail and chunk == hit.chunk_count:
            return hit.tail.stored_token_count
        return min(self.spec.chunk_size, self._token_count - chunk * self.spec.chunk_size)

    # --- Tails ---------------------------------------------------------------------------------------------------

    def may_end_behind(self, chunk_count: int) -> bool:
        """Whether a hit may have a tail behind the first chunks: the prompt has tokens there."""
        return (
            self.tokens is not None
            and self.spec.ends_anywhere
            and self.tokens.size > chunk_count * self.spec.chunk_size
        )

    def parent(self, chunk: int) -> ChunkKey | None:
        """The key before a chunk: the root before the first one, if it is known."""
        return self._key(chunk - 1) if chunk else self.root

    def next_tokens(self, chunk_count: int) -> Tokens:
        """The tokens of the chunk behind the first chunks."""
        begin = chunk_count * self.spec.chunk_size
        return (np.empty(0, np.uint32) if self.tokens is None else self.tokens)[begin : begin + self.spec.chunk_size]

    def prefixes(self, chunk_count: int) -> bytes:
        """The prefix digests of the tokens behind the first chunks."""
        parent = self.parent(chunk_count)
        assert parent is not None
        return prefix_digests(parent, self.next_tokens(chunk_count), self._extras.get(chunk_count, b""))

    def partials(self, chunk_count: int, lengths: Iterable[int]) -> list[Tail]:
        """The partial chunks of these lengths that the prompt's tokens behind the first chunks have, longest first.

        `lengths` must ascend. The chunk of `keys` itself is left out.
        """
        tokens, parent = self.next_tokens(chunk_count), self.parent(chunk_count)
        fitting = [length for length in lengths if 0 < length <= tokens.size and length < self.spec.chunk_size]
        if not fitting or parent is None:
            return []
        found = partial_keys(parent, tokens, fitting, self._extras.get(chunk_count, b""))
        own = self._key(chunk_count) if chunk_count < self._count else None
        return [
            Tail(key=key, token_count=length, stored_token_count=length)
            for length, key in reversed(found)
            if key != own
        ]

    def tails(self, chunk_count: int, index: EndIndex[Any]) -> Sequence[Tail]:
        """The chunks in an index that have the prompt's tokens behind its first chunks, those with the most first."""
        if not self.may_end_behind(chunk_count):
            return ()
        parent = self.parent(chunk_count)
        if parent is None:
            return ()
        lengths, has_digests = index.lengths(parent), index.has_digests(parent)
        found = self.partials(chunk_count, lengths) if lengths else []
        if not has_digests:
            return found
        known = {one.key for one in found}
        own = self._key(chunk_count) if chunk_count < self._count else None
        for token_count, chunk in islice(index.beginning_as(parent, self.prefixes(chunk_count)), MAX_BEGINNINGS):
            key = ChunkKey(chunk if isinstance(chunk, bytes) else chunk[-1])
            tail = Tail(key=key, token_count=token_count, stored_token_count=index.token_count(chunk))
            if key not in known and key != own and self.can_end_in(chunk_count, tail):
                known.add(key)
                found.append(tail)
        return sorted(found, key=lambda one: (-one.token_count, one.stored_token_count))

    def tail_parts(self, chunk_count: int, tail: Tail) -> Sequence[int]:
        """The parts of a tail behind the first chunks that a hit needs."""
        end = chunk_count * self.spec.chunk_size + tail.token_count
        return [number for number, part in enumerate(self.spec.parts) if part.first_token(end) < end]

    def can_end_in(self, chunk_count: int, tail: Tail) -> bool:
        """Whether a tail behind the first chunks has all that a hit reads of it: of a window that is shorter than a
        chunk, a longer chunk has only its own last tokens."""
        if tail.token_count == tail.stored_token_count:
            return True
        base = chunk_count * self.spec.chunk_size
        end = base + tail.token_count
        return all(
            part.first_kept(tail.stored_token_count) <= max(0, part.first_token(end) - base) for part in self.spec.parts
        )


class Items:
    """Some or all items of a prompt. An index means the same everywhere: part by part, in prompt order."""

    def __init__(self, prompt: Prompt, ranges: Sequence[range], hit: Hit) -> None:
        """`ranges` has the chunks of each part. A chunk behind those of the `hit` is its tail."""
        self.prompt = prompt
        self.spec = prompt.spec
        self.hit = hit
        self._ranges = ranges
        self._starts = [0, *accumulate(map(len, ranges))]

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def keys(self) -> Sequence[ChunkKey]:
        if self.spec.matches_prefixes:
            (chunks,) = self._ranges
            if self.hit.tail:
                return [*self.prompt.keys[: self.hit.chunk_count], self.hit.tail.key]
            whole = chunks.start == 0 and chunks.stop == len(self.prompt)
            return self.prompt.keys if whole else self.prompt.keys[chunks.start : chunks.stop]
        return _ItemKeys(self)

    @cached_property
    def parts(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self._ranges)), [len(chunks) for chunks in self._ranges])

    @cached_property
    def chunks(self) -> NDArray[np.int64]:
        return np.concatenate([np.arange(chunks.start, chunks.stop) for chunks in self._ranges])

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Bytes of each item; of a chunk with more tokens than the prompt has there, all."""
        sizes: list[int] = []
        for part, chunks in enumerate(self._ranges):
            if chunks:
                sizes += [self.spec.part_bytes(part)] * (len(chunks) - 1)
                sizes.append(self.spec.part_bytes(part, self.prompt.tokens_of(chunks.stop - 1, self.hit)))
        return sizes

    @property
    def mean_bytes(self) -> int:
        """Average size of the items."""
        return max(1, sum(self.sizes) // max(1, len(self)))

    def at(self, index: int) -> tuple[int, int]:
        """Part and chunk of an item."""
        part = bisect_right(self._starts, index) - 1
        return part, self._ranges[part][index - self._starts[part]]

    def key(self, index: int) -> ChunkKey:
        part, chunk = self.at(index)
        if self.hit.tail and chunk == self.hit.chunk_count:
            return part_key(self.hit.tail.key, part)
        return self.prompt.key(part, chunk)

    def token_count(self, index: int) -> int:
        """Tokens of the chunk that the item is a part of, as it is stored."""
        return self.prompt.tokens_of(self.at(index)[1], self.hit)

    def parent(self, index: int) -> ChunkKey | None:
        """Returns the key of the item that must stay as long as this one; see `parent_of`."""
        part, chunk = self.at(index)
        tail = self.hit.tail if chunk == self.hit.chunk_count else None
        own, previous = tail.key if tail else self.prompt.key(0, chunk), self.prompt.parent(chunk)
        is_partial = self.token_count(index) < self.spec.chunk_size
        return parent_of(self.spec, part, own, previous, has_ends=is_partial)

    def below(self, chunk_count: int) -> Collection[int]:
        """The items of the prompt's first chunks."""
        if len(self._ranges) == 1:
            (chunks,) = self._ranges
            return range(max(0, min(chunk_count, chunks.stop) - chunks.start))
        return frozenset(np.flatnonzero(self.chunks < chunk_count).tolist())

    def in_hit(self, hit: Hit) -> list[int]:
        """The items that a hit needs, without its tail."""
        found: list[int] = []
        for part, (start, chunks) in enumerate(zip(self._starts, self._ranges, strict=False)):
            needed = self.prompt.chunks_in(hit, part)
            first, stop = max(needed.start, chunks.start), min(needed.stop, chunks.stop)
            found += range(start + first - chunks.start, start + stop - chunks.start)
        return found

    def used_with(self, found: Sequence[int], asked: Sequence[int]) -> Sequence[ChunkKey]:
        """The keys that a hit uses if a tier that was asked for some items has found some of them.

        Those that were found and, of parts of which a hit needs every chunk, the chunks before them or before the first
        one that was asked for.
        """
        if self.spec.matches_prefixes:
            return self.keys[: found[-1] + 1 if found else asked[0] if asked else 0]
        every = np.array([part.rule == ALL for part in self.spec.parts])[self.parts]
        at = np.array(asked, np.int64)
        first = self.chunks[at[every[at]]].min(initial=len(self.prompt))
        last = self.chunks[np.array(found, np.int64)].max(initial=-1)
        used = every & ((self.chunks <= last) | ((self.chunks < first) & (at.size > 0)))
        used[np.array(found, np.int64)] = True
        return [self.keys[index] for index in np.flatnonzero(used)]


class _ItemKeys(Sequence[ChunkKey]):
    """The keys of items, which are computed when they are first asked for."""

    def __init__(self, items: Items) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> ChunkKey: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ChunkKey]: ...
    def __getitem__(self, index: int | slice) -> ChunkKey | Sequence[ChunkKey]:
        if isinstance(index, slice):
            return [self._items.key(one) for one in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._items.key(index % len(self))


def parent_of(
    spec: KvSpec, part: int, chunk_key: ChunkKey, previous: ChunkKey | None, *, has_ends: bool = False
) -> ChunkKey | None:
    """The key of what must not be evicted before a part of a chunk; `previous` is the key of the chunk before it.

    A part leaves before part 0 of its chunk, which no hit that needs the part can do without. Part 0 keeps the chunk
    before it if a hit needs every chunk of it, or if prompts end in it (`has_ends`), which are found behind that chunk:
    of other chunks of a sliding window the oldest leave first.
    """
    if part:
        return chunk_key
    return previous if spec.rule == ALL or has_ends else None


# --- Matching ----------------------------------------------------------------------------------------------------


class Held(Protocol):
    """Answers which chunks of a prompt are held: in a pool, by an instance, or in several tiers together."""

    def prefix(self, part: int, count: int) -> int:
        """Counts the chunks of which one part is held, from the first up to the first gap, of the first `count`."""

    def flags(self, part: int, start: int, stop: int) -> bytes:
        """Returns a byte for each chunk from `start` to `stop`: 1 if one part of it is held, else 0."""

    def tails(self, chunk_count: int) -> Iterable[Tail]:
        """The tails behind the first chunks whose `Prompt.tail_parts` are held, those with the most tokens first."""


class HeldKeys:
    """Items that are held, by key. It knows of no tails."""

    def __init__(self, prompt: Prompt, keys: Container[ChunkKey]) -> None:
        self._prompt = prompt
        self._keys = keys

    def prefix(self, part: int, count: int) -> int:
        return next((chunk for chunk in range(count) if self._prompt.key(part, chunk) not in self._keys), count)

    def flags(self, part: int, start: int, stop: int) -> bytes:
        return bytes([self._prompt.key(part, chunk) in self._keys for chunk in range(start, stop)])

    def tails(self, _: int) -> Iterable[Tail]:
        """None."""
        return ()


def match(prompt: Prompt, held: Held, most_bytes: int | None = None) -> Hit:
    """The longest hit all of whose items are held, and together have at most `most_bytes`.

    Of parts of which a hit needs every chunk, the prefix bounds it. For one such part that is the hit: no other chunk
    is looked at.
    """
    count = prefix_count(prompt, held)
    if most_bytes is not None:
        count = min(count, _most_chunks(prompt.spec, most_bytes, count))
    if prompt.spec.matches_prefixes and most_bytes is None and not prompt.may_end_behind(count):
        return Hit(count)
    for _ in range(MAX_JUMPS):
        if hit := _ending_behind(prompt, held, count, most_bytes):
            return hit
        if not count:
            return Hit()
        hit = Hit(count)
        if most_bytes is not None and prompt.size_bytes(hit) > most_bytes:
            count -= 1
            continue
        missing = first_missing(prompt, held, hit)
        if missing is None:
            return hit
        count = missing  # each hit that ends behind this chunk needs it
    return _match_all(prompt, held, count, most_bytes)


def prefix_count(prompt: Prompt, held: Held) -> int:
    """Counts the prompt's first chunks that hits can have by the parts of which hits need every chunk."""
    count = len(prompt)
    for number, part in enumerate(prompt.spec.parts):
        if part.rule == ALL:
            count = held.prefix(number, count)
    return count


def first_missing(prompt: Prompt, held: Held, hit: Hit) -> int | None:
    """The first chunk of the prompt that a hit needs of some window or state, and that is not held."""
    end, size, first = prompt.end(hit), prompt.spec.chunk_size, None
    for number, part in enumerate(prompt.spec.parts):
        if part.rule != ALL:
            start = part.first_token(end) // size
            at = held.flags(number, start, hit.chunk_count).find(0) if start < hit.chunk_count else -1
            if at >= 0 and (first is None or start + at < first):
                first = start + at
    return first


def _most_chunks(spec: KvSpec, most_bytes: int, count: int) -> int:
    """No hit with this many bytes has more chunks; the last one may be smaller than others.

    All `count` may fit, if no part is needed of every chunk: a local chunk that ends with a hit is not needed at all.
    """
    sizes = sum(spec.part_bytes(number) for number, part in enumerate(spec.parts) if part.rule == ALL)
    return most_bytes // sizes + 1 if sizes else count


def _ending_behind(prompt: Prompt, held: Held, count: int, most_bytes: int | None) -> Hit | None:
    """The longest hit with a tail behind the first chunks."""
    for tail in held.tails(count) if prompt.may_end_behind(count) else ():
        hit = Hit(count, tail)
        fits = most_bytes is None or prompt.size_bytes(hit) <= most_bytes
        if fits and first_missing(prompt, held, hit) is None:
            return hit
    return None


def _match_all(prompt: Prompt, held: Held, count: int, most_bytes: int | None) -> Hit:
    """As `match`, of at most `count` chunks: all hits at once, where many are not possible one after the other."""
    spec = prompt.spec
    counts = np.arange(count + 1)
    ends = counts * spec.chunk_size
    ends[-1] = prompt.end(Hit(count))
    possible, sizes = np.ones(counts.size, np.bool_), np.zeros(counts.size, np.int64)
    for number, part in enumerate(spec.parts):
        starts = part.first_needed(ends, spec.chunk_size)
        sizes += np.maximum(counts - starts, 0) * spec.part_bytes(number)
        if part.rule != ALL:
            before = np.concatenate(([0], np.cumsum(np.frombuffer(held.flags(number, 0, count), np.bool_))))
            possible &= before[counts] - before[np.minimum(starts, counts)] == np.maximum(counts - starts, 0)
    if most_bytes is not None:
        sizes[-1] = prompt.size_bytes(Hit(count))
        possible &= sizes <= most_bytes
    found = int(np.flatnonzero(possible)[-1])
    for behind in range(count, found - 1, -1) if prompt.may_end_behind(found) else ():
        if hit := _ending_behind(prompt, held, behind, most_bytes):
            return hit
    return Hit(found)
