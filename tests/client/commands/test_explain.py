"""`lmkv explain`: the tables, and the advice for each reason."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from lmkv import cli, rpc
from lmkv.errors import Unreachable
from lmkv.misses import ADVICE, MissReason
from lmkv.rpc.endpoints import make_server
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import ExplainRequest, ExplainResponse, InstanceExplanation
from lmkv.v1.cache_service_pb2_grpc import CacheServiceServicer, add_CacheServiceServicer_to_server
from lmkv.v1.chunk_pb2 import (
    MISS_REASON_BEHIND_GAP,
    MISS_REASON_EVICTED_BY_STORE,
    MISS_REASON_NEVER_STORED,
    PromptExplanation,
    PromptSpan,
    RequestReport,
)
from lmkv_client.commands import flags
from lmkv_client.commands.prompts import prompt_rows, request_rows

NOW = 1_700_000_000.0


class CannedExplanations(CacheServiceServicer):
    """Answers what the test has put in, and remembers what it was asked."""

    def __init__(self) -> None:
        self.response = ExplainResponse()
        self.asked: list[ExplainRequest] = []

    async def Explain(self, request: ExplainRequest, context: Any) -> ExplainResponse:  # noqa: N802
        self.asked.append(request)
        return self.response


@pytest.fixture
async def canned(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[CannedExplanations]:
    made = CannedExplanations()  # type: ignore[abstract]  # one RPC is enough here
    server = await make_server(["lmkv.v1.CacheService"])
    add_CacheServiceServicer_to_server(made, server)
    monkeypatch.setenv("LMKV_COORDINATOR_ADDRESS", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    yield made
    await server.stop(None)


async def run(*argv: str) -> int:
    """A command line, in a thread of its own: commands have their own event loop."""
    return await asyncio.to_thread(cli.main, ["explain", *argv], {"explain": lambda: flags.explain})


def evicted(token_count: int) -> PromptSpan:
    span = PromptSpan(reason=MISS_REASON_EVICTED_BY_STORE, tier="own", token_count=token_count)
    span.remove_time.FromSeconds(int(NOW) - 90)
    return span


def answer(instance_id: str, *spans: PromptSpan) -> InstanceExplanation:
    return InstanceExplanation(instance_id=instance_id, explanation=PromptExplanation(spans=spans))


def test_every_reason_has_advice() -> None:
    assert ADVICE.keys() == set(MissReason)
    page = (Path(__file__).parents[3] / "docs/operate/misses.md").read_text()
    assert re.findall(r"^\| `([a-z_]+)` \|", page, re.MULTILINE) == sorted(MissReason, key=[*ADVICE].index), (
        "the page has the same reasons in the same order"
    )


def test_a_row_per_span_has_its_tokens_its_reason_and_what_to_change() -> None:
    gap = PromptSpan(reason=MISS_REASON_BEHIND_GAP, token_count=8)
    response = ExplainResponse(explanations=[answer("a", PromptSpan(tier="disk", token_count=512), evicted(100), gap)])
    held, gone, behind = prompt_rows(response, NOW)
    assert held == ("a", "0-511", "disk", "", "", "")
    assert gone[:4] == ("a", "512-611", "", "evicted_by_store (own)")
    assert re.fullmatch(r"1.* ago", gone[4])
    assert gone[5] == ADVICE[MissReason.EVICTED_BY_STORE]
    assert behind == ("a", "612-619", "", "behind_gap", "", ADVICE[MissReason.BEHIND_GAP])


def test_what_was_never_stored_was_not_since_the_node_has_started() -> None:
    answered = answer("a", PromptSpan(reason=MISS_REASON_NEVER_STORED, token_count=4))
    answered.explanation.start_time.FromSeconds(int(NOW) - 90)
    ((*_, since, advice),) = prompt_rows(ExplainResponse(explanations=[answered]), NOW)
    assert re.fullmatch(r"start of the node, 1.* ago", since)
    assert advice == ADVICE[MissReason.NEVER_STORED]


def test_a_reason_that_is_newer_than_this_version_is_shown_by_its_number() -> None:
    unknown = PromptSpan(token_count=4)
    unknown.MergeFromString(PromptSpan(token_count=4).SerializeToString() + b"\x20\xfa\x01")
    ((*_, why, since, advice),) = prompt_rows(ExplainResponse(explanations=[answer("a", unknown)]), NOW)
    assert (why, since, advice) == ("250", "", "")


def test_requests_of_all_instances_are_shown_the_latest_first() -> None:
    explanations = []
    for instance_id, name, second in (("a", "cmpl-old", 1), ("b", "cmpl-new", 2)):
        report = RequestReport(engine_request_id=name, spans=[PromptSpan(tier="own", token_count=3)])
        report.create_time.FromSeconds(second)
        explanations.append(
            InstanceExplanation(instance_id=instance_id, explanation=PromptExplanation(requests=[report]))
        )
    rows = list(request_rows(ExplainResponse(explanations=explanations), NOW))
    assert [row[:4] for row in rows] == [("cmpl-new", "b", "0-2", "own"), ("cmpl-old", "a", "0-2", "own")]


async def test_a_prompt_is_asked_for_by_its_tokens(
    canned: CannedExplanations, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = InstanceExplanation(instance_id="b", error=rpc.to_status(Unreachable("no answer", address="b")))
    canned.response = ExplainResponse(explanations=[answer("a", evicted(3)), failed])
    assert await run("--tokens", "1,2,3", "--model", "llama", "--instance", "a") == 0
    assert canned.asked == [ExplainRequest(prompt=by_tokens([1, 2, 3], model_name="llama"), instance_id="a")]
    out = capsys.readouterr().out
    assert "evicted_by_store (own)" in out
    assert "raise max_local_cpu_size" in out
    assert "b: no answer" in out


async def test_a_request_is_asked_for_by_its_id(canned: CannedExplanations, capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("--request", "cmpl-1") == 1
    assert canned.asked == [ExplainRequest(engine_request_id="cmpl-1")]
    assert "error: no instance knows this request: check the id" in capsys.readouterr().err
    assert await run("--request", "cmpl-1", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"explanations": []}


@pytest.mark.usefixtures("canned")
async def test_a_prompt_of_an_unknown_model_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert await run("--tokens", "1,2,3", "--model", "other") == 1
    assert "check --model against `lmkv instances`" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["--request", "r", "--tokens", "1"]])
async def test_one_prompt_or_one_request_is_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert await run(*argv) == 2
    assert "name a prompt" in capsys.readouterr().err
