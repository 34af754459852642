"""The webhook over HTTPS: real AdmissionReviews to a running server. Every pod is admitted."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkv.config import WebhookConfig
from lmkv.errors import ConfigError
from lmkv_server.http.server import HttpOptions, HttpServer
from lmkv_server.webhook import app
from lmkv_server.webhook.app import MAX_BODY_BYTES, make_app
from lmkv_server.webhook.injection import read_additions
from tests.server.webhook.pods import HOST, KSERVE, Pod, patched, pod
from tests.support.certificates import Certificates, issue


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return issue(tmp_path / "tls")


@pytest.fixture
async def client(certificates: Certificates) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running webhook that verifies its certificate, as Kubernetes does."""
    server = HttpServer(
        make_app({"both": HOST}), HttpOptions(host="127.0.0.1", port=0, credentials=certificates.server)
    )
    await server.start()
    context = ssl.create_default_context(cafile=certificates.ca)
    try:
        async with httpx.AsyncClient(
            base_url=f"https://localhost:{server.port}", verify=context, timeout=60
        ) as connected:
            yield connected
    finally:
        await server.aclose()


def review_of(created: Any, *, operation: str = "CREATE", kind: str = "Pod") -> dict[str, Any]:
    """The request of Kubernetes for an object."""
    version = {"group": "", "version": "v1", "kind": kind}
    resource = {"group": "", "version": "v1", "resource": f"{kind.lower()}s"}
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "kind": version,
            "requestKind": version,
            "resource": resource,
            "requestResource": resource,
            "namespace": "models",
            "operation": operation,
            "userInfo": {"username": "system:serviceaccount:kube-system:replicaset-controller"},
            "object": created,
            "oldObject": None,
            "dryRun": False,
            "options": {"apiVersion": "meta.k8s.io/v1", "kind": "CreateOptions"},
        },
    }


