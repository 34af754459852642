"""The picker as a server: tokens, TLS, names whose addresses change, and the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from lmkv.config import PickerConfig
from lmkv.errors import ConfigError
from lmkv_server.proxy import engines as engines_module
from lmkv_server.proxy.picker.picker import Picker
from lmkv_server.proxy.picker.selection import address_of
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.picker.conftest import MakePicker, host_port
from tests.server.proxy.picker.published import Gateway
from tests.server.proxy.scripted_engine import MODEL
from tests.support.certificates import issue
from tests.support.tokens import bearer, entry, write

BODY = json.dumps({"model": MODEL, "prompt": "once upon a time"}).encode()
RUN = [
    sys.executable,
    "-c",
    "import sys\n"
    "from lmkv.cli import main\n"
    "from lmkv_server.flags import picker\n"
    "sys.exit(main(sys.argv[1:], {'picker': lambda: picker}))",
    "picker",
]


async def test_calls_need_a_token_if_tokens_are_set(
    make_engine: MakeEngine, make_picker: MakePicker, tmp_path: Path
) -> None:
    engine = await make_engine("i-0")
    tokens = write(tmp_path / "tokens.yaml", entry("engine"), entry("reader"))
    front = await make_picker([engine], auth_tokens=tokens)
    async with front.gateway.exchange() as exchange:
        assert await exchange.call.code() == grpc.StatusCode.UNAUTHENTICATED
    known = Gateway(front.channel, bearer("engine-token"))
    assert await known.pick(BODY) == host_port(engine)
    assert (await front.get("/metrics")).status_code == 401
    assert (await front.get("/metrics", authorization="Bearer reader-token")).status_code == 200
    assert (await front.get("/healthz")).status_code == 200


async def test_the_gateway_connects_over_tls(make_engine: MakeEngine, make_picker: MakePicker, tmp_path: Path) -> None:
    engine = await make_engine("i-0")
    server = issue(tmp_path).server
    front = await make_picker([engine], tls_cert=server.cert, tls_key=server.key)
    ca = (tmp_path / "ca.pem").read_bytes()
    async with grpc.aio.secure_channel(front.picker.address, grpc.ssl_channel_credentials(ca)) as channel:
        assert await Gateway(channel).pick(BODY) == host_port(engine)


async def test_each_address_of_a_name_is_an_engine_as_long_as_it_has_it(
    make_engine: MakeEngine, make_picker: MakePicker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [await make_engine(f"i-{number}") for number in range(3)]
    found = [engine.url for engine in engines[:2]]

    async def resolve(_: str) -> frozenset[str]:
        return frozenset(found)

    monkeypatch.setattr(engines_module, "RESOLVE_SECONDS", 0.01)
    front = await make_picker(engines[:1], healthy=False, urls=("http://vllm-pods:8000",), resolve=resolve)

    async def healthy(expected: list[Any]) -> None:
        addresses = sorted(map(host_port, expected))
        await until(lambda: sorted(address_of(one) for one in front.picker.engines if one.is_healthy) == addresses)

    await healthy(engines[:2])
    found[0] = engines[2].url
    await healthy(engines[1:])
    found.clear()  # DNS fails
    assert {await front.gateway.pick(BODY) for _ in range(4)} == {host_port(engine) for engine in engines[1:]}
    await healthy(engines[1:])


async def test_an_address_is_resolved_to_itself_and_an_unknown_name_to_nothing() -> None:
    assert await engines_module.resolve("http://127.0.0.1:8000") == {"http://127.0.0.1:8000"}
    assert await engines_module.resolve("https://[::1]:8000") == {"https://[::1]:8000"}
    assert await engines_module.resolve("http://no-such-host.invalid:8000") == frozenset()


def test_what_is_missing_in_the_configuration_is_named() -> None:
    with pytest.raises(ConfigError, match="there is no engine; set engines"):
        Picker(PickerConfig())
    with pytest.raises(ConfigError, match="set coordinator_address, or policy"):
        Picker(PickerConfig(engines=("http://127.0.0.1:8000",)))


async def test_a_port_in_use_is_named(make_engine: MakeEngine, make_picker: MakePicker) -> None:
    engine = await make_engine("i-0")
    front = await make_picker([engine])
    with pytest.raises(ConfigError, match=f"port {front.picker.port} on 127.0.0.1 is in use"):
        await make_picker([engine], port=front.picker.port)


def start(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment)


async def test_the_command_serves_and_ends_cleanly(make_engine: MakeEngine, tmp_path: Path) -> None:
    engine = await make_engine("i-0")
    log = tmp_path / "log"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    arguments = ["--port", "0", "--metrics-port", "0", "--policy", "least_loaded", "--engine", engine.url]
    process = start([*RUN, *arguments], log, environment)
    try:
        await until(lambda: " is healthy, " in log.read_text() or process.poll() is not None)
        ready = re.search(r"Ready on (\S+)", log.read_text())
        assert ready, log.read_text()
        async with grpc.aio.insecure_channel(ready[1]) as channel:
            assert await Gateway(channel).pick(BODY) == host_port(engine)
        process.send_signal(signal.SIGTERM)
        await until(lambda: process.poll() is not None)
    finally:
        process.kill()
        process.wait(timeout=60)
    assert process.returncode == 0
    assert "Stopped" in log.read_text()
    assert "Traceback" not in log.read_text()
