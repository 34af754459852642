"""The HTTP application of the webhook, which answers an AdmissionReview of Kubernetes.

Every pod is admitted, changed or not: an engine starts without a cache rather than not at all.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lmkv.errors import TooManyRequests
from lmkv.runtime import turns
from lmkv.runtime.memory_budget import Lease, of_process
from lmkv_server.http.guard import BodyTooLarge, caller_of, read_body
from lmkv_server.webhook.injection import Additions, Object, Operation, Refusal, inject, refuse

logger = logging.getLogger(__name__)

MAX_WARNING_CHARS = 250
"""Kubernetes shortens longer warnings."""


class InvalidReview(ValueError):
    """The request is no AdmissionReview of version v1."""


def review(body: object, additions: Mapping[str, Additions]) -> dict[str, Any]:
    """The response to a request. Raises `InvalidReview` if it cannot be answered."""
    if not isinstance(body, dict) or (body.get("apiVersion"), body.get("kind")) != (
        "admission.k8s.io/v1",
        "AdmissionReview",
    ):
        raise InvalidReview("the body must be an AdmissionReview of admission.k8s.io/v1")
    request = body.get("request")
    if not isinstance(request, dict) or not isinstance(request.get("uid"), str):
        raise InvalidReview("the AdmissionReview has no request with a uid")
    kind = request.get("kind")
    if not isinstance(kind, dict) or not isinstance(kind.get("kind"), str):
        raise InvalidReview("the AdmissionReview has no request with a kind")
    response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
    operations, warning = _change(request, additions)
    if operations:
        patch = base64.b64encode(msgspec.json.encode(operations)).decode()
        response |= {"patchType": "JSONPatch", "patch": patch}
    if warning:
        response["warnings"] = [f"lmkv is not used: {warning}"[:MAX_WARNING_CHARS]]
    return {"apiVersion": body["apiVersion"], "kind": body["kind"], "response": response}


def _change(request: Object, additions: Mapping[str, Additions]) -> tuple[list[Operation], str]:
    """Operations, and why the pod does not use lmkv; empty if it does."""
    pod = request.get("object")
    if request.get("operation") != "CREATE" or request["kind"]["kind"] != "Pod" or not isinstance(pod, dict):
        return [], ""
    metadata = pod.get("metadata")
    named = metadata if isinstance(metadata, dict) else {}
    name = f"{request.get('namespace', '')}/{named.get('name') or named.get('generateName', '')}"
    try:
        try:
            operations = inject(pod, additions)
        except Refusal as refusal:
            logger.warning("pod %s does not use lmkv: %s", name, refusal)
            return refuse(pod, str(refusal)), str(refusal)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        logger.exception("pod %s has a form that is not known", name)
        return [], "the pod has a form that is not known; the webhook's log has the details"
    logger.info("pod %s: %s", name, f"{len(operations)} changes" if operations else "no change")
    return operations, ""


PATH = "/mutate"
BODY_TIMEOUT_SECONDS = 10.0
MAX_BODY_BYTES = 4 << 20
"""More than two objects of the largest size that etcd stores, 1.5 MiB."""


def make_app(additions: Mapping[str, Additions]) -> Starlette:
    """The application of a webhook."""

    async def mutate(request: Request) -> Response:
        with Lease(of_process(), caller_of(request)) as lease:
            return await _mutate(request, lease)

    async def _mutate(request: Request, lease: Lease) -> Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
                body = await read_body(request, lease, MAX_BODY_BYTES)
            async with turns.of_loop().take(lease.caller, body.text_bytes):
                answer = review(msgspec.json.decode(body.text), additions)
        except BodyTooLarge as error:
            return _error(413, f"the body has {error}")
        except TimeoutError:
            return _error(408, f"the body was not complete within {BODY_TIMEOUT_SECONDS:g} s")
        except ClientDisconnect:
            return _error(400, "the connection closed during the body")
        except TooManyRequests as error:
            return _error(503, str(error), {"retry-after": "1"})
        except (InvalidReview, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, str(error))
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def alive(_: Request) -> Response:
        return Response(b'{"status":"ok"}', media_type="application/json")

    return Starlette(routes=[Route(PATH, mutate, methods=["POST"]), Route("/healthz", alive), Route("/readyz", alive)])


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode({"error": message}), status, headers, media_type="application/json")
