"""`lmkv proxy` as a process of its own, with the manual's command line."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from lmkv.config import ProxyConfig, load
from lmkv.errors import ConfigError
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine

RUN = [
    sys.executable,
    "-c",
    "import sys\n"
    "from lmkv.cli import main\n"
    "from lmkv_server.flags import proxy\n"
    "sys.exit(main(sys.argv[1:], {'proxy': lambda: proxy}))",
    "proxy",
]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("LMKV_")} | {
    "PYTHONPATH": os.pathsep.join(sys.path)
}
BODY = {"model": MODEL, "prompt": "Write me a story", "max_tokens": 100, "ignore_eos": True}


def text_of(log: Path) -> str:
    """What the process has logged so far."""
    return log.read_text(encoding="utf-8")


def start(log: Path, *arguments: object) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen([*RUN, *map(str, arguments)], stderr=out, stdout=out, env=ENVIRONMENT)


@asynccontextmanager
async def started(log: Path, *arguments: object) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """The process and its URL."""
    process = start(log, *arguments)
    try:
        await until(lambda: "Ready on" in text_of(log) or process.poll() is not None)
        ready = re.search(r"Ready on (\S+)", text_of(log))
        assert ready, text_of(log)
        yield process, ready[1]
    finally:
        process.kill()
        process.wait(timeout=60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_the_manuals_command_line_works_and_ends_cleanly(
    tmp_path: Path, prefiller: ScriptedEngine, decoder: ScriptedEngine, number: signal.Signals
) -> None:
    log = tmp_path / "log"
    manual = ["--host", "localhost", "--port", 0, "--prefiller-host", "localhost", "--prefiller-port", prefiller.port]
    manual += ["--num-prefillers", 1, "--decoder-host", "localhost", "--decoder-port", decoder.port]
    manual += ["--decoder-init-port", 7300, "--decoder-alloc-port", 7400, "--proxy-host", "localhost"]
    manual += ["--proxy-port", 7500, "--num-decoders", 1]
    async with (
        started(log, *manual) as (process, url),
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
    ):
        await until(lambda: text_of(log).count(" is healthy, ") == 2)
        answer = (await client.post("/v1/completions", json=BODY)).json()
        assert answer["usage"]["completion_tokens"] == 100
        process.send_signal(number)
        await until(lambda: process.poll() is not None)
    lines = text_of(log)
    assert process.returncode == 0, lines
    assert "Traceback" not in lines
    assert f"stopping: {number.name} from process {os.getpid()} (" in lines
    for flag in ("--decoder-init-port", "--decoder-alloc-port", "--proxy-host", "--proxy-port"):
        assert len(re.findall(rf"{flag} on the command line is ignored: ", lines)) == 1
    assert re.search(r" lmkv proxy INFO latencies of 1 request, .*; Prefill node TTFT \d+\.\d\d / ", lines)


async def test_it_routes_by_its_flags(tmp_path: Path, prefiller: ScriptedEngine, decoder: ScriptedEngine) -> None:
    flags = ["--mode", "route", "--engine", prefiller.url, "--engine", decoder.url, "--policy", "round-robin"]
    log = tmp_path / "log"
    async with (
        started(log, "--port", 0, *flags) as (_, url),
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client,
    ):
        await until(lambda: text_of(log).count(" is healthy, ") == 2)
        for _ in range(4):
            assert (await client.post("/v1/completions", json=BODY)).status_code == 200
    assert (len(prefiller.asked), len(decoder.asked)) == (2, 2)


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


@pytest.mark.parametrize(
    ("flags", "places"),
    [
        ({}, (["127.0.0.1:7100"], ["127.0.0.1:7200"])),
        ({"num_prefillers": "2"}, (["127.0.0.1:7100", "127.0.0.1:7101"], ["127.0.0.1:7200"])),
        ({"prefiller_host": "a,b", "prefiller_port": "1"}, (["a:1", "b:1"], ["127.0.0.1:7200"])),
        ({"decoder_host": "a,b", "decoder_port": "1,2"}, (["127.0.0.1:7100"], ["a:1", "b:2"])),
        ({"decoder_port": "5,9", "num_decoders": "2"}, (["127.0.0.1:7100"], ["127.0.0.1:5", "127.0.0.1:9"])),
        ({"decoder_host": "::1"}, (["127.0.0.1:7100"], ["[::1]:7200"])),
    ],
)
def test_hosts_and_ports_make_engines(flags: dict[str, str], places: tuple[list[str], list[str]]) -> None:
    config = load(ProxyConfig, env={}, flags=flags)
    assert (list(config.prefillers), list(config.decoders)) == places


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"mode": "route"}, "mode is route, but there is no engine"),
        ({"engine": ["http://a:1"]}, "engine is for mode route, but mode is pd"),
        ({"policy": "kv_aware"}, "set coordinator_address"),
        ({"policy": "random"}, "policy must be one of round_robin, least_loaded, kv_aware"),
        ({"prefiller_host": "a,b", "num_prefillers": "3"}, "--prefiller-host has 2 values, but there are 3 prefillers"),
        ({"decoder_port": "1,2,3", "num_decoders": "2"}, "--decoder-port has 3 values, but there are 2 decoders"),
        ({"decoder_port": "65535", "num_decoders": "2"}, "--decoder-port 65535 is too high for 2 consecutive ports"),
        ({"decoder_port": "0"}, "--decoder-port must be ports from 1 to 65535"),
        ({"mode": "route", "engine": ["ftp://a:1"]}, "engine must be engines such as http://10.0.0.7:8000"),
        ({"mode": "route", "engine": ["http://a"]}, "engine must be engines such as http://10.0.0.7:8000"),
        ({"session_header": "no header"}, "--session-header must be the name of a header"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message).replace(r"\ ", " ")):
        load(ProxyConfig, env={}, flags=flags)


@pytest.mark.parametrize("raw", [["http://a:1", "b:2/"], "http://a:1,b:2", '["http://a:1", "http://b:2"]'])
def test_engines_may_be_written_in_several_ways(raw: object) -> None:
    config = load(ProxyConfig, env={}, flags={"mode": "route", "engine": raw})
    assert config.engines == ("http://a:1", "http://b:2")


def test_the_documentation_lists_every_metric(make_metrics: Callable[[], set[str]]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    names = make_metrics()
    assert len(names) > 10
    assert [name for name in sorted(names) if f"`{name}" not in page] == []


@pytest.fixture
def make_metrics() -> Callable[[], set[str]]:
    from lmkv_server.proxy.metrics import ProxyMetrics

    def make() -> set[str]:
        return {family.name for family in ProxyMetrics([]).registry.collect() if family.name.startswith("lmkv_proxy")}

    return make
