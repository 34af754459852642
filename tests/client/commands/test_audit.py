"""`lmkv audit --node` has every hit of a node audited for a time, and prints what its engines compare."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from lmkv.cli import main
from lmkv.keys import ChunkKey, join_keys
from lmkv.v1 import engine_service_pb2 as pb
from lmkv_server.node.node import Node
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import node_config
from tests.waiting import until

KEY = ChunkKey(b"k" * 16)


def compared(outcome: pb.AuditOutcome.ValueType, mean: float) -> pb.AuditedChunks:
    """One compared chunk."""
    chunk = pb.AuditedChunk(chunk_key=KEY, layers=[pb.LayerDifference(layer=2, mean=mean, most=2 * mean)])
    keys = join_keys([KEY]) if outcome == pb.AUDIT_OUTCOME_WRONG else b""
    return pb.AuditedChunks(chunk_count=1, wrong_keys=keys, outcome=outcome, chunk=chunk)


async def run(runtime_dir: Path, outcomes: list[pb.AuditOutcome.ValueType], *arguments: str) -> int:
    """The exit code of the command, while an engine compares chunks with these outcomes."""
    async with Node(node_config(runtime_dir, "a")) as node, EngineClient(node) as engine:
        path = str(node.config.engine_socket.parent)
        command = ["audit", "--node", path, "--chunks", str(len(outcomes)), *arguments]
        running = asyncio.create_task(asyncio.to_thread(main, command))
        await engine.hear("audit_hits")
        for number, outcome in enumerate(outcomes, 1):
            await engine.say(audited=compared(outcome, number / 1000))
        return await running


async def test_comparisons_of_a_node_are_counted_and_shown(
    runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    equal = [pb.AUDIT_OUTCOME_EQUAL] * 3
    assert await run(runtime_dir, equal) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == ["3", "3", "0", "0"]
    assert lines[3] == ["0", "2", "0.003", "0.006"]


async def test_a_wrong_chunk_is_named_with_its_record(runtime_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = [pb.AUDIT_OUTCOME_SUSPECT, pb.AUDIT_OUTCOME_VOID, pb.AUDIT_OUTCOME_WRONG]
    assert await run(runtime_dir, found, "--json") == 1
    captured = capsys.readouterr()
    numbers = json.loads(captured.out)
    assert numbers["outcomes"] == {"suspect": 1, "void": 1, "wrong": 1}
    assert numbers["wrong_keys"] == [KEY.hex()]
    assert f"chunk {KEY.hex()} is wrong" in captured.err


async def test_an_interrupted_audit_shows_what_it_knows_and_audits_no_more(runtime_dir: Path) -> None:
    async with Node(node_config(runtime_dir, "a")) as node, EngineClient(node) as engine:
        command = [sys.executable, "-m", "lmkv", "audit", "--node", str(node.config.engine_socket), "--time", "1h"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        await engine.hear("audit_hits")
        await engine.say(audited=compared(pb.AUDIT_OUTCOME_WRONG, 0.5))
        assert process.stderr
        assert b"is wrong" in await process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
        assert process.returncode == 130
        assert out.decode().splitlines()[1].split() == ["1", "0", "0", "1"]
        await until(lambda: not node.audits.is_watched)
        (ended,) = await engine.hear("audit_hits")
        assert not ended.duration.seconds


def test_what_to_audit_must_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit"]) == 2
    assert "name an engine and a prompt (--url, --prompt), or a node (--node)" in capsys.readouterr().err
    assert main(["audit", "--url", "http://localhost:1"]) == 2
    assert "name the prompt" in capsys.readouterr().err
    assert main(["audit", "--url", "http://localhost:1", "--file", str(tmp_path / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
    assert main(["audit", "--node", str(tmp_path)]) == 1
    assert "no node answers" in capsys.readouterr().err
