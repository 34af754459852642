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

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

from lmkv.keys import ChunkKey
from lmkv_server.node.cache.reuse_times import AGE_COUNT, Record, ReuseTimes

MEMORY = 8
"""Keys of evicted chunks that are remembered, for each chunk that is held."""
MAX_ASKED = 4096
"""Keys that were asked for and are not stored yet, besides one for each chunk that is held; the first are given up."""
USES_COUNT = 8
SIZE_COUNT = 10
"""Numbers of uses, and of a prompt's new chunks, by which chunks are grouped: a group is one of each."""
LAST = SIZE_COUNT - 1
"""What the last chunk of a prompt has as size: often it is partial, and the next turn does not continue it."""
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
