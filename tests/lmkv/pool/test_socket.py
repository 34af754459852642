"""Passing of the pool between real processes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lmkv.errors import ConfigError, Unreachable
from lmkv.pool import socket as pool_socket
from lmkv.pool.pool import Pool
from lmkv.pool.socket import FdOffer, FdServer, PoolSocket, attach
from tests.support.interruptions import Interrupter, Kind
from tests.waiting import WAIT_SECONDS, until

MB = 1 << 20
EPOCH = 7


class Node:
    """A served pool, and who came and went."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events: list[tuple[str, str, int]] = []
        self.pool = Pool.create(MB)
        self.socket = PoolSocket(
            path,
            self.pool,
            EPOCH,
            on_worker=lambda engine_id, rank: self.events.append(("came", engine_id, rank)),
            on_worker_gone=lambda engine_id, rank: self.events.append(("gone", engine_id, rank)),
        )


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="lmkv") as path:
        yield Path(path)


@pytest.fixture
async def node(directory: Path) -> AsyncIterator[Node]:
    node = Node(directory / "pool.sock")
    async with node.socket:
        yield node
    node.pool.close()
    assert not node.path.exists()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


WORKER = """
import sys, time
from lmkv.pool.socket import attach
attached = attach(sys.argv[1], "engine-1", int(sys.argv[2]), 7, 60.0)
attached.pool.buffer[int(sys.argv[2])] = 42
print("written", flush=True)
time.sleep(60)
"""


def start_worker(path: Path, rank: int) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WORKER, str(path), str(rank)], stdout=subprocess.PIPE, text=True)


async def test_a_worker_process_writes_and_the_node_sees_it_and_its_death(node: Node) -> None:
    with start_worker(node.path, 3) as worker:
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == "written\n"
        assert node.pool.buffer[3] == 42
        assert node.events == [("came", "engine-1", 3)]
        worker.kill()
        await until(lambda: len(node.events) == 2)
    assert node.events[1] == ("gone", "engine-1", 3)


async def test_a_frozen_worker_is_not_taken_for_gone(node: Node) -> None:
    with start_worker(node.path, 0) as worker:
        assert worker.stdout is not None
        await asyncio.to_thread(worker.stdout.readline)
        worker.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.1)
        assert node.events == [("came", "engine-1", 0)]
        worker.kill()
        await until(lambda: len(node.events) == 2)


async def test_a_worker_that_vanishes_before_the_answer_is_gone(node: Node) -> None:
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(node.path))
        worker.sendall(b'{"engine_id": "e", "rank": 0, "epoch": 7}\n')
    await until(lambda: len(node.events) == 2)
    assert node.events == [("came", "e", 0), ("gone", "e", 0)]


async def test_as_many_workers_as_the_limit_are_attached_at_a_time(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_socket, "MAX_RECEIVERS", 2)
    for number in range(3):
        first, second = [await asyncio.to_thread(attach, node.path, "e", rank, EPOCH, 60.0) for rank in range(2)]
        with pytest.raises(Unreachable, match="2 processes are attached already"):
            await asyncio.to_thread(attach, node.path, "e", 2, EPOCH, 60.0)
        first.close()
        second.close()
        await until(lambda number=number: len(node.events) == 4 * (number + 1))  # type: ignore[misc]


