"""Real SGLang servers one after the other on one node, whose KV differs and whose page hashes do not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import Fleet, open_fleet
from tests.sglang.engine import SglangAnswer, SglangProcess
from tests.sglang.prompts import HIT_TOKENS, PAGE_COUNT, STORE_SECONDS, make_prompt
from tests.support.models import make_adapter
from tests.waiting import wait_until

LORA = {"--lora-backend": "torch_native"}


@pytest.fixture
def fleet(model: Path, tmp_path: Path) -> Iterator[Fleet]:
    """A fleet of its own: nothing of it is looked up by tokens."""
    with open_fleet(model, tmp_path) as fleet:
        yield fleet


def ask(fleet: Fleet, engine: SglangProcess, *, adapter: str | None = None) -> SglangAnswer:
    """The answer of a server that has just started, once its pages are stored."""
    answer = engine.answer(make_prompt(31), adapter=adapter)
    before = 0 if answer.cached_tokens else PAGE_COUNT
    wait_until(lambda: fleet.chunk_count("one") >= before, "its pages are stored", STORE_SECONDS)
    return answer


def test_an_adapter_that_was_replaced_under_its_path_is_another(fleet: Fleet, model: Path, tmp_path: Path) -> None:
    folder = make_adapter(tmp_path / "adapter", 1)
    flags = LORA | {"--lora-paths": f"mine={folder}"}
    answers: list[SglangAnswer] = []
    for number in (1, 2, 2):
        if len(answers) == 1:
            folder.rename(tmp_path / "old")
            make_adapter(folder, number)
        with fleet.engine("one", flags=flags) as engine:
            answers.append(ask(fleet, engine, adapter="mine"))
    assert answers[0].token_ids != answers[1].token_ids, "the adapters make no difference"
    assert [answer.cached_tokens for answer in answers] == [0, 0, HIT_TOKENS]
    assert answers[1].token_ids == answers[2].token_ids


def test_a_configuration_that_was_overridden_is_another(fleet: Fleet, model: Path, tmp_path: Path) -> None:
    answers: list[SglangAnswer] = []
    for theta in (10_000.0, 17.0, 17.0):
        rope = {"rope_type": "default", "rope_theta": theta}
        overrides = json.dumps({"rope_parameters": rope, "rope_theta": theta})
        with fleet.engine("one", flags={"--json-model-override-args": overrides}) as engine:
            answers.append(ask(fleet, engine))
    assert answers[0].token_ids != answers[1].token_ids, "the overrides make no difference"
    assert [answer.cached_tokens for answer in answers] == [0, 0, HIT_TOKENS]
