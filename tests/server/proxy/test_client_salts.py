"""With a `cache_salt_policy`, engines get a salt that follows from the client's token, whatever the client sends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lmkv.auth.cache_salts import TENANT, USER, CacheSalts
from lmkv.config import ProxyConfig
from lmkv.errors import ConfigError
from lmkv_server.coordinator.coordinator import Coordinator
from lmkv_server.proxy.openai import CHAT, COMPLETIONS, MESSAGES
from tests.server.coordinator.cases import keys_of
from tests.server.coordinator.scripted_instance import Make, until
from tests.server.proxy.conftest import Front, MakeEngine, MakeProxy
from tests.server.proxy.routing.test_route import SPEC
from tests.server.proxy.scripted_engine import MODEL, ScriptedEngine, tokens_of
from tests.support.tokens import entry, write

SECRET = "hush"
TEXT = "the prompt of team a, which is long enough for three chunks of sixteen"
EMBEDDINGS = "/v1/embeddings"
PROMPT = {"model": MODEL, "prompt": TEXT, "max_tokens": 2}
CHAT_BODY = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 2}
A, B = ({"Authorization": f"Bearer client-of-team-{name}-token"} for name in "ab")
SALTS = {policy: CacheSalts(policy, SECRET) for policy in (TENANT, USER)}


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Tokens of two tenants, and the policy `tenant`."""
    callers = [entry("client", "team-a"), entry("client", "team-b"), entry("reader"), entry("engine", "team-a")]
    tokens = write(tmp_path / "tokens.yaml", *callers)
    return {"auth_tokens": tokens, "cluster_secret": SECRET, "cache_salt_policy": TENANT}


def salts_of(*engines: ScriptedEngine) -> list[str]:
    """The salts that engines were asked with, oldest first."""
    return [body.get("cache_salt", "") for engine in engines for body in engine.bodies()]


async def send(front: Front, body: dict[str, Any], headers: dict[str, str], path: str = COMPLETIONS) -> None:
    answer = await front.ask(path, body, **headers)
    assert answer.status_code == 200, answer.text


async def test_tenants_get_salts_of_their_own(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings)
    for headers in (A, B, A):
        await send(front, PROMPT, headers)
        await send(front, CHAT_BODY, headers, CHAT)
    a, b = SALTS[TENANT].derive("team-a"), SALTS[TENANT].derive("team-b")
    assert salts_of(engine) == [a, a, b, b, a, a]


async def test_a_client_only_splits_the_salt_of_its_own_tenant(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings)
    of_a = SALTS[TENANT].derive("team-a")
    for wish in ("mine", of_a, "team-a"):
        await send(front, PROMPT | {"cache_salt": wish}, A)
        await send(front, PROMPT | {"cache_salt": wish, "user": "team-a"}, B)
    found = salts_of(engine)
    assert found[0] == SALTS[TENANT].derive("team-a", wish="mine")
    assert of_a not in found
    assert not set(found[::2]) & set(found[1::2])


async def test_a_body_that_names_the_salt_twice_has_one_salt(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings)
    content = f'{{"cache_salt": "x", "model": "{MODEL}", "prompt": "p", "max_tokens": 1, "cache_salt": "y"}}'
    headers = {"Content-Type": "application/json", **B}
    assert (await front.client.post(COMPLETIONS, content=content, headers=headers)).status_code == 200
    assert salts_of(engine) == [SALTS[TENANT].derive("team-b", wish="y")]


