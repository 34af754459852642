from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.node.cache.batches import batched


@dataclass(frozen=True)
class Thing:
    size_bytes: int


@given(st.lists(st.builds(Thing, st.integers(0, 10))), st.integers(1, 20), st.integers(1, 5))
def test_nothing_is_lost_and_no_batch_exceeds_its_limit(things: list[Thing], size_bytes: int, max_count: int) -> None:
    cut = list(batched(things, size_bytes, max_count))
    assert [thing for piece in cut for thing in piece] == things
    assert all(0 < len(piece) <= max_count for piece in cut)
    for piece in cut:
        assert sum(thing.size_bytes for thing in piece[:-1]) < size_bytes
    for piece in cut[:-1]:
        assert len(piece) == max_count or sum(thing.size_bytes for thing in piece) >= size_bytes


def test_a_batch_ends_with_the_item_that_reaches_the_size() -> None:
    things = [Thing(size_bytes) for size_bytes in (5, 0, 3, 2, 1)]
    assert list(batched(things, 5)) == [things[:1], things[1:4], things[4:]]
    assert list(batched(things, 1 << 40)) == [things], "without a limit, a batch has any number of items"
