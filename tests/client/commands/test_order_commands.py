"""Commands that start operations or watch, against a real coordinator and instances that obey it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest

from lmkv_client import Coordinator
from tests.client.conftest import Fleet, RunCommand
from tests.server.coordinator.cases import KEYS, PROMPT
from tests.server.coordinator.scripted_instance import until

TOKENS = ",".join(map(str, PROMPT))
HEX_KEYS = ",".join(key.hex() for key in KEYS)
Capture = pytest.CaptureFixture[str]


async def test_move_waits_and_says_what_it_did(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("move", "--from", "a", "--to", "b/host", "--tokens", TOKENS) == 0
    shown = capsys.readouterr()
    assert re.fullmatch(
        r"move-[0-9a-f]{16}: 3 chunks \(40 tokens\) arrived, 2\.9 KiB transferred; the source dropped 3\n", shown.out
    )
    assert shown.err == ""  # no bar where there is no terminal
    assert await fleet.holders() == {"b": 40}


async def test_copy_leaves_the_source_alone(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("copy", "--from", "a/host", "--to", "b", "--keys", HEX_KEYS) == 0
    assert re.fullmatch(
        r"copy-[0-9a-f]{16}: 3 chunks \(40 tokens\) arrived, 2\.9 KiB transferred\n", capsys.readouterr().out
    )
    assert await fleet.holders() == {"a": 40, "b": 40}


async def test_an_order_as_json_is_the_operation(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("copy", "--from", "a", "--to", "b", "--tokens", TOKENS, "--json") == 0
    operation = json.loads(capsys.readouterr().out)
    assert operation["done"] is True
    assert operation["response"]["@type"] == "type.googleapis.com/lmkv.v1.MoveResult"
    assert (operation["response"]["chunk_count"], operation["metadata"]["done_chunk_count"]) == (3, 3)


async def test_no_wait_returns_what_to_follow(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    fleet.pause()
    assert await run_command("move", "--from", "a", "--to", "b", "--tokens", TOKENS, "--no-wait") == 0
    name, _, rest = capsys.readouterr().out.partition(": ")
    assert rest == "running, 0/3 chunks done\n"
    assert await run_command("ops", "show", name) == 0
    assert capsys.readouterr().out == f"{name}: running, 0/3 chunks done\n"
    fleet.resume()
    assert await run_command("ops", "wait", name) == 0
    assert capsys.readouterr().out.startswith(f"{name}: 3 chunks (40 tokens) arrived")


async def test_a_timeout_prints_the_next_command(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    fleet.pause()
    assert await run_command("move", "--from", "a", "--to", "b", "--tokens", TOKENS, "--timeout", "100ms") == 1
    assert re.fullmatch(
        r"lmkv: error: (move-[0-9a-f]{16}) is still running after 0\.1 s; `lmkv ops wait \1` waits for it, "
        r"`lmkv ops cancel \1` cancels it\n",
        capsys.readouterr().err,
    )


async def test_a_part_is_exit_code_3(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    fleet.b.limit = 2
    assert await run_command("move", "--from", "a", "--to", "b", "--tokens", TOKENS) == 3
    first, second = capsys.readouterr().out.splitlines()
    assert "2 chunks (32 tokens) arrived" in first
    assert second == f"  failed for 1 chunk from {KEYS[2].hex()} on: full"
    assert await run_command("copy", "--from", "a", "--to", "b", "--keys", KEYS[2].hex(), "--json") == 1


@pytest.mark.parametrize(("verb", "done"), [("copy", "copied"), ("move", "moved")])
async def test_chunks_that_the_source_lacks_are_an_error(
    fleet: Fleet, run_command: RunCommand, capsys: Capture, verb: str, done: str
) -> None:
    argv = (verb, "--from", "b", "--to", "a", "--tokens", TOKENS)
    assert await run_command(*argv) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(
        rf"lmkv: error: {verb}-[0-9a-f]{{16}}: nothing was {done}, since b/host holds none of these chunks; "
        r"`lmkv lookup` shows which instances hold a prompt\n",
        shown.err,
    )
    name = re.search(rf"{verb}-[0-9a-f]{{16}}", shown.err)
    assert name is not None
    assert await run_command("ops", "wait", name[0]) == 1
    capsys.readouterr()
    assert await run_command(*argv, "--json") == 1
    assert json.loads(capsys.readouterr().out)["done"]


async def test_nothing_at_all_is_exit_code_1(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    fleet.b.limit = 0
    assert await run_command("move", "--from", "a", "--to", "b", "--tokens", TOKENS) == 1
    shown = capsys.readouterr()
    assert re.fullmatch(r"lmkv: error: move-[0-9a-f]{16}: full\n", shown.err)
    assert shown.out == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["move", "--from", "a", "--to", "nowhere", "--tokens", "1"], "error: --to: instance 'nowhere'"),
        (["move", "--from", "nowhere", "--to", "a", "--tokens", "1"], "error: --from: instance 'nowhere'"),
        (["move", "--from", "a", "--to", "a", "--tokens", "1"], "the same"),
        (["move", "--from", "a", "--to", "b/disk", "--tokens", "1"], "disk"),
        (
            ["move", "--from", "a/attic", "--to", "b", "--tokens", "1"],
            "--from: 'attic' is no tier; known tiers are",
        ),
        (
            ["clear", "--all", "--yes", "--tier", "attic"],
            "--tier: 'attic' is no tier; known tiers are gpu",
        ),
        (["pin", "--at", "nowhere", "--tokens", "1"], "error: --at: instance 'nowhere'"),
        (["hint", "evict", "--at", "nowhere", "--tokens", "1"], "--at: instance 'nowhere'"),
        (["hint", "retain", "--at", "a", "--priority", "101", "--tokens", "1"], "priority 101"),
        (["clear", "--instance", "nowhere", "--all", "--yes"], "nowhere"),
        (["ops", "show", "move-nowhere"], "there is no operation 'move-nowhere'"),
        (["watch", "--model", "qwen"], "no instance serves 'qwen'; served are: llama"),
    ],
)
async def test_refusals_are_one_line(
    argv: list[str], message: str, fleet: Fleet, run_command: RunCommand, capsys: Capture
) -> None:
    assert await run_command(*argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("lmkv: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["move", "--to", "b", "--tokens", "1"], "the following arguments are required: --from"),
        (["move", "--from", "a", "--to", "b"], "one of the arguments --tokens --tokens-file --keys --prompt"),
        (["move", "--from", "a", "--to", "b", "--tokens", "1", "--timeout", "0"], "must be a time above 0"),
        (["pin", "--at", "a", "--tokens", "1", "--ttl", "soon"], "must be a time above 0, such as 30 (seconds) or 10m"),
        (["clear"], "nothing is selected: name a prompt with --tokens, a model with --model, or --all"),
        (["clear", "--instance", "a"], "nothing is selected"),
        (["clear", "--all", "--weight-version", "1"], "a version of the weights is of a model"),
        (["ops", "wait"], "`lmkv ops wait` needs the ID of an operation; `lmkv ops` lists them"),
        (["ops", "list", "move-1"], "`lmkv ops list` takes no ID; `lmkv ops show move-1` shows one"),
        (["ops", "stop", "move-1"], "invalid choice: 'stop'"),
        (["unpin"], "the following arguments are required: PIN"),
        (["hint", "dance", "--at", "a", "--tokens", "1"], "invalid choice: 'dance'"),
        (["hint", "pin", "--at", "a", "--tokens", "1", "--ttl", "-1"], "must be a time above 0"),
    ],
)
async def test_bad_usage_is_one_line(argv: list[str], message: str, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command(*argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


async def test_ops_lists_and_cancels(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("ops") == 0
    assert capsys.readouterr().out == "there are no operations\n"
    assert await run_command("copy", "--from", "a", "--to", "b", "--keys", KEYS[0].hex()) == 0
    fleet.pause()
    assert await run_command("move", "--from", "a", "--to", "b", "--tokens", TOKENS, "--no-wait", "--json") == 0
    move = json.loads(capsys.readouterr().out.partition("\n")[2])["name"]
    assert await run_command("ops") == 0
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["OPERATION", "SUBJECT", "STATE", "PROGRESS", "AGE"]
    assert re.split("  +", first)[:4] == [move, "a/host to b/host", "running", "0/3 chunks"]
    assert re.split("  +", second)[1:4] == ["a/host to b/host", "done", "1/1 chunk"]
    assert await run_command("ops", "cancel", move) == 0
    assert capsys.readouterr().out.startswith(f"{move}: cancelled after 0 of 3 chunks")
    assert await run_command("ops", "--running", "--json") == 0
    assert json.loads(capsys.readouterr().out)["operations"] == []
    assert await run_command("ops", "wait", move) == 1
    assert "cancelled after 0 of 3 chunks" in capsys.readouterr().err


async def test_pins_are_set_listed_and_ended(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("pins") == 0
    assert capsys.readouterr().out == "nothing is pinned\n"
    assert await run_command("pin", "--at", "a", "--ttl", "10m", "--tokens", TOKENS) == 0
    pin_id, _, rest = capsys.readouterr().out.partition(": ")
    assert re.fullmatch(r"3 chunks \(40 tokens\) on a/host for (10 m 0|9 m 5\d) s\n", rest)
    assert await run_command("pins") == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["PIN", "POSITION", "CHUNKS", "TOKENS", "ENDS", "IN"]
    assert line.split()[:4] == [pin_id, "a/host", "3", "40"]
    assert await run_command("unpin", pin_id) == 0
    assert capsys.readouterr().out == f"{pin_id}: ended\n"
    assert await run_command("pin", "--at", "a", "--keys", HEX_KEYS, "--json") == 0
    assert json.loads(capsys.readouterr().out)["pin"]["chunk_count"] == 3
    assert await run_command("pins", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["pins"]) == 1


async def test_hints_say_how_they_ended(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("hint", "retain", "--at", "a", "--ttl", "10m", "--tokens", TOKENS) == 0
    assert capsys.readouterr().out == "retain on a: accepted, 3 chunks for 10 m 0 s\n"
    assert await run_command("hint", "pin", "--at", "a", "--tokens", TOKENS, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["result"]["outcome"] == "HINT_OUTCOME_ACCEPTED"
    assert answer["pin_id"].startswith("a/")
    assert await run_command("hint", "evict", "--at", "b", "--tokens", TOKENS) == 1
    assert capsys.readouterr().out == "evict on b: missing, 0 chunks\n"


async def test_pinned_chunks_outlive_a_clear(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    assert await run_command("pin", "--at", "a", "--keys", KEYS[0].hex()) == 0
    assert await run_command("clear", "--tokens", TOKENS) == 3
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].endswith(": 2 chunks (24 tokens) dropped, 1 kept by pins")
    assert lines[1] == f"  failed on a for 1 chunk from {KEYS[0].hex()} on: pinned"
    assert await run_command("clear", "--all", "--yes") == 0
    assert capsys.readouterr().out.endswith(": 0 chunks (0 tokens) dropped, 1 kept by pins\n")
    assert await fleet.holders() == {"a": 16}


@pytest.mark.parametrize("selection", [["--all"], ["--model", "llama"], ["--all", "--tier", "host", "--instance", "a"]])
async def test_a_dry_run_drops_nothing(
    selection: list[str], fleet: Fleet, run_command: RunCommand, capsys: Capture
) -> None:
    assert await run_command("clear", *selection, "--dry-run") == 0
    name, _, rest = capsys.readouterr().out.partition(": ")
    assert rest == "3 chunks (40 tokens) would be dropped\n"
    assert await run_command("ops") == 0
    where = "a/host" if "--tier" in selection else "everywhere"
    assert re.split("  +", capsys.readouterr().out.splitlines()[1])[:2] == [name, f"{where}, dry run"]
    assert await fleet.holders() == {"a": 40}


@contextmanager
def terminal(typed: str) -> Iterator[None]:
    """Standard input is a terminal on which this is typed."""
    ours, theirs = pty.openpty()
    os.write(ours, typed.encode())
    before = sys.stdin
    with os.fdopen(theirs) as sys.stdin:
        yield
    sys.stdin = before
    os.close(ours)


async def test_clear_asks_before_it_clears_more_than_a_prompt(
    fleet: Fleet, run_command: RunCommand, capsys: Capture
) -> None:
    with terminal("n\n"):
        assert await run_command("clear", "--model", "llama") == 1
    assert capsys.readouterr().err == "drop 3 chunks (40 tokens)? [y/N] nothing was dropped\n"
    assert await fleet.holders() == {"a": 40}
    with terminal(""):
        assert await run_command("clear", "--keys", KEYS[2].hex()) == 0  # a prompt's chunks need no question
    with terminal("yes\n"):
        assert await run_command("clear", "--model", "llama") == 0
    assert await fleet.holders() == {}
    with terminal(""):
        assert await run_command("clear", "--all", "--yes") == 0
    assert capsys.readouterr().out.endswith(": 0 chunks (0 tokens) dropped\n")


@pytest.mark.parametrize("selection", [["--all"], ["--model", "llama"], ["--all", "--instance", "a"]])
async def test_clear_without_a_terminal_refuses_more_than_a_prompt_unless_confirmed(
    fleet: Fleet, run_command: RunCommand, capsys: Capture, monkeypatch: pytest.MonkeyPatch, selection: list[str]
) -> None:
    with io.StringIO() as nothing, monkeypatch.context() as patched:  # as in a cron job
        patched.setattr(sys, "stdin", nothing)
        assert await run_command("clear", *selection) == 2
        error = capsys.readouterr().err
        assert "no terminal to ask on: add --yes to clear them, or --dry-run to count them" in error
        assert error.count("\n") == 1
        assert await fleet.holders() == {"a": 40}
        assert await run_command("clear", *selection, "--dry-run") == 0
        assert await fleet.holders() == {"a": 40}
        assert await run_command("clear", *selection, "--yes") == 0
    assert await fleet.holders() == {}


async def test_top_shows_tiers_and_what_runs(fleet: Fleet, run_command: RunCommand, capsys: Capture) -> None:
    fleet.pause()
    assert await run_command("move", "--from", "a", "--to", "b", "--tokens", TOKENS, "--no-wait") == 0
    capsys.readouterr()
    assert await run_command("top") == 0  # one frame, since there is no terminal
    instances, _, operations = capsys.readouterr().out.partition("\n\n")
    columns, *rows = (re.split("  +", line.replace("   0%", "")) for line in instances.splitlines())
    a, b = (dict(zip(columns, row, strict=True)) for row in rows)
    assert (a["INSTANCE"], a["TIER"], a["FILL"], a["CHUNKS"]) == ("a", "host", "░" * 10, "3")
    assert (b["INSTANCE"], b["CHUNKS"], b["ENGINES"]) == ("b", "0", "1")
    assert re.split("  +", operations.splitlines()[1])[1:4] == ["a/host to b/host", "running", "0/3 chunks"]
    assert await run_command("top", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert [instance["instance_id"] for instance in shown["instances"]] == ["a", "b"]
    assert [operation["done"] for operation in shown["operations"]] == [False]


@asynccontextmanager
async def lmkv(
    *argv: str, stdout: int = subprocess.PIPE, stderr: int = subprocess.PIPE
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A command as a process of its own, killed if it is still there at the end."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "lmkv", *argv, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def test_watch_prints_what_is_held_and_then_every_change(fleet: Fleet) -> None:
    async with lmkv("watch", "--model", "llama") as process:
        assert process.stdout
        held = await asyncio.wait_for(process.stdout.readline(), 120)
        assert re.fullmatch(rb"\d\d:\d\d:\d\d  held     a/host  \+3  [0-9a-f]{32} \.\.\.\n", held)
        await fleet.a.evict(KEYS[2:])
        change = await asyncio.wait_for(process.stdout.readline(), 120)
        assert change.split(b"  ", 1)[1].decode() == f"changed  a/host  -1  {KEYS[2].hex()}\n"
        process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(process.wait(), 120) == 130


async def test_watch_as_json_is_an_object_per_line(fleet: Fleet) -> None:
    async with lmkv("watch", "--json") as process:
        assert process.stdout
        updates = [json.loads(await asyncio.wait_for(process.stdout.readline(), 120)) for _ in range(2)]
    assert [(update["reset"], update["snapshot"]) for update in updates] == [(True, True), (False, False)]
    assert updates[0]["changes"][0]["instance_id"] == "a"
    assert int(updates[1]["revision"]) >= int(updates[0]["revision"]) > 0


@contextmanager
def screen() -> Iterator[tuple[int, list[bytes]]]:
    """A terminal to write to, and everything that was written to it."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: shown.append(os.read(ours, 100_000)))
    try:
        yield theirs, shown
    finally:
        loop.remove_reader(ours)
        os.close(theirs)
        os.close(ours)


