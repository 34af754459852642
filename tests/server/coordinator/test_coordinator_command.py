"""`lmkv coordinator` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from google.longrunning import operations_pb2_grpc

from lmkv import rpc
from lmkv.rpc.messages import by_tokens
from lmkv.v1.cache_service_pb2 import ClearRequest, PinRequest, WatchRequest
from lmkv.v1.cache_service_pb2_grpc import CacheServiceStub
from lmkv.v1.chunk_pb2 import Position
from tests.server.coordinator.cases import PROMPT, keys_of
from tests.server.coordinator.scripted_instance import ScriptedInstance, until
from tests.support.certificates import issue
from tests.support.operations import wait_for_operation
from tests.support.specs import LLAMA
from tests.support.tokens import entry, write

RUN = [
    sys.executable,
    "-c",
    "import sys\n"
    "from lmkv.cli import main\n"
    "from lmkv_server.flags import coordinator\n"
    "sys.exit(main(sys.argv[1:], {'coordinator': lambda: coordinator}))",
    "coordinator",
]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")} | {
    "PYTHONPATH": os.pathsep.join(sys.path)
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_it_says_when_it_is_ready_and_ends_cleanly(number: signal.Signals) -> None:
    with subprocess.Popen([*RUN, "--port", "0"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            ready = re.search(r"Ready on 127\.0\.0\.1:(\d+)$", line.strip())
            assert ready, line
            socket.create_connection(("127.0.0.1", int(ready[1])), timeout=60).close()
            process.send_signal(number)
            rest = process.stderr.read()
            assert process.wait(timeout=60) == 0, rest
            assert "Traceback" not in rest
            assert f"stopping: {number.name} from process {os.getpid()} (" in rest
        finally:
            process.kill()


def test_a_port_in_use_is_one_line_and_exit_code_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [*RUN, "--port", str(port)], capture_output=True, text=True, timeout=120, check=False, env=ENVIRONMENT
        )
    assert done.returncode == 2
    assert done.stderr == (
        f"lmkv: error: port {port} on 127.0.0.1 is in use; set port to a free port, or stop the process that uses it\n"
    )


def test_one_that_others_reach_warns_unless_it_asks_for_tokens_over_tls(tmp_path: Path) -> None:
    tokens = write(tmp_path / "tokens.yaml", entry("reader"))
    pair = issue(tmp_path / "tls")
    for flags, first in (
        (
            [],
            "WARNING any client that reaches 0.0.0.0 may call it: set auth_tokens or tls_client_ca, or bind 127.0.0.1",
        ),
        (["--auth-tokens", tokens], "WARNING tokens are sent to 0.0.0.0 unencrypted: set tls_cert and tls_key"),
        (["--auth-tokens", tokens, "--tls-cert", pair.cert, "--tls-key", pair.key], "INFO Ready on"),
    ):
        command = [*RUN, "--port", "0", "--host", "0.0.0.0", *flags]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
            try:
                assert process.stderr is not None
                assert first in process.stderr.readline()
            finally:
                process.kill()


def test_a_tokens_file_that_is_wrong_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text("tokens: [{name: a, role: reader, token: s3cret}]")
    done = subprocess.run(
        [*RUN, "--port", "0", "--auth-tokens", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"lmkv: error: auth_tokens: {path}: Object contains unknown field `token`")
    assert "s3cret" not in done.stderr


def test_a_layout_map_url_that_is_none_is_one_line_and_exit_code_2() -> None:
    for url, expected in (
        (
            "s3://bucket",
            "LMKV_LAYOUT_MAP_URL must be valkey://HOST:PORT/DB, redis:// or rediss:// the same, not what it is",
        ),
        ("redis://:s3cret@127.0.0.1:1?nonsense=1", "layout_map_url: redis://127.0.0.1:1/0 has an invalid option"),
    ):
        done = subprocess.run(
            [*RUN, "--port", "0"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**ENVIRONMENT, "LMKV_LAYOUT_MAP_URL": url},
        )
        assert done.returncode == 2
        assert expected in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert "s3cret" not in done.stderr


HELD = dict(zip(keys_of(PROMPT, secret=b""), (16, 16, 8), strict=True))
"""The prompt's chunks, as a coordinator without a cluster secret knows them."""


