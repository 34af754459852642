"""Prompts that are handed into a buffer beside the decode engine's pages: real engines, and no GPU but host memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.faults import eventually
from tests.engines.pd import BUFFER_CHUNKS, CHUNK_BYTES, OUTPUT_TOKENS, Trio

PROMPT_TOKENS = 1100
"""Four chunks and a part of one, in three steps."""


@pytest.fixture(scope="module")
def trio(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    """One prefill, one decode whose worker lends, one proxy; they have met."""
    lending = {"kv_connector_module_path": "tests.engines.lending_connector"}
    with (
        tempfile.TemporaryDirectory(prefix="lmkv-", dir="/tmp") as folder,
        Trio(
            Path(folder),
            tiny_model,
            tmp_path_factory.mktemp("logs"),
            seed=5,
            decode_connector=lending,
            settings={"LMKV_TRANSFER_CHANNEL": "nixl"},  # without an RDMA device no other value reads into the buffer
        ) as trio,
    ):
        trio.check(trio.prompt(PROMPT_TOKENS))  # the engine's first step, from which on it lends
        eventually(lambda: trio.node_metric("decode", "device_buffer_bytes") == BUFFER_CHUNKS * CHUNK_BYTES, "it lends")
        trio.check(trio.prompt(PROMPT_TOKENS))  # behind this one the nodes agree on NIXL
        eventually(lambda: takes_the_buffer(trio), "prompts come into the buffer")
        yield trio
        trio.check_nothing_is_left()
        trio.check_no_crash()


def takes_the_buffer(trio: Trio) -> bool:
    """Whether a prompt comes into the buffer."""
    trio.check(trio.prompt(PROMPT_TOKENS))
    return device_bytes(trio) > 0


def device_bytes(trio: Trio) -> float:
    """What has come into the buffer."""
    return trio.node_metric("decode", "handoff_device_bytes_total")


def test_a_prompt_comes_into_the_buffer_and_its_answer_is_that_of_one_engine(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    expected, before = trio.expected(prompt), device_bytes(trio)
    with trio.counting(trio.decode) as decode:
        assert trio.proxy.complete(prompt, OUTPUT_TOKENS).token_ids == expected
    assert device_bytes(trio) - before > 4 * CHUNK_BYTES
    assert decode["lmkv:loaded_tokens_total"] == PROMPT_TOKENS, "nothing is computed twice"
    assert decode["lmkv:load_failures_total"] == 0


def test_a_repeated_handoff_is_not_sent_again(trio: Trio) -> None:
    prompt = trio.prompt(PROMPT_TOKENS)
    expected = trio.expected(prompt)
    answers = []
    for _ in range(2):
        before = device_bytes(trio)
        answers.append(trio.proxy.complete(prompt, OUTPUT_TOKENS).token_ids)
    assert answers == [expected, expected]
    assert device_bytes(trio) == before


def test_many_at_once_are_answered_right_though_the_buffer_has_no_room_for_all(trio: Trio) -> None:
    prompts = [trio.prompt(PROMPT_TOKENS) for _ in range(6)]
    expected = [trio.expected(prompt) for prompt in prompts]
    asked = [trio.ask(prompt) for prompt in prompts]
    assert [one.result().token_ids for one in asked] == expected