async def test_a_terminal_gets_a_progress_bar(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    fleet.pause()
    with screen() as (terminal_end, shown):
        async with lmkv("move", "--from", "a", "--to", "b", "--tokens", TOKENS, stderr=terminal_end) as process:
            await until(lambda: b"0/3 chunks" in b"".join(shown))
            fleet.resume()
            out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    assert b"3 chunks (40 tokens) arrived" in out


async def test_top_redraws_a_terminal_until_ctrl_c(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    with screen() as (terminal_end, shown):
        async with lmkv("top", "--interval", "50ms", stdout=terminal_end) as process:
            await until(lambda: b"".join(shown).count(b"no operation runs") >= 2)
            fleet.pause()
            async with Coordinator(fleet.address) as coordinator:
                move = await coordinator.move(PROMPT, source="a", destination="b")
            await until(lambda: move.name.encode() in b"".join(shown))
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 120) == 130


async def test_ctrl_c_while_waiting_leaves_the_operation_running(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    fleet.pause()
    with screen() as (terminal_end, shown):
        async with lmkv("move", "--from", "a", "--to", "b", "--tokens", TOKENS, stderr=terminal_end) as process:
            await until(lambda: b"0/3 chunks" in b"".join(shown))
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 120) == 130
        await until(lambda: b"cancels it" in b"".join(shown))
    said = re.search(
        r"(move-[0-9a-f]{16}) continues; `lmkv ops wait \1` waits for it, `lmkv ops cancel \1` cancels it",
        b"".join(shown).decode(),
    )
    assert said
    fleet.resume()
    async with Coordinator(fleet.address) as coordinator:
        operation = await coordinator.operation(said[1])
        assert (await operation.wait(60)).chunk_count == 3


async def test_ctrl_c_before_the_answer_says_that_the_order_may_have_been_heard() -> None:
    called = asyncio.Event()

    async def be_silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.set()
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        writer.close()

    async with await asyncio.start_server(be_silent, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        order = ("clear", "--all", "--yes", "--coordinator", f"127.0.0.1:{port}")
        async with lmkv(*order) as process:
            await asyncio.wait_for(called.wait(), 120)
            process.send_signal(signal.SIGINT)
            _, error = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 130
    hint = "`lmkv ops` shows whether the operation was started"
    assert error.decode() == f"the coordinator has not responded yet; {hint}\n"
