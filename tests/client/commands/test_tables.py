"""The tables of the commands: numbers to the right, and `lmkv top` on narrow terminals."""

from __future__ import annotations

import importlib
import io
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from google.longrunning.operations_pb2 import Operation as OperationMessage
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

import lmkv_client.commands
from lmkv.misses import ADVICE, MissReason
from lmkv.tiers import DISK, HOST
from lmkv.v1.cache_service_pb2 import (
    DrainProgress,
    ExplainResponse,
    Holder,
    InstanceExplanation,
    LookupResponse,
    MoveProgress,
    TierRun,
)
from lmkv.v1.chunk_pb2 import KvSpec, PinnedChunks, Position, PromptExplanation, PromptSpan, RequestReport
from lmkv.v1.registry_service_pb2 import Instance, InstanceStats, TierUsage
from lmkv_client.commands import engines, fleet, operations, prompts
from lmkv_client.commands.output import Number, align, print_table, shorten
from lmkv_client.operation import OperationState

WIDTH = 70
LONG_ID = "lmkv.svc.cluster.local-production-europe-west-4-engine-pool-{}"
NOW = time.time()
NUMBER = re.compile(r"(-?\d|[█░]|-$)")


def moment(seconds_from_now: float) -> Timestamp:
    return Timestamp(seconds=int(NOW + seconds_from_now))


def instance(instance_id: str, *tiers: str, synced: bool = True) -> Instance:
    return Instance(
        instance_id=instance_id,
        peer_address="node-7:8200",
        specs=[KvSpec(model_name="llama", kv_dtype="bfloat16")],
        tiers=[
            TierUsage(tier=name, used_bytes=(1 << 50) - 1, capacity_bytes=1 << 50, chunk_count=123_456_789)
            for name in tiers
        ],
        engine_count=128,
        stats=InstanceStats(asked_chunks=100, own_chunks=62, peer_chunks=20),
        expire_time=moment(30),
        synced=synced,
    )


