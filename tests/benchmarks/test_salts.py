"""How sure an observer of response times is."""

from __future__ import annotations

import pytest

from benchmarks.salts import guess_rate


def test_a_guess_is_chance_for_equal_distributions_and_certain_for_separate_ones() -> None:
    assert guess_rate([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]) == pytest.approx(0.5)
    assert guess_rate([5.0, 6.0], [1.0, 2.0]) == 1
    assert guess_rate([1.0, 2.0], [5.0, 6.0]) == 0
    assert guess_rate([1.0, 3.0], [2.0, 2.0]) == pytest.approx(0.5)
