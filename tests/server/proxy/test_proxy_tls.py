"""A proxy that speaks TLS to its clients and to its engines."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.auth.credentials import Credentials
from lmkv.config import ProxyConfig
from lmkv_server.proxy.proxy import Proxy
from tests.server.coordinator.scripted_instance import until
from tests.server.proxy.conftest import QUICK
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine
from tests.support.certificates import Certificates, issue, swap

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 4}


@pytest.fixture
async def engine(tmp_path: Path, stack: AsyncExitStack) -> ScriptedEngine:
    """An engine that requires a client certificate of its own issuer."""
    engine = ScriptedEngine(credentials=issue(tmp_path / "engine").strict_server)
    await engine.start()
    stack.push_async_callback(engine.stop)
    return engine


def engine_files(folder: Path) -> dict[str, Any]:
    own = Certificates(*(str(folder / "engine" / name) for name in ("ca.pem", "cert.pem", "key.pem")))
    return {"engine_tls_ca": own.ca, "tls_cert": own.cert, "tls_key": own.key}


def make_proxy(engine: ScriptedEngine, **settings: Any) -> Proxy:
    return Proxy(ProxyConfig(port=0, mode="route", engines=(engine.url,), **(QUICK | settings)))


async def post(url: str, credentials: Credentials) -> httpx.Response:
    async with httpx.AsyncClient(verify=credentials.client_contexts().get(), trust_env=False, timeout=60) as client:
        return await client.post(f"{url}/v1/completions", json=BODY)


async def test_a_request_uses_tls_on_every_connection(engine: ScriptedEngine, tmp_path: Path) -> None:
    files = engine_files(tmp_path)
    async with make_proxy(engine, **files) as proxy:
        await until(lambda: proxy.pools.engines[0].is_healthy)
        assert proxy.url.startswith("https://")
        assert (await post(proxy.url, Credentials(ca=files["engine_tls_ca"]))).status_code == 200


async def test_prefill_and_decode_engines_are_spoken_to_over_tls(engine: ScriptedEngine, tmp_path: Path) -> None:
    settings: dict[str, Any] = QUICK | engine_files(tmp_path)
    config = ProxyConfig(port=0, prefiller_port=(engine.port,), decoder_port=(engine.port,), **settings)
    async with Proxy(config) as proxy:
        await until(lambda: all(each.is_healthy for each in proxy.pools.engines))
        assert {each.url for each in proxy.pools.engines} == {engine.url}


async def test_an_engine_of_another_issuer_gets_no_request_and_the_key_is_named(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    stranger = issue(tmp_path / "stranger")
    async with make_proxy(engine, **engine_files(tmp_path) | {"engine_tls_ca": stranger.ca}) as proxy:
        trouble = "its certificate is not issued by engine_tls_ca"
        await until(lambda: proxy.pools.engines[0].failure.startswith(trouble))
        assert not engine.health_count


async def test_clients_see_a_new_certificate_and_new_issuers_without_a_restart(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    first, second = issue(tmp_path / "first"), issue(tmp_path / "second")
    served = swap(tmp_path / "proxy", first)
    files = {"tls_cert": served.cert, "tls_key": served.key, "tls_client_ca": served.ca}
    async with make_proxy(engine, **files) as proxy:
        assert (await post(proxy.url, first.known_client)).status_code == 503  # the engine knows neither
        swap(tmp_path / "proxy", second)
        assert (await post(proxy.url, second.known_client)).status_code == 503
        with pytest.raises(httpx.TransportError):
            await post(proxy.url, Credentials(ca=second.ca, cert=first.cert, key=first.key))
