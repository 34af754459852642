"""An eviction policy that learns from the tier's own traffic how soon chunks are used again. Pure; no settings.

Chunks are grouped by how often they were used, and by how many new chunks the prompt had that asked for them last; the
last chunk of a prompt is set apart. For each group the policy counts after which time its chunks are used again, or are
not. From these counts follows, for each group and age, the number of hits to expect for the time that a chunk is kept
longer (an index as by Gittins: the best such time counts). The chunk with the lowest index is evicted.
Thereby

- the group that new prompts belong to has a short probation if few of them continue, and a long one if many do;
- prompts of a length that seldom continues leave before others;
- chats in a later turn, and prefixes that are shared, are kept longer, if and only as long as they do return;
- of sessions that are requested in turn and do not all fit, some stay instead of each being evicted before its turn.

Time is the number of chunks that were stored or used. Evicted chunks are remembered for `MEMORY` times as long as
they are kept, so that later uses are learned, too.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from lmkv.keys import ChunkKey

AGE_COUNT = 96
"""Ages have two levels per power of two."""
MAX_SAMPLE = 16384
"""Chunks whose times between uses are counted; a fixed fraction of all keys, chosen by their bits."""
PRIOR = 32.0
"""Chunks that a level of uses is assumed to have in common with all levels, and uses that a size has with all sizes."""
KEPT = 32
"""Times that count at least, for each chunk of the sample: fewer make the index differ by chance."""
FIRST_TIMES = 16
"""Times between uses after which learning begins. It begins again when their number has grown by a sixteenth, or by an
eighth of the sample if that is less: what the first requests teach is used at once."""
GROWTH = 16
SLICE = 1024
"""Chunks of the sample that one step of learning looks at, some 20 µs."""
PRUNED = 64
"""Chunks of the sample that one step of making it smaller looks at."""
_ALL_BITS = (1 << 32) - 1

Counts = NDArray[np.float64]


class Record:
    """A record of a chunk that is held or remembered."""

    __slots__ = ("bits", "group", "size", "slot", "used_at", "uses")

    def __init__(self, key: ChunkKey, uses: int) -> None:
        self.bits = int.from_bytes(key[-4:], "big")
        """Bits of the key, by which it belongs to the sample or not."""
        self.uses = uses
        """Counts uses also while the chunk was evicted: a chunk that is stored again was needed."""
        self.size = 0
        """The level of the new chunks of the prompt that asked for it last; 0 if there were none or none is known."""
        self.group = 0
        self.used_at = 0
        self.slot = -1
        """Its place in the sample; -1 if it is not in it."""


def age_level(age: int) -> int:
    """The level of an age: 0 and 1 below 2, then two per power of two."""
    if age < 2:
        return 0
    bits = age.bit_length()
    return min(2 * bits - 3 + (age >> (bits - 2) & 1), AGE_COUNT - 1)


def age_levels(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    mantissas, bits = np.frexp(ages)
    return np.clip(2 * bits.astype(np.int64) - 3 + (mantissas >= 0.75), 0, AGE_COUNT - 1)


def first_age(level: int) -> int:
    """The lowest age of a level."""
    if level == 0:
        return 0
    bits, upper = divmod(level + 1, 2)
    return (2 + upper) << (bits - 1)


class ReuseTimes:
    """Counts of a sample, and the index that follows from them.

    A group is a level of uses and a size of prompts. How the chance of another use changes with age is learned for each
    level, and by which factor it differs for each size: few sessions suffice for that.
    """

    def __init__(self, uses_count: int, size_count: int = 1) -> None:
        group_count = uses_count * size_count
        self.index = [[0.0] * AGE_COUNT for _ in range(group_count)]
        """The hits per time to expect of a chunk that is kept longer, by group and age."""
        self._shape = uses_count, size_count, AGE_COUNT
        self._sample: list[Record] = []
        self._mask = 0  # which bits of a key are 0 if it belongs to the sample
        self._prune_from = 0  # records before this one may not belong to it any more
        size = group_count * AGE_COUNT
        self._again = array("d", bytes(8 * size))  # by group and age: chunks that were used again
        self._ended = array("d", bytes(8 * size))  # and those, and chunks that were forgotten
        self._used_at = array("q", bytes(8 * MAX_SAMPLE))  # by place in the sample, as the records have them
        self._groups = array("b", bytes(MAX_SAMPLE))
        self._new_count = 0  # times that have ended since learning began
        self._known_count = 0  # and before
        self._learning: Iterator[None] | None = None

    def __len__(self) -> int:
        return len(self._sample)

    def add(self, record: Record) -> None:
        """Takes a new record into the sample if it belongs there. `used` then gives its group and its use."""
        if record.bits & self._mask:
            return
        if len(self._sample) >= MAX_SAMPLE and not self._make_room(record):
            return
        record.slot = len(self._sample)
        self._sample.append(record)

    def used(self, record: Record) -> None:
        """A record of the sample was used: its group and the time of its use have changed."""
        self._used_at[record.slot] = record.used_at
        self._groups[record.slot] = record.group

    def ended(self, record: Record, now: int, *, again: bool) -> None:
        """The time since the last use of a record of the sample has ended, by a use or because it was forgotten."""
        at = record.group * AGE_COUNT + age_level(now - record.used_at)
        self._ended[at] += 1
        if again:
            self._again[at] += 1
        self._new_count += 1

    def remove(self, record: Record) -> None:
        """Removes a record of the sample."""
        last = self._sample.pop()
        if last is not record:
            last.slot = record.slot
            self._sample[last.slot] = last
            self.used(last)
        record.slot = -1

    def learn(self, now: int) -> None:
        """Does a step of learning if one is due; when all are done the index is made from what was counted by then."""
        if self._prune_from:
            self._prune()
        due = max(FIRST_TIMES, min(self._known_count // GROWTH, len(self._sample) // 8))
        if self._learning is None and self._new_count >= due:
            self._known_count += self._new_count
            self._new_count = 0
            self._learning = self._steps(now)
        if self._learning and next(self._learning, self) is self:
            self._learning = None

    def _steps(self, now: int) -> Iterator[None]:
        """Counts times that have ended, and those of the chunks that wait for their next use; then makes the index."""
        size = math.prod(self._shape)
        waiting: Counts = np.zeros(size)
        for start in range(0, len(self._sample), SLICE):
            stop = min(start + SLICE, len(self._sample))
            if start < stop:
                groups = np.frombuffer(self._groups, np.int8)[start:stop].astype(np.int64)
                ages = np.maximum(now - np.frombuffer(self._used_at, np.int64)[start:stop], 0)
                waiting += np.bincount(groups * AGE_COUNT + age_levels(ages), minlength=size)
            yield
        reached = age_level(now) + 1
        again = np.array(self._again).reshape(self._shape)[..., :reached]
        passed = (np.array(self._ended) + waiting).reshape(self._shape)[..., :reached]  # by the age that they reached
        yield
        chances = _chances(again, passed)
        if passed.sum() > KEPT * len(self._sample):  # old times lose weight
            self._halve()
        yield
        for level, of_level in enumerate(chances):
            start = level * len(of_level)
            self.index[start : start + len(of_level)] = _padded(hit_index(of_level))
            yield

    def _halve(self) -> None:
        for counts in (self._again, self._ended):
            np.frombuffer(counts)[:] /= 2

    def _make_room(self, record: Record) -> bool:
        """Begins to halve the sample, which is full; whether there is room for this record by now."""
        if not self._prune_from:
            if self._mask == _ALL_BITS:  # of keys that a client invented
                return False
            self._mask = 2 * self._mask + 1
            self._prune_from = len(self._sample)
            self._halve()
        self._prune()
        return len(self._sample) < MAX_SAMPLE and not record.bits & self._mask

    def _prune(self) -> None:
        """Removes some of the records that do not belong to the sample any more."""
        start = min(self._prune_from, len(self._sample))
        self._prune_from = max(0, start - PRUNED)
        for slot in range(start - 1, self._prune_from - 1, -1):
            if self._sample[slot].bits & self._mask:
                self.remove(self._sample[slot])


_WIDTHS = np.array([float(first_age(level + 1) - first_age(level)) for level in range(AGE_COUNT)])
_LATER = np.triu(np.ones((AGE_COUNT, AGE_COUNT), bool))
"""Whether an age level lies behind another one, by both."""


def _chances(again: Counts, passed: Counts) -> Counts:
    """Returns the probability that a chunk that reaches an age is used again at it, by level of uses, size and age."""
    reached = passed[..., ::-1].cumsum(-1)[..., ::-1]  # as Kaplan and Meier
    of_all = _smooth(again.sum((0, 1))) / (_smooth(reached.sum((0, 1))) + 1)
    of_levels = (_smooth(again.sum(1)) + PRIOR * of_all) / (_smooth(reached.sum(1)) + PRIOR)
    chances: Counts = np.empty_like(again)
    for levels in slice(1), slice(1, None):  # factors differ between chunks that were never used again and others
        expected = (reached[levels] * of_levels[levels, None]).sum((0, 2))
        factors = (again[levels].sum((0, 2)) + PRIOR) / (expected + PRIOR)
        chances[levels] = np.minimum(of_levels[levels, None] * factors[:, None], 1)
    return chances


def _smooth(counts: Counts) -> Counts:
    """The mean of each age and those beside it."""
    summed, width = counts.copy(), np.full(counts.shape[-1], 3.0)
    summed[..., 1:] += counts[..., :-1]
    summed[..., :-1] += counts[..., 1:]
    width[0] -= 1
    width[-1] -= 1
    smooth: Counts = summed / width
    return smooth


def hit_index(chances: Counts) -> Counts:
    """Returns, for each age (the last dimension), the most hits per time of a chunk of that age that is kept up to a
    later age.

    On the curve of probable hits over the time that a chunk is kept on average, this is the steepest line from each
    point to a later one.
    """
    count = chances.shape[-1]
    waiting = np.ones((*chances.shape[:-1], count + 1))
    np.cumprod(1 - chances, -1, out=waiting[..., 1:])
    times = np.zeros_like(waiting)
    np.cumsum(_WIDTHS[:count] * (waiting[..., :-1] + waiting[..., 1:]) / 2, -1, out=times[..., 1:])
    rise = waiting[..., :-1, None] - waiting[..., None, 1:]
    run = np.maximum(times[..., None, 1:] - times[..., :-1, None], 1e-12)
    index: Counts = (rise / run).max(axis=-1, where=_LATER[:count, :count], initial=0.0)
    return index


def _padded(index: Counts) -> list[list[float]]:
    """Rows for all ages; no hits are known of those beyond the last one."""
    padded: list[list[float]] = np.pad(index, ((0, 0), (0, AGE_COUNT - index.shape[-1]))).tolist()
    return padded


MEMORY = 8
"""Keys of evicted chunks that are remembered, for each chunk that is held."""
MAX_ASKED = 4096
"""Keys that were asked for and are not stored yet, besides one for each chunk that is held; the first are given up."""
USES_COUNT = 8
SIZE_COUNT = 10
"""Numbers of uses, and of a prompt's new chunks, by which chunks are grouped: a group is one of each."""
LAST = SIZE_COUNT - 1
"""The size level of the last chunk of a prompt: often it is partial, and the next turn does not continue it."""
MAX_CHOICES = 15
"""Most chunks that are chosen from a group before all groups are compared again; fewer if another has the next one."""

