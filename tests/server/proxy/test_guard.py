"""Pages of other sites cannot use a proxy, or read its page, through a browser on its machine."""

from __future__ import annotations

import pytest

from tests.server.proxy.conftest import MakeProxy
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine

BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 2}
SHOWN = ("/", "/metrics", "/static/proxy.js", "/v1/models", "/healthz", "/readyz")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Host": "evil.example"},
        {"Host": "evil.example:9100", "Origin": "http://evil.example:9100"},
    ],
)
async def test_a_foreign_origin_or_host_is_403_and_reaches_no_engine(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy, headers: dict[str, str]
) -> None:
    front = await make_proxy([prefiller], [decoder])
    for path in SHOWN:
        answer = await front.client.get(path, headers=headers)
        assert answer.status_code == 403, path
        assert "access-control-allow-origin" not in answer.headers
    refused = await front.ask("/v1/completions", BODY, **headers)
    assert refused.status_code == 403
    assert "may not call" in refused.json()["error"]["message"] or "allowed_hosts" in refused.json()["error"]["message"]
    assert not prefiller.asked
    assert not decoder.asked


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_a_body_that_a_page_may_send_without_a_preflight_is_415(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy, kind: str
) -> None:
    front = await make_proxy([prefiller], [decoder])
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
        answer = await front.client.post(
            path, content=b'{"model": "m"}', headers={"Content-Type": kind} if kind else {}
        )
        assert answer.status_code == 415, path
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
    assert not prefiller.asked
    assert not decoder.asked


async def test_programs_and_its_own_page_call_it_by_its_names(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy
) -> None:
    front = await make_proxy([prefiller], [decoder], allowed_hosts=("llm.example", "*.svc.cluster.local"))
    own = front.proxy.url.removeprefix("http://")
    port = own.rpartition(":")[2]
    for host in (own, f"localhost:{port}", "llm.example", "proxy.prod.svc.cluster.local:80", "192.0.2.1"):
        answer = await front.ask("/v1/completions", BODY, Host=host)
        assert answer.status_code == 200, host
    assert (await front.ask("/v1/completions", BODY, Origin=f"http://{own}")).status_code == 200
    as_json = {"Content-Type": "application/json; charset=utf-8"}
    assert (await front.client.post("/v1/completions", json=BODY, headers=as_json)).status_code == 200
    assert (await front.ask("/v1/completions", BODY, Host="evil.example")).status_code == 403


async def test_a_proxy_on_the_network_goes_by_any_name_unless_it_is_given_some(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy
) -> None:
    front = await make_proxy([prefiller], [decoder], host="0.0.0.0")
    assert (await front.ask("/v1/completions", BODY, Host="llm.example")).status_code == 200
    foreign = {"Host": "llm.example", "Origin": "http://evil.example"}
    assert (await front.ask("/v1/completions", BODY, **foreign)).status_code == 403
