"""The node as a process: how it starts, what it refuses at the start, and how it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from lmkv.config import CoordinatorConfig
from lmkv.config.kinds import OFF
from lmkv_server.coordinator.coordinator import Coordinator
from tests.server.node.engine_client import EngineClient
from tests.server.node.node_parts import NodeProcess, is_locked, listens
from tests.waiting import WAIT_SECONDS, rests, wait_until

StartNode = Callable[..., NodeProcess]


@pytest.fixture
def start_node(runtime_dir: Path) -> Iterator[StartNode]:
    """Starts `lmkv node` processes, and kills them in the end."""
    started: list[NodeProcess] = []

    def start(*flags: str, **settings: str) -> NodeProcess:
        started.append(NodeProcess(runtime_dir, flags, settings))
        return started[-1]

    yield start
    for node in started:
        node.process.kill()
        node.process.wait()


# ---- start and end of the process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_stopped_node_leaves_nothing(start_node: StartNode, number: signal.Signals) -> None:
    node = start_node().ready()
    assert is_locked(node.config.lock_path)
    assert node.stop(number) == 0, node.output
    assert not node.socket.exists()
    assert not node.config.pool_socket.exists()
    assert not is_locked(node.config.lock_path)
    assert "Traceback" not in node.output
    assert "ERROR" not in node.output
    assert re.search(rf"stopping: {number.name} from process {os.getpid()} \('.+'\), user {os.getuid()}", node.output)


def test_a_signal_that_is_ignored_when_a_node_starts_does_not_end_it(start_node: StartNode) -> None:
    """As under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        node = start_node().ready()
    finally:
        signal.signal(signal.SIGHUP, before)
    node.process.send_signal(signal.SIGHUP)
    assert node.stop() == 0
    assert "SIGHUP" not in node.output
    assert "stopping: SIGTERM" in node.output


def test_a_node_ends_while_an_engine_is_attached(start_node: StartNode) -> None:
    node = start_node().ready()

    async def attached() -> None:
        async with EngineClient(node.socket) as engine:
            await engine.reserve(3)
            node.process.terminate()
            error = await engine.ending()
            assert error is not None
            assert error.reason == "UNREACHABLE"

    asyncio.run(attached())
    assert node.exit_code() == 0, node.output
    assert "Traceback" not in node.output


def test_a_node_that_was_killed_can_be_started_again_at_once(start_node: StartNode) -> None:
    node = start_node().ready()
    node.stop(signal.SIGKILL)
    assert node.socket.exists(), "what a killed node leaves behind"
    again = start_node().ready()
    assert again.stop() == 0
    assert not again.socket.exists()


def test_a_second_node_of_the_same_id_is_refused_and_the_first_serves_on(start_node: StartNode) -> None:
    first = start_node().ready()
    line = start_node().refusal()
    assert "instance_id: 'n' is already run by process" in line
    assert str(first.process.pid) in line
    assert listens(first.socket)
    assert first.stop() == 0


def test_a_port_in_use_is_refused_by_its_key(start_node: StartNode) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = start_node(enable_p2p="true", p2p_port=str(port)).refusal()
    assert f"p2p_port: cannot listen on 127.0.0.1:{port}" in line


def test_more_memory_than_there_is_is_refused_by_its_key(start_node: StartNode) -> None:
    assert "max_local_cpu_size: " in start_node(max_local_cpu_size="500000").refusal()


def test_an_unknown_flag_is_refused_with_a_suggestion(start_node: StartNode) -> None:
    line = start_node("--max-local-cpu-sice", "5").refusal()
    assert "--max-local-cpu-sice" in line
    assert "--max-local-cpu-size" in line


