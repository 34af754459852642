"""Pages of other sites cannot use a coordinator through the browser of a user."""

from __future__ import annotations

import httpx
import pytest

from lmkv.config import CoordinatorConfig
from lmkv_server.coordinator.coordinator import Coordinator

INSTANCES = "/lmkv.v1.RegistryService/ListInstances"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1", "https://localhost:1", ""])
async def test_a_foreign_origin_is_403_for_every_path(http: httpx.AsyncClient, origin: str) -> None:
    for method, path in (("POST", INSTANCES), ("GET", "/"), ("GET", "/lmkv.v1.CacheService/Watch")):
        response = await http.request(method, path, headers={"Origin": origin})
        assert response.status_code == 403
        assert "access-control-allow-origin" not in response.headers


async def test_its_own_pages_may_call(http: httpx.AsyncClient, coordinator: Coordinator) -> None:
    own = {"Origin": f"http://{coordinator.http_address}"}
    assert (await http.post(INSTANCES, headers=own)).status_code == 200
    port = coordinator.http_address.rpartition(":")[2]
    for name in (f"localhost:{port}", f"[::1]:{port}", "192.0.2.7"):
        assert (await http.post(INSTANCES, headers={"Host": name, "Origin": f"http://{name}"})).status_code == 200


async def test_a_foreign_host_name_is_403(http: httpx.AsyncClient) -> None:
    response = await http.post(INSTANCES, headers={"Host": "evil.example:9001", "Origin": "http://evil.example:9001"})
    assert response.status_code == 403
    assert "evil.example" in response.json()["message"]


async def test_a_coordinator_that_is_open_to_the_network_goes_by_any_name() -> None:
    async with Coordinator(CoordinatorConfig(host="0.0.0.0", port=0, http_port=0)) as coordinator:
        port = coordinator.http_address.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            assert (await http.post(INSTANCES, headers={"Host": "lmkv.svc:9001"})).status_code == 200


async def test_a_coordinator_goes_by_the_names_that_it_is_given() -> None:
    names = ("lmkv.example", "*.svc.cluster.local")
    async with Coordinator(CoordinatorConfig(host="0.0.0.0", port=0, http_port=0, allowed_hosts=names)) as coordinator:
        port = coordinator.http_address.rpartition(":")[2]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
            for name in ("lmkv.example", "LMKV.Example.:9001", "a.prod.svc.cluster.local", "127.0.0.1", "localhost:1"):
                assert (await http.post(INSTANCES, headers={"Host": name})).status_code == 200, name
            for name in ("evil.example", "lmkv.example.evil.example", "svc.cluster.local", "evilsvc.cluster.local"):
                assert (await http.post(INSTANCES, headers={"Host": name})).status_code == 403, name


async def test_every_answer_keeps_browsers_strict(http: httpx.AsyncClient) -> None:
    for response in (await http.get("/"), await http.post(INSTANCES), await http.post("/none")):
        assert "default-src 'self'" in response.headers["content-security-policy"]
        assert "unsafe" not in response.headers["content-security-policy"]
        assert response.headers["x-content-type-options"] == "nosniff"
