"""Whatever dies or freezes between prefill and decode: each client gets its right answer or a clear error, in time.

Afterwards nothing is held, and handoffs work again.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from lmkv.errors import LmkvError
from lmkv_client.demo.endpoint import Completion
from tests.engines.pd import REQUEST_TIMEOUT_SECONDS, Trio

LONG_TOKENS = 3500
"""Seven steps of a prefill."""
MANY_TOKENS = 400
"""An answer that lasts until something is killed."""


@pytest.fixture(scope="module")
def trio(shared_trio: Trio) -> Iterator[Trio]:
    """One prefill, one decode, one proxy; every test leaves them whole."""
    shared_trio.heal()
    yield shared_trio
    shared_trio.check_no_crash()


def error_of(asked: Future[Completion]) -> LmkvError:
    """The error that the client receives instead of an answer."""
    error = asked.exception(REQUEST_TIMEOUT_SECONDS)
    assert isinstance(error, LmkvError)
    return error


def test_a_prefill_engine_is_killed_during_a_handoff(trio: Trio) -> None:
    asked, expected = trio.start_handoff(LONG_TOKENS)
    trio.kill_engine("prefill")
    assert asked.result(REQUEST_TIMEOUT_SECONDS).token_ids == expected, "the decode computes what it has not got"
    prompt = trio.prompt(700)
    trio.check(prompt)  # the decode engine continues alone
    trio.heal()


def test_a_prefill_node_is_killed_during_a_handoff(trio: Trio) -> None:
    asked, expected = trio.start_handoff(LONG_TOKENS)
    trio.kill_node("prefill")
    assert asked.result(REQUEST_TIMEOUT_SECONDS).token_ids == expected
    trio.heal()


def test_a_decodes_node_is_killed_while_it_receives(trio: Trio) -> None:
    asked, expected = trio.start_handoff(LONG_TOKENS)
    trio.kill_node("decode")
    assert asked.result(REQUEST_TIMEOUT_SECONDS).token_ids == expected
    trio.heal()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_node_is_frozen_during_a_handoff(trio: Trio, side: str) -> None:
    asked, expected = trio.start_handoff(LONG_TOKENS)
    with trio.frozen_node(side):
        assert asked.result(REQUEST_TIMEOUT_SECONDS).token_ids == expected
    trio.heal()


def test_a_decode_engine_is_killed_before_it_has_said_anything(trio: Trio) -> None:
    asked, expected = trio.start_handoff(LONG_TOKENS, MANY_TOKENS)
    trio.kill_engine("decode")
    assert asked.result(REQUEST_TIMEOUT_SECONDS).token_ids == expected, "the prefill engine answers alone"
    trio.heal()


def test_a_decode_engine_is_killed_while_it_answers(trio: Trio) -> None:
    prompt = trio.prompt(600)
    expected = trio.expected(prompt, 1500)
    tokens = trio.proxy.stream(prompt, 1500)
    answer = [one for _ in range(5) for one in next(tokens).token_ids]
    trio.kill_engine("decode")
    answer += [one for token in tokens for one in token.token_ids]
    assert tuple(answer) == expected, "the prefill engine continues the answer"
    trio.heal()


def test_the_proxy_is_killed_during_requests(trio: Trio) -> None:
    asked = [trio.start_handoff(LONG_TOKENS, MANY_TOKENS)[0]]
    asked += [trio.ask(trio.prompt(LONG_TOKENS), MANY_TOKENS) for _ in range(3)]
    trio.proxy.kill()
    for one in asked:
        error_of(one)
    trio.check_nothing_is_left()
    trio.heal()
