"""Bodies of a coordinator's HTTP paths: a JSON answer, or an error with a status that HTTP has; its state stays valid.

A call is a number, which selects the path, and its body.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message

from lmkv.config import CoordinatorConfig
from lmkv.rpc.endpoints import MAX_MESSAGE_BYTES
from lmkv_server.coordinator.http import gateway, lmcache
from lmkv_server.coordinator.http.app import ONLY, _refusal
from lmkv_server.coordinator.http.bodies import HTTP_STATUS, routes, status_of
from lmkv_server.coordinator.http.tokenizers import Tokenizers, tokenizer_paths
from lmkv_server.coordinator.services.services import Services
from tests.fuzz.inputs import Input, calls
from tests.fuzz.promises import MAX_STATUS_BYTES
from tests.fuzz.targets.coordinator_rpcs import INSTANCE, SNAPSHOT
from tests.fuzz.virtual_loop import run as run_virtually
from tests.server.coordinator.cases import PROMPT
from tests.support.node_stub import registration

COVERS = (
    "lmkv_server.coordinator.http.bodies",
    "lmkv_server.coordinator.http.gateway",
    "lmkv_server.coordinator.http.lmcache",
    "lmkv_server.coordinator.http.bodies",
    "lmkv_server.coordinator.http.bodies",
)
MAX_CALLS = 4
MAX_FRAMES = 4
"""Parts of a streamed answer that are read; a watch has no end."""
STATUSES = {408, 413, 415, *HTTP_STATUS.values()} - {200}
Endpoint = Callable[[Request], Any]


def _endpoints(services: Services) -> dict[str, Endpoint]:
    """All paths that take a body."""
    handlers = {
        "lmkv.v1.CacheService": services.cache,
        "lmkv.v1.RegistryService": services.registry,
        "google.longrunning.Operations": services.operations,
    }
    paths = lmcache.paths(services) | tokenizer_paths(Tokenizers({}), services.core.instances.models)
    return {route.path: route.endpoint for route in (*gateway.routes(handlers, ONLY), *routes(paths))}


PATHS = sorted(_endpoints(Services(CoordinatorConfig(lease_ttl=30.0, cluster_secret="hush"))))
_NUMBERS = {path: number for number, path in enumerate(PATHS)}


def _calls(*parts: tuple[str, Any]) -> bytes:
    texts = ((path, body if isinstance(body, bytes) else json.dumps(body).encode()) for path, body in parts)
    return calls(*((_NUMBERS[path], text) for path, text in texts))


_CACHE = "/lmkv.v1.CacheService"
_BY_TOKENS = {"tokens": {"tokenIds": PROMPT, "modelName": "llama"}}
_BY_KEYS = {"keys": {"chunkKeys": ["AAAA"]}}
_OPERATIONS = "/google.longrunning.Operations"
SEEDS = [
    _calls(("/lookup", {"tokens": PROMPT, "model_name": "llama"}), ("/lookup", b'{"tokens": [1, 2], "tokens": [3]}')),
    _calls(("/lookup", b'{"tokens":[-1]}'), ("/lookup", b'{"tokens":' + b"[" * 200), ("/lookup", b'{"tokens":[1 ,2')),
    _calls(
        ("/move", {"tokens": PROMPT, "model_name": "llama", "old_position": ["a", "LocalCPUBackend"],
                   "new_position": ["a", "LocalDiskBackend"], "copy": True}),
        ("/check_finish", {"event_id": "move-1"}),
    ),
    _calls(("/clear", {"instance_id": "a", "location": "LocalCPUBackend"}), ("/clear", {"instance_id": "b"})),
    _calls(("/pin", {"instance_id": "a", "tokens": PROMPT, "model_name": "llama", "ttl": 1e300}), ("/pin", b"{}")),
    _calls(("/unpin", {"event_id": "pin-1"}), ("/health", {"instance_id": "a"})),
    _calls(("/query_instance", {"ip": "10.0.0.1"}), ("/query_worker_info", {"worker_ids": [0, 1]})),
    _calls(("/tokenize", {"prompt": "hi", "model": "llama"})),
    _calls((f"{_CACHE}/Lookup", {"prompt": _BY_TOKENS}), (f"{_CACHE}/Lookup", b"[1]")),
    _calls((f"{_CACHE}/Pin", {"position": {"instanceId": "a"}, "ttl": "5s", "prompt": _BY_KEYS})),
    _calls((f"{_CACHE}/Watch", {"startRevision": "1"}), (f"{_CACHE}/Watch", {"startRevision": -1})),
    _calls((f"{_OPERATIONS}/WaitOperation", {"name": "x", "timeout": "5s"}), (f"{_OPERATIONS}/ListOperations", b"")),
    _calls(("/lmkv.v1.RegistryService/ListInstances", {"pageSize": 1, "pageToken": "x"})),
]  # fmt: skip


def run(data: bytes) -> None:
    """Makes the calls of an input."""
    run_virtually(_run(Input(data)))


async def _run(source: Input) -> None:
    services = Services(CoordinatorConfig(lease_ttl=30.0, cluster_secret="hush"))
    try:
        await services.registry.Register(registration(INSTANCE), None)
        stream = services.core.open_stream("a", 1, 0)
        stream.apply(SNAPSHOT, 0)
        stream.close()
        endpoints = _endpoints(services)
        for number, body in source.calls(MAX_CALLS):
            path = PATHS[number % len(PATHS)]
            await _call(path, endpoints[path], body)
            services.core.check()
    finally:
        await services.aclose()


async def _call(path: str, endpoint: Endpoint, body: bytes) -> None:
    request = _request(path, body)
    try:
        response = await endpoint(request)
    except Exception as error:
        if status_of(error) is None:
            raise
        response = await _refusal(request, error)
        assert response.status_code in STATUSES, response.body
        assert len(response.body) <= 2 * MAX_STATUS_BYTES, "an error that is not bounded"
    if isinstance(response, StreamingResponse):
        await _read(response.body_iterator)
    else:
        assert isinstance(json.loads(response.body), dict)
        assert len(response.body) <= 2 * MAX_MESSAGE_BYTES


async def _read(frames: Any) -> None:
    count = 0
    async for frame in frames:
        assert isinstance(json.loads(frame), dict)
        count += 1
        if count == MAX_FRAMES:
            break
    await frames.aclose()


def _request(path: str, body: bytes) -> Request:

    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    fields = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    return Request(fields | {"client": ("10.0.0.1", 1), "server": ("localhost", 80), "scheme": "http"}, receive)
