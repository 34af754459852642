from __future__ import annotations

import random

import pytest

from lmkv.keys import ChunkKey
from lmkv.misses import CAPACITY, Loss, LossMemory, MissReason


def key(number: int, head: int | None = None) -> ChunkKey:
    return ChunkKey((number if head is None else head).to_bytes(8, "little") + number.to_bytes(8, "little"))


def test_a_loss_is_remembered_until_the_key_is_held_again() -> None:
    memory = LossMemory(8)
    assert memory.get(key(1)) is None
    memory.add(key(1), "host", MissReason.EVICTED_BY_STORE, 1_700_000_000.125)
    assert memory.get(key(1)) == Loss(tier="host", reason=MissReason.EVICTED_BY_STORE, time=1_700_000_000.125)
    memory.add(key(1), "host", MissReason.CLEARED, 1_700_000_001.0)
    assert memory.get(key(1)) == Loss(tier="host", reason=MissReason.CLEARED, time=1_700_000_001.0)
    assert len(memory) == 1
    memory.discard(key(1))
    memory.discard(key(2))
    assert memory.get(key(1)) is None
    assert len(memory) == 0


def test_the_oldest_loss_of_a_full_set_is_replaced() -> None:
    memory = LossMemory(4)
    for number in range(5):
        memory.add(key(number), "host", MissReason.EVICTED_BY_FETCH, 1000.0 + number)
    assert memory.get(key(0)) is None
    assert [memory.get(key(number)) is not None for number in range(1, 5)] == [True] * 4


def test_a_key_whose_bytes_are_all_zero_is_remembered_and_forgotten() -> None:
    memory = LossMemory(4)
    assert memory.get(key(0)) is None
    memory.add(key(0), "host", MissReason.DAMAGED, 5.0)
    assert memory.get(key(0)) == Loss(tier="host", reason=MissReason.DAMAGED, time=5.0)
    memory.discard(key(0))
    assert memory.get(key(0)) is None


@pytest.mark.parametrize("capacity", [4, 64, 1024])
def test_at_random_it_never_says_more_than_a_dictionary_and_keeps_the_latest(capacity: int) -> None:
    choose = random.Random(capacity)
    memory, known, order = LossMemory(capacity), dict[ChunkKey, Loss](), list[ChunkKey]()
    for step in range(4 * capacity):
        one = key(choose.getrandbits(64)) if not order or choose.random() < 0.7 else choose.choice(order)
        if choose.random() < 0.2:
            memory.discard(one)
            known.pop(one, None)
            continue
        tier, reason = choose.choice(["host", "disk", "third"]), choose.choice(list(MissReason))
        loss = Loss(tier=tier, reason=reason, time=float(step))
        memory.add(one, loss.tier, loss.reason, loss.time)
        known[one] = loss
        order.append(one)
        assert memory.get(one) == loss
        found = {other: memory.get(other) for other in order[-8:]}
        assert all(loss is None or known.get(other) == loss for other, loss in found.items())
    assert len(memory) <= capacity
    recent = [one for one in dict.fromkeys(order[-capacity // 4 :]) if one in known]
    kept = sum(memory.get(one) is not None for one in recent)
    assert kept >= 0.9 * len(recent)


def test_a_memory_has_room_for_the_losses_of_a_large_pool() -> None:
    memory = LossMemory()
    for number in range(CAPACITY):
        memory.add(key(number), "host", MissReason.DROPPED, 1.0 + number)
    assert len(memory) == CAPACITY
