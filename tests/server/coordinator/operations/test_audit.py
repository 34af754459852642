"""The audit log: who did what, and nothing of what was in it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from lmkv.errors import ConfigError
from lmkv.rpc.error_status import short
from lmkv.rpc.messages import by_keys, by_tokens
from lmkv.tiers import HOST
from lmkv.v1.cache_service_pb2 import (
    ClearRequest,
    DrainRequest,
    HintRequest,
    LookupRequest,
    MoveRequest,
    PinRequest,
    UnpinRequest,
)
from lmkv.v1.chunk_pb2 import Position
from lmkv_server.coordinator.operations.audit import audited, logger, redacted, write_audit_to
from tests.server.coordinator.cases import KEYS, PROMPT
from tests.server.coordinator.guarded import Guarded, token_of
from tests.support.operations import wait_for_operation


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """A file that the audit log goes to, for one test."""
    path = tmp_path / "audit.jsonl"
    kept = logger.handlers[:], logger.propagate, logger.level
    write_audit_to(str(path))
    yield path
    for handler in logger.handlers:
        handler.close()
    logger.handlers[:], logger.propagate, logger.level = kept


@pytest.fixture
async def fleet(fleet: Guarded) -> Guarded:
    await fleet.instance("a", "n1", KEYS)
    await fleet.instance("a", "n2")
    return fleet


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def test_each_act_is_one_line_with_who_what_and_which_operation(fleet: Guarded, log: Path) -> None:
    cache = await fleet.cache(token_of("operator", "a"))
    operations = await fleet.operations(token_of("operator", "a"))
    n1, n2 = Position(instance_id="n1"), Position(instance_id="n2")
    copied = await cache.Move(
        MoveRequest(prompt=by_tokens(PROMPT), old_position=n1, new_position=n2, copy=True), timeout=60
    )
    await wait_for_operation(operations, copied.name)
    pin = (await cache.Pin(PinRequest(prompt=by_tokens(PROMPT), position=n2), timeout=60)).pin
    await cache.Unpin(UnpinRequest(pin_id=pin.pin_id), timeout=60)
    moved = await cache.Move(MoveRequest(prompt=by_keys(KEYS), old_position=n1, new_position=n2), timeout=60)
    await operations.CancelOperation(operations_pb2.CancelOperationRequest(name=moved.name), timeout=60)
    cleared = await cache.Clear(ClearRequest(instance_id="n2", all=True), timeout=60)
    drained = await cache.Drain(DrainRequest(instance_id="n1", destination_instance_ids=["n2"], evict=True), timeout=60)
    await cache.Lookup(LookupRequest(prompt=by_tokens(PROMPT)), timeout=60)  # looking is no act
    entries = lines(log)
    assert [line["act"] for line in entries] == ["copy", "pin", "unpin", "move", "cancel", "clear", "drain"]
    assert {(line["caller"], line["role"], line["tenant"]) for line in entries} == {("operator-of-a", "operator", "a")}
    assert {line["outcome"] for line in entries} == {"OK"}
    names = [copied.name, None, None, moved.name, None, cleared.name, drained.name]
    assert [line.get("operation") for line in entries] == names
    assert entries[6]["request"] == {
        "instance_id": "n1",
        "destination_instance_ids": "1 destination_instance_ids",
        "evict": True,
    }
    assert entries[1]["pin"] == entries[2]["request"]["pin_id"] == pin.pin_id
    assert entries[0]["request"] == {
        "prompt": {"tokens": {"token_ids": f"{len(PROMPT)} token_ids"}},
        "old_position": {"instance_id": "n1"},
        "new_position": {"instance_id": "n2"},
        "copy": True,
    }
    assert entries[3]["request"]["prompt"] == {"keys": {"chunk_keys": f"{len(KEYS)} chunk_keys"}}
    assert all(line["time"].endswith("Z") for line in entries)


async def test_refusals_are_logged_without_the_salt(fleet: Guarded, log: Path) -> None:
    cache = await fleet.cache(token_of("operator", "a"))
    pin = PinRequest(prompt=by_tokens(PROMPT, cache_salt="pepper"), position=Position(instance_id="unknown"))
    with pytest.raises(grpc.RpcError):
        await cache.Pin(pin, timeout=60)
    (line,) = lines(log)
    assert (line["act"], line["outcome"]) == ("pin", "INSTANCE_NOT_FOUND")
    assert line["request"]["prompt"]["tokens"]["cache_salt"] == "hidden"
    assert "pepper" not in str(line)
    assert token_of("operator", "a") not in str(line)


def test_any_request_can_be_logged() -> None:
    request = HintRequest(instance_id="n", ttl=Duration(seconds=1, nanos=1 << 30))
    request.action = 77  # type: ignore[assignment]  # which is unknown
    assert redacted(request) == {
        "instance_id": "n",
        "action": 77,
        "ttl": {"seconds": 1, "nanos": 1 << 30},  # more nanoseconds than JSON has a form for
    }
    assert redacted(Position(tier=HOST)) == {"tier": "host"}
    long = redacted(PinRequest(prompt=by_tokens([], model_name="m" * 10_000)))
    assert long == {"prompt": {"tokens": {"model_name": short("m" * 10_000)}}}


async def test_http_leaves_the_same_lines(fleet: Guarded, log: Path) -> None:
    async with fleet.http(token_of("operator", "a")) as http:
        answer = (await http.post("/pin", json={"tokens": PROMPT, "instance_id": "n1", "location": "host"})).json()
    (line,) = lines(log)
    assert (line["act"], line["caller"], line["pin"]) == ("pin", "operator-of-a", answer["event_id"])


async def test_without_tokens_the_caller_is_anonymous(coordinator: Any, cache: Any, log: Path) -> None:
    with pytest.raises(grpc.RpcError):
        await cache.Clear(ClearRequest(instance_id="n1", all=True), timeout=60)
    (line,) = lines(log)
    assert (line["caller"], line["outcome"]) == ("anonymous", "INSTANCE_NOT_FOUND")


async def test_a_file_that_was_moved_away_is_recreated(fleet: Guarded, log: Path) -> None:
    cache = await fleet.cache(token_of("operator", "a"))
    old = log.with_suffix(".old")
    for _ in range(2):
        await cache.Clear(ClearRequest(instance_id="n2", all=True), timeout=60)
        shutil.move(log, old)
    assert len(lines(old)) == 1


async def test_without_a_file_it_goes_where_the_process_logs(fleet: Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lmkv.audit"):
        cache = await fleet.cache(token_of("operator", "a"))
        await cache.Clear(ClearRequest(instance_id="n2", all=True), timeout=60)
    assert json.loads(caplog.messages[-1])["act"] == "clear"


def test_a_file_that_cannot_be_written_is_named_by_its_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="audit_log: cannot write"):
        write_audit_to(str(tmp_path / "none" / "audit.jsonl"))


async def test_the_documentation_shows_a_line_as_it_is(fleet: Guarded, log: Path) -> None:
    page = (Path(__file__).parents[4] / "docs" / "operate" / "security.md").read_text(encoding="utf-8")
    shown = json.loads(page.partition("```json\n")[2].partition("\n```")[0])
    cache = await fleet.cache(token_of("operator", "a"))
    n1, n2 = Position(instance_id="n1"), Position(instance_id="n2")
    await cache.Move(MoveRequest(prompt=by_tokens(PROMPT), old_position=n1, new_position=n2, copy=True), timeout=60)
    (line,) = lines(log)
    assert list(line) == list(shown)
    assert shown["request"].keys() < line["request"].keys()
    for example in (shown, line):
        assert re.fullmatch(r"copy-[0-9a-f]{16}", example["operation"])


@pytest.mark.parametrize("error", [RuntimeError("a fault"), asyncio.CancelledError()])
def test_an_act_that_crashes_is_logged_as_failed(log: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), audited("pin", PinRequest()):
        raise error
    (line,) = lines(log)
    assert (line["act"], line["outcome"]) == ("pin", "FAILED")
