"""A request that has ended keeps no memory: what its failure refers to is forgotten with it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import httpx
import pytest

from lmkv.auth.authenticator import Authenticator
from lmkv.auth.cache_salts import NONE
from lmkv.config import ProxyConfig
from lmkv_server.proxy.admission import Admission, AdmissionApp, AdmittedRequest, InvalidRequest
from lmkv_server.proxy.client_salts import ClientSalts
from lmkv_server.proxy.metrics import ProxyMetrics
from lmkv_server.proxy.openai import COMPLETIONS
from lmkv_server.proxy.routing.health import NoHealthyEngine


class Parsed:
    """What a handler makes of a body."""

    def __init__(self, body: object) -> None:
        self.body = body


@pytest.mark.parametrize(
    ("make_error", "status"), [(lambda: InvalidRequest(400, "no"), 400), (NoHealthyEngine, 503), (TimeoutError, 504)]
)
async def test_nothing_of_a_request_that_fails_stays_in_memory(
    make_error: Callable[[], Exception], status: int
) -> None:
    parsed: list[weakref.ref[Parsed]] = []

    async def serve(request: AdmittedRequest) -> None:
        body, error = Parsed(request.body), make_error()
        parsed.append(weakref.ref(body))
        raise error  # refers to this frame, which refers to it

    config = ProxyConfig(port=0, mode="route", engines=("http://127.0.0.1:1",))
    salts = ClientSalts(NONE, "", "", Authenticator(), "")
    app = AdmissionApp(Admission(config, ProxyMetrics([]), salts), serve)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://proxy") as client:
        gc.disable()
        try:
            assert (await client.post(COMPLETIONS, content=b"x" * 1000)).status_code == status
            assert parsed[0]() is None
        finally:
            gc.enable()
