"""An engine's device buffer as the node sees it: who may lend one, and what workers say of a read, put together."""

from __future__ import annotations

import pytest

from lmkv import rpc
from lmkv.errors import BadMessage, EngineNotFound, LmkvError, Unreachable
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.cache.host import HostTier
from lmkv_server.node.handoff.device_buffer import DeviceBuffers, WorkerRead
from lmkv_server.node.sessions.sessions import EngineSessions
from tests.support.specs import small_spec

SPEC = small_spec()
SIZE = 16 * SPEC.chunk_bytes


class Lent:
    """The buffers of a node with an engine of two workers."""

    def __init__(self) -> None:
        self.lost: list[HostTier] = []
        self.engines = EngineSessions(HostTier(SIZE))
        self.session = self.engines.attach("engine", SPEC, worker_count=2)
        self.buffers = DeviceBuffers(self.engines, SIZE, verify=True, on_close=self.lost.append)

    def lend(self, rank: int, size_bytes: int = SIZE, engine_id: str = "engine") -> None:
        self.buffers.lend(pb.BufferPart(engine_id=engine_id, rank=rank, buffer_size_bytes=size_bytes))


def done(*checksums: int) -> pb.BufferReadResult:
    return pb.BufferReadResult(checksums=checksums, stopped=True)


def failed(*, stopped: bool) -> pb.BufferReadResult:
    return pb.BufferReadResult(status=rpc.to_status(Unreachable("it is gone")), stopped=stopped)


# ---- who may lend one -------------------------------------------------------------------------------------------


def test_a_buffer_is_there_when_all_workers_have_lent_their_part() -> None:
    lent = Lent()
    lent.lend(1)
    assert lent.buffers.find(SPEC) is None
    lent.lend(0)
    buffer = lent.buffers.find(SPEC)
    assert buffer
    assert (buffer.tier.size_bytes, buffer.tier.region) == (SIZE, 1)
    assert lent.buffers.with_tier(buffer.tier) is buffer
    assert lent.buffers.tier_of("engine") is buffer.tier
    assert lent.buffers.find(small_spec(layer_count=4)) is None


@pytest.mark.parametrize(
    ("rank", "size_bytes", "error"),
    [(2, SIZE, "rank 2"), (-1, SIZE, "rank -1"), (0, SIZE, "before"), (1, SIZE // 2, "for rank 1"), (1, 0, "0 bytes")],
)
def test_a_part_that_cannot_be_is_refused(rank: int, size_bytes: int, error: str) -> None:
    lent = Lent()
    lent.lend(0)
    with pytest.raises(BadMessage, match=error):
        lent.lend(rank, size_bytes)


def test_oversized_buffers_and_buffers_of_unknown_engines_are_refused() -> None:
    lent = Lent()
    with pytest.raises(BadMessage, match="takes no handoffs"):
        lent.lend(0, SIZE + 4096)
    with pytest.raises(EngineNotFound):
        lent.lend(0, engine_id="unknown")


def test_a_lost_buffer_is_reported_once_and_not_lent_again_by_that_engine() -> None:
    lent = Lent()
    lent.lend(0)
    lent.lend(1)
    buffer = lent.buffers.find(SPEC)
    assert buffer
    lent.buffers.close(buffer)
    lent.buffers.close(buffer)
    assert lent.lost == [buffer.tier]
    with pytest.raises(BadMessage, match="before"):
        lent.lend(0)
    lent.buffers.remove("engine")
    lent.buffers.remove("engine")
    assert lent.lost == [buffer.tier]
    assert lent.buffers.with_tier(buffer.tier) is None


def test_of_two_engines_of_one_spec_neither_is_chosen() -> None:
    lent = Lent()
    lent.lend(0)
    lent.lend(1)
    other = lent.engines.attach("other", SPEC)
    assert lent.buffers.find(SPEC) is None
    lent.engines.detach(other)
    assert lent.buffers.find(SPEC)


# ---- one read ---------------------------------------------------------------------------------------------------


async def test_a_read_is_done_when_all_workers_are_and_their_sums_add_up() -> None:
    stops: list[int] = []
    read = WorkerRead([0, 1], 2, lambda: stops.append(1))
    read.report(1, done(2**64 - 1, 5))
    assert not read.outcome.done()
    assert not stops
    read.report(0, done(3, 7))
    assert await read.outcome == [2, 12]
    assert stops == [1]
    assert read.stopped


async def test_one_worker_that_fails_fails_the_read_and_the_last_to_stop_ends_it() -> None:
    stops: list[int] = []
    read = WorkerRead([0, 1], 1, lambda: stops.append(1))
    read.report(0, failed(stopped=False))
    with pytest.raises(Unreachable, match="gone"):
        await read.outcome
    read.report(1, done(1))
    assert not stops
    read.report(0, pb.BufferReadResult(stopped=True))
    read.report(0, pb.BufferReadResult(stopped=True))
    assert stops == [1]


async def test_a_read_that_cannot_finish_is_stopped_once() -> None:
    stops: list[int] = []
    read = WorkerRead([0], 1, lambda: stops.append(1))
    read.fail(LmkvError("the buffer is gone"))
    read.stop()
    read.stop()
    assert stops == [1]
    with pytest.raises(LmkvError, match="buffer is gone"):
        await read.outcome


@pytest.mark.parametrize("result", [done(), done(1, 2), pb.BufferReadResult(checksums=[1])])
async def test_a_word_of_a_read_that_makes_no_sense_is_refused(result: pb.BufferReadResult) -> None:
    read = WorkerRead([0], 1, lambda: None)
    with pytest.raises(BadMessage, match="checksum per chunk"):
        read.report(0, result)


async def test_reads_of_a_buffer_that_is_closed_have_failed_and_stopped() -> None:
    lent = Lent()
    lent.lend(0)
    lent.lend(1)
    buffer = lent.buffers.find(SPEC)
    assert buffer
    stops: list[int] = []
    buffer._reads[1] = read = WorkerRead([0, 1], 1, lambda: stops.append(1))
    lent.buffers.remove("engine")
    assert stops == [1], "what it would write into is not lent any more"
    with pytest.raises(Unreachable, match="closed"):
        await read.outcome
    assert read.stopped