async def test_users_are_named_by_requests_or_by_the_header(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engine = ScriptedEngine("i-0")
    engine.other_paths = (MESSAGES,)
    await engine.start()
    by_user, salts = settings | {"cache_salt_policy": USER}, SALTS[USER]
    try:
        front = await make_proxy(engines=[engine], **by_user)
        await send(front, PROMPT | {"user": "ann"}, A)
        await send(front, PROMPT | {"user": "ann"}, B)
        await send(front, PROMPT, A)
        await send(front, {"model": MODEL, "metadata": {"user_id": "ann"}}, A, MESSAGES)
        of_ann = salts.derive("team-a", "ann")
        assert salts_of(engine) == [of_ann, salts.derive("team-b", "ann"), salts.derive("team-a"), of_ann]
        engine.asked.clear()
        front = await make_proxy(engines=[engine], **by_user, user_header="X-User")
        await send(front, PROMPT | {"user": "bob"}, A | {"X-User": "ann"})
        await send(front, PROMPT | {"user": "ann"}, A)
        assert salts_of(engine) == [of_ann, salts.derive("team-a")], "the header alone counts"
    finally:
        await engine.stop()


async def test_both_engines_of_a_handoff_get_the_salt(
    prefiller: ScriptedEngine, decoder: ScriptedEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    front = await make_proxy([prefiller], [decoder], **settings)
    for more in ({}, {"seed": 1}, {"stream": True}, {"n": 2}):  # continue, repeat, a stream, several answers
        await send(front, PROMPT | {"max_tokens": 4} | more, A)
    found = salts_of(prefiller, decoder)
    assert len(found) >= 6
    assert set(found) == {SALTS[TENANT].derive("team-a")}


async def test_other_paths_are_salted_too(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    paths = (MESSAGES, "/v1/responses", "/v1/embeddings")
    engine = ScriptedEngine("i-0")
    engine.other_paths = (*paths, "/detokenize")
    await engine.start()
    try:
        front = await make_proxy(engines=[engine], **settings)
        for path in paths:
            await send(front, {"model": MODEL, "input": TEXT, "cache_salt": "x"}, B, path)
        await send(front, {"model": MODEL, "tokens": [1]}, B, "/detokenize")
        assert salts_of(engine) == [SALTS[TENANT].derive("team-b", wish="x")] * 3 + [""]
    finally:
        await engine.stop()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer unknown"}, 401),
        ({"Authorization": "Bearer reader-token"}, 403),
        ({"Authorization": "Bearer engine-of-team-a-token"}, 403),
        (A | {"lmkv-tenant": "team-b"}, 403),
    ],
    ids=["no token", "an unknown token", "a reader", "an engine", "another tenant"],
)
async def test_only_clients_reach_engines(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any], headers: dict[str, str], status: int
) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings)
    answer = await front.ask(COMPLETIONS, PROMPT, **headers)
    assert answer.status_code == status
    assert (status == 401) == ("www-authenticate" in answer.headers)
    assert (await front.client.get("/v1/models", headers=headers)).status_code == status
    assert engine.asked == []


@pytest.mark.parametrize("more", [{"cache_salt": ""}, {"cache_salt": 1}, {"cache_salt": ["x"]}, {"user": 5}], ids=str)
async def test_values_that_are_no_text_are_refused(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any], more: dict[str, Any]
) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings | {"cache_salt_policy": USER})
    answer = await front.ask(COMPLETIONS, PROMPT | more, **A)
    assert (answer.status_code, engine.asked) == (400, [])
    assert next(iter(more)) in answer.json()["error"]["message"]


async def test_limits_of_a_token_apply(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any], tmp_path: Path
) -> None:
    callers = (entry("client", "team-a", max_concurrent_requests=1), entry("client", "team-b"))
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings | {"auth_tokens": write(tmp_path / "limits.yaml", *callers)})
    engine.going.clear()
    first = asyncio.create_task(front.ask(COMPLETIONS, PROMPT, **A))
    await until(lambda: engine.waiting_count == 1)
    refused = await front.ask(COMPLETIONS, PROMPT, **A)
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    other = asyncio.create_task(front.ask(COMPLETIONS, PROMPT, **B))
    await until(lambda: engine.waiting_count == 2)
    engine.going.set()
    assert [(await one).status_code for one in (first, other)] == [200, 200]
    await send(front, PROMPT, A)


