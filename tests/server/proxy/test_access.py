"""The page and the metrics require credentials of the proxy; requests carry those of the engines."""

from __future__ import annotations

from pathlib import Path

from tests.server.proxy.conftest import MakeProxy
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine
from tests.support.tokens import entry, write


async def test_page_and_metrics_ask_for_a_token_and_requests_do_not(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy, tmp_path: Path
) -> None:
    path = write(tmp_path / "tokens.yaml", entry("reader"))
    front = await make_proxy([prefiller], [decoder], auth_tokens=path)
    for place in ("/", "/metrics", "/static/proxy.js"):
        refused = await front.client.get(place)
        assert refused.status_code == 401
        assert "Basic" in refused.headers["www-authenticate"]
        assert (await front.client.get(place, headers={"Authorization": "Bearer reader-token"})).status_code == 200
        assert (await front.client.get(place, auth=("me", "reader-token"))).status_code == 200
    for place in ("/healthz", "/readyz", "/v1/models"):
        assert (await front.client.get(place)).status_code == 200
    body = {"model": MODEL, "prompt": "once upon", "max_tokens": 2}
    assert (await front.ask("/v1/completions", body)).status_code == 200