async def test_a_worker_whose_connection_fails_is_gone(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupter = Interrupter(monkeypatch, (pool_socket.FdServer, "_answer"))
    node = Node(directory / "pool.sock")
    async with node.socket:
        for interruption in interrupter.every_await(Kind.FAIL):
            node.events.clear()
            with suppress(Unreachable):
                (await asyncio.to_thread(attach, node.path, "e", 0, EPOCH, 60.0)).close()
            interruption.end()
            (await asyncio.to_thread(attach, node.path, "last", 0, EPOCH, 60.0)).close()
            await until(lambda: ("gone", "last", 0) in node.events)
            assert [kind for kind, name, _ in node.events if name == "e"] in ([], ["came", "gone"])
    node.pool.close()


async def test_closing_says_goodbye(node: Node) -> None:
    attached = await asyncio.to_thread(attach, node.path, "e", 0, EPOCH, 60.0)
    attached.close()
    attached.close()
    await until(lambda: node.events == [("came", "e", 0), ("gone", "e", 0)])


async def test_several_workers_share_the_memory(node: Node) -> None:
    workers = [await asyncio.to_thread(attach, node.path, "e", rank, EPOCH, 60.0) for rank in range(3)]
    for rank, worker in enumerate(workers):
        worker.pool.buffer[rank] = rank + 1
    assert bytes(node.pool.buffer[:3]) == b"\1\2\3" == bytes(workers[0].pool.buffer[:3])
    for worker in workers:
        worker.close()
    await until(lambda: len(node.events) == 6)


async def test_a_worker_keeps_its_memory_when_the_node_closes(node: Node) -> None:
    attached = await asyncio.to_thread(attach, node.path, "e", 0, EPOCH, 60.0)
    attached.pool.buffer[0] = 5
    await node.socket.aclose()
    await node.socket.aclose()
    node.pool.close()
    attached.pool.populate()
    assert attached.pool.buffer[0] == 5
    attached.close()
    assert node.events == [("came", "e", 0)]


async def test_a_worker_of_another_epoch_is_refused(node: Node) -> None:
    with pytest.raises(Unreachable, match="this node runs epoch 7, not 6"):
        await asyncio.to_thread(attach, node.path, "e", 0, 6, 5.0)
    assert node.events == []


@pytest.mark.parametrize(
    "hello",
    [
        b"nonsense\n",
        b"[1]\n",
        b"[" * 4000 + b"\n",
        b"\xff\xfe\n",
        b'{"engine_id": "", "rank": 0, "epoch": 7}\n',
        b'{"engine_id": "e", "rank": -1, "epoch": 7}\n',
        b'{"engine_id": "e", "rank": 0}\n',
        b"x" * 5000,
    ],
)
async def test_a_hello_that_makes_no_sense_is_refused_and_the_next_worker_served(node: Node, hello: bytes) -> None:
    def greet() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)
            connection.connect(str(node.path))
            connection.sendall(hello)
            return connection.recv(4096)

    try:
        assert b'"error"' in await asyncio.to_thread(greet)
    except ConnectionResetError:  # it had not read all of the line
        assert len(hello) > pool_socket.MAX_LINE_BYTES
    (await asyncio.to_thread(attach, node.path, "e", 0, EPOCH, 60.0)).close()
    await until(lambda: len(node.events) == 2)


async def test_a_worker_that_says_nothing_is_dropped(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_socket, "HELLO_SECONDS", 0.05)

    def wait() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60.0)
            connection.connect(str(node.path))
            return connection.recv(4096)

    assert b"invalid hello" in await asyncio.to_thread(wait)


async def test_only_its_user_may_connect(node: Node) -> None:
    assert stat.S_IMODE(node.path.stat().st_mode) == 0o600


async def test_the_socket_of_a_dead_node_is_replaced(directory: Path) -> None:
    path = directory / "pool.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    node = Node(path)
    async with node.socket:
        (await asyncio.to_thread(attach, path, "e", 0, EPOCH, 60.0)).close()
    node.pool.close()


async def test_the_socket_of_a_living_node_is_left_alone(node: Node) -> None:
    second = Node(node.path)
    with pytest.raises(ConfigError, match=r"^runtime_dir: another node listens at .*; give this one another"):
        await second.socket.start()
    second.pool.close()
    (await asyncio.to_thread(attach, node.path, "e", 0, EPOCH, 60.0)).close()


async def test_paths_that_cannot_be_listened_at_are_refused_by_name(directory: Path) -> None:
    (directory / "file").write_text("")
    for path in (directory / "missing" / "pool.sock", directory / "file", directory / ("x" * 120)):
        node = Node(path)
        with pytest.raises(ConfigError, match=r"^runtime_dir: cannot listen at "):
            await node.socket.start()
        await node.socket.aclose()
        node.pool.close()
    assert (directory / "file").exists()


async def test_closing_leaves_a_newer_nodes_socket(directory: Path) -> None:
    path = directory / "pool.sock"
    old, new = Node(path), Node(path)
    await old.socket.start()
    path.unlink()
    async with new.socket:
        await old.socket.aclose()
        (await asyncio.to_thread(attach, path, "e", 0, EPOCH, 60.0)).close()
    old.pool.close()
    new.pool.close()


