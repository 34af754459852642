"""The HTTP port describes itself, and the description is true."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from google.protobuf import json_format
from openapi_spec_validator import OpenAPIV31SpecValidator

from lmkv.v1.registry_service_pb2 import ListInstancesResponse
from tests.server.coordinator.cases import CHUNKS
from tests.server.coordinator.scripted_instance import Make


@pytest.fixture
async def description(http: httpx.AsyncClient) -> dict[str, Any]:
    response = await http.get("/openapi.json")
    assert response.headers["content-type"] == "application/json"
    described: dict[str, Any] = response.json()
    return described


async def test_it_is_valid_openapi(description: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(description).validate()


async def test_every_path_that_it_names_is_served(http: httpx.AsyncClient, description: dict[str, Any]) -> None:
    assert len(description["paths"]) >= 25
    for path, item in description["paths"].items():
        assert item.keys() <= {"get", "post"}
        if path.endswith("/Watch"):  # has no end
            continue
        for method, operation in item.items():
            assert operation["summary"].endswith(".")
            response = await http.request(method, path, json={"no such field": 1} if method == "post" else None)
            # A handler rejects a field that does not exist; nothing else does.
            expected = {400} if method == "post" else {200, 503}
            assert response.status_code in expected, f"{path}: {response.text}"


async def test_every_field_of_an_answer_is_described(
    http: httpx.AsyncClient, description: dict[str, Any], make: Make
) -> None:
    async with make("a", CHUNKS):
        answer = (await http.post("/lmkv.v1.RegistryService/ListInstances")).json()
    schemas = description["components"]["schemas"]
    instance = schemas["lmkv.v1.Instance"]["properties"]
    assert answer["instances"][0].keys() <= instance.keys()
    assert instance["epoch"]["type"] == "string"
    assert isinstance(answer["instances"][0]["epoch"], str)
    assert instance["registerTime"] == {"type": "string", "format": "date-time"}
    json_format.ParseDict(answer, ListInstancesResponse())


async def test_bodies_of_lmcaches_paths_say_what_is_required(description: dict[str, Any]) -> None:
    move = description["components"]["schemas"]["MoveBody"]
    assert sorted(move["required"]) == ["new_position", "old_position"]
    assert move["properties"]["tokens"] == {"type": "array", "items": {"type": "integer", "minimum": 0}}
    assert description["paths"]["/move"]["post"]["requestBody"]["content"]["application/json"]["schema"] == {
        "$ref": "#/components/schemas/MoveBody"
    }


async def test_the_page_that_shows_it_needs_nothing_from_elsewhere(http: httpx.AsyncClient) -> None:
    page = await http.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assert "://" not in page.text
    for name in ("docs.js", "docs.css", "swagger-ui-bundle.js", "swagger-ui.css", "swagger-ui.LICENSE.txt"):
        assert f"/static/{name}" in page.text
        file = await http.get(f"/static/{name}")
        kind = {"js": "text/javascript", "css": "text/css", "txt": "text/plain"}[name.rpartition(".")[2]]
        assert file.headers["content-type"].startswith(kind)
