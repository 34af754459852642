"""What the benchmark of SGLang makes of its times."""

from __future__ import annotations

import pytest

from benchmarks.support.meanings import meaning_of
from benchmarks.systems import sglang_copies


def test_direct_copies_are_compared_with_those_through_the_host_pool() -> None:
    rows = {row.name: row for row in sglang_copies.rows_of([0.04], [0.2, 0.3], [0.1, 0.1])}
    assert all(meaning_of(name) for name in rows)
    assert rows["sglang_direct_read_ms"].ratio == pytest.approx((1 / 2 + 1 / 3) / 2)
