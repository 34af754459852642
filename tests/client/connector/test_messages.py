"""Messages between the two sides of the connector, and the merge of the ranks' reports."""

from __future__ import annotations

import itertools
import pickle

import pytest

from lmkv_client.connector.messages import (
    ExtentChecksum,
    LoadPlan,
    LoadResult,
    StepPlan,
    StoreResult,
    WorkerReport,
)
from lmkv_client.engine.attachment import Attachment
from lmkv_kernels import ChunkCopy


def test_parts_of_the_ranks_are_added_modulo_two_to_the_64() -> None:
    first = WorkerReport(engine_id="e", stores={0: StoreResult(rank_count=1, checksum=2**64 - 1)}, store_seconds=0.5)
    other = WorkerReport(engine_id="e", stores={0: StoreResult(rank_count=1, checksum=3)}, store_seconds=0.25)
    both = first.aggregate(other)
    assert both.stores == {0: StoreResult(rank_count=2, checksum=2)}
    assert both.store_seconds == 0.5


def test_an_extent_that_one_rank_skipped_is_skipped() -> None:
    first = WorkerReport(engine_id="e", stores={0: StoreResult(rank_count=1, checksum=1)})
    failed = StoreResult(rank_count=1, failed=True)
    other = WorkerReport(engine_id="e", stores={0: failed, 4: failed})
    both = first.aggregate(other)
    assert both.skipped == {0, 4}
    assert (both.stores[0].rank_count, both.stores[4].rank_count) == (2, 1)


def test_an_extent_that_only_the_other_rank_wrote_is_kept() -> None:
    both = WorkerReport(engine_id="e").aggregate(
        WorkerReport(engine_id="e", stores={8: StoreResult(rank_count=1, checksum=5)})
    )
    assert both.stores == {8: StoreResult(rank_count=1, checksum=5)}


def test_loads_are_added_over_the_ranks_and_one_failure_fails_all() -> None:
    first = WorkerReport(engine_id="e", loaded={"r": LoadResult(rank_count=1, size_bytes=10, seconds=0.1)})
    other = WorkerReport(
        engine_id="e",
        loaded={"r": LoadResult(rank_count=1, seconds=0.3, failed=True), "s": LoadResult(rank_count=1, size_bytes=7)},
    )
    both = first.aggregate(other)
    assert both.loaded["r"] == LoadResult(rank_count=2, size_bytes=10, seconds=0.3, failed=True)
    assert both.loaded["s"] == LoadResult(rank_count=1, size_bytes=7)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_stores_count_for_their_attachment_and_loads_have_ended_whichever_rank_lags_behind(
    order: tuple[int, ...],
) -> None:
    reports = [
        WorkerReport(engine_id="new", stores={0: StoreResult(rank_count=1, checksum=1)}),
        WorkerReport(engine_id="new", stores={0: StoreResult(rank_count=1, checksum=2)}),
        WorkerReport(
            engine_id="old",
            stores={0: StoreResult(rank_count=1, checksum=4), 4: StoreResult(rank_count=1, failed=True)},
            loaded={"r": LoadResult(rank_count=1)},
        ),
    ]
    first, second, third = (reports[index] for index in order)
    report = first.aggregate(second).aggregate(third)
    stored = report.for_engine("new")
    assert stored
    assert stored.stores == {0: StoreResult(rank_count=2, checksum=3)}
    assert not stored.skipped
    assert report.loaded == {"r": LoadResult(rank_count=1)}
    assert report.for_engine("older") is None


def test_plans_and_reports_survive_the_way_between_processes() -> None:
    copy = ChunkCopy(offset=4096, extent_tokens=32, token_count=32, block_ids=[7, 9])
    plan = StepPlan(
        attachment=Attachment(engine_id="e", pool_socket="/tmp/s", epoch=3),
        loads=[
            LoadPlan(
                request_id="r",
                copies=[copy],
                sync=True,
                final=True,
                checks=[ExtentChecksum(offset=0, size_bytes=8, checksum=1)],
                failed_blocks=[1],
            )
        ],
        stores=[copy],
    )
    report = WorkerReport(engine_id="e", stores={0: StoreResult(rank_count=1, checksum=2**64 - 1)})
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert pickle.loads(pickle.dumps(report)) == report