@pytest.fixture(autouse=True)
def still_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still, so that ages do not change during a test."""
    monkeypatch.setattr(time, "time", lambda: NOW)


class Running(OperationState[Any, Any]):
    """An operation that runs."""

    def __init__(self, name: str, progress: Message) -> None:
        self.message = OperationMessage(name=name)
        self.message.metadata.Pack(progress)


def frame(template: str = LONG_ID) -> fleet.Frame:
    names = [template.format(number) for number in range(4)]
    position = [Position(instance_id=name, tier=HOST) for name in names]
    long_ago = moment(-100 * 3600)
    counts: Any = {"chunk_count": 12_345_678, "done_chunk_count": 10_345_678}
    move = MoveProgress(create_time=long_ago, old_position=position[0], new_position=position[1], **counts)
    drain = DrainProgress(create_time=moment(-5), instance_id=names[2], chunk_count=9, done_chunk_count=2)
    return fleet.Frame(
        instances=[
            instance(names[0], "host", "disk", "remote"),
            instance(names[1], "host", synced=False),
            instance(names[2]),
        ],
        operations=[Running("move-0123456789abcdef", move), Running("drain-0123456789abcdef", drain)],  # type: ignore[list-item]
    )


def test_the_instances_show_how_far_salts_have_used_their_quota() -> None:
    gib = 1 << 30
    usage = TierUsage(tier=DISK, capacity_bytes=8 * gib, used_bytes=4 * gib)
    quota = TierUsage(salt_quota_bytes=2 * gib, max_salt_used_bytes=gib, salt_count=5)
    plain = fleet.instance_row(Instance(instance_id="one", tiers=[usage]))
    usage.MergeFrom(quota)
    assert "disk 4.00/8.00 GiB" in plain
    assert "disk 4.00/8.00 GiB (the largest of 5 salts has 1.00/2.00 GiB)" in fleet.instance_row(
        Instance(instance_id="one", tiers=[usage])
    )


HOLDERS = LookupResponse(
    holders=[
        Holder(instance_id=f"lmkv-{count}", runs=[TierRun(tier=HOST, token_count=16 * count, chunk_count=count)])
        for count in (7, 12_345)
    ]
)
PINS = [
    PinnedChunks(pin_id=f"p{count}", chunk_count=count, token_count=16 * count, expire_time=moment(count))
    for count in (7, 12_345)
]
SPANS = [PromptSpan(tier="host", token_count=512), PromptSpan(tier="disk", token_count=12_345)]
EXPLANATIONS = ExplainResponse(
    explanations=[
        InstanceExplanation(
            instance_id="lmkv-1", explanation=PromptExplanation(spans=SPANS, requests=[RequestReport(spans=SPANS)])
        )
    ]
)
ENGINES: list[engines.Engine] = [
    {
        "url": f"http://10.0.0.{number}:8000",
        "role": "decode",
        "state": "draining",
        "failure": failure,
        "in_flight_count": number,
        "instance_id": "lmkv-1",
        "models": ["llama"],
    }
    for number, failure in ((7, ""), (12, "no answer"))
]
ROUTES = [
    {
        "url": f"http://10.0.0.{number}:8000",
        "instance_id": f"lmkv-{number}",
        "held_token_count": 2048 * number,
        "wait_seconds": 1.5,
        "prompt_seconds": 0.25,
        "memory_seconds": 1000.0 * number,
        "is_chosen": not number,
    }
    for number in range(2)
]
COPY = {
    "instance_id": "lmkv-2",
    "source": "lmkv-1",
    "token_count": 4096,
    "waited_seconds": 8.25,
    "outcome": "accepted",
    "time": NOW - 12,
}
TABLES: list[tuple[Sequence[str], Sequence[Sequence[str]]]] = [
    (prompts.PROMPT_COLUMNS, list(prompts.prompt_rows(EXPLANATIONS, NOW))),
    (prompts.REQUEST_COLUMNS, list(prompts.request_rows(EXPLANATIONS, NOW))),
    (fleet.INSTANCE_COLUMNS, [fleet.instance_row(one) for one in (*frame().instances, Instance(instance_id="one"))]),
    (prompts.HOLDER_COLUMNS, prompts.holder_rows(HOLDERS)),
    (operations.OPERATION_COLUMNS, frame().operation_rows()),
    (prompts.PIN_COLUMNS, prompts.pin_rows(PINS)),
    (fleet.TOP_COLUMNS, frame().instance_rows()),
    (engines.ENGINE_COLUMNS, [engines.engine_row(one) for one in ENGINES]),
    (prompts.ROUTE_COLUMNS, [prompts.route_row(one) for one in ROUTES]),
    (prompts.COPY_COLUMNS, [prompts.copy_row(COPY, NOW)]),
]


def test_these_are_all_tables() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(lmkv_client.commands.__path__, "lmkv_client.commands.")
    ]
    found = {value for module in modules for name, value in vars(module).items() if name.endswith("COLUMNS")}
    assert found == {columns for columns, _ in TABLES}


@pytest.mark.parametrize(("columns", "rows"), TABLES, ids=lambda value: value[0] if value[0][0].isupper() else "")
def test_numbers_are_aligned_to_the_right(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    for column, *cells in zip(columns, *rows, strict=True):
        assert isinstance(column, Number) == all(map(NUMBER.match, cells)), column
    heading, *lines = align(columns, rows)
    ends = {str(column): heading.index(column) + len(column) for column in columns if isinstance(column, Number)}
    assert ends
    for row, line in zip(rows, lines, strict=True):
        for column, cell in zip(columns, row, strict=True):
            assert column not in ends or line[: ends[column]].endswith(cell)


@pytest.mark.parametrize(
    ("text", "width", "short"), [("abcdef", 6, "abcdef"), ("abcdef", 5, "ab…ef"), ("abcdef", 4, "ab…f")]
)
def test_ids_are_shortened_in_the_middle(text: str, width: int, short: str) -> None:
    assert shorten(text, width) == short


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], io.StringIO]:
    """Makes standard output a terminal of some width; answers what is printed there."""

    def make(width: int) -> io.StringIO:
        screen = io.StringIO()
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(screen, "isatty", lambda: True)
        monkeypatch.setattr(sys, "stdout", screen)
        return screen

    return make


def test_cells_are_never_cut_on_a_narrow_terminal(narrow: Callable[[int], io.StringIO]) -> None:
    screen = narrow(30)
    address = "[2001:db8::1234:5678]:7000"
    print_table(("INSTANCE", "PEER", "NOTE"), [("a-long-name-of-an-instance", address, "")])
    assert "".join(screen.getvalue().split()) == f"INSTANCEa-long-name-of-an-instancePEER{address}"


@pytest.mark.parametrize("reason", MissReason)
def test_what_explain_shows_fits_80_columns_line_by_line(
    narrow: Callable[[int], io.StringIO], reason: MissReason
) -> None:
    screen = narrow(80)
    missing = (f"{reason} (disk)", "start of the node, 5 min ago", ADVICE[reason])
    row = ("cmpl-0123456789abcdef0123456789abcdef", "engine-1", "512-12856", "", *missing)
    print_table(prompts.REQUEST_COLUMNS, [row])
    cells = [line.split("  ", 1)[1].strip() for line in screen.getvalue().splitlines() if line.strip()]
    assert cells == [cell for cell in row if cell]


def test_the_longest_word_is_shortened_first() -> None:
    assert shorten("abcdefghijkl to b", 12) == "abc…jkl to b"


def draw(shown: fleet.Frame, width: int) -> list[str]:
    """The screen of `lmkv top` in a terminal of this width."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(fleet.draw(shown, "", width))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def test_top_fits_70_columns_with_long_ids_and_large_numbers() -> None:
    shown = frame()
    lines = draw(shown, WIDTH)
    assert max(map(len, lines)) <= WIDTH
    words = re.split(r"\s{2,}", "  ".join(lines))
    for row in shown.instance_rows():
        assert set(row[1:]) - {"-"} <= set(words)
    for name, _, state, *values in shown.operation_rows():
        assert {name, *values} <= set(words)
        assert state == "running"  # not shown: all of them run
    ids = [line.partition("  ")[0] for line in lines if line.startswith("lmkv.svc")]
    assert len(set(ids)) == len(shown.instances)  # shortened in the middle
    assert all("…" in shortened for shortened in ids)
    assert any(re.fullmatch(r"  lmkv\S+…\S+-0/host to lmkv\S+…\S+-1/host", line) for line in lines)


def test_top_keeps_one_line_per_tier_where_it_fits() -> None:
    shown = frame("n{}")
    lines = draw(shown, 120)
    assert lines[1 : 2 + len(shown.instance_rows())] == align(fleet.TOP_COLUMNS, shown.instance_rows())
    assert lines[-4:] == [*align(operations.OPERATION_COLUMNS, shown.operation_rows()), ""]