_Line = OrderedDict[ChunkKey, Record]


class Learned:
    """Evicts the chunk with the fewest hits to expect for the time that it is kept."""

    def __init__(self) -> None:
        self._lines: list[_Line] = [OrderedDict() for _ in range(USES_COUNT * SIZE_COUNT)]
        self._records: dict[ChunkKey, Record] = {}  # of chunks in a line, and of those in `_chosen`
        self._chosen: OrderedDict[ChunkKey, None] = OrderedDict()  # in the order in which they were
        self._asked: OrderedDict[ChunkKey, int] = OrderedDict()  # not stored yet, with the size of the prompt
        self._time = 0
        self._times = ReuseTimes(USES_COUNT, SIZE_COUNT)
        self._line: _Line = OrderedDict()  # where choices are made, and from which end
        self._youngest = False
        self._next_rank = _NO_RANK  # of the chunk to choose once this line has none before it
        self._choices = 0  # that are left

    def ask(self, keys: Sequence[ChunkKey], missing: Sequence[ChunkKey]) -> None:
        new_count = len(missing) - sum(1 for _ in takewhile(self._records.__contains__, missing))
        size = min(new_count.bit_length(), LAST - 1)
        for key in keys:
            if record := self._records.get(key):
                record.size = size  # its group follows when it is used, which is next
        for key in missing:
            self._asked[key] = size
        if missing:
            self._asked[missing[-1]] = LAST
        while len(self._asked) > MAX_ASKED + len(self._records) // MEMORY:
            self._asked.popitem(last=False)

    def admit(self, key: ChunkKey) -> None:
        self._touch(key, hit=False)

    def use(self, key: ChunkKey) -> None:
        self._touch(key, hit=True)

    def forget(self, key: ChunkKey) -> None:
        record = self._records.pop(key, None)
        if record:
            self._lines[record.group].pop(key, None)
            self._chosen.pop(key, None)
            if record.slot >= 0:
                self._times.remove(record)

    def choose(self) -> ChunkKey | None:
        if not self._choices or not self._line or self._rank(self._line, youngest=self._youngest) > self._next_rank:
            self._compare()
            if not self._line:
                return None
        self._choices -= 1
        key, _ = self._line.popitem(last=self._youngest)
        self._chosen[key] = None
        while (MEMORY + 1) * len(self._chosen) > MEMORY * (len(self._records) + 1):
            oldest, _ = self._chosen.popitem(last=False)
            record = self._records.pop(oldest)
            if record.slot >= 0:
                self._times.ended(record, self._time, again=False)
                self._times.remove(record)
        return key

    def _touch(self, key: ChunkKey, *, hit: bool) -> None:
        record = self._records.get(key)
        size = self._asked.pop(key, None)
        self._time += 1
        if record is None:
            uses = int(hit)
            record = self._records[key] = Record(key, uses)
            self._times.add(record)
        else:
            if self._lines[record.group].pop(key, None) is None:
                self._chosen.pop(key, None)
            uses = record.uses = record.uses + 1
            if record.slot >= 0:
                self._times.ended(record, self._time, again=True)
        if size is not None:
            record.size = size
        level = uses if uses < 3 else min((uses - 1).bit_length() + 1, USES_COUNT - 1)
        record.group = level * SIZE_COUNT + record.size
        record.used_at = self._time
        if record.slot >= 0:
            self._times.used(record)
        self._lines[record.group][key] = record

    def _compare(self) -> None:
        """Finds the group, and the end of its line, whose chunk has the lowest rank, and the next rank after it."""
        self._times.learn(self._time)
        lowest = self._next_rank = _NO_RANK
        self._line, self._choices = _EMPTY, MAX_CHOICES
        for line in self._lines:
            for youngest in (False, True) if line else ():
                rank = self._rank(line, youngest=youngest)
                if rank < lowest:
                    self._next_rank = lowest
                    lowest, self._line, self._youngest = rank, line, youngest
                elif rank < self._next_rank:
                    self._next_rank = rank

    def _rank(self, line: _Line, *, youngest: bool) -> tuple[float, int]:
        """The index of the chunk at one end of a line; of equal ones the older chunk is chosen."""
        record = line[next(reversed(line) if youngest else iter(line))]
        age = self._time - record.used_at
        if age < 2:
            return self._times.index[record.group][0], record.used_at
        bits = age.bit_length()  # as `age_level`, which takes too long to be called so often
        level = bits + bits - 3 + (age >> (bits - 2) & 1)
        return self._times.index[record.group][level if level < AGE_COUNT else -1], record.used_at


_EMPTY: _Line = OrderedDict()
_NO_RANK = (float("inf"), 0)
