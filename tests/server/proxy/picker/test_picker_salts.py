"""With a `cache_salt_policy` the gateway sends engines a salt that follows from the client's token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmkv.auth.cache_salts import TENANT, CacheSalts
from lmkv.config import PickerConfig
from lmkv.errors import ConfigError
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.proxy.picker.picker import Picker
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import Make
from tests.server.proxy.conftest import MakeEngine
from tests.server.proxy.picker.conftest import MakePicker, host_port
from tests.server.proxy.picker.published import Gateway, HttpExchange
from tests.server.proxy.picker.test_picks import TOKENS, body, looking_up, some
from tests.server.proxy.routing.test_route import SPEC
from tests.support.tokens import bearer, entry, write

SECRET = "hush"
A, B = ({"authorization": f"Bearer client-of-team-{name}-token"} for name in "ab")
SALT_A, SALT_B = (CacheSalts(TENANT, SECRET).derive(f"team-{name}") for name in "ab")
ENDPOINT = "x-gateway-destination-endpoint"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Tokens of two tenants and of the gateway, and the policy `tenant`."""
    tokens = write(tmp_path / "tokens.yaml", entry("client", "team-a"), entry("client", "team-b"), entry("reader"))
    return {"auth_tokens": tokens, "cluster_secret": SECRET, "cache_salt_policy": TENANT}


def gateway(front: Any) -> Gateway:
    return Gateway(front.channel, bearer("reader-token"))


def changes(answer: Any) -> tuple[dict[str, str], list[str]]:
    mutation = getattr(answer, answer.WhichOneof("response")).response.header_mutation
    return {one.header.key: one.header.raw_value.decode() for one in mutation.set_headers}, list(
        mutation.remove_headers
    )


async def refusal(exchange: HttpExchange) -> int:
    answer = await exchange.answer()
    assert answer.WhichOneof("response") == "immediate_response"
    return int(answer.immediate_response.status.code)


@pytest.mark.parametrize("parts", [1, 7])
async def test_the_body_is_returned_with_the_clients_salt(
    make_engine: MakeEngine, make_picker: MakePicker, settings: dict[str, Any], parts: int
) -> None:
    front = await make_picker(await some(make_engine, 1), **settings)
    sent = body(cache_salt=SALT_A, prompt="x" * 100_000)
    for headers, tenant in ((A, "team-a"), (B, "team-b")):
        async with gateway(front).exchange() as exchange:
            shown, removed = changes(await exchange.pick(sent, parts, headers=headers))
            returned = await exchange.body()
        assert int(shown["content-length"]) == len(returned)
        assert removed == ["authorization"]
        salt = CacheSalts(TENANT, SECRET).derive(tenant, wish=SALT_A)
        assert json.loads(returned) == json.loads(sent) | {"cache_salt": salt}


async def test_a_buffered_body_is_replaced(
    make_engine: MakeEngine, make_picker: MakePicker, settings: dict[str, Any]
) -> None:
    front = await make_picker(await some(make_engine, 1), **settings, engine_api_key="of-engines")
    async with gateway(front).exchange() as exchange:
        await exchange.send_headers(mode="BUFFERED", headers=A)
        await exchange.answer()
        await exchange.send(request_body={"body": body(), "end_of_stream": True})
        answer = await exchange.answer()
    shown, removed = changes(answer)
    replaced = answer.request_body.response.body_mutation.body
    assert json.loads(replaced)["cache_salt"] == SALT_A
    assert (shown["content-length"], shown["authorization"]) == (str(len(replaced)), "Bearer of-engines")
    assert removed == []


async def test_the_engine_that_holds_the_tenants_prompt_is_picked(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_picker: MakePicker, settings: dict[str, Any]
) -> None:
    engines = await some(make_engine)
    async with (
        make("i-1", keys_of(TOKENS, SPEC, cache_salt=SALT_A), SPEC),
        make("i-2", keys_of(TOKENS, SPEC, cache_salt=SALT_B), SPEC),
    ):
        front = await looking_up(make_picker, engines, coordinator.address, **settings)
        for headers, number in ((A, 1), (B, 2), (A, 1)):
            async with gateway(front).exchange() as exchange:
                shown, _ = changes(await exchange.pick(body(), headers=headers))
            assert shown[ENDPOINT] == host_port(engines[number])


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 401), ({"authorization": "Bearer unknown"}, 401), ({"authorization": "Bearer reader-token"}, 403)],
    ids=["no token", "an unknown token", "the gateway's own token"],
)
async def test_only_clients_reach_engines(
    make_engine: MakeEngine,
    make_picker: MakePicker,
    settings: dict[str, Any],
    headers: dict[str, str],
    status: int,
) -> None:
    front = await make_picker(await some(make_engine, 1), **settings)
    for options in ({}, {"path": "/v1/models", "end": True}):
        async with gateway(front).exchange() as exchange:
            await exchange.send_headers(headers=headers, **options)  # type: ignore[arg-type]
            if not options:
                await exchange.send(request_body={"body": body(), "end_of_stream": True})
            assert await refusal(exchange) == status
    assert front.metric("lmkv_picker_requests_total", outcome="refused") == 2


async def test_a_request_that_cannot_be_salted_is_refused(
    make_engine: MakeEngine, make_picker: MakePicker, settings: dict[str, Any]
) -> None:
    front = await make_picker(await some(make_engine, 1), **settings, max_body_size=1 / 2**20)
    async with gateway(front).exchange() as exchange:
        await exchange.send_headers(mode="NONE", headers=A)
        assert await refusal(exchange) == 400
    for sent, status in ((b"x" * 2000, 413), (b"[]", 400), (b"{", 400), (body(cache_salt=""), 400)):
        async with gateway(front).exchange() as exchange:
            await exchange.send_headers(path="/v1/unknown", headers=A)
            await exchange.send(request_body={"body": sent, "end_of_stream": True})
            assert await refusal(exchange) == status


async def test_paths_without_prompts_pass(
    make_engine: MakeEngine, make_picker: MakePicker, settings: dict[str, Any]
) -> None:
    front = await make_picker(await some(make_engine, 1), **settings)
    async with gateway(front).exchange() as exchange:
        assert "content-length" not in changes(await exchange.pick(b"[1]", path="/detokenize", headers=A))[0]
        assert await exchange.body() == b"[1]"
    async with gateway(front).exchange() as exchange:
        await exchange.send_headers(path="/v1/models", end=True, headers={":method": "GET"} | A)
        assert ENDPOINT in changes(await exchange.answer())[0]


def test_a_policy_needs_tokens_and_a_secret() -> None:
    config = PickerConfig(engines=("http://a:1",), policy="least_loaded", cache_salt_policy=TENANT, cluster_secret="x")
    with pytest.raises(ConfigError, match="needs auth_tokens"):
        Picker(config)