async def answered(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    """The response of an answer, which must have the form that Kubernetes requires."""
    answer = await client.post("/mutate", params={"timeout": "5s"}, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    content = answer.json()
    assert content.keys() == {"apiVersion", "kind", "response"}
    assert (content["apiVersion"], content["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    response: dict[str, Any] = content["response"]
    assert response["uid"] == body["request"]["uid"]
    assert response["allowed"] is True
    assert ("patch" in response) == ("patchType" in response)
    assert response.get("patchType", "JSONPatch") == "JSONPatch"
    return response


def applied(created: Pod, response: dict[str, Any]) -> Pod:
    """The pod as Kubernetes changes it."""
    return patched(created, json.loads(base64.b64decode(response["patch"], validate=True)))


async def test_a_pod_is_changed_once(client: httpx.AsyncClient) -> None:
    response = await answered(client, review_of(KSERVE))
    assert "warnings" not in response
    changed = applied(KSERVE, response)
    assert "LMKVConnector" in changed["spec"]["containers"][0]["args"][-1]
    again = await answered(client, review_of(changed))
    assert again.keys() == {"uid", "allowed"}


async def test_a_pod_that_cannot_use_lmkv_is_admitted_with_the_reason(client: httpx.AsyncClient) -> None:
    created = pod({"name": "vllm", "image": "vllm:1", "command": ["sh", "-c", "vllm serve m"]})
    response = await answered(client, review_of(created))
    (warning,) = response["warnings"]
    assert warning.startswith("lmkv is not used: container vllm runs a shell")
    assert len(warning) <= 256, "Kubernetes shortens it"
    changed = applied(created, response)
    reason = changed["metadata"].pop("annotations")["lmkv/refused"]
    assert "--kv-transfer-config" in reason
    assert changed == created


@pytest.mark.parametrize(
    "body",
    [review_of(pod(), operation="UPDATE"), review_of({"metadata": {}}, kind="ConfigMap"), review_of(None)],
    ids=["update", "kind", "nothing"],
)
async def test_what_is_no_new_pod_is_admitted_unchanged(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    assert (await answered(client, body)).keys() == {"uid", "allowed"}


@pytest.mark.parametrize("spec", [{}, {"containers": [{}]}, {"containers": [None]}, None, "text"], ids=str)
async def test_a_pod_of_an_unknown_form_is_admitted_unchanged(client: httpx.AsyncClient, spec: Any) -> None:
    response = await answered(client, review_of({**pod(), "spec": spec}))
    assert response.keys() == {"uid", "allowed", "warnings"}
    (warning,) = response["warnings"]
    assert warning == ("lmkv is not used: the pod has a form that is not known; the webhook's log has the details")


@pytest.mark.parametrize("annotations", ["text", ["text"], 1], ids=str)
async def test_a_pod_that_cannot_be_marked_as_refused_is_admitted_unchanged(
    client: httpx.AsyncClient, annotations: Any
) -> None:
    metadata = {"labels": {"lmkv/inject": "no role"}, "annotations": annotations}
    response = await answered(client, review_of({**pod(), "metadata": metadata}))
    assert response.keys() == {"uid", "allowed", "warnings"}


KINDS: tuple[Any, ...] = (None, [], "Pod", {}, {"kind": 1}, {"kind": []})
"""Not the kinds of objects."""


def of_kind(kind: Any) -> bytes:
    body = review_of(pod())
    body["request"]["kind"] = kind
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "truncated"),
        (b"[]", 400, "must be an AdmissionReview of admission.k8s.io/v1"),
        (json.dumps({**review_of(pod()), "apiVersion": "admission.k8s.io/v1beta1"}).encode(), 400, "v1"),
        (b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}', 400, "no request with a uid"),
        (b" " * (MAX_BODY_BYTES + 1), 413, "the body has more than"),
        (b'{"apiVersion": "\xff"}', 400, "utf-8"),
        (b"[" * 100_000, 400, "recursion"),
        *((of_kind(kind), 400, "no request with a kind") for kind in KINDS),
    ],
)
async def test_a_request_that_is_no_review_is_an_error(
    client: httpx.AsyncClient, body: bytes, status: int, message: str
) -> None:
    answer = await client.post("/mutate", content=body)
    assert answer.status_code == status
    assert message.lower() in answer.json()["error"].lower(), "versions of msgspec differ in case"
    assert (await client.get("/healthz")).status_code == 200


async def test_a_body_that_arrives_too_slowly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "BODY_TIMEOUT_SECONDS", 0.1)

    async def parts() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.get_running_loop().create_future()

    transport = httpx.ASGITransport(make_app({}))
    async with httpx.AsyncClient(transport=transport, base_url="https://webhook") as client:
        answer = await client.post("/mutate", content=parts())
    assert (answer.status_code, answer.json()["error"]) == (408, "the body was not complete within 0.1 s")


async def test_only_https_is_served(client: httpx.AsyncClient) -> None:
    async with httpx.AsyncClient(timeout=60) as plain:
        with pytest.raises(httpx.RemoteProtocolError):
            await plain.get(f"http://localhost:{client.base_url.port}/healthz")


def test_a_file_of_additions_that_is_not_the_charts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pod_additions: cannot read .*: No such file"):
        read_additions(str(tmp_path / "none.yaml"))
    (tmp_path / "pods.yaml").write_text("both: {user: root}")
    with pytest.raises(ConfigError, match=r"is not what the chart renders: Expected `int`, got `str`"):
        read_additions(str(tmp_path / "pods.yaml"))


def test_a_webhook_without_a_certificate_or_additions_is_refused() -> None:
    with pytest.raises(ConfigError, match="pod_additions is missing: name the file that the chart renders"):
        WebhookConfig().check_complete()
    with pytest.raises(ConfigError, match="tls_cert is missing: Kubernetes calls webhooks over HTTPS only"):
        WebhookConfig(pod_additions="pods.yaml").check_complete()
