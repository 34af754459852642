"""`lmkv engines` changes a proxy over its port, and says what to do where it cannot."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from lmkv.cli import main
from lmkv_server.proxy.engine import Engine
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy, make_engine, make_proxy, stack
from tests.server.proxy.scripted_engine import MODEL
from tests.support.tokens import entry, write

__all__ = ["make_engine", "make_proxy", "stack"]  # fixtures of the proxy's tests

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 6, "temperature": 0}


async def run(front: Front, *arguments: str) -> int:
    return await asyncio.to_thread(main, ["engines", *arguments, "--proxy", front.proxy.url])


async def test_engines_are_listed_added_and_removed(
    make_engine: MakeEngine, make_proxy: MakeProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = await make_engine("i-0"), await make_engine("i-1")
    front = await make_proxy(engines=[first])
    assert await run(front, "add", second.url) == 0
    await front.all_healthy()
    capsys.readouterr()
    assert await run(front) == 0
    assert [line.split()[:5] for line in capsys.readouterr().out.splitlines()[1:]] == [
        [first.url, "both", "healthy", "0", "i-0"],
        [second.url, "both", "healthy", "0", "i-1"],
    ]
    assert await run(front, "remove", first.url, "--json") == 0
    assert [one["url"] for one in json.loads(capsys.readouterr().out)["engines"]] == [second.url]
    assert await run(front, "remove", first.url) == 1
    assert f"no engine has the URL {first.url}" in capsys.readouterr().err
    assert await run(front, "drain", second.url) == 0
    captured = capsys.readouterr()
    assert "drained, safe to stop" in captured.err
    assert "the proxy has no engine" in captured.out


async def test_a_drain_waits_and_an_interrupted_one_continues(make_engine: MakeEngine, make_proxy: MakeProxy) -> None:
    first, second = await make_engine("i-0"), await make_engine("i-1")
    front = await make_proxy(engines=[first])
    first.going.clear()
    running = asyncio.create_task(front.ask("/v1/completions", BODY))
    await until(lambda: first.waiting_count == 1)
    assert await run(front, "add", second.url) == 0
    assert await run(front, "drain", first.url, "--timeout", "0.01") == 1
    command = [sys.executable, "-m", "lmkv", "engines", "drain", first.url, "--proxy", front.proxy.url]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    assert await process.stderr.readline() == f"{first.url}: 1 request in flight\n".encode()
    process.send_signal(signal.SIGINT)
    errors = (await process.stderr.read()).decode()
    assert await process.wait() == 130
    assert errors == f"the drain of {first.url} continues; `lmkv engines` shows it\n"
    drain = asyncio.create_task(run(front, "drain", first.url))
    first.going.set()
    assert (await running).status_code == 200
    assert await drain == 0

    def urls() -> list[str]:
        engines: list[Engine] = front.proxy.pools.engines
        return [engine.url for engine in engines]

    await until(lambda: urls() == [second.url])


async def test_a_proxy_with_tokens_obeys_operators(
    make_engine: MakeEngine,
    make_proxy: MakeProxy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = await make_engine()
    path = write(tmp_path / "tokens.yaml", *(entry(role) for role in ("reader", "operator")))
    front = await make_proxy(engines=[engine], auth_tokens=path)
    assert await run(front) == 1
    assert "set auth_token or auth_token_file" in capsys.readouterr().err
    monkeypatch.setenv("LMKV_AUTH_TOKEN", "reader-token")
    assert await run(front) == 0
    assert await run(front, "remove", engine.url) == 1
    monkeypatch.setenv("LMKV_AUTH_TOKEN", "operator-token")
    assert await run(front, "remove", engine.url) == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("add",), "needs the URL"),
        (("list", "http://a:1"), "takes no URL"),
        (("drain", "http://a:1", "--role", "decode"), "--role is for"),
        (("--proxy", "ftp://a"), "--proxy must be http://HOST:PORT"),
    ],
)
def test_bad_usage_is_explained(arguments: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engines", *arguments]) == 2
    assert reason in capsys.readouterr().err
