"""Prompts that were routed count as held by their instance, for a time and up to a number."""

from __future__ import annotations

from lmkv.keys import KEY_BYTES
from lmkv_server.proxy.routing.pools import TTL_SECONDS, RecentPicks


def keys(text: str) -> bytes:
    return b"".join(letter.encode().rjust(KEY_BYTES, b"-") for letter in text)


def test_the_longest_common_begin_counts_for_the_last_instance_that_has_it() -> None:
    recent = RecentPicks(ttl_seconds=10)
    recent.add(keys("abc"), "one", now=0)
    recent.add(keys("axy"), "two", now=1)
    assert recent.matches(keys("abcd"), now=2) == {"one": 3}
    assert recent.matches(keys("axyz"), now=2) == {"two": 3}
    assert recent.matches(keys("aq"), now=2) == {"two": 1}
    assert recent.matches(keys("q"), now=2) == {}
    assert recent.matches(b"", now=2) == {}


def test_picks_expire_and_the_newest_counts() -> None:
    recent = RecentPicks(ttl_seconds=10)
    recent.add(keys("abc"), "one", now=0)
    recent.add(keys("ab"), "two", now=5)
    assert recent.matches(keys("abc"), now=10) == {"two": 2}
    recent.add(keys("z"), "three", now=11)
    assert recent.matches(keys("abc"), now=11) == {"two": 2}, "dropping an old pick keeps the keys of a newer one"
    assert recent.matches(keys("abc"), now=15) == {}


def test_the_oldest_are_dropped_beyond_the_limit() -> None:
    recent = RecentPicks(max_keys=4)
    recent.add(keys("abc"), "one", now=0)
    recent.add(keys("xy"), "two", now=0)
    assert recent.matches(keys("abc"), now=1) == {}
    assert recent.matches(keys("xy"), now=1) == {"two": 2}


def test_as_many_keys_as_the_limit_are_kept() -> None:
    recent = RecentPicks(max_keys=4)
    recent.add(keys("ab"), "one", now=0)
    recent.add(keys("xy"), "two", now=0)
    assert recent.matches(keys("ab"), now=1) == {"one": 2}
    recent.add(keys("z"), "three", now=0)
    assert recent.matches(keys("ab"), now=1) == {}
    assert recent.matches(keys("xy"), now=1) == {"two": 2}, "what was dropped makes room"
    recent.add(keys("w"), "four", now=0)
    assert recent.matches(keys("xy"), now=1) == {"two": 2}
    recent.add(keys("v"), "five", now=0)
    assert recent.matches(keys("xy"), now=1) == {}, "and is counted no longer"


def test_a_match_ends_at_the_first_chunk_that_was_routed_nowhere() -> None:
    recent = RecentPicks()
    recent.add(keys("abc"), "one", now=0)
    assert recent.matches(keys("aqbc"), now=1) == {"one": 1}


def test_a_pick_counts_until_its_time_is_up() -> None:
    recent = RecentPicks()
    recent.add(keys("a"), "one", now=1)
    assert recent.matches(keys("a"), now=1 + TTL_SECONDS - 0.1) == {"one": 1}
    assert recent.matches(keys("a"), now=1 + TTL_SECONDS) == {}


def test_a_prompt_of_which_a_later_chunk_has_expired_matches_up_to_it() -> None:
    recent = RecentPicks(ttl_seconds=10)
    recent.add(keys("abc"), "one", now=0)
    recent.add(keys("a"), "one", now=5)
    assert recent.matches(keys("abc"), now=12) == {"one": 1}


def test_expired_picks_are_dropped_before_newer_ones_expire() -> None:
    recent = RecentPicks(ttl_seconds=10)
    recent.add(keys("abc"), "one", now=0)
    recent.add(keys("xy"), "two", now=10)
    assert recent._instances.keys() == {keys("x"), keys("y")}
