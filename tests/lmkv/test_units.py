from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmkv.units import format_bytes, format_duration, format_rate, parse_gib, parse_seconds


@pytest.mark.parametrize(
    ("written", "gib"),
    [
        (5, 5.0),
        (5.0, 5.0),
        ("5", 5.0),
        ("5GB", 5.0),
        (" 5 gb ", 5.0),
        ("1.5GB", 1.5),
        ("512MB", 0.5),
        ("512 MiB", 0.5),
        ("512Mi", 0.5),
        ("512M", 0.5),
        ("64KB", 64 / 1024**2),
        ("1TB", 1024.0),
        ("1073741824B", 1.0),
        (0, 0.0),
    ],
)
def test_a_size_without_unit_is_in_gib_and_every_unit_is_binary(written: object, gib: float) -> None:
    assert parse_gib(written) == gib


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (60, 60.0),
        ("60", 60.0),
        (0.2, 0.2),
        ("60s", 60.0),
        ("500ms", 0.5),
        ("100ms", 0.1),
        ("100 us", 0.0001),
        ("2m", 120.0),
        ("1.5H", 5400.0),
        ("1d", 86400.0),
    ],
)
def test_a_duration_without_unit_is_in_seconds(written: object, seconds: float) -> None:
    assert parse_seconds(written) == seconds


NO_NUMBERS = ["", "five", "GB", "1.2.3", "-5", "5 5", "nan", "inf", float("nan"), float("inf"), 10**400, "1e999"]


@pytest.mark.parametrize("written", [*NO_NUMBERS, "5XB", "5iB", "5 seconds", None, True, [5]])
def test_what_is_no_size_is_refused(written: object) -> None:
    with pytest.raises(ValueError):
        parse_gib(written)


@pytest.mark.parametrize("written", [*NO_NUMBERS, "5 weeks", "5GB", None, False, {}])
def test_what_is_no_duration_is_refused(written: object) -> None:
    with pytest.raises(ValueError):
        parse_seconds(written)


@settings(deadline=None)
@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False, max_value=1e300))
def test_a_number_written_out_reads_back_exactly(number: float) -> None:
    assert parse_gib(repr(number)) == number
    assert parse_seconds(repr(number)) == number


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (64 << 10, "64.0 KiB"),
        (50 << 20, "50.0 MiB"),
        (645 << 20, "0.63 GiB"),
        (5 << 30, "5.00 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_sizes_read_well(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_rates_are_always_in_gib_per_second() -> None:
    assert format_rate(645 << 20, 0.0412) == "15.3 GiB/s"
    assert format_rate(1 << 30, 0.5) == "2 GiB/s"
    assert format_rate(1 << 20, 1) == "0.000977 GiB/s"
    assert format_rate(1 << 20, 0) == "- GiB/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.000085, "85 us"),
        (0.0412, "41.2 ms"),
        (1.534, "1.53 s"),
        (125, "2 m 5 s"),
        (11_400, "3 h 10 m"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
