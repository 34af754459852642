"""Logs: lines by default, JSON with ids when asked."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest

from lmkv import telemetry
from lmkv.telemetry.logs import MAX_MESSAGE_CHARACTERS, JsonFormatter, SafeFormatter
from tests.lmkv.telemetry.receiver import Receiver

logger = logging.getLogger("tests.lmkv.logs")


@pytest.fixture
def written() -> Iterator[StringIO]:
    """What is logged as JSON by the instance `i-1`."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(instance_id="i-1"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


def records(stream: StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_json_object_on_one_line(written: StringIO) -> None:
    logger.warning("pool of %s is\nfull", "5 GB")
    (record,) = records(written)
    assert record.pop("time").endswith("Z")
    assert record == {
        "level": "warning",
        "logger": "tests.lmkv.logs",
        "message": r"pool of 5 GB is\nfull",
        "instance_id": "i-1",
    }


def test_an_exception_is_in_its_record(written: StringIO) -> None:
    try:
        raise ValueError("what happened")
    except ValueError:
        logger.exception("it failed")
    (record,) = records(written)
    assert record["exception"].endswith("ValueError: what happened")


async def test_bound_ids_go_with_what_is_logged_inside_and_by_tasks_started_there(written: StringIO) -> None:
    async def work(name: str) -> None:
        with telemetry.bound(order_id=name):
            await asyncio.sleep(0)
            logger.info("%s", name)

    with telemetry.bound(operation_id="move-1"):
        async with asyncio.TaskGroup() as group:
            group.create_task(work("a"))
            group.create_task(work("b"))
        logger.info("outer")
    logger.info("none")
    found = {record["message"]: (record.get("operation_id"), record.get("order_id")) for record in records(written)}
    assert found == {"a": ("move-1", "a"), "b": ("move-1", "b"), "outer": ("move-1", None), "none": (None, None)}


def test_a_record_inside_a_span_carries_its_ids(written: StringIO, exporting: Receiver) -> None:
    with telemetry.trace_process("s", ""):
        with telemetry.begin("a", parent=""):
            logger.info("inside")
        logger.info("outside")
    inside, outside = records(written)
    span = exporting.span("s", "a")
    assert (inside["trace_id"], inside["span_id"]) == (span.trace_id, span.span_id)
    assert "trace_id" not in outside


@pytest.mark.parametrize(
    ("log_format", "line"),
    [
        ("text", " lmkv node INFO hello\n"),
        ("json", '"level": "info", "logger": "root", "message": "hello", "service": "lmkv-node"}\n'),
    ],
)
def test_a_process_logs_in_the_configured_format(log_format: str, line: str) -> None:
    program = (
        "import logging; from lmkv import telemetry\n"
        f"telemetry.set_up_logging('info', '{log_format}', service='lmkv-node')\n"
        "logging.debug('quiet'); logging.info('hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.endswith(line)
    assert done.stderr.count("\n") == 1


def test_a_caller_that_has_gone_before_its_answer_is_not_logged_as_a_failure() -> None:
    program = (
        "import logging; from lmkv import telemetry; from grpc._cython import cygrpc\n"
        "telemetry.set_up_logging('info', 'text', service='lmkv-node')\n"
        "for error in (cygrpc.ExecuteBatchError('gone'), ValueError('wrong')):\n"
        "    try: raise error\n"
        "    except Exception: logging.getLogger('grpc._cython.cygrpc').exception('raised in core')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr.count("raised in core") == 1
    assert "ValueError: wrong" in done.stderr


FORGED = "\n2026-01-01 00:00:00,000 CRITICAL all is lost"
STRANGE = ["\n", "\r", "\x0b", "\x1b[2J", "\x85", "\u2028", "\u2029", "\u202e", "\u200b", "\ud800", "\0"]


@pytest.fixture
def lines() -> Iterator[StringIO]:
    """What is logged as text."""
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)


@pytest.mark.parametrize("strange", STRANGE)
def test_text_from_outside_stays_within_its_line(lines: StringIO, written: StringIO, strange: str) -> None:
    with telemetry.bound(operation_id=f"move{strange}"):
        logger.warning("instance %s left", f"a{strange}{FORGED}")
    for text in (lines.getvalue(), written.getvalue()):
        assert text.endswith("\n")
        assert text[:-1].isprintable()
        assert strange.encode("unicode_escape").decode() in text.replace("\\\\", "\\")
    assert len(records(written)) == 1


def test_a_traceback_cannot_forge_a_record(lines: StringIO, written: StringIO) -> None:
    try:
        raise ValueError(f"bad{FORGED}")
    except ValueError:
        logger.exception("it failed")
    first, *rest = lines.getvalue().splitlines()
    assert first.endswith("ERROR it failed")
    assert any("all is lost" in line for line in rest)
    assert all(line.startswith("    ") for line in rest)
    assert len(records(written)) == 1


def test_a_record_has_a_bounded_length(lines: StringIO, written: StringIO) -> None:
    try:
        raise ValueError("y\n" * 100_000 + "y" * 100_000)
    except ValueError:
        logger.exception("%s", "x" * 1_000_000)
    for text in (lines.getvalue(), written.getvalue()):
        assert len(text) < MAX_MESSAGE_CHARACTERS + 10_000
        assert "983616 more characters" in text
        assert "lines are omitted" in text