def test_an_unknown_variable_is_refused_by_its_name(
    start_node: StartNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("max_local_cpu: 5\n")
    line = start_node("--config", str(file)).refusal()
    assert "unknown key max_local_cpu" in line


def test_a_path_too_long_for_sockets_is_refused_by_its_key(runtime_dir: Path) -> None:
    long = runtime_dir / ("x" * 90)
    command = [sys.executable, "-m", "lmkv", "node", "--runtime-dir", str(long), "--enable-p2p", "false"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert ended.returncode == 2
    assert "runtime_dir makes the socket path" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_pool_on_a_file_system_has_no_name_there(start_node: StartNode, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    node = start_node(pool_path=str(path)).ready()
    assert not path.exists()
    assert node.stop() == 0


def test_an_unused_node_exits(start_node: StartNode) -> None:
    node = start_node("--linger", node_linger="0.3").ready()

    async def attached() -> None:
        async with EngineClient(node.socket):
            await asyncio.sleep(1.0)  # longer than it would linger
            assert node.process.poll() is None, "an engine needs it"

    asyncio.run(attached())
    assert node.exit_code() == 0, node.output
    assert not node.socket.exists()


def test_a_node_without_linger_stays(start_node: StartNode) -> None:
    node = start_node(node_linger="0").ready()

    async def attached() -> None:
        async with EngineClient(node.socket):
            pass

    asyncio.run(attached())
    wait_until(lambda: rests(lambda: cpu_seconds(node.process.pid)))
    assert node.process.poll() is None
    assert node.stop() == 0


def test_with_no_linger_at_all_a_node_waits_for_its_first_engine_and_rests_meanwhile(start_node: StartNode) -> None:
    node = start_node("--linger", node_linger="0").ready()

    async def attached() -> None:
        async with EngineClient(node.socket):
            rested = partial(rests, lambda: cpu_seconds(node.process.pid))
            await asyncio.to_thread(wait_until, rested, "it does not spin")

    asyncio.run(attached())
    assert node.exit_code() == 0


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_node_uses_no_cpu(start_node: StartNode) -> None:
    node = start_node(enable_p2p="true").ready()
    wait_until(lambda: rests(lambda: cpu_seconds(node.process.pid), 2.0), "it rests once the pool is resident")
    assert node.stop() == 0


async def test_two_nodes_with_one_id_are_distinguished_at_the_start(start_node: StartNode, runtime_dir: Path) -> None:
    other = runtime_dir / "other"
    other.mkdir()
    async with Coordinator(CoordinatorConfig(port=0, http_port=OFF)) as coordinator:
        fleet = {"enable_p2p": "true", "coordinator_address": coordinator.address}
        first = start_node(**fleet)
        await asyncio.to_thread(first.ready)
        second = start_node(runtime_dir=str(other), **fleet)
        assert "instance_id" in await asyncio.to_thread(second.refusal)
        assert listens(first.socket)
        assert await asyncio.to_thread(first.stop) == 0


# ---- folders that others could have planted


@pytest.mark.parametrize("planted", ["link", "subfolder link", "open to all", "another user's"])
def test_a_disk_folder_that_others_could_have_planted_is_refused_in_one_line(
    start_node: StartNode, runtime_dir: Path, planted: str
) -> None:
    victim, disk = runtime_dir / "victim", runtime_dir / "disk"
    victim.mkdir()
    (victim / "rest.new").touch()
    if planted == "link":
        disk.symlink_to(victim)
    else:
        disk.mkdir()
    if planted == "subfolder link":
        (disk / "n").symlink_to(victim)
    elif planted == "open to all":
        disk.chmod(0o777)
    elif planted == "another user's":
        if os.getuid():
            pytest.skip("only root gives folders away")
        os.chown(disk, 12345, 12345)
    refusal = start_node(local_disk=str(disk), max_local_disk_size="64MB").refusal()
    assert refusal.startswith(f"lmkv: error: local_disk: {disk}")
    assert refusal.endswith(", or set local_disk to another")
    assert [path.name for path in victim.iterdir()] == ["rest.new"], "nothing was written or removed there"


@pytest.mark.parametrize("planted", ["link", "open to all"])
def test_a_runtime_dir_that_others_could_have_planted_is_refused_in_one_line(
    start_node: StartNode, runtime_dir: Path, planted: str
) -> None:
    place = runtime_dir / "place"
    if planted == "link":
        place.symlink_to(runtime_dir)
    else:
        place.mkdir()
        place.chmod(0o777)
    refusal = start_node(runtime_dir=str(place)).refusal()
    assert refusal.startswith(f"lmkv: error: runtime_dir: {place}")
    assert not (place / "n").exists()
