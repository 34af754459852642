"""Whatever is killed, and whenever: the other engine answers rightly and in time, and what comes back is taken back."""

from __future__ import annotations

import time

import pytest

from lmkv.errors import Unreachable
from tests.engines.faults import HEAL_SECONDS, HELD_TOKENS, REQUEST_TIMEOUT_SECONDS, FaultyPair, check, counting

SHORT_STOP_SECONDS = 0.5
"""A fetch outlasts a holder that stops for less: a load may take much longer."""
VICTIMS = ("coordinator", "node-1", "node-2", "engine-1")


pytestmark = pytest.mark.in_order  # the last tests look at what all have left


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_lookups(pair: FaultyPair, victim: str) -> None:
    held, fresh = pair.stored(), pair.prompt()
    with pair.frozen("coordinator" if victim == "engine-1" else victim):  # so that no lookup is answered
        second, first = pair.ask(pair.second, held), pair.ask(pair.first, fresh)
        time.sleep(0.05)
        pair.kill(victim)
    check(held, second.result(REQUEST_TIMEOUT_SECONDS))
    if victim == "engine-1":
        with pytest.raises(Unreachable):
            first.result(REQUEST_TIMEOUT_SECONDS)
    else:
        check(fresh, first.result(REQUEST_TIMEOUT_SECONDS))
    pair.restart()
    pair.heal()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_a_fetch_from_the_peer(pair: FaultyPair, victim: str) -> None:
    held = pair.stored()
    with counting(pair.second) as grown:
        with pair.frozen("node-1"):
            asked = pair.fetching(held)
            began = time.monotonic()
            pair.kill(victim)
        stopped_seconds = time.monotonic() - began
        check(held, asked.result(REQUEST_TIMEOUT_SECONDS))
        if victim.startswith("node"):
            assert grown("load_failures") == 1
        elif stopped_seconds < SHORT_STOP_SECONDS:  # the fetch does not need it and continues
            assert grown("tier_tokens", "peers") == HELD_TOKENS
    pair.restart()
    pair.heal()


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_during_stores(pair: FaultyPair, victim: str) -> None:
    storing, other = (pair.second, pair.first) if victim == "node-2" else (pair.first, pair.second)
    prompt, asked = pair.partly_stored(storing)
    pair.kill(victim)
    pair.thaw()
    if victim == "engine-1":
        with pytest.raises(Unreachable):
            asked.result(REQUEST_TIMEOUT_SECONDS)
    else:
        check(prompt, asked.result(REQUEST_TIMEOUT_SECONDS))
    with counting(other) as grown:
        check(prompt, other.complete(prompt.tokens))
        if victim == "engine-1":  # its node lives, and gives what is whole
            assert 0 < grown("tier_tokens", "peers") < HELD_TOKENS
    pair.restart()
    if victim == "coordinator":
        pair.coordinator.wait_for_holder(prompt.tokens, "engine-1", HELD_TOKENS, HEAL_SECONDS)
    pair.heal()


def test_after_all_that_nothing_has_crashed_or_leaks(pair: FaultyPair) -> None:
    pair.check_nothing_leaks()
    pair.check_no_crash()