async def test_engines_get_their_api_key_instead_of_a_token_of_the_proxy(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engine = await make_engine("i-0")
    engine.api_key = "of-engines"
    front = await make_proxy(engines=[engine], **settings, engine_api_key="of-engines")
    await send(front, PROMPT, A)
    assert [headers["authorization"] for _, _, headers in engine.asked] == ["Bearer of-engines"]
    other = await make_engine("i-1")
    front = await make_proxy(engines=[other], **settings)
    await send(front, PROMPT, A)
    assert ["authorization" in headers for _, _, headers in other.asked] == [False]


async def test_without_a_policy_requests_pass_as_they_are(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings | {"cache_salt_policy": "none"})
    await send(front, PROMPT, {})
    await send(front, PROMPT | {"cache_salt": "mine"}, A)
    assert salts_of(engine) == ["", "mine"]
    assert engine.asked[1][2]["authorization"] == A["Authorization"]


async def test_lookups_use_the_salt_that_the_engine_uses(
    coordinator: Coordinator, make: Make, make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    engines = [await make_engine(f"i-{number}") for number in range(3)]
    tokens = tokens_of({"prompt": TEXT})
    salts = [SALTS[TENANT].derive(tenant) for tenant in ("team-a", "team-b")]
    async with (
        make("i-1", keys_of(tokens, SPEC, cache_salt=salts[0]), SPEC),
        make("i-2", keys_of(tokens, SPEC, cache_salt=salts[1]), SPEC),
    ):
        routing = {"policy": "kv_aware", "coordinator_address": coordinator.address, "lookup_timeout": 20}
        front = await make_proxy(engines=engines, **settings, **routing)
        for headers in (A, A, B):
            await send(front, PROMPT, headers)
    assert [salts_of(engine) for engine in engines] == [[], [salts[0]] * 2, [salts[1]]]


@pytest.mark.parametrize("missing", ["auth_tokens", "cluster_secret"])
def test_a_policy_needs_tokens_and_a_secret(settings: dict[str, Any], missing: str) -> None:
    given = {name: value for name, value in settings.items() if name != missing}
    with pytest.raises(ConfigError, match=f"needs {missing}"):
        ProxyConfig(**given)


LONG_TEXTS = ("once " * 100_000, 'a "quoted" line\n' * 50_000, "\u00e9\U0001f600" * 50_000)


@pytest.mark.parametrize("prompt", [*LONG_TEXTS, [LONG_TEXTS[1]], list(LONG_TEXTS), list(range(100_000))])
async def test_long_prompts_arrive_as_they_were_sent_beside_the_salt(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any], prompt: Any
) -> None:
    """They are not decoded on their way."""
    engine = await make_engine("i-0", other_paths=(EMBEDDINGS,))
    front = await make_proxy(engines=[engine], **settings)
    body = {"model": MODEL, "input": prompt, "user": "u", "cache_salt": "mine"}
    await send(front, body, A, EMBEDDINGS)
    refused = await front.ask(COMPLETIONS, {"model": "unknown", "prompt": prompt, "cache_salt": "mine"}, **A)
    assert refused.status_code == 404, "the engine has read the model"
    salt = SALTS[TENANT].derive("team-a", wish="mine")
    embedding, completion = engine.bodies()
    assert embedding == body | {"cache_salt": salt}
    assert completion == {"model": "unknown", "prompt": prompt, "cache_salt": salt}


async def test_long_prompts_that_are_not_json_are_refused_by_the_engine(
    make_engine: MakeEngine, make_proxy: MakeProxy, settings: dict[str, Any]
) -> None:
    """Or by the proxy, if something besides the prompt is wrong."""
    engine = await make_engine("i-0")
    front = await make_proxy(engines=[engine], **settings)
    for content in ('{"prompt": "%s"' % ("x" * 100_000), '{"prompt": [%s}' % ("1," * 100_000)):
        answer = await front.client.post(
            COMPLETIONS, content=content, headers={**A, "content-type": "application/json"}
        )
        assert answer.status_code == 400
    assert not engine.bodies()
