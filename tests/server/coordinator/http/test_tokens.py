"""Token ids are lifted out of a body without changing what it says."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmkv_server.coordinator.http.bodies import lift_tokens, token_array
from tests.server.coordinator.cases import CHUNKS, PROMPT
from tests.server.coordinator.scripted_instance import Make

JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=8)


@given(st.lists(st.integers(0, 2**32 - 1)), st.dictionaries(st.text(), JSON, max_size=3), st.sampled_from([None, 1]))
def test_a_body_is_its_rest_and_its_tokens(ids: list[int], others: dict[str, Any], indent: int | None) -> None:
    others.pop("tokens", None)
    rest, text = lift_tokens(json.dumps({"tokens": ids, **others}, indent=indent).encode())
    assert text is not None
    assert token_array(text).tolist() == ids
    assert json.loads(rest) == {"tokens": [], **others}


@pytest.mark.parametrize(
    "body",
    [b"", b"{}", b"[", b'{"tokens":"[1]"}', b'{"model_name":"a","tokens":[1]}', b'{"tokens":[1', b'{"token":[1]}'],
)
def test_a_body_that_begins_otherwise_is_left_alone(body: bytes) -> None:
    assert lift_tokens(body) == (body, None)


@pytest.mark.parametrize(
    ("body", "holders"),
    [
        (f'{{"tokens": {PROMPT}, "model_name": "llama"}}', ["a"]),
        (f'{{"model_name": "llama", "tokens": {PROMPT}}}', ["a"]),
        (f'{{"tokens": [1], "tokens": {PROMPT}}}', ["a"]),
        (f'{{"tokens": {PROMPT}, "tokens": [1]}}', []),
    ],
)
async def test_it_does_not_matter_where_the_tokens_stand(
    http: httpx.AsyncClient, make: Make, body: str, holders: list[str]
) -> None:
    async with make("a", CHUNKS):
        response = await http.post("/lookup", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text
    assert list(response.json()["layout_info"]) == holders


@pytest.mark.parametrize("body", ['{"tokens": [[1], 2]}', '{"tokens": ["]"]}', '{"tokens": [1]]}', '{"tokens": [1], }'])
async def test_what_is_no_list_of_ids_is_400(http: httpx.AsyncClient, body: str) -> None:
    for path in ("/lookup", "/health"):
        response = await http.post(path, content=body, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
