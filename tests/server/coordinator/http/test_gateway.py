"""RPCs as JSON over HTTP: the same answers and refusals that gRPC gives."""

from __future__ import annotations

import base64
from typing import Any

import httpx
import pytest
from google.protobuf import json_format

from lmkv.v1 import registry_service_pb2
from tests.support.node_stub import registration

LOOKUP = "/lmkv.v1.CacheService/Lookup"
INSTANCES = "/lmkv.v1.RegistryService/ListInstances"


async def test_an_rpc_answers_what_grpc_answers(http: httpx.AsyncClient, registry: Any) -> None:
    said = registry_service_pb2.Instance(instance_id="a", epoch=1, peer_address="127.0.0.1:7000")
    await registry.Register(registration(said), timeout=60)
    response = await http.post(INSTANCES, json={"page_size": 5})
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    over_grpc = await registry.ListInstances(registry_service_pb2.ListInstancesRequest(page_size=5), timeout=60)
    over_http = json_format.ParseDict(response.json(), registry_service_pb2.ListInstancesResponse())
    for listed in (over_grpc, over_http):  # times of expiry are counted from now
        listed.instances[0].ClearField("expire_time")
        listed.instances[0].ClearField("register_time")
    assert over_http == over_grpc
    assert over_grpc.instances[0].instance_id == "a"


async def test_no_body_is_an_empty_request(http: httpx.AsyncClient) -> None:
    for response in (
        await http.post(INSTANCES),
        await http.post(INSTANCES, content=b" ", headers={"Content-Type": "application/json; charset=utf-8"}),
        await http.post(INSTANCES, json={}),
    ):
        assert (response.status_code, response.json()) == (200, {})


def asking(token_ids: Any, **fields: Any) -> dict[str, Any]:
    """A body that names a prompt by tokens."""
    return {"prompt": {"tokens": {"token_ids": token_ids} | fields}}


def keyed(field: str, *keys: bytes) -> dict[str, Any]:
    """A body that names a prompt by keys, under either name of the field."""
    return {"prompt": {"keys": {field: [base64.b64encode(key).decode() for key in keys]}}}


@pytest.mark.parametrize("field", ["chunk_keys", "chunkKeys"])
async def test_fields_go_by_both_names_and_bytes_are_base64(http: httpx.AsyncClient, field: str) -> None:
    response = await http.post(LOOKUP, json=keyed(field, bytes(16), bytes(16)))
    assert response.status_code == 200
    assert int(response.json()["revision"]) > 0
    refused = await http.post(LOOKUP, json=keyed(field, bytes(17)))
    assert refused.status_code == 400
    assert refused.json()["details"][0]["reason"] == "BAD_CHUNK_KEY"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (asking([1, -2]), "-2 is negative"),
        (asking([1, "x"]), "x"),
        (asking([1, 1 << 40]), "1099511627776"),
        (asking("1,2"), "token_ids"),
        (asking([[1]]), "token_ids"),
        (asking({"a": 1}), "token_ids"),
        ({"prompt": {"tokens": {"tokenIds": [1]}, "keys": {"chunkKeys": ["AAAA"]}}}, "oneof"),
        ({"tokens": [1]}, "tokens"),
        (asking([1], model_name=7), "model_name"),
        ({"prompt": {"keys": {"chunk_keys": ["A"]}}}, "chunk_keys"),
        ({"prompt": {"keys": {"chunk_keys": [*["A" * 22] * 5000, "A"]}}}, "Invalid base64"),  # as a large body is read
        ({"prompt": {"keys": {"chunk_keys": "AAAA"}}}, "chunk_keys"),
    ],
)
async def test_a_bad_request_is_400_and_says_why(http: httpx.AsyncClient, body: Any, says: str) -> None:
    response = await http.post(LOOKUP, json=body)
    assert response.status_code == 400, response.text
    status = response.json()
    assert status["code"] == 3
    assert says in status["message"]
    assert status["details"][0]["domain"] == "lmkv.v1"


@pytest.mark.parametrize("body", [b"{", b"[1]", b"7", b"null", b'"x"', b"\xff\xfe", b'{"tokens":[1}', b"[" * 100_000])
async def test_what_is_no_json_object_is_400(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post(LOOKUP, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400, response.text
    assert response.json()["code"] == 3


async def test_a_body_that_does_not_say_it_is_json_is_415_with_the_fix(http: httpx.AsyncClient) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = await http.post(LOOKUP, content=b"{}", headers=headers)
        assert response.status_code == 415
        assert "Content-Type: application/json" in response.json()["message"]


async def test_a_huge_body_is_413_whether_it_says_its_length_or_not(http: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(100):
            yield b" " * 65_536

    for content in (b" " * (5 << 20), endless()):
        response = await http.post(LOOKUP, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 413, response.text
    assert (await http.post(INSTANCES)).status_code == 200


async def test_wrong_methods_and_paths_say_what_is_right(http: httpx.AsyncClient) -> None:
    wrong_method = await http.get(LOOKUP)
    assert (wrong_method.status_code, wrong_method.headers["allow"]) == (405, "POST")
    assert "takes POST" in wrong_method.json()["message"]
    for path in (
        "/lmkv.v1.CacheService/Find",
        "/lmkv.v1.RegistryService/Register",
        "/lmkv.internal.v1.ReportService/Report",
    ):
        response = await http.post(path, json={})
        assert response.status_code == 404
        assert path in response.json()["message"]
    elsewhere = await http.post("/find", json={})
    assert elsewhere.status_code == 404
    assert "/find" in elsewhere.json()["detail"]
