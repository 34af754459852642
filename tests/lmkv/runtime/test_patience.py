"""How long a lookup may take, and whom it is sent to."""

from __future__ import annotations

import pytest

from lmkv.runtime.patience import MOST_SECONDS, SHARE, Silence, worth_seconds


@pytest.mark.parametrize(
    ("token_count", "tokens_per_second", "seconds"),
    [
        (1000, 1000, SHARE),
        (100, 1000, SHARE / 10),
        (10**9, 1000, MOST_SECONDS),
        (1000, 0, 0.0),  # the rate is not known
        (0, 1000, 0.0),
        (-8, 1000, 0.0),  # vLLM has more than the prompt
    ],
)
def test_an_answer_is_worth_a_share_of_what_it_may_save(
    token_count: int, tokens_per_second: int, seconds: float
) -> None:
    assert worth_seconds(token_count, tokens_per_second) == pytest.approx(seconds)


def test_a_bound_of_the_user_holds() -> None:
    assert worth_seconds(10**9, 1000, 0.3) == 0.3


def test_silence_outlasts_what_is_worth_less() -> None:
    silence = Silence()
    assert not silence
    assert not silence.outlasts(0.0, 100.0)
    silence.begin(10.0)
    silence.begin(11.0)
    assert silence
    assert silence.outlasts(1.0, 11.0), "it began with the first question"
    assert not silence.outlasts(1.5, 11.0)
    silence.end()
    assert not silence.outlasts(0.0, 11.0)


def test_a_broken_connection_outlasts_everything() -> None:
    silence = Silence()
    silence.broken()
    silence.begin(10.0)
    assert silence.outlasts(1e9, 10.0)
    silence.end()
    assert not silence
