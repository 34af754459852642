"""The explorer finds the shortest list of actions that breaks a promise, and says when there is none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.models.explorer import Action, explore


class Jugs:
    """Jugs of three and five litres: the promise that none ever has four litres is wrong."""

    forbidden = 4

    def __init__(self) -> None:
        self.litres = {"small": 0, "large": 0}

    def actions(self) -> Sequence[Action]:
        return [(name, jug) for name in ("fill", "empty", "pour") for jug in self.litres]

    def apply(self, action: Action) -> None:
        name, jug = str(action[0]), str(action[1])
        other = "large" if jug == "small" else "small"
        sizes = {"small": 3, "large": 5}
        if name == "pour":
            moved = min(self.litres[jug], sizes[other] - self.litres[other])
            self.litres[jug] -= moved
            self.litres[other] += moved
        else:
            self.litres[jug] = sizes[jug] if name == "fill" else 0

    def fingerprint(self) -> object:
        return self.litres

    def check(self) -> None:
        assert self.forbidden not in self.litres.values(), "four litres"

    def settle(self) -> None:
        """Nothing is under way."""


class SoundJugs(Jugs):
    forbidden = 6


class LateJugs(Jugs):
    """The promise is checked only when all has ended."""

    def check(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        super().check()


def test_a_counterexample_is_a_shortest_one() -> None:
    found = explore(Jugs, depth=20)
    assert found.counterexample is not None
    assert not found.counterexample.settling
    assert "four litres" in str(found.counterexample)
    assert str(found.counterexample).splitlines()[-6:] == [
        "  1. fill(large)",
        "  2. pour(large)",
        "  3. empty(small)",
        "  4. pour(large)",
        "  5. fill(large)",
        "  6. pour(large)",
    ]


def test_what_is_checked_at_the_end_is_checked_in_every_state() -> None:
    found = explore(LateJugs, depth=20)
    assert found.counterexample is not None
    assert found.counterexample.settling
    assert len(found.counterexample.actions) == 6
    assert str(found.counterexample).endswith("  7. settle")


def test_all_states_are_explored_once() -> None:
    found = explore(SoundJugs, depth=100)
    assert (found.counterexample, found.is_complete, found.state_count) == (None, True, 16)
    found = explore(SoundJugs, depth=2)
    assert (found.is_complete, found.depth) == (False, 2)


def test_a_level_that_is_not_finished_in_time_does_not_count() -> None:
    found = explore(SoundJugs, depth=100, limit_seconds=-1)
    assert (found.depth, found.state_count, found.transition_count, found.is_complete) == (0, 1, 0, False)


def test_a_fingerprint_without_a_canonical_form_is_refused() -> None:
    class Addresses(Jugs):
        def fingerprint(self) -> object:
            return self

    found = explore(Addresses, depth=1)
    assert found.counterexample is not None
    with pytest.raises(AssertionError, match="has an address"):
        raise found.counterexample.error
