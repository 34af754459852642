"""Promises about bytes: what an engine reads is what an engine stored, and memory has one meaning at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.histories.history import NEVER, History, Record, Violation


def loads_equal_commits(history: History) -> Iterator[Violation]:
    """The bytes of a chunk are those that an engine wrote for its key, before they were read.

    `CommitChunk`: "a chunk that every worker has written". A hold is read again when it ends: its bytes do not change.
    """
    written: dict[tuple[str, str], float] = {}
    for write in history.attempts("Write"):
        name = write.request["key"], write.request["digest"]
        written[name] = min(written.get(name, NEVER), write.start)
    for read in history.of("Read"):
        if written.get((read.request["key"], read.answer["digest"]), NEVER) > read.end:
            yield Violation(
                rule="loads_equal_commits",
                what=f"the bytes of {read.request['key']} are not what was written for it",
                records=(
                    read,
                    *(write for write in history.of("Write") if write.request["key"] == read.request["key"]),
                ),
            )


def extents_have_one_chunk(history: History) -> Iterator[Violation]:
    """An extent of one generation holds one chunk as long as its node lives.

    `HeldChunk.generation`: "increases each time the owner allocates the memory again".
    """
    chunks: dict[tuple[str, int, int], Record] = {}
    for read in history.of("Read"):
        name = read.server, read.request["offset"], read.request["generation"]
        first = chunks.setdefault(name, read)
        if first.request["key"] != read.request["key"] and history.is_one_life(read.server, first.start, read.end):
            yield Violation(
                rule="extents_have_one_chunk",
                what=f"{read.server} has {first.request['key']} and {read.request['key']} at the same extent",
                records=(first, read),
            )


def grants_match_requests(history: History) -> Iterator[Violation]:
    """A grant of `Acquire` has one extent for each chunk in `present`, which are ascending indices of the request."""
    for acquire in history.of("Acquire"):
        present, count = acquire.answer["present"], len(acquire.request["keys"])
        is_ascending = all(one < other for one, other in zip([-1, *present], present, strict=False))
        if not is_ascending or any(index >= count for index in present) or len(present) != acquire.answer["extents"]:
            yield Violation(
                rule="grants_match_requests",
                what=f"the grant does not match the {count} requested chunks",
                records=(acquire,),
            )


def held_extents_are_not_written(history: History) -> Iterator[Violation]:
    """While an engine holds a chunk by a lookup or a load, its extent is not written, and its bytes stay the same.

    `FoundChunks`: "The node holds the chunks of `own` until the engine releases the request." `LoadedChunks`: "held
    there until the engine releases the request". A credit for the extent would be another engine's to write.
    """
    writes: defaultdict[tuple[str, int, int], list[Record]] = defaultdict(list)
    for write in history.attempts("Write"):
        writes[write.server, write.request["epoch"], write.request["offset"]].append(write)
    reads: defaultdict[tuple[str, int], list[Record]] = defaultdict(list)
    for read in history.of("Read"):
        reads[read.actor, read.request["offset"]].append(read)
    for hold in history.of("Hold"):
        for offset in hold.request["offsets"]:
            written = [
                write
                for write in writes[hold.server, hold.request["epoch"], offset]
                if hold.start <= write.start < hold.end
            ]
            if written:
                what = f"{hold.actor} holds the extent at {offset}, which is written meanwhile"
                yield Violation(rule="held_extents_are_not_written", what=what, records=(hold, written[0]))
            seen = [read for read in reads[hold.actor, offset] if hold.start <= read.start and read.end <= hold.end]
            other = next((read for read in seen if read.answer["digest"] != seen[0].answer["digest"]), None)
            if other is not None:
                what = f"{hold.actor} holds the extent at {offset}, whose bytes change meanwhile"
                yield Violation(rule="held_extents_are_not_written", what=what, records=(hold, seen[0], other))