def test_no_node_is_unreachable_at_once(directory: Path) -> None:
    with pytest.raises(Unreachable, match="No such file"):
        attach(directory / "none", "e", 0, EPOCH, 60.0)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "timed out"),
        (b"", "truncated"),
        (b"what\n", "Expecting value"),
        (b"[]\n", "not an object"),
        (b'{"size_bytes": 4096, "epoch": 7}\n', "has 0 file descriptors"),
        (b"x" * 5000, "too long"),
    ],
)
def test_a_node_that_answers_badly_or_not_is_unreachable_in_time(
    directory: Path, answer: bytes | None, words: str
) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "bad.sock"))
        listener.listen()
        done = threading.Event()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                if answer is None:
                    done.wait(WAIT_SECONDS)
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        files = open_files()
        with pytest.raises(Unreachable, match=words):
            attach(directory / "bad.sock", "e", 0, EPOCH, 0.3)
        assert not done.is_set(), "it does not wait for the end of the connection"
        done.set()
        thread.join()
        assert open_files() <= files


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (8192, "greater than file size"),
        (1 << 70, "too large"),
        (0, "is not the pool of epoch 7"),
        (-4096, "is not the pool of epoch 7"),
    ],
)
def test_a_pool_of_another_size_than_the_node_says_is_not_mapped(directory: Path, size_bytes: int, words: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener, Pool.create(4096) as pool:
        listener.bind(str(directory / "bad.sock"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                answer = {"size_bytes": size_bytes, "epoch": 7}
                socket.send_fds(connection, [json.dumps(answer).encode() + b"\n"], [pool.fd])

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Unreachable, match=words):
            attach(directory / "bad.sock", "e", 0, EPOCH, 60.0)
        thread.join()


NODE = """
import asyncio, sys
from pathlib import Path
from lmkv.pool.pool import Pool
from lmkv.pool.socket import PoolSocket

async def main():
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    with Pool.create(1 << 20, path) as pool:
        pool.buffer[:5] = b"bytes"
        quiet = lambda engine_id, rank: None
        async with PoolSocket(Path(sys.argv[1]), pool, 7, on_worker=quiet, on_worker_gone=quiet):
            print("ready", flush=True)
            await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("in_file", [False, True])
def test_a_worker_reads_on_after_its_node_was_killed_and_attaches_to_the_next(directory: Path, in_file: bool) -> None:
    path = directory / "pool.sock"
    command = [sys.executable, "-c", NODE, str(path), *([str(directory / "pool")] if in_file else [])]
    held = []
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n"
            held.append(attach(path, "e", 0, EPOCH, 60.0))
            node.kill()
    for attached in held:
        assert bytes(attached.pool.buffer[:5]) == b"bytes"
        attached.pool.populate()
        attached.pool.buffer[-1] = 1
        attached.close()
    assert [entry.name for entry in directory.iterdir()] == ["pool.sock"]


async def test_a_worker_that_keeps_a_view_stays_connected_until_it_is_gone(node: Node) -> None:
    attached = await asyncio.to_thread(attach, node.path, "engine-1", 0, EPOCH, 60.0)
    view = attached.pool.buffer[:8]
    attached.close_when_unused()
    attached.close_when_unused()
    assert attached.pool.closed
    view[0] = 42
    assert node.pool.buffer[0] == 42
    with await asyncio.to_thread(attach, node.path, "engine-2", 0, EPOCH, 60.0):  # served after all that came before
        assert ("gone", "engine-1", 0) not in node.events
    del view
    await until(lambda: ("gone", "engine-1", 0) in node.events)


async def test_a_worker_without_views_disconnects_at_once(node: Node) -> None:
    attached = await asyncio.to_thread(attach, node.path, "engine-1", 0, EPOCH, 60.0)
    attached.close_when_unused()
    await until(lambda: ("gone", "engine-1", 0) in node.events)


async def test_the_pool_of_another_epoch_is_not_attached(directory: Path) -> None:
    """A worker would write to extents that this epoch has not granted."""
    pool = Pool.create(MB)
    fields = {"size_bytes": MB, "epoch": EPOCH + 1}
    path = directory / "pool.sock"
    async with FdServer(path, lambda _: FdOffer(fd=pool.fd, fields=fields, on_disconnect=lambda: None), "another"):
        with pytest.raises(Unreachable, match=f"is not the pool of epoch {EPOCH}"):
            await asyncio.to_thread(attach, path, "engine", 0, EPOCH, WAIT_SECONDS)
    pool.close()