@pytest.fixture
def free_ports(free_port: Callable[[], int]) -> tuple[int, int]:
    """For gRPC and for HTTP."""
    return free_port(), free_port()


@pytest.fixture
def serving(free_ports: tuple[int, int]) -> Iterator[subprocess.Popen[str]]:
    """A coordinator that serves gRPC and HTTP."""
    arguments = ["--port", str(free_ports[0]), "--http-port", str(free_ports[1])]
    with subprocess.Popen([*RUN, *arguments], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        try:
            assert process.stderr is not None
            while "Ready on" not in (line := process.stderr.readline()):
                assert line, "it ended"
            yield process
        finally:
            process.kill()


async def test_calls_in_flight_end_before_a_coordinator_that_is_stopped(
    serving: subprocess.Popen[str], free_ports: tuple[int, int]
) -> None:
    fleet: dict[str, ScriptedInstance] = {}
    async with (
        rpc.open_channel(f"127.0.0.1:{free_ports[0]}") as channel,
        ScriptedInstance(channel, fleet, "a", LLAMA, HELD) as instance,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{free_ports[1]}", trust_env=False, timeout=120) as http,
    ):
        cache: Any = CacheServiceStub(channel)
        watching = cache.Watch(WatchRequest())
        await watching.read()
        instance.going.clear()
        over_grpc = asyncio.ensure_future(
            cache.Pin(PinRequest(prompt=by_tokens(PROMPT), position=Position(instance_id="a")), timeout=120)
        )
        over_http = asyncio.create_task(http.post("/pin", json={"instance_id": "a", "tokens": PROMPT}))
        await until(lambda: len(instance.orders) == 2)
        serving.send_signal(signal.SIGTERM)
        await until(lambda: refuses(free_ports[1]))
        await asyncio.sleep(1.0)  # a coordinator that ends calls has ended them by now
        instance.going.set()
        assert (await over_grpc).pin.token_count == 40
        assert (await over_http).json()["num_tokens"] == 40
        assert await asyncio.to_thread(serving.wait, 120) == 0


async def test_a_call_without_end_does_not_keep_a_coordinator_from_stopping(
    serving: subprocess.Popen[str], free_ports: tuple[int, int]
) -> None:
    async with rpc.open_channel(f"127.0.0.1:{free_ports[0]}") as channel:
        fleet: dict[str, ScriptedInstance] = {}
        async with ScriptedInstance(channel, fleet, "a", LLAMA, HELD) as instance:
            instance.going.clear()
            cache: Any = CacheServiceStub(channel)
            operations: Any = operations_pb2_grpc.OperationsStub(channel)
            clear = await cache.Clear(ClearRequest(prompt=by_tokens(PROMPT)), timeout=120)
            waiting = asyncio.ensure_future(wait_for_operation(operations, clear.name))
            await until(lambda: len(instance.orders) == 1)
            serving.send_signal(signal.SIGTERM)
            with pytest.raises(grpc.RpcError):
                await waiting
            assert await asyncio.to_thread(serving.wait, 120) == 0


def refuses(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except ConnectionRefusedError:
        return True
    return False


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_that_is_too_large_is_answered_though_the_client_sends_all_of_it(
    serving: subprocess.Popen[str], free_ports: tuple[int, int], connection: str, is_chunked: bool
) -> None:
    body = b'{"tokens": [' + b"1," * (12 << 20) + b"1]}"
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {len(body)}"
    head = f"POST /lookup HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: {connection}\r\n"
    with socket.create_connection(("127.0.0.1", free_ports[1]), timeout=120) as client:
        client.sendall(f"{head}{length}\r\n\r\n".encode())
        client.sendall(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if is_chunked else body)
        assert client.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_client_that_waits_for_leave_to_send_is_refused_at_once(
    serving: subprocess.Popen[str], free_ports: tuple[int, int]
) -> None:
    with socket.create_connection(("127.0.0.1", free_ports[1]), timeout=120) as connection:
        connection.sendall(
            b"POST /lookup HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            b"Content-Length: 999999999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 413")
