"""Places have a share per caller, and holders that wait give way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv.errors import Full, TooManyRequests
from lmkv.runtime.places import Places, client_of, most_of


def filled(places: Places[str], caller: str, *, waits: bool = False) -> int:
    """Takes places until there is none for this caller, or it displaces a holder. Returns how many it got."""
    for number in range(places.limit + 1):
        try:
            if places.take(f"{caller}-{number}", caller, waits=waits) is not None:
                return number
        except Full:
            return number
    raise AssertionError("there is no limit")


@pytest.mark.parametrize(("limit", "share"), [(64, 16), (64, 32), (1000, 500), (1024, most_of(1024))])
def test_a_caller_has_its_share_and_leaves_places_to_the_next(limit: int, share: int) -> None:
    places = Places[str]("places", limit, share)
    counts = [filled(places, caller) for caller in "abc"]
    assert counts[0] == share
    assert 0 < counts[2] <= counts[1] <= counts[0]
    with pytest.raises(TooManyRequests, match=f"has {share} of {limit} places"):
        places.check("a")
    places.release("a-0")
    places.release("a-0")
    assert places.count("a") == share - 1


def test_few_places_have_no_share() -> None:
    places = Places[str]("places", 7, most_of(7))
    assert filled(places, "a") == 7
    with pytest.raises(Full, match="all 7 places are taken"):
        places.check("b")


def test_holders_that_wait_give_way_oldest_first_of_the_caller_that_has_most() -> None:
    places = Places[str]("places", 8, 6)
    assert filled(places, "a", waits=True) == 6
    assert not places.is_waiting("a-0"), "it has given way"
    places.take("b-0", "b", waits=True)
    places.take("b-1", "b", waits=True)
    places.settle("a-1")
    assert places.take("c-0", "c") == "a-2"
    places.wait("a-3")
    assert places.take("c-1", "c") == "a-4"
    assert places.take("c-1", "c") is None, "it has a place"
    assert "a-1" in places
    assert "b-0" in places


def test_a_caller_whose_holders_all_stay_displaces_none() -> None:
    places = Places[str]("places", 8, 4)
    assert filled(places, "a") == 4
    places.take("b", "b", waits=True)
    for waits in (False, True):
        with pytest.raises(TooManyRequests):
            places.take("a", "a", waits=waits)
    assert "b" in places


@given(st.lists(st.tuples(st.sampled_from("twsr"), st.integers(0, 9), st.sampled_from("abc")), max_size=200))
def test_limits_hold_and_nothing_is_left(steps: list[tuple[str, int, str]]) -> None:
    places = Places[int]("places", 6, 4)
    held: dict[int, str] = {}
    for step, holder, caller in steps:
        try:
            if step in "tw" and (lost := places.take(holder, caller, waits=step == "w")) is not None:
                assert held.pop(lost, None) is not None
        except Full:
            continue
        if step in "tw":
            held.setdefault(holder, caller)
        elif step == "s":
            places.settle(holder)
        else:
            places.release(holder)
            held.pop(holder, None)
        assert set(places) == set(held)
        assert len(places) <= 6
        for one in "abc":
            assert places.count(one) == list(held.values()).count(one) <= 4
    for holder in list(held):
        places.release(holder)
    assert not places._counts
    assert not places._waiting
    assert places._waiting_count == 0


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("unix", "unix"),
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str, client: str) -> None:
    assert client_of(address) == client
